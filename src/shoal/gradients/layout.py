"""A model's parameters as one flat vector: where each tensor lies in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


@dataclass(frozen=True)
class Entry:
    """One tensor's place in the vector."""

    name: str
    start: int
    stop: int
    shape: torch.Size
    trainable: bool

    def of(self, vectors: Tensor) -> Tensor:
        """A view of this tensor in a vector [P], or in one vector per client [K, P]."""
        return torch.unflatten(vectors[..., self.start : self.stop], -1, self.shape or (1,))


@dataclass(frozen=True)
class Layout:
    """The trainable parameters in the model's order, then running statistics, which are sent with them."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """The layout of a module's parameters that require a gradient, and of its running statistics."""
        trained: list[tuple[str, Tensor]] = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        entries, start = [], 0
        for place, (name, tensor) in enumerate(trained + _running_statistics(module)):
            entries.append(Entry(name, start, start + tensor.numel(), tensor.shape, place < len(trained)))
            start += tensor.numel()
        return cls(tuple(entries))

    @property
    def size(self) -> int:
        """P, the length of the vector."""
        return self.entries[-1].stop if self.entries else 0

    @cached_property
    def trained(self) -> tuple[slice, ...]:
        """Where parameters lie that are trained: all but running statistics."""
        places: list[slice] = []
        for entry in self.entries:
            if entry.trainable:
                begins = places.pop().start if places and places[-1].stop == entry.start else entry.start
                places.append(slice(begins, entry.stop))
        return tuple(places)

    @property
    def layers(self) -> list[slice]:
        """Where each layer's parameters lie; those of one module are one layer."""
        places: dict[str, tuple[int, int]] = {}
        for entry in self.entries:
            name = entry.name.rpartition(".")[0]
            places[name] = (min(entry.start, places.get(name, (entry.start, 0))[0]), entry.stop)
        return [slice(*place) for place in places.values()]

    @property
    def layer_names(self) -> list[str]:
        """Their names, in the order of `layers`."""
        return list(dict.fromkeys(entry.name.rpartition(".")[0] for entry in self.entries))

    @property
    def named_layers(self) -> dict[str, slice]:
        """The same by name; running statistics are separate layers, so that each number is in exactly one."""
        places: dict[str, slice] = {}
        for entry in self.entries:
            name = entry.name.rpartition(".")[0] + ("" if entry.trainable else " (statistics)")
            places[name] = slice(places[name].start if name in places else entry.start, entry.stop)
        return places

    def views(self, vectors: Tensor) -> dict[str, Tensor]:
        """Every tensor by its name, as views of a vector [P]."""
        return {entry.name: entry.of(vectors).reshape(entry.shape) for entry in self.entries}

    def flatten(self, module: nn.Module) -> Tensor:
        """The module's values as a new vector [P], in its own precision."""
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        return torch.cat([state[entry.name].detach().reshape(-1) for entry in self.entries])

    def load(self, module: nn.Module, vector: Tensor) -> None:
        """Write a vector [P] into the module."""
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        with torch.no_grad():
            for entry in self.entries:
                state[entry.name].copy_(entry.of(vector).reshape(entry.shape))


def _running_statistics(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, child in module.named_modules()
        if isinstance(child, _NormBase)
        for name, buffer in child.named_buffers(recurse=False)
        if buffer.is_floating_point()
    ]
