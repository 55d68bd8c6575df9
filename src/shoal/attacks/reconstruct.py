"""The one search that every attack is: a recipe against many victims at once.

A victim leaves the batch when its gradient is explained, or when its search leads nowhere and no restart is left.
Of all points that were ever tried the one with the least loss is given back: the attacker's own choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.attacks.arithmetic import exact
from shoal.attacks.lbfgs import Lbfgs
from shoal.attacks.objective import Objective
from shoal.attacks.signed_adam import SignedAdam
from shoal.attacks.starts import start
from shoal.random.streams import Streams

UNEXPLAINED = 1e-4  # with more left than this, another start is worth trying
LEAST_GAIN = 0.95  # of the loss, over a recipe's patience

Watch = Callable[[int, Tensor, Tensor], None]
"""(iteration, which victims, their best records): called as the search goes on."""


@dataclass(frozen=True, eq=False)
class Found:
    """What the attack got for every victim."""

    x: Tensor  # [V, B, ...], inside [0, 1]
    labels: Tensor  # [V, B]
    left: Tensor  # [V]: |shown - seen|^2/|seen|^2, or 1 - cosine, at the point given back
    iterations: Tensor  # [V]
    restarts: Tensor  # [V]
    diverged: Tensor  # [V]: the last search ended at numbers that are not finite


class Searcher(Protocol):
    """An optimiser over rows: points to try, then their values and slopes."""

    ended: Tensor

    @property
    def trial(self) -> Tensor:
        """The points to evaluate next."""

    def take(self, value: Tensor, slope: Tensor) -> None:
        """Step from the values and slopes at the trial points."""

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but these."""

    def put(self, rows: Tensor, other: Any) -> None:
        """Replace these rows."""


def reconstruct(
    objective: Objective, streams: Streams, watch: Watch | None = None, start: Tensor | None = None
) -> Found:
    """Run the objective's recipe on all its victims, from these rows [V, pixels] where they are given."""
    with exact():
        return _Search(objective, streams, start).run(watch)


class _Search:
    """The victims that are still searched for, and the best that was found for each."""

    def __init__(self, objective: Objective, streams: Streams, start: Tensor | None = None) -> None:
        self._objective, self._recipe, self._streams = objective, objective.recipe, streams
        count, device = len(objective.seen), objective.seen.device
        self._restarts = torch.zeros(count, dtype=torch.int64, device=device)
        self._victims = torch.arange(count, device=device)
        self._best = self._starts(self._victims) if start is None else start.to(objective.seen)
        self._attempt = self._restarts.clone()  # the one in which the best was found
        self._searcher = self._search_from(self._best.clone())
        infinite = torch.full((count,), torch.inf, device=device)
        self._value, self._left = infinite, infinite.clone()
        self._own, self._mark = infinite.clone(), infinite.clone()  # of the present search alone
        self._since = torch.zeros_like(self._restarts)
        self._iterations = torch.zeros_like(self._restarts)
        self._diverged = torch.zeros(count, dtype=torch.bool, device=device)

    def run(self, watch: Watch | None) -> Found:
        counted, most = self._recipe.counted, self._recipe.iterations
        for done in range(0, most, counted):
            iteration = min(done + counted, most)
            for _ in range(self._recipe.inner * (iteration - done) // counted):
                self._evaluate()
            self._iterations[self._victims] = iteration
            if watch is not None:
                watch(iteration, self._victims, self._examples(self._best[self._victims]))
            self._let_go()
            if len(self._victims) == 0:
                break
        every = torch.arange(len(self._best), device=self._best.device)
        return Found(
            x=self._examples(self._best),
            labels=self._objective.probabilities(self._best, every, self._attempt).argmax(-1),
            left=self._left,
            iterations=self._iterations,
            restarts=self._restarts,
            diverged=self._diverged,
        )

    def _evaluate(self) -> None:
        points = self._searcher.trial
        attempts = self._restarts[self._victims]
        value, slope, left = self._objective.evaluate(points, self._victims, attempts)
        known = torch.nan_to_num(value, nan=torch.inf)
        self._own[self._victims] = torch.minimum(self._own[self._victims], known)
        better = known < self._value[self._victims]
        rows = self._victims[better]
        self._best[rows], self._attempt[rows] = points[better], attempts[better]
        self._value[rows], self._left[rows] = value[better], left[better]
        self._diverged[self._victims] = ~torch.isfinite(value)
        self._searcher.take(value, slope)

    def _let_go(self) -> None:
        """Who is done leaves; whose search leads nowhere starts again or leaves as well."""
        victims = self._victims
        solved = self._left[victims] <= self._recipe.solved
        lost = (self._searcher.ended | self._stalled()) & ~solved
        again = lost & (self._left[victims] > UNEXPLAINED) & (self._restarts[victims] < self._recipe.restarts)
        if again.any():
            self._restart(again.nonzero().squeeze(1))
        going = (~solved & (~lost | again)).nonzero().squeeze(1)
        if len(going) < len(victims):
            self._searcher.keep(going)
            self._victims = victims[going]

    def _stalled(self) -> Tensor:
        """Has a search gained too little since it was last looked at?"""
        victims = self._victims
        self._since[victims] += self._recipe.counted
        due = self._since[victims] >= self._recipe.patience
        stalled = due & (self._own[victims] > LEAST_GAIN * self._mark[victims])
        rows = victims[due]
        self._mark[rows], self._since[rows] = self._own[rows], 0
        return stalled

    def _restart(self, rows: Tensor) -> None:
        victims = self._victims[rows]
        self._restarts[victims] += 1
        self._searcher.put(rows, self._search_from(self._starts(victims)))
        self._own[victims], self._mark[victims], self._since[victims] = torch.inf, torch.inf, 0
        self._diverged[victims] = False

    def _search_from(self, rows: Tensor) -> Searcher:
        recipe = self._recipe
        if recipe.optimiser == "l-bfgs":
            return Lbfgs(rows, recipe.search, recipe.history)
        return SignedAdam(rows, recipe.lr, recipe.iterations, self._objective.pixels if recipe.box else 0)

    def _starts(self, victims: Tensor) -> Tensor:
        """A fresh first guess for each victim, from a stream of its own."""
        attempts = self._restarts[victims].tolist()
        rows = [self._start(victim, attempt) for victim, attempt in zip(victims.tolist(), attempts, strict=True)]
        return torch.stack(rows).to(self._objective.seen)

    def _start(self, victim: int, attempt: int) -> Tensor:
        objective = self._objective
        generator = self._streams.generator("attack start", victim, attempt)
        parts = [start(self._recipe.start, objective.shape, generator).flatten() for _ in range(objective.batch)]
        if objective.labels is None:
            logits = generator.standard_normal(objective.batch * objective.classes, dtype=np.float32)
            parts.append(torch.from_numpy(logits))
        return torch.cat(parts)

    def _examples(self, rows: Tensor) -> Tensor:
        return self._objective.records(rows).clamp(0, 1)
