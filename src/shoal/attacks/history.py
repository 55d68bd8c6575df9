"""What L-BFGS remembers, for many rows at once: the inverse Hessian in compact form (Byrd, Nocedal, Schnabel 1994).

    H g = gamma g + S u - gamma Y w,   w = R^-1 S'g,   u = R^-T ((D + gamma Y'Y) w - gamma Y'g)

with S the last m moves, Y the turns of the slope that came with them, R the upper triangle of S'Y in the order of
time, D its diagonal. Against the usual two loops over the pairs this is two products with all pairs and two small
triangular systems, whatever the number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = ("pairs", "base", "crossed", "turned")


class History:
    """Moves and turns lie in a ring of m places; a place without a pair holds zeros and a 1 on the diagonal."""

    def __init__(self, rows: int, places: int, like: Tensor) -> None:
        self._places = places
        self.pairs = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self.base = like.new_zeros(rows, 2 * places, like.shape[1])  # moves, then turns
        self.crossed = torch.eye(places, dtype=torch.float64, device=like.device).repeat(rows, 1, 1)  # S'Y
        self.turned = torch.zeros_like(self.crossed)  # Y'Y

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but these."""
        for name in _ROWS:
            setattr(self, name, getattr(self, name)[rows])

    def put(self, rows: Tensor, other: History) -> None:
        """Replace these rows."""
        for name in _ROWS:
            getattr(self, name)[rows] = getattr(other, name)

    def forget(self, rows: Tensor) -> None:
        """Empty the histories of the rows where this is true."""
        if rows.any():
            which = rows.nonzero().squeeze(1)
            self.put(which, History(len(which), self._places, self.base[:0, 0]))

    def add(self, rows: Tensor, move: Tensor, turn: Tensor) -> None:
        """A new pair for each row where `rows` is true, in the place of the oldest; move and turn are [V, n]."""
        which = rows.nonzero().squeeze(1)
        if len(which) == 0:
            return
        place = self.pairs[which] % self._places
        self.base[which, place], self.base[which, self._places + place] = move[which], turn[which]
        products = torch.bmm(self.base, torch.stack([move, turn], dim=2)).double()[which]
        moves, turns = products[:, : self._places], products[:, self._places :]
        self.crossed[which, :, place] = moves[..., 1]
        self.crossed[which, place, :] = turns[..., 0]
        self.turned[which, :, place] = self.turned[which, place, :] = turns[..., 1]
        self.pairs[which] += 1

    def times_inverse(self, slope: Tensor) -> Tensor:
        """H g for every row; g itself where nothing is remembered."""
        places = self._places
        products = torch.bmm(self.base, slope.unsqueeze(2)).squeeze(2).double()
        # In the order of time, oldest first: places that are still empty come before all others.
        order = (self.pairs.unsqueeze(1) + torch.arange(places, device=slope.device)) % places
        along, against = products[:, :places].gather(1, order), products[:, places:].gather(1, order)
        crossed, turned = _ordered(self.crossed, order), _ordered(self.turned, order)
        newest = crossed[:, -1, -1] / turned[:, -1, -1].clamp(min=1e-300)
        gamma = torch.where(self.pairs > 0, newest, torch.ones_like(newest)).unsqueeze(1)
        triangle = crossed.triu()
        w = torch.linalg.solve_triangular(triangle, along.unsqueeze(2), upper=True)
        middle = crossed.diagonal(dim1=1, dim2=2).unsqueeze(2) * w + gamma.unsqueeze(2) * (turned @ w)
        right = middle - (gamma * against).unsqueeze(2)
        u = torch.linalg.solve_triangular(triangle.mT, right, upper=False)
        factors = torch.zeros_like(products)
        factors[:, :places].scatter_(1, order, u.squeeze(2))
        factors[:, places:].scatter_(1, order, -gamma * w.squeeze(2))
        sums = torch.bmm(factors.to(slope.dtype).unsqueeze(1), self.base).squeeze(1)
        return gamma.to(slope.dtype) * slope + sums


def _ordered(matrices: Tensor, order: Tensor) -> Tensor:
    """Rows and columns [V, m, m] put into this order."""
    wide = order.unsqueeze(2).expand_as(matrices)
    return matrices.gather(1, wide).gather(2, wide.mT)
