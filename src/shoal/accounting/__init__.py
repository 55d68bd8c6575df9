"""What a run costs in privacy, against whom, and whether that is proven or only published."""
