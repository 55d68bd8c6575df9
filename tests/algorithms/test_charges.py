"""A round is charged what its record does: for a client and for a record, against each observer."""

import math
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest

from shoal.accounting.calibration import Budget
from shoal.accounting.events import Allocated, Compose, Gaussian, Repeat, Sampled, TwoLevel, Unbounded
from shoal.accounting.theorems import DRAWN, IN_SIGHT, TABLE
from shoal.algorithms import algorithm, algorithms
from shoal.algorithms.base import Aggregate
from shoal.algorithms.charges import PAIRS, calibrated, charges, event, proves, whole_run
from shoal.errors import ConfigError
from shoal.mechanisms import gaussian
from shoal.mechanisms.mechanism import ADJACENCIES
from shoal.mechanisms.sampling import AllClients, Clients
from shoal.mechanisms.setting import Setting
from shoal.mechanisms.sparsification import Prune, RandomNoise, Select
from shoal.mechanisms.update_clipping import Clip, MedianClip, NoisyClip, QuantileClip
from shoal.random.streams import Streams
from shoal.training import budget

SETTING = Setting(clients=100, rounds=20)


def curator(**changes):
    """Clip 1, noise 2 on the sum, 10 of 100 clients by Poisson sampling; `changes` replace boundaries."""
    wanted = {"clients": Clients("poisson", 10), "per_update": Clip(1.0), "per_round": gaussian.Gaussian(2.0)}
    return replace(algorithm("trusted-curator"), **(wanted | changes))


def sdp(at="client", own=3.0, sampling="fixed-size"):
    """Clip 1 and noise of each client's own, 25 of 100 clients."""
    clip = NoisyClip(clip_norm=1.0, noise_multiplier=own, at=at)
    return replace(algorithm("fed-sdp"), clients=Clients(sampling, 25), per_update=clip)


def charged(record, unit="client", observer="release", t=0, setting=SETTING):
    return event(record, setting, t, unit, observer)


def why_not(record, unit="client", observer="release", setting=SETTING):
    found = charged(record, unit, observer, setting=setting)
    assert isinstance(found, Unbounded)
    return found.because


def test_a_site_that_does_not_answer_takes_its_noise_along():
    """In a real federation fewer noises may be in the sum: a record's own update still has its one.

    Who answered shows in the amount of the noise, so that being sampled hides nothing.
    """
    maybe = replace(SETTING, all_answer=False)
    assert "drops out takes its noise with it" in why_not(sdp(), setting=maybe)
    assert charged(sdp(), "record") == Sampled("fixed-size", 0.25, Gaussian(15.0))
    shown = TwoLevel(0.25, 1.0, 1, 3.0, local="none", participation="visible")
    assert charged(sdp(), "record", setting=maybe) == shown == charged(sdp(), "record", "server")
    assert charged(sdp(), "record", setting=replace(maybe, multiplicity=3)) == Gaussian(1.0)
    secure = {"observer": "server", "setting": replace(SETTING, secure=True)}
    assert charged(sdp(), observer="server", setting=replace(maybe, secure=True)) == charged(sdp(), **secure)
    in_steps = replace(algorithm("fed-cdp-private"), clients=Clients("fixed-size", 25))
    sizes = replace(maybe, sizes=(50,))
    assert "drops out takes its noise with it" in why_not(in_steps, setting=sizes)
    assert not isinstance(charged(in_steps, "record", setting=sizes), Unbounded)


def test_a_claim_by_noise_on_each_update_says_that_an_empty_update_has_it_too():
    """Else the amount of noise in the sum would show who contributes nothing."""
    assert isinstance(charged(sdp()), Sampled)
    for at in ("client", "server"):
        (said,) = sdp(at).per_update.assumes()
        assert "of an empty one too" in said


SAMPLINGS = ["poisson", "fixed-size", "all", "cyclic", "min-separation", "cyclic-poisson", "random-allocation"]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", algorithms())
def test_the_choice_of_clients_amplifies_only_where_the_table_says_so(name, sampling):
    """And in a federation, where not everybody answers, only if the server adds the noise: else its amount tells."""
    separation = 10 if sampling in ("min-separation", "cyclic-poisson") else None
    record = replace(algorithm(name), clients=Clients(sampling, 5, separation=separation))
    for (unit, observer), everybody in product(PAIRS, (True, False)):
        found = charged(record, unit, observer, setting=Setting(100, 20, sizes=(50,), all_answer=everybody))
        if not isinstance(found, Sampled | Allocated):
            continue
        scheme = {"all": "none"}.get(sampling, sampling)
        assert TABLE["clients", scheme, ADJACENCIES[unit], observer].amplified
        assert everybody or (record.per_round is not None and record.per_round.at == "server")


def test_a_record_in_a_federation_with_noise_on_each_update_costs_what_was_found():
    """K = 100, m = 10, z = 6, 100 rounds: 1.48 was claimed, 5.46 is true."""
    record = replace(sdp(own=6.0), clients=Clients("fixed-size", 10))
    done = whole_run(record, Setting(100, 100, all_answer=False), 100, "record", "release")
    assert Budget(1, 1e-5, adjacency="replace-one").cost(done).epsilon == pytest.approx(5.46, abs=0.01)


# --- noise on the sum


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ("poisson", Sampled("poisson", 0.1, Gaussian(2.0))),
        ("fixed-size", Sampled("fixed-size", 0.1, Gaussian(2.0))),
        ("all", Gaussian(2.0)),
    ],
)
@pytest.mark.parametrize("unit", ["client", "record"])
def test_noise_on_the_sum_is_charged_as_clients_are_sampled(sampling, expected, unit):
    assert charged(curator(clients=Clients(sampling, 10)), unit) == expected


def test_the_clips_size_does_not_matter_only_the_noise_in_units_of_it():
    assert charged(curator(per_update=Clip(0.01))) == charged(curator(per_update=Clip("decay:50:0.1:1")))


def test_a_private_quantile_costs_no_more_than_the_noise_says():
    assert charged(curator(per_update=QuantileClip())) == Sampled("poisson", 0.1, Gaussian(2.0))


def test_noise_and_cohort_may_follow_schedules():
    record = curator(clients=Clients("poisson", "linear:10:50"), per_round=gaussian.Gaussian("linear:4:2"))
    assert charged(record, t=0) == Sampled("poisson", 0.1, Gaussian(4.0))
    assert charged(record, t=10) == Sampled("poisson", 0.3, Gaussian(3.0))


def test_a_fixed_cohort_is_charged_the_whole_number_that_is_drawn():
    assert charged(curator(clients=Clients("fixed-size", 10.4))).rate == 0.1
    assert charged(curator(clients=Clients("poisson", 10.4))).rate == pytest.approx(0.104)


def test_copies_of_a_record_add_up_and_are_not_hidden_by_sampling():
    copies = replace(SETTING, multiplicity=4)
    assert charged(curator(), "record", setting=copies) == Gaussian(0.5)
    assert charged(curator(), "client", setting=copies) == charged(curator())


def test_the_server_sees_each_update_before_the_noise():
    for unit in ("client", "record"):
        assert why_not(curator(), unit, "server") == "each update reaches the server before any noise is added"


# --- noise on each update


@pytest.mark.parametrize("at", ["client", "server"])
def test_noise_on_each_update_adds_up_in_the_sum(at):
    """25 clients with noise 3 each: 15 on the sum."""
    assert charged(sdp(at)) == Sampled("fixed-size", 0.25, Gaussian(15.0))
    assert charged(sdp(at), "record") == Sampled("fixed-size", 0.25, Gaussian(15.0))
    assert charged(sdp(at, sampling="all"), "record") == Gaussian(30.0)
    assert charged(sdp(at), "record", setting=replace(SETTING, multiplicity=3)) == Gaussian(5.0)


def test_a_random_number_of_noises_proves_nothing_for_the_release():
    assert "reveals the cohort size" in why_not(sdp(sampling="poisson"))
    assert "reveals the cohort size" in why_not(sdp(sampling="poisson"), "record")


def test_a_client_that_contributes_nothing_keeps_its_noise_also_where_everyone_takes_part():
    """One reading of zero-out: 25 of 100 clients, 100 of 100, or all of them. Noise in steps is the client's own."""
    assert charged(sdp(sampling="all")) == Gaussian(30.0) == charged(sdp(sampling="all"), "record")
    everyone = replace(sdp(), clients=Clients("fixed-size", 100))
    assert charged(everyone) == Sampled("fixed-size", 1.0, Gaussian(30.0))
    in_steps = replace(algorithm("fed-cdp"), clients=Clients("all"))
    noise = 6.0 / 5 / math.sqrt(SETTING.layers)
    assert charged(in_steps, setting=replace(SETTING, sizes=(50,))) == Repeat(Gaussian(noise), 100)
    assert "of empty batches too" in in_steps.per_step.assumes()[0]


@dataclass(frozen=True)
class HalfOfThem(AllClients):
    """Draws other clients than the scheme from which it is derived."""

    def draw(self, generator, t, total, clients):
        """Each with probability 1/2."""
        return np.flatnonzero(generator.random(clients) < 0.5)


class Drawing:
    """The same, of a class that is no scheme."""

    draw = HalfOfThem.draw


@dataclass(frozen=True)
class Mixed(Drawing, AllClients):
    """Draws as one base does, and is otherwise the other."""


@dataclass(frozen=True)
class Nominal(AllClients):
    """Divides by more clients than there are, and so would be charged as if as many added their noise."""

    def expected(self, t, total, clients):
        """Ten times as many."""
        return 10 * clients


@pytest.mark.parametrize("unit", ["client", "record"])
@pytest.mark.parametrize("scheme", [HalfOfThem, Mixed, Nominal])
def test_a_scheme_that_draws_anew_does_not_inherit_that_the_amount_of_noise_hides_who_came(scheme, unit):
    assert "reveals the cohort size" in why_not(replace(sdp(), clients=scheme()), unit)


@pytest.mark.slow
def test_a_client_that_took_its_noise_along_would_show():
    """With 34,720 parameters one share of noise in 100 more or less is seen in the spread of the release alone."""
    random = Streams(0).generator("spread")
    guesses = [100 if random.standard_normal(34_720).var() * n > 99.5 else 99 for n in (99, 100) for _ in range(200)]
    wrong = guesses[:200].count(100) + guesses[200:].count(99)
    assert wrong / 400 < 0.4  # far from the 1/2 of somebody who learns nothing: a false alarm in 10^9 runs


@pytest.mark.parametrize("sampling", ["fixed-size", "poisson"])
def test_noise_at_the_client_counts_against_the_server(sampling):
    """It sees who comes, and one update at a time: two clips apart for whatever the client holds."""
    record = sdp(sampling=sampling)
    seen = TwoLevel(0.25, 1.0, 1, 1.5, local="none", participation="visible")
    assert charged(record, "client", "server") == seen
    assert charged(record, "record", "server") == replace(seen, noise=3.0), "replace-one doubles by itself"
    assert "several clients hold the record" in why_not(record, "record", "server", replace(SETTING, multiplicity=2))


def test_both_units_cost_the_same_against_a_server_that_sees_the_update():
    """A client's data replaced whole, or one record of it: the update moves by two clips at most either way."""
    events = {unit: whole_run(sdp(), SETTING, 20, unit, "server") for unit in ("client", "record")}
    costs = [Budget(1, 1e-5, adjacency=ADJACENCIES[unit]).cost(done).epsilon for unit, done in events.items()]
    assert costs[0] == pytest.approx(costs[1], rel=1e-3)


def test_noise_that_the_server_adds_hides_nothing_from_it():
    for unit in ("client", "record"):
        assert why_not(sdp("server"), unit, "server") == "each update reaches the server before any noise is added"


# --- what proves nothing


@pytest.mark.parametrize("record", [curator(), sdp(), sdp("server"), curator(per_update=QuantileClip())])
def test_inside_a_client_nothing_is_hidden(record):
    for unit in ("client", "record"):
        assert "client process holds the raw records" in why_not(record, unit, "client-process")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (curator(per_round=None), "no noise is added"),
        (curator(per_round=gaussian.Gaussian(0.0)), "the noise is 0"),
        (sdp(own=0.0), "the noise is 0"),
        (curator(per_update=None), "updates are not clipped"),
        (curator(per_update=MedianClip()), "median of the clients' norms, computed without noise"),
        (curator(aggregate=Aggregate("size")), "weighted by the clients' own sizes"),
        (replace(sdp(), aggregate=Aggregate("size")), "weighted by the clients' own sizes"),
        (curator(per_update=Prune()), "pruning adds no noise"),
        (curator(per_update=RandomNoise(), per_round=None), "updates are not clipped"),
        (
            curator(per_update=Select(noise_multiplier=1.0), per_round=None),
            "which coordinates are sent depends on the data",
        ),
    ],
)
def test_what_has_no_bound_says_why_whoever_looks(record, reason):
    for unit in ("client", "record"):
        assert reason in why_not(record, unit)
        assert isinstance(charged(record, unit, "server"), Unbounded)
    assert proves(record).startswith("nothing: ")


def test_a_method_that_states_what_no_theorem_covers_is_charged_as_unproven():
    """So that no budget is spent on it, and no private selection claims it."""

    @dataclass(frozen=True)
    class Careless(gaussian.StepNoise):
        """Another package's: to it, a client is no more than one of its records."""

        def event(self, round, unit, observer):
            return TwoLevel(0.1, 0.1, 3, 2.0, participation="hidden")

    record = replace(algorithm("dp-sgd"), per_step=Careless())
    found = {pair: event(record, SETTING, 0, *pair) for pair in PAIRS}
    assert isinstance(found.pop(("record", "release")), TwoLevel)
    assert {pair: each.because for pair, each in found.items()} == {
        (unit, who): DRAWN if unit == "client" else IN_SIGHT for unit, who in found
    }
    with pytest.raises(ConfigError, match=DRAWN):
        calibrated(record, SETTING, Budget(1.0, 1e-5), "client", "release")


def test_a_schedule_that_reaches_zero_proves_nothing_in_that_round():
    record = curator(per_round=gaussian.Gaussian("decay:2:0.999:0"))
    assert isinstance(charged(record, t=0), Sampled)
    assert charged(record, t=200) == Unbounded("the noise is 0")


# --- a round's charges together


@pytest.mark.parametrize("record", [curator(), sdp(), algorithm("fedavg"), algorithm("geyer")])
def test_every_pair_of_unit_and_observer_is_charged(record):
    found = charges(record, Setting(1000, 20), 3)
    assert [(charge.unit, charge.observer) for charge in found] == list(PAIRS)
    for charge in found:
        assert charge.event == event(record, Setting(1000, 20), 3, charge.unit, charge.observer)


def test_what_is_proven_is_put_in_words():
    assert proves(curator()) == "client and record level, against released models"
    assert proves(sdp("server")) == "client and record level, against released models"
    assert proves(sdp("client")) == "client and record level, against released models and the server"


def test_noise_at_the_client_under_poisson_sampling_proves_something_against_the_server_only():
    assert proves(sdp(sampling="poisson")) == "client and record level, against the server"


SAMPLED = [curator(clients=Clients(kind, 10)) for kind in ("fixed-size", "cyclic", "random-allocation")]
SCHEDULED = [curator(per_round=gaussian.Gaussian("linear:3:1")), curator(clients=Clients("poisson", "linear:10:20"))]


@pytest.mark.parametrize("record", [*algorithms().values(), *SAMPLED, *SCHEDULED], ids=lambda record: record.name)
def test_a_run_is_charged_the_sum_of_its_rounds(record, monkeypatch):
    """Also where rounds are alike, and only the first is asked."""
    for unit, observer in PAIRS:
        each = tuple(event(record, SETTING, t, unit, observer) for t in range(SETTING.rounds))
        assert whole_run(record, SETTING, SETTING.rounds, unit, observer) == Compose(each)
    monkeypatch.setattr(budget, "_claim", lambda setting, unit, who, spent, *_: spent)
    found = budget.planned_claims.__wrapped__(record, SETTING, ((1, 20), (8, 20)), 1e-5)  # the last are run again
    rounds = [*((t, False) for t in range(20)), *((t, True) for t in range(7, 20))]
    assert found == tuple(
        budget._one_after_the_other([event(record, SETTING, t, *pair, again) for t, again in rounds])
        for pair in PAIRS
    )


# --- calibration


@pytest.mark.slow
@pytest.mark.parametrize(
    ("record", "unit", "observer", "epsilon"),
    [
        (curator(), "client", "release", 8.0),
        (curator(), "client", "release", 0.5),
        (curator(clients=Clients("all")), "client", "release", 8.0),
        (curator(clients=Clients("fixed-size", 10)), "client", "release", 0.5),
        (curator(), "record", "release", 8.0),
        (curator(per_update=QuantileClip()), "client", "release", 0.5),
        (curator(per_round=gaussian.Gaussian("linear:4:1")), "client", "release", 0.5),
        (curator(per_round=gaussian.Gaussian("staircase:15:4.85:4")), "client", "release", 8.0),
        (curator(clients=Clients("all"), per_round=gaussian.Gaussian("decay:4:0.1:1")), "client", "release", 8.0),
        (sdp(), "client", "release", 0.5),
        (sdp(), "client", "server", 8.0),
        (sdp(own="exponential:4:2"), "record", "release", 0.5),
    ],
)
def test_calibrated_noise_spends_the_budget_and_no_more(record, unit, observer, epsilon):
    budget = Budget(epsilon, 1e-5, adjacency=ADJACENCIES[unit])
    found = calibrated(record, SETTING, budget, unit, observer)
    cost = budget.cost(whole_run(found, SETTING, SETTING.rounds, unit, observer)).epsilon
    assert 0.99 * epsilon < cost <= epsilon


@pytest.mark.slow
def test_calibration_scales_a_schedule_and_leaves_all_else_alone():
    record = curator(per_round=gaussian.Gaussian("linear:4:1"))
    found = calibrated(record, SETTING, Budget(1.0, 1e-5), "client", "release")
    before, after = (
        [each.per_round.multiplier(t, SETTING.rounds) for t in range(SETTING.rounds)] for each in (record, found)
    )
    ratios = [new / old for new, old in zip(after, before, strict=True)]
    assert ratios == pytest.approx([ratios[0]] * SETTING.rounds)
    assert not math.isclose(ratios[0], 1, rel_tol=0.01)
    assert replace(found, per_round=record.per_round) == record


@pytest.mark.parametrize("name", ["fedavg", "compression", "dssgd", "random-noise"])
def test_what_adds_no_scalable_noise_cannot_be_calibrated(name):
    with pytest.raises(ConfigError, match=rf"budget\.calibrate: algorithm {name} adds no noise"):
        calibrated(algorithm(name), SETTING, Budget(1.0, 1e-5), "client", "release")


@pytest.mark.parametrize(
    ("record", "reason"),
    [(algorithm("geyer"), "median"), (curator(aggregate=Aggregate("size")), "sizes"), (sdp("server"), "server")],
)
def test_what_no_noise_bounds_cannot_be_calibrated(record, reason):
    with pytest.raises(ConfigError, match=rf"no noise .* keeps a budget: .*{reason}"):
        calibrated(record, SETTING, Budget(1.0, 1e-5), "client", "server" if reason == "server" else "release")
