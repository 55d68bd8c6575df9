"""The record that defines an algorithm.

An algorithm is what it puts at each boundary that a value crosses (DESIGN: "values cross boundaries"), and
nothing else: the engine reads this record, and so do the accountant and the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from shoal.accounting.claims import Published
from shoal.errors import ConfigError
from shoal.privacy.adaclip import AdaClip
from shoal.privacy.clip import Clip, Clipping, MedianClip, NoisyClip, QuantileClip
from shoal.privacy.correlated import Correlated
from shoal.privacy.example_clip import ExampleClip, MaxClip, QuantileExampleClip
from shoal.privacy.noise import Gaussian, StepNoise
from shoal.privacy.sampling import MOST_STEPS, Clients, Examples
from shoal.privacy.schedules import LEAST, MOST, Schedule, parse, require_scale, require_scales, scale_in
from shoal.privacy.unbounded import Prune, RandomNoise, Select

PerUpdate = Clip | MedianClip | QuantileClip | NoisyClip | Prune | Select | RandomNoise
PerExample = ExampleClip | MaxClip | QuantileExampleClip | AdaClip
NO_CLAIM = "no privacy"


@dataclass(frozen=True)
class Setting:
    """The public facts about a federation that accounting needs.

    `rounds` are those that were planned. `multiplicity`: on how many clients one record may lie. `layers`: those of
    the model that have parameters. `sizes`: the different numbers of records that clients have, empty if unknown.
    `bounds`: they are only the least and the greatest, and any between may be there. `all_answer`: whoever is asked
    answers, which no real federation can promise. `simulated`: records were dealt to clients that do not exist.
    `parameters`: of the model, 0 where noise is taken for perfect. `secure`: it is that of secure mode.
    """

    clients: int
    rounds: int
    multiplicity: int = 1
    layers: int = 1
    sizes: tuple[int, ...] = ()
    all_answer: bool = True
    bounds: bool = False
    simulated: bool = False
    parameters: int = 0
    secure: bool = False


Recipe = Callable[["Algorithm", Setting, int, float], tuple[Published, ...]]
"""(algorithm, setting, rounds that were played, delta) -> what the paper's recipe gives."""


LEAST_STEP, MOST_STEP = 1e-18, 1e18
"""What a clipped gradient moves a model by is between these: lr x clip / batch, where float32 keeps its digits."""


@dataclass(frozen=True)
class Local:
    """How a client trains: SGD for `epochs` passes, or exactly `steps` steps where that is given."""

    epochs: int = 1
    steps: int | None = None
    lr: str | float = 0.1
    momentum: float = 0.0
    keep_momentum: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.epochs <= MOST_STEPS:
            raise ConfigError(f"local.epochs must be from 1 to {MOST_STEPS}, got {self.epochs}")
        if self.steps is not None and not 1 <= self.steps <= MOST_STEPS:
            raise ConfigError(f"local.steps must be from 1 to {MOST_STEPS}, got {self.steps}")
        require_scales("local.lr", self.lr, zero=True)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"local.momentum must be in [0, 1), got {self.momentum}")

    def rate(self, t: int, total: int) -> float:
        """The learning rate of round t, which may be 0."""
        return scale_in("local.lr", self.lr, t, total, zero=True)

    @property
    def remembers(self) -> bool:
        """Does a client keep something from the rounds in which it took part?"""
        return self.keep_momentum and self.momentum > 0


@dataclass(frozen=True)
class Aggregate:
    """Boundary `aggregate`: the mean of the updates, by client or weighted by each client's records."""

    weights: Literal["size", "equal"] = "equal"


@dataclass(frozen=True)
class Server:
    """What the server makes of the mean update, after the noise: free, for it looks at no data again.

    `momentum`: FedAvgM (Hsu et al. 2019), v <- momentum v + update, w <- w + lr v. `adaptivity` > 0: FedAdam
    (Reddi et al. 2021) with that tau. `average`: the model that is given out is the mean over the last such
    share of the rounds.
    """

    lr: float = 1.0
    momentum: float = 0.0
    adaptivity: float = 0.0
    average: float = 0.0

    def __post_init__(self) -> None:
        require_scale("server.lr", self.lr)
        for name in ("momentum", "average"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"server.{name} must be in [0, 1), got {getattr(self, name)}")
        if self.adaptivity and not LEAST <= self.adaptivity <= MOST:
            raise ConfigError(f"server.adaptivity must be >= 0 (at most {MOST:g}), got {self.adaptivity}")


@dataclass(frozen=True)
class Algorithm:
    """One method: its paper, what that claims, and what happens at each boundary.

    `published` gives the figures of the paper's own recipe for a setting: kept apart from what is proven.
    """

    name: str
    paper: str
    summary: str
    claims: str
    clients: Clients
    examples: Examples
    local: Local
    aggregate: Aggregate
    per_example: PerExample | None = None
    per_step: StepNoise | None = None
    per_update: PerUpdate | None = None
    per_round: Gaussian | None = None
    server: Server = field(default_factory=Server)
    published: Recipe | None = None

    def refuse_unfit(self, t: int, total: int, clients: int) -> None:
        """A ConfigError where round t could not be played: found before the first is."""
        expected = self.clients.expected(t, total, clients)
        self._refuse_unfit_steps(t, total)
        if isinstance(self.per_update, NoisyClip):
            noise = self.per_update.multiplier(t, total) * self.per_update.bound({}, t, total, None)
            _refuse_unheld_noise("per_update.noise x per_update.clip", noise, t, total)
        elif isinstance(self.per_update, Clip):
            self.per_update.bound({}, t, total, None)
        if self.per_round is None:
            return
        if not isinstance(self.per_update, Clipping):
            raise ConfigError(f"algorithm {self.name}: per_round adds noise in units of the clip, but nothing clips")
        noise = self.per_round.multiplier(t, total)
        if isinstance(self.per_update, Clip | QuantileClip):
            bound = self.per_update.bound({}, t, total, None)
            _refuse_unheld_noise("per_round.noise x the clip of per_update", noise * bound, t, total)
        if isinstance(self.per_round, Correlated):
            self._refuse_uncorrelated()
        if isinstance(self.per_update, QuantileClip):
            self.per_update.update_noise(noise, expected)

    def _refuse_uncorrelated(self) -> None:
        """What cannot be played, or gains nothing, where rounds share noise."""
        if self.clients.sampling not in ("cyclic", "all"):
            raise ConfigError(
                f"algorithm {self.name}: noise that rounds share gains nothing by {self.clients.sampling} sampling; "
                f"set clients.sampling to cyclic or all"
            )
        if isinstance(self.per_update, QuantileClip):
            raise ConfigError(f"algorithm {self.name}: noise that rounds share wants a clip that follows no counts")

    def refuse_unheld(self, bound: float, t: int, total: int) -> None:
        """A ConfigError where float32 could not hold what gradients of this bound do to a model in round t."""
        step = self.local.rate(t, total) * bound / self.examples.batch
        if step and not LEAST_STEP <= step <= MOST_STEP:
            raise ConfigError(
                f"local.lr x clip / examples.batch must be from {LEAST_STEP:g} to {MOST_STEP:g}, got {step:g} in "
                f"round {t + 1} of {total}: change local.lr or the clip of per_example"
            )
        noise = step * self.per_step.multiplier(t, total, self.examples.batch) if self.per_step else 0.0
        _refuse_unheld_noise("local.lr x per_step.noise x clip / examples.batch", noise, t, total)

    def _refuse_unfit_steps(self, t: int, total: int) -> None:
        self.local.rate(t, total)
        if isinstance(self.per_example, ExampleClip | QuantileExampleClip):
            self.refuse_unheld(self.per_example.bound({}, t, total), t, total)
        if self.per_step is None:
            return
        if self.per_example is None:
            raise ConfigError(f"algorithm {self.name}: per_step adds noise in units of the clip, but nothing clips")
        noise = self.per_step.multiplier(t, total, self.examples.batch)
        if isinstance(self.per_example, QuantileExampleClip):
            self.per_example.update_noise(noise, self.examples.batch)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """All that may change from round to round."""
        held = (self.per_example, self.per_step, self.per_update, self.per_round)
        found = [getattr(holder, name, None) for holder in held for name in ("clip", "noise")]
        return tuple(parse(text) for text in (self.clients.cohort, self.local.lr, *found) if text is not None)

    def different_rounds(self, total: int) -> range:
        """The first, where it stands for all; else all, as where each has a price of its own (correlated.price)."""
        priced = isinstance(self.per_round, Correlated) or self.clients.sampling == "cyclic"
        alike = not priced and all(schedule.shape == "constant" for schedule in self.schedules)
        return range(min(total, 1) if alike else total)

    def extreme_rounds(self, total: int) -> list[int]:
        """The few in which some schedule is least or greatest."""
        return sorted({t for schedule in self.schedules for t in schedule.extremes(total)})

    @property
    def claims_privacy(self) -> bool:
        return self.claims != NO_CLAIM

    @property
    def draws_noise(self) -> bool:
        """Does a round draw noise, which must never be drawn twice?"""
        if self.per_round is not None or self.per_step is not None:
            return True
        return isinstance(self.per_update, NoisyClip | RandomNoise | Select)


def _refuse_unheld_noise(key: str, noise: float, t: int, total: int) -> None:
    if noise and not LEAST <= noise <= MOST:
        raise ConfigError(
            f"{key} must be 0 or from {LEAST:g} to {MOST:g}, got {noise:g} in round {t + 1} of {total}: "
            f"float32 cannot hold such noise"
        )


BOUNDARIES = (
    "clients",
    "examples",
    "local",
    "per_example",
    "per_step",
    "per_update",
    "aggregate",
    "per_round",
    "server",
)
