"""Quantities that change over the rounds: sigma (004 section 5.3), the clip (000 Algorithm 6), m_t (001), lr.

A schedule is written as one word, in a config as on the command line:

    6                       constant
    linear:15:4.85          a + (b - a) t/T
    staircase:15:4.85:10    the same in n equal stairs: a + (b - a) floor(n t/T)/n
    exponential:15:4.85     b (a/b)^((T - t)/T)
    cyclic:15:2             a/2 (cos(pi mod(t, L)/L) + 1), L = ceil(T/n): n cosine cycles
    decay:4:0.01:0.5        max(a (1 - rate)^t, low): falls by a rate every round, never below `low`

t counts from 0 to T - 1, and T is the number of rounds that were planned: both are public, so is the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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


_SHAPES: dict[str, tuple[Callable[..., float], str]] = {
    "linear": (_linear, "linear:from:to"),
    "staircase": (_staircase, "staircase:from:to:stairs"),
    "exponential": (_exponential, "exponential:from:to"),
    "cyclic": (_cyclic, "cyclic:from:cycles"),
    "decay": (_decay, "decay:from:rate:low"),
}
_VALUES = ("from", "to", "low")  # those numbers of a schedule that are values of it


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
        return [self.value(t, total) for t in range(total)]

    def scaled(self, factor: float) -> Schedule:
        """The schedule whose every value is `factor` times this one's."""
        names = ["from"] if self.shape == "constant" else _SHAPES[self.shape][1].split(":")[1:]
        scaled = [
            number * factor if name in _VALUES else number for name, number in zip(names, self.numbers, strict=True)
        ]
        return Schedule(self.shape, tuple(scaled))

    def written(self) -> str | float:
        """As it stands in a config: `parse` reads it back to the last digit."""
        if self.shape == "constant":
            return self.numbers[0]
        return ":".join([self.shape, *(repr(number) for number in self.numbers)])


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
    if shape == "exponential" and min(numbers) <= 0:
        raise ConfigError(f"schedule '{text}': both ends of an exponential must be > 0")
    if shape in ("staircase", "cyclic") and numbers[-1] < 1:
        raise ConfigError(f"schedule '{text}': the last number counts stairs or cycles and must be >= 1")
    if shape == "decay" and not 0 <= numbers[1] < 1:
        raise ConfigError(f"schedule '{text}': the rate must be in [0, 1), got {numbers[1]:g}")
    return Schedule(shape, numbers)


def _number(word: str, text: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        forms = ", ".join(form for _, form in _SHAPES.values())
        raise ConfigError(f"'{text}' is neither a number nor a schedule; schedules are {forms}")
    return number
