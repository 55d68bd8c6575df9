"""How good a model is, is said by its task's figure, beside a constant answer's, and by client."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shoal.cli.run import Watch, show
from shoal.cli.runs import app as runs_app
from shoal.report import recorder
from shoal.report.plots import MOST_NAMED, spread_of
from shoal.report.run_page import run_page, write_report
from shoal.report.run_reader import read_run
from shoal.report.scores import Client, Scores, in_percent
from shoal.report.series import MOST_POINTS
from support.pages import metrics
from support.tiny import FEDAVG, PRIVATE, play, play_numbers, play_unbalanced, stopped_after

ACCURACY = Scores("accuracy", True, {"accuracy": 0.869, "auroc": 0.78}, {"accuracy": 0.871}, "always the mode")
RMSE = Scores("rmse", False, {"rmse": 0.9, "mae": 0.7}, {"rmse": 1.2}, "always the mean")


@pytest.fixture(scope="module")
def unlearnt(tmp_path_factory):
    return play_unbalanced(tmp_path_factory.mktemp("runs"), FEDAVG)


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    return play_numbers(tmp_path_factory.mktemp("runs"), FEDAVG | {"rounds": 20, "local.lr": 0.1})


def shown(result):
    console = Console(width=300, file=io.StringIO())
    show(result, console)
    return " ".join(console.file.getvalue().split())


# ---------------------------------------------------------------- what is said of a model


@pytest.mark.parametrize(
    ("scores", "learnt"),
    [
        (ACCURACY, False),
        (replace(ACCURACY, figures={"accuracy": 0.871}), False),
        (replace(ACCURACY, figures={"accuracy": 0.872}), True),
        (replace(ACCURACY, figures={"accuracy": None}), False),
        (replace(ACCURACY, trivial={}), True),
        (RMSE, True),
        (replace(RMSE, figures={"rmse": 1.2}), False),
        (replace(RMSE, figures={"rmse": 1.3}), False),
    ],
)
def test_a_model_has_learnt_something_if_it_beats_the_constant_answer_in_its_figures_direction(scores, learnt):
    assert scores.learnt is learnt
    assert bool(scores.verdict()) is not learnt


def test_the_verdict_names_the_answer_and_both_figures():
    said = "This model is no better than a constant answer (always the mode): accuracy 0.869 against 0.871. "
    assert ACCURACY.verdict() == said + "Its AUROC is 0.780; a constant has 0.5."
    assert "accuracy 86.9% against 87.1%" in ACCURACY.verdict(ACCURACY.shown)
    assert "accuracy not finite against 0.871" in replace(ACCURACY, figures={"accuracy": None}).verdict()


def test_more_is_better_once_the_direction_is_counted():
    assert replace(RMSE, figures={"rmse": 0.5}).height > RMSE.height
    assert replace(ACCURACY, figures={"accuracy": 0.9}).height > ACCURACY.height
    assert replace(RMSE, figures={"rmse": None}).height < replace(RMSE, figures={"rmse": 1e300}).height


def test_a_result_from_before_there_were_tasks_has_its_accuracy():
    scores = Scores.of({"accuracy": 0.75, "rounds": 3})
    assert (scores.headline, scores.score, scores.learnt, scores.clients) == ("accuracy", 0.75, True, [])


def test_a_run_without_a_result_has_the_figure_of_its_last_evaluation():
    lines = [{"round": 1, "rmse": 2.0, "loss": 0.3, "clients": 4}, {"round": 2, "clients": 4, "clip": 1.0}]
    scores = Scores.so_far(lines)
    assert (scores.headline, scores.score, scores.higher_is_better, scores.learnt) == ("rmse", 2.0, False, True)
    assert Scores.so_far([]).score is None


def test_clients_are_ordered_from_the_worst_and_of_equals_the_one_with_more_records_first():
    rows = [("a", 5, 0.5), ("b", 9, 0.5), ("c", 2, 0.9), ("d", 3, None)]
    by_client = [{"client": name, "records": count, "figures": {"rmse": value}} for name, count, value in rows]
    result = {"headline": "rmse", "figures": {"rmse": 1.0}, "figures_by_client": by_client}
    assert [each.name for each in Scores.of(result | {"higher_is_better": False}).clients] == ["c", "b", "a"]
    assert [each.name for each in Scores.of(result | {"higher_is_better": True}).clients] == ["b", "a", "c"]


@pytest.mark.parametrize("count", [1, 4, MOST_NAMED, MOST_NAMED + 1, 3000])
def test_the_plot_of_any_number_of_clients_is_small_and_has_the_worst_and_the_best(count):
    clients = [Client(f"c{place}", place + 1, place / 3000) for place in range(count)]
    plot = spread_of(replace(ACCURACY, clients=clients))
    assert plot.names[:MOST_NAMED] == [each.name for each in clients[:MOST_NAMED]]
    assert plot.names[-1] == clients[-1].name
    assert plot.x == [int(name[1:]) + 1 for name in plot.names]
    assert len(plot.x) == len(plot.records) == len(plot.series[0].values) <= min(count, MOST_POINTS + MOST_NAMED + 1)
    assert "c0 0.0% (1)" in plot.note
    assert plot.of == count


def test_no_plot_where_nobody_knows_whose_records_are_held_out():
    assert spread_of(ACCURACY) is None


def test_shares_are_percentages_and_the_rest_are_numbers():
    assert [in_percent("accuracy", 0.5), in_percent("auroc", 0.5), in_percent("rmse", 12345.6)] == [
        "50.0%",
        "0.500",
        "1.235e4",
    ]


# ---------------------------------------------------------------- on the terminal


def test_the_terminal_says_that_nothing_was_learnt(unlearnt):
    said = shown(unlearnt)
    share = f"{unlearnt.accuracy:.4g}"
    assert f"accuracy {share} on held-out data (always the most frequent class: {share})" in said
    assert "balanced accuracy 0.5, AUROC 0.5, average precision" in said
    assert "warning This model is no better than a constant answer" in said


@pytest.mark.slow
def test_the_terminal_shows_a_regression_and_its_worst_client(regression):
    said = shown(regression)
    assert f"RMSE {regression.score:.4g} on held-out data (always the mean: {regression.trivial['rmse']:.4g})" in said
    assert f"MAE {regression.figures['mae']:.4g}, R² {regression.figures['r2']:.4g}" in said
    assert "of 12; the worst: ward-3 " in said
    assert "no better" not in said


def test_the_progress_bar_shows_the_figure_of_the_task(tmp_path):
    watch = Watch(Console(file=io.StringIO()))
    try:
        result = play_numbers(tmp_path, FEDAVG, on_start=watch.start, on_round=watch.round)
    finally:
        watch.end()
    (task,) = watch.progress.tasks
    assert task.fields["figure"] == "RMSE"
    assert float(task.fields["score"]) == pytest.approx(result.score, rel=1e-3)


@pytest.mark.slow
def test_runs_are_listed_with_the_figure_of_their_task(unlearnt, regression):
    listed = CliRunner().invoke(runs_app, ["list", "--runs", str(regression.run.parent)]).stdout
    assert f"RMSE {regression.score:.4g}" in listed
    listed = CliRunner().invoke(runs_app, ["list", "--runs", str(unlearnt.run.parent)]).stdout
    assert f"accuracy {unlearnt.accuracy:.4g} (constant: {unlearnt.accuracy:.4g})" in listed
    told = json.loads(CliRunner().invoke(runs_app, ["show", "--json", str(regression.run)]).stdout)
    assert (told["headline"], told["score"], told["learnt"]) == ("rmse", regression.score, True)
    assert told["accuracy"] is None
    said = " ".join(CliRunner().invoke(runs_app, ["show", str(unlearnt.run)]).stdout.split())
    assert "no better than a constant answer" in said


# ---------------------------------------------------------------- on the page


def test_the_page_says_that_nothing_was_learnt(unlearnt):
    html = (unlearnt.run / "report.html").read_text()
    assert '<p class="warn nothing">This model is no better than a constant answer' in html
    assert f"<b>{100 * unlearnt.accuracy:.1f}%</b> always the most frequent class" in html
    assert '<div class="tile bad">\n      <h2>Accuracy</h2>' in html


@pytest.mark.slow
def test_the_page_of_a_regression_has_its_figures_and_no_confusion(regression):
    html = (regression.run / "report.html").read_text()
    assert "<h2>RMSE</h2>" in html
    assert f"<b>{regression.trivial['rmse']:.4g}</b> always the mean" in html
    assert 'class="warn nothing"' not in html
    assert "Errors by class" not in html
    for name in ("RMSE ↓", "MAE ↓", "R²"):
        assert f"<dt>{name}</dt>" in html


@pytest.mark.slow
def test_the_page_draws_the_figure_over_rounds_and_by_client(regression):
    data = json.loads((regression.run / "report.html").read_text().split('id="data">')[1].split("</script>")[0])
    plots = {plot["id"]: plot for plot in data["plots"]}
    assert plots["rmse"]["series"][0]["values"] == [line["rmse"] for line in metrics(regression.run)]
    assert plots["rmse"]["lines"] == [{"y": regression.trivial["rmse"], "label": "always the mean"}]
    assert plots["rmse"]["note"] == "Lower is better."
    assert plots["spread"]["names"][0] == "ward-3"
    by_client = {row["client"]: row["figures"]["rmse"] for row in regression.figures_by_client}
    found = dict(zip(plots["spread"]["names"], plots["spread"]["series"][0]["values"], strict=True))
    assert found == by_client


def test_a_regression_that_goes_on_shows_its_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "EVERY", 0.0)
    monkeypatch.setattr(recorder, "SHARE", float("inf"))
    seen = []

    def look(line):
        (path,) = tmp_path.glob("*/report.html")
        html = path.read_text()
        assert "<h2>RMSE</h2>" in html
        assert f'id="score-now">{line["rmse"]:.4g}<' in html
        seen.append(line["round"])

    play_numbers(tmp_path, FEDAVG, on_round=look)
    assert seen == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_result_without_the_new_keys_is_still_shown(tmp_path):
    run = play(tmp_path, PRIVATE).run
    new = {"task", "headline", "higher_is_better", "trivial_answer", "figures", "trivial", "figures_by_client"}
    held = json.loads((run / "result.json").read_text())
    old = {key: value for key, value in held.items() if key not in new | {"score", "learnt"}}
    (run / "result.json").write_text(json.dumps(old))
    html = write_report(run).read_text()
    assert f'id="score-now">{100 * held["accuracy"]:.1f}%<' in html
    assert "always the most frequent" not in html
    assert "Errors by class" in html


def test_a_page_before_the_first_evaluation_claims_no_figure(tmp_path):
    run = replace(read_run(stopped_after(tmp_path, PRIVATE, 1)), metrics=[], state="running")
    html = run_page(run)
    assert "<h2>Score</h2>" in html
    assert 'id="score-now">–<' in html
