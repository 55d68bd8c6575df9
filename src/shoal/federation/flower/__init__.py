"""Flower's transport for a federation: the SuperLink, the site's node, and the same as a plain Flower app."""
