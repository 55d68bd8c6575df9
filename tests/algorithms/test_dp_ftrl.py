"""DP-FTRL in whole runs: what is proven is what its matrix says, also after a kill; what it cannot do it refuses."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from scipy.linalg import toeplitz
from scipy.optimize import brentq
from scipy.stats import norm

import shoal
from shoal.accounting import accountants
from shoal.accounting.events import NOTHING, Gaussian, Sampled, Unbounded
from shoal.accounting.privacy_ledger import Ledger
from shoal.algorithms import algorithm
from shoal.algorithms.base import Server
from shoal.algorithms.charges import PAIRS, event, whole_run
from shoal.errors import ConfigError, PluginError
from shoal.mechanisms import gaussian
from shoal.mechanisms.correlated import PAST, Correlated
from shoal.mechanisms.mechanism import altered
from shoal.mechanisms.participation import Participation
from shoal.mechanisms.sampling import Clients
from shoal.mechanisms.update_clipping import QuantileClip
from shoal.training.budget import Limit, Spending
from shoal.training.cohort_draw import LAST, TIMES
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex
from support.small_federation import (
    ALPHA,
    CLIENTS,
    FAR,
    ROUNDS,
    SETTING,
    chi_square_fits,
    digits,
    fresh,
    idle,
    keys,
    of_one_length,
    one_thread,
    plain_server,
    restricted,
    silent,
    simulator,
    small,
    stubbed,
    twin,
    weights,
)

NAME, DELTA = "dp-ftrl", 1e-5
TURNS = 3  # ten clients, four at most a round


def run(record, folder, **more):
    settings = {"data.clients": CLIENTS, "model": "linear", "rounds": ROUNDS, "engine.threads": 1} | keys(record)
    with one_thread():
        return shoal.run(settings | more.pop("changes", {}), data=digits(), runs=folder, device="cpu", **more)


def resumed(folder):
    with one_thread():
        return shoal.run(resume=folder, data=digits(), device="cpu")


def of_clients(result):
    return next(c for c in result.proven if (c["unit"], c["observer"]) == ("client", "release"))


def epsilon(shift):
    """Of two unit Gaussians so far apart (Balle & Wang 2018), by bisection."""

    def delta(eps):
        return norm.cdf(shift / 2 - eps / shift) - math.exp(eps) * norm.cdf(-shift / 2 - eps / shift)

    return brentq(lambda eps: delta(eps) - DELTA, 0, 200)


def rows(record, rounds=ROUNDS):
    """What the client that came first has in each round, in clips, by the matrix."""
    found = np.zeros(rounds)
    found[: len(weights(record))] = weights(record)[:rounds]
    came = np.arange(rounds) % TURNS == 0
    return toeplitz(found, np.zeros(rounds)) @ came


# --- what is proven


@pytest.mark.slow
def test_the_proven_epsilon_of_a_run_is_that_of_one_gaussian(tmp_path):
    record = small(NAME)
    claim = of_clients(run(record, tmp_path))
    assert claim["epsilon"] == pytest.approx(epsilon(np.linalg.norm(rows(record)) / 4.0), rel=1e-6)
    assert claim["accountant"] == "pld"


@pytest.mark.slow
def test_a_record_costs_as_much_as_an_opposite_one_in_its_place(tmp_path):
    record = small(NAME)
    claims = run(record, tmp_path).proven
    found = next(c for c in claims if (c["unit"], c["observer"]) == ("record", "release"))
    assert found["epsilon"] == pytest.approx(epsilon(2 * np.linalg.norm(rows(record)) / 4.0), rel=1e-6)


def test_copies_of_a_record_add_up():
    copies = replace(SETTING, multiplicity=3)
    assert event(small(NAME), copies, 0, "record", "release").noise == pytest.approx(4 / 3)
    assert event(small(NAME), copies, 0, "client", "release") == Gaussian(4.0)


@pytest.mark.slow
def test_calibrated_noise_spends_the_budget(tmp_path):
    budget = {"budget.epsilon": 2.0, "budget.calibrate": True}
    result = run(small(NAME), tmp_path, changes=budget)
    assert 1.99 < of_clients(result)["epsilon"] <= 2
    assert result.rounds == ROUNDS


def test_independent_noise_on_clients_in_turn_is_charged_once_a_turn():
    record = replace(small(NAME), per_round=gaussian.Gaussian(3.0))
    charged = [event(record, SETTING, t, "client", "release") for t in range(ROUNDS)]
    assert charged[1:3] == [NOTHING, NOTHING]
    assert [charged[0].noise, charged[3].noise] == pytest.approx([3, 3])
    assert event(record, SETTING, 1, "client", "release", again=True) == Gaussian(3.0)


@pytest.mark.parametrize("name", ["fed-sdp", "fed-cdp-private"])
def test_clients_in_turn_prove_nothing_where_noise_is_not_on_the_sum(name):
    record = replace(algorithm(name), clients=Clients("cyclic", 4))
    for unit, observer in PAIRS:
        found = event(record, SETTING, 0, unit, observer)
        assert isinstance(found, Unbounded)
    assert "cyclic participation" in event(record, SETTING, 0, "record", "release").because


@pytest.mark.slow
def test_a_client_changes_a_whole_run_by_no_more_than_is_charged(monkeypatch):
    """Played without noise, with and without each client: what its going changes in all that can be worked out."""

    def updates(client, size):
        return of_one_length(client, size) * 1e4

    stubbed(monkeypatch, updates)
    record = plain_server(silent(small(NAME)))
    sim = simulator(record)
    noisy = [event(small(NAME), SETTING, t, "client", "release").noise for t in range(ROUNDS)]
    allowed = sum(16 / each**2 for each in noisy)

    def sums(sim):
        params, state, found = torch.zeros_like(sim.params), {}, []
        for t in range(ROUNDS):
            before = params
            params, state, told = run_round(sim.cohort, params, state, RoundIndex(t, ROUNDS))
            found.append((params - before).double().numpy() * told["expected_clients"] / told["clip"])
        return np.stack(found)

    whole, costs = sums(sim), []
    for client in range(CLIENTS):
        others = tuple(set(range(CLIENTS)) - {client})
        less = sums(twin(sim, algorithm=restricted(record, others)))
        costs.append(np.square(fresh(record, whole - less)).sum())
    assert max(costs) == pytest.approx(allowed, rel=1e-4)
    assert costs[0] == pytest.approx(allowed, rel=1e-4)
    assert costs[1] < 0.9 * allowed


# --- kills, checkpoints, secure mode


class Killed(Exception):
    """As sudden as a kill: nothing after it is written."""


def killed_in_round(number, record, folder, **more):
    """A run that ends in the middle of a round, which was charged and not committed."""
    started = []

    def die(line):
        if line["round"] == number:
            raise Killed

    with pytest.raises(Killed):
        run(record, folder, on_start=lambda config, sim, made: started.append(made), on_round=die, **more)
    return started[0]


@pytest.mark.slow
def test_a_round_killed_and_played_again_is_charged_for_the_client_that_it_hits_hardest(tmp_path):
    record = small(NAME)
    rest = resumed(killed_in_round(3, record, tmp_path))
    assert rest.rounds == ROUNDS
    with Ledger(rest.run / "ledger.jsonl") as ledger:
        paid = [intent.charges[0].event.events[0].noise for intent in ledger.charged]
        assert [(intent.round, intent.attempt) for intent in ledger.charged] == [
            (1, 1),
            (2, 1),
            (3, 1),
            (3, 2),
            (4, 1),
        ]
    once = rows(record)
    assert paid == pytest.approx([4 / once[0], 4 / once[1], 4 / once[2], 4.0, 4 / once[3]])
    assert of_clients(rest)["epsilon"] == pytest.approx(epsilon(math.hypot(np.linalg.norm(once), 1) / 4), rel=1e-6)


@pytest.mark.slow
def test_what_is_played_again_counts_against_the_budget_at_its_full_price(tmp_path):
    """All rounds and the third once more at the price it had at first would be within the budget."""
    record = small(NAME)
    once = np.square(rows(record))
    budget = epsilon(math.sqrt(once.sum() + (once[2] + 1) / 2) / 4)
    rest = resumed(killed_in_round(3, record, tmp_path, changes={"budget.epsilon": budget}))
    assert (rest.stopped, rest.rounds) == ("budget", 3)
    assert of_clients(rest)["epsilon"] <= budget


def test_an_old_checkpoint_put_back_is_charged_again(tmp_path):
    record = small(NAME)
    limit = Limit(DELTA)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        spending = Spending(record, SETTING, limit, ledger)
        for last in (2, 4):
            spending.intend(last - 1, last)
            spending.commit(last, f"{last:064d}")
        once = spending.proven()[0].epsilon
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        spending = Spending(record, SETTING, limit, ledger)
        assert spending.intend(3, 4) == 1
        twice = spending.proven()[0].epsilon
    hardest = [max(rows(record)[max(0, t - TURNS + 1) : t + 1]) for t in (2, 3)]
    assert once == pytest.approx(epsilon(np.linalg.norm(rows(record)) / 4), rel=1e-6)
    assert twice == pytest.approx(epsilon(np.linalg.norm([*rows(record), *hardest]) / 4), rel=1e-6)


@pytest.mark.statistical(false_alarm=3 * ALPHA)
def test_a_round_played_again_has_fresh_noise_and_still_takes_back_the_noise_before():
    """Chi-square on 104,000 numbers each, and a correlation, at ALPHA."""
    sim = simulator(idle(plain_server(small(NAME))), width=1600)
    states = [(torch.zeros_like(sim.params), {})]
    drawn = []
    for t, attempt in ((0, 0), (1, 0), (2, 0), (2, 1)):
        params, state, told = run_round(sim.cohort, *states[t], RoundIndex(t, ROUNDS, attempt))
        moved = params.double() - states[t][0].double()
        drawn.append(moved.numpy() * told["expected_clients"] / told["clip"] / 4.0)
        states.append((params, state))
    first, again = (fresh(sim.cohort.algorithm, np.stack([*drawn[:2], drawn[last]]))[2] for last in (2, 3))
    assert chi_square_fits(first)
    assert chi_square_fits(again)
    assert abs(np.corrcoef(first, again)[0, 1]) < FAR / math.sqrt(len(first))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["research", "secure"])
def test_the_noise_is_in_the_checkpoint_only_where_the_seed_tells_it_anyway(tmp_path, mode):
    """In secure mode a resumed run forgets it, which costs accuracy and no privacy."""
    held = []

    def stop_after_two(line):
        if line["round"] == 2:
            held[0].stop()

    started = {"on_start": lambda config, sim, folder: held.append(sim), "on_round": stop_after_two}
    with pytest.raises(shoal.ShoalError, match="stopped after round 2 of 4") as stopped:
        run(small(NAME), tmp_path, changes={"random": mode}, **started)
    with safe_open(next(stopped.value.run.glob("checkpoint/*.safetensors")), "pt") as file:
        assert (PAST in set(file.keys())) == (mode == "research")
    rest = resumed(stopped.value.run)
    assert of_clients(rest)["epsilon"] == pytest.approx(
        epsilon(np.linalg.norm(rows(small(NAME))) / 4.0), rel=1e-6 if mode == "research" else 1e-3
    )


@pytest.mark.slow
def test_adaptive_servers_go_with_it(tmp_path):
    result = run(replace(small(NAME), server=Server(lr=0.1, adaptivity=1e-3)), tmp_path)
    assert all(torch.isfinite(tensor).all() for tensor in result.model.values())


def test_all_clients_in_every_round_are_in_each_others_turn():
    """Everybody comes every time: a round holds all updates so far, each by its weight."""
    record = replace(small(NAME), clients=Clients("all"))
    charged = [event(record, SETTING, t, "client", "release").noise for t in range(ROUNDS)]
    assert charged == pytest.approx(4 / np.cumsum(weights(record))[:ROUNDS])


# --- clients that come when they can, and groups with secret sampling


def separated(**changes):
    clients = Clients("min-separation", 4, separation=2, participations=2)
    return replace(small(NAME), clients=clients, per_round=Correlated(4.0, bands=3, momentum=0.9, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["square-root", "banded", "blt", "bisr", "band-inverse"])
def test_clients_that_come_when_they_can_cost_the_run_what_the_costliest_of_them_does(tmp_path, kind):
    record = separated(factorisation=kind)
    result = run(record, tmp_path)
    plan = Participation(ROUNDS, 2, 2)
    reach = plan.reach(record.per_round.coefficients(plan, ROUNDS))
    assert of_clients(result)["epsilon"] == pytest.approx(epsilon(np.linalg.norm(reach) / 4), rel=1e-6)
    assert [line["clients"] for line in result.metrics] == [4, 4, 4, 4]
    unproven = [claim for claim in result.proven if claim["observer"] != "release"]
    assert all(claim["epsilon"] is None for claim in unproven)


def test_nobody_comes_sooner_or_more_often_than_is_charged():
    """Ten clients, seven a round if they may: three apart, twice at most."""
    record = replace(idle(separated()), clients=Clients("min-separation", 7, separation=3, participations=2))
    sim = simulator(record)
    came, state = {client: [] for client in range(CLIENTS)}, {}
    asked, wanted = [], sim.cohort.train

    def train(clients, *rest):
        asked.append(clients.tolist())
        return wanted(clients, *rest)

    object.__setattr__(sim.cohort, "train", train)
    params = torch.zeros_like(sim.params)
    for t in range(12):
        params, state, told = run_round(sim.cohort, params, state, RoundIndex(t, 12))
        assert told["clients"] == len(asked[-1]) <= 7
        for client in asked[-1]:
            came[client].append(t)
    assert [len(some) for some in asked[:4]] == [7, 3, 0, 7]
    assert sum(map(len, asked)) == 2 * CLIENTS
    assert all(np.diff(rounds).min() >= 3 and len(rounds) == 2 for rounds in came.values())
    assert state[TIMES].tolist() == [2] * CLIENTS


def test_a_scheme_that_breaks_its_word_is_stopped():
    """It says that clients come once in three rounds, and draws the first one every time."""
    record = replace(idle(small(NAME)), clients=altered(Clients("cyclic", 4), draw=lambda self, *given: np.arange(1)))
    sim = simulator(record)
    _, state, _ = run_round(sim.cohort, sim.params, {}, RoundIndex(0, 6))
    for sooner in (1, 4):  # in the round after, and where it is not its turn
        with pytest.raises(
            PluginError, match="cyclic drew a client sooner, out of turn, or more often than is charged"
        ):
            run_round(sim.cohort, sim.params, dict(state), RoundIndex(sooner, 6))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["blt", "band-inverse"])
def test_a_run_that_was_stopped_ends_where_it_would_have(tmp_path, kind):
    """In research mode: the noise that is kept, and who has come, are in the checkpoint."""
    held, record = [], separated(factorisation=kind)

    def stop_after_two(line):
        if line["round"] == 2:
            held[0].stop()

    with pytest.raises(shoal.ShoalError, match="stopped after round 2 of 4") as stopped:
        run(record, tmp_path / "a", on_start=lambda config, sim, made: held.append(sim), on_round=stop_after_two)
    with safe_open(next(stopped.value.run.glob("checkpoint/*.safetensors")), "pt") as file:
        assert {PAST, LAST, TIMES} <= set(file.keys())
    rest, whole = resumed(stopped.value.run), run(record, tmp_path / "b")
    assert all(torch.equal(rest.model[key], whole.model[key]) for key in whole.model)


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "expected"), [(1, 2.1245), (10, 8.0586), (50, 16.864)])
def test_groups_with_poisson_sampling_cost_what_the_literature_says(groups, expected):
    """1,000 rounds, 10 of 1,000 clients expected in each; noise of 1 for each unit of the coefficients' norm."""
    noise = Correlated(1.0, bands=groups)
    scale = float(np.linalg.norm(noise.coefficients(Participation(1000), 1000)))
    clients = Clients("cyclic-poisson", 10, separation=groups)
    record = replace(small(NAME), clients=clients, per_round=Correlated(scale, bands=groups))
    record.refuse_unfit(0, 1000, 1000)
    done = whole_run(record, replace(SETTING, clients=1000, rounds=1000), 1000, "client", "release")
    found = accountants.epsilon(done, 1e-6, adjacency="zero-out").epsilon
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_cycle_is_charged_at_its_start_and_a_round_run_again_without_amplification():
    clients = Clients("cyclic-poisson", 1, separation=3)
    record = replace(small(NAME), clients=clients, per_round=Correlated(4.0, bands=2))
    charged = [event(record, SETTING, t, "client", "release") for t in range(ROUNDS)]
    cycle = Sampled("poisson", 0.3, Gaussian(4 / math.hypot(1, 0.5)))
    assert charged == [
        cycle,
        NOTHING,
        NOTHING,
        Sampled("poisson", 0.3, Gaussian(4.0)),
    ]  # the last: a round of its own
    assert event(record, SETTING, 1, "client", "release", again=True) == Gaussian(4.0)
    assert event(record, replace(SETTING, multiplicity=2), 0, "record", "release") == Gaussian(2.0)
    assert isinstance(event(record, SETTING, 0, "client", "server"), Unbounded)


def test_a_cycle_whose_cost_overflows_has_no_bound():
    clients, noise = Clients("cyclic-poisson", 1, separation=3), Correlated(4.0, bands=2, factorisation="banded")
    record = replace(small(NAME), clients=clients, per_round=replace(noise, numbers=(1.0, 1e200)))
    assert "out of range" in event(record, SETTING, 0, "client", "release").because


def test_groups_take_turns_and_each_client_comes_with_its_probability():
    """1,000 cycles: each of ten clients 300 times of 1,000, to 6 deviations (2e-8 for all)."""
    clients, stream = Clients("cyclic-poisson", 1, separation=3), np.random.default_rng(3)
    came = [clients.draw(stream, t, 3000, CLIENTS) for t in range(3000)]
    assert all((some % 3 == t % 3).all() for t, some in enumerate(came))
    times = np.bincount(np.concatenate(came), minlength=CLIENTS)
    assert np.abs(times - 300).max() < 6 * math.sqrt(1000 * 0.3 * 0.7)


# --- what it does not do


@pytest.mark.parametrize(
    "changes", [{"bands": 4}, {"bands": 2, "factorisation": "blt"}, {"bands": 2, "factorisation": "bisr"}], ids=str
)
def test_secret_sampling_in_groups_needs_rounds_of_a_client_that_do_not_meet(changes):
    clients = Clients("cyclic-poisson", 1, separation=3)
    record = replace(small(NAME), clients=clients, per_round=Correlated(4.0, **changes))
    with pytest.raises(ConfigError, match="to square-root or banded, and per_round"):
        record.refuse_unfit(0, ROUNDS, CLIENTS)
    found = event(record, SETTING, 0, "client", "release")
    assert "not known to amplify" in found.because


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("min-separation", 3), "clients.sampling=min-separation needs clients.separation"),
        (("min-separation", 3, 0), "clients.separation must be >= 1, got 0"),
        (
            ("poisson", 3, 2),
            "clients.separation is for clients.sampling=min-separation or cyclic-poisson, got poisson",
        ),
        (("cyclic-poisson", 3, 2, 4), "clients.participations is for clients.sampling=min-separation, got"),
        (("all", 3, None, 4), "clients.participations is for clients.sampling=min-separation, got all"),
        (("cyclic-poisson", "linear:1:3", 2), "clients.cohort must be a constant"),
    ],
    ids=str,
)
def test_settings_of_a_scheme_are_refused_by_name(given, said):
    with pytest.raises(ConfigError, match=said):
        Clients(*given)


def test_groups_smaller_than_their_cohort_are_refused():
    with pytest.raises(ConfigError, match="lower one of them"):
        Clients("cyclic-poisson", 4, separation=3).expected(0, ROUNDS, CLIENTS)


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
def test_sampled_clients_are_refused(sampling, tmp_path):
    record = small(NAME)
    with pytest.raises(ConfigError, match=f"gains nothing from {sampling} sampling; set clients.sampling to cyclic"):
        run(replace(record, clients=replace(record.clients, sampling=sampling)), tmp_path)


def test_a_clip_that_follows_counts_is_refused():
    record = replace(small(NAME), per_update=QuantileClip())
    with pytest.raises(ConfigError, match="dp-ftrl: correlated noise needs a clip that follows no counts"):
        record.refuse_unfit(0, ROUNDS, CLIENTS)


def test_turns_of_changing_length_are_refused():
    with pytest.raises(ConfigError, match=r"clients\.cohort must be a constant for cyclic sampling, got linear:1:9"):
        Clients("cyclic", "linear:1:9")


def test_a_schedule_that_reaches_zero_proves_nothing_from_there():
    record = replace(small(NAME), per_round=Correlated("decay:4:0.999:0", bands=2))
    assert event(record, SETTING, 0, "client", "release") == Gaussian(4.0)
    assert event(record, SETTING, 200, "client", "release") == Unbounded("the noise is 0")
