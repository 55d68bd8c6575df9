"""Layers that stay with their clients are evaluated as each client would use them: on records that are its own."""

from __future__ import annotations

import numpy as np
import torch

from shoal.data.dataset import Dataset
from shoal.data.partitions import Partition


def users_of(dataset: Dataset, partition: Partition) -> np.ndarray:
    """The client that each held-out record is for, [N].

    It is the record's owner, where the data name one. Otherwise clients share the records of each class in the
    proportions in which they hold that class: what a client is tested on is like what it holds.
    """
    if dataset.test_owners is not None and not partition.simulated:
        return dataset.test_owners
    records = np.concatenate(partition.records_of(np.arange(len(partition))))
    held, asked = (_classes(y) for y in (dataset.train_y[records], dataset.test_y))
    holders = np.repeat(np.arange(len(partition)), partition.sizes)
    users = np.empty(len(asked), dtype=np.int64)
    for each in np.unique(asked):
        rows, own = np.flatnonzero(asked == each), holders[held == each]
        own = own if len(own) else holders
        users[rows] = own[np.arange(len(rows)) * len(own) // len(rows)]
    return users


def _classes(targets: torch.Tensor) -> np.ndarray:
    """The class of each record; one for all where targets are no classes."""
    classes = targets.dtype == torch.int64 and targets.dim() == 1
    return targets.numpy() if classes else np.zeros(len(targets), dtype=np.int64)
