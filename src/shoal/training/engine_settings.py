"""Where and how a simulation runs: the section `engine` of a configuration. It imports nothing heavy."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Literal

from shoal.errors import ConfigError

MOST_IN_A_CHARGE = 1_000_000  # rounds that one line of the ledger may charge


@dataclass(frozen=True)
class Settings:
    """Where and how a simulation runs. Nothing here changes the results, except for rounding.

    Attributes:
        device: `cpu`, `cuda`, or `auto`: a GPU where there is one.
        memory: GiB that the clients trained at the same time may take; measured if not set.
        micro_batch: Records of one client that are run at once. A larger batch is run in pieces: each record is
            clipped in its piece, and noise is added once.
        threads: Threads that train clients; all cores if not set.
        way: How gradients of many clients are computed: by layer `rules`, by `vmap`, `compiled`, or `sequential`, one
            client after another. `auto` takes the fastest that is right for the model.
        graphs: On CUDA, record a local step once and replay it.
        kernels: Use the device's fastest kernels for layers and, on a CPU, for noise; otherwise plain operations.
        precision: In how many digits the model's products are computed (shoal.precision).
        evaluate_every: Rounds from one evaluation to the next.
        checkpoint_every: Rounds that are charged, released and committed together.
    """

    device: str = "auto"
    memory: float | None = None
    micro_batch: int | None = None
    threads: int | None = None
    way: Literal["auto", "rules", "vmap", "compiled", "sequential"] = "auto"
    graphs: bool = True
    kernels: bool = True
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"
    evaluate_every: int = 1
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        for name in ("memory", "micro_batch", "threads", "evaluate_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"engine.{name} must be > 0, got {value}")
        if self.checkpoint_every > MOST_IN_A_CHARGE:
            raise ConfigError(f"engine.checkpoint_every must be at most 1000000, got {self.checkpoint_every}")


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    program = shutil.which("nvidia-smi")
    listed = subprocess.run([program, "-L"], capture_output=True, text=True).stdout if program else ""
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]


def of_one_job(job: int) -> dict[str, str]:
    """What the environment tells one of several jobs: which GPU is its own, in turn; nothing where there is none."""
    found = gpus()
    return {"CUDA_VISIBLE_DEVICES": found[job % len(found)]} if found else {}
