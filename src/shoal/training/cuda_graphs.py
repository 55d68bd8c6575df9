"""CUDA graphs: a local step is recorded once and replayed, for launching its kernels costs more than running them.

A recording contains constants such as the learning rate, so it is replayed only where all of them are equal
(`constants`), and recorded again otherwise. Clip and noise lie on the device, where it reads them in each round. `-c
engine.graphs=false` turns it off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Steps = Any
"""What is recorded: local_training.LocalSteps, or anything with its run, step, copied, begin and constants."""
Inputs = tuple[Tensor, ...]
"""One row of each for every step."""

WARM_UP = 2
WORTH_IT = 4  # the least number of steps for which a recording pays, if it is used once


class Graphs:
    """The last recording, and its memory."""

    def __init__(self) -> None:
        self._last: Recording | None = None
        self._seen: Any = None

    def run(self, steps: Steps, inputs: Inputs) -> Steps:
        """Run the steps over the inputs: replayed where a recording fits, recorded where it pays."""
        wanted = tuple(tensor.shape for tensor in inputs), steps.constants
        if self._last is not None and self._last.values == wanted:
            return self._last.run(steps, inputs)
        again, self._seen = wanted == self._seen, wanted
        if not again and len(inputs[0]) < WORTH_IT + WARM_UP:
            return steps.run(inputs)
        self._last = None  # frees its memory first
        self._last = Recording(steps, inputs, wanted)
        return self._last.run(steps, inputs)


class Recording:
    """One step in its own memory, with a counter that selects its inputs."""

    def __init__(self, steps: Steps, inputs: Inputs, values: Any) -> None:
        self.values = values
        self._own = steps.copied()
        self._inputs = tuple(tensor.clone() for tensor in inputs)
        self._counter = torch.zeros(1, dtype=torch.int64, device=inputs[0].device)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._step()
                self._counter.zero_()  # there may be one row only
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()

    def run(self, steps: Steps, inputs: Inputs) -> Steps:
        """Replay the recorded step, once for each row of the inputs."""
        self._own.begin(steps)
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._counter.zero_()
        for _ in range(len(inputs[0])):
            self._graph.replay()
        return self._own.copied()

    def _step(self) -> None:
        self._own.step(*(tensor.index_select(0, self._counter).squeeze(0) for tensor in self._inputs))
        self._counter += 1
