"""Where a search starts, which decides how fast an attack succeeds (Wei et al. (2020); Wei et al. (2023), 3.2).

uniform     every pixel from U[0, 1)
tile        a tile of half the height and width from U[0, 1), repeated 2 x 2
half-tone   black and white dots, each with probability one half: a printed mid-grey
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from shoal.attacks.attack_recipes import Start


def start(kind: Start, shape: tuple[int, ...], generator: np.random.Generator) -> Tensor:
    """One first guess of this shape, [C, H, W] or [F]."""
    if kind == "half-tone":
        numbers = (generator.random(shape) < 0.5).astype(np.float64)
    elif kind == "tile":
        sides = tuple(math.ceil(side / 2) for side in shape[-2:])
        tile = generator.random((*shape[:-2], *sides))
        repeated = np.tile(tile, (*(1 for _ in shape[:-2]), *(2 for _ in sides)))
        numbers = repeated[tuple(slice(side) for side in shape)]
    else:
        numbers = generator.random(shape)
    return torch.from_numpy(numbers.astype(np.float32))
