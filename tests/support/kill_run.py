"""Kills runs and checks, after each kill, what must always hold (DESIGN, "What must always hold", 1 and 4).

    kill_run.py random FOLDER --kills 20    private runs, killed at random moments, resumed each time
    kill_run.py steps FOLDER                a private run, killed at every step of writing to the disk
    kill_run.py same FOLDER --kills 3       fedavg, killed at random moments: the same model in the end
    kill_run.py ranks FOLDER --kills 20     private runs on 2 to 4 ranks, one of which is killed at a random moment

Torch is imported once; each life of a run is a forked child, so that a kill costs milliseconds. The output is a JSON
object with what was seen; of `random` and `ranks` one for each run, which is killed 25 times, as what a kill costs
grows with the run (--first: how many runs to leave out, which were killed before). A check that fails ends the script
with its traceback.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import io
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from select import select
from typing import Any

import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from shoal.accounting.claims import Unit
from shoal.accounting.events import from_json
from shoal.accounting.hash_chain import Line, read
from shoal.accounting.rdp import Running
from shoal.algorithms.charges import charges
from shoal.config import configure
from shoal.mechanisms.mechanism import ADJACENCIES
from shoal.mechanisms.setting import Setting
from shoal.random.streams import Streams
from shoal.saved_model import load_model
from shoal.training.budget import Spending
from shoal.training.run_folder import CHECKPOINT

sys.path.insert(0, str(Path(__file__).parents[1]))  # where it is run as a script
from support.ports import free_port
from support.tiny import CLIENTS, FEDAVG, PRIVATE, go_on, network, play

DELTA = 1e-5
KILLS = 25  # of one run
PATIENCE = 600.0  # seconds for a process to end
FILES = {
    "config.toml",
    "data-key.json",
    "environment.txt",
    "ledger.jsonl",
    "metrics.jsonl",
    "model.safetensors",
    "model.json",
    "report.html",
    "result.json",
    ".lock",
    "checkpoint",
}


# ---------------------------------------------------------------- the life of a child


def live(root: Path, config: dict[str, Any], before: Callable[[], None] = lambda: None) -> int:
    """Fork a child that starts the run under `root`, or goes on with it; its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        die_with_parent()
        torch.set_num_threads(1)
        Spending.proven = lambda _: []  # type: ignore[method-assign]  # the last word of a run: slow, and not tried here
        _tell_of_noise(root)
        before()
        run = find(root)
        if run is None:
            shutil.rmtree(root / "runs", ignore_errors=True)
            play(root / "runs", config)
        else:
            go_on(run)
        status = 0
    except BaseException as error:
        if not getattr(error, "silent", False):
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def die_with_parent() -> None:
    """No process outlives the one that started it, however that ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def find(root: Path) -> Path | None:
    """The folder of the run, once it can be resumed."""
    found = list((root / "runs").glob("*/config.toml"))
    return found[0].parent if found else None


def ended(child: int) -> int:
    """How a child ended: its exit code, or minus the signal that killed it."""
    until = time.monotonic() + PATIENCE
    while not (found := os.waitpid(child, os.WNOHANG))[0]:
        assert time.monotonic() < until, "a process has not ended"
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(found[1])


def _tell_of_noise(root: Path) -> None:
    """Write down each stream of noise that is drawn, and what the ledger's last line was at that moment."""
    plain, write = Streams.generator, os.write
    log = os.open(root / "noise.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def generator(streams: Streams, purpose: str, *numbers: int) -> Any:
        if "noise" in purpose:
            run = find(root)
            last = (run / "ledger.jsonl").read_bytes().splitlines()[-1] if run else b"null"
            drawn = plain(streams, purpose, *numbers).standard_normal(4).tolist()
            fact = {"purpose": purpose, "numbers": numbers, "drawn": drawn, "ledger": json.loads(last)}
            write(log, json.dumps(fact).encode() + b"\n")
        return plain(streams, purpose, *numbers)

    Streams.generator = generator  # type: ignore[method-assign]


def killed(root: Path, config: dict[str, Any], chance: random.Random, ranks: int = 1) -> list[str]:
    """One life, ended from outside: a random number of steps of writing, a random moment, SIGKILL.

    Should this process sleep too long, the child waits for its end a few steps on: it plays no more rounds than that.
    Of several ranks a random one is killed, and the others must end by themselves; returns what they say.
    """
    ticks, ticking = os.pipe()
    over = root / "over"  # there once a rank has been killed
    over.unlink(missing_ok=True)
    steps = chance.randrange(ranks > 1, 40)  # what dies before all ranks have met is torchrun's to notice

    def tick() -> None:
        real, write = os.fsync, os.write
        left, parent = steps + 4, os.getppid()

        def fsync(file: int) -> None:
            nonlocal left
            left -= 1
            while left < 0 and os.getppid() == parent and not over.exists():
                time.sleep(0.01)
            write(ticking, b".")
            real(file)

        os.fsync = fsync

    port, said = free_port(), root / "said.txt"
    said.unlink(missing_ok=True)

    def begin(rank: int) -> None:
        if ranks > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            os.environ["MASTER_PORT"] = str(port)
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        if rank == 0:
            tick()

    children = [live(root, config, partial(begin, rank)) for rank in range(ranks)]
    for _ in range(steps):
        assert select([ticks], [], [], 60)[0], "the run does not go on"
        os.read(ticks, 1)
    time.sleep(chance.uniform(0.0, 0.01 if steps else 0.1 * ranks))
    child = children.pop(chance.randrange(ranks))
    os.kill(child, signal.SIGKILL)
    assert ended(child) == -signal.SIGKILL, "the run ended by itself"
    over.touch()
    for other in children:
        assert ended(other) == 1, "a rank did not notice"
    os.close(ticks)
    os.close(ticking)
    lines = said.read_text().splitlines() if said.exists() else []
    return [line for line in lines if not line.startswith("[")]  # of torch's own logs


def die_at(step: int, half: bool) -> Callable[[], None]:
    """Makes a child kill itself at its n-th step of writing to the disk, or in the middle of its n-th write."""

    def arm() -> None:
        left = step
        real_open, real_write = io.open, os.write

        def step_done() -> bool:
            nonlocal left
            left -= 1
            return left == 0

        def die() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def dying(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                if step_done():
                    die()
                return real(*arguments)

            return call

        def open_and_die(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            opened = real_open(file, mode, *rest, **named)
            if "r" not in mode and step_done():
                die()
            return opened

        def half_a_write(file: int, content: bytes) -> int:
            if step_done():
                real_write(file, bytes(content)[: len(content) // 2])
                die()
            return real_write(file, content)

        if half:
            os.write = half_a_write
            return
        for name in ("write", "fsync", "replace"):
            setattr(os, name, dying(getattr(os, name)))
        io.open = open_and_die  # type: ignore[assignment]  # what Path.open calls

    return arm


# ---------------------------------------------------------------- what must hold after a kill


@dataclass
class Seen:
    """What the ledger and the folder held at the last look, and counts of what kills left behind."""

    intents: list[str] = field(default_factory=list)
    epsilon: dict[Unit, float] = field(default_factory=dict)
    round: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def look(root: Path, seen: Seen) -> None:
    """Check a run that nobody holds, without changing it."""
    run = find(root)
    if run is None:
        seen.count("before the run could be resumed")
        return
    intents, commits, torn = read_ledger(run)
    hashes = [line.hash for line in intents]
    assert hashes[: len(seen.intents)] == seen.intents, "an intent has gone from the ledger"
    epsilon = spent(intents)
    for unit, before in seen.epsilon.items():
        now = epsilon.get(unit, math.inf)  # no bound at all, once a round without noise is charged
        assert now >= before, f"epsilon of a {unit} went down from {before} to {now}"
    charged = [(line.body["attempt"], each) for line in intents for each in _rounds(line)]
    assert len(charged) == len(set(charged)), "two attempts at a round have one number"
    _look_at_noise(root, intents)
    round = _look_at_checkpoint(run, intents, commits, seen)
    _look_at_metrics(run, round)
    leftover = {path.name.removesuffix(".part") for path in run.iterdir()}
    assert leftover <= FILES, f"unknown files in the run: {leftover - FILES}"
    if torn:
        seen.count("a torn line in the ledger")
    if list(run.rglob("*.part")):
        seen.count("a file half written beside the old one")
    if hashes == seen.intents:
        seen.count("nothing charged in this life")
    seen.intents, seen.epsilon, seen.round = hashes, epsilon, round


def read_ledger(run: Path) -> tuple[list[Line], list[Line], bool]:
    """Intents, commits, and whether the last line is torn; the chain must hold."""
    lines: list[Line] = []
    with (run / "ledger.jsonl").open("rb") as file:
        found, _ = read(file, lines.append)
    assert found.whole, found.because
    return [x for x in lines if x.kind == "intent"], [x for x in lines if x.kind == "commit"], found.torn


def spent(intents: list[Line]) -> dict[Unit, float]:
    """What all that was charged costs, of those pairs against the release of which something is proven."""
    charges = [charge for line in intents for charge in line.body["charges"] if charge["observer"] == "release"]
    running = {charge["unit"]: Running(ADJACENCIES[charge["unit"]]) for charge in charges}
    for charge in charges:
        running[charge["unit"]].add(from_json(charge["event"]))
    costs = {unit: each.epsilon(DELTA) for unit, each in running.items()}
    return {unit: cost for unit, cost in costs.items() if cost is not None}


def _look_at_checkpoint(run: Path, intents: list[Line], commits: list[Line], seen: Seen) -> int:
    """Its round; a model on the disk is one that the ledger knows."""
    path = run / CHECKPOINT
    if not path.exists():
        return 0
    with safe_open(path, framework="np") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        notes = file.metadata()
    assert tensors["model"].shape == (10,)
    round, digest = int(notes["round"]), hashlib.sha256(path.read_bytes()).hexdigest()
    assert round >= seen.round, f"the checkpoint went back from round {seen.round} to {round}"
    if any(line.body["model"] == digest and line.body["round"] == round for line in commits):
        return round
    assert intents, "a checkpoint, but no intent"
    assert (intents[-1].body["round"], intents[-1].hash) == (round, notes["ledger"]), "the ledger does not know it"
    seen.count("a model written, its commit not")
    return round


def _look_at_noise(root: Path, intents: list[Line]) -> None:
    """All noise was charged on the disk before it was drawn, and none was drawn twice."""
    path = root / "noise.jsonl"
    facts = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    charged = {line.hash for line in intents}
    for fact in facts:
        t, attempt = fact["numbers"][:2]
        line = fact["ledger"]
        assert line["kind"] == "intent", f"noise of round {t + 1} was drawn after a line of kind {line['kind']}"
        assert line["hash"] in charged
        assert line["first"] <= t + 1 <= line["round"]
        assert line["attempt"] == attempt + 1
    names = [(fact["purpose"], *fact["numbers"]) for fact in facts]
    assert len(set(names)) == len(names), "a stream of noise was drawn twice"
    assert len({tuple(fact["drawn"]) for fact in facts}) == len(facts), "two streams gave the same noise"


def _look_at_metrics(run: Path, round: int) -> None:
    """Every round of the checkpoint has its line; only the last line may be torn."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line)["round"] for line in lines if line.endswith("\n")]
    assert len(lines) - len(whole) <= 1
    assert whole[:round] == list(range(1, round + 1))


def _rounds(intent: Line) -> range:
    return range(intent.body["first"], intent.body["round"] + 1)


# ---------------------------------------------------------------- the three experiments


def warm(root: Path, config: dict[str, Any]) -> None:
    """Import and compute here what every run needs, so that no child has to."""
    torch.set_num_threads(1)
    play(root / "warm", config | {"rounds": 1})
    for charge in charges(configure(config).algorithm, Setting(CLIENTS, config["rounds"]), 0):
        Running(ADJACENCIES[charge.unit]).add(charge.event)


def at_random(root: Path, kills: int, seed: int) -> dict[str, Any]:
    """A private run that never ends, killed at random moments."""
    config = PRIVATE | {"rounds": 5_000}
    warm(root, config)
    chance, seen = random.Random(seed), Seen()
    start = time.perf_counter()
    for _ in range(kills):
        killed(root, config, chance)
        look(root, seen)
    run = find(root)
    assert run is not None
    intents, commits, _ = read_ledger(run)
    rounds = [each for line in intents for each in _rounds(line)]
    return {
        "kills": kills,
        "seconds": round(time.perf_counter() - start, 1),
        "rounds released": seen.round,
        "rounds charged": len(rounds),
        "charged again": len(rounds) - len(set(rounds)),
        "most attempts at one round": max(line.body["attempt"] for line in intents),
        "commits": len(commits),
        "epsilon charged": seen.epsilon,
        "epsilon of one attempt a round": spent(intents[: seen.round]),
        "left by kills": seen.counts,
    }


def at_every_step(root: Path) -> dict[str, Any]:
    """A private run of three rounds in two checkpoints, killed before each step of writing, then finished."""
    config = PRIVATE | {"rounds": 3, "engine.checkpoint_every": 2}
    warm(root, config)
    totals = Seen()
    steps = 0
    for half in (False, True):
        for step in range(1, 1000):
            place = root / f"{step}{'half' if half else ''}"
            place.mkdir()
            seen = Seen(counts=totals.counts)
            if ended(live(place, config, die_at(step, half))) == 0:
                break
            look(place, seen)
            assert ended(live(place, config)) == 0, f"no resume after a kill at step {step}"
            look(place, seen)
            run = find(place)
            assert seen.round == 3
            assert run is not None
            assert load_model(run, model=network()).bundle.claims == ()
            assert not list(run.rglob("*.part"))
            steps += 1
    return {"steps": steps, "left by kills": totals.counts}


def to_the_same_end(root: Path, kills: int, seed: int) -> dict[str, Any]:
    """Fedavg, whole and killed again and again: the same model and metrics to the last bit."""
    config = FEDAVG | {"local.momentum": 0.5, "local.keep_momentum": True, "server.momentum": 0.5}
    config |= {"rounds": 11 * kills}  # more than the kills can let it play
    warm(root, config)
    chance, seen = random.Random(seed), Seen()
    whole, broken = root / "whole", root / "broken"
    for place in (whole, broken):
        place.mkdir()
    assert ended(live(whole, config)) == 0
    for _ in range(kills):
        killed(broken, config, chance)
        look(broken, seen)
    at = seen.round
    assert ended(live(broken, config)) == 0
    results = [_result(place) for place in (whole, broken)]
    assert results[0] == results[1], "the resumed run ended elsewhere"
    return {"kills": kills, "round at the last kill": at, "left by kills": seen.counts}


def one_rank_of_several(root: Path, kills: int, seed: int) -> dict[str, Any]:
    """A private run that never ends, on another number of ranks in each life, of which one is killed."""
    config = PRIVATE | {"rounds": 5_000}
    warm(root, config)
    chance, seen = random.Random(seed), Seen()
    lines: dict[int, int] = {}
    start = time.perf_counter()
    for _ in range(kills):
        said = killed(root, config, chance, chance.choice((2, 3, 4)))
        for line in said:
            assert re.match(r"Lost: .*rank.* of \d has gone: its process was killed", line), line
        lines[len(said)] = lines.get(len(said), 0) + 1
        look(root, seen)
    facts = {"kills": kills, "seconds": round(time.perf_counter() - start, 1), "rounds released": seen.round}
    return facts | {"lives by lines said": lines, "left by kills": seen.counts}


def _result(root: Path) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    run = find(root)
    assert run is not None
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    model = {name: tensor.tobytes() for name, tensor in load_file(run / "model.safetensors").items()}
    return model, [line | {"seconds": 0} for line in metrics]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=("random", "steps", "same", "ranks"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args(words)
    if given.experiment in ("random", "ranks"):
        play_runs = at_random if given.experiment == "random" else one_rank_of_several
        for number, done in list(enumerate(range(0, given.kills, KILLS)))[given.first :]:
            root = given.folder / f"run-{number}"
            root.mkdir()
            facts = play_runs(root, min(KILLS, given.kills - done), given.seed + 1000 * number)
            print(json.dumps(facts), flush=True)
        return
    if given.experiment == "steps":
        said = at_every_step(given.folder)
    else:
        said = to_the_same_end(given.folder, given.kills, given.seed)
    print(json.dumps(said))


if __name__ == "__main__":
    die_with_parent()
    main()
