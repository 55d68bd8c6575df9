"""A run is a folder: `runs/<id>/` with its configuration, metrics, checkpoint, model and environment.

Files that matter are written atomically: a temporary file, fsync, rename. One process at a time holds the folder's
lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from shoal import release
from shoal.errors import RunError
from shoal.extras import installed
from shoal.files import locked, sync_folder, unwritable, write_whole
from shoal.kernels import cpu_lines
from shoal.renamed import current
from shoal.training.ranks import planned

CHECKPOINT = "checkpoint/state.safetensors"
DATA_KEY = "data-key.json"
PACKAGES = ("shoal", "numpy", "scipy", "scikit-learn", "dp-accounting", "safetensors")
"""Whose versions a run notes."""


class RunFolder:
    """An open run folder; close it, or use it in a `with` statement, to release the lock."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path, self._lock = path, lock

    @classmethod
    def create(cls, root: Path, name: str) -> RunFolder:
        """A new folder under `root`, named after the time and what is run."""
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        try:
            root.mkdir(parents=True, exist_ok=True)
            path = next(p for p in _names(root, f"{stamp}-{name}") if _made(p))
            (path / "checkpoint").mkdir()
            sync_folder(root)
        except OSError as error:
            raise RunError(f"the run folder cannot be made in {root}: {error}") from None
        return cls(path, locked(path, "wait for it, or start a new run"))

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of an earlier run, to resume it."""
        if not (path / "config.toml").is_file():
            raise RunError(f"{path} is not a run folder (it has no config.toml); `ls runs` lists run folders")
        return cls(path, locked(path, "wait for it, or start a new run"))

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_text(self, name: str, text: str) -> None:
        """Write a text file, atomically."""
        write_whole(self.path / name, text.encode())

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
        """Write tensors and notes as one safetensors file, atomically."""
        write_whole(self.path / name, packed(tensors, notes))

    def read_tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """Tensors and notes of a file, or None where there is no such file."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise RunError(f"{path} is damaged: {error}") from None

    def digest(self, name: str) -> str:
        """The SHA-256 of a file."""
        with (self.path / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def data_key(self, new: bool) -> bytes:
        """The key of the digest of the run's data in its ledger; drawn for a `new` run."""
        path = self.path / DATA_KEY
        if new and not path.exists():
            drawn = {release.KEY: release.DATA_KEY, "key": secrets.token_hex(32), "started_in": str(Path.cwd())}
            self.write_text(DATA_KEY, json.dumps(drawn) + "\n")
        return key_in(self.path)

    def add_metrics(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines to metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps({release.KEY: release.METRICS, **line}) + "\n" for line in lines))
        except OSError as error:
            raise unwritable(path, error) from None

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line torn by a crash is left out."""
        path = self.path / "metrics.jsonl"
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(
                f"{path} cannot be read ({error}): put it back, or move it away to continue without it"
            ) from None
        found = []
        for number, line in enumerate(lines, 1):
            try:
                found.append(current(json.loads(line)))
                int(found[-1]["round"])
            except (ValueError, TypeError, KeyError, RecursionError):
                if number == len(lines):
                    return found[: number - 1]
                raise RunError(
                    f"line {number} of {path} is damaged: repair it, or remove it to continue without it"
                ) from None
        return found

    def keep_metrics(self, rounds: int) -> None:
        """Drop the metrics of rounds that will be run again."""
        lines = [line for line in self.metrics() if line["round"] <= rounds]
        self.write_text("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def key_in(folder: Path) -> bytes:
    """The key of the digest of a run's data in its ledger."""
    path = folder / DATA_KEY
    try:
        return bytes.fromhex(json.loads(path.read_text(encoding="utf-8"))["key"])
    except (OSError, ValueError, TypeError, KeyError):
        raise RunError(
            f"{path} cannot be read, so the data cannot be compared with those of the run; "
            f"put it back, or start a new run"
        ) from None


def started_in(folder: Path) -> Path:
    """The working directory of a run, from which its config.toml names files; else, as in older runs, this one's."""
    try:
        found = Path(json.loads((folder / DATA_KEY).read_text(encoding="utf-8"))["started_in"])
    except (OSError, ValueError, TypeError, KeyError):
        found = Path()
    return found if found.is_dir() else Path()


def packed(tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> bytes:
    """Tensors and notes as the content of a safetensors file; the same ones may give other bytes another time."""
    arrays = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    return save(arrays, metadata=dict(notes))


def environment(device: torch.device, random: str = "research") -> str:
    """The environment of a run, one fact per line."""
    facts = {"python": sys.version.split()[0], "system": platform.platform(), "processor": _processor()}
    facts |= {"cores": str(os.cpu_count()), "device": str(device), "ranks": str(planned().count)}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    facts |= {"random": random, "torch": torch.__version__, release.KEY: release.ENVIRONMENT}
    facts |= {name: installed(name) for name in PACKAGES}
    return "".join(f"{key}: {value}\n" for key, value in facts.items())


def _processor() -> str:
    names = [line.partition(":")[2].strip() for line in cpu_lines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _names(root: Path, name: str) -> Any:
    yield root / name
    for number in range(2, 10_000):
        yield root / f"{name}-{number}"


def _made(path: Path) -> bool:
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True
