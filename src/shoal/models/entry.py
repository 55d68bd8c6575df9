"""What a network of the registry is: its name, its paper, the inputs it takes and how it is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Shape = tuple[int, ...]
Make = Callable[[Shape, int], nn.Module]


@dataclass(frozen=True)
class Network:
    """One entry of the registry.

    `make(input_shape, classes)` may rely on what the entry demands: with `least` the input is a picture
    (channels, height, width) whose sides are at least that long; with `features` it is what those public
    features give; with `tokens` it is whole numbers; with none of them any shape is taken and flattened.
    """

    name: str
    paper: str
    about: str
    make: Make
    least: int | None = None
    features: str | None = None
    tokens: bool = False


def size(shape: Shape) -> int:
    """How many numbers one record holds."""
    return math.prod(shape)


@torch.no_grad()
def flat(trunk: nn.Module, shape: Shape) -> int:
    """How many numbers of one record leave the trunk, for the linear layer that follows it."""
    return size(tuple(trunk(torch.zeros(1, *shape)).shape[1:]))
