"""What a sweep costs: the ledgers' events together, or the best of a private selection; never less than is true."""

import json
import shutil
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import shoal
from shoal.accounting import accountants, selection
from shoal.accounting.claims import DEALT, RESEARCH
from shoal.accounting.events import Compose, Gaussian, Repeat, Sampled, TwoLevel
from shoal.accounting.leaves import leaves
from shoal.accounting.privacy_ledger import Charge, Ledger
from shoal.accounting.selection import Trials
from shoal.data.split import held_out
from shoal.errors import LedgerError, RunError
from shoal.report.run_reader import read_run
from shoal.sweep import cost, outcome
from shoal.sweep.cells import cell_folder
from shoal.sweep.outcome import outcome_of, write_sweep_page
from shoal.sweep.plan import Plan, base_settings, grid_of, make_plan

BASE = [
    "algorithm=trusted-curator", "model=linear", "data.clients=20", "clients.sampling=poisson", "clients.cohort=10",
    "rounds=3", "budget.delta=1e-3", "local.steps=2", "engine.threads=1",
]  # fmt: skip


def played(folder, words=("per_round.noise_multiplier=2.0,4.0",), **more):
    """A sweep whose cells were played here, in this process."""
    plan = make_plan(base_settings(None, BASE), grid_of(list(words)), **more)
    plan.write(folder)
    for number in range(len(plan.cells)):
        shoal.run(plan.settings(number), runs=cell_folder(folder, number))
    return plan


def table_of(folder, owners):
    """A file of rows, each with its owner."""
    rows = np.random.default_rng(0).normal(size=(len(owners), 3)).round(3)
    lines = [",".join([*map(str, rows[k]), str(k % 2), owner]) for k, owner in enumerate(owners)]
    (folder / "table.csv").write_text("\n".join(["a,b,c,label,client", *lines]))
    return folder / "table.csv"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    return folder, played(folder, charge=True)


def client(claims):
    return next(claim for claim in claims if (claim.unit, claim.observer) == ("client", "release"))


def steps(noise):
    return Repeat(Sampled("poisson", 0.5, Gaussian(noise)), 3)


@pytest.mark.slow
def test_all_cells_together_cost_the_composition_of_their_ledgers(sweep):
    together = client(cost.all_together(*sweep))
    expected = accountants.epsilon(Compose((steps(2.0), steps(4.0))), 1e-3).epsilon
    assert together.epsilon == pytest.approx(expected, rel=1e-6)
    alone = [accountants.epsilon(steps(noise), 1e-3).epsilon for noise in (2.0, 4.0)]
    assert max(alone) < together.epsilon < sum(alone)


@pytest.mark.slow
def test_a_cell_that_was_never_released_is_charged_all_the_same(tmp_path):
    plan = played(tmp_path)
    before = client(cost.all_together(tmp_path, plan)).epsilon
    (run,) = cell_folder(tmp_path, 1).glob("*/config.toml")
    (run.parent / "result.json").unlink()
    assert client(cost.all_together(tmp_path, plan)).epsilon == before


@pytest.mark.slow
def test_a_broken_ledger_leaves_nothing_proven(tmp_path):
    plan = played(tmp_path)
    (ledger,) = cell_folder(tmp_path, 0).glob("*/ledger.jsonl")
    ledger.write_text(ledger.read_text().replace('"noise":2.0', '"noise":9.0', 1))
    claim = client(cost.all_together(tmp_path, plan))
    assert claim.epsilon is None
    assert "broken" in claim.because


def test_a_unit_that_a_round_charges_twice_is_charged_twice(tmp_path):
    """As by `shoal ledger`; a ledger may also say it once in words of version 0.1."""
    (tmp_path / "run").mkdir()
    with Ledger(tmp_path / "run" / "ledger.jsonl") as ledger:
        ledger.begin("run", "mine", "")
        ledger.intend(1, [Charge("record", "release", Gaussian(1.0)), Charge("record", "release", Gaussian(1000.0))])
        assert cost.charged(tmp_path / "run")["record", "release"] == ledger.charged_event("record", "release")
    assert cost.charged(tmp_path / "run")["record", "release"] == Compose((Gaussian(1.0), Gaussian(1000.0)))


@pytest.mark.slow
def test_cells_that_share_noise_cannot_be_added_up(tmp_path):
    plan = played(tmp_path, ["per_round.noise_multiplier=2.0,4.0", "noise_seed=7"])
    for claim in cost.all_together(tmp_path, plan):
        assert claim.epsilon is None
        assert "same noise" in claim.because


@pytest.mark.slow
def test_cells_that_split_the_data_anew_have_no_common_client_but_common_records(tmp_path):
    plan = played(tmp_path, ["seed=1,2"])
    claims = {(claim.unit, claim.observer): claim for claim in cost.all_together(tmp_path, plan)}
    assert claims["client", "release"].epsilon is None
    assert "different ways" in claims["client", "release"].because
    assert claims["record", "release"].epsilon > 0


def middle_client_is_charged_for_both(folder, settings, cells):
    """Whose record is one of 11 in the first cell, and one of 6 in the second."""
    plan = replace(make_plan(settings, grid_of(["records.batch=10,5"])), cells=cells)
    for number in range(2):
        shoal.run(plan.settings(number), runs=cell_folder(folder, number))
    middle = [Repeat(TwoLevel(1.0, share, 2, 4.0, "poisson"), 2) for share in (10 / 11, 5 / 6)]
    truth = accountants.epsilon(Compose(tuple(middle)), 1e-3, adjacency="replace-one").epsilon
    claims = {(claim.unit, claim.observer): claim for claim in cost.all_together(folder, plan)}
    assert claims["record", "release"].epsilon >= truth


@pytest.mark.slow
def test_a_record_whose_client_has_another_size_in_each_cell_is_charged_for_both(tmp_path):
    """Clients of 10, 11 and 20 records, then of 5, 6 and 11: the middle one is charged most in both."""
    table = table_of(tmp_path, ["y"] * 12 + ["x"] * 14 + ["z"] * 25)
    words = [
        "algorithm=dp-sgd", "model=linear", f"data.name={table}", "data.client_column=client", "clients.sampling=all",
        "rounds=2", "budget.delta=1e-3", "per_step.noise_multiplier=4.0", "engine.threads=1",
    ]  # fmt: skip
    cells = [{"data.test_fraction": 0.2, "records.batch": 10}, {"data.test_fraction": 0.56, "records.batch": 5}]
    middle_client_is_charged_for_both(tmp_path, base_settings(None, words), cells)


@pytest.mark.slow
def test_a_record_whose_client_keeps_fewer_records_in_one_cell_is_charged_for_both(tmp_path):
    """Clients of 10, 11 and 20 records, and of 5, 6 and 11 where one of each user is kept."""
    owners = np.array(["y"] * 14 + ["x"] * 12 + ["z"] * 25)
    users = np.array([f"u{k}" for k in range(51)])
    train, _ = held_out(np.unique(owners, return_inverse=True)[1], 10)
    for owner, several in (("x", 5), ("y", 6), ("z", 11)):
        own = train[owners[train] == owner]
        users[own] = [f"{owner}{k % several}" for k in range(len(own))]
    rows = [f"{k % 7},{k % 2},{owners[k]},{users[k]}" for k in range(51)]
    (tmp_path / "table.csv").write_text("\n".join(["a,label,client,user", *rows]))
    settings = base_settings(None, [
        "algorithm=dp-sgd", "model=linear", f"data.name={tmp_path / 'table.csv'}", "data.public_ownership=true",
        "clients.sampling=all", "rounds=2", "budget.delta=1e-3", "per_step.noise_multiplier=4.0", "engine.threads=1",
        "schema.label=label", "schema.client_column=client", "schema.user_column=user",
    ])  # fmt: skip
    settings |= {"schema.classes": ["0", "1"], "schema.columns": {"a": {"kind": "number", "range": [0, 7]}}}
    cells = [{"records.max_per_user": 9, "records.batch": 10}, {"records.max_per_user": 1, "records.batch": 5}]
    middle_client_is_charged_for_both(tmp_path, settings, cells)


@pytest.mark.slow
def test_the_best_of_a_private_selection_costs_what_the_theorem_says(tmp_path):
    plan = played(tmp_path, private=True, expected_trials=2.0)
    claim = client(cost.of_the_best(tmp_path, plan))
    expected = selection.epsilon([steps(2.0), steps(4.0)], plan.selection.trials, 1e-3).epsilon
    assert claim.epsilon == pytest.approx(expected, rel=1e-6)
    assert claim.epsilon > accountants.epsilon(steps(2.0), 1e-3, "rdp").epsilon
    dearer = replace(plan, selection=replace(plan.selection, gamma=Trials.expecting(50.0).gamma))
    assert client(cost.of_the_best(tmp_path, dearer)).epsilon > claim.epsilon


@pytest.mark.slow
def test_a_private_selection_claims_nothing_against_who_sees_every_trial(tmp_path):
    words = ["per_round.noise_multiplier=2.0,4.0", "per_round.at=shared", "clients.sampling=fixed-size"]
    plan = played(tmp_path, words, private=True, expected_trials=2.0)
    claims = {(claim.unit, claim.observer): claim for claim in cost.of_the_best(tmp_path, plan)}
    assert claims["client", "release"].epsilon > 0
    assert claims["client", "release"].adjacency == "zero-out"
    assert "20, is public" in claims["client", "release"].because
    for unit, observer in product(("client", "record"), ("server", "client-process")):
        assert claims[unit, observer].epsilon is None
        assert "sees every trial" in claims[unit, observer].because


def test_a_private_selection_claims_nothing_for_clients_whose_rows_give_the_score(tmp_path):
    table = table_of(tmp_path, [f"c{k % 6}" for k in range(60)])
    words = [*BASE[:2], *BASE[3:], f"data.name={table}", "clients.cohort=3"]
    plan = make_plan(base_settings(None, words), grid_of(["per_round.noise_multiplier=2.0,4.0"]), private=True)
    claims = {(claim.unit, claim.observer): claim for claim in cost.of_the_best(tmp_path, plan)}
    assert claims["client", "release"].epsilon is None
    assert "rows of these same clients" in claims["client", "release"].because
    assert claims["record", "release"].epsilon > 0


@pytest.mark.parametrize("method", [[], ["algorithm=dp-sgd", "records.sampling=poisson"]])
def test_a_private_selection_claims_nothing_where_personal_layers_give_the_score(method, tmp_path):
    """Nobody clipped them at client level, and each held-out row is for a client whose own rows are like it."""
    words = [*BASE, *method, "model=digits-mlp", "local.personal=1"]
    plan = make_plan(base_settings(None, words), grid_of(["seed=1", "local.lr=0.1,0.2"]), private=True)
    claims = cost.of_the_best(tmp_path, plan)
    assert [claim.epsilon for claim in claims] == [None] * len(claims)
    said = {(claim.unit, claim.observer): claim.because for claim in claims}
    assert "personal layers" in said["client", "release"]
    assert "personal layers" in said["record", "release"]


@pytest.mark.parametrize("words", [["data.test_fraction=0.2,0.3"], ["data.client_column=client,other"]])
def test_a_private_selection_claims_nothing_for_records_held_out_in_one_cell_and_trained_on_in_another(
    words, tmp_path
):
    table = table_of(tmp_path, [f"c{k % 6}" for k in range(60)])
    lines = table.read_text().splitlines()
    other = ["other", *(f"d{k % 5}" for k in range(60))]
    table.write_text("\n".join(f"{line},{more}" for line, more in zip(lines, other, strict=True)))
    base = [*BASE[:2], *BASE[3:], f"data.name={table}", "data.client_column=client", "clients.cohort=3"]
    plan = make_plan(base_settings(None, base), grid_of(words), private=True)
    claims = cost.of_the_best(tmp_path, plan)
    assert [claim.epsilon for claim in claims] == [None] * len(claims)
    said = {(claim.unit, claim.observer): claim.because for claim in claims}
    assert "hold out different rows" in said["record", "release"]


@pytest.mark.slow
def test_cells_whose_schemas_name_other_clients_have_neither_clients_nor_held_out_rows_in_common(tmp_path):
    table = table_of(tmp_path, [f"c{k % 6}" for k in range(60)])
    lines = table.read_text().splitlines()
    other = ["other", *(f"d{k % 5}" for k in range(60))]
    table.write_text("\n".join(f"{line},{more}" for line, more in zip(lines, other, strict=True)))
    columns = {name: {"kind": "number", "range": [-5, 5]} for name in "abc"}
    schema = {"schema.label": "label", "schema.classes": ["0", "1"], "schema.columns": columns}
    words = [*BASE[:2], *BASE[3:], f"data.name={table}", "clients.cohort=3"]
    settings, grid = base_settings(None, words) | schema, grid_of(["schema.client_column=client,other"])
    chosen = cost.of_the_best(tmp_path, make_plan(settings, grid, private=True))
    assert [claim.epsilon for claim in chosen] == [None] * len(chosen)
    plan = make_plan(settings, grid, charge=True)
    for number in range(2):
        shoal.run(plan.settings(number), runs=cell_folder(tmp_path, number))
    together = {(claim.unit, claim.observer): claim for claim in cost.all_together(tmp_path, plan)}
    assert together["client", "release"].epsilon is None
    assert "different ways" in together["client", "release"].because
    assert together["record", "release"].epsilon > 0


@pytest.mark.slow
@pytest.mark.parametrize("random", ["research", "secure"])
def test_a_cell_is_planned_at_the_price_that_its_run_is_charged(random, tmp_path):
    plan = played(
        tmp_path, ["per_round.noise_multiplier=2.0,4.0", f"random={random}"], private=True, expected_trials=2.0
    )
    drawn = {
        cell["per_round.noise_multiplier"]: run
        for cell, run in zip(plan.cells, cost.runs_of(tmp_path, plan), strict=True)
    }
    for cell, (_, planned, _) in zip(plan.selection.cells, cost.planned_cells(plan), strict=True):
        if (run := drawn.get(cell["per_round.noise_multiplier"])) is not None:
            paid = cost.charged(run)
            assert all(leaves(planned[pair]) == leaves(paid[pair]) for pair in planned)
    assert drawn


@pytest.mark.slow
def test_cells_that_were_not_drawn_count_too(tmp_path):
    plan = played(tmp_path, private=True, expected_trials=2.0)
    only = replace(plan.selection, cells=[{"per_round.noise_multiplier": 4.0}])
    cheap = [cell for cell in plan.cells if cell["per_round.noise_multiplier"] == 4.0] == plan.cells
    lone = client(cost.of_the_best(tmp_path, replace(plan, selection=only))).epsilon
    both = client(cost.of_the_best(tmp_path, plan)).epsilon
    assert (lone < both) if cheap else (lone == pytest.approx(both))


@pytest.mark.slow
def test_what_is_told_of_the_chosen_run_is_what_the_selection_proves_and_the_others_stay_hidden(tmp_path):
    plan = played(tmp_path, private=True, expected_trials=6.0, shape=3.0)
    outcome = outcome_of(tmp_path, plan)
    told = outcome.to_json()
    assert len(told["cells"]) == 1
    own = client(cost.of_the_best(tmp_path, plan)).epsilon
    claims = {(claim["unit"], claim["observer"]): claim["epsilon"] for claim in told["cells"][0]["proven"]}
    assert claims["client", "release"] == own
    html = write_sweep_page(outcome).read_text()
    assert html.count('<th scope="row">') == 1
    chosen = outcome.entries[outcome.best].run.path
    assert "private selection" in (chosen / "report.html").read_text()
    assert json.loads((chosen / "result.json").read_text())["selected"]["proven"][0]["epsilon"] == own
    best = max(json.loads(path.read_text())["accuracy"] for path in tmp_path.glob("cells/*/*/result.json"))
    assert told["cells"][0]["accuracy"] == best
    stated = shoal.load_model(chosen).claims[0]
    assert stated["epsilon"] == own, "the model says it too"
    assert "records that trials are scored on are not protected" in stated["because"]
    assert read_run(chosen).ledger.whole
    with pytest.raises(LedgerError, match="private selection chose it"):
        shoal.run(resume=chosen)
    (chosen / "result.json").unlink()
    assert read_run(chosen).epsilon("client", "release") == own, "the ledger knows of the selection"


@pytest.mark.slow
def test_a_private_selection_that_has_chosen_never_chooses_another(tmp_path):
    """As after a trial that failed, and finished when the sweep was resumed: two models would cost more than one."""
    plan = make_plan(base_settings(None, BASE), grid_of(["per_round.noise_multiplier=2.0"]), private=True)
    plan = replace(plan, cells=plan.selection.cells * 2, seeds=[1, 2])
    shoal.run(plan.settings(0), runs=cell_folder(tmp_path, 0))
    before = outcome_of(tmp_path, plan)
    shoal.run(plan.settings(1), runs=cell_folder(tmp_path, 1))
    first, second = sorted(tmp_path.glob("cells/*/*/result.json"))
    result = json.loads(second.read_text())
    result["figures"]["accuracy"] = 1.0
    second.write_text(json.dumps(result))
    after = outcome_of(tmp_path, plan)
    assert before.best == after.best == 0
    assert [path for path in (first, second) if "selected" in json.loads(path.read_text())] == [first]
    first.parent.rename(tmp_path / "released")
    with pytest.raises(RunError, match=r"no longer in .*0001: put it back"):
        outcome_of(tmp_path, Plan.read(tmp_path))
    shoal.run(plan.settings(0), runs=cell_folder(tmp_path, 0))
    with pytest.raises(RunError, match=r"no longer in .*0001: put it back"):
        outcome_of(tmp_path, Plan.read(tmp_path))


@pytest.mark.slow
def test_the_price_of_a_private_selection_stays_where_the_other_trials_are_deleted(tmp_path):
    """A trial that was killed and resumed cost more than planned, and only its ledger knows."""
    plan = make_plan(base_settings(None, BASE), grid_of(["per_round.noise_multiplier=2.0"]), private=True)
    plan = replace(plan, cells=plan.selection.cells * 2, seeds=[1, 2])
    for number in range(2):
        shoal.run(plan.settings(number), runs=cell_folder(tmp_path, number))
    dear, other = sorted(tmp_path.glob("cells/*/*/ledger.jsonl"))
    with Ledger(dear) as ledger:
        for intent in ledger.charged * 2:
            ledger.intend(intent.round, intent.charges)
    (dear.parent / "result.json").unlink()
    price = client(outcome_of(tmp_path, plan).proven)
    assert price.epsilon > selection.epsilon([steps(2.0)], plan.selection.trials, 1e-3).epsilon
    shutil.rmtree(dear.parent)
    assert client(outcome_of(tmp_path, Plan.read(tmp_path)).proven) == price
    assert shoal.load_model(other.parent).claims[0]["epsilon"] == price.epsilon


@pytest.mark.slow
def test_a_crash_at_the_choice_leaves_no_chosen_model_that_states_the_price_of_a_run(tmp_path, monkeypatch):
    plan = make_plan(base_settings(None, BASE), grid_of(["per_round.noise_multiplier=2.0"]), private=True)
    plan = replace(plan, cells=plan.selection.cells, seeds=[1])
    shoal.run(plan.settings(0), runs=cell_folder(tmp_path, 0))
    (path,) = cell_folder(tmp_path, 0).glob("*/")
    alone = shoal.load_model(path).claims[0]["epsilon"]

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(outcome, "write_page", killed)
    with pytest.raises(KeyboardInterrupt):
        outcome_of(tmp_path, plan)
    assert read_run(path).selected
    assert shoal.load_model(path).claims[0]["epsilon"] > alone


@pytest.mark.slow
def test_a_cell_whose_result_was_edited_proves_nothing_on_the_sweeps_page(tmp_path):
    plan = played(tmp_path)
    (path,) = cell_folder(tmp_path, 0).glob("*/result.json")
    result = json.loads(path.read_text())
    result["proven"][0]["epsilon"] = 0.0123
    path.write_text(json.dumps(result))
    outcome = outcome_of(tmp_path, plan)
    assert all(claim["epsilon"] is None for claim in outcome.to_json()["cells"][0]["proven"])
    assert "0.0123" not in write_sweep_page(outcome).read_text()


@pytest.mark.slow
def test_what_is_charged_is_what_all_cells_cost(sweep):
    outcome = outcome_of(*sweep)
    assert outcome.to_json()["charged"][0]["epsilon"] == client(cost.all_together(*sweep)).epsilon


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"private": True, "expected_trials": 2.0}, {"charge": True}])
def test_what_a_sweep_proves_in_research_mode_says_on_what_it_rests(how, tmp_path):
    plan = played(tmp_path, **how)
    proven = [claim for claim in outcome_of(tmp_path, plan).proven if claim.epsilon is not None]
    assert proven
    assert all(RESEARCH in claim.because for claim in proven)


def test_what_a_private_selection_assumes_does_not_show_which_cells_were_tried(tmp_path):
    plan = make_plan(base_settings(None, BASE), grid_of(["data.partition=iid,shards"]), private=True)
    plan = replace(plan, cells=[{"data.partition": "iid"}], seeds=[1])
    shoal.run(plan.settings(0), runs=cell_folder(tmp_path, 0))
    proven = [claim for claim in cost.of_the_best(tmp_path, plan) if claim.epsilon is not None]
    assert proven
    assert all(DEALT in claim.because for claim in proven)
