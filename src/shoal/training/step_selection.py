"""Steps that are tested, and undone where they fail (`per_step.test`): Fu et al. (2023), Algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.gradients import Network
from shoal.mechanisms.sampling import Records
from shoal.mechanisms.step_test import StepTest
from shoal.random.noise_source import Normals
from shoal.random.normals import normals
from shoal.training.client_data import ClientData, on_device
from shoal.training.context import TrainingContext
from shoal.training.round_index import RoundIndex


@dataclass
class Selection:
    """The tests of the steps of K clients in one round.

    `batches`: the records of each test, [steps, K, B], padded with -1; `kept`: how many steps each client kept, [K].
    """

    test: StepTest
    network: Network
    client_data: ClientData
    batches: np.ndarray
    noise: Normals
    kept: Tensor
    micro_batch: int | None
    _step: int = 0

    @classmethod
    def of(
        cls, context: TrainingContext, params: Tensor, clients: np.ndarray, index: RoundIndex, steps: int
    ) -> Selection | None:
        """The tests of the method for clients with parameters [K, P]; None where it keeps every step."""
        per_step, streams = context.algorithm.per_step, context.streams
        if per_step is None or per_step.test is None:
            return None
        held, numbers = context.client_data.records_of(clients), (index.t, index.attempt)
        sampler = Records("poisson", per_step.test.batch)
        drawn = [
            sampler.draw(generator, len(records), steps)
            for records, generator in zip(
                held, streams.generators("test records", *numbers, last=clients.tolist()), strict=True
            )
        ]
        width = max(rows.shape[1] for rows in drawn)
        if streams.mode == "secure":  # whom the widest batch holds would show in the last digits of all others
            width = max(width, *(sampler.widest(len(records)) for records in held))
        batches = np.full((steps, len(clients), width), -1)
        for k, (rows, records) in enumerate(zip(drawn, held, strict=True)):
            chosen = np.append(records, -1)[rows]  # -1 is padding, and the last one
            batches[:, k, : rows.shape[1]] = chosen
        source = normals(streams, "test noise", numbers, clients.tolist(), params[:, :1], kernels=context.kernels)
        kept = params.new_zeros(len(clients))
        return cls(per_step.test, context.network, context.client_data, batches, source, kept, context.micro_batch)

    def active(self, active: Tensor) -> Tensor:
        """Which clients [K] try another step."""
        return active if self.test.updates is None else active * (self.kept < self.test.updates)

    @torch.no_grad()
    def passed(self, before: Tensor, after: Tensor, active: Tensor) -> Tensor:
        """Which clients [K] keep the step from these parameters [K, P] to those; each call is the next step."""
        records = self.batches[self._step]
        self._step += 1
        changes = self.test.clipped(self._change(before, after, records).double()).unsqueeze(1)
        noisy = torch.zeros_like(changes)
        scales = torch.full_like(active, self.test.scale * (1 + 2.0**-23))  # no less than charged, in float32 too
        self.noise.add(noisy, scales, changes)  # all at once is fastest
        passed = self.test.passed(noisy.squeeze(1)) & (active > 0)
        self.kept += passed
        return passed

    def _change(self, before: Tensor, after: Tensor, records: np.ndarray) -> Tensor:
        """By how much the loss of each client's batch rises, over the expected size of a batch."""
        padded, width = on_device(np.maximum(records, 0), before.device), self.micro_batch or records.shape[1]
        mask = on_device(records >= 0, before.device)
        total = torch.zeros(len(records), dtype=torch.float64, device=before.device)
        for rows, real in zip(torch.split(padded, width, 1), torch.split(mask, width, 1), strict=True):
            x, y = self.client_data.rows(rows)
            losses = (self.network.losses(params, x, y).double() for params in (after, before))
            later, earlier = losses
            total += torch.where(real, later - earlier, 0.0).sum(1)
        return total / self.test.batch
