"""What an attack minimises: the distance between the observed gradient and that of its dummy records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.attacks.attack_recipes import Recipe
from shoal.attacks.gradient_map import GradientMap

Replay = Callable[[Tensor, Tensor], Tensor]
"""(the dummies' gradients [V, P], what was seen [V, P]) -> the former after the public steps that the latter took."""


@dataclass(frozen=True, eq=False)
class Objective:
    """One row of unknowns a victim: its records [B, ...], then, where labels are searched too, their logits."""

    recipe: Recipe
    shown: GradientMap
    replay: Replay
    shape: tuple[int, ...]
    batch: int
    classes: int
    seen: Tensor  # [V, P]
    labels: Tensor | None  # [V, guesses, B], the likeliest first; None where they are among the unknowns
    anchor: Tensor | None = None  # [V, pixels]: what several searches agree on

    @property
    def pixels(self) -> int:
        """How many of a row's unknowns are features."""
        return self.batch * int(torch.Size(self.shape).numel())

    def records(self, rows: Tensor) -> Tensor:
        """The records in rows of unknowns, [v, B, ...]."""
        return rows[:, : self.pixels].reshape(len(rows), self.batch, *self.shape)

    def probabilities(self, rows: Tensor, victims: Tensor, attempts: Tensor) -> Tensor:
        """The labels [v, B, C] of the victims' attempts: each attempt has another guess, as long as there are any."""
        if self.labels is not None:
            guess = attempts.clamp(max=self.labels.shape[1] - 1)
            return F.one_hot(self.labels[victims, guess], self.classes).to(rows.dtype)
        return rows[:, self.pixels :].reshape(len(rows), self.batch, self.classes).softmax(-1)

    def evaluate(self, rows: Tensor, victims: Tensor, attempts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Value, slope and match (the value without the prior, relative to what was seen) of these victims' rows."""
        rows = rows.detach().requires_grad_()
        x, y = self.records(rows), self.probabilities(rows, victims, attempts)
        seen = self.seen[victims]
        shown = self.replay(self.shown(x, y), seen)
        if self.recipe.match == "squared":
            size = seen.norm(dim=1, keepdim=True).clamp(min=1e-30)  # small gradients count as much as large
            value = ((shown - seen) / size).square().sum(1)
        else:
            value = 1 - F.cosine_similarity(shown, seen, dim=1, eps=1e-30)
        match = value.detach()
        if self.recipe.prior and len(self.shape) == 3:
            value = value + self.recipe.prior * total_variation(x)
        if self.anchor is not None:
            value = value + self.recipe.consensus * (x.flatten(1) - self.anchor[victims]).square().mean(1)
        (slope,) = torch.autograd.grad(value.sum(), rows)
        return value.detach(), slope, match


def total_variation(x: Tensor) -> Tensor:
    """The mean step between neighbouring pixels, down and across, for each victim [V, B, C, H, W]."""
    down = (x[..., 1:, :] - x[..., :-1, :]).abs().flatten(1).mean(1)
    across = (x[..., :, 1:] - x[..., :, :-1]).abs().flatten(1).mean(1)
    return down + across
