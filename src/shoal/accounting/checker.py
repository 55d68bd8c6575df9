"""Check a certificate of `shoal certify` without Shoal: this file imports nothing of it, and runs by itself.

    python checker.py certificate.json [--ledger F] [--config F] [--model F] [--public-key F] [--site NAME=F]

It reads the ledger's hash chain, counts the events, and computes every epsilon anew from the events' JSON. Shoal
composes curves of its own. This file takes dp-accounting's privacy loss distributions, as dp-accounting builds and
composes them, or the closed form where all noise is Gaussian without sampling. Every figure is an upper bound.

Exit code 0: every line that could be compared holds. 1: a line does not hold, or cannot be checked. 2: bad input.

A unit moves a sum by at most one clip, under replace-one by two; `noise` is in clips. Each kind of event is one
function under `reads`, which says which pair of distributions dominates it, and why.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.special import log_ndtr, ndtr
from scipy.stats import binom

FORMAT = "shoal-certificate-1"
AGREE = 1e-3  # how far, relative, a claimed figure may be below the recomputed one
POINTS = 25  # grid points in one standard deviation of the loss of a step: an error of about 1e-4
COARSEST, MOST_POINTS = 0.05, 1_000_000
FFT = 1e-15  # what a composition by FFT may lose in delta

Event = Mapping[str, Any]
Pld: TypeAlias = Any
"""dp-accounting's PrivacyLossDistribution, which has no types."""


class Unknown(Exception):
    """Something for which this file has no theorem: it can say neither yes nor no."""


class Unproven(Exception):
    """An event about which nothing is proven."""


class BadInput(Exception):
    """A file or an option that cannot be read."""


# ---------------------------------------------------------------- what was done, as pairs of distributions


@dataclass
class Grid:
    """The losses are multiples of `step`; `needed` is the step that the compositions made so far ask for."""

    step: float
    needed: float = COARSEST
    longest: float = 0.0


@dataclass
class Total:
    """Everything that happened to one unit of a client with `records` records (None: of the worst client)."""

    adjacency: str
    records: int | None = None
    squares: float = 0.0  # of the shifts of unsampled Gaussians, which add up to one
    distance: float = 0.0  # of the noise samplers from their distributions
    reach: float = 0.0  # the largest loss of a step, roughly
    steps: float = 0.0
    parts: dict[str, tuple[Callable[[Grid], Pld], int]] = field(default_factory=dict)

    @property
    def moved(self) -> float:
        """By how many clips the unit moves a sum."""
        return 2.0 if self.adjacency == "replace-one" else 1.0

    def within(self, event: Event) -> Total:
        """The same for an event inside another."""
        inner = Total(self.adjacency, self.records)
        add(event, 1, inner)
        if inner.distance:
            raise Unknown("a sampler's error inside a sampled event")
        return inner

    def put(self, event: Event, times: int, build: Callable[[Grid], Pld], reach: float, steps: float = 1.0) -> None:
        """Note that the pair which `build` makes was released so many times."""
        key = json.dumps([self.records, event], sort_keys=True)
        self.parts[key] = build, self.parts.get(key, (build, 0))[1] + times
        self.reach, self.steps = max(self.reach, reach), self.steps + times * steps

    def composed(self, grid: Grid) -> Pld:
        """All of it as one distribution."""
        made = [(build(grid), n) for build, n in self.parts.values()]
        if self.squares:
            made.append((gaussian(math.sqrt(self.squares), grid), 1))
        spread = sum(n * max(map(variance, halves(one))) for one, n in made)
        grid.needed = min(grid.needed, math.sqrt(spread / sum(n for _, n in made)) / POINTS)
        whole: Pld | None = None
        for one, n in made:
            many = one.self_compose(n) if n > 1 else one
            whole = many if whole is None else whole.compose(many)
        assert whole is not None
        grid.longest = max(grid.longest, *(half.size * grid.step for half in halves(whole)))
        return whole

    def curve(self) -> Callable[[float], float]:
        """Delta as a function of epsilon, from above."""
        if not self.parts:
            shift = math.sqrt(self.squares)
            return lambda epsilon: gaussian_delta(shift, epsilon)
        reach = max(self.reach, self.squares / 2 + 10 * math.sqrt(self.squares), 1e-6)
        step = max(min(COARSEST, reach / 1000), reach / MOST_POINTS)
        for _ in range(12):
            grid = Grid(step)
            whole = self.composed(grid)
            least = max(grid.needed, grid.longest / MOST_POINTS)
            if step <= 1.1 * least:
                break
            step = least
        slack = FFT * max(self.steps, 10.0)
        return lambda epsilon: float(whole.get_delta_for_epsilon(epsilon)) + slack


def halves(one: Pld) -> list[Any]:
    """The distributions of both directions, dense; one where they are equal."""
    both = [one._pmf_remove] if one._symmetric else [one._pmf_remove, one._pmf_add]
    return [half.to_dense_pmf() for half in both]


def variance(pmf: Any) -> float:
    """The variance of the finite losses."""
    losses = (np.arange(pmf.size) + pmf._lower_loss) * pmf._discretization
    mass = np.maximum(pmf._probs, 0.0)
    mean = float(losses @ mass / mass.sum())
    return float((losses - mean) ** 2 @ mass / mass.sum())


def gaussian_delta(shift: float, epsilon: float) -> float:
    """N(shift, 1) against N(0, 1): Balle & Wang 2018, Theorem 8."""
    if shift == 0:
        return 0.0
    return float(ndtr(shift / 2 - epsilon / shift) - np.exp(epsilon + log_ndtr(-shift / 2 - epsilon / shift)))


def gaussian(shift: float, grid: Grid, rate: float = 1.0) -> Pld:
    """(rate N(shift, 1) + (1 - rate) N(0, 1), N(0, 1)), in both directions."""
    return pld.from_gaussian_mechanism(1 / shift, value_discretization_interval=grid.step, sampling_prob=rate)


def both_ways(one: Pld, grid: Grid) -> Pld:
    """The pair whose divergences are, in both directions, the first of `one`.

    Losses above 0 stay. By the other direction's divergence P has e^-loss of their mass at -loss, and the rest at 0.
    """
    ahead = halves(one)[0]
    above = np.arange(ahead.size) + ahead._lower_loss > 0
    at, p = (np.arange(ahead.size) + ahead._lower_loss)[above], np.maximum(ahead._probs, 0.0)[above]
    mirrored = np.exp(np.log(np.maximum(p, 1e-300)) - at * grid.step)
    rest = max(0.0, 1 - ahead._infinity_mass - float(p.sum() + mirrored.sum()))
    far = int(at.max(initial=0))
    mass = np.zeros(2 * far + 1)
    mass[far + at], mass[far - at], mass[far] = p, mirrored, rest
    return pld.PrivacyLossDistribution(pld_pmf.DensePLDPmf(grid.step, -far, mass, ahead._infinity_mass, True))


def sometimes(one: Pld, rate: float, grid: Grid) -> Pld:
    """The pair with probability `rate`, else nothing; the observer knows which: the loss is a mixture."""
    return one.compute_mixture(pld.identity(value_discretization_interval=grid.step), rate)


def amplified(one: Pld, rate: float, grid: Grid) -> Pld:
    """From (P, Q) to (rate P + (1 - rate) Q, Q): the unit entered with probability `rate`, in secret."""
    ahead, *other = halves(one)
    back = other[0] if other else ahead

    def losses(pmf: Any) -> tuple[Any, Any]:
        return (np.arange(pmf.size) + pmf._lower_loss) * grid.step, np.maximum(pmf._probs, 0.0)

    at, p = losses(ahead)
    q = np.exp(np.log(np.maximum(p, 1e-300)) - at)
    alone = max(0.0, 1 - float(q.sum()))  # of Q, where P has nothing
    up = np.append(np.logaddexp(math.log(rate) + at, math.log1p(-rate)), math.log1p(-rate))
    remove = spread(up, np.append(rate * p + (1 - rate) * q, (1 - rate) * alone), rate * ahead._infinity_mass, grid)
    at, p = losses(back)
    down = np.append(-np.logaddexp(math.log(rate) - at, math.log1p(-rate)), -math.log1p(-rate))
    return pld.PrivacyLossDistribution(remove, spread(down, np.append(p, back._infinity_mass), 0.0, grid))


def spread(at: Any, mass: Any, infinite: float, grid: Grid) -> Any:
    """Masses at any losses, moved to the grid's points on both sides of each: connect-the-dots.

    The shares leave both distributions of the pair with the mass they had, so no divergence shrinks (Doroshenko et
    al. 2022).
    """
    low = np.floor(at / grid.step).astype(np.int64)
    share = np.clip(np.expm1(low * grid.step - at) / math.expm1(-grid.step), 0.0, 1.0)
    first = int(low.min())
    size = int(low.max()) - first + 2
    found = np.bincount(low - first, mass * (1 - share), size) + np.bincount(low - first + 1, mass * share, size)
    return pld_pmf.DensePLDPmf(grid.step, first, found, infinite, True)


# ---------------------------------------------------------------- the fields of events

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
LEFT_OUT = {"sampled": {"draws": None}, "two-level": {"draws": None, "records": 1}}

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
        raise Unknown(f"{key} {event[key]!r}")
    return event[key]


def checked(event: Event) -> Event:
    """The event, if each field is in its range. A field that is not read here might say that it costs more."""
    if (name := event.get("event")) not in EVENTS:
        raise Unknown(f"event '{name}'")
    _, fields = EVENTS[name]
    if unread := sorted(event.keys() - fields - {"event"}):
        raise Unknown(f"field {unread[0]!r} of event '{name}'")
    full = {**LEFT_OUT.get(name, {}), **event}
    return {"event": name} | {key: field_of(full, key, test) for key, test in fields.items()}


def add(event: Event, times: int, total: Total) -> None:
    """Add an event that happened so many times."""
    right = checked(event)
    if times:
        EVENTS[right["event"]][0](right, times, total)


# ---------------------------------------------------------------- the events, one function each


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


def _in_secret(event: Event, times: int, total: Total) -> None:
    kind, rate, within = event["kind"], event["rate"], total.within(event["of"])
    if kind == "poisson" and total.adjacency != "replace-one" and within.parts:
        total.put(event, times, lambda grid: amplified(within.composed(grid), rate, grid), within.reach, within.steps)
        return
    if within.parts or not within.squares:
        raise Unknown(f"{kind} sampling of this event")
    noise = total.moved / math.sqrt(within.squares)  # of the one Gaussian inside
    build = {"poisson": _poisson, "fixed-size": _fixed_size, "with-replacement": _drawn}[kind]
    most = _most_drawn(event) if kind == "with-replacement" else 1
    reach = 2 * (most / noise) ** 2 + 20 * most / noise
    total.put(event, times, lambda grid: build(event, noise, total.adjacency, grid), reach)


def _poisson(event: Event, noise: float, adjacency: str, grid: Grid) -> Pld:
    """rate N(1) + (1 - rate) N(0) against N(0); where one replaces another, against rate N(-1) + (1 - rate) N(0)."""
    if adjacency != "replace-one":
        return gaussian(1 / noise, grid, event["rate"])
    return pld.from_gaussian_mechanism(
        noise,
        value_discretization_interval=grid.step,
        sampling_prob=event["rate"],
        neighboring_relation=pld.NeighborRel.REPLACE_ONE,
    )


def _fixed_size(event: Event, noise: float, adjacency: str, grid: Grid) -> Pld:
    """Who enters displaces another: amplified at two clips (Balle et al. 2018, Theorems 2 and 9)."""
    return _displaced(gaussian(2 / noise, grid, event["rate"]), adjacency, grid)


def _displaced(one: Pld, adjacency: str, grid: Grid) -> Pld:
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
    return mixed if hit >= 1 else _displaced(amplified(mixed, hit, grid), adjacency, grid)


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
        moved = [*range(most), records]
        chances = [*binom.pmf(range(most), records, rate), binom.sf(most - 1, records, rate)]

        def build(grid: Grid) -> Pld:
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                return pld.from_mixture_gaussian_mechanism(
                    noise, moved, chances, value_discretization_interval=grid.step
                )

        total.put(event, times, build, (most / noise) ** 2 / 2 + 10 * most / noise)


NODES, TAILS = 2000, 8.0  # of the law of a mean of ratios; the standard deviations of a ratio that it covers
Law: TypeAlias = tuple[Any, Any, int]
"""Nodes, of which the first is 0, the mass of the second distribution at each, and of how many rounds it is."""


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
    laws = [_many(_ratio(noise, least, reach), count, least, reach) for noise, count in event["rounds"]]
    law = laws[0]
    for other in laws[1:]:
        law = _averaged(law, other, least, reach)
    nodes, mass, _ = law
    at, revealed = np.log(nodes[1:]), max(0.0, 1 - float(nodes @ mass))

    def build(grid: Grid) -> Pld:
        ahead = spread(at, (nodes * mass)[1:], revealed, grid)
        return pld.PrivacyLossDistribution(ahead, spread(-at, mass[1:], float(mass[0]), grid))

    total.put(event, times, build, float(at.max()))


def _block(event: Event) -> Event:
    """Of each block the unit entered one round, where it entered a share `rate` of all (Feldman & Shenfeld 2025)."""
    inner, rate = checked(event["of"]), event["rate"]
    if inner["event"] != "gaussian" or event["draws"] is not None or not rate >= 1e-12:
        raise Unknown("random allocation of this event")
    length = max(1, math.floor(1 / rate * (1 + 2**-50)))
    return {"event": "allocated", "rounds": [[inner["noise"], length]]}


def _nodes(rounds: int, noise: float, reach: float) -> Any:
    """Nodes for the mean of so many ratios, finest near 1."""
    width = min(1 / noise, math.sqrt(math.expm1(min(1 / noise**2, 700.0)) / rounds))
    far = math.asinh(reach / width)
    return np.append(0.0, np.exp(width * np.sinh(np.linspace(-far, far, NODES))))


def _ratio(noise: float, least: float, reach: float) -> Law:
    """The ratio of N(1) to N(0): under N(0) its logarithm is N(-1/2 noise^2, 1/noise^2)."""
    nodes = _nodes(1, least, reach)
    with np.errstate(divide="ignore"):
        places = noise * np.log(nodes)
    q, p = _cells(places + 0.5 / noise), _cells(places - 0.5 / noise)
    up = (p[:-1] - nodes[:-1] * q[:-1]) / np.diff(nodes)  # which keeps the mean of each cell
    mass = np.append(q[:-1] - up, 0.0) + np.append(0.0, up)
    mass[0] += q[-1]  # beyond the last node: what N(1) has there is taken as revealed
    return nodes, np.maximum(mass, 0.0), 1


def _cells(places: Any) -> Any:
    """The mass of a normal distribution between places, and beyond the last; accurate in both tails."""
    below, above = np.append(ndtr(places), 1.0), np.append(ndtr(-places), 0.0)
    return np.where(np.append(places, np.inf)[:-1] > 0, -np.diff(above), np.diff(below))


def _many(one: Law, count: int, noise: float, reach: float) -> Law:
    """The mean of so many ratios, by doubling."""
    law = one
    for bit in bin(count)[3:]:
        law = _averaged(law, law, noise, reach)
        law = _averaged(law, one, noise, reach) if bit == "1" else law
    return law


def _averaged(one: Law, other: Law, noise: float, reach: float) -> Law:
    """The mean of two, weighed by their rounds, on its own nodes."""
    rounds = one[2] + other[2]
    nodes, mass = _nodes(rounds, noise, reach), np.zeros(NODES + 1)
    own, kept = one[1] > 0, other[1] > 0
    theirs, weights = other[0][kept] * (other[2] / rounds), other[1][kept]
    for value, weight in zip(one[0][own] * (one[2] / rounds), one[1][own], strict=True):
        at = np.minimum(value + theirs, nodes[-1])
        low = np.clip(np.searchsorted(nodes, at, side="right") - 1, 0, NODES - 1)
        up = np.clip((at - nodes[low]) / (nodes[low + 1] - nodes[low]), 0.0, 1.0) * weights * weight
        mass += np.bincount(low, weights * weight - up, NODES + 1) + np.bincount(low + 1, up, NODES + 1)
    return nodes, mass, rounds


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
    within = total.within(local)
    if rate == 1:
        add(local, times, total)
    elif rate > 0 and (within.parts or within.squares):
        reach = max(within.reach, within.squares / 2 + 10 * math.sqrt(within.squares))

        def build(grid: Grid) -> Pld:
            inner = within.composed(grid)
            if event["participation"] == "visible":  # a mixture with a visible component: the divergence is the mean
                return sometimes(inner, rate, grid)
            secret = amplified(inner, rate, grid)
            return both_ways(secret, grid) if total.adjacency == "replace-one" else secret

        total.put(event, times, build, reach, max(1.0, rate * within.steps))


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
    kind, rate = inner.get("kind"), inner.get("rate")
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


def sizes(event: Any) -> Iterator[int]:
    """The numbers of records at which a client's use of a record changes."""
    for each in _all_events(event):
        yield from (use[0] for use in each.get("uses", [])[1:])


# ---------------------------------------------------------------- a claim

UNITS, OBSERVERS = ("client", "record", "user"), ("release", "server", "client-process")


def refuse_uncovered(unit: str, observer: str, adjacency: str, events: Any) -> None:
    """Raise Unknown where no theorem covers such events for this unit, adjacency and observer.

    The rate and the mean depend on the number of clients, so that it is not hidden. Only who sees nothing but
    released models cannot see who takes part.
    """
    if unit not in UNITS or observer not in OBSERVERS:
        raise Unknown(f"a claim for unit {unit!r} against {observer!r}")
    if unit == "client" and adjacency == "add-or-remove":
        raise Unknown("clients under add-or-remove: their number is public")
    if observer == "release":
        return
    for event in _all_events(events):
        kind = event.get("event")
        # drawn with replacement, not all clients enter at rate 1 either
        all_enter = kind == "sampled" and event["kind"] != "with-replacement" and event["rate"] == 1
        by_chance = kind == "allocated" or (kind == "sampled" and not all_enter)
        hidden = kind == "two-level" and event["participation"] != "visible" and event["client_rate"] < 1
        if hidden or (unit == "client" and by_chance):
            raise Unknown(f"hidden participation, against the {observer}")


def _all_events(event: Any) -> Iterator[Event]:
    """An event, or a list of events, and all events inside."""
    if isinstance(event, Mapping):
        yield event
        yield from _all_events(event.get("of"))
    elif isinstance(event, list):
        for each in event:
            yield from _all_events(each)


@dataclass(frozen=True)
class Figures:
    """What this file finds for a claim: epsilon at the claimed delta, and the parts of delta."""

    epsilon: float
    distance: float
    sampler_delta: float


def recompute(events: list[tuple[Event, int]], adjacency: str, delta: float, epsilon: float) -> Figures:
    """The least epsilon at this delta, the largest over the sizes of clients.

    The sampler's error takes (1 + e^epsilon) distance of delta, here at the claimed epsilon.
    """
    if adjacency not in ("zero-out", "add-or-remove", "replace-one"):
        raise Unknown(f"adjacency {adjacency!r}")
    found = []
    for records in sorted({0, *(size for event, _ in events for size in sizes(event))}):
        total = Total(adjacency, records)
        for event, times in events:
            add(event, times, total)
        taken = (1 + math.exp(min(epsilon, 700.0))) * total.distance if total.distance else 0.0
        found.append(Figures(least_epsilon(_curve(total), delta - taken), total.distance, taken))
    return max(found, key=lambda each: each.epsilon)


def _curve(total: Total) -> Callable[[float], float]:
    try:
        return total.curve()
    except (ValueError, OverflowError, FloatingPointError, MemoryError) as error:
        raise Unknown(f"dp-accounting cannot compute this: {error}") from None


def least_epsilon(curve: Callable[[float], float], delta: float) -> float:
    """Where a falling curve reaches delta; infinite where it does not, or is no number."""
    if not delta > 0:
        return math.inf
    if curve(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while not curve(high) <= delta:
        if high > 1e12:
            return math.inf
        low, high = high, 2 * high
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if curve(middle) <= delta else (middle, high)
    return high


# ---------------------------------------------------------------- the certificate, line by line


@dataclass(frozen=True)
class Line:
    """`yes`, `no`, `unknown` (cannot be checked) or `absent` (nothing to compare with), and what it is about."""

    verdict: str
    what: str
    words: str


def check(
    path: Path,
    ledger: Path | None = None,
    config: Path | None = None,
    model: Path | None = None,
    public_key: Path | None = None,
    sites: Mapping[str, Path] | None = None,
) -> list[Line]:
    """Check a certificate against these files; what is not given is said to be `absent`."""
    raw = _bytes(path)
    try:
        held = json.loads(raw.decode("utf-8"), parse_constant=_refuse)
        if held["format"] != FORMAT:
            raise BadInput(f"{path} has the format {held['format']!r}; this file checks {FORMAT}")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadInput(f"{path} is not a certificate") from None
    try:
        return [
            _digest(held, raw),
            _signature(held, public_key),
            *(_claim(claim) for claim in held["claims"]),
            _file("configuration", held["hashes"]["config"], config),
            _file("model", held["hashes"]["model"], model),
            *_ledger(held, ledger),
            *_sites(held, sites or {}),
        ]
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise BadInput(f"{path} is malformed: {type(error).__name__} {error}") from None


def holds(lines: list[Line]) -> bool:
    """Whether nothing is wrong, and nothing is beyond this file."""
    return all(line.verdict in ("yes", "absent") for line in lines)


def written(held: Mapping[str, Any]) -> bytes:
    """A certificate as a file: one way to write it, so that no character can change unnoticed."""
    return (json.dumps(held, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def canonical(content: Any) -> bytes:
    """What is hashed, here and in a ledger."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest_of(held: Mapping[str, Any]) -> str:
    """The SHA-256 of all of a certificate but its digest and its signature."""
    body = {key: value for key, value in held.items() if key not in ("digest", "signature")}
    return hashlib.sha256(canonical(body)).hexdigest()


def signed_bytes(digest: str) -> bytes:
    """What the operator's key signs."""
    return f"{FORMAT} {digest}".encode()


def _digest(held: Mapping[str, Any], raw: bytes) -> Line:
    if digest_of(held) != held.get("digest"):
        return Line("no", "certificate", "it was changed: its digest is not that of its contents")
    if written(held) != raw:
        return Line("no", "certificate", "it was changed: the file is not written as it was made")
    return Line("yes", "certificate", f"unchanged, SHA-256 {held['digest'][:16]}")


def _signature(held: Mapping[str, Any], public_key: Path | None) -> Line:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    signature = held.get("signature")
    if signature is None:
        return Line("no" if public_key else "absent", "signature", "UNSIGNED: nobody vouches for this certificate")
    try:
        raw, value = bytes.fromhex(signature["public_key"]), bytes.fromhex(signature["value"])
        if signature != {"algorithm": "ed25519", "public_key": raw.hex(), "value": value.hex()}:
            raise ValueError
        Ed25519PublicKey.from_public_bytes(raw).verify(value, signed_bytes(str(held.get("digest"))))
    except (InvalidSignature, ValueError, TypeError, KeyError):
        return Line("no", "signature", "it does not belong to this certificate")
    if public_key is None:
        return Line("yes", "signature", f"valid, by the key {raw.hex()}; give --public-key to compare it")
    if _public(public_key) != raw:
        return Line("no", "signature", f"it is by another key than {public_key}: {raw.hex()}")
    return Line("yes", "signature", f"valid, by the key in {public_key}")


def _public(path: Path) -> bytes:
    """An Ed25519 public key, as `ssh-keygen` writes it or as PEM, as its 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key

    content = _bytes(path)
    try:
        key = load_pem_public_key(content) if content.startswith(b"-----") else load_ssh_public_key(content)
    except (ValueError, TypeError) as error:
        raise BadInput(f"{path} is not a public key: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise BadInput(f"{path} is not an Ed25519 key; `shoal keys operator` makes one")
    return key.public_bytes_raw()


def _claim(claim: Mapping[str, Any]) -> Line:
    what = f"{claim.get('unit')}, {claim.get('observer')}"
    if claim.get("epsilon") is None:
        return Line("yes", what, f"nothing is claimed: {claim.get('because')}")
    try:
        epsilon, delta = field_of(claim, "epsilon", number()), field_of(claim, "delta", number(1e-300, 1))
        chain = claim["chain"]
        events = [(each["event"], field_of(each, "times", whole(0))) for each in chain["events"]]
        refuse_uncovered(claim["unit"], claim["observer"], claim["adjacency"], [event for event, _ in events])
        found = recompute(events, claim["adjacency"], delta, epsilon)
    except Unknown as error:
        return Line("unknown", what, f"cannot be checked: this checker does not know {error}")
    except Unproven as error:
        return Line("no", what, f"epsilon {epsilon:.6g} is claimed, but nothing is proven: {error}")
    except (KeyError, TypeError, IndexError, ValueError, AttributeError, RecursionError, ArithmeticError) as error:
        return Line("unknown", what, f"cannot be checked: malformed, {type(error).__name__} {error}")
    said = f"epsilon {epsilon:.6g} at delta {delta:g} ({claim['adjacency']}); recomputed {found.epsilon:.6g}"
    if not found.epsilon <= epsilon * (1 + AGREE) + 1e-9:
        return Line("no", what, said)
    for name, claimed, own in (
        ("the samplers' distance", chain["distance"], found.distance),
        ("their part of delta", claim["sampler_delta"] or 0.0, found.sampler_delta),
    ):
        if not math.isclose(claimed, own, rel_tol=AGREE):
            return Line("no", what, f"{name} is {own:.4g}, not {claimed:.4g}")
    looser = epsilon / found.epsilon - 1 if found.epsilon else 0.0
    return Line("yes", what, said + (f", {looser:.1%} less than claimed" if looser > AGREE else ""))


def _file(what: str, hash: str | None, path: Path | None) -> Line:
    if path is None:
        return Line("absent", what, "not given" if hash else "none is certified, and none was given")
    own = hashlib.sha256(_bytes(path)).hexdigest()
    if own != hash:
        return Line("no", what, f"the SHA-256 of {path} is {own[:16]}, not {str(hash)[:16]}")
    return Line("yes", what, f"{path} is the certified one")


def _ledger(held: Mapping[str, Any], path: Path | None) -> Iterator[Line]:
    head, count = held["hashes"]["ledger"]["head"], held["hashes"]["ledger"]["lines"]
    if path is None:
        yield Line("absent", "ledger", "not given: that its events are those of the certificate was not checked")
        return
    try:
        lines = read_chain(path)
    except ValueError as error:
        yield Line("no", "ledger", f"{path}: {error}")
        return
    if (len(lines), lines[-1]["hash"] if lines else "") != (count, head):
        yield Line("no", "ledger", f"{path} has {len(lines)} lines and another head than the {count} certified ones")
        return
    yield Line("yes", "ledger", f"{path} is intact: {count} lines, head {head[:16]}")
    opened = next((line for line in lines if line["kind"] == "open"), {})
    if not opened or (opened.get("config"), opened.get("run")) != (held["hashes"]["config"], held["run"]):
        yield Line("no", "ledger", "it is of a run with another name or configuration")
    if any(line["kind"] == "selected" for line in lines):
        yield Line("unknown", "ledger", "a private selection chose the run: its cost cannot be checked")
    rounds = [line for line in lines if line["kind"] == "intent"]
    if (because := _uncharged(lines, held["rounds"])) is not None:
        yield Line("no", "ledger", because)
    yield from (_closing(held, line) for line in lines[-1:] if line["kind"] == "close")
    for claim in held["claims"]:
        if claim["epsilon"] is not None:
            yield _counted(claim, rounds)


def _closing(held: Mapping[str, Any], line: Mapping[str, Any]) -> Line:
    """The ledger's last line binds the claims, the model and the heads of sites' ledgers; earlier versions' fewer."""
    own = [{key: value for key, value in claim.items() if key != "chain"} for claim in held["claims"]]
    if line["proven"] != own:
        return Line("no", "ledger", "its closing line makes other claims")
    if line.get("model", held["hashes"]["model"]) != held["hashes"]["model"]:
        return Line("no", "ledger", "its closing line names another model")
    sent = sorted([site["name"], site["head"]] for site in held["sites"] if site.get("sent"))
    if (sent or "sites" in line) and line.get("sites") != hashlib.sha256(canonical(sent)).hexdigest():
        return Line("no", "ledger", "its closing line names other heads of sites' ledgers")
    also = (" and the same model" if "model" in line else "") + (
        f", and the heads of {len(sent)} sites" if sent else ""
    )
    return Line("yes", "ledger", f"its closing line makes the same claims{also}")


def _uncharged(lines: list[dict[str, Any]], rounds: int) -> str | None:
    """What is released or skipped without a charge: rounds go from 1 to `rounds`, some of them run again."""
    furthest, pending = 0, None
    for line in lines:
        if line["kind"] == "intent":
            if not 1 <= line.get("first", line["round"]) <= min(furthest + 1, line["round"]):
                return f"round {furthest + 1} was not charged"
            furthest, pending = max(furthest, line["round"]), (line["round"], line["attempt"])
        elif line["kind"] == "commit":
            if (line["round"], line["attempt"]) != pending:
                return f"round {line['round']} was released without a charge before"
            pending = None
    return None if furthest == rounds else f"it charges {furthest} rounds, not the {rounds} of the certificate"


def _counted(claim: Mapping[str, Any], rounds: list[dict[str, Any]]) -> Line:
    """Are the events of a claim those that the ledger charged?"""
    what = f"{claim['unit']}, {claim['observer']}"
    pair = {"unit": claim["unit"], "observer": claim["observer"], "adjacency": claim["adjacency"]}
    counts: Counter[bytes] = Counter()
    for line in rounds:
        found = [charge for charge in line["charges"] if pair.items() <= charge.items()]
        if not found:
            return Line("no", what, f"the ledger has no charge for round {line['round']} under {claim['adjacency']}")
        if (because := _too_few(line, [charge["event"] for charge in found])) is not None:
            return Line("no", what, because)
        counts.update(canonical(charge["event"]) for charge in found)
    certified = {canonical(each["event"]): each["times"] for each in claim["chain"]["events"]}
    if counts != certified:
        return Line("no", what, "the events and how often they happened are not those of the ledger")
    return Line("yes", what, f"its {sum(counts.values())} charges are those of the ledger")


def _too_few(line: Mapping[str, Any], events: list[Event]) -> str | None:
    """Why a charge for several rounds is not one of as many."""
    first, last = line.get("first", line["round"]), line["round"]
    for event in events if last > first else ():
        named, free = _rounds_of(event)
        if not (named == last - first + 1 or (free and named <= last - first)):
            return f"the ledger charges rounds {first} to {last} with the events of {named}"
    return None


def _rounds_of(event: Event) -> tuple[int, bool]:
    """How many rounds the charge of several names, and whether there may be more, of no cost or with no proof.

    Equal rounds in a row are a `repeat` of a `compose` of one event; others stand one after the other.
    """
    if event["event"] == "compose":
        parts = [_part_of(each) for each in event["of"]]
        return sum(count for count, _ in parts), not parts or any(free for _, free in parts)
    return _part_of(event)


def _part_of(event: Event) -> tuple[int, bool]:
    inner: Any = event.get("of")
    if event["event"] == "unbounded" or (event["event"] == "compose" and not inner):
        return 0, True
    if event["event"] == "repeat" and inner["event"] == "compose" and len(inner["of"]) == 1:
        return int(field_of(event, "count", whole(0))), False
    return int(event["event"] != "sampler-error"), False  # which stands beside the noise of a round


def _sites(held: Mapping[str, Any], given: Mapping[str, Path]) -> Iterator[Line]:
    bound = {site["name"]: site for site in held["sites"]}
    for name, times in Counter(site["name"] for site in held["sites"]).items():
        if times > 1:
            yield Line("unknown", f"site {name}", f"the certificate binds {times} ledgers under this name")
    for name in sorted(given.keys() - bound.keys()):
        yield Line("no", f"site {name}", "its ledger is not bound by this certificate")
    for name, site in bound.items():
        if name not in given:
            yield Line("absent", f"site {name}", "its ledger was not given")
            continue
        try:
            lines = read_chain(given[name])
        except ValueError as error:
            yield Line("no", f"site {name}", f"{given[name]}: {error}")
            continue
        yield _site(f"site {name}", given[name], lines, site["head"], str(held["run"]))


def _site(what: str, path: Path, lines: list[dict[str, Any]], head: str, run: str) -> Line:
    """A site's ledger goes on with other runs after the head, but not with this one: all its charges are bound."""
    place = next((place for place, line in enumerate(lines, 1) if line["hash"] == head), 0)
    if not place:
        return Line("no", what, f"{path} lacks the certified head")
    of_run = [
        at
        for at, line in enumerate(lines, 1)
        if line["kind"] == "intent" and run.startswith(str(line.get("run") or "\0"))
    ]
    if later := sum(at > place for at in of_run):
        return Line("no", what, f"{path} charges this run in {later} lines after the certified head")
    return Line("yes", what, f"{path} has the certified head, and charges this run in {len(of_run)} lines up to it")


def read_chain(path: Path) -> list[dict[str, Any]]:
    """The lines of a ledger; a ValueError says which one breaks the chain."""
    lines: list[dict[str, Any]] = []
    before, content = "0" * 64, _bytes(path)
    if content and not content.endswith(b"\n"):
        raise ValueError("the last line is incomplete")
    for at, raw in enumerate(content.splitlines()):
        try:
            line = json.loads(raw.decode("ascii"), parse_constant=_refuse)
            own = {key: value for key, value in line.items() if key != "hash"}
            right = canonical(line) == raw and line["hash"] == hashlib.sha256(canonical(own)).hexdigest()
            right = right and (line["n"], line["before"]) == (at, before) and isinstance(line["kind"], str)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            right = False
        if not right:
            raise ValueError(f"line {at + 1} breaks the hash chain")
        before = line["hash"]
        lines.append(line)
    return lines


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None


MARKS = {"yes": "yes", "no": "NO", "unknown": "?", "absent": "-"}


def verdict(lines: list[Line]) -> str:
    """The answer in one line."""
    if holds(lines):
        missing = [line.what for line in lines if line.verdict == "absent" and "not given" in line.words]
        return "yes: every figure holds" + (f"; not compared: {', '.join(missing)}" if missing else "")
    wrong = next((line for line in lines if line.verdict == "no"), None)
    if wrong is not None:
        return f"NO: {wrong.what}: {wrong.words}"
    return "cannot say yes: some lines cannot be checked"


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Check a certificate of `shoal certify` without Shoal.")
    parser.add_argument("certificate", type=Path)
    for name in ("ledger", "config", "model", "public-key"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--site", action="append", default=[], metavar="NAME=LEDGER")
    given = parser.parse_args(arguments)
    try:
        sites = {name: Path(file) for name, _, file in (each.partition("=") for each in given.site)}
        lines = check(given.certificate, given.ledger, given.config, given.model, given.public_key, sites)
    except BadInput as error:
        print(f"checker: {error}", file=sys.stderr)
        return 2
    for line in lines:
        print(f"{MARKS[line.verdict]:<4}{line.what}: {line.words}")
    print(verdict(lines))
    return 0 if holds(lines) else 1


if __name__ == "__main__":
    sys.exit(main())
