"""The audit tells right from wrong: what is proven is consistent; what is broken, or claimed too boldly, is caught.

All 20 seeds of every method are in benchmarks/audit.py, docs/results/audit.md; here one seed, and fewer trials.
With the fixture `rarely` the game and each of two checks flag what is right with 1e-7. Canaries must doubt it at 1e-3
and again at 1e-2, which has 1e-10 (82 and then 76 right guesses of 100 at 0.58 each; 160 and 152 of 200 at 0.64).
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from shoal.algorithms import algorithm, algorithms
from shoal.audit import bounds, one_run
from shoal.audit.audit_plot import picture
from shoal.audit.audit_report import cells, html, new_folder, place, words, write
from shoal.audit.auditing import Effort, audit
from shoal.audit.broken import VARIANTS, whole
from shoal.audit.cases import cases
from shoal.audit.checks import noise_checks, sensitivity_check
from shoal.audit.game import play, step_radius
from shoal.audit.one_run import Guesses
from shoal.config import configure
from shoal.random.streams import Streams
from shoal.report.claim_rows import at_least

LITTLE = Effort(step_trials=1000, round_trials=150, canaries=2000, pairs=60, round_pairs=2)
FEW = replace(LITTLE, canaries=200)
SHORT = replace(LITTLE, round_trials=50, canaries=600)  # where canaries and checks must show it, not the game
CASES = {
    (name, case.unit if place == 0 else f"{case.unit}, {case.kind}"): case  # DPSUR has two claims for a record
    for name in algorithms()
    for found in [list(cases(algorithm(name)))]
    for unit in ("client", "record")
    for place, case in enumerate(case for case in found if case.unit == unit)
}
PROVEN_STEPS = [key for key, case in CASES.items() if case.kind == "proven" and case.where == "steps"]
PROVEN_SUM = [key for key, case in CASES.items() if case.kind == "proven" and case.where == "sum"]
COLLUDING = [key for key in PROVEN_SUM if CASES[key].colluding]


def test_every_method_that_proves_something_has_a_case():
    from shoal.algorithms.charges import proves

    proving = {name for name in algorithms() if not proves(algorithm(name)).startswith("nothing")}
    assert {name for name, _ in PROVEN_STEPS + PROVEN_SUM} == proving
    assert {name for (name, _), case in CASES.items() if case.kind == "published"} == {
        "geyer", "fed-alpha-cdp", "fed-alpha-cdp-sigma", "end-to-end", "dpsur",
    }  # fmt: skip


@pytest.mark.parametrize("key", list(CASES), ids=" ".join)
def test_the_claim_of_an_audits_setting_is_about_one(key):
    claim = CASES[key].claim
    assert claim is None or 0.99 < claim.epsilon <= 1.0
    assert (claim is None) == (CASES[key].kind == "none")


@pytest.mark.slow
@pytest.mark.parametrize("key", PROVEN_STEPS, ids=" ".join)
@pytest.mark.usefixtures("rarely")
@pytest.mark.statistical(false_alarm=3e-7)
def test_what_is_proven_of_a_record_is_consistent_and_a_quarter_of_the_noise_is_not(key):
    """By the game alone: checks of every broken form are in the next test but one."""
    (outcome,) = audit(algorithm(key[0]), level=key[1], kind="proven", effort=replace(FEW, pairs=0), seed=3)
    assert (outcome.verdict, outcome.flagged) == ("consistent", [])
    assert outcome.epsilon < 1
    assert "game" in outcome.power["noise x 1/4"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["geyer-private", "trusted-curator"])
@pytest.mark.usefixtures("rarely")
@pytest.mark.statistical(false_alarm=5e-7)
def test_what_is_proven_of_a_client_is_consistent_and_a_quarter_of_the_noise_is_not(name):
    (outcome,) = audit(algorithm(name), level="client", effort=SHORT, seed=3)
    assert (outcome.verdict, outcome.flagged) == ("consistent", [])
    assert {"canaries", "noise scale"} <= set(outcome.power["noise x 1/4"])


ALLOCATED = replace(algorithm("trusted-curator"), clients=replace(algorithm("trusted-curator").clients,
                    sampling="random-allocation"))  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("rarely")
@pytest.mark.statistical(false_alarm=5e-7)
def test_random_allocation_is_consistent_and_a_quarter_of_the_noise_is_not():
    (outcome,) = audit(ALLOCATED, level="client", effort=SHORT, seed=3)
    assert (outcome.verdict, outcome.flagged) == ("consistent", [])
    assert {"canaries", "noise scale"} <= set(outcome.power["noise x 1/4"])


@pytest.mark.slow
@pytest.mark.usefixtures("rarely")
def test_turns_that_everybody_knows_are_caught_where_secret_ones_are_charged():
    """All clients come in the first round of the block, and nothing else is wrong; at a claim of 8 that shows."""
    case, streams = next(cases(ALLOCATED, "client", epsilon=8.0)), Streams(5)
    broken = VARIANTS["turns known"](case, streams)
    event = case.claim.event
    right, wrong = play(case, case.record, 200, streams), play(case, broken.played, 450, streams)
    assert not bounds.passes(right.points, bounds.tradeoff(event, "zero-out"))
    assert bounds.passes(wrong.points, bounds.tradeoff(event, "zero-out"))
    assert VARIANTS["turns known"](CASES["geyer-private", "client"], streams) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "key", [*PROVEN_STEPS, *(key for key in PROVEN_SUM if key[1] == "client"), *COLLUDING], ids=" ".join
)
@pytest.mark.usefixtures("rarely")
@pytest.mark.statistical(false_alarm=2e-7)
def test_checks_flag_nothing_that_is_right_and_every_broken_form(key):
    """Without any adversary: noise, its scale, its independence of the data, and sensitivity.

    Half of the noise, or none of its own, shows in fewer trials than it takes to see that nothing is amiss.
    """
    case, streams = CASES[key], Streams(5)
    trials, few, pairs = (150, 40, 60) if case.where == "steps" else (24, 6, 4)

    def flagged(broken, trials=few):
        yield from (check.name for check in noise_checks(broken, trials) if check.flagged)
        yield from (check.name for check in [sensitivity_check(broken, pairs)] if check.flagged)

    assert list(flagged(whole(case, streams), trials)) == []
    for name, variant in VARIANTS.items():
        broken = variant(case, streams)
        assert broken is None or next(flagged(broken), None), name


@pytest.mark.slow
@pytest.mark.parametrize("key", COLLUDING, ids=" ".join)
@pytest.mark.usefixtures("rarely")
@pytest.mark.statistical(false_alarm=1e-7)
def test_colluding_sites_see_the_noise_that_is_charged_and_one_more_sees_less(key):
    """Two of three shares are left of the noise, and then one: 1/sqrt 2 of what is charged."""
    case, streams = CASES[key], Streams(5)
    assert (case.observer, case.colluding) == ("server", 1)
    for broken, least, flagged in (
        (whole(case, streams), 0.999, False),
        (VARIANTS["one more site colludes"](case, streams), 0.70, True),
    ):
        (scale,) = [check for check in noise_checks(broken, 12) if check.name == "noise scale"]
        assert scale.flagged == flagged
        assert least <= scale.measured < least + 0.05


@pytest.mark.slow
def test_broken_forms_are_caught_by_what_is_made_for_them():
    case = CASES["fed-cdp-private", "record"]
    found = {}
    for name, variant in VARIANTS.items():
        if (broken := variant(case, Streams(5))) is None:
            continue
        checks = [*noise_checks(broken, 300), sensitivity_check(broken, 100)]
        found[name] = {check.name: check.measured for check in checks if check.flagged}
    assert found["noise x 1/2"]["noise scale"] == pytest.approx(0.5, abs=0.01)
    assert found["sensitivity off by sqrt M"]["replay sensitivity"] == pytest.approx(2, abs=0.1)
    assert found["noise reused"]["noise reused"] == pytest.approx(1)
    assert found["clip off"]["replay sensitivity"] > 10
    assert set(found["median or maximum unprotected"]) == {"noise beside data"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("fed-alpha-cdp", 5.0), ("fed-alpha-cdp-sigma", 5.0), ("geyer", 2.5)])
def test_noise_that_follows_the_data_is_violated_several_times_over(name, least):
    (outcome,) = audit(algorithm(name), kind="published", effort=replace(LITTLE, round_trials=80), seed=3)
    assert (outcome.verdict, outcome.flagged) == ("VIOLATED", ["game"])
    assert outcome.epsilon > least * outcome.case.claim.epsilon


@pytest.mark.slow
def test_charging_only_the_steps_that_are_kept_is_violated():
    """Fu et al. (2023) claim no more than Renyi divergences, which allow more than the Gaussians that have them."""
    (outcome,) = audit(
        algorithm("dpsur"), kind="published", epsilon=4, effort=replace(LITTLE, step_trials=250), seed=3
    )
    assert (outcome.verdict, outcome.flagged) == ("VIOLATED", ["game"])
    assert outcome.case.claim.renyi


@pytest.mark.slow
def test_the_client_level_claim_of_the_thesis_is_violated_and_the_true_bound_is_beside_it():
    (outcome,) = audit(algorithm("end-to-end"), level="client", effort=replace(LITTLE, round_trials=40), seed=3)
    assert outcome.verdict == "VIOLATED"
    row = outcome.row()
    assert row["claimed"] == pytest.approx(1, abs=0.01)
    assert row["adjacency"] in ("zero-out", "replace-one", "add-or-remove")
    assert row["claimed"] < row["measured"] < row["estimate"] < row["true_bound"]
    assert f"the true bound for this setting is {math.ceil(row['true_bound'])}" in words(row)
    assert float(cells(row)[2].removeprefix("published ")) >= row["claimed"]


@pytest.mark.slow
def test_a_method_that_claims_nothing_is_measured_all_the_same():
    (outcome,) = audit(algorithm("fedavg"), effort=LITTLE, seed=3)
    assert outcome.verdict == "no claim"
    assert outcome.epsilon > 2.5
    assert outcome.flagged == []


@pytest.mark.slow
def test_an_audit_that_would_catch_nothing_says_so():
    weak = replace(LITTLE, step_trials=20, canaries=20)
    (outcome,) = audit(algorithm("dp-sgd"), effort=weak, seed=3)
    assert outcome.verdict == "too weak to tell"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp-sgd", "pfl", "adaclip"])
@pytest.mark.usefixtures("rarely")
@pytest.mark.statistical(false_alarm=5e-7)
def test_records_that_come_several_times_are_charged_so_and_not_called_a_fault(name):
    record = changed(name, "records.sampling=with-replacement")
    (outcome,) = audit(record, level="record", effort=replace(FEW, step_trials=200), seed=3)
    assert outcome.flagged == []
    assert step_radius(record, Streams(3)) == pytest.approx(step_radius(algorithm(name), Streams(3)), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("lucky_runs", "flagged"), [(1, []), (2, ["canaries"])])
@pytest.mark.usefixtures("rarely")
@pytest.mark.statistical(false_alarm=1e-7)
def test_canaries_alone_flag_only_what_they_see_twice(monkeypatch, lucky_runs, flagged):
    """One run in a hundred goes so far by chance at most."""
    seen = []

    def lucky(broken, canaries, runs):
        seen.append((broken.streams.number("coins"), runs))
        p_value = 0.0005 if len(seen) <= lucky_runs else 0.5
        return Guesses(canaries, runs, 2.0, p_value, 10, 10, 2.0, 2.0, p_value, 2.0)

    monkeypatch.setattr(one_run, "guess", lucky)
    few = replace(FEW, step_trials=20, pairs=0, repeats=3)
    (outcome,) = audit(algorithm("dp-sgd"), level="record", effort=few)
    assert outcome.flagged == flagged
    assert outcome.confidence == pytest.approx(0.9499)
    (coins, runs), (others, again) = seen[:2]
    assert coins != others
    assert (runs, again) == (3, 3)


@pytest.mark.slow
@pytest.mark.usefixtures("rarely")
@pytest.mark.statistical(false_alarm=2e-7)
def test_a_clip_that_ends_at_its_limit_is_not_taken_for_too_little_noise():
    (case,) = cases(changed("geyer-private", "per_update.clip_norm_lr=1000"), "client")
    assert not [check for check in noise_checks(whole(case, Streams(3)), 24) if check.flagged]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["per_record.clip_norm=1000", "clients.sampling=cyclic"])
def test_a_claim_that_is_known_to_be_wrong_is_never_called_consistent(change):
    few = replace(FEW, round_trials=25)
    (outcome,) = audit(changed("end-to-end", change), level="client", effort=few, seed=3)
    assert outcome.verdict == "VIOLATED"


@pytest.mark.slow
def test_a_published_claim_is_consistent_only_where_a_quarter_of_the_noise_is_caught():
    weak = replace(FEW, step_trials=3)
    (outcome,) = audit(algorithm("fed-alpha-cdp"), level="record", effort=weak, seed=3)
    assert outcome.verdict == "too weak to tell"
    assert list(outcome.power) == ["noise x 1/4"]


@pytest.mark.parametrize(
    ("name", "unit", "changes"),
    [
        ("dp-sgd", "record", ["clients.sampling=cyclic"]),
        ("trusted-curator", "client", ["local.momentum=0.9", "local.keep_momentum=true"]),
    ],
)
def test_nothing_is_called_proven_that_a_run_could_not_prove(name, unit, changes):
    assert [case.kind for case in cases(algorithm(name), unit)] == ["proven"]
    assert [case.kind for case in cases(changed(name, *changes), unit)] == ["none"]


def test_lower_bounds_are_never_rounded_up():
    assert [at_least(bound) for bound in (3.6854, 0.1665, 0.0, 5.7799)] == ["3.68", "0.16", "0.00", "5.77"]


@pytest.mark.slow
def test_no_game_shows_more_than_its_trials_could():
    for trials in (3, 50):
        (outcome,) = audit(algorithm("fedavg"), effort=replace(FEW, round_trials=trials), seed=3)
        assert 0 <= outcome.epsilon <= outcome.game.best_possible + 1e-9


def changed(name, *changes):
    return configure({"algorithm": name}, changes).algorithm


@pytest.mark.slow
@pytest.mark.usefixtures("rarely")
@pytest.mark.statistical(false_alarm=5e-7)
def test_secure_mode_is_audited_too():
    few = replace(FEW, round_trials=10, canaries=40)  # secure noise takes long; its scale shows in the checks
    (outcome,) = audit(algorithm("fed-sdp"), level="client", effort=few, secure=True)
    assert outcome.flagged == []
    assert "noise scale" in outcome.power["noise x 1/4"]


@pytest.mark.slow
def test_a_page_holds_table_picture_and_how(tmp_path):
    outcomes = list(audit(algorithm("dp-sgd"), effort=Effort(step_trials=200, canaries=100, pairs=10), seed=1))
    with place(new_folder(tmp_path, "dp-sgd")) as folder:
        rows = [outcome.row() for outcome in outcomes]
        pictures = picture(outcomes), picture(outcomes, narrow=True)
        write(folder, "dp-sgd", rows, pictures, "shoal audit --algorithm dp-sgd")
    assert sorted(path.name for path in folder.iterdir()) == ["audit.json", "audit.png", "report.html"]
    told = json.loads((folder / "audit.json").read_text())
    assert told["rows"][0]["setting"].startswith("one local step on 4 records, noise 7.4")
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "<script" not in page
    assert "one local step on 4 records" in page
    assert "a &lt;b&gt;" in html("a <b>", rows, (b"", b""), "")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_audit():
    few = Effort(step_trials=100, canaries=50, pairs=10)
    rows = [next(audit(algorithm("dp-sgd"), effort=few, seed=seed)).row() for seed in (3, 3, 1)]
    for row in rows:
        del row["seconds"]
    assert rows[0] == rows[1]
    assert rows[0]["checks"] != rows[2]["checks"]
    assert np.isfinite(rows[0]["measured"])
