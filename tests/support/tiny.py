"""The smallest federation that trains: rounds of a few milliseconds, for tests of everything around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import shoal
from shoal.result import Interrupted, Result

CLIENTS = 12

FEDAVG = {"algorithm": "fedavg", "rounds": 6, "clients.cohort": 4, "records.batch": 4, "engine.threads": 1}
PRIVATE = FEDAVG | {"algorithm": "trusted-curator", "clients.sampling": "poisson", "per_round.noise_multiplier": 1.5}


def dataset() -> shoal.Dataset:
    """Two classes that a line parts, six rows a client."""
    generator = np.random.Generator(np.random.Philox(key=7))
    rows = generator.standard_normal((CLIENTS, 6, 4)).astype(np.float32)
    return shoal.from_clients([(x, (x.sum(1) > 0).astype(np.int64)) for x in rows], test_fraction=0.25)


def unbalanced() -> shoal.Dataset:
    """One class in eight, and nothing that tells it apart: the best answer is always the other one."""
    labels = (np.arange(CLIENTS * 8) % 8 == 0).astype(np.int64)
    owners = np.repeat([f"ward-{place}" for place in range(CLIENTS)], 8)
    return shoal.from_arrays(np.zeros((CLIENTS * 8, 4), np.float32), labels, client=owners, name="unbalanced")


def numbers() -> shoal.Dataset:
    """Numbers from 0 to 5 that a line gives, twenty a client; one client's are all 2 too high."""
    generator = np.random.Generator(np.random.Philox(key=8))
    x = generator.standard_normal((CLIENTS * 20, 4)).astype(np.float32)
    owners = np.repeat([f"ward-{place}" for place in range(CLIENTS)], 20)
    y = (2 + 0.5 * x[:, 0] - 0.5 * x[:, 1] + 2 * (owners == "ward-3")).clip(0, 5).astype(np.float32)
    return shoal.from_arrays(x, y, client=owners, name="numbers")


def line(outputs: int) -> nn.Module:
    """A linear layer that starts from zero."""
    layer = nn.Linear(4, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def play_unbalanced(folder: Path, config: dict[str, Any], **changes: Any) -> Result:
    """One run that can learn nothing."""
    return shoal.run(config, data=unbalanced(), model=line(2), runs=folder, **changes)


def play_numbers(folder: Path, config: dict[str, Any], **changes: Any) -> Result:
    """One run of a regression."""
    return shoal.run(config | {"task.range": [0.0, 5.0]}, data=numbers(), model=line(1), runs=folder, **changes)


def network() -> nn.Module:
    layer = nn.Linear(4, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(8.0).view(2, 4) / 10)
        layer.bias.zero_()
    return layer


def play(folder: Path, config: dict[str, Any], **changes: Any) -> Result:
    """One run in `folder`."""
    return shoal.run(config, data=dataset(), model=network(), runs=folder, **changes)


def go_on(run: Path, **changes: Any) -> Result:
    return shoal.run(resume=run, data=dataset(), model=network(), **changes)


def stopped_after(folder: Path, config: dict[str, Any], rounds: int) -> Path:
    """The folder of a run that its user stopped after so many rounds."""
    held: list[Any] = []
    try:
        play(
            folder,
            config,
            on_start=lambda _config, simulator, _path: held.append(simulator),
            on_round=lambda line: held[0].stop() if line["round"] >= rounds else None,
        )
    except Interrupted as error:
        return error.run
    raise AssertionError(f"the run was over before round {rounds}")
