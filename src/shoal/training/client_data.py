"""The clients of a simulation: one data set in memory, and which of its records each client holds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.data.dataset import Dataset
from shoal.data.partitions import Partition
from shoal.inputs import Inputs, each

AT_ONCE = 64
"""Rows that are read from disk before their pages are given back."""


@dataclass(frozen=True, eq=False)
class ClientData:
    """Records on the device, or on disk; clients are views into them, and are numbered from `first`."""

    dataset: Dataset
    partition: Partition
    device: torch.device
    x: Inputs
    y: Tensor
    first: int = 0

    @classmethod
    def of(cls, dataset: Dataset, partition: Partition, device: torch.device) -> ClientData:
        """The clients of a partition, with their records on this device."""
        x = dataset.train_x if dataset.files else each(dataset.train_x, lambda part: part.to(device))
        return cls(dataset, partition, device, x, dataset.train_y.to(device))

    def __len__(self) -> int:
        return len(self.partition)

    def sizes(self, clients: np.ndarray) -> np.ndarray:
        """How many records each of these clients holds."""
        sizes: np.ndarray = self.partition.sizes[clients - self.first]
        return sizes

    def records_of(self, clients: np.ndarray) -> list[np.ndarray]:
        """The record numbers of each of these clients."""
        return self.partition.records_of(clients - self.first)

    def rows(self, records: Tensor) -> tuple[Inputs, Tensor]:
        """The records of a batch for each client, [K, B, ...], and their targets."""

        def rows_of(part: Tensor) -> Tensor:
            return part.index_select(0, records.flatten()).view(*records.shape, *part.shape[1:])

        if self.dataset.files:
            return each(self.x, lambda part: self._from_disk(part, records)), rows_of(self.y)
        return each(self.x, rows_of), rows_of(self.y)

    def _from_disk(self, part: Tensor, records: Tensor) -> Tensor:
        """A few rows at a time: the system maps many pages around each row that is read."""
        found = []
        for few in torch.split(records.flatten().cpu(), AT_ONCE):
            found.append(part.index_select(0, few))
            self.dataset.release()
        for file in self.dataset.files:
            file.refuse_changed()
        return torch.cat(found).to(self.device).view(*records.shape, *part.shape[1:])


def on_device(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """The array on the device. A GPU copies pinned memory in its turn; for other memory, this would wait for it."""
    tensor = torch.as_tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def digests(dataset: Dataset, partition: Partition, key: bytes) -> dict[str, str]:
    """Keyed digests of the training rows, and of rows and who holds them: without the key no guess can be tested."""
    found = hashlib.blake2b(dataset.digest(), key=key, digest_size=32)
    rows = ""
    for part in (dataset.train_y.numpy(), *partition.definition):
        found.update(f"{part.dtype} {part.shape} ".encode())
        found.update(np.ascontiguousarray(part).data)
        rows = rows or found.hexdigest()
    return {"rows": rows, "data": found.hexdigest()}
