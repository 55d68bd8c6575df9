"""Scaling with public constants only: a mean or a range computed from private data would itself be a release.

`unit` puts features into [0, 1], `standard` shifts and divides by the constants that PFL uses (mean 0.5 and
deviation 0.5 where it has none), `raw` leaves them as they are published.
"""

from __future__ import annotations

import numpy as np
import torch

from shoal.errors import ConfigError, nearest

SCALES = ("unit", "standard", "raw")
HALF = ((0.5,), (0.5,))
STANDARD: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": HALF,
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
}


def check_scale(scale: str) -> None:
    """ConfigError unless the scale is one of `SCALES`."""
    if scale not in SCALES:
        raise ConfigError(f"scale '{scale}' is not known{nearest(scale, SCALES)}")


def pictures(pixels: np.ndarray, scale: str, *, name: str, top: float = 255.0) -> torch.Tensor:
    """Pixels `[N, C, H, W]` from 0 to `top` as float32 in the scale asked for."""
    x = torch.from_numpy(pixels.astype(np.float32))
    if scale != "raw":
        x.div_(top)
    if scale == "standard":
        mean, deviation = (torch.tensor(c).reshape(-1, 1, 1) for c in STANDARD.get(name, HALF))
        x.sub_(mean).div_(deviation)
    return x


def numbers(unit: np.ndarray, raw: np.ndarray, scale: str) -> np.ndarray:
    """Numeric columns of a table in the scale asked for: given already in [0, 1], and as published."""
    if scale == "standard":
        return (unit - 0.5) / 0.5
    return unit if scale == "unit" else raw
