"""The checker of certificates: it shares nothing with the accountant, and agrees with it."""

from __future__ import annotations

import ast
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

from shoal.accounting import accountants, checker
from shoal.accounting import pld as accountant_pld
from shoal.accounting.checker import (
    certificate_file,
    charged_rounds,
    claim_figures,
    event_costs,
    loss_distributions,
    work_limit,
)
from shoal.accounting.events import (
    _KINDS,
    NOTHING,
    Allocated,
    BySize,
    Compose,
    Event,
    Gaussian,
    OnClients,
    Repeat,
    Sampled,
    SampledUser,
    SamplerError,
    TwoLevel,
)
from shoal.training.budget import _one_after_the_other

FOLDER = Path(checker.__file__).parent
ALLOWED = {"numpy", "scipy", "dp_accounting", "cryptography"}
VISIBLE, HIDDEN = TwoLevel(0.1, 0.1, 10, 3.0), TwoLevel(0.1, 0.1, 10, 3.0, participation="hidden")
GRID = {
    "gaussian": Compose((Repeat(Gaussian(3.0), 7), Gaussian(1.5))),
    "poisson": Repeat(Sampled("poisson", 0.01, Gaussian(1.0)), 300),
    "poisson of several": Repeat(Sampled("poisson", 0.1, Repeat(Gaussian(4.0), 3)), 20),
    "poisson of sampled": Sampled("poisson", 0.2, Repeat(Sampled("poisson", 0.1, Gaussian(1.5)), 5)),
    "fixed-size": Repeat(Sampled("fixed-size", 0.05, Gaussian(2.0)), 30),
    "with replacement": Repeat(Sampled("with-replacement", 0.1, Gaussian(8.0), 3), 10),
    "shuffled": Repeat(Sampled("shuffled", 0.1, Gaussian(2.0)), 25),
    "two levels, visible": Repeat(Compose((VISIBLE,)), 10),
    "two levels, hidden": Repeat(HIDDEN, 10),
    "by size": Repeat(BySize(VISIBLE, ((1, 0.1, 4), (20, 0.05, 10))), 5),
    "on clients": OnClients(3, BySize(VISIBLE, ((1, 0.1, 4), (20, 0.05, 10)))),
    "sampler": Compose((Gaussian(1.0), SamplerError(1e-12))),
    "mixed": Compose((Gaussian(3.0), Sampled("poisson", 0.1, Gaussian(1.0)), VISIBLE)),
    "client in name only": Repeat(TwoLevel(0.5, 1.0, 5, 0.02, local="none"), 4),
}


def recomputed(event: Event, adjacency: str, delta: float, epsilon: float) -> claim_figures.Figures:
    return claim_figures.recompute([(event.to_json(), 1)], adjacency, delta, epsilon)


def test_it_imports_nothing_of_the_package_that_it_checks() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    nodes = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    assert all(node.level <= 1 for node in nodes)
    outside = {name.split(".")[0] for name in names | {str(node.module) for node in nodes if not node.level}}
    assert outside - set(sys.stdlib_module_names) == ALLOWED


@pytest.mark.slow
def test_a_copy_of_its_folder_runs_alone(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "checker")
    held = {"format": certificate_file.FORMAT, "claims": [], "hashes": {"config": None, "model": None}}
    held |= {"hashes": held["hashes"] | {"ledger": {"head": "", "lines": 0}}, "sites": []}
    held |= {"digest": certificate_file.digest_of(held), "signature": None}
    (tmp_path / "certificate.json").write_bytes(certificate_file.written(held))
    command = [sys.executable, "-m", "checker", "certificate.json"]
    ended = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": ""}, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "yes: every figure holds; not compared: ledger")


def test_every_kind_of_event_has_a_function() -> None:
    assert set(event_costs.EVENTS) == set(_KINDS)


SLOW = {"client in name only": pytest.mark.slow}  # next to no noise: millions of points


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in GRID])
def test_it_agrees_with_the_accountant(name: str) -> None:
    for adjacency in ("zero-out", "replace-one"):
        if (name, adjacency) in {("poisson of sampled", "replace-one"), ("client in name only", "replace-one")}:
            continue  # no theorem; half of that noise, where four times as many points say the same
        claimed = accountants.epsilon(GRID[name], 1e-5, adjacency=adjacency)  # type: ignore[arg-type]
        assert claimed.epsilon is not None
        found = recomputed(GRID[name], adjacency, 1e-5, claimed.epsilon)
        assert 1 - 1e-4 <= found.epsilon / claimed.epsilon <= 1 + 1e-3
        assert math.isclose(found.sampler_delta, claimed.sampler_delta, rel_tol=1e-9)


ALLOCATION = Sampled("random-allocation", 0.2, Gaussian(1.0)).to_json()


@pytest.mark.parametrize(
    ("event", "adjacency"),
    [
        ({"event": "teleported", "noise": 1.0}, "zero-out"),
        ({"event": "compose", "of": [{"event": "gaussian", "noise": 1.0}, {"event": "new"}]}, "zero-out"),
        (Sampled("shuffled", 0.1, Gaussian(1.0)).to_json(), "add-or-remove"),
        (Repeat(Sampled("shuffled", 0.1, Gaussian(1.0)), 5).to_json(), "add-or-remove"),
        (GRID["poisson of sampled"].to_json(), "replace-one"),
        (Sampled("fixed-size", 0.5, Sampled("poisson", 0.1, Gaussian(1.0))).to_json(), "zero-out"),
        ({"event": "gaussian", "noise": 0.0}, "zero-out"),
        ({"event": "gaussian", "noise": True}, "zero-out"),
        (Gaussian(1.0).to_json(), "touching"),
        ({"event": "gaussian", "noise": 1.0, "sensitivity": 9.0}, "zero-out"),
        ({"event": "compose", "of": {}}, "zero-out"),
        ({"event": "sampled", "kind": "none", "rate": 0, "of": Gaussian(0.1).to_json(), "draws": None}, "zero-out"),
        ({"event": "by-size", "of": VISIBLE.to_json(), "uses": [[0, 0, 1], [9, 0.1, 10], [9, 0, 1]]}, "zero-out"),
        ({"event": "by-size", "of": VISIBLE.to_json(), "uses": [[0, 1.0, 10]]}, "zero-out"),
        (VISIBLE.to_json() | {"records": 0}, "zero-out"),
        (ALLOCATION | {"draws": 9}, "zero-out"),
        (ALLOCATION | {"of": {"event": "gaussian", "noise": 1.0, "sensitivity": 9.0}}, "zero-out"),
        ({"event": "repeat", "of": ALLOCATION | {"entered": 9}, "count": 5}, "zero-out"),
        (Sampled("poisson", 1.0, Gaussian(1.0)).to_json() | {"kind": "bootstrap"}, "zero-out"),
        (Sampled("poisson", 0.0, Gaussian(1.0)).to_json() | {"kind": "bootstrap"}, "zero-out"),
        (SampledUser(10**15, 0.1, 1.0).to_json(), "zero-out"),
    ],
)
def test_what_it_has_no_theorem_for_is_unknown(event: dict[str, object], adjacency: str) -> None:
    with pytest.raises(event_costs.Unknown):
        claim_figures.recompute([(event, 1)], adjacency, 1e-5, 1.0)


def claimed(
    event: dict[str, object], unit: str = "client", observer: str = "release", **said: object
) -> certificate_file.Line:
    chain = {"events": [{"event": event, "times": 1}], "distance": 0.0}
    claim = {"epsilon": 1.0, "delta": 1e-5, "adjacency": "zero-out", "sampler_delta": None, "chain": chain}
    return claim_figures.claim_line({"unit": unit, "observer": observer} | claim | said)


def test_a_claim_reaches_only_whom_its_theorem_covers() -> None:
    poisson, block = Sampled("poisson", 0.01, Gaussian(5.0)).to_json(), Allocated(((50.0, 9),)).to_json()
    assert claimed(poisson).verdict == claimed(poisson, "record", "server").verdict == "yes"
    assert claimed(poisson, observer="server").verdict == claimed(poisson, "galaxy").verdict == "unknown"
    assert claimed(poisson, adjacency="add-or-remove").verdict == "unknown"
    assert claimed(HIDDEN.to_json(), "record", "server").verdict == "unknown"
    for drawn in (
        TwoLevel(1.0, 0.01, 1, 5.0),
        BySize(TwoLevel(1.0, 0.01, 1, 5.0), ((1, 0.01, 1),)),
        SampledUser(2, 0.01, 9.0),
        TwoLevel(1.0, 0.1, 1, 9.0, local="shuffled"),
        Sampled("with-replacement", 1.0, Gaussian(50.0), 9),
        Sampled("shuffled", 0.1, Gaussian(9.0)),
    ):
        assert claimed(drawn.to_json(), "record").verdict == "yes"
        assert {claimed(drawn.to_json(), observer=who).verdict for who in claim_figures.OBSERVERS} == {"unknown"}
    taken_by_all = TwoLevel(1.0, 1.0, 1, 9.0, local="none").to_json()
    assert claimed(taken_by_all, observer="server").verdict == "yes"
    assert claimed(taken_by_all | {"participation": "guessed"}, observer="server").verdict == "unknown"
    assert (
        claimed(block, observer="client-process").verdict == claimed(block, "client", "nobody").verdict == "unknown"
    )


def test_a_sampler_that_takes_all_of_delta_leaves_no_epsilon() -> None:
    assert recomputed(Compose((Gaussian(1.0), SamplerError(1e-3))), "zero-out", 1e-5, 1.0).epsilon == math.inf


@pytest.mark.parametrize(
    "event",
    [
        {"event": "gaussian", "noise": 10**400},
        {"event": "gaussian", "noise": 1e-299},
        {"event": "repeat", "of": {"event": "gaussian", "noise": 1.0}, "count": 10**400},
    ],
)
def test_numbers_that_no_float_holds_are_never_a_yes(event: dict[str, object]) -> None:
    assert claimed(event).verdict == "unknown"


def test_no_finite_figure_stands_for_an_infinite_one() -> None:
    chain = {"events": [{"event": SamplerError(1e-3).to_json(), "times": 1}], "distance": 1e-3}
    taken = (1 + math.exp(700)) * 1e-3
    claimed_most = claimed(NOTHING.to_json(), epsilon=1.797e308, sampler_delta=taken, chain=chain)
    assert claimed_most.verdict != "yes"


def test_a_curve_that_is_no_number_gives_no_epsilon() -> None:
    assert claim_figures.least_epsilon(lambda _: math.nan, 1e-5) == math.inf
    assert claim_figures.least_epsilon(lambda epsilon: 0.5 if epsilon < 1 else math.nan, 1e-5) == math.inf
    assert claim_figures.least_epsilon(lambda _: 0.0, math.nan) == math.inf


@pytest.mark.parametrize(
    "event",
    [
        {"event": "repeat", "of": {"event": "gaussian", "noise": 0.1}, "count": 0.9},
        {"event": "on-clients", "of": {"event": "gaussian", "noise": 1.0}, "clients": 1.9},
        {**OnClients(1, VISIBLE).to_json()["of"], "local_steps": 1.9},
        {"event": "allocated", "rounds": [[1.0, 1], [1.0, -3]]},
        {"event": "allocated", "rounds": [[1.0, 7.9]]},
    ],
)
def test_counts_that_are_not_whole_are_unknown(event: dict[str, object]) -> None:
    with pytest.raises(event_costs.Unknown):
        claim_figures.recompute([(event, 1)], "zero-out", 1e-5, 1.0)


ROUND, OTHER = Compose((Gaussian(2.0), SamplerError(1e-12))), TwoLevel(0.1, 0.1, 10, 3.0)


@pytest.mark.parametrize(
    "rounds",
    [[ROUND] * 3, [OTHER] * 2, [ROUND, OTHER, OTHER], [OTHER, NOTHING, NOTHING, OTHER], [NOTHING] * 3],
)
def test_a_charge_for_several_rounds_is_of_as_many_events(rounds: list[Event]) -> None:
    """As the trainer writes them (checkpoint_every, early stopping), and as a forger would: one round for many."""

    def counted(event: Event, last: int) -> certificate_file.Line:
        pair = {"unit": "client", "observer": "release", "adjacency": "zero-out"}
        charge = pair | {"event": event.to_json()}
        events = [{"event": event.to_json(), "times": 1}]
        line = {"first": 1, "round": last, "charges": [charge]}
        return charged_rounds.counted_line(pair | {"chain": {"events": events}}, [line])

    event = _one_after_the_other(rounds)
    assert counted(event, len(rounds)).verdict == "yes"
    assert counted(event, len(rounds) + 1).verdict == ("yes" if NOTHING in rounds else "no")
    if rounds[0] != NOTHING:
        assert counted(rounds[0], len(rounds)).verdict == "no"
        assert "rounds 1 to 7 with the events of 1" in counted(rounds[0], 7).words
        assert counted(rounds[0], 1).verdict == "yes"


@pytest.mark.slow
def test_a_block_with_next_to_no_noise_has_a_figure() -> None:
    noise = 0.0375  # e^(1 / noise^2) is more than a float holds
    found = recomputed(Allocated(((noise, 10),)), "zero-out", 1e-5, 500.0).epsilon
    alone = recomputed(Gaussian(noise), "zero-out", 1e-5, 500.0).epsilon
    assert alone - math.log(10) - 1 < found < alone * (1 + 1e-3)


def test_a_nesting_that_is_too_deep_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(
        held: object,
    ) -> bytes:  # at some depth, which depends on Python, reading succeeds and writing does not
        raise RecursionError

    monkeypatch.setattr(certificate_file, "written", written)
    held = {"format": certificate_file.FORMAT, "deep": [[[]]]}
    (tmp_path / "certificate.json").write_text(json.dumps(held | {"digest": certificate_file.digest_of(held)}))
    with pytest.raises(checker.BadInput, match="RecursionError"):
        checker.check(tmp_path / "certificate.json")


POISSON = Sampled("poisson", 0.5, Gaussian(1.0))


@pytest.mark.parametrize(
    "event",
    [
        Repeat(POISSON, 10**15),
        Repeat(Sampled("poisson", 1e-9, Gaussian(1e3)), 10**15),
        Sampled("poisson", 0.5, Gaussian(1e-3)),
        Compose(tuple(Sampled("poisson", 0.5, Gaussian(0.01 + place * 1e-6)) for place in range(1000))),
        Compose(tuple(TwoLevel(0.5, 0.3, 10**6 + place, 1.0) for place in range(200))),
        BySize(TwoLevel(0.5, 0.5, 6000, 1.0), tuple((size, 0.5, size) for size in range(1, 5000))),
        TwoLevel(0.5, 0.5, 10**15, 1.0),
        Allocated(tuple((2.0 + place * 1e-6, 1) for place in range(1000))),
        Allocated(((2.0, 10**15),) * 2),
        Sampled("with-replacement", 1.0, Gaussian(0.01), 10**6),
        Sampled("poisson", 0.5, Repeat(Sampled("poisson", 0.5, Repeat(POISSON, 10**5)), 10**5)),
        Compose((Gaussian(1.0),) * 300_000),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_takes_too_much_work_is_refused_before_it_is_done(event: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is counted before it is done; less of it than usual keeps this test short."""
    monkeypatch.setattr(work_limit, "MOST", work_limit.MOST / 25)
    line = claimed(event.to_json(), "record", epsilon=1e9)
    assert line.verdict == "unknown"
    assert "too much work" in line.words or "dp-accounting cannot compute this" in line.words


def test_all_claims_of_a_certificate_share_its_work() -> None:
    """And what several observers see is computed once."""
    chain = {"events": [{"event": GRID["poisson"].to_json(), "times": 1}], "distance": 0.0}
    claim = {"unit": "record", "epsilon": 9.0, "delta": 1e-5, "adjacency": "zero-out", "sampler_delta": None}
    allowed = work_limit.Work()
    left = []
    for observer in claim_figures.OBSERVERS:
        assert claim_figures.claim_line(claim | {"observer": observer, "chain": chain}, allowed).verdict == "yes"
        left.append(allowed.left)
    assert left[0] < work_limit.MOST
    assert work_limit.MOST - left[0] > 10 * (left[0] - left[1]) > 0  # many such claims are work too
    allowed.left = 0
    other = chain | {"events": [{"event": GRID["fixed-size"].to_json(), "times": 1}]}
    assert claim_figures.claim_line(claim | {"observer": "release", "chain": other}, allowed).verdict == "unknown"


@pytest.mark.slow
def test_a_schedule_of_a_thousand_noises_agrees_with_the_accountant() -> None:
    """Both gather such noises in bins, and round them down."""
    schedule = Compose(tuple(Sampled("poisson", 0.1, Gaussian(1 + place / 1000)) for place in range(1000)))
    said = accountants.epsilon(schedule, 1e-5, adjacency="replace-one")
    assert said.epsilon is not None
    assert recomputed(schedule, "replace-one", 1e-5, said.epsilon).epsilon == pytest.approx(said.epsilon, rel=5e-4)


def test_a_composition_that_would_fill_the_memory_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """30 million points, of some of which the work would be done."""
    made = []
    monkeypatch.setattr(pld.PrivacyLossDistribution, "self_compose", lambda _, times: made.append(times))
    total = loss_distributions.Total("zero-out")
    one = loss_distributions.gaussian(0.1, loss_distributions.Grid(2.25e-3), 0.01)
    with pytest.raises(ValueError, match=r"a composition of .* points"):
        total._many(loss_distributions.dense(one), 10**9)
    assert not made


def test_losses_too_distant_for_the_memory_are_refused() -> None:
    """Of 100,000 steps with little noise that a client took with probability 0.999: 500 million points."""
    grid = loss_distributions.Grid(0.05)
    with pytest.raises(ValueError, match="a composition of 6,000,002 points"):
        loss_distributions.spread(np.array([0.0, 3e5]), np.array([0.5, 0.5]), 0.0, grid)
    event = TwoLevel(0.999, 0.999, 10**5, 0.045, participation="hidden")
    assert "points" in claimed(event.to_json(), "record", epsilon=1e9).words


def test_compositions_that_are_too_long_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = loss_distributions.gaussian(1.0, loss_distributions.Grid(0.01), 0.5)
    made = [(loss_distributions.dense(one), 1)] * 2
    loss_distributions.Total("zero-out")._joined(made)
    monkeypatch.setattr(loss_distributions, "LONGEST", 100)
    with pytest.raises(ValueError, match="points"):
        loss_distributions.Total("zero-out")._joined(made)


def test_a_mixture_is_counted_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """270 to 710 microseconds for each point of users with 2 to 100 records (measured): roots, not parts."""
    grid, total = loss_distributions.Grid(1e-3), loss_distributions.Total("zero-out")
    built = loss_distributions.gaussian(1.0, grid)
    monkeypatch.setattr(pld, "from_mixture_gaussian_mechanism", lambda *_, **__: built)
    event_costs.add({"event": "sampled-user", "records": 2, "rate": 0.5, "noise": 1.0}, 1, total)
    total.composed(grid)
    assert work_limit.MOST - total.work.left >= 500 * 20_000  # points


def test_the_error_of_a_composition_is_never_more_than_a_distribution() -> None:
    """At a loss of -33 an error of 1e-16 of one distribution would be 0.02 of the other."""
    grid = loss_distributions.Grid(0.05)
    many = loss_distributions.dense(loss_distributions.gaussian(1.0, grid, 0.01)).self_compose(10**5)
    with np.errstate(all="ignore"):
        found = loss_distributions.halves(loss_distributions.amplified(many, 0.5, grid))
    assert [half._probs.sum() + half._infinity_mass for half in found] == pytest.approx([1.0, 1.0], abs=1e-6)


def test_a_secret_round_of_much_local_work_agrees_with_the_accountant() -> None:
    event = Repeat(TwoLevel(0.5, 0.01, 10**5, 1.0, participation="hidden"), 50)
    said = accountants.epsilon(event, 1e-5, adjacency="zero-out")
    assert said.epsilon is not None
    assert recomputed(event, "zero-out", 1e-5, said.epsilon).epsilon == pytest.approx(said.epsilon, rel=1e-3)


@pytest.mark.parametrize("moved", [1.0, 2.0])
def test_the_bins_of_an_exponential_schedule_are_those_of_the_accountant(moved: float) -> None:
    """All of its noises are at the edge of a bin, where rounding must not put them into the one below."""
    noises = [1000 ** (t / 100) for t in range(101)]
    kept = {moved / math.sqrt((moved / noise) ** 2): noise for noise in noises}
    parts = {key: loss_distributions.Part(lambda _: None, 1, noise, 1.0, 100) for key, noise in kept.items()}
    own = sum(part.times / part.reach**2 for part in loss_distributions._binned(parts))
    events = [(Sampled("poisson", 0.1, Gaussian(noise)), 1) for noise in noises]
    theirs = sum(times / leaf.event.noise**2 for leaf, times in accountant_pld._binned(events))
    assert own <= theirs * (1 + 1e-9)


def test_a_strangers_words_stay_in_their_line() -> None:
    line = certificate_file.Line("yes", "client, release", "nothing\nyes \x1b[2Jx: " + "9" * 10_000)
    said = checker.shown([line]).splitlines()
    assert len(said) == 2
    assert all(each.isprintable() and len(each) < 1100 for each in said)
