"""What noise on a sum costs under cyclic participation, which is public, where noise may be correlated."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Weighted(Protocol):
    """Noise on a weighted sum of the last rounds' sums (see `correlated`)."""

    def multiplier(self, t: int, total: int) -> float:
        """The noise multiplier of round t."""

    def coefficients(self) -> Array:
        """The coefficients 1, c_1, c_2, ... of the correlated noise."""

    def __hash__(self) -> int: ...


def reach(weights: Array, cycle: int, rounds: int) -> Array:
    """By how many clips a client moves a round's weighted sum, 0, 1, ... rounds after it first took part.

    It takes part every `cycle` rounds, or less often.
    """
    padded = np.zeros(-(-rounds // cycle) * cycle)
    padded[: min(len(weights), rounds)] = weights[:rounds]
    found: Array = padded.reshape(-1, cycle).cumsum(axis=0).ravel()[:rounds]
    return found


def price(noise: Weighted, t: int, total: int, cycle: int, again: bool = False, rounding: float = 0.0) -> float:
    """What round t costs: (reach / noise)^2 of one client, which over all rounds is the squared shift of a Gaussian.

    Clients start in different rounds, so at any time some have lost more than others. New rounds come in order, and
    each is charged the increase of the largest client's sum. A round that is run `again` is charged what it costs the
    client that it affects most. So no client loses more than was charged.
    `rounding`: by how many clips rounding may move a weighted sum beyond that, for each unit of noise.
    """
    first, once_more = _prices(noise, cycle, total, max(total, t + 1), rounding)
    return float((once_more if again else first)[t])


@lru_cache(maxsize=8)
def _prices(noise: Weighted, cycle: int, total: int, rounds: int, rounding: float) -> tuple[Array, Array]:
    scales = np.array([noise.multiplier(t, total) for t in range(rounds)])
    # A round without noise has no price: the ledger records that nothing is proven for it.
    weight = np.divide(1.0, scales**2, out=np.zeros(rounds), where=scales > 0)
    reached = reach(noise.coefficients(), cycle, rounds)
    dearest, hardest = np.zeros(rounds), np.zeros(rounds)
    for start in range(min(cycle, rounds)):
        moved = reached[: rounds - start]
        paid = (moved + (moved > 0) * rounding * scales[start:]) ** 2 * weight[start:]
        dearest[start:] = np.maximum(dearest[start:], np.cumsum(paid))
        hardest[start:] = np.maximum(hardest[start:], paid)
    return np.diff(dearest, prepend=0.0), hardest
