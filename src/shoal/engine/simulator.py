"""The simulator: the outer loop over rounds, on one machine.

Order of a round: it is charged on the disk, then played (noise), then its state is written, then committed.
What is killed in between is played again, charged again and, if it is private, drawn anew.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal import release
from shoal.algorithms.base import Algorithm, Setting
from shoal.data.dataset import Dataset
from shoal.data.partition import Partition
from shoal.engine.federation import Federation
from shoal.engine.folder import CHECKPOINT, RunFolder
from shoal.engine.graphs import Graphs
from shoal.engine.local import VELOCITY
from shoal.engine.moment import Moment
from shoal.engine.round import State, play_round
from shoal.engine.server import given_out
from shoal.engine.settings import Settings
from shoal.engine.slices import Slicer
from shoal.engine.spending import Spending
from shoal.engine.stage import Stage
from shoal.engine.workers import Workers
from shoal.errors import RunError
from shoal.gradients import Layout, network
from shoal.kernels import triton
from shoal.privacy.correlated import PAST
from shoal.privacy.random import Streams

OnRound = Callable[[dict[str, Any]], None]
MOST_BASELINE_POINTS = 50  # evaluations of the training without privacy: it is there for one line in a plot


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
        settings: Settings,
    ) -> None:
        device = pick_device(settings.device)
        self.rounds, self.settings = rounds, settings
        self._start = copy.deepcopy(module)
        self.module = module.to(device)
        federation = Federation.of(dataset, partition, device)
        sample = federation.x[:3]
        per_example = algorithm.per_example is not None
        net = network(
            self.module, sample, together=settings.together, per_example=per_example, kernels=settings.kernels
        )
        workers = Workers(device, settings.threads, side_by_side=net.together)
        slicer = Slicer(algorithm, net, self.module, sample, partition.sizes, workers.count, settings.memory)
        can_record = device.type == "cuda" and triton is not None  # without it noise is not drawn on the GPU alone
        graphs = Graphs() if settings.graphs and net.together and can_record else None
        self.stage = Stage(algorithm, net, federation, slicer, workers, Streams(seed), graphs, settings.kernels)
        for t in algorithm.different_rounds(rounds):
            algorithm.refuse_unfit(t, rounds, len(federation))
        self.state = State(net.layout.flatten(self.module).float().to(device))
        self.setting = public_facts(partition, rounds, net.layout)
        self.done = 0
        self._stop = False

    def draw_from(self, streams: Streams) -> None:
        """Take these random numbers; what is charged depends on whether they are secure mode's."""
        self.stage = replace(self.stage, streams=streams)
        self.setting = replace(self.setting, secure=streams.mode == "secure")

    def stop(self) -> None:
        """Ask for an end at the next checkpoint: after this round, unless engine.checkpoint_every says otherwise."""
        self._stop = True

    def run(self, folder: RunFolder, spending: Spending, on_round: OnRound | None = None) -> str:
        """Play the rounds that are left and that the budget pays for; why it ended: rounds, budget or stopped."""
        fresh = self.stage.algorithm.draws_noise
        last_affordable = spending.affordable(self.done)
        while self.done < last_affordable and self.ready() and not self._stop:
            last = min(last_affordable, self.done + self.settings.checkpoint_every)
            attempt = spending.intend(self.done + 1, last)
            proven, lines = spending.spent(), []
            while self.done < last:
                lines.append(self.play(attempt if fresh else 0) | {"proven": proven})
                if on_round:
                    on_round(lines[-1])
            folder.add_metrics(lines)  # before the checkpoint, so that none is missing after a kill
            spending.commit(last, self._save(folder, spending.head))
        if self.done == self.rounds:
            return "rounds"
        return "budget" if self.done == last_affordable else "stopped"

    def ready(self) -> bool:
        """Is there somebody to play with? Asked before rounds are charged; a real federation may wait here."""
        return True

    def resume(self, folder: RunFolder, spending: Spending) -> None:
        """Go on from the folder's checkpoint, if it has one and the ledger knows it."""
        found = folder.read_tensors(CHECKPOINT)
        if found is not None:
            tensors, notes = found
            if "model" not in tensors or not {"round", "ledger"} <= notes.keys():
                raise RunError(f"{folder.path / CHECKPOINT} is no checkpoint of a run; put the right one back")
            if tensors["model"].shape != self.state.model.shape:
                raise RunError(
                    f"the checkpoint in {folder.path} has {tensors['model'].numel()} parameters, "
                    f"the model has {self.state.model.numel()}: it is of another model"
                )
            held = {key: tensor.to(self.state.model.device) for key, tensor in tensors.items()}
            self.state = State(held.pop("model"), held)
            self.done = int(notes["round"])
            spending.recognise(self.done, folder.digest(CHECKPOINT), notes["ledger"])
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

    def confusion(self) -> np.ndarray:
        """Held-out rows by their class (row) and by what the model takes them for (column)."""
        return self.stage.federation.confusion(self.module, self.stage.network.layout, self.model)

    def without_privacy(self) -> Simulator:
        """The same training from the start, with neither clip nor noise: what privacy costs in accuracy."""
        record = replace(self.stage.algorithm, per_example=None, per_step=None, per_update=None, per_round=None)
        often = max(self.settings.evaluate_every, math.ceil(self.rounds / MOST_BASELINE_POINTS))
        settings = replace(self.settings, evaluate_every=often)
        federation = self.stage.federation
        return Simulator(
            record, self._start, federation.dataset, federation.partition,
            rounds=self.rounds, seed=self.stage.streams.seed, settings=settings,
        )  # fmt: skip

    def close(self) -> None:
        self.stage.workers.close()

    def play(self, attempt: int) -> dict[str, Any]:
        """Play the next round, and tell of it; it must have been charged before."""
        start = time.perf_counter()
        self.state, told = play_round(self.stage, self.state, Moment(self.done, self.rounds, attempt))
        self.done += 1
        line: dict[str, Any] = {"round": self.done}
        if self.done % self.settings.evaluate_every == 0 or self.done == self.rounds:
            accuracy, loss = self.evaluate()
            line |= {"accuracy": accuracy, "loss": loss if math.isfinite(loss) else None}
        return line | told | {"seconds": time.perf_counter() - start}

    def _save(self, folder: RunFolder, ledger_head: str) -> str:
        """Release the state: the hash of its file."""
        kept = self.state.memory
        if self.stage.streams.mode == "secure":  # a run that is resumed correlates anew, and with no momentum
            kept = {key: tensor for key, tensor in kept.items() if key != PAST and not key.startswith(VELOCITY)}
        tensors = {"model": self.state.model, **kept}
        notes = {"round": str(self.done), "ledger": ledger_head, release.KEY: release.CHECKPOINT}
        folder.write_tensors(CHECKPOINT, tensors, notes)
        return folder.digest(CHECKPOINT)


def public_facts(partition: Partition, rounds: int, layout: Layout, secure: bool = False) -> Setting:
    """What accounting needs to know of a federation."""
    sizes = tuple(sorted({int(size) for size in partition.sizes}))
    return Setting(
        len(partition), rounds, partition.multiplicity, len(layout.layers), sizes,
        all_answer=partition.all_answer, bounds=partition.bounds, simulated=partition.simulated,
        parameters=layout.size, secure=secure,
    )  # fmt: skip


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
