"""What an imperfect sampler of noise costs.

Where the noise of a mechanism that is (epsilon, delta)-private has its law but for a distance d (total variation), on
each of two neighbours, what is released with it is (epsilon, delta + (1 + e^epsilon) d)-private.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_TRIES = 50


def taken(epsilon: float, distance: float) -> float:
    """The part of delta that is the sampler's."""
    return (1 + math.exp(min(epsilon, 700.0))) * distance if distance else 0.0


def epsilon_beside(epsilon_at: Callable[[float], float], delta: float, distance: float) -> float:
    """The epsilon at what is left of delta; infinite where the sampler takes all of it."""
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
