"""The mechanisms of each boundary: sampling, clips and noise."""
