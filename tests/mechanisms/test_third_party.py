"""Mechanisms that Shoal does not know: clips that give each layer a bound of its own, and a scheme of sampling.

They are defined here, as anybody's package would, and are run, charged, audited, attacked and sent all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from shoal.accounting.events import BySize, Compose, Gaussian, Sampled, TwoLevel, Unbounded
from shoal.accounting.leaves import by_size
from shoal.accounting.theorems import IN_SIGHT
from shoal.algorithms import algorithm, algorithms
from shoal.algorithms.charges import AS_ONE_RECORD, PAIRS, event, proves
from shoal.attacks.observe import Victims, observe
from shoal.audit.broken import VARIANTS, whole
from shoal.audit.cases import cases
from shoal.audit.checks import noise_checks, sensitivity_check
from shoal.errors import ConfigError, PluginError
from shoal.federation import canary_clients
from shoal.federation.consent import Refused
from shoal.federation.site_policy import Bounds
from shoal.federation.terms import Crossing
from shoal.gradients import network
from shoal.mechanisms.coordinate_clipping import AdaClip
from shoal.mechanisms.correlated import Correlated
from shoal.mechanisms.gaussian import Gaussian as GaussianNoise
from shoal.mechanisms.gaussian import StepNoise
from shoal.mechanisms.mechanism import (
    ADJACENCIES,
    RAW,
    GradientClip,
    RoundNoise,
    StepMechanism,
    UpdateMechanism,
    altered,
)
from shoal.mechanisms.participation import Participation
from shoal.mechanisms.record_clipping import FactorClip, QuantileRecordClip, RecordClip
from shoal.mechanisms.sampling import (
    LARGEST_BATCH,
    AllClients,
    AllocatedRecords,
    Clients,
    PoissonClients,
    PoissonRecords,
    Records,
    ShuffledRecords,
    joined_from,
)
from shoal.mechanisms.sampling.separated_clients import MinSeparationClients, RandomAllocation
from shoal.mechanisms.schedules import parse
from shoal.mechanisms.setting import Setting
from shoal.mechanisms.update_clipping import (
    Clip,
    Clipping,
    MedianClip,
    NoisyClip,
    QuantileClip,
    clipped,
    into_ball,
    row_norms,
    shrinking,
)
from shoal.random.secure_streams import SecureStreams
from shoal.random.streams import Streams
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex
from support.small_federation import SETTING, simulator, small, twin


def shares(layers):
    """Each layer's share of the bound: as the root of its size, so that together they are 1."""
    sizes = torch.tensor([place.stop - place.start for place in layers.values()], dtype=torch.float64)
    return (sizes / sizes.sum()).sqrt()


@dataclass(frozen=True)
class LayerClip(Clipping):
    """Whole updates: each layer has its own share of the bound."""

    clip_norm: float = 1.0

    def bound(self, memory, t, total, norms):
        return self.clip_norm

    def clipped(self, updates, norms, bound, layers):
        for place, share in zip(layers.values(), shares(layers), strict=True):
            part = updates[:, place]
            clipped(part, row_norms(part), bound * float(share))
        return updates

    def replay(self, shown, seen, bound, unit, layers):
        places = zip(layers.values(), shares(layers), strict=True)
        return torch.cat([into_ball(shown[:, place], bound * unit * float(share)) for place, share in places], dim=1)


@dataclass(frozen=True)
class LayerExampleClip(FactorClip):
    """Single gradients: the same."""

    clip_norm: float = 1.0

    def bound(self, memory, t, total):
        return self.clip_norm

    def factors(self, squares, bound, layers):
        return shrinking(squares.sqrt(), shares(layers).to(squares).view(-1, 1, 1) * bound)


UPDATES = replace(algorithm("trusted-curator"), name="layers", per_update=LayerClip(1.0))
RECORDS = replace(algorithm("fed-cdp-private"), name="layers-records", per_record=LayerExampleClip(1.0))


def cut(record):
    few = small("trusted-curator" if record is UPDATES else "fed-cdp-private")
    return replace(record, clients=few.clients, records=few.records, local=few.local)


@pytest.mark.slow
@pytest.mark.parametrize("record", [UPDATES, RECORDS], ids=lambda record: record.name)
def test_it_runs_and_tells_its_clip(record):
    sim = simulator(cut(record), layers=3)
    params, _, told = run_round(sim.cohort, sim.params, {}, RoundIndex(0, 4))
    assert params.isfinite().all()
    assert told["clip" if record is UPDATES else "record_clip"] == 1.0


def test_each_layer_of_an_update_leaves_within_its_own_bound():
    layers = simulator(UPDATES, layers=3).cohort.layout.named_layers
    assert list(layers) == ["1", "3", "5"]
    updates = torch.randn(4, max(place.stop for place in layers.values())) * 100
    left = UPDATES.per_update.apply(updates, row_norms(updates), 1.0, 0, 4, np.random.default_rng, layers)
    norms = torch.stack([row_norms(left[:, place]) for place in layers.values()])
    torch.testing.assert_close(norms, shares(layers).unsqueeze(1).expand(3, 4), rtol=1e-4, atol=0)
    assert (row_norms(left) <= 1.0).all()


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
@pytest.mark.parametrize(
    ("record", "known"),
    [(UPDATES, {"per_update": Clip(1.0)}), (RECORDS, {"per_record": RecordClip(1.0)})],
    ids=["updates", "records"],
)
def test_it_is_charged_as_a_clip_of_the_whole_by_the_same_bound(record, known, pair):
    record = cut(record)
    assert event(record, SETTING, 0, *pair) == event(replace(record, **known), SETTING, 0, *pair)


@pytest.mark.slow
@pytest.mark.parametrize("record", [UPDATES, RECORDS], ids=lambda record: record.name)
@pytest.mark.usefixtures("rarely")
@pytest.mark.statistical(false_alarm=2e-7)
def test_an_audit_finds_nothing_in_it_and_flags_its_unclipped_twin(record):
    case = next(case for case in cases(record) if case.where == ("sum" if record is UPDATES else "steps"))
    assert case.kind == "proven"

    def flagged(broken):
        checks = [*noise_checks(broken, 24 if record is UPDATES else 150), sensitivity_check(broken, 4)]
        return {check.name for check in checks if check.flagged}

    streams = Streams(5)
    assert flagged(whole(case, streams)) == set()
    for name in ("clip off", "noise x 1/4"):
        assert flagged(VARIANTS[name](case, streams)), name


@dataclass(frozen=True)
class GreedyLayerClip(LayerClip):
    """Each layer has the whole bound."""

    def clipped(self, updates, norms, bound, layers):
        for place in layers.values():
            clipped(updates[:, place], row_norms(updates[:, place]), bound)
        return updates


@pytest.mark.slow
def test_an_audit_flags_a_clip_that_gives_each_layer_the_whole_bound():
    """Four layers: twice the bound."""
    greedy = replace(UPDATES, per_update=GreedyLayerClip(1.0))
    check = sensitivity_check(whole(next(case for case in cases(greedy) if case.where == "sum"), Streams(5)), 6)
    assert check.flagged
    assert check.measured == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize("record", [UPDATES, RECORDS], ids=lambda record: record.name)
def test_an_attacker_sees_what_it_leaves_and_replays_it(record):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    x, y = torch.randn(2, 1, 6), torch.tensor([[0], [1]])
    seen = observe(replace(record, per_step=None), 0, module, Victims(x, y, ("a", "b")), Streams(3))
    shown = seen.replay(seen.shown(x, nn.functional.one_hot(y, 2).float()), seen.gradients)
    torch.testing.assert_close(shown.detach(), seen.gradients, rtol=1e-3, atol=1e-5)


def test_a_federation_knows_what_crosses_and_a_site_bounds_its_clip():
    assert Crossing.of(UPDATES) == Crossing(raw=False, below=False, share=False, records=False)
    assert UPDATES.per_update.longest(1.0, 0, 4, 100) == pytest.approx(1.0, rel=1e-3)
    assert UPDATES.per_update.scales() == {"per_update.clip_norm": 1.0}
    with pytest.raises(Refused, match="this site accepts"):
        Bounds().refuse_value("clip_norm", "per_update.clip_norm", 1e9)


@dataclass(frozen=True)
class EveryOther(Clients):
    """The even clients in even rounds, the odd ones in odd rounds."""

    sampling: str = "every-other"

    def expected(self, t, total, clients):
        return clients / 2

    def draw(self, generator, t, total, clients):
        return np.arange(t % 2, clients, 2)


def test_a_scheme_of_ones_own_has_a_word_and_is_charged_as_if_everybody_came():
    try:
        chosen = replace(algorithm("trusted-curator").clients, sampling="every-other")
        assert type(chosen) is EveryOther
        assert type(replace(chosen, sampling="poisson", cohort=3)) is type(Clients("poisson"))
        record = replace(algorithm("trusted-curator"), clients=chosen)
        sim = simulator(replace(cut(UPDATES), clients=chosen))
        _, _, told = run_round(sim.cohort, sim.params, {}, RoundIndex(0, 4))
        assert told["clients"] == told["expected_clients"] == 5
        assert event(record, SETTING, 0, "client", "release") == Gaussian(1.633)
        assert proves(record) == proves(algorithm("trusted-curator"))
        noisy = replace(algorithm("fed-sdp"), clients=chosen)  # by as many clients' noise as really come
        assert isinstance(event(noisy, SETTING, 0, "record", "release"), Unbounded)
    finally:
        Clients.schemes.pop("every-other")


@pytest.mark.parametrize(
    ("base", "method", "statement"),
    [
        (Clip, "apply", "unproven"),
        (Clip, "needs_cohort_norms", "unproven"),
        (Clip, "sums_gradients", "unproven"),
        (NoisyClip, "multiplier", "noise_schedule"),
        (StepNoise, "test", "event"),
        (StepNoise, "multiplier", "noise_schedule"),
        (RecordClip, "sanitiser", "unproven"),
        (RecordClip, "sensitivity", "unproven"),
        (RecordClip, "factors", "excess"),
        (QuantileRecordClip, "count", "count_scale"),
        (AdaClip, "clipped_sum", "unproven"),
        (GaussianNoise, "add", "event"),
        (GaussianNoise, "share", "event"),
        (GaussianNoise, "for_records", "event"),
        (GaussianNoise, "multiplier", "noise_schedule"),
        (Correlated, "fitted", "event"),
        (Correlated, "coefficients", "event"),
        (PoissonClients, "draw", "amplified"),
        (PoissonClients, "take_part", "amplified"),
        (PoissonClients, "secret", "amplified"),
        (PoissonRecords, "drawn", "event"),
        (PoissonRecords, "repeats", "event"),
    ],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_one_that_does_something_else_must_say_what_that_proves(base, method, statement):
    """Else it would be charged as what it was derived from."""
    done = {method: lambda self, *given: None}
    with pytest.raises(TypeError, match=f"overrides '{method}', and inherits '{statement}' of "):
        type("Other", (base,), done)
    with pytest.raises(TypeError, match=f"overrides '{method}', and inherits '{statement}' of "):
        type("Other", (type("Mixin", (), done), base), {})
    assert type("Other", (base,), done | {statement: None})


def test_each_statement_is_made_anew():
    """A noisy clip also states its event: one that only says again what its clip proves has forgotten that."""
    done = {"apply": lambda self, updates, *given: updates, "unproven": None}
    with pytest.raises(
        TypeError, match=r"inherits 'event' of NoisyClip.*\(event = NoisyClip.event, if that still holds"
    ):
        type("Other", (NoisyClip,), done)
    assert type("Other", (NoisyClip,), done | {"event": NoisyClip.event})


@pytest.mark.parametrize("other", [MedianClip, type("Of", (Clip,), {"unproven": "by the data"})])
def test_one_of_two_bases_states_nothing_for_the_other(other):
    """A noisy clip is proven where its bound is public, and the other base has a bound that is not."""
    bound = {"bound": MedianClip.bound}
    with pytest.raises(TypeError, match="define 'unproven' in Noisy too"):
        type("Noisy", (NoisyClip, other), bound)
    assert type("Noisy", (NoisyClip, other), bound | {"unproven": other.unproven})
    assert type("Noisy", (NoisyClip, LayerClip), {})


def test_one_with_statements_of_its_own_makes_the_others_anew_all_the_same():
    """Only what the base class of the boundary says may be inherited."""
    quiet = {"apply": lambda self, updates, *given: updates, "states": Clip.states | {"faded": ("event",)}}
    with pytest.raises(TypeError, match="Other overrides 'apply', and inherits 'unproven' of NoisyClip"):
        type("Other", (NoisyClip,), quiet)
    done = {"draw": lambda self, *given: np.arange(4), "amplified": Clients.amplified}
    rules = {"states": Clients.states | {"chosen": ("amplified",)}}
    assert type("Other", (PoissonClients,), done | rules)(cohort=2).rate(0, 4, 4) == 1
    family = type("Family", (PoissonClients,), rules | {"rate": lambda self, *given: 0.5})
    assert type("Other", (family,), done)(cohort=2).rate(0, 4, 4) == 1
    with pytest.raises(TypeError, match="Other overrides 'apply', and inherits 'unproven' of NoisyClip"):
        type("Other", (NoisyClip,), quiet | {"states": {"faded": ("event",)}})


@dataclass(frozen=True, kw_only=True)
class ChosenClip(Clip):
    """Its bound is the median of the norms, if that is chosen."""

    needs_cohort_norms: bool

    def bound(self, state, t, total, norms):
        return super().bound(state, t, total, norms) if norms is None else float(norms.median())


def test_what_an_instance_overrides_is_refused_where_it_is_used():
    """A field without a default is no attribute of its class."""
    with pytest.raises(
        TypeError, match="ChosenClip overrides 'needs_cohort_norms', and inherits 'unproven' of Clipping"
    ):
        replace(UPDATES, per_update=ChosenClip(needs_cohort_norms=True))
    kind = dataclass(frozen=True, kw_only=True)(
        type("Repeated", (PoissonRecords,), {"__annotations__": {"repeats": bool}})
    )
    with pytest.raises(TypeError, match="Repeated overrides 'repeats', and inherits 'event' of PoissonRecords"):
        replace(UPDATES, records=kind(repeats=True))
    kind = dataclass(frozen=True, kw_only=True)(
        type("Given", (GaussianNoise,), {"__annotations__": {"event": Callable}})
    )
    with pytest.raises(TypeError, match="Given overrides 'event', and inherits 'alike' of Gaussian"):
        replace(UPDATES, per_round=kind(event=lambda round, *given: Gaussian(2.0 / (1 + round.t))))
    stated = type("Stated", (ChosenClip,), {"unproven": MedianClip.unproven})
    record = replace(UPDATES, per_update=stated(needs_cohort_norms=True))
    assert event(record, SETTING, 0, "client", "release") == Unbounded(MedianClip.unproven)


def test_a_class_that_is_changed_after_it_was_made_is_refused_where_it_is_used():
    clients, records = type("Other", (PoissonClients,), {}), type("Other", (PoissonRecords,), {})
    assert replace(UPDATES, clients=clients(cohort=2), records=records()).clients.rate(0, 4, 4) == 0.5
    records.drawn = lambda self, generator, records, steps: np.zeros((steps, 1), dtype=np.int64)
    with pytest.raises(TypeError, match="Other overrides 'drawn', and inherits 'event' of PoissonRecords"):
        replace(UPDATES, records=records())
    clients.draw, clients.amplified = lambda self, *given: np.arange(4), Clients.amplified
    assert replace(UPDATES, clients=clients(cohort=2)).clients.rate(0, 4, 4) == 1


def test_a_certificate_does_not_say_of_one_what_another_does():
    assert type("Other", (PoissonClients,), {})().does() == "Other"
    assert PoissonClients().does().startswith("Each client takes part independently")


def test_who_is_charged_by_the_block_is_stated_anew_where_others_take_part():
    """`amplified` is of one round; the charge of random allocation counts a client once in a block."""
    done = {"take_part": lambda self, *given: np.arange(4), "amplified": Clients.amplified}
    with pytest.raises(TypeError, match="overrides 'take_part', and inherits 'charged' of RandomAllocation"):
        type("Other", (RandomAllocation,), done)
    assert type("Other", (RandomAllocation,), done | {"charged": Clients.charged})
    block = {"draw": lambda self, *given: np.arange(4), "charged": lambda self, event_at, t, *given: event_at(t)}
    with pytest.raises(TypeError, match="overrides 'draw', and inherits 'charged' of Blocks"):
        type("Other", (type("Blocks", (Clients,), block),), {"draw": lambda self, *given: np.arange(8)})


def test_who_joins_later_is_charged_from_the_first_round_where_a_scheme_charges_by_rounds_of_its_own():
    """It may have charged this round with an earlier one."""
    block = {"charged": lambda self, event_at, t, *given: Compose(()) if t % 4 else event_at(t)}
    other, stated = (
        type("Blocks", (AllClients,), block | said)()
        for said in ({}, {"charged_from": lambda self, t, clients: t - t % 4})
    )
    changed = type("Other", (type(stated),), block)()
    assert [joined_from(scheme, 6, 10) for scheme in (AllClients(), other, stated, changed)] == [6, 0, 4, 0]
    done = {"draw": AllClients.draw, "__annotations__": {"charged": Callable}}
    given = dataclass(frozen=True, kw_only=True)(type("Given", (Clients,), done))(charged=block["charged"])
    assert joined_from(given, 6, 10) == 0, "a field without a default is no attribute of its class"


def test_clients_come_at_the_rate_that_is_charged():
    rare = type("Rare", (PoissonClients,), {"rate": lambda self, *given: 0.001})
    assert len(rare(cohort=500).draw(np.random.default_rng(0), 0, 1, 1000)) < 20


def test_sampling_amplifies_no_cycle_in_any_round_of_which_a_client_may_come():
    """Of five rounds each has a chance of 0.1: a client comes in one of them with more than that."""
    done = {
        "secret": True,
        "draw": lambda self, generator, t, total, clients, able: able[generator.random(len(able)) < 0.1],
        "rate": lambda self, *given: 0.1,
        "amplified": PoissonClients.amplified,
    }
    seldom = type("Seldom", (MinSeparationClients,), done)(cohort=10, separation=5)
    found = event(replace(UPDATES, clients=seldom), replace(SETTING, clients=100), 0, "client", "release")
    assert found == Gaussian(1.633)


@pytest.mark.parametrize("method", ["draw", "take_part"])
def test_one_that_lets_others_take_part_has_no_rate_that_it_does_not_state(method):
    """Records were charged as if their client came at the rate of Poisson sampling, whoever came."""
    done = {method: lambda self, *given: np.arange(4), "amplified": Clients.amplified}
    other = type("Other", (PoissonClients,), done)
    mixed = type("Other", (type("Mixin", (), done), PoissonClients), {})
    stated = type("Other", (PoissonClients,), done | {"rate": PoissonClients.rate})
    rates = [kind(cohort=2).rate(0, 4, 4) for kind in (PoissonClients, other, mixed, stated)]
    assert rates == [0.5, 1.0, 1.0, 0.5]


def test_a_cohort_of_public_size_is_none_where_others_take_part():
    """Shares of noise are made for a number of clients: fewer clients add less noise."""
    few = type("Few", (AllClients,), {"draw": lambda self, *given: np.arange(2)})
    record = algorithm("distributed-dp-sgd")
    record.refuse_unfit(0, 4, 10)
    with pytest.raises(ConfigError, match="noise shares are made for a cohort of public size"):
        replace(record, clients=few()).refuse_unfit(0, 4, 10)


@pytest.mark.parametrize(
    "done",
    [
        {"expected": lambda self, t, total, clients: 1.0 + t},
        {"rate": lambda self, t, total, clients, copies=1: (1 + t) / clients},
        {"charged": lambda self, event_at, t, *given: event_at(0) if t else event_at(1)},
    ],
    ids=lambda done: next(iter(done)),
)
def test_rounds_differ_where_the_sampling_of_clients_is_anothers(done):
    """Else a site would charge all of them as the first."""
    record = replace(UPDATES, clients=PoissonClients(cohort=1))
    assert record.different_rounds(4) == range(1)
    other = type("Other", (PoissonClients,), done)
    assert replace(record, clients=other(cohort=1)).different_rounds(4) == range(4)


def test_canaries_take_part_only_where_a_scheme_says_that_its_rounds_are_alike():
    drawn = {"draw": lambda self, *given: np.arange(2), "amplified": Clients.amplified}
    for said in ({}, {"alike": True}):
        record = replace(UPDATES, clients=type("Other", (PoissonClients,), drawn | said)(cohort=2))
        with nullcontext() if said else pytest.raises(ConfigError, match="or one whose rounds are `alike`"):
            canary_clients.refuse_unfit(record, 1)


def test_turns_that_nobody_counts_are_not_charged():
    """`participation` is checked where a scheme is `separated`: elsewhere a client may come in any round."""
    turns = {
        "draw": lambda self, *given: np.arange(2),
        "participation": lambda self, total, _: Participation(total, 4),
    }
    said = {}
    for separated in (False, True):
        scheme = type("Turns", (Clients,), turns | {"secret": False, "separated": separated})
        record = replace(UPDATES, clients=object.__new__(scheme), per_round=Correlated(2.0, bands=4))
        said[separated] = sum(event(record, SETTING, t, "client", "release").noise ** -2 for t in range(4))
    assert said[False] > 2 * said[True]


def test_an_altered_copy_of_an_altered_copy_has_the_same_statements():
    """Audits alter who comes of variants that do so already."""
    once = altered(AllClients(), take_part=lambda self, *given: np.arange(1))
    twice = altered(once, draw=lambda self, *given: np.arange(2))
    assert not twice.shows(1.0)
    assert (twice.take_part().size, twice.draw().size) == (1, 2)


@dataclass(frozen=True)
class CountingClip(Clip):
    """Counts what is within its bound, and says nothing of noise on the count."""

    counts: ClassVar[bool] = True


@dataclass(frozen=True)
class CountingRecords(RecordClip):
    """The same for gradients."""

    counts: ClassVar[bool] = True


@dataclass(frozen=True)
class NoisyCount(CountingClip):
    """Adds noise to its count, and does not say that it costs anything."""

    def count_scale(self, cohort):
        return 100.0


@dataclass(frozen=True)
class PaidCount(NoisyCount):
    """And has as much more noise on the updates."""

    def update_noise(self, noise, cohort):
        return (noise**-2 - 200.0**-2) ** -0.5


@dataclass(frozen=True)
class NoNumber(NoisyCount):
    """Its noise on the updates is no number."""

    def update_noise(self, noise, cohort):
        return float("nan")


@pytest.mark.parametrize(
    "clip", [CountingClip(1.0), NoisyCount(1.0), NoNumber(1.0)], ids=lambda clip: type(clip).__name__
)
def test_a_count_that_no_noise_pays_for_proves_nothing(clip):
    said = [event(replace(UPDATES, per_update=clip), SETTING, 0, *pair) for pair in PAIRS]
    assert all(isinstance(each, Unbounded) for each in said)
    assert said[0].because == "it counts what is within its clip, and the noise does not cover that"
    shared = replace(UPDATES, per_update=PaidCount(1.0))
    assert event(shared, SETTING, 0, "client", "release") == event(UPDATES, SETTING, 0, "client", "release")


class Following(QuantileClip):
    """Sets its bound to the share of clients that were within the last one."""

    def adapt(self, state, share):
        state["clip"] = torch.tensor(share)


@pytest.mark.parametrize("counts", [False, True])
def test_a_clip_learns_a_count_with_its_noise_or_none(counts):
    kind = type("Other", (Following,), {"counts": counts})
    record = replace(cut(UPDATES), per_update=kind(count_noise_multiplier=0.5))
    sim = simulator(record)
    shares = {run_round(sim.cohort, sim.params, {}, RoundIndex(t, 4))[1].get("clip") for t in range(2)}
    if counts:
        assert all(share * 4 % 0.5 for share in shares), "the count of a cohort of 4 expected clients has noise"
    else:
        assert shares == {None}


def test_no_clip_counts_where_clients_add_shares_of_the_noise():
    """Nobody would add the noise of the count."""
    own = {"share": lambda self, bound, cohort, *when: bound / cohort**0.5, "event": GaussianNoise.event}
    record = replace(UPDATES, per_round=type("Shares", (GaussianNoise,), own)(1.0, at="shared"))
    record.refuse_unfit(0, 4, 1000)
    with pytest.raises(ConfigError, match="shares of noise cover no count: per_update must not count"):
        replace(record, per_update=QuantileClip(count_noise_multiplier=1.0)).refuse_unfit(0, 4, 1000)
    with pytest.raises(ConfigError, match="per_round adds shares of noise: set per_round"):
        replace(record, per_round=replace(record.per_round, at="server")).refuse_unfit(0, 4, 1000)


def test_a_count_is_rounded_to_a_step_of_its_own_noise_in_secure_mode():
    assert NoisyCount(1.0).count_rounding(4) == pytest.approx(2 * 100 / 2**20, rel=1e-2)


@dataclass(frozen=True)
class Quiet(Clip):
    """Has half of the noise added."""

    def update_noise(self, noise, cohort):
        return noise / 2


@dataclass(frozen=True)
class QuietRecords(RecordClip):
    """The same for gradients."""

    def update_noise(self, noise, batch):
        return noise / 2


def test_a_clip_that_has_less_noise_added_than_is_charged_proves_nothing():
    updates, gradients = replace(UPDATES, per_update=Quiet(1.0)), replace(cut(RECORDS), per_record=QuietRecords(1.0))
    for record in (updates, gradients):
        said = [event(record, SETTING, 0, *pair) for pair in PAIRS]
        assert all(isinstance(each, Unbounded) for each in said)
    assert "less noise" in event(updates, SETTING, 0, "client", "release").because


def test_neither_does_a_count_of_gradients_for_a_record_or_a_client():
    record = cut(RECORDS)
    counting = replace(record, per_record=CountingRecords(1.0))
    assert isinstance(event(record, SETTING, 0, "record", "server"), TwoLevel | BySize)
    assert all(isinstance(event(counting, SETTING, 0, *pair), Unbounded) for pair in PAIRS)
    both = replace(UPDATES, per_record=CountingRecords(1.0))
    assert "scaled for one record" in event(both, SETTING, 0, "client", "release").because


@dataclass(frozen=True)
class Fading(GaussianNoise):
    """Noise and a clip under names of their own, which change over the rounds."""

    sigma: str = "linear:6:1"
    path: str = "a:b"

    def noise_schedule(self):
        return parse(self.sigma)

    def multiplier(self, t, total):
        return parse(self.sigma).value(t, total)


@dataclass(frozen=True)
class FadingClip(Clipping):
    radius: str = "linear:6:1"

    def bound(self, state, t, total, norms):
        return parse(self.radius).value(t, total)


@pytest.mark.parametrize("changed", [{"per_round": Fading()}, {"per_update": FadingClip()}], ids=["noise", "clip"])
def test_rounds_differ_whatever_the_name_of_the_setting_that_changes(changed):
    """Else a site would charge all of them as the first."""
    record = replace(UPDATES, **changed)
    assert record.different_rounds(10) == range(10)
    assert record.extreme_rounds(10) == [0, 9]


@dataclass(frozen=True)
class Unscheduled(GaussianNoise):
    """Half of the noise in odd rounds, which no schedule says."""

    def add(self, total, z, bound, state, generator):
        state["rounds"] = state.get("rounds", 0) + 1
        return super().add(total, z if state["rounds"] % 2 else z / 2, bound, state, generator)

    def event(self, round, unit, observer):
        return Gaussian(self.multiplier(round.t, round.setting.rounds) / (1 + round.t % 2))


def test_rounds_differ_where_a_mechanism_has_its_own_cost():
    """Else a site would charge rounds in which it was not asked as the first."""
    record = replace(UPDATES, per_round=Unscheduled(2.0))
    assert UPDATES.different_rounds(10) == range(1)
    assert record.different_rounds(10) == range(10)
    assert all(algorithm(name).alike for name in algorithms())
    lower = {"multiplier": lambda self, t, total: 2.0 / (1 + t % 2), "noise_schedule": GaussianNoise.noise_schedule}
    assert replace(UPDATES, per_round=type("Lower", (GaussianNoise,), lower)()).different_rounds(10) == range(10)
    stated = type("Stated", (Unscheduled,), {"alike": True})
    assert replace(record, per_round=stated(2.0)).different_rounds(10) == range(1)


@pytest.mark.slow
@pytest.mark.parametrize("boundary", ["per_record", "per_step", "per_update", "per_round"])
def test_each_mechanism_is_asked_whether_it_fits_the_round(boundary):
    record = replace(cut(RECORDS), per_update=Clip(1.0), per_round=GaussianNoise(1.0))

    def refuse(self, t, total):
        raise ConfigError(f"{boundary} does not fit round {t}")

    unfit = altered(getattr(record, boundary), refuse_unfit=refuse)
    record.refuse_unfit(3, 4, 10)
    with pytest.raises(ConfigError, match=f"{boundary} does not fit round 3"):
        replace(record, **{boundary: unfit}).refuse_unfit(3, 4, 10)


@pytest.mark.parametrize("base", [Clients, PoissonClients, Records])
def test_a_word_of_shoal_is_never_taken_by_another_scheme(base):
    before = dict(base.schemes)
    with pytest.raises(TypeError, match=r"sampling 'poisson' is Poisson\w+: Mine needs another word"):
        type("Mine", (base,), {"sampling": "poisson"})
    assert base.schemes == before


@pytest.mark.parametrize(
    ("drawn", "reason"),
    [
        ([[0, 0]], "a record more often than is charged"),
        ([[0, -1], [1, -1]], "2 steps, and 1 are charged"),
        ([], "0 steps, and 1 are charged"),
        ([[0, 1, 2]], "3 records at once"),
        ([[10, -1]], "a record that its client does not have"),
    ],
    ids=["twice", "one step more", "one step less", "wider", "another's"],
)
@pytest.mark.parametrize("method", ["drawn", "draw"])
def test_a_scheme_draws_what_is_charged(drawn, reason, method):
    """A step less has less noise than the steps of others; a wider batch moves a client's sum further than `most`.

    A position past a client's records would be a record of the next client.
    """
    drawn = np.array(drawn, dtype=np.int64).reshape(len(drawn), -1 if drawn else 2)
    sampler = altered(Records("shuffled", batch=2), **{method: lambda self, generator, records, steps: drawn})
    record = replace(cut(UPDATES), records=sampler, local=replace(cut(UPDATES).local, steps=1))
    with pytest.raises(PluginError, match=f"drew {reason}"):
        run_round((sim := simulator(record)).cohort, sim.params, {}, RoundIndex(0, 4))
    padded = altered(sampler, **{method: lambda self, generator, records, steps: np.array([[-1, -1]])})
    run_round((sim := simulator(replace(record, records=padded))).cohort, sim.params, {}, RoundIndex(0, 4))


def test_no_scheme_is_its_own_judge():
    """What is drawn is checked outside the class, which may have a method of any name."""

    def twice(self, generator, records, steps):
        return np.zeros((steps, 2), dtype=np.int64)

    done = {"drawn": twice, "checked": twice, "refuse_repeats": lambda self, batches: None, "event": Records.event}
    record = replace(cut(UPDATES), records=type("Mine", (ShuffledRecords,), done)(batch=2))
    with pytest.raises(PluginError, match="drew a record more often than is charged"):
        run_round((sim := simulator(record)).cohort, sim.params, {}, RoundIndex(0, 4))


def test_a_batch_of_secure_mode_is_no_wider_than_its_public_width():
    """It would be padded to its own width, which shows in the last digits."""
    everything = altered(
        PoissonRecords(rate=1e-6, nominal_records=10),
        drawn=lambda self, _, records, steps: np.array([range(records)]),
    )
    record = replace(cut(UPDATES), records=everything, local=replace(cut(UPDATES).local, steps=1))
    run_round((sim := simulator(record)).cohort, sim.params, {}, RoundIndex(0, 4))
    secure = twin(sim, streams=SecureStreams())
    with pytest.raises(PluginError, match=r"drew 10 records at once; its `most` \(in secure mode also its `widest`"):
        run_round(secure.cohort, secure.params, {}, RoundIndex(0, 4))


def test_a_record_that_may_fill_a_batch_is_charged_for_all_of_it():
    drawn = {"drawn": lambda self, generator, records, steps: np.zeros((steps, self.batch), dtype=np.int64)}
    noises = {
        repeats: type("Mine", (Records,), drawn | {"repeats": repeats})(batch=5)
        .event(1.0, 2.0, [(10, 0.5, 3)])[0]
        .noise
        for repeats in (False, True)
    }
    assert noises == {False: 2.0, True: 0.4}


def test_a_record_that_may_fill_a_batch_of_any_size_is_charged_for_the_largest_and_no_larger_one_is_drawn():
    """Charges know the smallest client of a range alone."""
    done = {
        "drawn": lambda self, generator, records, steps: np.zeros((steps, LARGEST_BATCH + 1), dtype=np.int64),
        "repeats": True,
        "event": Records.event,
    }
    many = type("Many", (PoissonRecords,), done)(batch=5)
    uses = many.uses(Setting(10, 4, sizes=(10, 1000), bounds=True), 3, 1)
    assert many.event(1.0, 2.0, uses)[0].noise == 2 / LARGEST_BATCH
    with pytest.raises(PluginError, match=f"drew {LARGEST_BATCH + 1} records at once; its `most`"):
        run_round((sim := simulator(replace(cut(UPDATES), records=many))).cohort, sim.params, {}, RoundIndex(0, 4))


def test_one_that_takes_more_steps_is_charged_for_more_passes():
    """Three times the steps are three passes, where clients' sizes are known as where they are not."""
    done = {"steps": lambda self, *given: 3 * ShuffledRecords.steps(self, *given), "monotone": True}
    thrice = type("Thrice", (ShuffledRecords,), done)
    record = replace(cut(RECORDS), records=thrice(batch=5))
    three = replace(record, records=ShuffledRecords(batch=5), local=replace(record.local, steps=None, epochs=3))
    record = replace(record, local=replace(three.local, epochs=1))
    for setting in (SETTING, replace(SETTING, sizes=()), replace(SETTING, sizes=(7, 100), bounds=True)):
        found, wanted = (by_size(event(each, setting, 0, "record", "server")) for each in (record, three))
        assert found == wanted


def test_one_that_takes_a_step_for_each_record_is_charged_for_them_where_sizes_are_not_known():
    """Batches of 5, and as many steps as records: five passes, but one for a client of one record."""
    done = {"steps": lambda self, records, epochs: epochs * records}
    each = type("Each", (ShuffledRecords,), done | {"monotone": True})
    assert each(batch=5).event(1.0, 1.0, each(batch=5).uses(Setting(10, 4), None, 1))[0].local_steps == 5
    assert not type("Each", (ShuffledRecords,), done)(batch=5).uses(Setting(10, 4), None, 1), "it may be any number"


def test_one_that_takes_fewer_steps_of_its_own_is_charged_for_each():
    """One step in a pass: a record that is in all of them is used as often as there are passes."""
    done = {
        "steps": lambda self, records, epochs: epochs,
        "drawn": lambda self, generator, records, steps: np.zeros((steps, 1), dtype=np.int64),
        "event": ShuffledRecords.event,
    }
    ((_, share, steps),) = type("Few", (ShuffledRecords,), done)(batch=5).uses(Setting(10, 4, sizes=(10,)), None, 2)
    assert share * steps == 2


def test_records_are_allocated_as_many_steps_as_are_charged_however_many_are_taken():
    """One record in a step, on average; it was half of all records, of which one was charged."""
    two = type("Two", (AllocatedRecords,), {"steps": lambda self, records, epochs: 2 * epochs})
    drawn = two(batch=1).drawn(np.random.default_rng(0), 100, 2)
    assert (drawn >= 0).sum(1).max() < 10


@pytest.mark.parametrize("steps", [None, 5])
def test_each_client_is_charged_for_its_share_and_steps_if_large_ones_sample_more_and_take_fewer_steps(steps):
    done = {
        "share": lambda self, records: min(1.0, records / 4000),
        "steps": lambda self, records, epochs: epochs * (500 - records // 10),
    }
    sampler, sizes = type("Other", (PoissonRecords,), done)(batch=10), range(10, 4000, 10)
    uses = sampler.uses(Setting(10, 4, sizes=tuple(sizes)), steps, 1)
    for size in sizes:
        _, share, most = next(use for use in reversed(uses) if use[0] <= size)
        assert share >= sampler.share(size)
        assert most >= (steps or sampler.steps(size, 1))


def test_a_share_of_ones_own_is_charged_where_sizes_are_not_known():
    done = {"share": lambda self, records: 2 * self.rate}
    for monotone, share in ((False, 1.0), (True, 0.02)):
        twice = type("Twice", (PoissonRecords,), done | {"monotone": True} if monotone else done)
        assert twice(rate=0.01, nominal_records=1000).uses(Setting(10, 4), 5, 1) == [(0, share, 5)]
    spares = type("Spares", (PoissonRecords,), {"share": lambda self, records: 0.0 if records < 10 else 10 / records})
    assert spares().uses(Setting(10, 4), 5, 1) == [(0, 1.0, 5)]  # it may be any between the smallest and the largest


@pytest.mark.parametrize(
    ("base", "done"),
    [
        (PoissonRecords, {"share": lambda self, records: 0.0 if records < 15 else 10 / records}),
        (PoissonRecords, {"steps": lambda self, records, epochs: 90 if records == 15 else 1}),
        (ShuffledRecords, {"steps": lambda self, records, epochs: 90 if records == 15 else 1}),
    ],
    ids=["share", "steps", "shuffled"],
)
def test_a_range_of_sizes_is_charged_for_the_size_that_costs_most(base, done):
    """That of 15 records, between 11 and 20, the ends of a range."""
    sampler = type("Spares", (base,), done)(batch=10)
    uses = sampler.uses(Setting(10, 4, sizes=(1, 1000), bounds=True), None, 1)
    _, share, steps = next(use for use in reversed(uses) if use[0] <= 15)
    ((_, least_share, least_steps),) = sampler.uses(Setting(10, 4, sizes=(15,)), None, 1)
    assert share >= least_share
    assert steps >= least_steps


@pytest.mark.parametrize("base", [PoissonRecords, ShuffledRecords])
def test_more_sizes_than_a_site_can_ask_about_count_as_unknown(base):
    """A coordinator sets the bounds: a site would ask for the share and steps of as many sizes as that likes."""

    def steps(self, records, epochs):
        assert records < 10**5, "it would go on"
        return epochs * records

    sampler = type("Own", (base,), {"steps": steps})(batch=10)
    bounds = Setting(10, 4, sizes=(1, 10**6), bounds=True)
    assert sampler.uses(bounds, None, 1) == []
    assert sampler.uses(bounds, 5, 1) == [(0, 1.0, 5)]
    assert base(batch=10).uses(bounds, 5, 1)[0][0] == 1


@pytest.mark.parametrize("drawn", [[-1, 9], [10], [0.5], [True, False]], ids=str)
@pytest.mark.parametrize("separated", [False, True])
def test_a_scheme_draws_clients_that_there_are(drawn, separated):
    """-1 and 9 would be the last of ten clients, twice."""
    clients = altered(Clients("cyclic" if separated else "all"), draw=lambda self, *given: np.array(drawn))
    sim = simulator(replace(cut(UPDATES), clients=clients))
    with pytest.raises(PluginError, match="drew something else than numbers from 0 to 9"):
        run_round(sim.cohort, sim.params, {}, RoundIndex(0, 4))


def test_a_client_that_is_drawn_twice_takes_part_once():
    record = cut(UPDATES)
    twice = altered(record.clients, draw=lambda self, *given: np.array([1, 1, 1]))
    sim = simulator(replace(record, clients=twice))
    _, _, told = run_round(sim.cohort, sim.params, {}, RoundIndex(0, 4))
    assert told["clients"] == 1


def test_a_word_that_no_scheme_has_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match="it is one of fixed-size, poisson, all, cyclic"):
        Clients("poison")
    assert math.isclose(Clients("poisson", 3).rate(0, 1, 10), 0.3)


@pytest.mark.parametrize(
    ("base", "needed"),
    [
        (GradientClip, {"sanitiser", "least", "sensitivity_at_start", "unclipped", "replay"}),
        (FactorClip, {"bound", "factors"}),
        (StepMechanism, {"noise_schedule", "multiplier", "event"}),
        (UpdateMechanism, {"apply"}),
        (Clipping, {"bound"}),
        (RoundNoise, {"noise_schedule", "multiplier", "add", "event"}),
        (Clients, {"draw"}),
        (Records, {"drawn"}),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_one_that_lacks_what_its_base_class_asks_for_cannot_be_made(base, needed):
    for missing in needed:
        given = dict.fromkeys(needed - {missing}, lambda self, *given: None)
        with pytest.raises(TypeError, match=f"abstract method '?{missing}"):
            type("Incomplete", (base,), given)()


@pytest.mark.parametrize("way", ["rules", "vmap", "sequential"])
def test_squares_come_with_the_names_of_their_layers(way):
    """Where layers have bounds of their own it matters which is which."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    x, y = torch.randn(1, 1, 3), torch.tensor([[1]])
    made = network(module, x[0], way=way, per_record=True)
    tape = made.backward(made.layout.flatten(module).unsqueeze(0), x, y, torch.ones(1, 1))
    vector = tape.records()[0, 0].double()
    wanted = torch.stack([vector[place].square().sum() for place in map(made.layout.named_layers.get, tape.layers)])
    torch.testing.assert_close(tape.squares()[:, 0, 0], wanted)


@dataclass(frozen=True)
class ForgetfulNoise(GaussianNoise):
    """Noise on the sum that states one cost, whoever observes."""

    def event(self, round, unit, observer):
        return round.on_sum(unit, self.multiplier(*round.when))


@pytest.mark.parametrize("unit", ["client", "record"])
def test_noise_on_the_sum_proves_nothing_to_a_server_that_sees_updates_or_who_takes_part(unit):
    """The sampling of its client amplifies the privacy of a record too, and the server sees that."""
    setting = replace(SETTING, clients=100)
    record = replace(algorithm("trusted-curator"), clients=Clients("poisson", 10), per_round=ForgetfulNoise(2.0))
    assert isinstance(event(record, setting, 0, unit, "release"), Sampled)
    assert event(record, setting, 0, unit, "server") == RAW
    shared = replace(record, per_round=ForgetfulNoise(2.0, at="shared"))
    assert event(shared, setting, 0, unit, "server") == Unbounded(IN_SIGHT)


@dataclass(frozen=True)
class ForgetfulSteps(StepNoise):
    """Noise in steps that states one cost, whatever the unit."""

    def event(self, round, unit, observer):
        return Gaussian(self.multiplier(*round.when, round.records.batch))


@pytest.mark.parametrize("most", [1, 5])
def test_steps_that_are_charged_as_for_one_record_prove_nothing_for_a_client_or_several_records(most):
    record = replace(cut(RECORDS), per_step=ForgetfulSteps(2.0), records=Records("poisson", 5, max_per_user=most))
    said = {unit: event(record, replace(SETTING, user_columns=1), 0, unit, "server") for unit in ADJACENCIES}
    assert said["record"] == Gaussian(2.0)
    assert said["client"] == Unbounded(f"{AS_ONE_RECORD} client")
    assert said["user"] == (Gaussian(2.0) if most == 1 else Unbounded(f"{AS_ONE_RECORD} user"))


@pytest.mark.parametrize("clients_per_user", [1, 2])
@pytest.mark.parametrize("public", [False, True])
def test_records_that_charge_a_user_as_one_record_prove_nothing_for_users(public, clients_per_user):
    """Also where nothing is proven for the record, or a user is at more clients than a record."""
    forgetful = altered(Records("poisson", 5, max_per_user=5), user_event=lambda self, *given: self.event(*given[:3]))
    setting = replace(
        SETTING, sizes=(50,), user_columns=1, public_ownership=public, clients_per_user=clients_per_user
    )
    record = replace(cut(RECORDS), per_step=StepNoise(2.0), records=forgetful)
    assert event(record, setting, 0, "user", "server") == Unbounded(f"{AS_ONE_RECORD} user")
    right = replace(record, records=Records("poisson", 5, max_per_user=5))
    assert not isinstance(event(right, setting, 0, "user", "server"), Unbounded)


def test_random_numbers_of_an_update_are_no_noise_on_it():
    """The server adds the noise, whatever else a client draws."""
    masked = altered(algorithm("trusted-curator").per_update, draws_noise=True)
    record = replace(algorithm("trusted-curator"), clients=Clients("all"), per_round=ForgetfulNoise(2.0))
    assert not isinstance(event(record, SETTING, 0, "client", "release"), Unbounded)
    assert event(replace(record, per_update=masked), SETTING, 0, "client", "server") == RAW


@pytest.mark.parametrize("kind", ["shuffled", "with-replacement", "random-allocation"])
def test_a_record_has_no_claim_by_a_sampling_of_its_client_that_no_theorem_covers(kind):
    def amplified(self, event, rate, remembers):
        return Sampled(kind, rate, event, 4 if kind == "with-replacement" else None)

    clients = altered(Clients("poisson", 10), amplified=amplified)
    found = event(replace(UPDATES, clients=clients), replace(SETTING, clients=100), 0, "record", "release")
    assert isinstance(found, Unbounded)


def test_an_event_that_no_accountant_knows_is_refused():
    """Else it would cost nothing."""
    strange = altered(Clients("poisson", 3), amplified=lambda self, *given: object())
    with pytest.raises(ConfigError, match="no accountant knows the event"):
        event(replace(UPDATES, clients=strange), SETTING, 0, "client", "release")
