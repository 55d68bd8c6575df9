"""A client's training in plain PyTorch, without privacy: the loop that all rivals share. It must not import Shoal.

The network is made once; each client starts from the weights it is given. Batches are cut by index from tensors in
memory, which is faster than a loader.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Client:
    """`task` gives batch and lr; `mode` is eager or compiled."""

    def __init__(self, module: nn.Module, task: dict[str, Any], mode: str, channels_last: bool) -> None:
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.module = copy.deepcopy(module).train().to(memory_format=self.format)
        self.parameters = list(self.module.parameters())
        self.optimiser: torch.optim.Optimizer = torch.optim.SGD(self.parameters, lr=task["lr"])
        self.batch = task["batch"]
        self.loss_of = self.loss
        if mode == "compiled":
            torch._dynamo.config.recompile_limit = 64  # or it gives up after eight settings, and says nothing
            self.loss_of = torch.compile(self.loss)  # module.compile() passes over a bare nn.Sequential

    @torch.no_grad()
    def load(self, weights: Sequence[Tensor]) -> None:
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.copy_(weight)

    def loss(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.module(x), y)

    def train(self, x: Tensor, y: Tensor, order: Tensor) -> dict[str, int]:
        """One pass over the records in this order: the steps and the records that it took."""
        done = {"steps": 0, "examples": 0}
        for rows in order.split(self.batch):
            self.optimiser.zero_grad(set_to_none=True)
            self.loss_of(x[rows].contiguous(memory_format=self.format), y[rows]).backward()
            self.optimiser.step()
            done["steps"] += 1
            done["examples"] += len(rows)
        return done
