"""Adam on the sign of the gradient, with a falling step and a box (Geiping et al. 2020), one row a victim."""

from __future__ import annotations

import torch
from torch import Tensor

DECAYS = (0.9, 0.999)
FALLS = (3 / 8, 5 / 8, 7 / 8)  # of all steps; at each the step length is divided by ten


class SignedAdam:
    """The same interface as lbfgs.Rows: points to try, then their values and slopes."""

    def __init__(self, x: Tensor, lr: float, steps: int, boxed: int) -> None:
        """The first `boxed` columns are kept inside [0, 1]."""
        self.x = x
        self.mean, self.square = torch.zeros_like(x), torch.zeros_like(x)
        self.age = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        self.ended = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        self._lr, self._steps, self._boxed = lr, steps, boxed

    @property
    def trial(self) -> Tensor:
        """The points to evaluate next."""
        return self.x

    def take(self, value: Tensor, slope: Tensor) -> None:
        """Step from the values and slopes at the trial points."""
        fine = torch.isfinite(value) & torch.isfinite(slope).all(1)
        self.ended |= ~fine
        sign = torch.nan_to_num(slope).sign()
        self.age += 1
        age = self.age.unsqueeze(1)
        self.mean = DECAYS[0] * self.mean + (1 - DECAYS[0]) * sign
        self.square = DECAYS[1] * self.square + (1 - DECAYS[1]) * sign.square()
        mean, square = self.mean / (1 - DECAYS[0] ** age), self.square / (1 - DECAYS[1] ** age)
        falls = sum((age > share * self._steps).to(mean.dtype) for share in FALLS)
        self.x = self.x - self._lr * 0.1**falls * mean / (square.sqrt() + 1e-8)
        self.x[:, : self._boxed] = self.x[:, : self._boxed].clamp(0, 1)

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but these."""
        for name in ("x", "mean", "square", "age", "ended"):
            setattr(self, name, getattr(self, name)[rows])

    def put(self, rows: Tensor, other: SignedAdam) -> None:
        """Start these rows anew."""
        for name in ("x", "mean", "square", "age", "ended"):
            getattr(self, name)[rows] = getattr(other, name)
