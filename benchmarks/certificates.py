"""Certificates against their checker: 300 settings over all methods, `python benchmarks/certificates.py [COUNT]`.

For each claim of each setting: the accountant's epsilon, the checker's, and their ratio. Both are upper bounds; a
ratio outside 1 +- 1e-3 is listed.
"""

from __future__ import annotations

import itertools
import random
import sys
import time

from shoal.accounting import accountants
from shoal.accounting.checker import claim_figures, event_costs
from shoal.accounting.events import Unbounded
from shoal.algorithms import REGISTRY, algorithm
from shoal.algorithms.charges import PAIRS, event, whole_run
from shoal.errors import ShoalError
from shoal.mechanisms.mechanism import ADJACENCIES
from shoal.mechanisms.setting import Setting

SIZES, DELTAS = ((60,), (20, 60, 300)), (1e-3, 1e-5, 1e-7)


def settings():
    """Method, setting, delta: all combinations in a fixed random order."""
    worlds = itertools.product(REGISTRY.own, (200, 1000), (3, 30), SIZES, (1, 3), (False, True), DELTAS)
    listed = list(worlds)
    random.Random(0).shuffle(listed)
    for name, clients, rounds, sizes, copies, secure, delta in listed:
        yield name, Setting(clients, rounds, copies, 4, sizes, parameters=10_000, secure=secure), delta


def main(count: int) -> None:
    started, done, ratios, methods = time.monotonic(), 0, [], set()
    for name, setting, delta in settings():
        if done == count:
            break
        method = algorithm(name)
        try:
            pairs = [pair for pair in PAIRS if not isinstance(event(method, setting, 0, *pair), Unbounded)]
            claims = {pair: whole_run(method, setting, setting.rounds, *pair) for pair in pairs}
        except ShoalError:
            continue
        if not claims:
            continue
        done += 1
        methods.add(name)
        for (unit, observer), spent in claims.items():
            claimed = accountants.epsilon(spent, delta, adjacency=ADJACENCIES[unit])
            if claimed.epsilon is None:
                continue
            try:
                found = claim_figures.recompute([(spent.to_json(), 1)], ADJACENCIES[unit], delta, claimed.epsilon)
            except event_costs.Unknown as unknown:
                print(f"{name} {unit} {observer} {setting}: cannot be checked: {unknown}", flush=True)
                continue
            ratios.append(found.epsilon / claimed.epsilon if claimed.epsilon else 1.0)
            if abs(ratios[-1] - 1) > 1e-3:
                said = f"{claimed.epsilon:.6g} by {claimed.accountant}, checked {found.epsilon:.6g}"
                print(f"{name} {unit} {observer} {setting} delta {delta:g}: {said}", flush=True)
        print(
            f"{done} settings, {len(methods)} methods, {len(ratios)} claims, {time.monotonic() - started:.0f} s: "
            f"checker / accountant {min(ratios, default=1):.6f} to {max(ratios, default=1):.6f}",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
