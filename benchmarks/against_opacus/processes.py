"""Rivals' worker processes, seen from Shoal's side: started, told to play a round, stopped."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE = 60.0


class Processes:
    """Some processes of one program, each with lines of JSON in and out."""

    def __init__(self, command: list[str], count: int, folder: Path, env: dict[str, str] | None = None) -> None:
        self.logs = [folder / f"{id(self)}-{rank}.log" for rank in range(count)]
        self.running = [
            subprocess.Popen(
                command,
                env=os.environ | (env or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log.open("w"),
                text=True,
            )
            for log in self.logs
        ]

    def ask(self, orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Tell the first processes one order each, all at once; their answers."""
        for process, order in zip(self.running, orders, strict=False):
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # its answer will be missed, and says why
                print(json.dumps(order), file=process.stdin, flush=True)
        return [self._answer(rank) for rank in range(len(orders))]

    def _answer(self, rank: int) -> dict[str, Any]:
        stream = self.running[rank].stdout
        assert stream is not None
        line = stream.readline()
        if not line:
            raise SystemExit(f"{self.running[rank].args!r} ended:\n{self.logs[rank].read_text()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        for process in self.running:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.running:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running = []


def versions(python: str, option: str, *names: str) -> dict[str, str]:
    """What a rival's environment holds."""
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    try:
        told = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{option} {python} lacks one of {names}; set it up as --help says ({error})") from None
    found: dict[str, str] = json.loads(told.stdout)
    return found
