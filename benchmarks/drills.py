"""Operators' drills: what breaks in practice, with real processes on loopback over TLS, and how long recovery takes.

    python benchmarks/drills.py [--only network-cut --only disk-full-site] [--sites 20] [--rounds 200] [--keep FOLDER]

Each drill is a federation of its own on the embedded digits. After it the books are compared:
the coordinator's ledger with what was released, and each site's ledger with the rounds that it answered. A check that
fails ends the drill with its traceback. One JSON line a drill; `seconds` are by the clock, from the end of the fault
to the first round with everybody. Shoal is imported once and forked, so a restart does not import it again.

With `--keep` the federation of many-kills stays in that folder, with what was seen in kills.jsonl, and the same
command goes on where an earlier one was interrupted.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import shoal
from shoal.accounting.privacy_ledger import Record
from shoal.data import load
from shoal.training.run_folder import CHECKPOINT
from support.deployed import Deployed, config, deployed
from support.ports import free_port

PATIENCE = 900.0  # seconds for a drill
ENDLESS = 10_000  # rounds, the most that sites accept: the drill ends the run
COORDINATOR = 50  # rounds between kills of the coordinator in many-kills
DIE_TOO = "import ctypes; ctypes.CDLL(None).prctl(1, 9)"  # on Linux: SIGKILL when the process that forks them ends
Facts = dict[str, Any]


# ---------------------------------------------------------------- the books


def check(federation: Deployed, folders: dict[int, list[str]]) -> Facts:
    """Assert that nothing was lost: every release is charged, and so is every answer, at the site that gave it.

    `folders` are those that each site has had.
    """
    found, own = Record.read(federation.run / "ledger.jsonl")
    assert found.whole, found.because
    intents = [(intent.round, intent.attempt) for intent in own.charged]
    commits = [(commit.round, commit.attempt) for commit in own.commits]
    assert len(set(intents)) == len(intents), "two attempts at a round have one number"
    assert all(intent.charges for intent in own.charged), "a round is in the ledger without a charge"
    assert set(commits) <= set(intents), "a model was released that was not charged before"
    every_round = list(range(1, len(commits) + 1))
    assert [number for number, _ in commits] == every_round, "a round was released twice, or never"
    released = (federation.run / CHECKPOINT).read_bytes()
    assert own.commits[-1].model == hashlib.sha256(released).hexdigest(), "the ledger does not know the model"
    lines = federation.metrics()
    assert [line["round"] for line in lines] == every_round, "a round has no line of metrics"
    answered = charged = 0
    for number, names in folders.items():
        told = (federation.folder / f"site-{number}.log").read_text()
        answers = [int(found) for found in re.findall(r"round (\d+): answered", told)]
        rounds = sum(_rounds_charged(federation.folder / name / "ledger.jsonl") for name in names)
        assert rounds >= len(answers), f"site {number} answered {len(answers)} times, and charged {rounds} rounds"
        if len(names) == 1 and answers:  # with one ledger it also pays for the rounds that it missed
            assert rounds >= max(answers), f"site {number} answered round {max(answers)}, and charged {rounds} rounds"
        answered, charged = answered + len(answers), charged + rounds
    counted = sum(line["clients"] for line in lines)
    assert counted <= answered, "the coordinator counts answers that no site has given"
    return {
        "rounds": len(commits),
        "attempts": len(intents),
        "answers counted": counted,
        "answers given": answered,
        "rounds charged by sites": charged,
    }


def _rounds_charged(path: Path) -> int:
    """The rounds in a site's ledger, in which one line may stand for several."""
    found, record = Record.read(path)
    assert found.whole, f"{path}: {found.because}"
    return record.charged[-1].round if record.charged else 0


# ---------------------------------------------------------------- federations


class Mortal(Deployed):
    """A federation whose processes do not outlive the drill, however it ends."""

    def _start(self, log: str, words: list[str], *death: Any, **named: Any) -> Any:
        return super()._start(log, words, *death, first=DIE_TOO, **named)


@contextmanager
def federation(
    sites: int = 3, rounds: int = ENDLESS, deadline: float = 30.0, keep: Path | None = None
) -> Iterator[Deployed]:
    """A folder with keys and a configuration, or what `keep` has of them; everybody is ended with it."""
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as place:
        folder = Path(place).absolute()
        if not (folder / "federation.toml").exists():
            folder.mkdir(parents=True, exist_ok=True)
            deployed(folder, sites)
            config(folder, rounds=rounds, seeded="false", deadline=deadline, sites=sites)
        made = Mortal(folder, free_port(), end=time.monotonic() + PATIENCE)
        try:
            yield made
        finally:
            made.away()


def complete(made: Deployed, sites: int, after: int) -> Callable[[], bool]:
    """Whether a round after this one had all sites in its sum."""
    return lambda: any(line["clients"] == sites for line in made.metrics()[after:])


def recovered(made: Deployed, sites: int, since: float) -> float:
    """Wait for a round with everybody that begins from now on, and return the seconds since the fault ended."""
    made.until(complete(made, sites, len(made.metrics())), "a round with everybody")
    return round(time.monotonic() - since, 2)


def stop(made: Deployed, coordinator: Any) -> None:
    """Interrupt the coordinator, as its operator would."""
    coordinator.signal(signal.SIGINT)
    assert made.ended(coordinator) == [130], coordinator.said
    made.started.remove(coordinator)  # `until` takes anybody's failure for the end


def own(sites: int) -> dict[int, list[str]]:
    """The folders of sites that never lost theirs."""
    return {number: [f"own-{number}"] for number in range(sites)}


def killed(made: Deployed, child: Any) -> float:
    """SIGKILL; returns when."""
    child.signal(signal.SIGKILL)
    made.ended(child)
    return time.monotonic()


# ---------------------------------------------------------------- drills


def first_round(_: argparse.Namespace) -> Facts:
    """Three sites with files of their own and a coordinator start together and import everything themselves.

    Shoal is compiled before, as an installer does.
    """
    compileall.compile_dir(Path(shoal.__file__).parent, quiet=1)
    with federation(rounds=1) as made:
        _write_files(made.folder, 3)
        serve = (
            "serve",
            "federation.toml",
            "-c",
            "data.name=held-out.npz",
            "--keys",
            "keys",
            "--port",
            str(made.port),
        )
        begun = time.monotonic()
        children = {"coordinator": _command(made, *serve)}
        for number in range(3):
            words = ["join", f"127.0.0.1:{made.port}", "--data", f"data-{number}.npz", "--no-guarantee"]
            words += ["--key", f"site-{number}.key", "--ca", "keys/ca.pem", "--folder", f"own-{number}"]
            children[f"site-{number}"] = _command(made, *words)
        try:
            while not made.metrics():
                failed = [name for name, child in children.items() if child.poll()]
                assert not failed, f"{failed} ended: {(made.folder / 'serve.log').read_text()}"
                time.sleep(0.02)
            seconds = time.monotonic() - begun
            used = {name: round(_processor_seconds(child.pid), 2) for name, child in children.items()}
            for child in children.values():
                assert child.wait(120) == 0
        finally:
            for child in children.values():
                child.kill()
                child.wait()
        return {"seconds": round(seconds, 2), "processor seconds": used, **check(made, own(3))}


def _write_files(folder: Path, sites: int) -> None:
    """The digits, as each site's file and the coordinator's held-out rows."""
    digits = load("digits")
    np.savez(folder / "held-out.npz", x=digits.test_x.numpy(), y=digits.test_y.numpy())
    for number in range(sites):
        rows = slice(number, None, sites)
        np.savez(folder / f"data-{number}.npz", x=digits.train_x[rows].numpy(), y=digits.train_y[rows].numpy())


def _command(made: Deployed, *words: str) -> subprocess.Popen[bytes]:
    log = "serve.log" if words[0] == "serve" else f"{words[words.index('--key') + 1].removesuffix('.key')}.log"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from shoal.cli.main import main; main()", *words]
    with (made.folder / log).open("wb") as file:
        return subprocess.Popen(command, cwd=made.folder, stdout=file, stderr=file, env=environment)


def _processor_seconds(pid: int) -> float:
    told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")


def coordinator_killed(_: argparse.Namespace) -> Facts:
    """SIGKILL at five moments of a round, and --resume each time; the sites stay."""
    with federation() as made:
        for number in range(3):
            made.join(number)
        words, seconds = ["federation.toml"], {}
        for moment in ("charged", "asked", "answered", "written", "committed"):
            dying = made.serve(*words, index=moment, round=len(made.metrics()) + 2)
            assert made.ended(dying) == [-signal.SIGKILL], dying.said
            since, words = time.monotonic(), ["--resume", str(made.run)]
            last = made.serve(*words)
            seconds[moment] = recovered(made, 3, since)
            stop(made, last)
            check(made, own(3))
        return {"seconds": seconds, **check(made, own(3))}


def _sites_killed(folder: str) -> Facts:
    with federation() as made:
        coordinator = made.serve("federation.toml")
        sites = [made.join(number) for number in range(3)]
        made.until(complete(made, 3, 0), "the first round")
        seconds, folders = [], own(3)
        for kill in range(3):
            since = killed(made, sites[1])
            if folder == "new":
                folders[1].append(f"new-{kill}")
            sites[1] = made.join(1, folder=folders[1][-1])
            seconds.append(recovered(made, 3, since))
        stop(made, coordinator)
        return {"seconds": seconds, **check(made, folders)}


def site_killed_same_folder(_: argparse.Namespace) -> Facts:
    """A site is killed three times and restarted in its folder."""
    return _sites_killed("same")


def site_killed_new_folder(_: argparse.Namespace) -> Facts:
    """A site is killed three times and restarted with its key, but without its folder."""
    return _sites_killed("new")


@contextmanager
def small_disk(folder: Path, megabytes: int = 8) -> Iterator[Callable[[], Callable[[], None]]]:
    """A file system of its own at this folder; yields what fills it, which returns what makes room again."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "drill", str(folder)], check=True)

    def fill() -> Callable[[], None]:
        filler = folder / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        return filler.unlink

    try:
        yield fill
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def disk_full_site(_: argparse.Namespace) -> Facts:
    """A site's disk is full for some rounds. It refuses them, and nothing that leaves it is uncharged."""
    with federation() as made, small_disk(made.folder / "own-1") as fill:
        coordinator = made.serve("federation.toml")
        for number in range(3):
            made.join(number)
        made.until(complete(made, 3, 0), "the first round")
        free = fill()
        made.until(lambda: made.metrics()[-1]["clients"] == 2, "the site refuses")
        after = len(made.metrics())
        made.until(lambda: len(made.metrics()) > after + 2, "rounds go on without it")
        free()
        seconds = recovered(made, 3, time.monotonic())
        stop(made, coordinator)
        refused = sum(report["what"] == "refused" for line in made.metrics() for report in line.get("reports", ()))
        return {"seconds": seconds, "rounds refused": refused, **check(made, own(3))}


def disk_full_coordinator(_: argparse.Namespace) -> Facts:
    """The coordinator's disk is full: it ends with an error, and goes on with --resume once there is room."""
    with federation() as made, small_disk(made.folder / "runs") as fill:
        coordinator = made.serve("federation.toml")
        for number in range(3):
            made.join(number)
        made.until(complete(made, 3, 0), "the first round")
        free = fill()
        code = made.ended(coordinator)[0]
        assert code > 0, coordinator.said
        said = coordinator.said.strip().splitlines()[-1]
        assert "No space left" in said, said
        made.started.remove(coordinator)
        free()
        since = time.monotonic()
        again = made.serve("--resume", str(made.run))
        seconds = recovered(made, 3, since)
        stop(made, again)
        return {"seconds": seconds, "said": said[-160:], **check(made, own(3))}


def clock_skew(_: argparse.Namespace) -> Facts:
    """Clocks four minutes ahead and behind take part; one ten minutes ahead is told both times."""
    with federation() as made:
        coordinator = made.serve("federation.toml")
        begun = time.monotonic()
        made.join(0, skew=240.0)
        made.join(1, skew=-240.0)
        wrong = made.join(2, skew=600.0)
        code = made.ended(wrong)[0]
        said = wrong.said.strip().splitlines()[-1]
        assert code == 2, wrong.said
        assert "ahead" in said, said
        made.started.remove(wrong)
        made.join(2)
        made.until(complete(made, 3, 0), "a round with everybody")
        seconds = round(time.monotonic() - begun, 2)
        stop(made, coordinator)
        return {"seconds": seconds, "said": said[-200:], **check(made, own(3))}


class Proxy:
    """Passes connections on to a port, until it is cut: then it holds what was sent, and accepts nothing."""

    def __init__(self, port: int) -> None:
        self._to, self._cut, self._open = port, threading.Event(), True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Packets vanish: connections stay open, and nothing passes."""
        self._cut.set()

    def mend(self) -> None:
        """What was held is passed on, like packets sent again."""
        self._cut.clear()

    def close(self) -> None:
        """Stop."""
        self._open = False
        self._listener.close()

    def _accept(self) -> None:
        while self._open:
            with suppress(OSError):
                made, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(made,), daemon=True).start()

    def _carry(self, ours: socket.socket) -> None:
        self._while_cut()
        with ours, suppress(OSError), socket.create_connection(("127.0.0.1", self._to)) as theirs:
            other = {ours: theirs, theirs: ours}
            while self._open:
                for ready in select.select(list(other), [], [], 0.5)[0]:
                    content = ready.recv(65536)
                    self._while_cut()
                    if not content:
                        return
                    other[ready].sendall(content)

    def _while_cut(self) -> None:
        while self._cut.is_set() and self._open:
            time.sleep(0.05)


def network_cut(given: argparse.Namespace) -> Facts:
    """One of three sites is cut off for a minute; rounds go on, and it comes back by itself."""
    with federation() as made:
        coordinator, proxy = made.serve("federation.toml"), Proxy(made.port)
        try:
            for number in range(3):
                made.join(number, port=proxy.port if number == 1 else None)
            made.until(complete(made, 3, 0), "the first round")
            before, begun = len(made.metrics()), time.monotonic()
            proxy.cut()
            made.until(lambda: made.metrics()[-1]["clients"] == 2, "it is missed")
            missed = round(time.monotonic() - begun, 2)
            time.sleep(max(0.0, given.cut - (time.monotonic() - begun)))
            meanwhile = len(made.metrics()) - before
            assert meanwhile > 1, "rounds did not go on"
            proxy.mend()
            seconds = recovered(made, 3, time.monotonic())
        finally:
            proxy.close()
        stop(made, coordinator)
        return {"cut for": given.cut, "seconds until missed": missed, "rounds meanwhile": meanwhile,
                "seconds": seconds, **check(made, own(3))}  # fmt: skip


class Kills:
    """Who was killed and how long it was away, one line each in a file, so that an interrupted drill goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._facts = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self._away: dict[str, tuple[float, int]] = {}  # since when, and how much it had said

    def killed(self, name: str, round: int, said: int = 0) -> None:
        """Note a kill after this round."""
        self._away[name] = time.monotonic(), said
        self._note(name=name, round=round)

    def away(self) -> dict[str, int]:
        """Who is not back, and how much each had said when it was killed."""
        return {name: said for name, (_, said) in self._away.items()}

    def back(self, name: str) -> None:
        """Note that somebody does its part again."""
        since, _ = self._away.pop(name)
        self._note(name=name, seconds=round(time.monotonic() - since, 2))

    def facts(self) -> Facts:
        """How many were killed, and the median and the longest time until they were back."""
        found: Facts = {}
        for what, mine in (("sites", False), ("coordinator", True)):
            lines = [line for line in self._facts if (line["name"] == "coordinator") is mine]
            waits = sorted(line["seconds"] for line in lines if "seconds" in line)
            found[f"{what} killed"] = len(lines) - len(waits)
            if waits:
                found[f"{what} back after seconds, median and most"] = [waits[len(waits) // 2], waits[-1]]
        return found

    def _note(self, **fact: Any) -> None:
        self._facts.append(fact)
        with self._path.open("a") as file:
            file.write(json.dumps(fact) + "\n")


def many_kills(given: argparse.Namespace) -> Facts:
    """Of 20 sites a tenth is killed for each round and restarted, and the coordinator once in 50 rounds."""
    with federation(given.sites, given.rounds, keep=given.keep) as made:
        begun, before, kills = time.monotonic(), len(made.metrics()), Kills(made.folder / "kills.jsonl")
        chance = random.Random(before)
        words = ["--resume", str(made.run)] if before else ["federation.toml", "-c", "federation.min_sites=1"]
        coordinator = made.serve(*words)
        sites = {number: made.join(number) for number in range(given.sites)}
        made.until(complete(made, given.sites, before), "the first round")
        started, first = time.monotonic(), len(made.metrics())
        seen = first
        while coordinator.process.is_alive():
            done = len(made.metrics())
            for name, said in kills.away().items():
                if done > said if name == "coordinator" else "answered" in sites[int(name)].said[said:]:
                    kills.back(name)
            if done == seen or done >= given.rounds - 1:
                time.sleep(0.02)
                continue
            if done // COORDINATOR > seen // COORDINATOR:
                killed(made, coordinator)
                kills.killed("coordinator", done, done)
                coordinator = made.serve("--resume", str(made.run))
            there = [number for number in sites if str(number) not in kills.away()]
            victims = max(1, given.sites // 10) * (done - seen)
            for number in chance.sample(there, min(victims, len(there) - 1)):
                killed(made, sites[number])
                kills.killed(str(number), done, len(sites[number].said))
                sites[number] = made.join(number)
            seen = done
        assert made.ended(coordinator) == [0], coordinator.said
        seconds = time.monotonic() - started
        late = [sites.pop(int(name)) for name in kills.away()]  # they look for a coordinator that has ended
        codes = made.ended(*sites.values())
        assert not any(codes), f"sites ended with {codes}"
        for site in late:
            site.away()
        facts = check(made, own(given.sites))
        assert facts["rounds"] == given.rounds
        return {
            "sites": given.sites,
            **kills.facts(),
            "not back at the end": len(late),
            "seconds to start": round(started - begun, 2),
            "seconds a round": round(seconds / max(given.rounds - first, 1), 2),
            "mean answers a round": round(facts["answers counted"] / given.rounds, 2),
            **facts,
        }


DRILLS = {
    "first-round": first_round,
    "coordinator-killed": coordinator_killed,
    "site-killed-same-folder": site_killed_same_folder,
    "site-killed-new-folder": site_killed_new_folder,
    "disk-full-site": disk_full_site,
    "disk-full-coordinator": disk_full_coordinator,
    "clock-skew": clock_skew,
    "network-cut": network_cut,
    "many-kills": many_kills,
}


def main() -> None:
    """Carry out the drills and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=DRILLS, help="one drill; may be repeated")
    parser.add_argument("--sites", type=int, default=20, help="of many-kills")
    parser.add_argument("--rounds", type=int, default=200, help="of many-kills")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of many-kills: go on with what is there")
    parser.add_argument("--cut", type=float, default=60.0, help="seconds of network-cut")
    given = parser.parse_args()
    failed = False
    for name in given.only or DRILLS:
        facts: Facts = {"drill": name, "load": round(os.getloadavg()[0], 1)}
        if name.startswith("disk-full") and os.geteuid() != 0:
            print(json.dumps(facts | {"skipped": "it needs root, to mount a small disk"}), flush=True)
            continue
        try:
            facts |= DRILLS[name](given)
        except AssertionError:
            traceback.print_exc()
            failed, facts = True, facts | {"failed": True}
        print(json.dumps(facts | {"load after": round(os.getloadavg()[0], 1)}), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
