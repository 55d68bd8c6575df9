"""Gradients of many clients at once: parameters with a client axis, one vector a client."""

from shoal.gradients.layout import Layout
from shoal.gradients.network import ExampleTape, Network, Tape, network

__all__ = ["ExampleTape", "Layout", "Network", "Tape", "network"]
