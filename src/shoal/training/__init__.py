"""Training: local steps, rounds, checkpoints and budgets."""
