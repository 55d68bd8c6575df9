"""Runs on two ranks, one after the other in one pair of processes.

Every method, in FOLDER/METHOD; in secure mode, as if the system's entropy were known, in FOLDER/secure-METHOD; a run
that is stopped, in FOLDER/stopped; the run of FOLDER/one, resumed; and a rank 1 with other settings, data, code or
model, or that fails. The last line of the output is a JSON object: what rank 0 said of that, and which run was
stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.training import distributed
from support.ports import free_port
from support.small_federation import NAMES, digits, finished, small, with_much_to_remember

SECURE = ("trusted-curator", "fed-cdp", "geyer")
"""Noise on the sum, in every step, and none that is proven, with the median of the cohort's norms."""
STOPPED = "fedper"


def known_entropy() -> None:
    """Secure mode without secrets, so that two runs of it can be compared."""
    os.urandom = lambda size: bytes(size)  # type: ignore[assignment]


def stopped_after_two(folder: Path) -> Path:
    """The folder of a run with much to remember that was stopped after two rounds."""
    held: list[Any] = []

    def look(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            held[0].stop()

    record = with_much_to_remember(STOPPED)
    try:
        finished(record, folder, on_start=lambda config, trainer, run: held.append(trainer), on_round=look)
    except shoal.ShoalError as error:
        if found := getattr(error, "run", None):
            return Path(found)
        raise
    raise AssertionError("it was not stopped")


def other_rounds(folder: Path, rank: int) -> None:
    finished(small("fedavg"), folder, change={"rounds": 3 + rank})


def other_data(folder: Path, rank: int) -> None:
    data = digits()
    data.train_x[0, 0, 0, 0] += rank
    try:
        finished(small("fedavg"), folder)
    finally:
        data.train_x[0, 0, 0, 0] -= rank


def other_code(folder: Path, rank: int) -> None:
    """One letter of one file."""
    right = distributed.__file__
    shoal.__file__, before = (str(folder / "code" / "__init__.py"), shoal.__file__) if rank else (shoal.__file__,) * 2
    (folder / "code").mkdir(exist_ok=True)
    (folder / "code" / "distributed.py").write_text(Path(right).read_text() + "#")
    try:
        finished(small("fedavg"), folder)
    finally:
        shoal.__file__ = before


def other_model(folder: Path, rank: int) -> None:
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    shoal.run({"algorithm": "fedavg", "data.clients": 10, "rounds": 2}, data=digits(), model=model, runs=folder)


def rank_1_fails(folder: Path, rank: int) -> None:
    """Rank 1 fails in the middle of a round."""
    right = distributed.SimulatedCohort.updates
    if rank:
        distributed.SimulatedCohort.updates = lambda *_, **__: [][0]  # type: ignore[method-assign]
    try:
        finished(replace(small("trusted-curator"), clients=small("fedavg").clients), folder)
    except IndexError:
        assert rank
    finally:
        distributed.SimulatedCohort.updates = right  # type: ignore[method-assign]


REFUSED: tuple[Callable[[Path, int], None], ...] = (other_rounds, other_data, other_code, other_model, rank_1_fails)


def said(job: Callable[[Path, int], None], folder: Path, rank: int) -> str:
    place = folder / job.__name__
    place.mkdir(exist_ok=True)
    try:
        job(place, rank)
    except shoal.ShoalError as error:
        return str(error)
    return ""


def play(folder: Path, rank: int) -> dict[str, Any]:
    for name in NAMES:
        result = finished(with_much_to_remember(name), folder / name)
        assert result.run.parent == folder / name, "every rank knows the result"
    entropy = os.urandom
    known_entropy()
    for name in SECURE:
        finished(small(name), folder / f"secure-{name}", change={"random": "secure"})
    os.urandom = entropy
    found: dict[str, Any] = {job.__name__: said(job, folder, rank) for job in REFUSED}
    try:
        found["stopped"] = str(stopped_after_two(folder / "stopped"))
    except shoal.ShoalError:
        assert rank, "rank 0 knows that it was stopped; the others are dismissed"
    (one,) = (folder / "one").iterdir()
    shoal.run(resume=one, data=digits(), device="cpu")
    return found


def main(words: list[str]) -> None:
    folder, port = Path(words[0]), free_port()
    torch.set_num_threads(1)
    rank = int(os.fork() == 0)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found = play(folder, rank)
    if rank == 0:
        print(json.dumps(found))
        assert os.wait()[1] == 0, "rank 1 failed"
