"""A client's training under Opacus 1.6. It must not import Shoal, which is not in Opacus' environment."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from against_opacus.plain_client import Client

FAST = "fast"
"""Opacus' "fast gradient clipping": the two passes of "ghost", with norms from materialised gradients."""


class OpacusClient(Client):
    """`task` also gives clip and noise; `mode` is Opacus' grad_sample_mode, or FAST."""

    def __init__(self, module: nn.Module, task: dict[str, Any], mode: str, channels_last: bool) -> None:
        super().__init__(module, task, mode, channels_last)
        torch.seed()  # every process starts with the same one, and would draw the same noise
        wrapped = self.module
        if mode == FAST:
            bound = task["clip"]
            wrapped = GradSampleModuleFastGradientClipping(wrapped, max_grad_norm=bound, use_ghost_clipping=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that its random numbers are not those of secure mode: nor are ours
            self.network, self.optimiser, *more = PrivacyEngine(accountant="rdp").make_private(
                module=wrapped,
                optimizer=self.optimiser,
                criterion=nn.CrossEntropyLoss(),
                data_loader=DataLoader(TensorDataset(torch.zeros(self.batch)), batch_size=self.batch),
                noise_multiplier=task["noise"],
                max_grad_norm=task["clip"],
                poisson_sampling=False,
                grad_sample_mode="ghost" if mode == FAST else mode,
            )
        self.criterion = more[0] if len(more) == 2 else nn.CrossEntropyLoss()

    def loss(self, x: Tensor, y: Tensor) -> Any:
        return self.criterion(self.network(x), y)
