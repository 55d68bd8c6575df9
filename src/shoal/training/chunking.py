"""A cohort is trained in chunks that fit the memory, and on a CPU the caches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from shoal.algorithms.base import Algorithm
from shoal.calling import call, evaluating
from shoal.gradients import Network
from shoal.gradients.batched import BatchedNetwork
from shoal.gradients.sequential import RecordNetwork
from shoal.inputs import Inputs, numbers, take
from shoal.mechanisms.sampling import Records
from shoal.training.trial_step import TrialStep

CPU_CHUNK_BYTES = 64 * 2**20
CUDA_CHUNK_BYTES = 2**30
"""Enough to keep a GPU busy with small models; more only takes memory. A recorded step has as much of its own."""
CUDA_CHUNK_CLIENTS = 128
"""Chunks of larger models may take more than that, up to this many clients."""
FULL = 2048
"""Rows of one client's batch that keep a GPU busy. Kernels for one client are then faster than those for many."""
MANY_CHUNKS = 4
SMALL = 2**28
"""Where two clients take fewer bytes, what libraries take for themselves hides what a client takes."""


class Chunker:
    """Cuts a cohort into chunks of clients with about as many steps each.

    The largest chunk follows from what a client needs. On a GPU a step on synthetic records shows it, for one client
    and for two, or for 16 and 32 small ones. On a CPU, where chunks are small, it is estimated: parameters, and three
    times the activations (themselves, their gradients, unfolded images). `micro_batch`: the records of a client that
    are run at once; fewer than asked for where gradients of single records would take half of the memory.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        network: Network,
        step: TrialStep,
        workers: int,
        memory: float | None,
        micro_batch: int | None = None,
    ) -> None:
        self._workers, self._records, device, size = workers, algorithm.records, step.device, network.layout.size
        local = algorithm.local  # the model, its change, and what the optimiser needs besides
        copies = 2 + (3 if local.optimizer == "adamw" else bool(local.momentum))
        copies += bool(local.max_grad_norm or local.proximal)
        if algorithm.per_step is not None and device.type != "cpu":
            copies += 1  # noisy sums; on a CPU, where chunks are small, they hardly matter
        views = max(1, algorithm.records.augmentations)
        budget, fixed, held = budget_for(device, memory) / workers, 0, 0
        if views > 1 and algorithm.per_record is not None:  # the gradient of each record
            held = size
        if isinstance(network, RecordNetwork):  # of each of its views
            held += size * views
        # where records are rounded one by one, their gradients in float64 too; then clients are trained one by one
        alone = algorithm.sums_gradients and device.type == "cpu"
        if most := max(held * isinstance(network, RecordNetwork), 3 * size * algorithm.sums_gradients):
            few = max(1, int(budget / 2 // (4 * most)))
            micro_batch = min(micro_batch or few, few)
        self.micro_batch, batch = micro_batch, min(step.batch, micro_batch or step.batch)
        if network.batched and device.type == "cuda":
            step = replace(step, batch=batch * views)
            measured, fixed = _bytes_of_one(step, network)  # with two copies of the parameters
            self.client_bytes = 4 * ((copies - 2) * size + batch * held * (views > 1)) + measured
            budget = min(budget, fixed + max(CUDA_CHUNK_BYTES, CUDA_CHUNK_CLIENTS * self.client_bytes))
        else:
            activations = views * _activations(step.module, step.sample)
            self.client_bytes = 4 * (copies * size + batch * (3 * activations + held))
            budget = min(budget, max(CPU_CHUNK_BYTES, 4 * self.client_bytes))
        self.largest = max(1, int((budget - fixed) // self.client_bytes)) if network.batched and not alone else 1
        short = device.type == "cuda" and step.precision == "bf16"
        alone = short and isinstance(network, BatchedNetwork) and network.faster_for_one
        self._full = -(-FULL // views) if alone else math.inf

    def halve(self, clients: int) -> None:
        """A chunk of this many clients was too large for the memory."""
        self.largest = max(1, min(self.largest, clients // 2))

    def chunks(self, clients: np.ndarray, sizes: np.ndarray, one_by_one: bool = False) -> Iterator[np.ndarray]:
        """These clients, with these numbers of records, in chunks, or one by one."""
        if len(clients) == 0:
            return
        if one_by_one:
            yield from np.array_split(clients, len(clients))
            return
        if self._full < math.inf and any(full := [self.fills(expected_batch(self._records, int(n))) for n in sizes]):
            yield from self.chunks(clients[full], sizes[full], one_by_one=True)
            yield from self.chunks(clients[np.invert(full)], sizes[np.invert(full)])
            return
        order = clients[np.argsort(sizes, kind="stable")]
        count = math.ceil(len(order) / self.largest)
        if self._workers > 1:
            count = min(len(order), self._workers * math.ceil(count / self._workers))
        elif count >= MANY_CHUNKS:  # of one size in every round, whatever the cohort's: a recorded step fits them all
            yield from np.split(order, range(self.largest, len(order), self.largest))
            return
        yield from np.array_split(order, count)

    def fills(self, batch: int) -> bool:
        """Does a client with such a batch keep a GPU busy, and is it trained alone?"""
        return min(batch, self.micro_batch or batch) >= self._full


def _bytes_of_one(step: TrialStep, network: Network) -> tuple[int, int]:
    """The memory of a GPU that one more client takes, and what is taken for any number of them."""
    few = 1 if step.peak_bytes(network, 2) >= SMALL else 16
    some, twice = step.peak_bytes(network, few), step.peak_bytes(network, 2 * few)
    each = max(-(-(twice - some) // few), 1)
    return each, max(some - few * each, 0)


def _activations(module: nn.Module, sample: Inputs) -> int:
    """The number of activations of one record's forward pass, its input included."""
    one = take(sample, slice(1))
    made = [numbers(one)]
    handles = [
        child.register_forward_hook(lambda _module, _input, output: made.append(_numel(output)))
        for child in module.modules()
        if not list(child.children())
    ]
    try:
        with torch.no_grad(), evaluating(module):
            call(module, one)
    finally:
        for handle in handles:
            handle.remove()
    return sum(made)


def _numel(output: object) -> int:
    return output.numel() if isinstance(output, Tensor) else 0


def expected_batch(records: Records, size: int) -> int:
    """The records of a batch of a client with this many."""
    return max(1, min(math.ceil(records.share(size) * size), size))


def widest_batch(algorithm: Algorithm, sizes: np.ndarray) -> int:
    """The records of a batch of the largest client, as expected."""
    return expected_batch(algorithm.records, int(sizes.max(initial=1)))


def budget_for(device: torch.device, memory: float | None) -> float:
    """The bytes that all chunks which are trained at a time may take; `memory`: the same in GiB, if given."""
    if memory is not None:
        return memory * 2**30
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return 0.5 * free
    return 4 * 2**30
