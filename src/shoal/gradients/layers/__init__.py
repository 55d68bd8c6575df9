"""Layers with parameters of each client's own, and the norm of each record's gradient: one file for each kind."""
