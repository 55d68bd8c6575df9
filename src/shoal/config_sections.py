"""The sections of a configuration that belong to no algorithm: data, budget, early stopping, federation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.errors import ConfigError


@dataclass(frozen=True)
class DataSection:
    """Which data, and how they are split over clients.

    Attributes:
        name: A built-in data set (`shoal data list`), a `.csv` or `.parquet` file, or a folder of arrays.
        partition: `column` keeps records with the owners that the data name; others deal them to simulated clients.
            `auto` is `column` where owners are named, `iid` for built-in data, and one client otherwise.
        clients: The public number of clients. Where the data name owners it is counted, and checked if it is set.
        shards: Shards of records with one label that each client gets (`partition=shards`).
        alpha: The concentration of `partition=dirichlet`; the smaller, the less alike clients are.
        fraction: The share of all records that each client draws for itself (`partition=sample`).
        records: Records of each client (`iid`, `shards`); they are repeated where there are too few.
        scale: `unit` maps features to 0..1, `standard` subtracts a public mean and divides by a public deviation,
            `raw` leaves them as they are.
        features: Public features of pictures that are computed before training: `hog`, `hog2`, `hog-sharp`,
            `hog-fourier` or `scattering`.
        label: The column that is predicted, in a table without a schema.
        client_column: The column that names the owner of each row, in a table without a schema.
        public_ownership: Declares that it is public to whom each record belongs.
        test_fraction: The share of a table that is held out for evaluation.
    """

    name: str = "digits"
    partition: Literal["auto", "iid", "shards", "dirichlet", "sample", "column"] = "auto"
    clients: int = 100
    shards: int = 2
    alpha: float = 0.5
    fraction: float = 0.1
    records: int | None = None
    scale: Literal["unit", "standard", "raw"] = "unit"
    features: str = "none"
    label: str = "label"
    client_column: str | None = None
    public_ownership: bool = False
    test_fraction: float = 0.2

    def __post_init__(self) -> None:
        for name in ("clients", "shards", "records"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"data.{name} must be >= 1, got {value}")
        if self.alpha <= 0:
            raise ConfigError(f"data.alpha must be > 0, got {self.alpha}")
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"data.fraction must be > 0 and at most 1, got {self.fraction}")
        if not 0 < self.test_fraction < 1:
            raise ConfigError(f"data.test_fraction must be in (0, 1), got {self.test_fraction}")


@dataclass(frozen=True)
class BudgetSection:
    """What the run may spend.

    Attributes:
        epsilon: The run stops before it would exceed this. Without one, nothing stops it.
        delta: The delta of all claims.
        unit: Whom the budget protects.
        observer: Against whom.
        calibrate: Set the noise so that all rounds together spend exactly the budget.
    """

    epsilon: float | None = None
    delta: float = 1e-5
    unit: Literal["client", "record", "user"] = "client"
    observer: Literal["release", "server", "client-process"] = "release"
    calibrate: bool = False

    def __post_init__(self) -> None:
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise ConfigError(f"budget.epsilon must be > 0 and finite, got {self.epsilon}")
        if not 0 < self.delta < 1:
            raise ConfigError(f"budget.delta must be in (0, 1), got {self.delta}")
        if self.calibrate and self.epsilon is None:
            raise ConfigError("budget.calibrate needs budget.epsilon: set the epsilon to spend")


@dataclass(frozen=True)
class StopSection:
    """Early stopping, by the headline figure on the held-out records; off by default.

    When to stop follows from released models and public records alone, but the claims still count every planned
    round: a bound for the rounds that were run would assume that their number was fixed before.

    Attributes:
        patience: Stop after this many evaluations without a better figure.
        min_improvement: A figure counts as better only if it is so by more than this.
        public: The held-out records are public, so that looking at them costs nobody privacy.
    """

    patience: int | None = None
    min_improvement: float = 0.0
    public: bool = False

    def __post_init__(self) -> None:
        if self.patience is not None and self.patience < 1:
            raise ConfigError(f"stop.patience must be >= 1, got {self.patience}")
        if not 0 <= self.min_improvement < math.inf:
            raise ConfigError(f"stop.min_improvement must be >= 0 and finite, got {self.min_improvement}")
        if self.patience is None and (self.public or self.min_improvement):
            raise ConfigError("stop.public and stop.min_improvement have no effect without stop.patience: set it")

    def reached(self, scores: Sequence[float | None], higher_is_better: bool) -> bool:
        """Were the last `patience` of these scores no better than the best before them? None is the worst."""
        if self.patience is None:
            return False
        worst = -math.inf
        values = [worst if score is None else score if higher_is_better else -score for score in scores]
        before, recent = values[: -self.patience], values[-self.patience :]
        return bool(before) and max(recent) <= max(before) + self.min_improvement


@dataclass(frozen=True)
class FederationSection:
    """How a real federation is run (`shoal serve`); a simulation ignores it. `data.clients` are its sites.

    Random numbers are those of secure mode, separate at every site.

    Attributes:
        deadline: Seconds after which a round continues without the sites that have not answered.
        min_sites_to_start: Sites that must have joined before the first round; all if not set.
        min_sites: Sites that must be connected before any later round.
        seeded: All random numbers follow from the run's seed, so the noise hides nothing: for tests only.
        aggregation: With `secure` the coordinator sees only the sum of a round.
        threshold: Sites that must answer, or there is no sum (secure); two thirds of the cohort plus one if not set.
        colluding: Sites that may tell the coordinator all they know (secure).
        max_failed_rounds: Rounds in a row without a sum after which the run stops (secure).
        neighbours: Sites with which each site shares secrets, in cohorts of more than 100; computed if not set.
        share_threshold: Neighbours that can replace a site that drops out; computed if not set.
        strikes: Invalid answers after which a site is excluded.
        max_update_norm: The largest norm of an update that the method does not clip.
        min_records: The fewest records that a site may have; public.
        max_records: The most records that a site may have; public.
        max_sites_per_user: The most sites that hold records of one user; all if not set, 1 if no user is at two.
        canaries: Canary clients at the coordinator, by which `shoal audit --federation` measures privacy; sites whose
            policy does not allow them refuse.
    """

    deadline: float = 60.0
    min_sites_to_start: int | None = None
    min_sites: int = 1
    seeded: bool = False
    aggregation: Literal["plain", "secure"] = "plain"
    threshold: int | None = None
    colluding: int = 1
    max_failed_rounds: int = 5
    neighbours: int | None = None
    share_threshold: int | None = None
    strikes: int = 3
    max_update_norm: float = 1e4
    min_records: int | None = None
    max_records: int | None = None
    max_sites_per_user: int | None = None
    canaries: int = 0

    def __post_init__(self) -> None:
        sites = (
            "max_sites_per_user",
            "min_sites_to_start",
            "min_sites",
            "min_records",
            "max_records",
            "threshold",
            "neighbours",
            "share_threshold",
        )
        for name in ("deadline", "strikes", "max_failed_rounds", "max_update_norm", *sites):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"federation.{name} must be > 0, got {value}")
        if self.canaries < 0 or self.canaries == 1:
            raise ConfigError(f"federation.canaries must be 0 or at least 2, got {self.canaries}")
        if self.colluding < 1:
            raise ConfigError(
                f"federation.colluding must be >= 1, got {self.colluding}: every site sees the models, and knows its "
                f"own share of the noise in them"
            )
        if (self.min_records is None) != (self.max_records is None):
            raise ConfigError(
                "federation.min_records and federation.max_records must be given together, or not at all"
            )
        if self.min_records and self.max_records and self.min_records > self.max_records:
            raise ConfigError(f"federation.min_records {self.min_records} is above max_records {self.max_records}")
