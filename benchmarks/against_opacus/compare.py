"""The order of play: agreement, trials of every setting of the rivals, then the best of them and Shoal in turns."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from against_opacus.ours import TASKS, Bench, Shoal, machine, require
from against_opacus.rivals import OPACUS_MODES, Choice, Rival, Size, choices, cores, update

Starts = dict[str, Callable[[Bench], Rival]]
"""The rivals by their names, each to be started for a task."""
Times = dict[Choice, list[float]]
Way = tuple[str, bool]
"""A mode, and whether channels come last: what may change a rival's update."""

SIZES = ("clients", "steps", "batch")
SAME = 1e-3
"""How far apart two sides' updates may be without noise, as a share of their length."""
HOPELESS = 2.0
"""A setting whose first go at a trial takes so many times the best one's gets no other."""
NEAR, MOST = 1.3, 3
"""Settings that are at most so much slower than the best in the trials get a full round, but only so many of them."""
DROP = 1.1
"""After the first full round settings go on only if they are at most so much slower than the rival's best."""


def compare(bench: Bench, starts: Starts, repeats: int, seed: int) -> dict[str, Any]:
    """One task, everything in one run."""
    wrong = {name: disagreements(bench, start, seed) for name, start in starts.items()}
    with ExitStack() as stack:
        shoal = stack.enter_context(closing(Shoal(bench)))
        rivals = {name: stack.enter_context(closing(start(bench))) for name, start in starts.items()}
        tried = {name: trials(name, rival, wrong[name]) for name, rival in rivals.items()}
        rivals = {name: rival for name, rival in rivals.items() if tried[name]}
        kept = {name: near_best(seconds) for name, seconds in tried.items()}
        noises = {"shoal": bench.task.noise_of(shoal.update())}
        noises |= {name: noise_of(rival, kept[name][0]) for name, rival in rivals.items() if rival.private}
        own, times = in_turns(shoal, rivals, kept, repeats)
    return {
        "task": asdict(bench.task),
        "machine": machine(),
        "shoal_seconds": round(min(own), 4),
        "shoal_median": round(median(own), 4),
        "rivals": {name: told(own, times[name]) for name in rivals},
        "update_over_noise": noises,
        "left_out": {
            name: {f"{mode}, channels last" if last else mode: why for (mode, last), why in found.items()}
            for name, found in wrong.items()
        },
        "trials": {name: [described(c, seconds=round(s, 4)) for c, s in tried[name].items()] for name in rivals},
    }


def disagreements(bench: Bench, start: Callable[[Bench], Rival], seed: int) -> dict[Way, str]:
    """The modes and layouts in which a rival does not find Shoal's update, on a smoothed network.

    A few clients train for a few steps in a fixed order without noise, clipped if the rival is private.
    """
    few = replace(bench.task, clients=4, steps=3, noise=0.0)
    twin = Bench.of(few, seed, bench.folder / "twin", smoothed=True)
    found: dict[Way, str] = {}
    with closing(start(twin)) as rival, closing(Shoal(twin, "fixed-order", private=rival.private)) as shoal:
        ours = shoal.update()
        for mode, last in sorted({way(choice) for choice in choices(rival)}):
            theirs = update(rival, Choice(cores(), 1, True, last, mode), shuffled=False)
            if isinstance(theirs, str):
                found[mode, last] = theirs
            elif not (apart := float((ours - theirs).norm() / ours.norm())) < SAME:
                found[mode, last] = f"its update is {apart:.2g} of its length away from Shoal's"
    return found


def way(choice: Choice) -> Way:
    return choice.mode, choice.channels_last


def noise_of(rival: Rival, choice: Choice) -> float:
    theirs = update(rival, choice)
    if isinstance(theirs, str):
        raise SystemExit(f"{choice}: {theirs}")
    return rival.bench.task.noise_of(theirs)


def trials(name: str, rival: Rival, wrong: dict[Way, str]) -> dict[Choice, float]:
    """The seconds of a few steps under every right setting, the best of three goes; to the hopeless one is enough."""
    task = rival.bench.task
    size = Size(min(rival.trial_clients, task.clients), min(task.trial, task.steps))
    seconds: dict[Choice, float] = {}
    for choice in choices(rival):
        if way(choice) not in wrong:
            rival.play(choice, size)  # to warm up
            goes = [rival.play(choice, size)["seconds"]]
            if goes[0] < HOPELESS * min(seconds.values(), default=goes[0]):
                goes += [rival.play(choice, size)["seconds"] for _ in range(2)]
            seconds[choice] = min(goes)
            note(name, seconds[choice], choice)
    return dict(sorted(seconds.items(), key=lambda pair: pair[1]))


def near_best(seconds: dict[Choice, float]) -> list[Choice]:
    """The settings that get a full round, the best one first."""
    fastest = min(seconds.values())
    return [choice for choice in seconds if seconds[choice] <= NEAR * fastest][:MOST]


def in_turns(
    shoal: Shoal, rivals: dict[str, Rival], kept: dict[str, list[Choice]], repeats: int
) -> tuple[list[float], dict[str, Times]]:
    """The seconds of every full round: Shoal's, and each rival's under the settings that are left to it."""
    own: list[float] = []
    theirs: dict[str, Times] = {name: {choice: [] for choice in left} for name, left in kept.items()}
    for turn in range(repeats):
        for name, rival in rivals.items():
            full = Size(rival.bench.task.clients, rival.bench.task.steps)
            for choice in still_near(theirs[name]) if turn else kept[name]:
                theirs[name][choice].append(rival.play(choice, full)["seconds"])
                note(name, theirs[name][choice][-1], choice)
        own.append(shoal.play())
        note("shoal", own[-1], None)
    return own, theirs


def still_near(times: Times) -> list[Choice]:
    fastest = min(map(min, times.values()))
    return [choice for choice, seconds in times.items() if min(seconds) <= DROP * fastest]


def told(own: list[float], times: Times) -> dict[str, Any]:
    """A rival's best setting, its seconds, and how many times Shoal's they are."""
    best = min(times, key=lambda choice: min(times[choice]))
    return {
        "seconds": round(min(times[best]), 4),
        "ratio": round(min(times[best]) / min(own), 2),
        "median": round(median(times[best]), 4),
        "ratio_of_medians": round(median(times[best]) / median(own), 2),
        "setting": described(best),
    }


def described(choice: Choice, **more: Any) -> dict[str, Any]:
    return asdict(choice) | more


def note(name: str, seconds: float, choice: Choice | None) -> None:
    words = [f"{key}={value}" for key, value in described(choice).items()] if choice else []
    print(f"{name:7} {seconds:9.4f} s", *words, file=sys.stderr, flush=True)


def parser(document: str | None, option: str, what: str) -> argparse.ArgumentParser:
    """The command line that all comparisons share."""
    made = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(option, required=True, dest="python", help=f"the python of {what}'s environment")
    made.add_argument("--task", choices=TASKS, action="append", help="which task; default: all")
    for size in SIZES:
        made.add_argument(f"--{size}", type=int, help="other than the task's, for a quick look")
    made.add_argument(
        "--modes", nargs="+", choices=OPACUS_MODES, default=OPACUS_MODES, help="of Opacus; default: all"
    )
    made.add_argument("--repeats", type=int, default=5, help="full rounds of everyone; default: 5")
    made.add_argument("--seed", type=int, default=0)
    return made


def run(chosen: argparse.Namespace, starts: Starts, versions: dict[str, str]) -> None:
    """Every task that was asked for: a JSON object each."""
    require(chosen.repeats > 0, "--repeats must be at least 1")
    for name in chosen.task or TASKS:
        other = {size: getattr(chosen, size) for size in SIZES if getattr(chosen, size)}
        task = replace(TASKS[name], **other)
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench.of(task, chosen.seed, Path(folder))
            found = compare(bench, starts, chosen.repeats, chosen.seed)
        print(json.dumps(found | {"repeats": chosen.repeats, "versions": versions}), flush=True)
