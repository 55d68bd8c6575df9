"""What an imperfect noise sampler costs.

If a mechanism is (epsilon, delta)-private, and the noise that is actually drawn is within a total-variation distance
d of its distribution, on each of two neighbours, then the release is (epsilon, delta + (1 + e^epsilon) d)-private.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_TRIES = 50


def taken(epsilon: float, distance: float) -> float:
    """The part of delta that covers the sampler's error."""
    return (1 + math.exp(min(epsilon, 700.0))) * distance if distance else 0.0


def epsilon_beside(epsilon_at: Callable[[float], float], delta: float, distance: float) -> float:
    """The epsilon at what is left of delta; infinite where the sampler's error takes all of it."""
    found = epsilon_at(delta)
    for _ in range(_TRIES):
        left = delta - taken(found, distance)
        if left == delta or math.isinf(found):
            return found
        if left <= 0:
            return math.inf
        again = epsilon_at(left)
        if again <= found:
            return found
        found = again
    return math.inf
