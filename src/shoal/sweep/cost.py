"""What a sweep costs in privacy: all cells together (`--charge`), or the best of a private selection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.accounting import selection
from shoal.accounting.claims import RESEARCH, Observer, Proven, Unit, assumed_public, claim, nothing, prove, saying
from shoal.accounting.events import Compose, Event, Unbounded
from shoal.accounting.leaves import for_worst_client
from shoal.accounting.privacy_ledger import FILE, Record
from shoal.algorithms.charges import PAIRS, whole_run
from shoal.config import Config, configure
from shoal.errors import LedgerError
from shoal.mechanisms.mechanism import ADJACENCIES
from shoal.sweep.cells import cell_folder
from shoal.sweep.plan import Plan
from shoal.training.budget import affordable

Pair = tuple[Unit, Observer]
ALONE = "of the best trial alone; records that trials are scored on are not protected"
EVERY_TRIAL = (
    "a private selection is proven for an observer of the chosen model alone, and this observer sees every trial"
)
THEIR_ROWS = (
    "the score is computed on held-out rows of these same clients, and a private selection does not protect the "
    "rows that it scores on"
)
OWN_LAYERS = (
    "the score is computed with personal layers (local.personal): what clients learn from their records for "
    "themselves, which no noise covers"
)
OTHER_ROWS = (
    "the cells hold out different rows, and a private selection does not protect records that score another cell; "
    "use the same data.name, data.test_fraction, and columns of labels and clients in all cells"
)


def charged(run: Path) -> dict[Pair, Event]:
    """Everything that a run's ledger was charged, finished or not."""
    try:
        found, record = Record.read(run / FILE)
    except LedgerError as error:
        return dict.fromkeys(PAIRS, Unbounded(f"the ledger of {run.name} cannot be read: {error}"))
    if not found.whole:
        return dict.fromkeys(PAIRS, Unbounded(f"the ledger of {run.name} is broken: {found.because}"))
    return {pair: record.charged_event(*pair) for pair in PAIRS}


def runs_of(sweep: Path, plan: Plan) -> list[Path]:
    """The folders of all runs of all cells; failed ones were charged too."""
    folders = (cell_folder(sweep, number) for number in range(len(plan.cells)))
    return [path.parent for folder in folders for path in sorted(folder.glob("*/config.toml"))]


def all_together(sweep: Path, plan: Plan) -> list[Proven]:
    """What is proven for an observer who sees all cells: their composition."""
    runs = runs_of(sweep, plan)
    configs = [configure(run / "config.toml") for run in runs]
    spent = [charged(run) for run in runs]
    delta = _least_delta(configs)
    clients = configs[0].data.clients if configs else None
    other_clients = _other_clients(configs)
    found = []
    for unit, observer in PAIRS:
        reason = _shared_noise(configs) or (other_clients if unit == "client" else None)
        if reason is not None:
            found.append(nothing(unit, observer, reason, ADJACENCIES[unit]))
            continue
        event: Event = Compose(tuple(run[unit, observer] for run in spent))
        if other_clients or _other_rows(configs) or _other_caps(configs):  # a client's size differs between cells
            event = for_worst_client(event)
        found.append(prove(unit, observer, event, delta, adjacency=ADJACENCIES[unit], clients=clients))
    opened = [Record.read(run / FILE)[1].opened or {} for run in runs if (run / FILE).is_file()]
    return _marked(found, configs, opened)


def of_the_best(sweep: Path, plan: Plan) -> list[Proven]:
    """What is proven where only the best trial is released (Papernot & Steinke (2022)).

    The theorem holds for an observer of that trial alone, and for data that the score is not computed from.
    """
    assert plan.selection is not None
    planned = planned_cells(plan)
    configs = [config for config, *_ in planned]
    runs = runs_of(sweep, plan)
    # A trial that was killed and resumed was charged more than planned; its ledger says how much.
    events = [event for _, event, _ in planned] + [charged(run) for run in runs]
    delta = _least_delta(configs)
    shared = _shared_noise([configure(run / "config.toml") for run in runs])
    found = []
    for unit, observer in PAIRS:
        if (reason := shared or _unprotected(configs, unit, observer)) is not None:
            found.append(nothing(unit, observer, reason, ADJACENCIES[unit]))
            continue
        costs = [each[unit, observer] for each in events]
        answer = selection.epsilon(costs, plan.selection.trials, delta, ADJACENCIES[unit])
        answer = replace(answer, because=answer.because or ALONE)
        found.append(claim(unit, observer, answer, ADJACENCIES[unit], configs[0].data.clients))
    # The facts of all cells, not of those that were drawn: which trials there were must stay secret.
    return _marked(found, configs, [facts for *_, facts in planned])


def _unprotected(configs: Sequence[Config], unit: Unit, observer: Observer) -> str | None:
    """Why a private selection proves nothing for a unit and an observer."""
    reason = _other_rows(configs) or _scored_with_layers(configs) if observer == "release" else EVERY_TRIAL
    if unit == "client":
        reason = reason or _other_clients(configs) or _scored_by_clients(configs)
    return reason


def _least_delta(configs: Sequence[Config]) -> float:
    return min((config.budget.delta for config in configs), default=1e-5)


def _marked(claims: list[Proven], configs: Sequence[Config], opened: Sequence[Mapping[str, Any]]) -> list[Proven]:
    """The claims, marked: simulated clients, research mode, and what the first lines of ledgers say (`opened`)."""
    if any(config.random != "secure" for config in configs):
        claims = [saying(claim, RESEARCH) for claim in claims]
    for words in dict.fromkeys(words for facts in opened for words in assumed_public(facts)):
        claims = [saying(claim, words) for claim in claims]
    simulated = any(config.data.partition != "column" and config.data.clients > 1 for config in configs)
    return [replace(claim, simulated=simulated and claim.unit == "client") for claim in claims]


def planned_cells(plan: Plan) -> list[tuple[Config, dict[Pair, Event], dict[str, Any]]]:
    """Every cell that a trial may choose, its planned cost, and what its claims assume.

    Fails where a cell cannot run.
    """
    return [_planned(plan, cell) for cell in (plan.selection.cells if plan.selection else [])]


def _planned(plan: Plan, cell: Mapping[str, Any]) -> tuple[Config, dict[Pair, Event], dict[str, Any]]:
    """What a trial of this cell would be charged, and would assume."""
    from shoal.execution import refuse_own_weights, run_facts
    from shoal.prepare import limit_of, prepare

    config, simulator = prepare(configure(plan.base | dict(cell)), None, None)
    refuse_own_weights(config, simulator)
    algorithm, setting, facts = config.algorithm, simulator.setting, run_facts(config, simulator)
    simulator.close()
    rounds = affordable(algorithm, setting, limit_of(config))
    return config, {pair: whole_run(algorithm, setting, rounds, *pair) for pair in PAIRS}, facts


def _shared_noise(configs: Sequence[Config]) -> str | None:
    repeatable = [config for config in configs if config.random != "secure"]
    seeds = [config.seed if config.noise_seed is None else config.noise_seed for config in repeatable]
    if len(set(seeds)) == len(seeds):
        return None
    return "two cells draw the same noise (noise_seed), so that together they reveal more than their composition"


def _scored_by_clients(configs: Sequence[Config]) -> str | None:
    """Why clients are not protected: where the data name them, rows of each are held out to score trials."""
    return THEIR_ROWS if any(config.data.partition == "column" for config in configs) else None


def _scored_with_layers(configs: Sequence[Config]) -> str | None:
    """Why the score says more than the models: each client's held-out rows are predicted with its own layers.

    Where steps have noise these have it too, but which rows a client is tested on follows from what it holds.
    """
    return OWN_LAYERS if any(config.algorithm.local.personal for config in configs) else None


def _other_rows(configs: Sequence[Config]) -> str | None:
    """Why a record may be trained on in one cell and score another."""
    held_out = {(each.data.name, each.data.test_fraction, *_columns(each)) for each in configs}
    return None if len(held_out) < 2 else OTHER_ROWS


def _other_caps(configs: Sequence[Config]) -> bool:
    """May cells use other records of the same client: other users, or more of each?"""
    users = {each.schema.user_column if each.schema is not None else None for each in configs}
    return len(users) > 1 or len({each.algorithm.records.max_per_user for each in configs}) > 1


def _other_clients(configs: Sequence[Config]) -> str | None:
    """Why cells do not compose at client level: they may split the data over clients differently."""
    splits = set()
    for config in configs:
        data = replace(config.data, scale="unit", features="none")
        classes = None if config.schema is None else config.schema.classes
        dealt = (data, config.seed, *_columns(config), classes, config.task.kind)  # by the order of labels, perhaps
        splits.add((data.name, *_columns(config), "column") if data.partition == "column" else dealt)
    return None if len(splits) < 2 else "the cells split the data over clients in different ways"


def _columns(config: Config) -> tuple[Any, ...]:
    """The columns of labels and of clients; where there is a schema, it names them."""
    data, schema = config.data, config.schema
    return (data.label, data.client_column) if schema is None else ("schema", schema.label, schema.client_column)
