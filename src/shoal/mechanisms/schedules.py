"""Quantities that change over the rounds: sigma (Wei et al. 2023, section 5.3), the clip
(Thesis, Algorithm 6), m_t (Geyer et al. 2017), lr.

A schedule is written as one word, in a config as on the command line:

    6                       constant
    linear:15:4.85          a + (b - a) t/T
    staircase:15:4.85:10    the same in n equal stairs: a + (b - a) floor(n t/T)/n
    exponential:15:4.85     b (a/b)^((T - t)/T)
    cyclic:15:2             a/2 (cos(pi mod(t, L)/L) + 1), L = ceil(T/n): n cosine cycles
    decay:4:0.01:0.5        max(a (1 - rate)^t, low): falls by a rate every round, never below `low`

In Tables 8 and 11 of Wei et al. (2023) the epsilon of a step rises; sigma does not fall as printed. With d the
delta of a step,

    epsilon-linear:0.30747:1.30747:1e-5         sqrt(2 ln(1.25/d)) / epsilon_t, where epsilon_t is linear,
    epsilon-staircase:0.35747:1.35747:10:1e-5   a staircase or exponential as above; these numbers are the paper's,
    epsilon-exponential:0.30700:1.62109:1e-5    e^(1.664 t/T - 1.1809) for the last

t counts from 0 to T - 1, and T is the planned number of rounds: both are public, and so is the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from shoal.errors import ConfigError, nearest


def _linear(u: float, t: int, total: int, a: float, b: float) -> float:
    return a + (b - a) * u


def _staircase(u: float, t: int, total: int, a: float, b: float, stairs: float) -> float:
    return a + (b - a) * math.floor(stairs * t / total) / stairs


def _exponential(u: float, t: int, total: int, a: float, b: float) -> float:
    return float(b * (a / b) ** (1 - u))


def _cyclic(u: float, t: int, total: int, a: float, cycles: float) -> float:
    length = math.ceil(total / cycles)
    return a / 2 * (math.cos(math.pi * (t % length) / length) + 1)


def _decay(u: float, t: int, total: int, a: float, rate: float, low: float) -> float:
    return max(a * (1 - rate) ** t, low)


def _of_epsilon(shape: Callable[..., float]) -> Callable[..., float]:
    """The noise of an epsilon that follows a shape; the last number is delta."""
    return lambda *numbers: math.sqrt(2 * math.log(1.25 / numbers[-1])) / shape(*numbers[:-1])


LEAST, MOST = 1e-30, 1e30  # the range of a setting, if it is not 0
LEAST_SCALE, MOST_SCALE = 1e-12, 1e12
"""The range of a clip or a learning rate: float32 then represents clipped values and noise in full precision."""

_SHAPES: dict[str, tuple[Callable[..., float], str]] = {
    "linear": (_linear, "linear:from:to"),
    "staircase": (_staircase, "staircase:from:to:stairs"),
    "exponential": (_exponential, "exponential:from:to"),
    "cyclic": (_cyclic, "cyclic:from:cycles"),
    "decay": (_decay, "decay:from:rate:low"),
    "epsilon-linear": (_of_epsilon(_linear), "epsilon-linear:first:last:delta"),
    "epsilon-staircase": (_of_epsilon(_staircase), "epsilon-staircase:first:last:stairs:delta"),
    "epsilon-exponential": (_of_epsilon(_exponential), "epsilon-exponential:first:last:delta"),
}
_POWERS = {"from": 1, "to": 1, "low": 1, "first": -1, "last": -1}  # how a schedule's value scales with its numbers


@dataclass(frozen=True)
class Schedule:
    """A value for each round, known before the first."""

    shape: str
    numbers: tuple[float, ...]

    def value(self, t: int, total: int) -> float:
        """The value in round t (counted from 0) of `total` planned rounds."""
        if self.shape == "constant":
            return self.numbers[0]
        function = _SHAPES[self.shape][0]
        return function(t / max(total, 1), t, max(total, 1), *self.numbers)

    def values(self, total: int) -> list[float]:
        """The values of all `total` planned rounds."""
        return [self.value(t, total) for t in range(total)]

    def extremes(self, total: int) -> tuple[int, ...]:
        """Rounds in which it is smallest and largest: a shape is monotone, a cosine within a cycle."""
        if self.shape == "constant":
            return (0,)
        last = math.ceil(total / self.numbers[1]) if self.shape == "cyclic" else total
        return (0, max(last, 1) - 1)

    def scaled(self, factor: float) -> Schedule:
        """The schedule whose every value is `factor` times this one's."""
        names = ["from"] if self.shape == "constant" else _SHAPES[self.shape][1].split(":")[1:]
        powers = [_POWERS.get(name, 0) for name in names]
        scaled = (number * factor**power for number, power in zip(self.numbers, powers, strict=True))
        return Schedule(self.shape, tuple(scaled))

    def written(self) -> str | float:
        """As a config writes it: `parse` reads it back exactly."""
        if self.shape == "constant":
            return self.numbers[0]
        return ":".join([self.shape, *(repr(number) for number in self.numbers)])


NO_NOISE = Schedule("constant", (0.0,))


@lru_cache(maxsize=256, typed=True)  # every round parses several
def parse(text: str | float | int | Schedule) -> Schedule:
    """The schedule that a number or a word such as `linear:15:4.85` stands for."""
    if isinstance(text, Schedule):
        return text
    shape, *rest = str(text).split(":")
    if not rest:
        return Schedule("constant", (_number(shape, str(text)),))
    if shape not in _SHAPES:
        raise ConfigError(f"no schedule is called '{shape}' (in '{text}'){nearest(shape, _SHAPES)}")
    form = _SHAPES[shape][1]
    count = form.count(":")
    if len(rest) != count:
        raise ConfigError(f"schedule '{text}' has {len(rest)} numbers, {count} are needed: {form}")
    numbers = tuple(_number(word, str(text)) for word in rest)
    _refuse_numbers(shape, numbers, text)
    return Schedule(shape, numbers)


def is_schedule(value: object) -> bool:
    """Is it a word such as `linear:15:4.85`?"""
    return isinstance(value, str) and value.partition(":")[0] in _SHAPES


def _refuse_numbers(shape: str, numbers: tuple[float, ...], text: object) -> None:
    named = dict(zip(_SHAPES[shape][1].split(":")[1:], numbers, strict=True))
    if shape == "exponential" and min(numbers) <= 0:
        raise ConfigError(f"schedule '{text}': both ends of an exponential must be > 0")
    if named.get("stairs", named.get("cycles", 1)) < 1:
        raise ConfigError(f"schedule '{text}': stairs or cycles are counted and must be >= 1")
    if shape == "decay" and not 0 <= named["rate"] < 1:
        raise ConfigError(f"schedule '{text}': the rate must be in [0, 1), got {named['rate']:g}")
    if shape.startswith("epsilon-") and not (min(named["first"], named["last"]) > 0 and 0 < named["delta"] < 1):
        raise ConfigError(f"schedule '{text}': both epsilons must be > 0, and delta in (0, 1)")


def _number(word: str, text: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        forms = ", ".join(form for _, form in _SHAPES.values())
        raise ConfigError(f"'{text}' is neither a number nor a schedule; schedules are {forms}")
    if number and not LEAST <= abs(number) <= MOST:
        raise ConfigError(f"'{text}': {number:g} is out of range; use 0, or a number from {LEAST:g} to {MOST:g}")
    return number


def require_scale(key: str, value: float, written: object = None, zero: bool = False) -> float:
    """Check a clip or a learning rate; raise a ConfigError where float32 could not represent the results."""
    if not (LEAST_SCALE <= value <= MOST_SCALE or (zero and value == 0)):
        wanted = f"{'>= 0 (0, or ' if zero else '> 0 ('}from {LEAST_SCALE:g} to {MOST_SCALE:g})"
        raise ConfigError(f"{key} must be {wanted}, got {value if written is None else written}")
    return value


def require_scales(key: str, schedule: str | float, zero: bool = False) -> None:
    """Check a schedule over 100 rounds; once the number of rounds is known, each is checked (`scale_in`)."""
    for value in parse(schedule).values(100):
        require_scale(key, value, schedule, zero)


def scale_in(key: str, schedule: str | float, t: int, total: int, zero: bool = False) -> float:
    """A clip or a learning rate in round t, checked."""
    value = parse(schedule).value(t, total)
    return require_scale(key, value, f"{schedule}, which is {value:g} in round {t + 1} of {total}", zero)
