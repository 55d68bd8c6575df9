"""Event files for TensorBoard, in `runs/<id>/tensorboard`: the numbers of metrics.jsonl, one scalar a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal import release
from shoal.errors import ConfigError
from shoal.report.scores import number

FOLDER = "tensorboard"


def require() -> Any:
    """The writer's class.

    Raises:
        ConfigError: Where tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "log=tensorboard needs the package tensorboard, which is not installed; "
            "install it with: pip install 'shoal[tensorboard]'"
        ) from None
    return SummaryWriter


class Board:
    """Writes the metrics of each round; a replayed round replaces its earlier one."""

    def __init__(self, run: Path, done: int) -> None:
        self._writer = require()(str(run / FOLDER), purge_step=done + 1 if done else None)
        self._writer.add_text(release.KEY, release.METRICS, done)

    def add(self, line: dict[str, Any]) -> None:
        """Write a round's scalars."""
        for name, value in scalars(line).items():
            self._writer.add_scalar(name, value, line["round"])

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def scalars(line: dict[str, Any]) -> dict[str, float]:
    """The scalars of a line of metrics.jsonl: its numbers, and epsilon by unit and observer."""
    found = {name: value for name, given in line.items() if (value := number(given)) is not None and name != "round"}
    for claim in line.get("proven", []):
        if (value := number(claim.get("epsilon"))) is not None:
            found[f"epsilon/{claim['unit']}/{claim['observer']}"] = value
    return found
