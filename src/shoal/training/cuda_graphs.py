"""CUDA graphs: a local step is recorded once and replayed, for starting its kernels costs more than they do.

A recording holds numbers such as the learning rate as they were, so that it is used again only where all of them are
the same (`constants`), and made anew otherwise. Clip and noise lie on the device: it reads what they are in each
round. `-c engine.graphs=false` turns it off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Steps = Any
"""What is recorded: local.LocalSteps, or whatever has its play, step, copied, begin and constants."""
Inputs = tuple[Tensor, ...]
"""One row of each for every step."""

WARM_UP = 2
WORTH_IT = 4  # steps from which on a recording pays, if it is used once


class Graphs:
    """The last recording, and the memory it works in."""

    def __init__(self) -> None:
        self._kept: Recording | None = None
        self._seen: Any = None

    def play(self, steps: Steps, inputs: Inputs) -> Steps:
        """Run the steps over the inputs: replayed where a recording fits, recorded where it pays."""
        wanted = tuple(tensor.shape for tensor in inputs), steps.constants
        if self._kept is not None and self._kept.values == wanted:
            return self._kept.play(steps, inputs)
        again, self._seen = wanted == self._seen, wanted
        if not again and len(inputs[0]) < WORTH_IT + WARM_UP:
            return steps.play(inputs)
        self._kept = None  # its memory first
        self._kept = Recording(steps, inputs, wanted)
        return self._kept.play(steps, inputs)


class Recording:
    """One step on memory of its own, with a counter that picks its inputs."""

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
        torch.cuda.current_stream().wait_stream(stream)
        self._counter.zero_()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()

    def play(self, steps: Steps, inputs: Inputs) -> Steps:
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
