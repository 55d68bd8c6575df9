"""The dataclass that defines an algorithm.

An algorithm is its mechanism at each boundary that a value crosses, and nothing else: training, accounting and the
command line read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from shoal.accounting.claims import Published
from shoal.errors import ConfigError
from shoal.mechanisms.mechanism import (
    GradientClip,
    Mechanism,
    Round,
    RoundNoise,
    State,
    StepMechanism,
    UpdateMechanism,
    refuse_unheld_noise,
)
from shoal.mechanisms.sampling import MOST_STEPS, Clients, Records, participation
from shoal.mechanisms.schedules import LEAST, MOST, Schedule, parse, require_scale, require_scales, scale_in
from shoal.mechanisms.setting import Setting as Setting
from shoal.mechanisms.statements import Stating, refuse_inherited

NO_CLAIM = "no privacy"


Recipe = Callable[["Algorithm", Setting, int, float], tuple[Published, ...]]
"""(algorithm, setting, rounds that were run, delta) -> what the paper's recipe gives."""


BETAS = (0.9, 0.999)
LEAST_STEP, MOST_STEP = 1e-18, 1e18
"""The range of lr x clip / batch, the step of a clipped gradient, in which float32 is precise."""


@dataclass(frozen=True)
class Local(Stating):
    """How a client trains: `epochs` passes over its records, or exactly `steps` steps if set.

    All of it happens before an update is clipped, or after a step's noise, and costs no privacy, unless a client
    keeps something from round to round (`remembers`).

    Attributes:
        epochs: Passes over the client's records.
        steps: Steps, instead of passes.
        lr: The learning rate, or its schedule over the rounds.
        momentum: Momentum of SGD.
        keep_momentum: Whether a client keeps its optimiser's state for the next round in which it takes part.
        optimizer: SGD, or AdamW (Loshchilov & Hutter 2019) with `betas`.
        betas: How fast AdamW's means of gradients and of their squares forget.
        weight_decay: How strongly weights are pulled to 0, as in torch.optim: in SGD's gradient, apart in AdamW.
        proximal: mu of FedProx (Li et al. 2020): how strongly weights are pulled to the model of the round.
        max_grad_norm: Clips the gradient of a whole batch. It keeps training stable, and protects nobody.
        personal: Layers that never leave a client (Arivazhagan et al. 2019): how many of the last ones, or names such
            as `head`, with all that is in them.
    """

    epochs: int = 1
    steps: int | None = None
    lr: str | float = 0.1
    momentum: float = 0.0
    keep_momentum: bool = False
    optimizer: Literal["sgd", "adamw"] = "sgd"
    betas: tuple[float, float] = BETAS
    weight_decay: float = 0.0
    proximal: float = 0.0
    max_grad_norm: float | None = None
    personal: int | str | tuple[str, ...] = 0

    def __post_init__(self) -> None:
        if not 1 <= self.epochs <= MOST_STEPS:
            raise ConfigError(f"local.epochs must be from 1 to {MOST_STEPS}, got {self.epochs}")
        if self.steps is not None and not 1 <= self.steps <= MOST_STEPS:
            raise ConfigError(f"local.steps must be from 1 to {MOST_STEPS}, got {self.steps}")
        require_scales("local.lr", self.lr, zero=True)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"local.momentum must be in [0, 1), got {self.momentum}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"local.betas must be two numbers in [0, 1), got {list(self.betas)}")
        for name in ("weight_decay", "proximal"):
            require_scale(f"local.{name}", getattr(self, name), zero=True)
        if self.max_grad_norm is not None:
            require_scale("local.max_grad_norm", self.max_grad_norm)
        names = (self.personal,) if isinstance(self.personal, str | int) else self.personal
        if "" in names or (isinstance(self.personal, int) and self.personal < 0):  # "" would pass for no layer
            raise ConfigError(f"local.personal must be >= 0, or names of layers, got {self.personal!r}")
        self._refuse_ineffective()

    def _refuse_ineffective(self) -> None:
        if self.optimizer == "adamw" and self.momentum:
            raise ConfigError(
                f"local.momentum {self.momentum} has no effect with AdamW: set local.betas, or leave it out"
            )
        if self.optimizer != "adamw" and self.betas != BETAS:
            raise ConfigError(
                f"local.betas {list(self.betas)} have no effect with SGD: set local.optimizer=adamw, or omit them"
            )

    def rate(self, t: int, total: int) -> float:
        """The learning rate of round t, which may be 0."""
        return scale_in("local.lr", self.lr, t, total, zero=True)

    @property
    def remembers(self) -> bool:
        """Does a client keep state from the rounds in which it took part?"""
        return bool(self.personal) or (self.keep_momentum and self.accumulates)

    @property
    def accumulates(self) -> bool:
        """Does the optimiser carry state from step to step, into which gradients are added first?"""
        return self.momentum > 0 or self.optimizer == "adamw"


@dataclass(frozen=True)
class Aggregate(Stating):
    """Boundary `aggregate`: the mean of the updates, by client or weighted by each client's records.

    Attributes:
        weights: `equal` gives each client the same weight, `size` its number of records, which no clip bounds.
    """

    weights: Literal["size", "equal"] = "equal"

    @property
    def unproven(self) -> str | None:
        """Why noise on the sum proves nothing; None where it does."""
        return "updates are weighted by the clients' own sizes, which no clip bounds" if self.by_size else None

    @property
    def by_size(self) -> bool:
        """Is it weighted by each client's records?"""
        return self.weights == "size"

    def assumes(self) -> tuple[str, ...]:
        """What it divides by."""
        return ("sums are divided by the expected size of a cohort, which is public",) if not self.by_size else ()


@dataclass(frozen=True)
class Server(Stating):
    """What the server does with the mean update, after the noise: post-processing, which costs no privacy.

    Attributes:
        lr: The server's learning rate.
        momentum: Momentum of FedAvgM (Hsu et al. 2019): v <- momentum v + update, w <- w + lr v.
        adaptivity: tau of FedAdam (Reddi et al. 2021), which is used where this is above 0.
        average: The released model is the mean over this last share of the rounds.
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
    """One method: its paper, what the paper claims, and what happens at each boundary.

    `published` gives the figures of the paper's own recipe for a setting, separate from what is proven.
    """

    name: str
    paper: str
    summary: str
    claims: str
    clients: Clients
    records: Records
    local: Local
    aggregate: Aggregate
    per_record: GradientClip | None = None
    per_step: StepMechanism | None = None
    per_update: UpdateMechanism | None = None
    per_round: RoundNoise | None = None
    server: Server = field(default_factory=Server)
    published: Recipe | None = None

    def __post_init__(self) -> None:
        for part in (self.clients, self.records, *self.mechanisms):
            refuse_inherited(type(part), vars(part))

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The clips and noises, in the order in which a value meets them."""
        chosen = (self.per_record, self.per_step, self.per_update, self.per_round)
        return tuple(mechanism for mechanism in chosen if mechanism is not None)

    def with_mechanisms(self, change: Callable[[Mechanism], Mechanism]) -> Algorithm:
        """The same with each of them changed."""
        sections = {mechanism.section: change(mechanism) for mechanism in self.mechanisms}
        return replace(self, **sections)  # type: ignore[arg-type]

    def round(self, setting: Setting, t: int, again: bool = False, history: tuple[int, ...] | None = None) -> Round:
        """Round t, as its mechanisms are asked about it; `history`: for a client that took part in these rounds."""
        local = self.local
        return Round(
            setting, t, again, self.clients, self.records, local.steps, local.epochs, local.remembers,
            self.aggregate.by_size, self.per_record, self.per_step, self.per_update, self.per_round, history,
        )  # fmt: skip

    @property
    def sums_gradients(self) -> bool:
        """Is an update the sum of one step's clipped gradients?"""
        return self.per_update is not None and self.per_update.sums_gradients

    def bound(self, state: State, t: int, total: int, norms: Tensor | None = None) -> float:
        """What noise on the sum is in units of: an update's clip or, in a sum of gradients, what one record adds.

        Args:
            state: What is carried from round to round.
            t: The round.
            total: The planned number of rounds.
            norms: The norms of the cohort's updates, where the clip needs them.
        """
        if self.per_update is None:
            return math.inf
        if not self.sums_gradients:
            return self.per_update.bound(state, t, total, norms)
        clip = self.per_record.public_bound(state, t, total) if self.per_record is not None else None
        return math.inf if clip is None else self.local.rate(t, total) * clip / self.records.batch

    def public_bound(self, t: int, total: int) -> float | None:
        """The same where it is known before the first round; None where it depends on the data."""
        if self.per_update is not None and self.per_update.needs_cohort_norms:
            return None
        return self.bound({}, t, total)

    def settled(self, rounds: int, clients: int) -> Algorithm:
        """The same with all that its noise computes at the start written out, for these rounds and clients."""
        if self.per_round is None:
            return self
        return replace(self, per_round=self.per_round.settled(participation(self.clients, rounds, clients)))

    def refuse_unfit(self, t: int, total: int, clients: int) -> None:
        """Raise a ConfigError where round t could not be run; checked before the first round."""
        expected = self.clients.expected(t, total, clients)
        self._refuse_unfit_steps(t, total)
        for mechanism in self.mechanisms:
            mechanism.refuse_unfit(t, total)
        if self.sums_gradients:
            self._refuse_unfit_sum(t, total)
        if self.per_round is None:
            return
        bound = self.public_bound(t, total)
        if self.per_update is None or bound == math.inf:
            raise ConfigError(f"algorithm {self.name}: per_round adds noise in units of the clip, but nothing clips")
        noise = self.per_round.multiplier(t, total)
        if bound is not None:
            refuse_unheld_noise("per_round.noise_multiplier x the clip of per_update", noise * bound, t, total)
        if self.sums_gradients != self.per_round.for_records:
            raise ConfigError(f"algorithm {self.name}: per_update GradientSum and per_round NoiseShares go together")
        self.per_round.refuse_beside(self.name, self.clients, self.per_update)
        self.per_round.refuse_cohort(cohort := math.ceil(expected))
        if self.per_round.share(1.0, cohort, t, total) is not None:
            if self.per_update.counts:
                raise ConfigError(f"algorithm {self.name}: shares of noise cover no count: per_update must not count")
            if self.per_round.at != "shared":  # in a federation the server would add other noise
                raise ConfigError(f"algorithm {self.name}: per_round adds shares of noise: set per_round.at=shared")
        self.per_update.update_noise(noise, expected)

    def refuse_unheld(self, bound: float, t: int, total: int) -> None:
        """Raise a ConfigError where the steps of gradients with this bound are out of float32's range in round t."""
        steps = {"local.lr x ": self.local.rate(t, total) * bound / self.records.batch}
        if self.local.accumulates:  # noise is first added to a gradient, whatever the learning rate
            steps[""] = bound / self.records.batch
        for key, step in steps.items():
            if step and not LEAST_STEP <= step <= MOST_STEP:
                raise ConfigError(
                    f"{key}clip / records.batch must be from {LEAST_STEP:g} to {MOST_STEP:g}, got {step:g} in "
                    f"round {t + 1} of {total}: change {key and 'local.lr or '}the clip of per_record"
                )
            noise = step * self.per_step.multiplier(t, total, self.records.batch) if self.per_step else 0.0
            refuse_unheld_noise(f"{key}per_step.noise_multiplier x clip / records.batch", noise, t, total)

    def _refuse_unfit_sum(self, t: int, total: int) -> None:
        """Raise a ConfigError where an update is not the sum of one step's gradients, each with a public bound."""
        if self.local != Local(self.local.epochs, steps=1, lr=self.local.lr) or self.per_step is not None:
            raise ConfigError(
                f"algorithm {self.name}: a round is one step on the sum of all sites' gradients: set local.steps=1, "
                f"and leave out the other keys of local, and per_step; momentum is server.momentum"
            )
        clip = self.per_record
        if clip is None or clip.public_bound({}, t, total) is None or clip.counts or clip.excess(2) != 1:
            raise ConfigError(
                f"algorithm {self.name}: per_record must clip the whole gradient of each record to a public bound: "
                f"RecordClip with per_record.layers=flat or split"
            )
        if self.per_round is not None and self.records.sampling != "poisson":
            raise ConfigError(f"algorithm {self.name}: records.sampling must be poisson, got {self.records.sampling}")
        if self.records.max_per_user is not None:
            raise ConfigError(
                f"algorithm {self.name}: with records.max_per_user a record, by whose it is, decides which others "
                f"are used, and the noise is for one record: leave it out"
            )

    def _refuse_unfit_steps(self, t: int, total: int) -> None:
        self.local.rate(t, total)
        if self.per_record is not None and self.local.max_grad_norm is not None:
            raise ConfigError(
                f"local.max_grad_norm {self.local.max_grad_norm:g} has no use beside per_record, which clips the "
                f"gradient of every record: leave it out"
            )
        if self.per_record is not None and (bound := self.per_record.public_bound({}, t, total)) is not None:
            self.refuse_unheld(bound, t, total)
        if self.per_step is None:
            return
        if self.per_record is None:
            raise ConfigError(f"algorithm {self.name}: per_step adds noise in units of the clip, but nothing clips")
        batch = self.records.batch
        self.per_record.update_noise(self.per_step.multiplier(t, total, batch), batch)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """All that may change from round to round."""
        found = [schedule for mechanism in self.mechanisms for schedule in mechanism.schedules()]
        return (parse(self.clients.cohort), parse(self.local.lr), *found)

    @property
    def alike(self) -> bool:
        """Do rounds with equal schedules cost the same?"""
        noisy = (self.per_step, self.per_update, self.per_round)
        return self.clients.alike and all(each is None or each.alike for each in noisy)

    def different_rounds(self, total: int) -> range:
        """The first round, where all are alike; else all, as where each has its own price (participation.price)."""
        constant = all(schedule.shape == "constant" for schedule in self.schedules)
        alike = self.alike and not self.priced and constant
        return range(min(total, 1) if alike else total)

    def extreme_rounds(self, total: int) -> list[int]:
        """The few rounds in which some schedule is smallest or largest."""
        return sorted({t for schedule in self.schedules for t in schedule.extremes(total)})

    @property
    def priced(self) -> bool:
        """Do rounds cost what earlier participations of a client make of them, which is public?"""
        return self.clients.separated or (self.per_round is not None and self.per_round.correlated)

    @property
    def claims_privacy(self) -> bool:
        """True where the paper claims privacy."""
        return self.claims != NO_CLAIM

    @property
    def draws_noise(self) -> bool:
        """Does a round draw noise, which must never be drawn twice?"""
        noisy = self.per_round is not None or self.per_step is not None
        return noisy or (self.per_update is not None and self.per_update.draws_noise)


BOUNDARIES = (
    "clients",
    "records",
    "local",
    "per_record",
    "per_step",
    "per_update",
    "aggregate",
    "per_round",
    "server",
)
