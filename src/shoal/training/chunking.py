"""A cohort is trained in chunks that fit the memory, and on a CPU the caches."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from shoal.algorithms.base import Algorithm
from shoal.calling import call, evaluating
from shoal.gradients import Network
from shoal.inputs import Inputs, device_of, numbers, take

CPU_CHUNK_BYTES = 64 * 2**20


class Chunker:
    """Cuts a cohort into chunks of clients with about as many steps each.

    The largest chunk follows from what a client needs: its parameters, and three times its activations
    (themselves, their gradients, unfolded images).
    """

    def __init__(
        self,
        algorithm: Algorithm,
        network: Network,
        module: nn.Module,
        sample: Inputs,
        sizes: np.ndarray,
        workers: int,
        memory: float | None,
        micro_batch: int | None = None,
    ) -> None:
        self._workers, device = workers, device_of(sample)
        most = int(sizes.max(initial=1))
        batch = min(math.ceil(algorithm.records.share(most) * most), most, micro_batch or most)
        local = algorithm.local  # the model, its change, and what the optimiser needs besides
        copies = 2 + (3 if local.optimizer == "adamw" else bool(local.momentum))
        copies += bool(local.max_grad_norm or local.proximal)
        if algorithm.per_step is not None and device.type != "cpu":
            copies += 1  # noisy sums; on a CPU, where chunks are small, they hardly matter
        views = algorithm.records.augmentations
        if views and algorithm.per_record is not None:
            copies += batch  # the gradient of every record
        activations = batch * max(views, 1) * _activations(module, sample)
        self.client_bytes = 4 * (copies * network.layout.size + 3 * activations)
        budget = memory * 2**30 if memory else _default_budget(device)
        if device.type == "cpu":
            budget = min(budget / workers, max(CPU_CHUNK_BYTES, 4 * self.client_bytes))
        self.largest = max(1, int(budget // self.client_bytes)) if network.batched else 1

    def chunks(self, clients: np.ndarray, sizes: np.ndarray, one_by_one: bool = False) -> Iterator[np.ndarray]:
        """These clients, with these numbers of records, in chunks, or one by one."""
        if len(clients) == 0:
            return
        if one_by_one:
            yield from np.array_split(clients, len(clients))
            return
        order = clients[np.argsort(sizes, kind="stable")]
        count = math.ceil(len(order) / self.largest)
        if self._workers > 1:
            count = min(len(order), self._workers * math.ceil(count / self._workers))
        yield from np.array_split(order, count)


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


def _default_budget(device: torch.device) -> float:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return 0.5 * free
    return 4 * 2**30
