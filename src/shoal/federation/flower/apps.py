"""The same coordinator and sites as a plain Flower app, for an existing SuperLink and SuperNodes.

    flower-superlink ...                     the link, as its operators run it
    flower-supernode ... --node-config 'data="mydata.csv" folder="site"'
    flwr run examples/flower-app             the coordinator, with `federation` in the run's configuration

Flower starts a process for every message, so a site reloads its data each time; its ledger and the terms that it
agreed to are in its folder. `shoal join --flower-superlink` also works with such a link, and keeps its process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from shoal.errors import ConfigError
from shoal.federation.federated_run import serve
from shoal.federation.flower.node import MOST_BYTES
from shoal.federation.messages import InvalidMessage, Payload, pack, unpack
from shoal.federation.policy_file import Policy, policy_of, read_policy
from shoal.federation.site import Owner, Site
from shoal.federation.site_records import reader

server = ServerApp()
client = ClientApp()


@server.main()
def coordinate(grid: Grid, context: Context) -> None:
    """Coordinate a run.

    The run configuration has `federation` (the TOML file), `runs` (where run folders are made) and `resume` (a run
    folder to resume).
    """
    given = context.run_config
    resume = str(given.get("resume", ""))
    result = serve(
        grid,
        None if resume else str(given["federation"]),
        resume=resume or None,
        runs=str(given.get("runs", "runs")),
        no_guarantee=bool(given.get("no-guarantee", False)),
        log=lambda words: print(words, flush=True),
        on_round=lambda line: print(f"round {line['round']}: {line['clients']} sites answered", flush=True),
    )
    print(json.dumps(result.to_json()), flush=True)


@client.query("terms")
def terms(message: Message, context: Context) -> Message:
    """Answer the terms."""
    return _answered(message, context)


@client.train("round")
def train(message: Message, context: Context) -> Message:
    """Train one round."""
    return _answered(message, context)


@client.query("end")
def end(message: Message, context: Context) -> Message:
    """End the run."""
    return _answered(message, context)


def _answered(message: Message, context: Context) -> Message:
    site = Site(owner(dict(context.node_config)), lambda words: print(words, flush=True), joins=False)
    try:
        answer = site.answer(message.metadata.message_type, unpack(message.content, MOST_BYTES))
    except InvalidMessage as problem:
        answer = Payload({"refused": str(problem)})
    finally:
        site.close()
    return Message(pack(answer), reply_to=message)


def owner(given: dict[str, Any]) -> Owner:
    """Return the site's configuration from `--node-config`, which takes the options of `shoal join`.

    Options that may be repeated are one string: bound="clip=0.1:10 rounds=:500", allow-plugin="PACKAGE ...".
    """
    if "data" not in given:
        raise ConfigError('--node-config lacks data="FILE", this site\'s records')
    accepted = _policy(given)
    folder = Path(str(given.get("folder", "site")))
    read = reader(str(given["data"]), given.get("label"), given.get("part"))
    name, plugins = str(given.get("name", folder.resolve().name)), tuple(str(given.get("allow-plugin", "")).split())
    requirements, bounds = accepted.requirements, accepted.bounds
    return Owner(name, folder, read, requirements, given.get("model"), bounds=bounds, plugins=plugins)


def _policy(given: dict[str, Any]) -> Policy:
    if "policy" not in given:
        return policy_of(
            epsilon=given.get("require-epsilon"),
            delta=float(given.get("require-delta", 1e-5)),
            noise=given.get("require-noise"),
            unit=given.get("unit"),
            against=given.get("against"),
            bounds=str(given.get("bound", "")).split(),
            no_guarantee=bool(given.get("no-guarantee", False)),
        )
    found = read_policy(Path(str(given["policy"])))
    if found.coordinators is not None:
        raise ConfigError(
            f"only `shoal join` checks who the coordinator is: use it, or remove {found.sources['coordinators']}"
        )
    return found
