"""The simulator: the outer loop over rounds, on one machine.

A round counts once its state is on the disk; what is killed before that is played again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.algorithms.base import Algorithm
from shoal.data.dataset import Dataset
from shoal.data.partition import Partition
from shoal.engine.federation import Federation
from shoal.engine.folder import CHECKPOINT, RunFolder
from shoal.engine.local import Moment
from shoal.engine.round import Stage, State, play_round
from shoal.engine.server import given_out
from shoal.engine.slices import Slicer
from shoal.engine.workers import Workers
from shoal.errors import RunError
from shoal.gradients import network
from shoal.privacy.random import Streams

OnRound = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Settings:
    """How a simulation runs; nothing here changes what it computes, but for rounding."""

    memory: float | None = None
    threads: int | None = None
    together: bool = True
    evaluate_every: int = 1
    checkpoint_every: int = 1


class Simulator:
    """Plays rounds of one algorithm on one federation."""

    def __init__(
        self,
        algorithm: Algorithm,
        module: nn.Module,
        dataset: Dataset,
        partition: Partition,
        *,
        rounds: int,
        seed: int,
        device: torch.device,
        settings: Settings,
    ) -> None:
        self.rounds, self.settings = rounds, settings
        self.module = module.to(device)
        federation = Federation.of(dataset, partition, device)
        sample = federation.x[:3]
        net = network(self.module, sample, together=settings.together)
        workers = Workers(device, settings.threads if net.together else 1)
        slicer = Slicer(algorithm, net, self.module, sample, partition.sizes, workers.count, settings.memory)
        self.stage = Stage(algorithm, net, federation, slicer, workers, Streams(seed))
        for t in range(rounds):
            algorithm.clients.expected(t, rounds, len(federation))
        self.state = State(net.layout.flatten(self.module).to(device))
        self.done = 0
        self._stop = False

    def stop(self) -> None:
        """Ask for an end after the round that is being played."""
        self._stop = True

    def run(self, folder: RunFolder, on_round: OnRound | None = None) -> bool:
        """Play what is left of the rounds; False if it was stopped before the last."""
        while self.done < self.rounds and not self._stop:
            last = min(self.rounds, self.done + self.settings.checkpoint_every)
            lines = []
            while self.done < last and not self._stop:
                lines.append(self._play())
                if on_round:
                    on_round(lines[-1])
            self._save(folder)
            for line in lines:
                folder.add_metrics(line)
        return self.done == self.rounds

    def resume(self, folder: RunFolder) -> None:
        """Go on from the folder's checkpoint, if it has one."""
        found = folder.read_tensors(CHECKPOINT)
        if found is not None:
            tensors, notes = found
            if tensors["model"].shape != self.state.model.shape:
                raise RunError(
                    f"the checkpoint in {folder.path} has {tensors['model'].numel()} parameters, "
                    f"the model has {self.state.model.numel()}: it is of another model"
                )
            held = {key: tensor.to(self.state.model.device) for key, tensor in tensors.items()}
            self.state = State(held.pop("model"), held)
            self.done = int(notes["round"])
        folder.keep_metrics(self.done)

    @property
    def model(self) -> Tensor:
        """The model as it is given out."""
        return given_out(self.stage.algorithm.server, self.state.model, self.state.memory)

    def model_tensors(self) -> dict[str, Tensor]:
        return self.stage.network.layout.views(self.model)

    def evaluate(self) -> tuple[float, float]:
        """Accuracy and loss on the held-out rows."""
        layout = self.stage.network.layout
        return self.stage.federation.evaluate(self.module, layout, self.model, self.stage.workers)

    def close(self) -> None:
        self.stage.workers.close()

    def _play(self) -> dict[str, Any]:
        start = time.perf_counter()
        self.state, told = play_round(self.stage, self.state, Moment(self.done, self.rounds))
        self.done += 1
        line: dict[str, Any] = {"round": self.done}
        if self.done % self.settings.evaluate_every == 0 or self.done == self.rounds:
            accuracy, loss = self.evaluate()
            line |= {"accuracy": accuracy, "loss": loss if math.isfinite(loss) else None}
        return line | told | {"seconds": time.perf_counter() - start}

    def _save(self, folder: RunFolder) -> None:
        folder.write_tensors(
            CHECKPOINT, {"model": self.state.model, **self.state.memory}, {"round": str(self.done)}
        )


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RunError(f"there is no device '{name}'; choose cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise RunError(f"device '{name}' is not supported; choose cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RunError("device 'cuda' was asked for, but PyTorch sees no GPU here; use --device cpu")
    return device
