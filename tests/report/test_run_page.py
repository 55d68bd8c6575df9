"""The page of a run shows what its folder says, can be made again at any time, and never costs a run."""

import json
import logging
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import shoal
from shoal.accounting.privacy_ledger import Ledger
from shoal.cli.ledger import app as ledger_app
from shoal.cli.run import figure_rows
from shoal.cli.runs import app as runs_app
from shoal.report import recorder
from shoal.report import run_page as page
from shoal.report.claim_rows import main_claim, proven_rows, shared_notes
from shoal.report.compare import write_comparison
from shoal.report.proof import CHECKPOINT, proof_of
from shoal.report.run_page import run_page, write_report
from shoal.report.run_reader import read_run
from shoal.report.series import build, figure, thinned
from support.pages import HOSTILE, long_run, metrics
from support.tiny import FEDAVG, PRIVATE, dataset, go_on, network, play, play_numbers, stopped_after

BUDGET = {"budget.epsilon": 20.0, "budget.delta": 1e-3}


class Text(HTMLParser):
    """What a reader sees, and the elements that are there."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.scripts, self._inside = [], [], [], None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        (self.scripts if self._inside in ("script", "style") else self.text).append(data)

    @property
    def said(self):
        return " ".join(" ".join(self.text).split())


def embedded(html):
    """The data that the page's script draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    return {plot["id"]: plot for plot in json.loads(found[1])["plots"]}


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    return play(tmp_path_factory.mktemp("runs"), PRIVATE | BUDGET | {"baseline": True})


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return play(tmp_path_factory.mktemp("runs"), FEDAVG)


# ---------------------------------------------------------------- what it shows


@pytest.mark.slow
def test_every_run_ends_with_a_page_that_shows_the_numbers_of_metrics_jsonl(private):
    plots = embedded((private.run / "report.html").read_text())
    lines = metrics(private.run)
    assert {"accuracy", "loss", "epsilon", "clip", "clipped", "snr", "scale", "bytes", "clients"} <= plots.keys()
    for plot, series, name in [
        ("accuracy", 0, "accuracy"),
        ("loss", 0, "loss"),
        ("clip", 0, "clip"),
        ("clip", 1, "noise"),
        ("clipped", 0, "clipped"),
        ("snr", 0, "snr"),
        ("scale", 0, "v_c"),
        ("scale", 1, "u_s"),
        ("bytes", 0, "bytes_sent"),
        ("clients", 0, "clients"),
    ]:
        assert plots[plot]["x"] == [line["round"] for line in lines]
        assert plots[plot]["series"][series]["values"] == [line[name] for line in lines], name


@pytest.mark.slow
def test_epsilon_is_drawn_for_each_unit_and_observer_with_budget_and_what_is_reported(private):
    plot = embedded((private.run / "report.html").read_text())["epsilon"]
    lines = metrics(private.run)
    for place, claim in enumerate(lines[-1]["proven"]):
        assert plot["series"][place]["values"] == [line["proven"][place]["epsilon"] for line in lines]
        assert {"client": "a client", "record": "a record"}[claim["unit"]] in plot["series"][place]["name"]
    assert [line["y"] for line in plot["lines"]] == [20.0]
    reported = [claim["epsilon"] for claim in private.proven if claim["epsilon"] is not None]
    assert [mark["y"] for mark in plot["marks"] if not mark["hollow"]] == reported
    published = [claim["epsilon"] for claim in private.published]
    assert [mark["y"] for mark in plot["marks"] if mark["hollow"]] == published
    assert all("not proven" in mark["label"] for mark in plot["marks"] if mark["hollow"])


def test_the_training_without_privacy_is_drawn_beside_the_run(private):
    plots = embedded((private.run / "report.html").read_text())
    kept = [json.loads(line) for line in (private.run / "baseline.jsonl").read_text().splitlines()]
    assert plots["accuracy"]["series"][1]["values"] == [line["accuracy"] for line in kept]
    assert kept[-1]["accuracy"] == private.baseline
    assert kept[-1]["round"] == private.rounds


def test_the_training_without_privacy_is_compared_by_every_figure_of_the_task(private):
    last = json.loads((private.run / "baseline.jsonl").read_text().splitlines()[-1])
    assert private.baseline_figures.keys() == private.figures.keys()
    assert "auroc" in private.figures
    assert {name: last[name] for name in private.figures} == private.baseline_figures
    said = Text((private.run / "report.html").read_text()).said
    assert f"no clip, no noise {private.baseline_figures['auroc']:.3f}" in said
    shown = [words for _, words in figure_rows(read_run(private.run).scores)]
    assert any(words.startswith("without clipping and noise") and "AUROC" in words for words in shown)


def test_a_run_that_kept_only_the_headline_of_its_baseline_still_has_a_page(private, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(private.run, run)
    kept = json.loads((run / "result.json").read_text())
    del kept["baseline_figures"], kept["baseline_diverged"]
    (run / "result.json").write_text(json.dumps(kept))
    said = Text(run_page(read_run(run))).said
    assert "no clip, no noise" in said
    assert f"no clip, no noise {private.baseline_figures['auroc']:.3f}" not in said


def test_a_regression_that_diverges_without_clipping_is_called_so_everywhere(tmp_path):
    """Its predictions are clipped to the range of the targets, so its figures are finite."""
    results = [play_numbers(tmp_path, PRIVATE | {"baseline": True, "local.lr": lr}) for lr in (0.05, 30.0)]
    assert [result.baseline_diverged for result in results] == [False, True]
    assert results[1].baseline is not None
    runs = [read_run(result.run) for result in results]
    pages = [Text((result.run / "report.html").read_text()).said for result in results]
    pages += [Text(write_comparison(tmp_path / "c.html", [run]).read_text()).said for run in runs]
    pages += [str(figure_rows(run.scores)) for run in runs]
    assert ["diverged" in page for page in pages] == [False, True] * 3


def test_a_run_of_which_no_update_is_finite_is_called_diverged(tmp_path):
    results = [play_numbers(tmp_path, PRIVATE | {"local.epochs": 9, "local.lr": lr}) for lr in (0.05, 1e12)]
    assert ["training diverged" in " ".join(result.warnings) for result in results] == [False, True]
    pages = [Text((result.run / "report.html").read_text()).said for result in results]
    assert ["training diverged" in page for page in pages] == [False, True]


@pytest.mark.slow
def test_the_headline_says_accuracy_and_what_is_proven_and_that_it_is_no_release(private):
    said = Text((private.run / "report.html").read_text()).said
    epsilon = next(claim["epsilon"] for claim in private.proven if claim["unit"] == "client")
    assert f"{100 * private.accuracy:.1f}%" in said
    assert f"ε {figure(epsilon)} δ 0.001 for a client (zero-out); observer: released models of a budget of 20" in said
    assert "Not for release" in said
    assert "published, not proven" in said
    assert "each update reaches the server before any noise is added" in said
    assert "The hash chain is intact" in said


@pytest.mark.slow
def test_delta_is_said_as_a_test_has_it(private):
    said = Text((private.run / "report.html").read_text()).said
    assert "has a true-positive rate of at most" in said
    assert "times the false-positive rate, plus 0.001." in said
    assert "but for a chance" not in said


@pytest.mark.slow
def test_every_claim_of_a_run_names_its_adjacency_and_that_the_number_of_clients_is_public(private):
    result = json.loads((private.run / "result.json").read_text())
    for claim in result["proven"]:
        assert claim["adjacency"] == {"client": "zero-out", "record": "replace-one"}[claim["unit"]]
        if claim["unit"] == "client" and claim["epsilon"] is not None:
            assert f"the number of clients, {result['clients']}, is public" in claim["because"]
    lines = [json.loads(line) for line in (private.run / "ledger.jsonl").read_text().splitlines()]
    assert {charge["adjacency"] for charge in lines[1]["charges"]} == {"zero-out", "replace-one"}


@pytest.mark.slow
def test_a_delta_above_one_over_the_number_of_clients_is_warned_of(tmp_path):
    settings = {"algorithm": "trusted-curator", "model": "linear", "rounds": 1, "data.clients": 20, "local.steps": 1}
    result = shoal.run(settings | {"budget.delta": 0.1}, runs=tmp_path)
    assert "one over the number of clients" in result.warnings[0]
    assert json.loads((result.run / "result.json").read_text())["warnings"] == result.warnings
    assert result.warnings[0] in Text((result.run / "report.html").read_text()).said
    assert shoal.run(settings | {"budget.delta": 1e-5}, runs=tmp_path).warnings == []


def test_a_run_that_proves_nothing_says_so_first(plain):
    said = Text((plain.run / "report.html").read_text()).said
    assert "nothing this run is not private" in said
    assert "Only the model is covered" not in said
    assert "epsilon" not in embedded((plain.run / "report.html").read_text())


@pytest.mark.slow
def test_the_confusion_counts_every_held_out_record_once_and_agrees_with_accuracy(private):
    kept = json.loads((private.run / "result.json").read_text())
    matrix = kept["confusion"]
    assert sum(map(sum, matrix)) == kept["test_rows"] == len(dataset().test_y)
    assert sum(matrix[k][k] for k in range(len(matrix))) / kept["test_rows"] == pytest.approx(private.accuracy)
    assert sum(kept["train_classes"]) == kept["train_rows"] == len(dataset().train_y)


@pytest.mark.slow
def test_signal_to_noise_halves_where_the_noise_doubles(tmp_path):
    once, twice = (
        metrics(play(tmp_path, PRIVATE | {"rounds": 1, "per_round.noise_multiplier": noise}).run)[0]
        for noise in (1.5, 3.0)
    )
    assert once["snr"] == pytest.approx(2 * twice["snr"])
    parameters = sum(tensor.numel() for tensor in network().parameters())
    assert 0 < once["snr"] <= once["clients"] * once["clip"] / (once["noise"] * parameters**0.5) * (1 + 1e-6)


@pytest.mark.slow
def test_every_plot_has_words_for_who_cannot_see_it(private):
    html = (private.run / "report.html").read_text()
    for plot in embedded(html).values():
        assert len(plot["about"]) > 20
        assert ("client" if plot["id"] == "spread" else "round") in plot["about"]


@pytest.mark.slow
def test_configuration_and_environment_are_there_whole(private):
    said = Text((private.run / "report.html").read_text()).said
    for key, value in read_run(private.run).flat_config().items():
        assert f"{key} {value if isinstance(value, str) else json.dumps(value)}" in said
    for line in (private.run / "environment.txt").read_text().splitlines():
        assert line.replace(": ", " ", 1) in said


# ---------------------------------------------------------------- it can be made again, at any time


def test_the_page_can_be_made_again_from_the_folder_alone(private):
    before = (private.run / "report.html").read_text()
    (private.run / "report.html").unlink()
    assert write_report(private.run).read_text() == before


@pytest.mark.slow
def test_a_run_that_goes_on_shows_its_rounds_and_asks_to_be_looked_at_again(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "EVERY", 0.0)
    monkeypatch.setattr(recorder, "SHARE", float("inf"))
    seen = []

    def look(line):
        (path,) = tmp_path.glob("*/report.html")
        html = path.read_text()
        seen.append(embedded(html)["accuracy"]["x"][-1])
        assert " data-live>" in html
        assert f"running: round {line['round']} of 6" in html

    result = play(tmp_path, PRIVATE, on_round=look)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert " data-live>" not in (result.run / "report.html").read_text()


@pytest.mark.slow
def test_pages_take_a_small_share_of_a_runs_time(tmp_path, monkeypatch):
    """By a clock that goes on by a quarter of a second whenever it is looked at."""
    written, clock = [], count()
    monkeypatch.setattr(page, "run_page", lambda run: written.append(len(run.metrics)) or "page")
    monkeypatch.setattr(recorder, "SHARE", 0.25)
    monkeypatch.setattr(recorder, "time", SimpleNamespace(monotonic=lambda: next(clock) / 4))
    play(tmp_path, FEDAVG | {"rounds": 40})
    assert written == [0, 7, 14, 21, 28, 35, 40]  # at the start, at the end, and one every two seconds


@pytest.mark.slow
def test_a_run_that_was_stopped_shows_what_it_has_and_goes_on_where_it_was(tmp_path):
    run = stopped_after(tmp_path, PRIVATE, 3)
    html = (run / "report.html").read_text()
    assert "stopped after round 3 of 6; it can be resumed" in html
    assert embedded(html)["accuracy"]["x"] == [1, 2, 3]
    go_on(run)
    html = (run / "report.html").read_text()
    assert "finished: 6 rounds" in html
    assert embedded(html)["accuracy"]["x"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_ledger_that_was_edited_shows(tmp_path):
    run = play(tmp_path, PRIVATE).run
    ledger = run / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"noise":1.5', '"noise":9.5', 1))
    said = Text(write_report(run).read_text()).said
    assert "Broken: line 2 was edited" in said
    assert {claim["because"] for claim in read_run(run).proven} == {"the ledger is broken"}
    ledger.unlink()
    assert "There is no ledger, so nothing is proven" in Text(write_report(run).read_text()).said
    assert all(claim["epsilon"] is None for claim in read_run(run).proven)


@pytest.mark.slow
def test_a_result_that_was_edited_shows(tmp_path):
    """What is proven stands in the ledger's last line too."""
    run = play(tmp_path, PRIVATE).run
    told = json.loads((run / "result.json").read_text())
    told["proven"][0]["epsilon"] = 0.1
    (run / "result.json").write_text(json.dumps(told))
    found = read_run(run)
    assert not found.ledger.whole
    assert all(claim["epsilon"] is None for claim in found.proven)
    html = write_report(run).read_text()
    assert "result.json and the ledger's closing line disagree on what is proven" in Text(html).said
    assert "proven for a client" not in html, "no full dot in the plot either"
    shown = CliRunner().invoke(ledger_app, ["verify", str(run)])
    assert shown.exit_code == 3
    assert "result.json and the ledger's closing line disagree" in shown.stdout


@pytest.mark.slow
def test_a_ledger_that_was_cut_off_shows_against_the_checkpoint(tmp_path):
    run = play(tmp_path, PRIVATE).run
    ledger = run / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    charged = max(place for place, line in enumerate(lines) if '"kind":"intent"' in line)
    ledger.write_text("".join(lines[: charged + 1]))  # the charges are all there, and the line at the end is not
    assert not read_run(run).ledger.whole
    (run / "result.json").unlink()
    assert read_run(run).ledger.whole
    assert CliRunner().invoke(ledger_app, ["verify", str(run)]).exit_code == 0
    ledger.write_text("".join(lines[:charged]))
    assert "was cut off after line" in Text(write_report(run).read_text()).said
    assert CliRunner().invoke(ledger_app, ["verify", str(run)]).exit_code == 3
    (run / CHECKPOINT).write_bytes(b"torn")  # then there is nothing to hold it against
    assert read_run(run).ledger.whole


def rewritten(path, change):
    """A JSON file, changed."""
    held = json.loads(path.read_text())
    change(held)
    path.write_text(json.dumps(held))


def require_nothing_printed(run):
    """Neither on the page, nor by `shoal runs`, nor in a comparison."""
    listed = json.loads(CliRunner().invoke(runs_app, ["list", "--json", "--runs", str(run.parent)]).stdout)["runs"]
    shown = json.loads(CliRunner().invoke(runs_app, ["show", "--json", str(run)]).stdout)
    claims = [*read_run(run).proven, *listed[0]["proven"], *shown["proven"]]
    assert len(claims) == 18
    assert all(claim["epsilon"] is None for claim in claims)
    html = write_report(run).read_text()
    assert "The hash chain is intact" not in html
    compared = write_comparison(run.parent / "all.html", [read_run(run, every_round=False)], "client", "release")
    assert "0.0123" not in html + compared.read_text()


@pytest.mark.slow
def test_a_private_selection_that_the_ledger_does_not_know_shows(tmp_path):
    run = play(tmp_path, PRIVATE).run

    def select(result):
        result["selected"] = {"proven": [claim | {"epsilon": 0.0123} for claim in result["proven"]]}

    rewritten(run / "result.json", select)
    require_nothing_printed(run)


@pytest.mark.slow
def test_a_result_whose_ledger_lost_its_last_line_shows(tmp_path):
    run = play(tmp_path, PRIVATE).run
    ledger = run / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    rewritten(run / "result.json", lambda result: result["proven"][0].update(epsilon=0.0123))
    require_nothing_printed(run)


@pytest.mark.slow
def test_what_is_proven_of_a_run_without_a_result_follows_from_what_was_charged(tmp_path):
    """Its metrics are nobody's proof."""
    whole = play(tmp_path, PRIVATE)
    ledger, lines = whole.run / "ledger.jsonl", metrics(whole.run)
    for claim in lines[-1]["proven"]:
        claim["epsilon"] = 0.0123
    (whole.run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (whole.run / "result.json").unlink()
    assert read_run(whole.run).proven == whole.proven
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    assert read_run(whole.run).proven == whole.proven
    listed = CliRunner().invoke(runs_app, ["list", "--json", "--runs", str(tmp_path)])
    assert json.loads(listed.stdout)["runs"][0]["proven"] == whole.proven


def test_a_round_that_was_charged_and_not_released_counts(tmp_path):
    run = stopped_after(tmp_path, PRIVATE, 3)
    before = read_run(run).epsilon("client", "release")
    with Ledger(run / "ledger.jsonl") as ledger:
        ledger.intend(4, ledger.charged[-1].charges)
    assert read_run(run).epsilon("client", "release") > before


@pytest.mark.slow
def test_a_run_that_was_charged_after_it_was_selected_proves_nothing(tmp_path):
    """What a selection proves is about the run as it was."""
    whole = play(tmp_path, PRIVATE)
    with Ledger(whole.run / "ledger.jsonl") as ledger:
        ledger.select(whole.proven)
    assert read_run(whole.run).proven == whole.proven
    (whole.run / "result.json").unlink()
    with Ledger(whole.run / "ledger.jsonl") as ledger:
        ledger.intend(7, ledger.charged[-1].charges)
    assert all("after a private selection" in claim["because"] for claim in read_run(whole.run).proven)


def test_epsilon_by_client_is_that_of_a_run_that_no_selection_chose(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.begin("run", "mine", "")
        ledger.end("rounds", [], [(10, 1.0), (20, 0.5)])
        assert proof_of(tmp_path, None).by_client
        ledger.select([])
        assert not proof_of(tmp_path, None).by_client


@pytest.mark.slow
def test_the_page_of_a_run_that_a_selection_chose_draws_no_epsilon_by_round(tmp_path):
    """It would be that of the run alone, also for observers of whom the selection proves nothing."""
    run = play(tmp_path, PRIVATE).run
    assert "epsilon" in embedded(run_page(read_run(run)))
    with Ledger(run / "ledger.jsonl") as ledger:
        ledger.select(read_run(run).proven)
    assert "epsilon" not in embedded(run_page(read_run(run)))


@pytest.mark.slow
def test_figures_that_are_no_numbers_and_lines_half_written_do_no_harm(tmp_path):
    run = play(tmp_path, PRIVATE).run
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | {"loss": float("nan"), "v_c": float("inf"), "clip": "four"})
    (run / "metrics.jsonl").write_text("\n".join(lines) + '\n{"round": 7, "accu')
    plots = embedded(write_report(run).read_text())
    assert plots["loss"]["x"] == [1, 2, 4, 5, 6]
    assert plots["scale"]["series"][0]["values"][2] is None
    assert plots["accuracy"]["x"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_metrics_without_an_end_are_not_read_for_ever(tmp_path):
    run = play(tmp_path, FEDAVG).run
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/dev/zero")
    assert list(embedded(write_report(run).read_text())) == ["spread"]  # which is the result's


# ---------------------------------------------------------------- it never costs a run


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["run_page", "write_page"])
def test_a_page_that_fails_is_told_of_once_and_the_run_is_whole(tmp_path, monkeypatch, broken):
    def fail(*_):
        raise RuntimeError("no page today")

    monkeypatch.setattr(recorder, "EVERY", 0.0)
    monkeypatch.setattr(page, broken, fail)
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("shoal"), "warning", lambda words, *rest: lines.append(words % rest))
    result = play(tmp_path, PRIVATE)
    assert result.rounds == 6
    assert (result.run / "model.safetensors").is_file()
    assert read_run(result.run).ledger.whole
    told = [line for line in lines if "page of" in line]
    assert len(told) == 1
    assert "no page today" in told[0]
    assert "the run goes on" in told[0]


# ---------------------------------------------------------------- it is safe and small


@pytest.mark.slow
def test_names_and_labels_cannot_become_markup(tmp_path):
    rows = [([[float(k), 1.0], [0.0, float(k)]], [0, 1]) for k in range(1, 9)]
    clients = [(x, y) for x, y in rows]
    data = shoal.from_clients(clients, name=HOSTILE, classes=(HOSTILE, "b<i>"), test_fraction=0.25)
    result = shoal.run(FEDAVG, data=data, model="linear", runs=tmp_path)
    (result.run / "environment.txt").write_text(f"python: {HOSTILE}\n")
    html = write_report(result.run).read_text()
    seen = Text(html)
    assert HOSTILE in "".join(seen.text)
    assert "alert(1)" not in "".join(seen.scripts).replace("\\u003cscript\\u003ealert(1)", "")
    assert [tag for tag, _ in seen.tags].count("script") == 2
    assert "img" not in {tag for tag, _ in seen.tags}
    assert not any(name.startswith("on") for _, attrs in seen.tags for name in attrs)


@pytest.mark.slow
def test_nothing_is_asked_of_the_network(private):
    seen = Text((private.run / "report.html").read_text())
    for tag, attrs in seen.tags:
        assert not {"src", "srcset", "action"} & attrs.keys(), tag
        assert attrs.get("href", "data:").startswith("data:")
    policy = next(attrs["content"] for _, attrs in seen.tags if "http-equiv" in attrs)
    assert "default-src 'none'" in policy
    assert "unsafe-inline'; script" not in policy.split("script-src")[1]


@pytest.mark.slow
def test_a_page_of_15000_rounds_is_under_3_megabytes_and_keeps_the_extremes(tmp_path):
    run = play(tmp_path, PRIVATE | {"baseline": True}).run
    long_run(run, 15_000)
    path = write_report(run)
    assert path.stat().st_size < 3e6
    plot = embedded(path.read_text())["accuracy"]
    values = {line["round"]: line["accuracy"] for line in metrics(run)}
    kept = dict(zip(plot["x"], plot["series"][0]["values"], strict=True))
    assert all(values[round] == value for round, value in kept.items() if value is not None)
    assert {1, 15_000, min(values, key=values.get), max(values, key=values.get)} <= kept.keys()
    assert plot["of"] == 15_000
    assert 300 < len(kept) < 1700


def test_thinning_keeps_every_round_of_a_short_run_and_a_lone_spike_of_a_long_one():
    flat = dict.fromkeys(range(1, 5001), 0.5)
    assert thinned(list(range(1, 101)), [flat]) == list(range(1, 101))
    assert 3333 in thinned(list(flat), [flat | {3333: 0.9}])
    assert 3333 in thinned(list(flat), [flat, flat | {3333: 0.1}])


def test_a_plot_with_nothing_in_it_is_not_drawn():
    assert build("empty", "Empty", [("none", {}, 1, False)]) is None


@pytest.mark.parametrize(
    ("epsilon", "said"),
    [
        (3.99998, "4.00"),
        (4.0, "4.00"),
        (9.8211, "9.83"),
        (0.99992, "1.00"),
        (0.01234, "0.0124"),
        (123.4, "124"),
        (0, "0"),
    ],
)
def test_an_epsilon_is_never_rounded_down(epsilon, said):
    assert figure(epsilon) == said


def test_the_page_of_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(shoal.ShoalError, match="no config"):
        run_page(read_run(tmp_path))


def claim(unit, observer, epsilon=None, because=None):
    return {
        "unit": unit,
        "observer": observer,
        "epsilon": epsilon,
        "delta": 1e-5,
        "accountant": "pld",
        "because": because,
    }


def test_observers_who_learn_the_same_share_a_row_and_a_bound_in_name_only_says_so():
    rows = proven_rows(
        [
            claim("client", "release", 4.0),
            claim("client", "server", 5470.0),
            claim("client", "client-process", because="no noise"),
            *(claim("record", observer, 5.2) for observer in ("release", "server", "client-process")),
        ]
    )
    assert [(row["unit"], row["observer"], row["epsilon"], row["tone"]) for row in rows] == [
        ("a client", "released models", "4.00", "yes"),
        ("a client", "server", "5.5e3", "void"),
        ("a record", "all", "5.20", "yes"),
        ("a client", "client process", "", "no"),
    ]
    assert rows[3]["note"] == "no noise"


def test_what_is_not_proven_names_simulated_clients_too():
    simulated = claim("client", "server", because="no noise") | {"simulated": True}
    rows = proven_rows([simulated, claim("record", "server", because="no noise")])
    assert [row["unit"] for row in rows] == ["a simulated client and a record"]


def test_notes_that_all_bounds_share_are_printed_once():
    rows = proven_rows([claim("client", "release", 4.0), claim("record", "release", 5.0)])
    both = [row | {"note": f"PLD; seed secret{more}"} for row, more in zip(rows, ("", "; K public"), strict=True)]
    rest, shared = shared_notes(both)
    assert shared == "PLD; seed secret"
    assert [row["note"] for row in rest] == ["", "K public"]
    assert shared_notes(both[:1]) == (both[:1], ""), "one bound keeps its own"


@pytest.mark.slow
def test_the_headline_is_never_a_bound_in_name_only_where_there_is_a_better_one(private):
    run = read_run(private.run)
    loose = [claim("client", "release", 5470.0), claim("record", "release", 2.0)]
    config = run.config | {"budget": {"delta": 1e-5, "unit": "client", "observer": "release"}}
    assert main_claim(replace(run, config=config, proof=replace(run.proof, proven=loose)))["unit"] == "record"
    tight = [claim("client", "release", 8.0), claim("record", "release", 2.0)]
    assert main_claim(replace(run, config=config, proof=replace(run.proof, proven=tight)))["unit"] == "client"


def test_a_stopped_run_is_shown_with_what_it_has_spent(tmp_path):
    run = stopped_after(tmp_path, PRIVATE, 3)
    shown = CliRunner().invoke(runs_app, ["show", str(run)])
    assert shown.exit_code == 0, shown.output
    said = " ".join(shown.stdout.split())
    assert "a client (zero-out)" in said
    assert "stopped; to continue: shoal run --resume" in said
    listed = CliRunner().invoke(runs_app, ["list", "--runs", str(run.parent)]).stdout
    assert "(client)" in listed, "the unit that the epsilon is for"


def test_a_share_of_delta_that_is_too_small_to_matter_is_left_out_of_tables():
    faint, strong = (claim("client", "release", 4.0) | {"sampler_delta": each} for each in (1e-15, 1e-9))
    assert "noise sampler" not in proven_rows([faint])[0]["note"]
    assert "1e-9 of delta is for the noise sampler" in proven_rows([strong])[0]["note"]


def test_epsilon_by_client_is_shown_only_where_clients_differ():
    rows = [{"client": name, "records": 9, "epsilon": value} for name, value in (("a", 4.0), ("b", 4.0))]
    assert page._by_client({"clients": rows}) is None
    other = page._by_client({"clients": [*rows, {"client": "c", "records": 3, "epsilon": 2.0}]})
    assert [row["share"] for row in other["rows"]] == [1.0, 1.0, 0.5]


@pytest.mark.slow
def test_a_run_that_had_ended_says_what_it_said_then(tmp_path, monkeypatch):
    """Another accountant's last digits must not make its ledger look broken."""
    run = play(tmp_path, PRIVATE).run
    before = json.loads((run / "result.json").read_text())["proven"]
    monkeypatch.setattr("shoal.training.budget.Spending.proven", lambda _self: [])
    go_on(run)
    assert json.loads((run / "result.json").read_text())["proven"] == before
    assert read_run(run).ledger.whole


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [(4, 4), (4.0000000001, 4.001), (0.1234, 0.1234), (9.9996, 10), (1.00000000000001e-7, 1.001e-7)],
)
def test_the_page_rounds_an_epsilon_up_however_little_it_is_above(epsilon, shown):
    script = (Path(page.__file__).parent / "page.js").read_text()
    function = re.search(r"function roundedUp.*?\n  }\n", script, re.DOTALL).group()
    done = subprocess.run(
        ["node", "-e", f"{function}; console.log(roundedUp({epsilon!r}, 4))"], capture_output=True, check=True
    )
    assert float(done.stdout) == shown
