"""A model's parameters as one flat vector: where each tensor lies in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from shoal.errors import ConfigError, nearest

Personal = int | str | tuple[str, ...]
"""Which layers are personal: how many of the last ones, or names, with all that is inside the layers so named."""


@dataclass(frozen=True)
class Entry:
    """One tensor's place in the vector."""

    name: str
    start: int
    stop: int
    shape: torch.Size
    trainable: bool
    personal: bool = False

    def of(self, vectors: Tensor) -> Tensor:
        """A view of this tensor in a vector [P], or in one vector per client [K, P]."""
        part = vectors[..., self.start : self.stop]
        return part if len(self.shape) < 2 else torch.unflatten(part, -1, self.shape)


@dataclass(frozen=True)
class Layout:
    """The trainable parameters in the model's order, then running statistics, which are sent with them.

    Frozen parameters, and the statistics of layers in eval mode, are not in it: they stay as they are.
    What stays with a client, its personal layers, comes last, in the same order.
    """

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, module: nn.Module, personal: Personal = 0) -> Layout:
        """The layout of a module's parameters that require a gradient, and of its running statistics."""
        trained: list[tuple[str, Tensor]] = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        own = _personal_layers(list(dict.fromkeys(layer_of(name) for name, _ in trained)), personal)
        held = [(layer_of(name) in own, True, name, tensor) for name, tensor in trained]
        held += [(layer_of(name) in own, False, name, tensor) for name, tensor in _running_statistics(module)]
        entries, start = [], 0
        for stays, trainable, name, tensor in sorted(held, key=lambda each: each[0]):
            entries.append(Entry(name, start, start + tensor.numel(), tensor.shape, trainable, stays))
            start += tensor.numel()
        return cls(tuple(entries))

    @cached_property
    def shared(self) -> Layout:
        """The layout without personal layers, whose numbers come first."""
        return Layout(tuple(entry for entry in self.entries if not entry.personal))

    @cached_property
    def own(self) -> Layout:
        """The layout of the personal layers alone, in the same vector."""
        return Layout(tuple(entry for entry in self.entries if entry.personal))

    @property
    def personal_layers(self) -> list[str]:
        """The names of the personal layers."""
        return self.own.layer_names

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
            name = layer_of(entry.name)
            places[name] = (min(entry.start, places.get(name, (entry.start, 0))[0]), entry.stop)
        return [slice(*place) for place in places.values()]

    @property
    def layer_names(self) -> list[str]:
        """Their names, in the order of `layers`."""
        return list(dict.fromkeys(layer_of(entry.name) for entry in self.entries))

    @property
    def named_layers(self) -> dict[str, slice]:
        """The same by name; running statistics are separate layers, so that each number is in exactly one."""
        places: dict[str, slice] = {}
        for entry in self.entries:
            name = layer_of(entry.name) + ("" if entry.trainable else " (statistics)")
            places[name] = slice(places[name].start if name in places else entry.start, entry.stop)
        return places

    def views(self, vectors: Tensor) -> dict[str, Tensor]:
        """Every tensor by its name, as views of a vector [P]."""
        return {entry.name: entry.of(vectors).reshape(entry.shape) for entry in self.entries}

    def flatten(self, module: nn.Module) -> Tensor:
        """The module's values as a new vector [P], in its own precision."""
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        return torch.cat([state[entry.name].detach().reshape(-1) for entry in self.entries])

    def frozen(self, module: nn.Module) -> dict[str, Tensor]:
        """What the module keeps as it is: frozen parameters and buffers, by name."""
        named = {entry.name for entry in self.entries}
        kept = module.state_dict(keep_vars=True).items()
        return {name: t for name, t in kept if isinstance(t, Tensor) and not t.requires_grad and name not in named}

    def load(self, module: nn.Module, vector: Tensor) -> None:
        """Write a vector [P] into the module."""
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        with torch.no_grad():
            for entry in self.entries:
                state[entry.name].copy_(entry.of(vector).reshape(entry.shape))


def layer_of(name: str) -> str:
    """The module that holds a tensor of this name."""
    return name.rpartition(".")[0]


def _personal_layers(layers: list[str], personal: Personal) -> set[str]:
    """Those of the trained layers that are personal; raises a ConfigError where none would be shared."""
    if isinstance(personal, int):
        found = set(layers[len(layers) - personal :] if personal else ())
    else:
        names = (personal,) if isinstance(personal, str) else personal
        for name in names:
            if not any(f"{layer}.".startswith(f"{name}.") for layer in layers):
                raise ConfigError(
                    f"local.personal: the model trains no layer '{name}'{nearest(name, layers)}; "
                    f"its layers are {', '.join(layers)}"
                )
        found = {layer for layer in layers if any(f"{layer}.".startswith(f"{name}.") for name in names)}
    if found and (len(found) == len(layers) or (isinstance(personal, int) and personal > len(layers))):
        raise ConfigError(
            f"local.personal {personal!r} leaves no layer to share: the model trains {len(layers)} "
            f"({', '.join(layers) or 'none'}); use another model, or name fewer"
        )
    return found


def _running_statistics(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, child in module.named_modules()
        if isinstance(child, _NormBase) and child.training
        for name, buffer in child.named_buffers(recurse=False)
        if buffer.is_floating_point()
    ]
