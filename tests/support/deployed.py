"""A federation of processes on loopback, with TLS and keys, on the embedded digits; who was started, and what the
coordinator has written."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.federation.key_making import make_authority, make_site
from support.deploy_children import Child, start
from support.ports import free_port

PATIENCE = 240.0  # seconds for all that a test waits for together; a quiet machine needs a twentieth
CONFIG = """
algorithm = "{algorithm}"
model = "linear"
rounds = {rounds}
[data]
name = "digits"
clients = {sites}
[clients]
sampling = "all"
[local]
steps = 2
[engine]
device = "cpu"
threads = 1
[federation]
seeded = {seeded}
deadline = {deadline}
"""


def config(
    folder: Path,
    algorithm: str = "trusted-curator",
    rounds: int = 4,
    seeded: str = "true",
    deadline: float = 60.0,
    sites: int = 3,
) -> Path:
    """The configuration in the folder."""
    path = folder / "federation.toml"
    path.write_text(CONFIG.format(algorithm=algorithm, rounds=rounds, seeded=seeded, deadline=deadline, sites=sites))
    return path


def deployed(folder: Path, sites: int = 3, patience: float = PATIENCE) -> Deployed:
    """A folder with keys for so many sites and for a stranger; nothing is started yet."""
    make_authority(folder / "keys", ["127.0.0.1", "localhost"], 30)
    for name in (*(f"site-{number}" for number in range(sites)), "stranger"):
        _, public = make_site(folder, name)
        if name != "stranger":
            public.rename(folder / "keys" / "sites" / public.name)
    return Deployed(folder, free_port(), end=time.monotonic() + patience)


@dataclass
class Deployed:
    """The folder of a federation, and the processes that were started in it."""

    folder: Path
    port: int
    started: list[Child] = field(default_factory=list)
    end: float = 0.0

    def serve(self, *words: str, index: str = "never", round: int = 0) -> Child:
        """A coordinator, which kills itself at that moment of that round."""
        words = ("serve", "--keys", "keys", "--port", str(self.port), *words)
        return self._start("serve.log", list(words), index, round)

    def join(
        self,
        number: int,
        key: str | None = None,
        ca: str = "keys/ca.pem",
        folder: str | None = None,
        port: int | None = None,
        skew: float = 0.0,
        more: tuple[str, ...] = (),
    ) -> Child:
        """A site, whose clock is wrong by `skew` seconds, with more words on its command line."""
        name = key or f"site-{number}"
        words = ["join", f"127.0.0.1:{port or self.port}", "--data", "digits", "--part", str(number)]
        words += ["--key", f"{name}.key", "--ca", ca, "--folder", folder or f"own-{number}"]
        words += ["--no-guarantee", *more]
        return self._start(f"{name}.log", words, skew=skew)

    def _start(self, log: str, words: list[str], *death: Any, **named: Any) -> Child:
        self.started.append(start(self.folder, log, words, *death, **named))
        return self.started[-1]

    def until(self, fact: Any, what: str) -> None:
        """Wait for it, while everybody who was started and not killed is alive."""
        while not fact():
            said = "".join(f"\n--- {child.words}\n{child.said}" for child in self.started)
            assert time.monotonic() < self.end, f"it did not come to pass: {what}{said}"
            failed = [child.words for child in self.started if (child.process.exitcode or 0) > 0]
            assert not failed, f"{what}: {failed} ended before that{said}"
            time.sleep(0.05)

    def still(self, seconds: float) -> Any:
        """Has no round been played for so long? Each call looks again."""
        seen = [(len(self.metrics()), time.monotonic())]

        def fact() -> bool:
            if len(self.metrics()) != seen[-1][0]:
                seen.append((len(self.metrics()), time.monotonic()))
            return time.monotonic() - seen[-1][1] > seconds

        return fact

    def ended(self, *children: Child) -> list[int]:
        """How they ended; a busy machine may have taken long to get here, so each has time for that alone."""
        return [child.ended(max(self.end, time.monotonic() + 60)) for child in children]

    def away(self) -> None:
        """End everybody."""
        for child in self.started:
            child.away()

    @property
    def run(self) -> Path:
        (found,) = (path for path in (self.folder / "runs").iterdir() if path.is_dir())
        return found

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of all rounds so far."""
        files = list(self.folder.glob("runs/*/metrics.jsonl"))
        lines = files[0].read_text().splitlines(keepends=True) if files else []
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half written just now
