"""Runs on the disk: found by folder, name, method, data set and date; deleted on purpose only."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from shoal.errors import RunError, nearest
from shoal.report.folder import Run, is_running, read_run

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
    """The runs that fit, the newest last. A folder that cannot be read is passed over."""
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
    """The run folder of this path, or of this name or its beginning under `root`."""
    if (Path(name) / "config.toml").is_file():
        return Path(name)
    known = {path.name: path for path in folders(root)}
    fitting = [path for known_name, path in known.items() if known_name.startswith(Path(name).name)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise RunError(
            f"'{name}' may be any of {', '.join(path.name for path in fitting[:5])}; write more of its name"
        )
    raise RunError(f"there is no run '{name}' in {root}{nearest(str(name), list(known)[-8:])}")


def expand(name: str | Path, root: Path) -> list[Path]:
    """A run, or all the cells of a sweep's folder."""
    if (Path(name) / SWEEP).is_file():
        return [config.parent for config in sorted(Path(name).glob("cells/*/*/config.toml"))]
    return [one(name, root)]


def delete(path: Path) -> None:
    """Remove a run's folder with all that is in it, its ledger too; never one that goes on."""
    if not (path / "config.toml").is_file():
        raise RunError(f"{path} is no run folder: it has no config.toml; nothing was deleted")
    if is_running(path):
        raise RunError(f"{path} is in use by another process; stop that run first")
    if path.is_symlink():
        raise RunError(f"{path} is a link; delete what it points to, by its own name")
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise RunError(f"{path} cannot be deleted: {error}") from None
