"""pfl's worker processes, seen from Shoal's side: started together, told to play a round, stopped."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WORKER = Path(__file__).with_name("worker.py")
PATIENCE = 30.0


@dataclass(frozen=True)
class Start:
    """How pfl is started. Processes that are not joined do their share of the cohort each, and never meet."""

    processes: int
    threads: int
    joined: bool
    channels_last: bool


class Pfl:
    """A group of worker processes."""

    def __init__(self, python: str, start: Start, task: dict[str, Any], data: Path, device: torch.device) -> None:
        self.cohort = task["cohort"] if start.joined else task["cohort"] // start.processes
        task = task | {"cohort": self.cohort, "channels_last": start.channels_last}
        shared = {"PFL_PYTORCH_DEVICE": str(device), "OMP_NUM_THREADS": str(start.threads)}
        if start.joined and start.processes > 1:
            shared["PFL_WORKER_ADDRESSES"] = ",".join([f"127.0.0.1:{_free_port()}"] * start.processes)
        self.logs = [data.with_name(f"{id(self)}-{rank}.log") for rank in range(start.processes)]
        self.workers = [
            subprocess.Popen(
                [python, WORKER, json.dumps(task), data],
                env=os.environ | shared | {"PFL_WORKER_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log.open("w"),
                text=True,
            )
            for rank, log in enumerate(self.logs)
        ]

    def play(self, mkldnn: bool, save: Path | None = None) -> dict[str, Any]:
        """One round: the seconds of the slowest process, the work of all; the first one's model is saved."""
        for rank in range(len(self.workers)):
            self._tell(rank, {"mkldnn": mkldnn, "save": str(save) if save and rank == 0 else None})
        answers = [self._answer(rank) for rank in range(len(self.workers))]
        work = {key: sum(answer[key] for answer in answers) for key in ("steps", "examples")}
        return {"seconds": max(answer["seconds"] for answer in answers), **work}

    def _tell(self, rank: int, order: dict[str, Any]) -> None:
        stream = self.workers[rank].stdin
        assert stream is not None
        with suppress(BrokenPipeError):  # its answer will be missed, and says why
            print(json.dumps(order), file=stream, flush=True)

    def _answer(self, rank: int) -> dict[str, Any]:
        stream = self.workers[rank].stdout
        assert stream is not None
        line = stream.readline()
        if not line:
            logs = "\n".join(log.read_text()[-3000:] for log in self.logs)
            raise SystemExit(f"pfl's process {rank} ended:\n{logs}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        for worker in self.workers:
            assert worker.stdin is not None
            with suppress(BrokenPipeError):
                worker.stdin.close()
        for worker in self.workers:
            try:
                worker.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self.workers = []


def versions(python: str) -> dict[str, str]:
    """What pfl's environment holds."""
    code = "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in ('pfl', 'torch')}))"
    try:
        told = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"--pfl-python {python} has no pfl; set it up as --help says ({error})") from None
    found: dict[str, str] = json.loads(told.stdout)
    return found


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
