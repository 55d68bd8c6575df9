"""A tape of gradients that were made up."""

from torch import Tensor

from shoal.gradients import Layout
from shoal.gradients.tapes import GradientTape


def tape_of(layout: Layout, gradients: Tensor) -> GradientTape:
    """The tape of every record's gradient, [K, B, P]."""
    parts = [(entry, gradients[..., entry.start : entry.stop]) for entry in layout.entries]
    return GradientTape(layout, parts, gradients.new_zeros(gradients.shape[:2]))
