"""Many runs over a grid of settings, and what choosing among them costs in privacy."""
