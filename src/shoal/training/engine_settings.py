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
    """Nothing here changes the results, but for rounding.

    `memory`: GiB that chunks of a cohort may take. `micro_batch`: records of one client that are run at once;
    a larger batch is run in pieces, each record clipped, the noise added once. `way`: how gradients are computed
    (see gradients.network).
    `graphs`: on CUDA a local step is recorded and replayed, and adds its noise in the pass that adds its gradient.
    `precision`: in how many digits the model's products are computed (shoal.precision).
    `kernels`: the fastest kernels of the device for layers and, on a CPU, for noise; otherwise plain operations.
    `checkpoint_every`: rounds that are charged, released and committed together.
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
