"""The one generator that torch has in a process: initial weights and random layers draw from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

CPU = torch.device("cpu")
_ALONE = RLock()


@contextmanager
def seeded(seed: int, device: torch.device = CPU) -> Iterator[None]:
    """Torch draws from this seed here; other threads that want this wait, and other random state is unchanged."""
    on_gpu = device.type == "cuda"
    with _ALONE, torch.random.fork_rng([device] if on_gpu else []):
        (torch.manual_seed if on_gpu else torch.default_generator.manual_seed)(seed)
        yield
