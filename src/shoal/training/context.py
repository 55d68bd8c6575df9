"""What simulated clients train with: everything that does not change from round to round."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from shoal.algorithms.base import Algorithm
from shoal.data.dataset import Dataset
from shoal.data.partitions import Partition
from shoal.errors import ConfigError, RunError
from shoal.gradients import Network, network
from shoal.gradients.batched import mixing
from shoal.gradients.losses import Losses
from shoal.inputs import Inputs, count, each, shape_of
from shoal.kernels import triton
from shoal.precision import Precision, widened
from shoal.random.streams import Streams
from shoal.training.augmentation import refuse_other_shapes
from shoal.training.chunking import Chunker, widest_batch
from shoal.training.client_data import ClientData
from shoal.training.cuda_graphs import Graphs
from shoal.training.engine_settings import Settings
from shoal.training.trial_step import TrialStep
from shoal.training.workers import Workers

MOST_RECORDS = 2**20
"""Of a client, where that is secret: Poisson batches of more are hardly wider."""


@dataclass(frozen=True, eq=False)
class TrainingContext:
    """An algorithm, a model, clients with their records, random numbers, and the means to compute.

    `personal`: the initial values of the layers that stay with their clients; none for most methods.
    """

    algorithm: Algorithm
    network: Network
    client_data: ClientData
    chunker: Chunker
    workers: Workers
    streams: Streams
    personal: Tensor
    graphs: Graphs | None = None
    kernels: bool = True
    micro_batch: int | None = None
    precision: Precision = "auto"

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
        known: Network | None = None,
    ) -> Self:
        """These clients, on the device that the settings name; the module is moved there.

        Args:
            algorithm: The algorithm that they run.
            module: The network.
            dataset: All records.
            partition: Who holds which of them.
            streams: Where every random number comes from.
            settings: Device, memory, threads and speed-ups.
            known: The module's network, where such a one was compared with plain gradients before.
        """
        _refuse_pieces(module, settings)
        refuse_other_shapes(algorithm.records.augmentations, shape_of(dataset.train_x))
        secure = streams.mode == "secure"
        ciphered = secure and algorithm.per_step is not None  # such noise is drawn on a CPU
        device = pick_device("cpu" if ciphered and settings.device == "auto" else settings.device)
        module = module.to(device)
        client_data, per_record = ClientData.of(dataset, partition, device), algorithm.per_record is not None
        sample = each(stand_ins(client_data.x), lambda part: part.to(device))  # those on disk are not there
        targets = dataset.task.example_targets(count(sample), client_data.y)
        # Which way is taken shows in the last digits: in secure mode it follows from public numbers alone, not from
        # the clock, which may tell two ranks different things.
        batch = algorithm.records.batch if secure else widest_batch(algorithm, partition.sizes)
        step = TrialStep(module, sample, targets, batch, per_record, settings.precision)
        # What is recorded cannot read from disk; without Triton noise is not drawn on the GPU alone.
        recording = settings.graphs and device.type == "cuda" and triton is not None and not dataset.files

        chunks: dict[str, tuple[Workers, Chunker]] = {}

        def chunked(net: Network) -> tuple[Workers, Chunker]:
            if net.way not in chunks:
                workers = Workers(device, settings.threads, side_by_side=net.batched, precision=settings.precision)
                chunker = Chunker(algorithm, net, step, workers.count, settings.memory, settings.micro_batch)
                chunks[net.way] = workers, chunker
            return chunks[net.way]

        def clients(net: Network) -> int:
            workers, chunker = chunked(net)
            alone = secure or chunker.fills(batch)
            return 1 if alone else min(chunker.largest, max(1, len(partition) // workers.count))

        def at_once(net: Network, batch: int) -> int:
            return min(batch, chunked(net)[1].micro_batch or batch)

        def sizes(net: Network) -> tuple[int, int]:
            held = algorithm.records.nominal_records or MOST_RECORDS
            widest = algorithm.records.widest(held if secure else int(partition.sizes.max(initial=1)))
            return clients(net), at_once(net, max(batch, widest)) * max(1, algorithm.records.augmentations)

        def seconds(net: Network) -> float:
            timed = replace(step, batch=at_once(net, batch))
            return timed.seconds(net, clients(net), settings.threads, recording)

        losses = partial(_in_float32, dataset.task.losses)
        net = known or network(
            module, sample, targets, losses=losses, way=settings.way, per_record=per_record, kernels=settings.kernels,
            personal=algorithm.local.personal, pieces=settings.micro_batch is not None,
            seconds=None if secure else seconds, sizes=sizes,
        )  # fmt: skip
        personal = net.layout.flatten(module)[net.layout.shared.size :]
        workers, chunker = chunked(net)
        tested = algorithm.per_step is not None and algorithm.per_step.test is not None  # each test has its own batch
        graphs = Graphs() if recording and net.recordable and not tested else None
        return cls(
            algorithm, net, client_data, chunker, workers, streams, personal, graphs, settings.kernels,
            chunker.micro_batch, settings.precision,
        )  # fmt: skip


def _refuse_pieces(module: nn.Module, settings: Settings) -> None:
    if settings.micro_batch is not None and (layers := mixing(module)):
        raise ConfigError(
            f"engine.micro_batch {settings.micro_batch} would change what layer {layers[0]} gives: it mixes the "
            f"records of a batch; leave the key out, or use GroupNorm"
        )


def _in_float32(losses: Losses, outputs: Tensor, y: Tensor) -> Tensor:
    """The losses of outputs that may be in bfloat16."""
    return losses(widened(outputs), y)


def stand_ins(x: Inputs) -> Inputs:
    """Three inputs like these, but of nobody: how gradients are computed must not depend on the records."""
    return each(x, _stand_in)


def _stand_in(x: Tensor) -> Tensor:
    numbers = torch.arange(3 * math.prod(x.shape[1:]), device=x.device).view(3, *x.shape[1:])
    return (numbers.double().sin() + 1).to(x.dtype)  # from 0 to 2, so that a model may take them for words


@contextmanager
def current_gpu_kept() -> Iterator[None]:
    """In the end, the GPU that is the current one here is so again; without CUDA's start that was the first."""
    before = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.set_device(before)


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one; one of several, such as cuda:1, becomes the current one."""
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
    if device.type == "cuda" and device.index is not None:
        if device.index >= (gpus := torch.cuda.device_count()):
            raise RunError(f"there is no device '{name}': PyTorch sees {gpus}, from cuda:0 on")
        torch.cuda.set_device(device)  # where Triton's kernels and recorded steps run, wherever their numbers lie
    return device
