"""The clients of a simulation: one data set in memory, and which of its records each client holds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.data.dataset import Dataset
from shoal.data.partitions import Partition


@dataclass(frozen=True, eq=False)
class ClientData:
    """Records on the device; clients are views into them, and are numbered from `first`."""

    dataset: Dataset
    partition: Partition
    device: torch.device
    x: Tensor
    y: Tensor
    first: int = 0

    @classmethod
    def of(cls, dataset: Dataset, partition: Partition, device: torch.device) -> ClientData:
        """The clients of a partition, with their records on this device."""
        return cls(dataset, partition, device, dataset.train_x.to(device), dataset.train_y.to(device))

    def __len__(self) -> int:
        return len(self.partition)

    def sizes(self, clients: np.ndarray) -> np.ndarray:
        """How many records each of these clients holds."""
        sizes: np.ndarray = self.partition.sizes[clients - self.first]
        return sizes

    def records(self, client: int) -> np.ndarray:
        """The record numbers of one client."""
        return self.partition.records(client - self.first)

    def rows(self, records: Tensor) -> tuple[Tensor, Tensor]:
        """The records of a batch for each client, [K, B, ...], and their targets."""
        flat = records.flatten()
        x = self.x.index_select(0, flat)
        y = self.y.index_select(0, flat)
        return x.view(*records.shape, *x.shape[1:]), y.view(*records.shape, *y.shape[1:])


def digest(dataset: Dataset, partition: Partition, key: bytes) -> str:
    """A keyed digest of the training rows and of who holds them: without the key no guess can be tested."""
    found = hashlib.blake2b(dataset.digest(), key=key, digest_size=32)
    for part in (dataset.train_y.numpy(), partition.indices, partition.offsets):
        found.update(f"{part.dtype} {part.shape} ".encode())
        found.update(np.ascontiguousarray(part).data)
    return found.hexdigest()
