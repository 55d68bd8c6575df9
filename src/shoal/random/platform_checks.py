"""Checks of a machine's arithmetic that secure mode relies on, run before noise is drawn.

The bounds on norms, grids and noise assume IEEE arithmetic that rounds to nearest and keeps subnormal numbers, and
random words are read as bytes in little-endian order. Other code in the process may have changed the first two
(a compiler's fast-math start-up code, torch.set_flush_denormal), so they are tested, not looked up.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import numpy as np
import torch

from shoal.errors import ConfigError


def require_platform() -> None:
    """Raise a ConfigError that names the first fact that does not hold here, and the fix."""
    if problems := platform_problems():
        raise ConfigError(f"random=secure cannot be used on this machine: {problems[0]}")


def platform_problems() -> list[str]:
    """What secure mode assumes and does not hold here, each with its fix."""
    return [f"{broken}; {fix}" for holds, broken, fix in _FACTS if not holds()]


def _little_endian() -> bool:
    return sys.byteorder == "little" and np.array([1], np.uint64).tobytes()[0] == 1


def _binary64() -> bool:
    info = sys.float_info
    return (info.mant_dig, info.max_exp, info.min_exp) == (53, 1024, -1021)


def _nearest() -> bool:
    """Half a unit goes to the even neighbour and a little more goes away from 0, for either sign."""
    for kind, unit in ((torch.float64, 2.0**-52), (torch.float32, 2.0**-23)):
        one = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=kind)
        more = torch.tensor([0.5, 0.75, -0.5, -0.75], dtype=kind) * unit
        rounded = [1.0, 1.0 + unit, -1.0, -1.0 - unit]
        if not (one + more).tolist() == (one.numpy() + more.numpy()).tolist() == rounded:
            return False
    return True


def _subnormal() -> bool:
    """Half of the smallest normal number exists, and arithmetic keeps it."""
    for kind in (torch.float64, torch.float32):
        least = torch.tensor([torch.finfo(kind).tiny], dtype=kind)
        expected = (least * 2.0**99).tolist()
        if not (least / 2 * 2.0**100).tolist() == (least.numpy() / 2 * 2.0**100).tolist() == expected:
            return False
    return True


def _entropy() -> bool:
    try:
        return len(os.urandom(16)) == 16
    except (OSError, NotImplementedError):
        return False


_FACTS: tuple[tuple[Callable[[], bool], str, str], ...] = (
    (_little_endian, "it stores numbers in big-endian order", "use a little-endian machine (x86-64, arm64)"),
    (_binary64, "its floats are not IEEE binary64", "use a machine and a Python with IEEE arithmetic"),
    (_nearest, "it does not round to the nearest number", "let nothing in this process call fesetround"),
    (
        _subnormal,
        "it treats subnormal numbers as 0 (flush-to-zero)",
        "call torch.set_flush_denormal(False), and load no library that was built with -ffast-math",
    ),
    (_entropy, "os.urandom gives no entropy", "let this process read /dev/urandom"),
)
