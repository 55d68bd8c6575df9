"""Find runs by folder, name, method, data set and date; delete them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from shoal.errors import RunError, nearest
from shoal.models.bundle import DESCRIPTION
from shoal.report.run_reader import Run, is_running, read_run

SWEEP = "sweep.json"


def folders(root: Path) -> Iterator[Path]:
    """The run folders under `root`: its own, and those of the cells of sweeps."""
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        if (path / "config.toml").is_file():
            yield path
        elif (path / SWEEP).is_file():
            yield from (config.parent for config in sorted(path.glob("cells/*/*/config.toml")))


def find(
    root: Path,
    *,
    algorithm: str | None = None,
    dataset: str | None = None,
    since: date | None = None,
    until: date | None = None,
) -> list[Run]:
    """The runs that match, the newest last; a folder that cannot be read is skipped.

    Args:
        root: The folder with run folders.
        algorithm: Only runs of this method.
        dataset: Only runs on this data set.
        since: Only runs from this day on.
        until: Only runs up to this day.
    """
    found = []
    for path in folders(root):
        try:
            run = read_run(path, every_round=False)
        except RunError:
            continue
        day = run.started.date()
        if (algorithm in (None, run.algorithm) and dataset in (None, run.dataset)) and (
            (since is None or day >= since) and (until is None or day <= until)
        ):
            found.append(run)
    return sorted(found, key=lambda run: run.started)


def one(name: str | Path, root: Path) -> Path:
    """Find one run folder.

    Args:
        name: Its path, or its name under `root`, or the beginning of that name.
        root: The folder with run folders.

    Raises:
        RunError: Where there is none, or more than one.
    """
    if (Path(name) / "config.toml").is_file():
        return Path(name)
    known = {path.name: path for path in folders(root)}
    fitting = [path for known_name, path in known.items() if known_name.startswith(Path(name).name)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise RunError(
            f"'{name}' is ambiguous: {', '.join(path.name for path in fitting[:5])}; give more of the name"
        )
    raise RunError(f"there is no run '{name}' in {root}{nearest(str(name), list(known)[-8:])}")


def with_model(name: str | Path, root: Path) -> Path:
    """As `one`; also any folder to which a model was copied."""
    return Path(name) if (Path(name) / DESCRIPTION).is_file() else one(name, root)


def expand(name: str | Path, root: Path) -> list[Path]:
    """A run, or all the cells of a sweep's folder."""
    if (Path(name) / SWEEP).is_file():
        return [config.parent for config in sorted(Path(name).glob("cells/*/*/config.toml"))]
    return [one(name, root)]


def delete(path: Path) -> None:
    """Delete a run's folder, its ledger included.

    Raises:
        RunError: Where it is no run folder, is in use, is a link, or cannot be deleted.
    """
    if not (path / "config.toml").is_file():
        raise RunError(f"{path} is not a run folder: it has no config.toml; nothing was deleted")
    if is_running(path):
        raise RunError(f"{path} is in use by another process; stop that run first")
    if path.is_symlink():
        raise RunError(f"{path} is a link; delete its target instead")
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise RunError(f"{path} cannot be deleted: {error}") from None
