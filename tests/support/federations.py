"""Federations over `loopback` that take milliseconds a round, and sites that tamper with what they send."""

from __future__ import annotations

from types import SimpleNamespace

import shoal
from shoal.algorithms import algorithm
from shoal.federation.consent import Requirements, SiteLedger, now
from shoal.federation.federated_run import serve
from shoal.federation.messages import Payload
from shoal.federation.terms import ROUND
from shoal.mechanisms.update_clipping import QuantileClip
from support.loopback import with_sites
from support.small_federation import model_for

SITES, ROUNDS = 4, 2
BAD = 101  # the node that misbehaves
NAMED = {"run", "terms", "number", "round", "attempt", "nonce"}


def site_ledger(
    folder, method, setting, requirements=None, records=None, seeded=False, site="site", run="", clock=now
):
    """A site's ledger in a run of this method, of which the terms say no more."""
    config = SimpleNamespace(algorithm=method, budget=SimpleNamespace(unit="client"))
    terms = SimpleNamespace(settings=config, charged=setting, seed=7 if seeded else None, run=run)
    made = SiteLedger(folder / "ledger.jsonl", site, requirements or Requirements(), terms, clock)
    made.records = records
    return made


def settings(name, **changes):
    """A method over four sites, so small that a round takes milliseconds."""
    record = algorithm(name)
    given = {
        "algorithm": name,
        "model": model_for(record),
        "rounds": ROUNDS,
        "data.name": "digits",
        "data.clients": SITES,
        "records.batch": 5,
        "local.steps": min(2, record.local.steps or 2),
        "engine.threads": 1,
        "engine.device": "cpu",
        "federation.seeded": True,
        "federation.deadline": 20.0,
    }
    if record.clients.sampling != "all":
        given["clients.cohort"] = 3
    if isinstance(record.per_update, QuantileClip):
        given["per_update.count_noise_multiplier"] = 3.0  # enough for so small a cohort
    return given | {key.replace("__", "."): value for key, value in changes.items()}


def served(folder, given, grid=None, **changes):
    grid = grid or with_sites(folder, given["data.clients"])
    result = serve(grid, given, runs=folder / "served", no_guarantee=True, **changes)
    for site in grid.sites.values():
        site.close()
    return result, grid


def simulated(folder, given):
    return shoal.run(given, runs=folder / "simulated", no_guarantee=True)


def farthest(one, other):
    return max(float((one.model[key] - other.model[key]).abs().max()) for key in one.model)


def curator(rounds, noise=1.633):
    given = settings("trusted-curator", clients__sampling="all", clients__cohort=4, per_round__noise_multiplier=noise)
    return given | {"rounds": rounds, "federation.seeded": False}


def asked(grid, kind):
    """The first message of that kind, to node 100."""
    return next(payload for to, node, what, payload in grid.wire if (to, node, what) == ("to", 100, kind))


def full_cohort(**changes):
    """All four sites in every round."""
    return settings("trusted-curator", clients__sampling="all", clients__cohort=4, **changes) | {"rounds": 2}


def with_update(answer, update):
    return Payload(answer.values, {"update": update})


def named(**changes):
    return lambda kind, answer: Payload(answer.values | changes, answer.vectors)


def in_rounds(change):
    """Tamper with answers to rounds only: a site that agrees like any other."""
    return lambda kind, answer: change(kind, answer) if kind == ROUND else answer


def end_of(message, **facts):
    """What a coordinator says at the end of the run that a message is of."""
    return {key: message.values[key] for key in ("run", "terms")} | {"why": "rounds"} | facts
