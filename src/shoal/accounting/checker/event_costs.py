"""What each kind of event costs, from its JSON alone: the pair of distributions that dominates it, and why.

A unit moves a sum by at most one clip, under replace-one by two; `noise` is in clips.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.stats import binom

from .block_ratio import TAILS, mean_ratio
from .loss_distributions import BINS_OF_ROUNDS, Grid, Pld, Total, amplified, both_ways, gaussian, halves, spread

Event = Mapping[str, Any]
AVERAGED = 200_000  # units of work of a mean of two ratios
INSIDE, MIXED = 0.1, 150  # the effort of a pair that is made of another as a whole, and of a mixture, by roots


class Unknown(Exception):
    """Something for which the checker has no theorem: it can say neither yes nor no."""


class Unproven(Exception):
    """An event about which nothing is proven."""


Test: TypeAlias = Callable[[Any], bool]


def number(least: float = 0.0, most: float = 1e300) -> Test:
    return lambda value: type(value) in (int, float) and least <= value <= most


def whole(least: int) -> Test:
    """Half a step is no step, and would be counted as none."""
    return lambda value: type(value) is int and least <= value <= 10**15


def rows(*tests: Test) -> Test:
    return lambda value: all(all(test(cell) for test, cell in zip(tests, row, strict=True)) for row in value)


NOISE, CHANCE, COUNT = number(least=1e-300), number(0, 1), whole(1)
EVENT: Test = lambda value: isinstance(value, Mapping)  # noqa: E731
DRAWS: Test = lambda value: value is None or COUNT(value)  # noqa: E731
SAMPLING: Test = ("none", "poisson", "fixed-size", "with-replacement", "shuffled", "random-allocation").__contains__
MISSING: dict[str, dict[str, Any]] = {
    "sampled": {"draws": None},
    "two-level": {"records": 1},
}  # what stands for a field left out

Cost: TypeAlias = Callable[[Event, int, "Total"], None]
EVENTS: dict[str, tuple[Cost, dict[str, Test]]] = {}
"""What each kind of event says, field by field, and the function that adds what it costs to a Total."""


def reads(name: str, **fields: Test) -> Callable[[Cost], Cost]:
    """Declare a kind of event: all of its fields, above the function of its cost."""

    def declare(cost: Cost) -> Cost:
        EVENTS[name] = cost, fields
        return cost

    return declare


def field_of(event: Event, key: str, test: Test) -> Any:
    if not test(event[key]):
        raise Unknown(f"{key} {event[key]!r:.60}")
    return event[key]


def checked(event: Event) -> Event:
    """The event, if each field is in its range. A field that is not read here might say that it costs more."""
    if (name := event.get("event")) not in EVENTS:
        raise Unknown(f"event '{name}'")
    _, fields = EVENTS[name]
    if unread := sorted(event.keys() - fields - {"event"}):
        raise Unknown(f"field {unread[0]!r} of event '{name}'")
    full = {**MISSING.get(name, {}), **event}
    return {"event": name} | {key: field_of(full, key, test) for key, test in fields.items()}


def add(event: Event, times: int, total: Total) -> None:
    """Add an event that happened so many times."""
    total.work.take(10 + sum(len(event.get(key) or ()) for key in ("uses", "rounds")), "so many events")
    right = checked(event)
    if times:
        EVENTS[right["event"]][0](right, times, total)


@reads("gaussian", noise=NOISE)
def _gaussian(event: Event, times: int, total: Total) -> None:
    """Noise on a sum: N(c) against N(0), with c clips. Gaussians compose to one, by the sum of squares."""
    total.squares += times * (total.moved / event["noise"]) ** 2


@reads("sampled", kind=SAMPLING, rate=CHANCE, of=EVENT, draws=DRAWS)
def _sampled(event: Event, times: int, total: Total) -> None:
    """The unit entered by chance, in secret."""
    kind, rate, draws = event["kind"], event["rate"], event["draws"]
    if kind == "shuffled" and 0 < rate < 1 and total.adjacency == "add-or-remove":
        raise Unknown("shuffled batches under add-or-remove: an added record displaces others")
    if (kind == "none" and rate != 1) or (kind == "with-replacement") != (draws is not None):
        raise Unknown(f"{kind} sampling at rate {rate:g} with draws {draws!r}")
    if rate == 0:
        return
    if kind in ("none", "shuffled") or (rate == 1 and kind != "with-replacement"):
        add(event["of"], times, total)
    elif kind == "random-allocation":
        add(_block(event), times, total)
    else:
        _in_secret(event, times, total)


def _within(event: Event, total: Total) -> Total:
    """An event inside another, by itself."""
    inner = Total(total.adjacency, total.records, total.work)
    add(event, 1, inner)
    if inner.distance:
        raise Unknown("a sampler's error inside a sampled event")
    return inner


def _in_secret(event: Event, times: int, total: Total) -> None:
    kind, rate, within = event["kind"], event["rate"], _within(event["of"], total)
    if kind == "poisson" and total.adjacency != "replace-one" and within.parts:
        build = lambda grid: amplified(within.composed(grid), rate, grid)  # noqa: E731
        total.put([event], 1.0, times, build, within.reach, within.steps, INSIDE)
        return
    if within.parts or not within.squares:
        raise Unknown(f"{kind} sampling of this event")
    noise = total.moved / math.sqrt(within.squares)  # of the one Gaussian inside
    made = {"poisson": _poisson, "fixed-size": _fixed_size, "with-replacement": _drawn}[kind]
    most = _most_drawn(event) if kind == "with-replacement" else 1
    reach, alike = 2 * (most / noise) ** 2 + 20 * most / noise, [kind, rate, event["draws"]]
    total.put(alike, noise, times, lambda grid: made(event, noise, total.adjacency, grid), reach, effort=most)


def _poisson(event: Event, noise: float, adjacency: str, grid: Grid) -> Pld:
    """Each unit entered by itself: the pair of one sampled Gaussian."""
    return gaussian(1 / noise, grid, event["rate"], replaced=adjacency == "replace-one")


def _fixed_size(event: Event, noise: float, adjacency: str, grid: Grid) -> Pld:
    """Who enters displaces another: amplified at two clips (Balle et al. 2018, Theorems 2 and 9)."""
    one = gaussian(2 / noise, grid, event["rate"])
    return one if adjacency == "add-or-remove" else both_ways(one, grid)


def _most_drawn(event: Event) -> int:
    """More draws of one record all but never occur."""
    return 1 + int(binom.isf(1e-20, event["draws"], event["rate"] / event["draws"]))


def _drawn(event: Event, noise: float, adjacency: str, grid: Grid) -> Pld:
    """Drawn k times, it moves the sum by 2k clips (Balle et al. 2018, Theorem 10); k is taken as visible."""
    draws, each = event["draws"], event["rate"] / event["draws"]
    hit = -math.expm1(draws * math.log1p(-each)) if each < 1 else 1.0
    mixed, seen = gaussian(2 / noise, grid), float(binom.pmf(1, draws, each))
    for k in range(2, min(_most_drawn(event), draws) + 1):
        more = float(binom.pmf(k, draws, each))
        mixed = mixed.compute_mixture(gaussian(2 * k / noise, grid), seen / (seen + more))
        seen += more
    rest = max(0.0, 1 - seen / hit)  # drawn more often than that: taken as revealed
    (half,) = halves(mixed)
    half = pld_pmf.DensePLDPmf(grid.step, half._lower_loss, half._probs * (1 - rest), rest, True)
    mixed = pld.PrivacyLossDistribution(half)
    if hit >= 1:
        return mixed
    one = amplified(mixed, hit, grid)
    return one if adjacency == "add-or-remove" else both_ways(one, grid)


@reads("sampled-user", records=COUNT, rate=CHANCE, noise=NOISE)
def _sampled_user(event: Event, times: int, total: Total) -> None:
    """A user with several records, each of which entered by itself: sum_j Bin(j) N(j) against N(0).

    The worst pair of neighbours (Charles et al. 2024). Counts that all but never occur are taken as all records.
    """
    records, rate, noise = event["records"], event["rate"], event["noise"]
    if total.adjacency == "replace-one":
        raise Unknown("users under replace-one")
    if rate == 1:
        total.squares += times * (records / noise) ** 2
    elif rate > 0:
        most = min(records, 1 + int(binom.isf(1e-22, records, rate)))
        if most > 10_000:
            raise Unknown(f"a step that may draw {most:,} records of a user")
        moved = [*range(most), records]
        chances = [*binom.pmf(range(most), records, rate), binom.sf(most - 1, records, rate)]

        def build(grid: Grid) -> Pld:
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                return pld.from_mixture_gaussian_mechanism(
                    noise, moved, chances, value_discretization_interval=grid.step
                )

        reach, alike = (most / noise) ** 2 / 2 + 10 * most / noise, ["sampled-user", records, rate]
        total.put(alike, noise, times, build, reach, effort=MIXED + most)


@reads("allocated", rounds=rows(NOISE, COUNT))
def _allocated(event: Event, times: int, total: Total) -> None:
    """The unit entered one of the rounds, drawn in secret: the mean over rounds i of N(e_i), against N(0).

    The pair of Chua et al. (2025). Its ratio M is the mean of independent ratios Y_i of N(1) to N(0), and the
    divergences are means of convex functions of M, which mass moved to both sides with the same mean can only raise.
    """
    if total.adjacency == "replace-one":
        raise Unknown("random allocation under replace-one")
    least = min(noise for noise, _ in event["rounds"])
    reach = 1 / (2 * least**2) + TAILS / least
    if reach > 600:  # such little noise: no more than if the round were known, by joint convexity
        total.squares += times * (1 / least) ** 2
        return
    means = sum(2 * count.bit_length() - 1 for _, count in event["rounds"])
    total.work.take(AVERAGED * means, "blocks of so many rounds")
    nodes, mass = mean_ratio(event["rounds"], least, reach)
    at, revealed = np.log(nodes[1:]), max(0.0, 1 - float(nodes @ mass))

    def build(grid: Grid) -> Pld:
        ahead = spread(at, (nodes * mass)[1:], revealed, grid)
        return pld.PrivacyLossDistribution(ahead, spread(-at, mass[1:], float(mass[0]), grid))

    total.put([event], 1.0, times, build, float(at.max()), effort=INSIDE)


def _block(event: Event) -> Event:
    """Of each block the unit entered one round, where it entered a share `rate` of all (Feldman & Shenfeld 2025)."""
    inner, rate = checked(event["of"]), event["rate"]
    if inner["event"] != "gaussian" or event["draws"] is not None or not rate >= 1e-12:
        raise Unknown("random allocation of this event")
    length = max(1, math.floor(1 / rate * (1 + 2**-50)))
    return {"event": "allocated", "rounds": [[inner["noise"], length]]}


@reads(
    "two-level",
    client_rate=CHANCE, sampling_rate=CHANCE, local_steps=COUNT, noise=NOISE, local=SAMPLING, draws=DRAWS,
    participation=("hidden", "visible").__contains__, records=COUNT,
)  # fmt: skip
def _two_level(event: Event, times: int, total: Total) -> None:
    """A round: its client took part with probability `client_rate`, then made local steps."""
    rate, chance = event["client_rate"], {"rate": event["sampling_rate"]}
    noisy = {"event": "gaussian", "noise": event["noise"]}
    step = {"event": "sampled", "kind": event["local"], "of": noisy, "draws": event["draws"]} | chance
    if event["records"] > 1:  # of one user
        if event["local"] != "poisson":
            raise Unknown(f"several records of a user, sampled {event['local']}")
        step = noisy | {"event": "sampled-user", "records": event["records"]} | chance
    local = {"event": "repeat", "of": step, "count": event["local_steps"]}
    within = _within(local, total)
    if rate == 1:
        add(local, times, total)
    elif rate > 0 and (within.parts or within.squares):
        reach = max(within.reach, within.squares / 2 + 10 * math.sqrt(within.squares))

        def build(grid: Grid) -> Pld:
            inner = within.composed(grid)
            if event["participation"] == "visible":  # the observer knows which: the divergence is the mean
                return inner.compute_mixture(pld.identity(value_discretization_interval=grid.step), rate)
            secret = amplified(inner, rate, grid)
            return both_ways(secret, grid) if total.adjacency == "replace-one" else secret

        alike = {key: value for key, value in event.items() if key != "noise"}
        total.put([alike], event["noise"], times, build, reach, max(1.0, rate * within.steps), INSIDE, BINS_OF_ROUNDS)


@reads("by-size", of=EVENT, uses=rows(whole(0), CHANCE, COUNT))
def _by_size(event: Event, times: int, total: Total) -> None:
    """Clients of several sizes: a record stays with its client, so the costliest counts, not the worst mix."""
    worst, uses = checked(event["of"]), event["uses"]
    starts = [least for least, _, _ in uses]
    if worst["event"] != "two-level" or starts != sorted(set(starts)):
        raise Unknown("clients by size that are not listed in ascending order, around a round at two levels")
    if any(rate > worst["sampling_rate"] or steps > worst["local_steps"] for _, rate, steps in uses):
        raise Unknown("clients by size that cost more than the event around them")
    if total.records is not None:
        _, rate, steps = next((use for use in reversed(uses) if use[0] <= total.records), uses[0])
        worst = {**worst, "sampling_rate": rate, "local_steps": steps}
    add(worst, times, total)


@reads("on-clients", clients=COUNT, of=EVENT)
def _on_clients(event: Event, times: int, total: Total) -> None:
    """Several clients hold the record, whatever their sizes, each with noise of its own."""
    kept, total.records = total.records, None
    add(event["of"], times * event["clients"], total)
    total.records = kept


@reads("repeat", of=EVENT, count=whole(0))
def _repeat(event: Event, times: int, total: Total) -> None:
    """Right around a step of a shuffled pass, or of a block of rounds, it is an unbroken run of these."""
    inner, count = checked(event["of"]), event["count"]
    kind, rate = inner.get("kind"), inner.get("rate", 1.0)
    if kind == "shuffled":
        add({**inner, "of": {"event": "compose", "of": []}}, 1, total)  # is it allowed here?
        add(inner["of"], times * math.ceil(rate * count * (1 - 2**-51)), total)
    elif kind == "random-allocation" and 0 < rate < 1:
        block = _block(inner)  # one round of each block
        add(block, times * math.ceil(count / block["rounds"][0][1]), total)
    else:
        add(inner, times * count, total)


@reads("compose", of=lambda value: isinstance(value, list))
def _compose(event: Event, times: int, total: Total) -> None:
    for each in event["of"]:
        add(each, times, total)


@reads("sampler-error", distance=CHANCE)
def _sampler_error(event: Event, times: int, total: Total) -> None:
    total.distance += times * event["distance"]


@reads("unbounded", because=lambda value: isinstance(value, str))
def _unbounded(event: Event, times: int, total: Total) -> None:
    raise Unproven(event["because"])
