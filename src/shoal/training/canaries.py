"""Canary clients of a real federation: nobody's data, and a direction of their own (Andrew et al. 2023).

Galen Andrew, Peter Kairouz, Sewoong Oh, Alina Oprea, H. Brendan McMahan & Vinith Suriyakumar: "One-shot Empirical
Privacy Estimation for Federated Learning", https://arxiv.org/abs/2302.03098. A canary's update is a random direction
of the clip norm. A fair coin decides for each canary whether it is in the run at all; those left out are the unseen
ones. The run notes how far each model lies along each direction, from which `shoal audit --federation` measures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal import release
from shoal.errors import RunError
from shoal.random.streams import Streams
from shoal.training.run_folder import CHECKPOINT

FILE = "canaries.jsonl"
MOST_KEPT = 5 * 10**7  # numbers of directions in memory; above, they are drawn again each time
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Canaries:
    """So many directions in a space of `size` dimensions, all derived from a seed."""

    seed: int
    count: int
    size: int

    @cached_property
    def included(self) -> npt.NDArray[np.bool_]:
        """Each canary's coin: is it in the run?"""
        return np.equal(Streams(self.seed).generator("canary coins").integers(2, size=self.count), 1)

    def directions(self) -> Iterator[Tensor]:
        """A unit vector for each canary, in order."""
        return iter(self._kept) if self.count * self.size <= MOST_KEPT else map(self._direction, range(self.count))

    def drawn(self, t: int, attempt: int, rate: float) -> npt.NDArray[np.int64]:
        """Those that take part in a round: each included one with this probability."""
        lots = Streams(self.seed).generator("canary sampling", t, attempt).random(self.count)
        return np.flatnonzero(self.included & (lots < rate))

    def along(self, params: Tensor) -> Array:
        """How far a model lies along each direction."""
        exact = params.detach().cpu().double()
        return np.array([float(exact @ direction.double()) for direction in self.directions()])

    @cached_property
    def _kept(self) -> list[Tensor]:
        return [self._direction(number) for number in range(self.count)]

    def _direction(self, number: int) -> Tensor:
        normal = Streams(self.seed).generator("canary", number).standard_normal(self.size, dtype=np.float32)
        return torch.from_numpy(normal / np.linalg.norm(normal))


@dataclass(frozen=True, eq=False)
class Noted:
    """What a run noted: models along the directions [T + 1, N], each round's sampling rate and noise multiplier."""

    canaries: Canaries
    along: Array
    rates: Array
    noises: Array


def begin(folder: Path, seed: int, count: int, size: int) -> Canaries:
    """The canaries of the run in this folder; a run that is resumed keeps its own."""
    path = folder / FILE
    if path.is_file():
        return Canaries(_lines(path)[0]["seed"], count, size)
    _append(path, {release.KEY: release.CANARIES, "seed": seed, "canaries": count, "parameters": size})
    return Canaries(seed, count, size)


def note(folder: Path, canaries: Canaries, t: int, params: Tensor, rate: float, noise: float) -> None:
    """Note the model from which round t starts, and how that round samples clients and adds noise."""
    along = canaries.along(params).tolist()
    _append(folder / FILE, {"round": t, "rate": rate, "noise_multiplier": noise, "along": along})


def read(folder: Path) -> Noted:
    """What the run in this folder noted, up to its last released model.

    Raises:
        RunError: It had no canaries, has released no model yet, or its files do not fit.
    """
    if not (folder / FILE).is_file() or not (folder / CHECKPOINT).is_file():
        raise RunError(
            f"{folder} is not a federation with canary clients that has released a model: serve one with "
            f"-c federation.canaries=400"
        )
    try:
        head, *rest = _lines(folder / FILE)
        canaries = Canaries(int(head["seed"]), int(head["canaries"]), int(head["parameters"]))
        with safe_open(folder / CHECKPOINT, framework="pt") as file:
            done, last = int(file.metadata()["round"]), canaries.along(file.get_tensor("model"))
        rounds = {int(line["round"]): line for line in rest}  # a round that was run again counts once, as it ended
        found = [rounds[t] for t in range(done)]
        along = np.array([*(line["along"] for line in found), last])
        rates, noises = (np.array([float(line[key]) for line in found]) for key in ("rate", "noise_multiplier"))
        if along.shape != (len(found) + 1, canaries.count) or not np.isfinite(along).all():
            raise ValueError("its rows do not fit")
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RunError(
            f"{folder / FILE} is not what the run wrote: {type(error).__name__} {error}; restore the file"
        ) from None
    return Noted(canaries, along, rates, noises)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines; a last one that a crash left half written does not count."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _append(path: Path, line: dict[str, Any]) -> None:
    """Append a line, on a line of its own also after a crash within the last one."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
