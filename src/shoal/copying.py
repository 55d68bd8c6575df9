"""A copy of a model, as copy.deepcopy makes it, sooner."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def copied(module: Module, shared: Iterable[Tensor] = ()) -> Module:
    """A deep copy of a model; tensors that are `shared` are the same in it.

    A layer has a dozen empty dictionaries for hooks, most of what copy.deepcopy has to do: it is given their copies.
    """
    known: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    for layer in module.modules():
        for held in vars(layer).values():
            if type(held) in (dict, OrderedDict, set) and not held:
                known[id(held)] = type(held)()
    return copy.deepcopy(module, known)
