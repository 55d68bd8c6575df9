"""The best cells of a sweep are those with the best headline figure, and none that learnt nothing."""

from pathlib import Path

import pytest
from rich.console import Console

from shoal.cli.sweep import show_outcome
from shoal.report.compare import Entry
from shoal.report.run_reader import Run
from shoal.sweep.outcome import Outcome, best_of, frontier, write_sweep_page
from shoal.sweep.plan import base_settings, grid_of, make_plan

PLAN = make_plan(base_settings(None, []), grid_of(["rounds=1,2,3"]))


def cell(name, epsilon, score, trivial=0.5, headline="accuracy", state="finished"):
    """A cell that was played; of accuracy more is better, of RMSE less."""
    claim = {"unit": "client", "observer": "release", "epsilon": epsilon, "delta": 1e-5}
    result = {"rounds": 1, "headline": headline, "higher_is_better": headline == "accuracy"}
    result |= {"figures": {headline: score}, "trivial": {headline: trivial}, "trivial_answer": "always the same"}
    metrics = [{"round": 1, headline: score, "loss": 1.0, "proven": [claim]}]
    run = Run(Path(name), state, {"algorithm": "fedavg", "rounds": 1}, metrics, result=result)
    return Entry(name, run, {"rounds": 1})


def outcome(folder, *cells):
    return Outcome(folder, PLAN, list(cells), best_of(cells))


CASES = {
    "more": ([cell("a", 1.0, 0.6), cell("b", 2.0, 0.7), cell("c", 3.0, 0.65)], ["a", "b"], "b"),
    "less": (
        [
            cell("a", 1.0, 0.4, headline="rmse"),
            cell("b", 2.0, 0.3, headline="rmse"),
            cell("c", 3.0, 0.35, headline="rmse"),
        ],
        ["a", "b"],
        "b",
    ),
    "a constant answer is not beaten": ([cell("a", 0.1, 0.5), cell("b", 2.0, 0.7)], ["b"], "b"),
    "nobody learnt": ([cell("a", 0.1, 0.4), cell("b", 2.0, 0.5)], [], "b"),
    "a harder constant answer": ([cell("a", 1.0, 0.8, trivial=0.9), cell("b", 1.0, 0.7)], ["b"], "b"),
    "two figures": ([cell("a", 1.0, 0.6), cell("b", 2.0, 0.3, headline="rmse")], ["a", "b"], None),
    "diverged": ([cell("a", 1.0, None), cell("b", 2.0, 0.6)], ["b"], "b"),
    "not finished": ([cell("a", 1.0, 0.6), cell("b", 2.0, 0.9, state="stopped")], ["a", "b"], "a"),
}


@pytest.mark.parametrize(("cells", "kept", "best"), CASES.values(), ids=CASES)
def test_the_frontier_and_the_best_go_by_the_headline_figure(cells, kept, best, tmp_path):
    found = outcome(tmp_path, *cells)
    assert [entry.name for entry in frontier(found)] == kept
    assert found.to_json()["best"] == best


def test_every_cell_says_its_figure_and_whether_it_learnt(tmp_path):
    cells = outcome(tmp_path, cell("a", 1.0, 0.4), cell("b", 2.0, 0.3, headline="rmse")).to_json()["cells"]
    assert [(each["headline"], each["score"], each["learnt"]) for each in cells] == [
        ("accuracy", 0.4, False),
        ("rmse", 0.3, True),
    ]
    assert [each["accuracy"] for each in cells] == [0.4, None]


def test_the_terminal_and_the_page_mark_a_cell_that_learnt_nothing(tmp_path, capsys):
    found = outcome(tmp_path, cell("a", 0.1, 0.4), cell("b", 2.0, 0.7))
    show_outcome(found, Console(width=200))
    lines = capsys.readouterr().out.splitlines()
    assert "no better than a constant answer" in next(line for line in lines if line.startswith("a "))
    assert "on the frontier" in next(line for line in lines if line.startswith("b "))
    assert "40.0%</td>" in (page := write_sweep_page(found).read_text())
    assert "50.0%, not beaten" in page


def test_cells_of_two_figures_have_a_column_each(tmp_path, capsys):
    show_outcome(outcome(tmp_path, cell("a", 1.0, 0.6), cell("b", 2.0, 0.3, headline="rmse")), Console(width=200))
    head = capsys.readouterr().out.splitlines()[0].split()
    assert head[:4] == ["cell", "rounds", "accuracy", "RMSE"]


def test_the_terminal_shows_the_epsilon_of_the_budgets_unit(tmp_path, capsys):
    settings = base_settings(None, ["algorithm=dp-sgd", "budget.unit=record", "budget.epsilon=3"])
    plan = make_plan(settings, grid_of(["rounds=1,2"]))
    played = cell("a", 999.0, 0.7)
    played.run.metrics[0]["proven"].append({"unit": "record", "observer": "release", "epsilon": 2.5, "delta": 1e-5})
    show_outcome(Outcome(tmp_path, plan, [played], 0), Console(width=200))
    head, row = capsys.readouterr().out.splitlines()[:2]
    assert "proven epsilon, a record" in head
    assert "2.5" in row
    assert "999" not in row
