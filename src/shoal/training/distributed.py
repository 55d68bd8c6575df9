"""Clients whose training is spread over ranks: rank 0 hands them out, every rank trains its share, sums are added up.

Rank 0 alone draws the cohort and the round's noise, charges the ledger and writes: the others hold nothing from round
to round. A client draws from its own streams, so its update is the same on any rank, but for rounding.
"""

from __future__ import annotations

import hashlib
import heapq
import inspect
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

import shoal
from shoal import kernels
from shoal.algorithms.base import BOUNDARIES
from shoal.errors import ConfigError
from shoal.mechanisms.correlated import PAST
from shoal.training.client_data import digests
from shoal.training.cohort import State
from shoal.training.cohort_draw import LAST, TIMES
from shoal.training.local_training import KEPT
from shoal.training.ranks import Ranks
from shoal.training.round import NUMBERS, PartialSum, SimulatedCohort
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import Trainer

CLIENTS = "clients"
SERVERS = ("server.", PAST, LAST, TIMES)
"""The prefixes of the state that only the server needs."""


@dataclass(frozen=True, eq=False)
class DistributedCohort(SimulatedCohort):
    """Clients of whom every rank trains some."""

    ranks: Ranks = field(kw_only=True)

    @classmethod
    def of_ranks(cls, cohort: SimulatedCohort, ranks: Ranks) -> DistributedCohort:
        """The same clients, over these ranks."""
        return cls(**{each.name: getattr(cohort, each.name) for each in fields(cohort)}, ranks=ranks)

    def sum(self, clients: np.ndarray, params: Tensor, state: State, index: RoundIndex) -> PartialSum:
        """The sum over these clients: those of all ranks, added up on rank 0."""
        own, *rest = (clients[share] for share in split(self.work(clients), self.ranks.count))
        for rank, share in zip(self.ranks.others, rest, strict=True):
            self.ranks.send(rank, {CLIENTS: torch.from_numpy(share), **_of(share, state)}, **asdict(index))
        self.ranks.broadcast(params)
        total = super().sum(own, params, state, index)
        for rank in self.ranks.others:
            state |= self.ranks.receive(rank)[0]
        return self._added_up(total)

    def follow(self, params: Tensor) -> NoReturn:
        """Train what rank 0 hands out, round after round, until it ends the run (`Dismissed`)."""
        params = params.clone()
        while True:
            tensors, index = self.ranks.receive(0)
            self.ranks.broadcast(params)
            clients = tensors.pop(CLIENTS).numpy()
            state = {key: tensor.to(params.device) for key, tensor in tensors.items()}
            before = dict(state)
            with self.ranks.reporting():
                total = super().sum(clients, params, state, RoundIndex(**index))
            self.ranks.send(0, {key: kept for key, kept in state.items() if kept is not before.get(key)})
            self._added_up(total)

    def cohort_norms(self, own: Sequence[Tensor]) -> Tensor | None:
        """The norms of the updates of all ranks' clients."""
        norms = torch.cat([torch.zeros(0, dtype=torch.float64, device=self.client_data.device), *own])
        if self.ranks.rank:
            self.ranks.send(0, {"norms": norms})
            norms = self.ranks.receive(0)[0]["norms"].to(norms)
        else:
            parts = [self.ranks.receive(rank)[0]["norms"].to(norms) for rank in self.ranks.others]
            norms = torch.cat([norms, *parts])
            for rank in self.ranks.others:
                self.ranks.send(rank, {"norms": norms})
        return norms if len(norms) else None

    def work(self, clients: np.ndarray) -> np.ndarray:
        """What each client is expected to take: its steps times its batch, and a record more for the step itself."""
        records, local = self.algorithm.records, self.algorithm.local
        sizes, place = np.unique(self.client_data.sizes(clients), return_inverse=True)
        each = [(local.steps or records.steps(n, local.epochs)) * (1 + records.share(n) * n) for n in sizes.tolist()]
        return np.array(each, dtype=np.float64)[place]

    def _added_up(self, total: PartialSum) -> PartialSum:
        """The sums of all ranks in one exchange, in float64, in which counts and sums on a grid are exact."""
        size = len(total.update)
        joined = torch.cat([total.update, total.raw.double(), total.update.new_tensor(total.numbers)])
        self.ranks.add_up(joined)
        update, raw, numbers = torch.split(joined, [size, size, len(NUMBERS)])
        return PartialSum.of(update, raw.to(total.raw.dtype), numbers, total.clip_norm)


def split(work: np.ndarray, count: int) -> list[np.ndarray]:
    """Places in `work` for each of `count` ranks: the most work first, to the rank that has the least."""
    loads = [(0.0, rank) for rank in range(count)]
    shares: list[list[int]] = [[] for _ in range(count)]
    for place in np.argsort(-work, kind="stable").tolist():
        load, rank = loads[0]
        shares[rank].append(place)
        heapq.heapreplace(loads, (load + float(work[place]), rank))
    return [np.sort(np.array(share, dtype=np.int64)) for share in shares]


def _of(clients: np.ndarray, state: State) -> State:
    """The part of the state that these clients need."""
    own = {f".{client}" for client in clients.tolist()}
    common = {key: row for key, row in state.items() if not key.startswith((*SERVERS, *KEPT))}
    kept = {key: row for key, row in state.items() if key.startswith(KEPT) and key[key.rindex(".") :] in own}
    return common | kept


CODE, DATA, MODEL, DEVICE = "code, Shoal's or yours", "training data", "initial model", "device"
KERNELS, PROCESSOR, AT_ONCE = "kernels", "processor", "records at once (engine.micro_batch)"
DIGESTS = (CODE, DATA, MODEL, PROCESSOR)


def facts(trainer: Trainer[SimulatedCohort], config: Mapping[str, object]) -> dict[str, str]:
    """What must be the same on every rank, by name; `config` is the resolved configuration, by key."""
    cohort, module = trainer.cohort, trainer.evaluation.module
    parameters = hashlib.blake2b(repr(module).encode(), digest_size=16)
    for name, tensor in module.state_dict().items():
        parameters.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        parameters.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return {
        CODE: _code(cohort, module),
        "torch version": torch.__version__,
        "numpy version": np.__version__,
        "default type": str(torch.get_default_dtype()),
        KERNELS: _kernels(),
        DEVICE: trainer.params.device.type,
        **{f"configuration key {key}": repr(value) for key, value in config.items()},
        DATA: digests(trainer.evaluation.dataset, cohort.partition, b"ranks")["data"],
        MODEL: parameters.hexdigest(),
    } | (_rounding(cohort) if cohort.streams.mode == "secure" else {})


def _rounding(cohort: SimulatedCohort) -> dict[str, str]:
    """What decides the last digits of an update. In secure mode they must not depend on who else takes part.

    That decides on which rank a client is trained, so every rank must round alike.
    """
    device = cohort.client_data.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else kernels.processor()
    return {PROCESSOR: hashlib.blake2b(name.encode()).hexdigest(), AT_ONCE: str(cohort.micro_batch)}


def _kernels() -> str:
    """What kernels can be made with: on CUDA, noise without Triton is other noise."""
    found = {"Triton": kernels.triton, "a C compiler": kernels.COMPILER}
    return " and ".join(name for name, tool in found.items() if tool) or "none"


def _code(cohort: SimulatedCohort, module: torch.nn.Module) -> str:
    """The hash of Shoal's own sources, and of the files that define the layers, the mechanisms and the loss."""
    package = Path(shoal.__file__).parent
    files = {path: str(path.relative_to(package)) for path in package.rglob("*") if path.suffix in (".py", ".c")}
    task = cohort.client_data.dataset.task
    parts = *module.modules(), *(getattr(cohort.algorithm, name) for name in BOUNDARIES), task, task.own_loss
    for own in (task.own_loss, *dict.fromkeys(kind for part in parts for kind in type(part).__mro__)):
        with suppress(TypeError, OSError):  # what has no file, such as None, or a class in a notebook
            path = Path(inspect.getfile(own))  # type: ignore[arg-type]
            if path.is_file():
                files.setdefault(path, path.name)
    found = hashlib.blake2b(digest_size=16)
    for path, name in sorted(files.items(), key=lambda each: each[1]):
        found.update(name.encode() + hashlib.blake2b(path.read_bytes()).digest())
    return found.hexdigest()


def offer(ranks: Ranks, own: Mapping[str, str]) -> None:
    """Send this rank's facts to rank 0."""
    ranks.send(0, {}, place=_place(), facts=dict(own))


def agree(ranks: Ranks, own: Mapping[str, str]) -> None:
    """Compare every rank's facts with those of rank 0, on rank 0.

    Raises:
        ConfigError: A rank differs; the message names it, and what differs.
    """
    taken = {_place(): 0}
    for rank in ranks.others:
        _, notes = ranks.receive(rank)
        place, theirs = notes["place"], notes["facts"]
        for name in [*own, *theirs]:
            if own.get(name) != theirs.get(name):
                values = "" if name in DIGESTS else f": {theirs.get(name)}, not {own.get(name)}"
                raise ConfigError(
                    f"rank {rank} ({place}) differs from rank 0 in {name}{values}; give every rank the same"
                )
        if own[DEVICE] == "cuda" and (other := taken.setdefault(place, rank)) != rank:
            raise ConfigError(
                f"ranks {other} and {rank} share a GPU ({place}): start as many ranks as there are GPUs, or use "
                f"--device cpu"
            )


def _place() -> str:
    gpu = f", GPU {torch.cuda.current_device()}" if torch.cuda.is_available() else ""
    return platform.node() + gpu
