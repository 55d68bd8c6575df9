"""Random streams: seeded for research, cryptographic in secure mode."""
