"""What simulated clients train with: everything that does not change from round to round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from shoal.algorithms.base import Algorithm
from shoal.data.dataset import Dataset
from shoal.data.partitions import Partition
from shoal.errors import RunError
from shoal.gradients import Network, network
from shoal.kernels import triton
from shoal.random.streams import Streams
from shoal.training.chunking import Chunker
from shoal.training.client_data import ClientData
from shoal.training.cuda_graphs import Graphs
from shoal.training.engine_settings import Settings
from shoal.training.workers import Workers


@dataclass(frozen=True, eq=False)
class TrainingContext:
    """An algorithm, a model, clients with their records, random numbers, and the means to compute."""

    algorithm: Algorithm
    network: Network
    federation: ClientData
    chunker: Chunker
    workers: Workers
    streams: Streams
    graphs: Graphs | None = None
    kernels: bool = True

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        module: nn.Module,
        dataset: Dataset,
        partition: Partition,
        *,
        streams: Streams,
        settings: Settings,
        first: int = 0,
    ) -> Self:
        """These clients, on the device that the settings name; the module is moved there.

        Args:
            algorithm: The algorithm that they run.
            module: The network.
            dataset: All records.
            partition: Who holds which of them.
            streams: Where every random number comes from.
            settings: Device, memory, threads and speed-ups.
            first: The number of the first of these clients, which names their random streams.
        """
        device = pick_device(settings.device)
        module = module.to(device)
        federation = ClientData.of(dataset, partition, device, first)
        (sample, targets), per_record = federation.sample(), algorithm.per_record is not None
        net = network(
            module, sample, targets, losses=dataset.task.losses, batched=settings.batched, per_record=per_record,
            kernels=settings.kernels,
        )  # fmt: skip
        workers = Workers(device, settings.threads, side_by_side=net.batched)
        chunker = Chunker(algorithm, net, module, sample, partition.sizes, workers.count, settings.memory)
        can_record = device.type == "cuda" and triton is not None  # without it noise is not drawn on the GPU alone
        in_memory = not dataset.files  # what is recorded cannot read from disk
        graphs = Graphs() if settings.graphs and net.batched and can_record and in_memory else None
        return cls(algorithm, net, federation, chunker, workers, streams, graphs, settings.kernels)


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
