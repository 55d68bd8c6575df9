"""Which tasks the attacks understand: classification alone."""

from __future__ import annotations

from shoal.config import Config
from shoal.data import Dataset
from shoal.errors import ConfigError
from shoal.prepare import with_task
from shoal.tasks.choose import by_targets
from shoal.tasks.classification import Classification


def of_classes(dataset: Dataset, config: Config) -> Dataset:
    """The data set with its task.

    Raises:
        ConfigError: It is no classification: reconstruction searches for a record's class, and LiRA compares the
            probability of its class.
    """
    known, kind = dataset.known_task, config.task.kind
    if kind == "auto":
        kind = by_targets(dataset.train_y, dataset.classes) if known is None else known.kind
    if kind != Classification.kind:
        raise ConfigError(
            f"task.kind is {kind}, and attacks are for classification alone: they guess or compare classes; use data "
            f"with classes"
        )
    return with_task(dataset, config.task)


def refuse_other_losses(config: Config) -> None:
    """Refuse a loss that a reconstruction does not replay.

    Raises:
        ConfigError: There is one.
    """
    for key in ("loss", "class_weights"):
        if getattr(config.task, key):
            raise ConfigError(f"task.{key}: a reconstruction replays the plain cross-entropy; leave task.{key} out")
