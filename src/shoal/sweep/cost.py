"""What a sweep costs in privacy: all cells together (`--charge`), or the best of a private selection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.accounting import calibration, chain, selection
from shoal.accounting.claims import Observer, Proven, Unit, claim, nothing, of_research, prove
from shoal.accounting.events import Compose, Event, Unbounded, apart, from_json
from shoal.algorithms.charges import NEIGHBOURS, PAIRS, whole_run
from shoal.config import Config, configure
from shoal.errors import ConfigError
from shoal.sweep.cells import cell_folder
from shoal.sweep.plan import Plan

Pair = tuple[Unit, Observer]
ALONE = "of the best trial alone"
EVERY_TRIAL = (
    "a private selection is proven against whoever sees the chosen model alone, and this observer sees every trial"
)
THEIR_ROWS = (
    "the score is the accuracy on held-out rows of these same clients, and a private selection protects nobody whose "
    "rows give the score"
)


OTHER_ROWS = (
    "the cells hold out different rows, and a private selection protects no record that gives the score of another "
    "cell; leave data.name, data.label, data.client and data.test_fraction the same in all cells"
)


def charged(run: Path) -> dict[Pair, Event]:
    """Everything that a run's ledger was charged, whether it came to its end or not."""
    events: dict[Pair, list[Event]] = {pair: [] for pair in PAIRS}

    def take(line: chain.Line) -> None:
        if line.kind != "intent":
            return
        said = {(charge["unit"], charge["observer"]): charge["event"] for charge in line.body["charges"]}
        for pair, found in events.items():
            found.append(from_json(said[pair]) if pair in said else Unbounded("a ledger does not say what was done"))

    try:
        with (run / "ledger.jsonl").open("rb") as file:
            found, _ = chain.read(file, take)
        broken = None if found.whole else f"the ledger of {run.name} is broken: {found.because}"
    except (OSError, KeyError, TypeError, ConfigError) as error:
        broken = f"the ledger of {run.name} cannot be read: {error}"
    if broken:
        return dict.fromkeys(PAIRS, Unbounded(broken))
    return {pair: Compose(tuple(each)) for pair, each in events.items()}


def runs_of(sweep: Path, plan: Plan) -> list[Path]:
    """The folders of all runs of all cells; one that failed has been paid for all the same."""
    folders = (cell_folder(sweep, number) for number in range(len(plan.cells)))
    return [path.parent for folder in folders for path in sorted(folder.glob("*/config.toml"))]


def all_together(sweep: Path, plan: Plan) -> list[Proven]:
    """What is proven of all cells together: who sees every one of them sees the sum."""
    runs = runs_of(sweep, plan)
    configs = [configure(run / "config.toml") for run in runs]
    spent = [charged(run) for run in runs]
    delta = min((config.budget.delta for config in configs), default=1e-5)
    found = []
    for unit, observer in PAIRS:
        reason = _shared_noise(configs) or (_other_clients(configs) if unit == "client" else None)
        if reason is not None:
            found.append(nothing(unit, observer, reason, NEIGHBOURS[unit]))
        else:
            event = Compose(tuple(run[unit, observer] for run in spent))
            if _other_clients(configs) or _other_rows(configs):  # a record's client has another size in every cell
                event = apart(event)
            clients = configs[0].data.clients if configs else None
            found.append(prove(unit, observer, event, delta, neighbours=NEIGHBOURS[unit], clients=clients))
    return _of_whom(found, configs)


def of_the_best(sweep: Path, plan: Plan) -> list[Proven]:
    """What is proven where only the best trial is released (Papernot & Steinke 2022).

    The theorem is about who sees that one alone, and about data that the score is not computed from.
    """
    assert plan.selection is not None
    planned = planned_cells(plan)
    configs = [config for config, _ in planned]
    runs = runs_of(sweep, plan)
    # A trial that was killed and resumed was charged for more than was planned: its ledger counts then.
    events = [event for _, event in planned] + [charged(run) for run in runs]
    delta = min(config.budget.delta for config in configs)
    shared = _shared_noise([configure(run / "config.toml") for run in runs])
    found = []
    for unit, observer in PAIRS:
        reason = _other_rows(configs) if observer == "release" else EVERY_TRIAL
        if unit == "client" and reason is None:
            reason = _other_clients(configs) or _scored_by_clients(configs)
        costs = [each[unit, observer] for each in events]
        answer = selection.epsilon(costs, plan.selection.trials, delta, NEIGHBOURS[unit])
        if (reason := shared or reason) is not None:
            found.append(nothing(unit, observer, reason, NEIGHBOURS[unit]))
        else:
            said = replace(answer, because=answer.because or ALONE)
            found.append(claim(unit, observer, said, NEIGHBOURS[unit], configs[0].data.clients))
    return _of_whom(found, configs)


def _of_whom(claims: list[Proven], configs: Sequence[Config]) -> list[Proven]:
    """The claims, those for clients to whom records were dealt marked as such, those of research mode as its own."""
    if any(config.random != "secure" for config in configs):
        claims = [of_research(claim) for claim in claims]
    simulated = any(config.data.partition != "column" and config.data.clients > 1 for config in configs)
    return [replace(claim, simulated=simulated and claim.unit == "client") for claim in claims]


def planned_cells(plan: Plan) -> list[tuple[Config, dict[Pair, Event]]]:
    """Every cell that a trial may choose, made ready: one that cannot be played is found before any is."""
    return [_planned(plan, cell) for cell in (plan.selection.cells if plan.selection else [])]


def _planned(plan: Plan, cell: Mapping[str, Any]) -> tuple[Config, dict[Pair, Event]]:
    """What a trial of this cell would be charged, whether it was drawn or not."""
    from shoal.prepare import limit_of, prepare

    config, simulator = prepare(configure(plan.base | dict(cell)), None, None)
    setting = replace(simulator.setting, secure=config.random == "secure")  # a run's own streams say so later
    algorithm, limit = config.algorithm, limit_of(config)
    simulator.close()
    rounds, budget = config.rounds, limit.budget()
    if budget is not None:
        paid = calibration.rounds(
            lambda n: whole_run(algorithm, setting, n, limit.unit, limit.observer), budget, most=rounds
        )
        rounds = int(paid.value)
    return config, {pair: whole_run(algorithm, setting, rounds, *pair) for pair in PAIRS}


def _shared_noise(configs: Sequence[Config]) -> str | None:
    repeatable = [config for config in configs if config.random != "secure"]
    seeds = [config.seed if config.noise_seed is None else config.noise_seed for config in repeatable]
    if len(set(seeds)) == len(seeds):
        return None
    return "two cells draw the same noise (noise_seed), so that together they tell more than their sum"


def _scored_by_clients(configs: Sequence[Config]) -> str | None:
    """Where the data name their clients, rows of each are held out, and the best trial is chosen by them."""
    return THEIR_ROWS if any(config.data.partition == "column" for config in configs) else None


def _other_rows(configs: Sequence[Config]) -> str | None:
    """Why a record may be trained on in one cell and give the score in another."""
    held_out = {(data.name, data.label, data.client, data.test_fraction) for data in (each.data for each in configs)}
    return None if len(held_out) < 2 else OTHER_ROWS


def _other_clients(configs: Sequence[Config]) -> str | None:
    """Why there is no client to add it up for: a sweep may split the data over clients anew in each cell."""
    splits = set()
    for config in configs:
        data = replace(config.data, scale="unit", features="none")
        owned = (data.name, data.label, data.client, "column")
        splits.add(owned if data.partition == "column" else (data, config.seed))
    return None if len(splits) < 2 else "the cells split the data over clients in different ways"
