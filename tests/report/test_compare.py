"""Several runs on one page: one point a run, links to their own pages, and nothing that could be markup."""

import json
import re
from dataclasses import replace

import pytest

import shoal
from shoal.report.compare import differing, write_comparison
from shoal.report.run_reader import read_run
from support.tiny import FEDAVG, PRIVATE, play, play_numbers, play_unbalanced


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    configs = [PRIVATE, PRIVATE | {"per_round.noise_multiplier": 3.0}, FEDAVG]
    return [read_run(play(folder, config).run) for config in configs]


def plots_of(path):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.S)
    return {plot["id"]: plot for plot in json.loads(found[1])["plots"]}


@pytest.mark.slow
def test_each_run_is_a_point_of_its_accuracy_and_proven_epsilon(runs, tmp_path):
    plots = plots_of(write_comparison(tmp_path / "c.html", runs))
    points = plots["frontier"]["points"]
    assert [(point["x"], point["y"]) for point in points] == [
        (run.epsilon("client", "release"), run.scores.score) for run in runs
    ]
    assert points[2]["x"] is None
    assert points[0]["x"] > points[1]["x"] > 0
    assert [series["values"][-1] for series in plots["over-rounds"]["series"]] == [run.scores.score for run in runs]


@pytest.mark.slow
def test_the_epsilon_of_a_record_can_be_asked_for(runs, tmp_path):
    points = plots_of(write_comparison(tmp_path / "c.html", runs, "record", "release"))["frontier"]["points"]
    assert points[0]["x"] == runs[0].epsilon("record", "release") != runs[0].epsilon("client", "release")


@pytest.mark.slow
def test_runs_that_prove_nothing_for_clients_are_compared_by_records(tmp_path):
    records = {"algorithm": "dp-sgd", "per_step.noise_multiplier": 2.0, "per_record.clip_norm": 1.0}
    run = read_run(play(tmp_path, {key: value for key, value in FEDAVG.items() if key != "algorithm"} | records).run)
    assert run.epsilon("client", "release") is None
    points = plots_of(write_comparison(tmp_path / "c.html", [run, run]))["frontier"]["points"]
    assert points[0]["x"] == run.epsilon("record", "release") > 0


@pytest.mark.slow
def test_the_table_links_to_each_runs_own_page_wherever_the_comparison_lies(runs, tmp_path):
    path = write_comparison(tmp_path / "c.html", runs)
    for run, link in zip(runs, re.findall(r'<a href="([^"]+)"', path.read_text()), strict=True):
        assert (tmp_path / link).resolve() == (run.path / "report.html").resolve()


@pytest.mark.slow
def test_keys_that_differ_are_columns_and_those_that_do_not_are_none(runs):
    assert differing(runs[:2]) == ["per_round.noise_multiplier"]
    assert "records.batch" not in differing(runs)


@pytest.mark.slow
def test_a_setting_too_long_for_a_column_is_only_named(runs, tmp_path):
    columns = {f"c{place}": {"kind": "number", "range": [0, 1]} for place in range(9)}
    other = replace(runs[0], config=runs[0].config | {"schema": {"columns": columns, "label": "died"}})
    page = write_comparison(tmp_path / "c.html", [runs[0], other]).read_text()
    assert "These differ too, without a column: schema.columns." in page
    assert "These settings differ: schema.label (–, died)." in page
    assert "c8" not in page


@pytest.mark.slow
def test_runs_of_different_figures_share_no_axis_and_the_page_says_so(runs, tmp_path):
    regressions = [read_run(play_numbers(tmp_path, FEDAVG | {"local.lr": rate}).run) for rate in (0.1, 0.05)]
    path = write_comparison(tmp_path / "c.html", [*runs, *regressions])
    plots = plots_of(path)
    assert [plot["figure"] for plot in plots.values() if "points" in plot] == ["accuracy", "RMSE"]
    assert [point["y"] for point in plots["frontier-1"]["points"]] == [run.scores.score for run in regressions]
    assert (plots["frontier"]["higher"], plots["frontier-1"]["higher"]) == (True, False)
    assert plots["frontier-1"]["lines"][0]["label"] == "always the mean"
    assert plots["over-rounds-1"]["series"][0]["values"][-1] == regressions[0].scores.score
    assert "Different headline figures (accuracy, RMSE) are not put on one axis." in path.read_text()
    assert "not put on one axis" not in write_comparison(path, runs).read_text()


@pytest.mark.slow
def test_a_run_that_learnt_nothing_is_marked(runs, tmp_path):
    poor = read_run(play_unbalanced(tmp_path, FEDAVG).run)
    path = write_comparison(tmp_path / "c.html", [*runs, poor])
    plot = plots_of(path)["frontier"]
    assert [point["learnt"] for point in plot["points"]] == [run.scores.learnt for run in runs] + [False]
    assert "hollow points are no better than a constant answer" in plot["note"]
    assert f"{100 * poor.scores.score:.1f}%, not beaten" in path.read_text()


def test_nothing_to_compare_is_an_error(tmp_path):
    with pytest.raises(shoal.ShoalError, match="at least one"):
        write_comparison(tmp_path / "c.html", [])
