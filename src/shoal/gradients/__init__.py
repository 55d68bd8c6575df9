"""Gradients of many clients at once: parameters with a client axis, one vector per client."""

from shoal.gradients.layout import Layout
from shoal.gradients.network import network
from shoal.gradients.protocols import Network, RecordTape, Tape

__all__ = ["Layout", "Network", "RecordTape", "Tape", "network"]
