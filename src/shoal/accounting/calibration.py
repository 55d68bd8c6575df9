"""Calibration: the noise that spends a budget, and the rounds that a budget pays for.

Both search on the cost that an accountant reports, and return only what was checked not to overspend.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from shoal.accounting import accountants
from shoal.accounting.accountants import Answer
from shoal.accounting.events import NOTHING, Event
from shoal.accounting.theorems import Adjacency
from shoal.errors import ConfigError

_TIGHT = 2e-4  # relative gap between the noise returned and one that overspends
_MOST_NOISE = 1e9
_MOST_ROUNDS = 10**9


@dataclass(frozen=True)
class Budget:
    """What may be spent, and by which accountant."""

    epsilon: float
    delta: float
    accountant: str = "pld"
    adjacency: Adjacency = "add-or-remove"
    orders: str = "tf72"

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise ConfigError(f"the budget's epsilon must be > 0, got {self.epsilon:g}")

    def cost(self, event: Event, accountant: str | None = None) -> Answer:
        """What an event costs at the budget's delta."""
        who = accountant or self.accountant
        return accountants.epsilon(event, self.delta, who, self.adjacency, self.orders)


@dataclass(frozen=True)
class Calibrated:
    """The least noise, or the most rounds, that keep the budget, and what they cost."""

    value: float
    answer: Answer


def noise(event_at: Callable[[float], Event], budget: Budget) -> Calibrated:
    """The least noise whose event costs no more than the budget; `event_at` gives the event for a noise."""
    _require_bounded(event_at(1.0))
    low, high = _bracket(event_at, budget)
    while high.value / low.value > 1 + _TIGHT:
        middle = _between(low, high, budget.epsilon, 0.4 * _TIGHT)
        tried = Calibrated(middle, budget.cost(event_at(middle)))
        if _cost(tried) <= budget.epsilon:
            high = tried
        else:
            low = tried
    return high


def rounds(event_at: Callable[[int], Event], budget: Budget, most: int = _MOST_ROUNDS) -> Calibrated:
    """The most rounds that cost no more than the budget, up to `most`; `event_at` gives their event."""
    _require_bounded(event_at(1))
    low = Calibrated(0, budget.cost(NOTHING))
    high: Calibrated | None = None
    guess, growth = _guess_rounds(event_at, budget, most), 1.15
    while high is None or high.value - low.value > 1:
        tried = Calibrated(guess, budget.cost(event_at(guess)))
        if _cost(tried) <= budget.epsilon:
            if guess == most:
                return tried
            low = tried
        else:
            high = tried
        if high is None:
            guess, growth = min(most, max(guess + 1, math.ceil(guess * growth))), growth**2
        else:
            guess = min(max(int(_between(low, high, budget.epsilon)), int(low.value) + 1), int(high.value) - 1)
    return low


def _guess_rounds(event_at: Callable[[int], Event], budget: Budget, most: int) -> int:
    """A first guess, by doubling under the quick accountant where the budget's own is slow."""
    quick = "rdp" if budget.accountant == "pld" else budget.accountant
    low, high = 1, 1
    while high < most and _within(event_at, high, budget, quick):
        low, high = high, min(2 * high, most)
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if _within(event_at, middle, budget, quick) else (low, middle)
    return low


def _within(event_at: Callable[[int], Event], count: int, budget: Budget, accountant: str) -> bool:
    try:
        cost = budget.cost(event_at(count), accountant).epsilon
    except ConfigError:  # the quick accountant does not support this event: start from one round
        return False
    return cost is not None and cost <= budget.epsilon


def _bracket(event_at: Callable[[float], Event], budget: Budget) -> tuple[Calibrated, Calibrated]:
    """A noise that overspends and one that does not, a factor of 2 apart or less."""
    value = 1.0
    tried = Calibrated(value, budget.cost(event_at(value)))
    factor = 0.5 if _cost(tried) <= budget.epsilon else 2.0
    while True:
        value *= factor
        following = Calibrated(value, budget.cost(event_at(value)))
        if (_cost(following) <= budget.epsilon) != (factor == 0.5):
            return (following, tried) if factor == 0.5 else (tried, following)
        tried = following
        if not 1 / _MOST_NOISE < value < _MOST_NOISE:
            raise ConfigError(
                f"no noise between {1 / _MOST_NOISE:g} and {_MOST_NOISE:g} just spends epsilon "
                f"{budget.epsilon:g} at delta {budget.delta:g}; change the budget or the number of steps"
            )


def _require_bounded(event: Event) -> None:
    if (reason := accountants.unbounded(event)) is not None:
        raise ConfigError(f"no noise and no number of rounds keeps a budget: nothing is proven, because {reason}")


def _cost(tried: Calibrated) -> float:
    return math.inf if tried.answer.epsilon is None else tried.answer.epsilon


def _between(low: Calibrated, high: Calibrated, target: float, above: float = 0.0) -> float:
    """Where the cost, a power of noise or rounds, should meet the target, or `above` it by this share of the value:
    well inside the bracket."""
    span = math.log(max(high.value, 1e-9) / max(low.value, 1e-9)) if low.value else 0.0
    first, last = _cost(low), _cost(high)
    if span == 0.0 or not all(0 < cost < math.inf for cost in (first, last)) or first == last:
        return (low.value + high.value) / 2
    share = math.log(target / first) / math.log(last / first)
    return low.value * math.exp(span * min(max(share + above / span, 0.03), 0.97))
