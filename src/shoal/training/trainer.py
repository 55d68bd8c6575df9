"""The trainer: the outer loop over rounds, with its ledger, its checkpoints and its budget.

Order of a round: it is charged on disk, then run (noise), then its state is written, then committed.
An interrupted round is run again, charged again and, if it is private, with fresh noise.
"""

from __future__ import annotations

import copy
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from shoal import release
from shoal.algorithms.base import Algorithm
from shoal.data.dataset import Dataset
from shoal.data.partitions import Partition
from shoal.errors import ConfigError, RunError
from shoal.gradients import Network
from shoal.mechanisms.correlated import PAST
from shoal.precision import computing
from shoal.random.streams import Streams
from shoal.training.budget import Spending
from shoal.training.cohort import Cohort, State
from shoal.training.engine_settings import Settings
from shoal.training.evaluation import Evaluation
from shoal.training.local_training import OPTIMIZER_STATE, PERSONAL
from shoal.training.personal import users_of
from shoal.training.round import SimulatedCohort, run_round
from shoal.training.round_index import RoundIndex
from shoal.training.run_folder import CHECKPOINT, RunFolder
from shoal.training.server import given_out

AnyCohort = TypeVar("AnyCohort", bound=Cohort)
OnRound = Callable[[dict[str, Any]], None]
Reached = Callable[[list[float | None], bool], bool]
"""Whether to stop early, by the headline figures so far; True: higher ones are better."""
MOST_BASELINE_POINTS = 50  # evaluations of the training without privacy, which is one line in a plot


class Trainer(Generic[AnyCohort]):
    """Trains one model with one cohort.

    Attributes:
        cohort: The clients, with the algorithm and the random streams.
        evaluation: The network, and the held-out rows on which it is evaluated.
        setting: The public facts for accounting.
        params: The model [P] after `done` rounds.
        state: What is carried to the next round besides the model.
        done: How many of the `rounds` are done.
    """

    def __init__(self, cohort: AnyCohort, evaluation: Evaluation, *, rounds: int, settings: Settings) -> None:
        """Start from the module's own parameters.

        Args:
            cohort: The clients.
            evaluation: The network and the held-out rows.
            rounds: How many rounds are planned.
            settings: How often to evaluate, and to release and commit.

        Raises:
            ConfigError: Some round could not be run.
        """
        self.cohort, self.evaluation, self.rounds, self.settings = cohort, evaluation, rounds, settings
        for t in cohort.algorithm.different_rounds(rounds):
            cohort.algorithm.refuse_unfit(t, rounds, cohort.population.clients)
        secure = cohort.streams.mode == "secure"
        self.setting = cohort.population.setting(rounds, evaluation.layout, secure)
        self.params = self._start = evaluation.layout.shared.flatten(evaluation.module).float()
        self.state: State = {}
        self.done = 0
        self._stopped = False

    def stop(self) -> None:
        """Stop at the next checkpoint: after this round, unless engine.checkpoint_every says otherwise."""
        self._stopped = True

    def run(
        self,
        folder: RunFolder,
        spending: Spending,
        on_round: OnRound | None = None,
        reached: Reached | None = None,
    ) -> str:
        """Run the remaining rounds that the budget pays for, or until `reached`; returns why it ended.

        That is `rounds`, `budget`, `early`, `stopped`, or what the cohort says of why no further round can be run
        (`over`). What is left after an early stop is charged as if it had been run: when to stop was no choice that
        was made beforehand.
        """
        task = self.evaluation.dataset.task
        scores = [line[task.headline] for line in folder.metrics() if task.headline in line] if reached else []
        self.cohort.begin(folder.path, self.done)
        fresh = self.cohort.algorithm.draws_noise
        last_affordable = spending.affordable(self.done)
        early = reached is not None and reached(scores, task.higher_is_better)
        while self.done < last_affordable and not early and self._ready() and not self._stopped:
            last = min(last_affordable, self.done + self.settings.checkpoint_every)
            charged_before = spending.furthest
            attempt = spending.intend(self.done + 1, last)
            proven, lines = spending.spent(), []
            while self.done < last:
                again = fresh and self.done < charged_before
                lines.append(self.run_round(attempt if fresh else 0, again) | {"proven": proven})
                if on_round:
                    on_round(lines[-1])
            folder.add_metrics(lines)  # before the checkpoint, so that none is missing after a crash
            spending.commit(last, self._save(folder, spending.head))
            scores += [line[task.headline] for line in lines if task.headline in line]
            early = reached is not None and reached(scores, task.higher_is_better)
        over = self.cohort.over
        early = early and self.done < self.rounds
        if self.done < last_affordable and not over and not early:
            return "stopped"
        if early and (first := max(self.done, spending.furthest) + 1) <= last_affordable:
            spending.intend(first, last_affordable)
        why = "rounds" if self.done == self.rounds else "early" if early else over or "budget"
        self.cohort.end(why, self.done)
        return why

    def run_round(self, attempt: int, again: bool = False) -> dict[str, Any]:
        """Run the next round, which must have been charged, `again` if it had been before; returns its metrics."""
        start = time.perf_counter()
        index = RoundIndex(self.done, self.rounds, attempt, again)
        with computing(self.settings.precision):
            self.params, self.state, metrics = run_round(self.cohort, self.params, self.state, index)
        self.done += 1
        line: dict[str, Any] = {"round": self.done}
        if self.done % self.settings.evaluate_every == 0 or self.done == self.rounds:
            line |= self.evaluate()
        return line | metrics | {"seconds": time.perf_counter() - start}

    def resume(self, folder: RunFolder, spending: Spending) -> None:
        """Resume from the folder's checkpoint, if it has one and the ledger knows it."""
        found = folder.read_tensors(CHECKPOINT)
        if found is not None:
            tensors, notes = found
            if "model" not in tensors or not {"round", "ledger"} <= notes.keys():
                raise RunError(f"{folder.path / CHECKPOINT} is not a checkpoint of a run; put the right one back")
            if tensors["model"].shape != self.params.shape:
                raise RunError(
                    f"the checkpoint in {folder.path} has {tensors['model'].numel()} parameters, "
                    f"the model has {self.params.numel()}: it belongs to another model"
                )
            self.state = {key: tensor.to(self.params.device) for key, tensor in tensors.items()}
            self.params = self.state.pop("model")
            self.done = int(notes["round"])
            spending.recognise(self.done, folder.digest(CHECKPOINT), notes["ledger"])
        spending.refuse_cut(max((int(line["round"]) for line in folder.metrics()), default=0))
        folder.keep_metrics(self.done)

    @property
    def model(self) -> Tensor:
        """The model [P] as it is released to users."""
        return given_out(self.cohort.algorithm.server, self.params, self.state)

    def model_tensors(self) -> dict[str, Tensor]:
        """The released parameters, by their names in the network; frozen and personal ones are not among them."""
        return self.evaluation.layout.shared.views(self.model)

    @property
    def personal(self) -> dict[int, Tensor]:
        """The personal layers of each simulated client that has taken part, as flat vectors. Not for release."""
        own = {key: row for key, row in self.state.items() if key.startswith(PERSONAL)}
        return {int(key.removeprefix(PERSONAL)): row for key, row in own.items()}

    def personal_tensors(self) -> dict[str, Tensor]:
        """The same by tensors, each named `client/tensor`; the client by its name, or by its number from 1."""
        own, start = self.evaluation.layout.own, self._start
        names = self.client_names if self.personal else []
        return {
            f"{names[client]}/{name}": tensor
            for client, row in self.personal.items()
            for name, tensor in own.views(torch.cat([start, row.to(start)])).items()
        }

    @property
    def client_names(self) -> list[str]:
        """What the data call each client, or its number from 1."""
        names, count = self.evaluation.dataset.owner_names, self.setting.clients
        named = len(names) == count and not self.setting.simulated
        return list(names) if named else [str(client + 1) for client in range(count)]

    @property
    def notes(self) -> list[str]:
        """What a reader of results should know of the data, and of layers that stay with their clients."""
        return [*self.evaluation.dataset.notes, *self.evaluation.about_personal]

    def model_state(self) -> dict[str, Tensor]:
        """The whole model by the names of its `state_dict`: released parameters, frozen ones, buffers.

        Personal layers are those that nobody has trained.
        """
        module = self.evaluation.unused
        self.evaluation.layout.load(module, torch.cat([self.model, self.evaluation.initial]))
        state = module.state_dict().items()
        return {name: tensor.detach().clone() for name, tensor in state if isinstance(tensor, Tensor)}

    def evaluate(self) -> dict[str, float | None]:
        """The task's headline figure and the loss, on the held-out rows."""
        return self.evaluation.metrics(self.model, self.personal)

    def without_privacy(self) -> Trainer[SimulatedCohort]:
        """The same training from the start, with neither clip nor noise: what privacy costs in accuracy."""
        if not isinstance(self.cohort, SimulatedCohort):
            raise ConfigError("baseline: training without privacy needs the data, which are not here")
        plain = replace(self.cohort.algorithm, per_record=None, per_step=None, per_update=None, per_round=None)
        often = max(self.settings.evaluate_every, math.ceil(self.rounds / MOST_BASELINE_POINTS))
        module = copy.deepcopy(self.evaluation.module)
        self.evaluation.layout.shared.load(module, self._start)
        return simulate(
            plain, module, self.evaluation.dataset, self.cohort.partition, rounds=self.rounds,
            streams=Streams(self.cohort.streams.seed), settings=replace(self.settings, evaluate_every=often),
        )  # fmt: skip

    def close(self) -> None:
        """Close threads and connections."""
        self.cohort.close()

    def _ready(self) -> bool:
        return self.cohort.ready(self.state, RoundIndex(self.done, self.rounds), lambda: self._stopped)

    def _save(self, folder: RunFolder, ledger_head: str) -> str:
        """Write the checkpoint; returns the hash of its file."""
        state = self.state
        if self.cohort.streams.mode == "secure":  # a resumed run restarts its correlated noise and its momentum
            kept = (key for key in state if key != PAST and not key.startswith(OPTIMIZER_STATE))
            state = {key: state[key] for key in kept}
        salt = secrets.token_hex(16)  # its digest is public, and correlated noise in it follows from a seed
        notes = {"round": str(self.done), "ledger": ledger_head, release.KEY: release.CHECKPOINT, "salt": salt}
        folder.write_tensors(CHECKPOINT, {"model": self.params, **state}, notes)
        return folder.digest(CHECKPOINT)


def simulate(
    algorithm: Algorithm,
    module: nn.Module,
    dataset: Dataset,
    partition: Partition,
    *,
    rounds: int,
    streams: Streams,
    settings: Settings,
    known: Network | None = None,
) -> Trainer[SimulatedCohort]:
    """A trainer whose clients are simulated in this process.

    Args:
        algorithm: The method.
        module: The network, with the parameters to start from.
        dataset: All records, and held-out rows.
        partition: Who holds which records.
        rounds: How many rounds are planned.
        streams: Where every random number comes from.
        settings: Device, memory, threads, and how often to evaluate and to commit.
        known: The module's network, where such a one was compared with plain gradients before.
    """
    cohort = SimulatedCohort.of(
        algorithm, module, dataset, partition, streams=streams, settings=settings, known=known
    )
    layout = cohort.network.layout
    users = users_of(dataset, partition) if layout.personal_layers else None
    evaluation = Evaluation.of(module, layout, dataset, cohort.workers, users)
    return Trainer(cohort, evaluation, rounds=rounds, settings=settings)
