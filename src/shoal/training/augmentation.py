"""Augmented views of pictures: a crop and a flip at random, several of each record in every step.

A record's gradient is the mean over its views, and is clipped after that (De et al. 2022, "Unlocking High-Accuracy
Differentially Private Image Classification through Scale", https://arxiv.org/abs/2204.13650): one record still moves
a step by one clip, however many views it has and whatever they are.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.inputs import Inputs, InputShape

PADDING = 4
"""Pixels by which a crop may be off the picture; they are mirrored at its edge."""
CROPS = 2 * PADDING + 1


def drawn(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """So many views: (down x CROPS + across) x 2 + flipped."""
    return generator.integers(2 * CROPS**2, size=shape)


def augmented(x: Inputs, views: Tensor) -> Tensor:
    """Pictures [K, B, C, H, W] by their views [K, B, V]: [K, B x V, C, H, W]."""
    assert isinstance(x, Tensor)
    which = views.flatten()
    rows = _places(which.div(2 * CROPS, rounding_mode="floor"), x.shape[-2])
    columns = _places(which.div(2, rounding_mode="floor") % CROPS, x.shape[-1])
    columns = torch.where((which % 2 == 1).unsqueeze(1), columns.flip(1), columns)
    record = torch.arange(len(which), device=x.device).div(views.shape[2], rounding_mode="floor")
    found = x.flatten(0, 1).movedim(1, -1)[record[:, None, None], rows[:, :, None], columns[:, None, :]]
    return found.movedim(-1, 1).reshape(len(views), -1, *x.shape[2:])


def _places(offsets: Tensor, size: int) -> Tensor:
    """Where the pixels of crops with these offsets lie, [N, size]: mirrored where that is outside."""
    places = torch.arange(size, device=offsets.device) + (offsets - PADDING).unsqueeze(1)
    return (size - 1) - ((size - 1) - places.abs()).abs()


def refuse_other_shapes(augmentations: int, shape: InputShape) -> None:
    """Raise a ConfigError where there are no pictures [C, H, W] to crop."""
    if augmentations and not (isinstance(shape, tuple) and len(shape) == 3 and min(shape[1:]) > PADDING):
        raise ConfigError(
            f"records.augmentations {augmentations} needs pictures [channels, height, width] of more than {PADDING} "
            f"pixels a side, got records of {_described(shape)}; set it to 0"
        )


def _described(shape: InputShape) -> str:
    return f"shape {list(shape)}" if isinstance(shape, tuple) else f"several arrays ({', '.join(shape)})"
