"""A trial: a local step on synthetic records of the real shape; how long it takes, and how much memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn

from shoal.gradients import Network, RecordTape
from shoal.inputs import Inputs, count, device_of, each, parts
from shoal.precision import Precision, autocast, rough
from shoal.training.cuda_graphs import recorded
from shoal.training.workers import Workers

Step = Callable[[], None]

TIMES = 3  # steps that are timed, after one that is not
MOST_CLIENTS = 16  # that are timed; a chunk has no more
TOO_MANY = 2**60  # bytes, more than any GPU has
_measured: dict[tuple[object, ...], float] = {}
"""Seconds by way, model and shapes: a process measures each once."""


@dataclass(frozen=True, eq=False)
class TrialStep:
    """A step of some clients with `batch` records each, all like `sample`."""

    module: nn.Module
    sample: Inputs
    targets: Tensor
    batch: int
    per_record: bool
    precision: Precision = "auto"

    @property
    def device(self) -> torch.device:
        """Where it is computed."""
        return device_of(self.sample)

    def seconds(self, network: Network, clients: int, threads: int | None, recording: bool) -> float:
        """What a step takes for one record, in chunks of this many clients, in threads as in training."""
        clients = min(clients, MOST_CLIENTS)
        engine = self.device, threads, recording, self.precision
        key = network.way, clients, self.batch, self.per_record, *engine, *self._architecture
        if key not in _measured:
            _measured[key] = self._seconds(network, clients, threads, recording)
        return _measured[key]

    def peak_bytes(self, network: Network, clients: int) -> int:
        """The most memory of a GPU that a step takes, the clients' parameters included; TOO_MANY if it has less."""
        before = torch.cuda.memory_allocated(self.device)
        try:
            step = self.step(network, clients)
            step()  # libraries keep some for themselves
            torch.cuda.reset_peak_memory_stats(self.device)
            step()
        except torch.OutOfMemoryError:
            return TOO_MANY
        return torch.cuda.max_memory_allocated(self.device) - before

    def step(self, network: Network, clients: int) -> Step:
        """The step of these clients: forward and backward pass, norms where records are clipped, and the sum."""
        rows = torch.arange(self.batch, device=self.device) % count(self.sample)
        x = each(self.sample, lambda part: part[rows].repeat(clients, *[1] * part.dim()))
        y = self.targets.to(self.device)[rows].repeat(clients, *[1] * self.targets.dim())
        params = network.layout.flatten(self.module).repeat(clients, 1)
        weights, into = params.new_full((clients, self.batch), 1 / self.batch), torch.zeros_like(params)
        seeds = torch.arange(weights.numel(), device=self.device).view(weights.shape)

        def run() -> None:
            with rough(self.precision, params), autocast(self.precision, params):
                tape = network.backward(params, x, y, weights, seeds)
            if self.per_record:
                clipped = cast(RecordTape, tape)
                factors = clipped.squares().sum(0, keepdim=True).sqrt().add(1).reciprocal()
                clipped.accumulate(into, 1.0, factors)
            else:
                tape.accumulate(into, 1.0)

        return run

    def _seconds(self, network: Network, clients: int, threads: int | None, recording: bool) -> float:
        workers = Workers(self.device, threads, side_by_side=network.batched, precision=self.precision)
        # On a CPU as many clients as in other ways, each with its own memory, as in training.
        chunks = -(-MOST_CLIENTS // (clients * workers.count)) if self.device.type == "cpu" else 1
        steps = [self.step(network, clients) for _ in range(chunks * workers.count)]
        if recording and network.recordable:
            steps = [recorded(step).replay for step in steps]
        try:
            return min(self._timed(workers, steps) for _ in range(1 + TIMES)) / clients / self.batch / len(steps)
        finally:
            workers.close()

    def _timed(self, workers: Workers, steps: list[Step]) -> float:
        started = time.perf_counter()
        for _ in workers.map(_run, steps, steady=True):
            pass
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started

    @cached_property
    def _architecture(self) -> tuple[object, ...]:
        shapes = tuple((name, tuple(part.shape), part.dtype) for name, part in parts(self.sample).items())
        tensors = tuple((name, tuple(p.shape), p.requires_grad) for name, p in self.module.named_parameters())
        return type(self.module), repr(self.module), tensors, shapes


def _run(step: Step) -> None:
    step()
