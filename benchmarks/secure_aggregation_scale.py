"""What a round of secure aggregation costs with many sites, of which some drop out after they dealt their shares.

    python benchmarks/secure_aggregation_scale.py --sites 1000 --parameters 100000 --gone 0.3

Every site runs the site's own code, in worker processes. Messages are encoded as on the wire, but neither Flower nor
a network carries them, nothing is trained and no noise is drawn. The sum is compared with that of the numbers sent.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection, wait

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.config import Config, configure, to_toml
from shoal.federation.consent import Requirements
from shoal.federation.key_files import public_pem
from shoal.federation.messages import Payload
from shoal.federation.secagg.aggregator import SecureAggregator, Take
from shoal.federation.secagg.client import SecureAggregationClient
from shoal.federation.secagg.masks import as_vector
from shoal.federation.secagg.round_keys import context
from shoal.federation.secagg.round_plan import Plan, with_graph
from shoal.federation.terms import ROUND, Terms
from shoal.mechanisms.setting import Setting
from shoal.training.round_index import RoundIndex

NOW = RoundIndex(0, 1)
Keys = dict[int, ec.EllipticCurvePrivateKey]


def numbers(site: int, parameters: int) -> np.ndarray:
    """What a site adds to the sum."""
    return np.random.default_rng(site).integers(-1000, 1000, parameters, np.int16)


def work(link: Connection, terms: Terms, keys: Keys, peers: frozenset[bytes], bound: float) -> None:
    """Answer messages for some sites until the link is closed."""
    sites = {number: SecureAggregationClient(terms, key, peers, Requirements()) for number, key in keys.items()}
    while (told := link.recv()) is not None:
        kind, messages = told
        begun = time.process_time()
        for number, values in messages.items():
            words = None
            if kind != ROUND:
                answer = sites[number].answer(kind, Payload(values), NOW, number)
            else:
                sites[number].take(Payload(values), NOW, number, bound)
                words = sites[number]._party.send(numbers(number, terms.parameters), bound)
                answer = sites[number].values()
            link.send((number, answer, words))
        link.send(time.process_time() - begun)


class Workers:
    """Processes that play the sites; `seconds`: what each step cost, as wall time and processor time of all sites."""

    def __init__(self, count: int, terms: Terms, bound: float) -> None:
        curve = ec.SECP256R1()
        keys = {number: ec.generate_private_key(curve) for number in range(terms.setting.clients)}
        peers = frozenset(public_pem(key.public_key()) for key in keys.values())
        self.seconds: dict[str, tuple[float, float]] = {}
        self._links = []
        for worker in range(count):
            ours, theirs = multiprocessing.Pipe()
            own = {number: key for number, key in keys.items() if number % count == worker}
            multiprocessing.Process(target=work, args=(theirs, terms, own, peers, bound), daemon=True).start()
            self._links.append(ours)

    def ask(self, kind: str, messages: dict[int, Payload], take: Take) -> None:
        """Pass the answers of the sites to the coordinator as they arrive."""
        begun, count, used = time.perf_counter(), len(self._links), 0.0
        for worker, link in enumerate(self._links):
            link.send((kind, {n: dict(message.values) for n, message in messages.items() if n % count == worker}))
        left = list(self._links)
        while left:
            for link in wait(left):
                assert isinstance(link, Connection)
                if isinstance(told := link.recv(), float):
                    used += told
                    left.remove(link)
                    continue
                number, values, words = told
                take(number, Payload(values, {} if words is None else {"masked": as_vector(words)}))
        self.seconds[kind] = time.perf_counter() - begun, used

    def close(self) -> None:
        """End the processes."""
        for link in self._links:
            link.send(None)


def configuration(options: argparse.Namespace) -> tuple[Config, Setting]:
    """A federation of so many sites."""
    given = {
        "algorithm": "trusted-curator",
        "rounds": 1,
        "data.clients": options.sites,
        "clients.sampling": "all",
        "per_round.at": "shared",
        "federation.aggregation": "secure",
        "federation.colluding": options.colluding,
    }
    config, setting = configure(given), Setting(options.sites, 1)
    graph = with_graph(config.algorithm, config.federation, setting)
    if graph.neighbours is not None:
        given |= {"federation.neighbours": graph.neighbours, "federation.share_threshold": graph.share_threshold}
    return configure(given), setting


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Run one round."""
    config, setting = configuration(options)
    terms = Terms("run", to_toml(config), setting, ("a", "b"), (1,), options.parameters, None)
    assert config.algorithm.per_update is not None
    bound = config.algorithm.per_update.bound({}, 0, 1, None)
    plan = Plan.of(config.algorithm, config.federation, setting, options.parameters, 0, bound)
    gone = set(np.random.default_rng(1).permutation(options.sites)[: int(options.gone * options.sites)].tolist())
    workers = Workers(options.workers, terms, bound)

    def ask(kind, messages, values, vectors, take):  # type: ignore[no-untyped-def]
        left = {n: message for n, message in messages.items() if kind != ROUND or n not in gone}
        workers.ask(kind, left, take)

    aggregator = SecureAggregator(plan, context("run", terms.digest, 0, 0))
    begun, used = time.perf_counter(), time.process_time()
    total = aggregator.gather(ask, range(options.sites), Payload({}))
    wall, coordinator = time.perf_counter() - begun, time.process_time() - used
    workers.close()
    senders = set(range(options.sites)) - gone
    assert aggregator.sent == senders
    assert (total == sum(numbers(site, options.parameters).astype(int) for site in senders)).all()
    graph = plan.graph
    return {
        "sites": options.sites,
        "parameters": options.parameters,
        "gone": len(gone),
        "colluding": options.colluding,
        "threshold": plan.threshold,
        "neighbours": graph.neighbours,
        "share_threshold": graph.share_threshold,
        "failure": graph.failure,
        "seconds": round(wall, 2),
        "coordinator_cpu_seconds": round(coordinator, 2),
        "all_sites_cpu_seconds": round(sum(used for _, used in workers.seconds.values()), 2),
        "steps": {kind: [round(part, 2) for part in both] for kind, both in workers.seconds.items()},
        "cores": os.cpu_count(),
        "load": [round(part, 1) for part in os.getloadavg()],
    }


def main() -> None:
    """Print the measurement as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--parameters", type=int, default=100_000)
    parser.add_argument("--gone", type=float, default=0.3)
    parser.add_argument("--colluding", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    torch.set_num_threads(1)
    print(json.dumps(measure(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()
