"""CUDA graphs: a local step is recorded once and replayed, for launching its kernels costs more than running them.

A recording contains constants such as the learning rate, so it is replayed only where all of them are equal
(`constants`), and recorded again otherwise. Clip and noise lie on the device, where it reads them in each round. `-c
engine.graphs=false` turns it off.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Steps = Any
"""What is recorded: local_training.ClientSteps, or anything with its run, step, copied, begin and constants."""
Inputs = tuple[Tensor, ...]
"""One row of each for every step."""

WARM_UP = 2
WORTH_IT = 4  # the least number of steps for which a recording pays, if it is used once


class Graphs:
    """The last recording, and its memory."""

    def __init__(self) -> None:
        self._last: Recording | None = None
        self._seen: Any = None
        self._failed = False

    def run(self, steps: Steps, inputs: Inputs) -> Steps:
        """Run the steps over the inputs: replayed where a recording fits, recorded where it pays."""
        wanted = _capacity(len(inputs[0])), tuple(tensor.shape[1:] for tensor in inputs), steps.constants
        if self._last is not None and self._last.values == wanted:
            return self._last.run(steps, inputs)
        again, self._seen = wanted == self._seen, wanted
        if self._failed or (not again and len(inputs[0]) < WORTH_IT + WARM_UP):
            return steps.run(inputs)
        self.forget()  # frees its memory first
        try:
            self._last = Recording(steps, inputs, wanted)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._failed = True
            said = " ".join(str(error).split())
            warnings.warn(f"a local step cannot be recorded as a CUDA graph, and takes longer: {said}", stacklevel=2)
            return steps.run(inputs)
        return self._last.run(steps, inputs)

    def forget(self) -> None:
        """Free the recording's memory."""
        self._last = None


def recorded(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A step without arguments, recorded; it is run a few times first."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _capacity(steps: int) -> int:
    """Room for this many steps: few sizes, so that clients with more or less of them share a recording."""
    return max(WARM_UP, 1 << max(steps - 1, 0).bit_length())


class Recording:
    """One step in its own memory, with a counter that selects its inputs."""

    def __init__(self, steps: Steps, inputs: Inputs, values: Any) -> None:
        self.values, most = values, values[0]
        self._own = steps.copied()
        self._inputs = tuple(tensor.new_zeros(most, *tensor.shape[1:]) for tensor in inputs)
        for own, given in zip(self._inputs, inputs, strict=True):
            own[: len(given)] = given
        self._counter = torch.zeros(1, dtype=torch.int64, device=inputs[0].device)
        with torch.random.fork_rng([inputs[0].device]):  # random layers draw in the steps alone
            before = torch.get_rng_state()
            self._graph = recorded(self._step)
            if not torch.equal(torch.get_rng_state(), before):
                raise RuntimeError("the model draws random numbers on the CPU, which a recording would repeat")

    def run(self, steps: Steps, inputs: Inputs) -> Steps:
        """Replay the recorded step, once for each row of the inputs."""
        self._own.begin(steps)
        for own, given in zip(self._inputs, inputs, strict=True):
            own[: len(given)] = given
        self._counter.zero_()
        for _ in range(len(inputs[0])):
            self._graph.replay()
        return self._own.copied()

    def _step(self) -> None:
        self._own.step(*(tensor.index_select(0, self._counter).squeeze(0) for tensor in self._inputs))
        self._counter += 1
