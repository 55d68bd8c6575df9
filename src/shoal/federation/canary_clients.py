"""Canary clients at the coordinator: they take part in rounds as sites do, on nobody's data (Andrew et al. 2023).

They are drawn at the sites' rate, clipped by the method's own code, and added to the sum before the noise. They have
no place among the sites: K, the expected cohort and every denominator stay those of the sites, and so do the claims,
because what is added depends on nobody's records. Sites learn of them from the terms (`federation.canaries`), and
refuse them unless their policy allows canaries.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.algorithms.base import Algorithm
from shoal.errors import ConfigError
from shoal.training import canaries
from shoal.training.cohort import Cohort, Sum
from shoal.training.round import Updates, protected_updates
from shoal.training.round_index import RoundIndex


def refuse_unfit(algorithm: Algorithm, count: int) -> None:
    """Raise a ConfigError where canary clients would not take part as sites do."""
    per_update, per_round, clients = algorithm.per_update, algorithm.per_round, algorithm.clients
    clipped = per_update is not None and not per_update.needs_cohort_norms and not algorithm.aggregate.by_size
    noisy = per_round is not None and per_round.at != "shared"
    if count and not (clipped and noisy and not clients.separated and clients.alike):
        raise ConfigError(
            f"federation.canaries {count}: {algorithm.name} has no place for canary clients, which need updates that "
            f"are clipped one by one, noise that the coordinator adds, and clients.sampling all, poisson, fixed-size "
            f"or one whose rounds are `alike`; leave it out"
        )


class CanaryClients:
    """The canaries of one run."""

    def __init__(self, cohort: Cohort, run: Path, count: int) -> None:
        self._cohort, self._run = cohort, run
        self._canaries = canaries.begin(run, cohort.streams.number("canaries"), count, cohort.layout.size)

    def note(self, params: Tensor, index: RoundIndex) -> None:
        """Note the model from which a round starts."""
        algorithm, when = self._cohort.algorithm, (index.t, index.total)
        assert algorithm.per_round is not None
        assert algorithm.per_update is not None
        expected = algorithm.clients.expected(*when, self._cohort.population.clients)
        noise = algorithm.per_update.update_noise(algorithm.per_round.multiplier(*when), expected)
        canaries.note(self._run, self._canaries, index.t, params, self._rate(index), noise)

    def take_part(self, total: Sum, index: RoundIndex) -> None:
        """Add the updates of those that are drawn to the sum; nothing else of it changes."""
        drawn = set(self._canaries.drawn(index.t, index.attempt, self._rate(index)).tolist())
        sites = self._cohort.population.clients
        for number, direction in enumerate(self._canaries.directions() if drawn else ()):
            if number in drawn:
                update = (direction * total.clip_norm).to(total.update.device)[None]
                norm = torch.linalg.vector_norm(update, dim=1)
                own = Updates(np.array([sites + number]), update, norm)  # streams of its own
                total.update += protected_updates(self._cohort, own, total.clip_norm, index)[0]

    def _rate(self, index: RoundIndex) -> float:
        return self._cohort.algorithm.clients.rate(index.t, index.total, self._cohort.population.clients)
