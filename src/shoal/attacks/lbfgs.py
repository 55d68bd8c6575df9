"""L-BFGS for many independent problems at once (Nocedal & Wright, Algorithm 7.5): one row a victim.

Each row has its own history, its own step length and its own end; all rows share the evaluations. A row whose
trial point is refused simply tries a shorter step at the next evaluation, so that no row waits for another's line
search. `search="fixed"` takes every step of length 1 that is finite, as PyTorch's optimiser and DLG do, and may
diverge: such a row ends, and never takes the others with it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from shoal.attacks.history import History

Search = Literal["fixed", "armijo"]
ENOUGH = 1e-4  # Armijo: the share of the promised decrease that a step must bring
SHORTEST = 1e-9  # a step that was shortened to this much of the point's size leads nowhere

_ROWS = ("x", "value", "slope", "direction", "step", "ended")


class Lbfgs:
    """The state of every row: its point, value, slope, direction, step and history.

    `trial` gives the points to evaluate next, `take` gets their values and slopes.
    """

    def __init__(self, x: Tensor, search: Search, history: int) -> None:
        rows = len(x)
        self._search = search
        self._history = History(rows, history, x)
        self.x = x
        self.value = x.new_full((rows,), torch.inf)  # not known before the first evaluation
        self.slope, self.direction = torch.zeros_like(x), torch.zeros_like(x)
        self.step = x.new_zeros(rows)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=x.device)

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but these."""
        self._history.keep(rows)
        for name in _ROWS:
            setattr(self, name, getattr(self, name)[rows])

    def put(self, rows: Tensor, other: Lbfgs) -> None:
        """Start these rows anew."""
        self._history.put(rows, other._history)
        for name in _ROWS:
            getattr(self, name)[rows] = getattr(other, name)

    @property
    def trial(self) -> Tensor:
        """The points to evaluate next."""
        return self.x + self.step.unsqueeze(1) * self.direction

    def take(self, value: Tensor, slope: Tensor) -> None:
        """Judge the trial points: go on from the good ones, come nearer to the others."""
        fine = torch.isfinite(value) & torch.isfinite(slope).all(1)
        first = torch.isinf(self.value)
        promised = _dot(self.slope, self.direction) * self.step
        good = fine if self._search == "fixed" else fine & (value <= self.value + ENOUGH * promised)
        refused = ~good & ~first & ~self.ended
        self.ended |= first & ~fine
        self._learn(good & ~first & ~self.ended, slope)
        self._move(good & ~self.ended, value, slope)
        if self._search == "fixed":
            self.ended |= refused
        elif refused.any():
            self._shorten(refused, value, promised)

    def _learn(self, accepted: Tensor, slope: Tensor) -> None:
        """Add a pair to the history, where the slope turned as it does in a valley."""
        move = self.step.unsqueeze(1) * self.direction
        turn = slope - self.slope
        curved = accepted & (_dot(move, turn) > 1e-10 * _dot(turn, turn).clamp(min=1e-30))
        self._history.add(curved, move, turn)

    def _move(self, rows: Tensor, value: Tensor, slope: Tensor) -> None:
        """These rows go to their trial points; new directions, and full steps along them."""
        wide = rows.unsqueeze(1)
        self.x = torch.where(wide, self.trial, self.x)
        self.value = torch.where(rows, value, self.value)
        self.slope = torch.where(wide, slope, self.slope)
        direction = -self._history.times_inverse(self.slope)
        downhill = _dot(direction, self.slope) < 0  # false also where a number is not finite
        self._history.forget(rows & ~downhill)
        direction = torch.where(downhill.unsqueeze(1), direction, -self.slope)
        step = torch.where(self._history.pairs > 0, torch.ones_like(self.step), _first_step(self.slope))
        self.direction = torch.where(wide, direction, self.direction)
        self.step = torch.where(rows, step, self.step)
        self.ended |= rows & (self.slope.abs().amax(1) < 1e-12)

    def _shorten(self, refused: Tensor, value: Tensor, promised: Tensor) -> None:
        """The minimum of the parabola through what is known, between a tenth and a half of the step."""
        bend = 2 * (value - self.value - promised)
        factor = torch.nan_to_num(-promised / bend, nan=0.1, posinf=0.1, neginf=0.1).clamp(0.1, 0.5)
        self.step = torch.where(refused, self.step * factor, self.step)
        size = (self.step * self.direction.abs().amax(1)) / (1e-6 + self.x.abs().amax(1))
        lost = refused & (size < SHORTEST)
        fresh = lost & (self._history.pairs > 0)  # the history may be to blame: once more along the slope
        self.ended |= lost & ~fresh
        self._history.forget(fresh)
        self.direction = torch.where(fresh.unsqueeze(1), -self.slope, self.direction)
        self.step = torch.where(fresh, _first_step(self.slope), self.step)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1)


def _first_step(slope: Tensor) -> Tensor:
    return (1 / slope.abs().sum(1).clamp(min=1e-30)).clamp(max=1.0)
