"""A site's records: all rows of its own file, or one client's part of a built-in data set, as simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from shoal.data import Dataset, load
from shoal.errors import ConfigError
from shoal.federation.consent import Refused
from shoal.federation.terms import Terms
from shoal.prepare import parted, with_features, with_task


def reader(name: str, label: str | None = None, part: int | None = None) -> Callable[[Terms], Dataset]:
    """Return a function that loads the named data for given terms; a site trains on all of its rows."""
    if "." in name and not Path(name).is_file():
        raise ConfigError(f"--data {name}: there is no such file")

    def read(terms: Terms) -> Dataset:
        return with_task(features_of(terms), terms.settings.task, terms.allowed)

    def features_of(terms: Terms) -> Dataset:
        section = terms.settings.data
        classes = terms.classes or None if "." in name else None  # built-in data sets bring their own
        dataset = load(name, scale=section.scale, label=label or section.label, classes=classes)
        if dataset.notes:
            raise Refused(
                f"the columns of {name} depend on its contents ({dataset.notes[0]}), so other sites may have "
                f"different ones; make all columns numeric"
            )
        if part is not None:
            return with_features(_part(dataset, terms, part), section.features)
        x, y = torch.cat([dataset.train_x, dataset.test_x]), torch.cat([dataset.train_y, dataset.test_y])
        everything = replace(dataset, train_x=x, train_y=y, owners=None, owner_names=(), test_owners=None)
        return with_features(everything, section.features)

    return read


def _part(dataset: Dataset, terms: Terms, part: int) -> Dataset:
    """Client `part` in a simulation of this configuration."""
    settings = terms.settings
    if settings.data.partition == "auto":
        kind: Literal["iid", "column"] = "iid" if dataset.owners is None else "column"
        settings = replace(settings, data=replace(settings.data, partition=kind))
    parts = parted(settings, dataset)
    if not 0 <= part < len(parts):
        raise ConfigError(f"--part must be in 0 to {len(parts) - 1}, got {part}")
    rows = torch.from_numpy(parts.records(part)).long()
    x, y = dataset.train_x[rows], dataset.train_y[rows]
    return replace(dataset, train_x=x, train_y=y, owners=None, owner_names=(), test_owners=None)
