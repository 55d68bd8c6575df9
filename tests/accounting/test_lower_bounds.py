"""No accountant says less than the truth: every one, on every kind of event, under every adjacency, by brute force.

A case is a small world for one kind of event: a few units whose contributions are enumerated, and with them the exact
law of what is released (mixtures of Gaussians in one or two dimensions, integrated on a grid). The worst hockey-stick
divergence over these worlds is a lower bound on delta; a figure that calls itself valid must not lie below it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import get_args

import numpy as np
import pytest

from shoal.accounting import accountants, pld, selection
from shoal.accounting.checker import claim_figures, event_costs
from shoal.accounting.events import (
    Allocated,
    BySize,
    Compose,
    Event,
    Gaussian,
    Leaf,
    OnClients,
    Participation,
    Repeat,
    Sampled,
    SampledUser,
    SamplerError,
    SamplingKind,
    TwoLevel,
    Unbounded,
)
from shoal.accounting.selection import Trials
from shoal.accounting.theorems import TABLE, Adjacency, Cell, markdown
from shoal.errors import ConfigError
from support.paths import ROOT

EPSILONS = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0)
CALM = (0.05, 0.2, 0.4, 0.6, 0.8)
Mixture = list[tuple[float, tuple[float, ...]]]
"""(weight, mean) of each Gaussian of unit variance in what is released."""
SIDES = (-1.0, 0.0, 1.0)
COUNT = 3  # other units
GRID = 5e-4  # what the grid's steps may add to a divergence in two dimensions: 1.2e-4 against the closed form


def divergences(one: Mixture, other: Mixture, epsilons: Sequence[float]) -> np.ndarray:
    """The hockey-stick divergence of two mixtures at epsilons that rise, the larger of both directions, on a grid."""
    means = np.array([mean for _, mean in one + other])
    step = 0.02 if means.shape[1] == 1 else 0.05
    axes = [np.arange(column.min() - 7, column.max() + 7, step) for column in means.T]

    def density(mixture: Mixture) -> np.ndarray:
        weights, centres = (np.array(column) for column in zip(*mixture, strict=True))
        scale = step / math.sqrt(2 * math.pi)
        bells = [np.exp(-((axis - at[:, None]) ** 2) / 2) * scale for axis, at in zip(axes, centres.T, strict=True)]
        return weights @ bells[0] if len(bells) == 1 else (weights * bells[0].T) @ bells[1]

    def beyond(here: np.ndarray, there: np.ndarray) -> Iterator[float]:
        for epsilon in epsilons:
            more = here > math.exp(epsilon) * there  # nowhere else at a larger epsilon
            here, there = here[more], there[more]
            yield here.sum() - math.exp(epsilon) * there.sum()

    p, q = density(one), density(other)
    return np.maximum(list(beyond(p, q)), list(beyond(q, p)))


def units(adjacency: str) -> Iterator[tuple[float, float | None]]:
    """The unit's contribution in either world; None where there is no such unit."""
    if adjacency == "replace-one":
        yield from ((1.0, other) for other in (-1.0, 0.0))
    else:
        yield 1.0, (None if adjacency == "add-or-remove" else 0.0)


def data(adjacency: str) -> Iterator[tuple[list[float], list[float]]]:
    """Two data sets that are neighbours: all contributions of a few units, in clips."""
    for mine, other in units(adjacency):
        for rest in itertools.combinations_with_replacement(SIDES, COUNT):
            yield [mine, *rest], ([*rest] if other is None else [other, *rest])


def gathered(sums: list[tuple[float, tuple[float, ...]]], noise: float) -> Mixture:
    """Equal sums put together, in units of the noise."""
    weights: dict[tuple[float, ...], float] = {}
    for weight, at in sums:
        weights[at] = weights.get(at, 0.0) + weight
    return [(weight, tuple(value / noise for value in at)) for at, weight in weights.items()]


def poisson(rows: list[float], rate: float, noise: float) -> Mixture:
    sums = []
    for taken in itertools.product((0, 1), repeat=len(rows)):
        weight = math.prod(rate if one else 1 - rate for one in taken)
        sums.append((weight, (math.fsum(row for one, row in zip(taken, rows, strict=True) if one),)))
    return gathered(sums, noise)


def fixed_size(rows: list[float], size: int, noise: float) -> Mixture:
    samples = list(itertools.combinations(rows, size))
    return gathered([(1 / len(samples), (math.fsum(sample),)) for sample in samples], noise)


def with_replacement(rows: list[float], draws: int, noise: float) -> Mixture:
    samples = list(itertools.product(rows, repeat=draws))
    return gathered([(1 / len(samples), (math.fsum(sample),)) for sample in samples], noise)


def shuffled(rows: list[float], size: int, noise: float) -> Mixture:
    """One pass in batches of `size`: the sums of all batches, one after the other."""
    orders = list(itertools.permutations(rows))
    sums = [tuple(math.fsum(order[k : k + size]) for k in range(0, len(rows), size)) for order in orders]
    return gathered([(1 / len(orders), at) for at in sums], noise)


def allocated(rows: list[float], *noises: float) -> Mixture:
    """Every unit enters one of the rounds, whichever others do."""
    sums = []
    for places in itertools.product(range(len(noises)), repeat=len(rows)):
        at = [math.fsum(row for row, mine in zip(rows, places, strict=True) if mine == t) for t in range(len(noises))]
        sums.append((len(noises) ** -len(rows), tuple(v / noise for v, noise in zip(at, noises, strict=True))))
    return gathered(sums, 1.0)


def everyone(rows: list[float], noise: float) -> Mixture:
    return [(1.0, (math.fsum(rows) / noise,))]


def twice(inner: Mixture) -> Mixture:
    """Two independent releases."""
    return [(v * w, (*a, *b)) for v, a in inner for w, b in inner]


NOISE = 0.7


def sampled(kind: str) -> tuple[Event, Callable[[list[float]], Mixture]]:
    """A sampled Gaussian over the four units of the larger world, and its law."""
    size = COUNT + 1
    match kind:
        case "poisson":
            return Sampled("poisson", 0.3, Gaussian(NOISE)), lambda rows: poisson(rows, 0.3, NOISE)
        case "fixed-size":
            return Sampled("fixed-size", 2 / size, Gaussian(NOISE)), lambda rows: fixed_size(rows, 2, NOISE)
        case "with-replacement":
            event = Sampled("with-replacement", 2 / size, Gaussian(NOISE), draws=2)
            return event, lambda rows: with_replacement(rows, 2, NOISE)
        case "shuffled":
            event = Repeat(Sampled("shuffled", 2 / size, Gaussian(NOISE)), 2)
            return event, lambda rows: shuffled(rows, 2, NOISE)
        case "random-allocation":
            event = Repeat(Sampled("random-allocation", 1 / 2, Gaussian(NOISE)), 2)
            return event, lambda rows: allocated(rows, NOISE, NOISE)
        case "none":
            return Sampled("none", 1.0, Gaussian(NOISE)), lambda rows: everyone(rows, NOISE)
    raise AssertionError(f"a kind of sampling without a case: {kind}; add one")


def two_level(kind: str, participation: str) -> tuple[Event, Callable[[list[float]], Mixture]]:
    """The record's client comes with probability 0.4; nobody else's records are in its step where that is hidden."""
    step, law = sampled(kind)
    inner = step.event if isinstance(step, Repeat) else step
    steps = step.count if isinstance(step, Repeat) else 1
    assert isinstance(inner, Sampled)
    event = TwoLevel(0.4, inner.rate, steps, NOISE, inner.kind, participation, inner.draws)  # type: ignore[arg-type]
    if participation == "visible":  # its law is seen with probability 0.4: see `truth`
        return event, law

    def hidden(rows: list[float]) -> Mixture:
        still = [0.0] * len(rows)  # its absence looks like its presence without the record
        mine = rows[0] if len(rows) > COUNT else 0.0
        come = [(0.4 * weight, mean) for weight, mean in law([mine, *still[1:]])]
        return come + [(0.6 * weight, mean) for weight, mean in law(still)]

    return event, hidden


def cases() -> dict[str, tuple[Event, Callable[[list[float]], Mixture]]]:
    """A small world for every kind of event; what a new kind is called decides that it must be here."""
    gaussian = (Gaussian(NOISE), lambda rows: everyone(rows, NOISE))
    found = {"Gaussian": gaussian}
    found |= {f"Sampled {kind}": sampled(kind) for kind in get_args(SamplingKind)}
    found |= {
        f"TwoLevel {kind} {seen}": two_level(kind, seen)
        for kind in get_args(SamplingKind)
        for seen in get_args(Participation)
    }
    found["Sampled poisson, twice inside"] = (
        Sampled("poisson", 0.3, Repeat(Gaussian(NOISE), 2)),
        lambda rows: poisson(rows, 0.3, NOISE / math.sqrt(2)),
    )
    found["Allocated"] = Allocated(((NOISE, 1), (2.0, 1))), lambda rows: allocated(rows, NOISE, 2.0)
    found["Repeat"] = (Repeat(Gaussian(NOISE), 2), lambda rows: twice(everyone(rows, NOISE)))
    one, law = sampled("fixed-size")
    found["Repeat fixed-size"] = (Repeat(one, 2), lambda rows: twice(law(rows)))
    found["Compose"] = (
        Compose((Gaussian(NOISE), Sampled("poisson", 0.3, Gaussian(NOISE)))),
        lambda rows: [(w, (*a, *b)) for _, a in everyone(rows, NOISE) for w, b in poisson(rows, 0.3, NOISE)],
    )
    found["OnClients"] = (OnClients(2, Gaussian(NOISE)), lambda rows: twice(everyone(rows, NOISE)))
    seen, law = two_level("poisson", "visible")  # of clients with fewer than 5 records; others sample half as often
    assert isinstance(seen, TwoLevel)
    found["BySize visible"] = BySize(seen, ((1, seen.sampling_rate, 1), (5, seen.sampling_rate / 2, 1))), law
    found["SampledUser"] = (  # the user's two records pull one way
        SampledUser(2, 0.3, NOISE),
        lambda rows: poisson([*rows[: len(rows) - COUNT], *rows], 0.3, NOISE),
    )
    # Enough noise for the textbook bounds to be valid, and one step.
    calm = 8.0
    found["Sampled fixed-size, calm"] = (
        Sampled("fixed-size", 0.5, Gaussian(calm)),
        lambda rows: fixed_size(rows, 2, calm),
    )
    found["Gaussian, calm"] = (Gaussian(calm), lambda rows: everyone(rows, calm))
    return found


CASES = cases()


@cache
def truth(name: str, adjacency: str) -> dict[float, float]:
    """The worst divergence over all neighbours and both directions, by epsilon."""
    law = CASES[name][1]
    epsilons = sorted({*EPSILONS, *CALM})
    worst = np.max([divergences(law(one), law(other), epsilons) for one, other in data(adjacency)], axis=0)
    if "visible" in name:  # where it shows, the part in which it came not is the same
        worst = 0.4 * worst
    return dict(zip(epsilons, worst.tolist(), strict=True))


def test_every_kind_of_event_has_a_case() -> None:
    others = {
        Unbounded.__name__,
        SamplerError.__name__,
    }  # without a cost of their own; test_algorithms_charges_sampler
    kinds = {kind.__name__ for kind in get_args(Event)} - others
    assert {name.split()[0].strip(",") for name in CASES} == kinds
    assert {kind.__name__ for kind in get_args(Leaf)} <= kinds | others
    for kind in get_args(SamplingKind):
        assert f"Sampled {kind}" in CASES
        assert any(key[1] == kind for key in TABLE)
        for seen in get_args(Participation):
            assert f"TwoLevel {kind} {seen}" in CASES


def is_unproven(name: str, adjacency: str) -> bool:
    unproven = {("shuffled", "add-or-remove"), ("allocat", "replace-one"), ("sampleduser", "replace-one")}
    return any(word in name.lower() and adjacency == which for word, which in unproven)


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", get_args(Adjacency))
@pytest.mark.parametrize("name", CASES)
def test_no_valid_figure_is_below_the_truth(name: str, adjacency: str) -> None:
    event, _ = CASES[name]
    worst = {epsilon: truth(name, adjacency)[epsilon] for epsilon in (CALM if "calm" in name else EPSILONS)}
    refused = []
    for accountant in accountants.REGISTRY.own:
        for epsilon, delta in worst.items():
            try:
                claimed = accountants.delta(event, epsilon, accountant, adjacency)  # type: ignore[arg-type]
                if 1e-12 < delta < 1:
                    back = accountants.epsilon(event, delta * (1 - 1e-6), accountant, adjacency)  # type: ignore[arg-type]
            except ConfigError:
                refused.append(accountant)
                break
            assert not claimed.valid or claimed.delta is None or claimed.delta >= delta * (1 - GRID) - 1e-7
            if 1e-12 < delta < 1 and back.valid and back.epsilon is not None:
                assert back.epsilon >= epsilon - 2e-3
    if is_unproven(name, adjacency):
        assert refused == list(accountants.REGISTRY.own)
    else:
        assert "pld" not in refused


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", get_args(Adjacency))
@pytest.mark.parametrize("name", CASES)
def test_the_checker_of_certificates_is_never_below_the_truth(name: str, adjacency: str) -> None:
    """A new kind of event needs a function in event_costs.EVENTS, and passes here."""
    written = CASES[name][0].to_json()
    if is_unproven(name, adjacency):
        with pytest.raises(event_costs.Unknown):
            claim_figures.recompute([(written, 1)], adjacency, 0.1, 1.0)
        return
    for epsilon in (0.5, 2.0):
        delta = truth(name, adjacency)[epsilon]
        if delta > 1e-9:
            found = claim_figures.recompute([(written, 1)], adjacency, delta * (1 - GRID), epsilon)
            assert found.epsilon >= epsilon - 2e-3


def test_the_brute_force_finds_what_was_wrong() -> None:
    """Shuffled batches under add-or-remove once cost as much as under zero-out; `basic` once had one clip."""
    once = Gaussian(NOISE)
    one, other = [1.0, -1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]
    (true,) = divergences(shuffled(one, 2, NOISE), shuffled(other, 2, NOISE), [1.0])
    assert true > 1.2 * accountants.delta(once, 1.0).delta
    halved = accountants.epsilon(Sampled("fixed-size", 0.5, Gaussian(16.0)), 1e-2, "basic")
    assert accountants.epsilon(CASES["Sampled fixed-size, calm"][0], 1e-2, "basic").epsilon > 1.5 * halved.epsilon


def test_a_fixed_size_sample_under_zero_out_needs_both_directions() -> None:
    """The others pull against the unit: an empty place shows beyond log(1/(1 - q)), a removed unit never."""
    rate, noise, epsilon = 0.5, 0.5, 1.0
    law = {unit: fixed_size([unit, -1.0, -1.0, -1.0], 2, noise) for unit in (0.0, 1.0)}
    p, q = (law[unit] for unit in (0.0, 1.0))
    x = np.arange(-20, 20, 0.01)
    here, there = (
        sum(w * np.exp(-((x - m) ** 2) / 2) / math.sqrt(2 * math.pi) for w, (m,) in each) for each in (p, q)
    )
    true = np.maximum(here - math.exp(epsilon) * there, 0).sum() * 0.01
    leaf = Sampled("fixed-size", rate, Gaussian(noise))
    one_way, both = (pld._pair(leaf, adjacency) for adjacency in ("add-or-remove", "zero-out"))
    assert one_way.backward(np.array([epsilon]))[0] == 0.0 < true
    assert both.backward(np.array([epsilon]))[0] >= true


@pytest.mark.slow
@pytest.mark.parametrize("clients", [2, 4])
def test_copies_on_clients_of_a_fixed_size_sample_are_charged_enough(clients: int) -> None:
    """All K clients hold the record and half of them come: never fewer, as Poisson sampling would have it."""
    from shoal.algorithms import algorithm
    from shoal.algorithms.base import Local
    from shoal.algorithms.charges import event
    from shoal.mechanisms.gaussian import StepNoise
    from shoal.mechanisms.sampling import Clients, Records
    from shoal.mechanisms.setting import Setting

    record = replace(
        algorithm("fed-cdp-private"),
        clients=Clients("fixed-size", clients // 2),
        records=Records("fixed-order", 1),
        local=Local(steps=1),
        per_step=StepNoise(2.0),
    )
    charged = event(record, Setting(clients, 1, multiplicity=clients, sizes=(1,)), 0, "record", "server")
    for epsilon in (0.0, 0.3, 1.0):
        real = accountants.delta(Repeat(Gaussian(2.0), clients // 2), epsilon, adjacency="replace-one").delta
        assert accountants.delta(charged, epsilon, adjacency="replace-one").delta >= real * (1 - 1e-6)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_the_best_of_a_private_selection_is_not_below_the_truth(adjacency: str) -> None:
    """The release is a number, and the greatest of the trials is chosen: P(best <= y) = E[F(y)^K]."""
    trials, noise = Trials(1.0, 0.3), 1.5
    y = np.arange(-15, 15, 0.005)

    def best(mean: float) -> np.ndarray:
        from scipy.special import ndtr

        below = ndtr(y - mean / noise)
        return np.diff(below * trials.gamma / (1 - (1 - trials.gamma) * below))  # a geometric number of trials

    for delta in (1e-2, 1e-3):
        found = selection.epsilon([Gaussian(noise)], trials, delta, adjacency)  # type: ignore[arg-type]
        assert found.epsilon is not None
        for one, other in units(adjacency):
            here, there = best(one), best(other or 0.0)
            for p, q in ((here, there), (there, here)):
                assert np.maximum(p - math.exp(found.epsilon) * q, 0).sum() <= delta


def test_the_documentation_has_this_table() -> None:
    docs = ROOT / "docs" / "explanation" / "sampling.md"
    assert f"\n\n{markdown().rstrip()}\n\n" in docs.read_text(encoding="utf-8")
    assert len(markdown().splitlines()) == 2 + len([key for key in TABLE if key[3] == "release"])


@pytest.mark.parametrize("cell", TABLE.values())
def test_each_cell_is_a_theorem_with_its_reference_or_a_refusal(cell: Cell) -> None:
    assert bool(cell.refused) != bool(cell.theorem and cell.reference)
