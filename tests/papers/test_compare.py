"""`shoal papers compare`: three numbers a figure, what is proven, and lights that say no more than was measured."""

import csv
import io
import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.papers import table, tables
from shoal.papers.comparing import PROVEN, compare, lights
from shoal.papers.frontier import BEYOND, Series, _points
from shoal.papers.pages import to_block
from shoal.papers.render import cells, curves, summary, to_csv, to_html, to_markdown
from shoal.papers.running import plan, read_lines
from shoal.papers.table import Cell, Claim, Table
from shoal.papers.work import Run
from support.paths import ROOT

RESULTS = ROOT / "docs" / "results"
ROW, COLUMN, PUBLISHED = "(1, 20)", "PFL 2.93 CNN+RL", 0.9386


def one_cell(*changes, claim=None):
    """The first private cell of pfl-table2, as printed and with named changes."""
    works = [Run({"rounds": number}) for number in range(1 + len(changes))]
    found = [
        Cell(ROW, COLUMN, work, change=word, claim=claim) for work, word in zip(works, ("", *changes), strict=True)
    ]
    return Table("pfl-table2", (), 0, tuple(found))


def line(found, place=0, seed=0, accuracy=PUBLISHED, **more):
    return {"key": found.cells[place].work.key(False), "seed": seed, "accuracy": accuracy, "rounds": 1} | more


def light(found, lines, place=0):
    return compare(found, lines)[place].light


def test_within_two_points_is_reproduced_more_is_said_to_be_more_and_less_is_not():
    found = one_cell()
    assert light(found, [line(found, accuracy=PUBLISHED - 0.02)]) == "reproduced"
    assert light(found, [line(found, accuracy=PUBLISHED + 0.02)]) == "reproduced"
    assert light(found, [line(found, accuracy=PUBLISHED + 0.021)]) == "exceeded"
    assert light(found, [line(found, accuracy=PUBLISHED - 0.021)]) == "not reproduced"
    assert light(found, []) == "not run"


def test_a_cell_that_was_not_run_says_why_nobody_needs_it_and_says_nothing_once_it_was():
    found = one_cell()
    found = replace(found, cells=(replace(found.cells[0], unneeded="another row shows the same"),))
    rows = compare(found, [])
    assert cells(rows[0])[-1] == "not run: another row shows the same"
    assert "⚪ Not run, 1 figure: (1, 20) 1. Why: another row shows the same." in to_block(found, rows)
    assert "another row" not in to_block(found, compare(found, [line(found)]))


def test_mean_spread_and_difference_are_over_seeds_and_the_newest_line_of_a_seed_counts():
    found = one_cell()
    lines = [line(found, accuracy=0.1), line(found, accuracy=0.91), line(found, seed=1, accuracy=0.93)]
    (row,) = compare(found, lines)
    assert row.ours == pytest.approx(0.92)
    assert row.spread == (0.91, 0.93)
    assert row.difference == pytest.approx(0.92 - PUBLISHED)
    assert cells(row)[2:7] == ["0.9386", "0.9200 (0.9100 to 0.9300)", "2", "", "-0.0186"]
    (row,) = compare(found, [line(found, accuracy=0.91), line(found, seed=1, accuracy=0.91 + 1e-9)])
    assert cells(row)[3] == "0.9100"  # two machines' last digits are no spread


def test_a_figure_says_which_device_made_it():
    """The same seed draws other noise on a GPU."""
    found = one_cell()
    lines = [line(found, seed=seed, device=device) for seed, device in enumerate(("cuda", "cpu", "cuda"))]
    (alone,) = compare(found, lines[:1])
    (mixed,) = compare(found, lines)
    assert (alone.device, mixed.device) == ("cuda", "1 cpu, 2 cuda")
    for text in (
        to_markdown(found, [mixed]),
        to_block(found, [mixed]),
        to_html(found, [mixed], lines),
        to_csv([mixed]),
    ):
        assert "1 cpu, 2 cuda" in text


def test_more_seeds_are_added_to_those_that_are_there():
    found = one_cell()
    there = [line(found, seed=seed) for seed in range(3)]
    assert [seed for _, seed in plan(found.cells, 5, False, there)] == [3, 4]


def test_a_figure_that_only_a_change_reaches_names_the_change():
    found = one_cell("lr .1", "lr .2")
    lines = [line(found, 0, accuracy=0.5), line(found, 1, accuracy=0.6), line(found, 2)]
    rows = compare(found, lines)
    assert (rows[0].light, rows[0].note) == ("reproduced with", "lr .2")
    assert lights(rows) == {"reproduced with": 1}
    assert cells(rows[0])[-1] == "reproduced with lr .2"


def test_a_change_that_was_not_run_is_not_needed_where_the_figure_is_reproduced_without_it():
    found = one_cell("lr 0.1")
    needed, not_needed = (compare(found, [line(found, accuracy=accuracy)])[1] for accuracy in (0.5, PUBLISHED))
    assert (needed.light, needed.note) == ("not run", "")
    assert (not_needed.light, not_needed.note) == ("not run", "reproduced without this change")


def test_a_crash_is_told_in_the_table_until_the_cell_has_run():
    found = one_cell()
    crash = {key: value for key, value in line(found).items() if key != "accuracy"} | {"failed": "no such model"}
    (row,) = compare(found, [crash])
    assert (row.light, row.note) == ("failed", "no such model")
    assert light(found, [crash, line(found)]) == "reproduced"
    assert light(found, [line(found), crash]) == "reproduced"


@pytest.mark.parametrize(
    ("epsilon", "contradicted", "expected"),
    [
        (2.9, "", "reproduced"),
        (13.6, "", "not reproduced"),
        (13.6, "a test", "contradicted"),
        (None, "", "not reproduced"),
    ],
)
def test_a_claimed_epsilon_is_reproduced_only_if_no_more_is_proven(epsilon, contradicted, expected):
    found = one_cell(claim=Claim("record", "server", 2.93, contradicted))
    proven = [["client", "server", 0.1, None], ["record", "server", epsilon, "because of this"]]
    accuracy, privacy = compare(found, [line(found, proven=proven)])
    assert (privacy.measure, privacy.published, privacy.light) == (PROVEN, 2.93, expected)
    assert accuracy.proven == ("none" if epsilon is None else f"a record: {epsilon}")
    assert privacy.note == (contradicted if epsilon else "because of this"), "an epsilon's premises are no reason"
    if epsilon is None:
        assert privacy.ours is None


def test_a_quick_line_stands_beside_no_published_figure_of_a_full_one_and_gets_no_light():
    found = one_cell()
    assert light(found, [line(found, quick=True)]) == "not run"
    (row,) = compare(found, [line(found, quick=True)], quick=True)
    assert (row.light, row.quick, row.ours) == ("", True, PUBLISHED)
    assert "quick version" in to_markdown(found, [row])
    assert "quick version" in to_html(found, [row], [])


@pytest.mark.slow
def test_recipes_give_the_published_figures_of_000_and_004_but_for_those_that_do_not_recompute():
    rows = [row for name in ("alphacdp-table6", "alphacdp-table7") for row in compare(table(name), [])]
    wrong = {(row.cell.row, row.cell.column) for row in rows if row.cell.work.instant and row.light != "reproduced"}
    assert wrong == {("Fed-SDP", "Cancer"), ("Fed-CDP", "Cancer"), ("Fed-alphaCDP", "Cancer")}
    thesis = [row for number in (2, 3, 4, 5, 6) for row in compare(table(f"thesis-table4.{number}"), [])]
    assert {row.light for row in thesis if row.cell.work.instant} == {"reproduced"}


@pytest.mark.slow
def test_table_11_comes_out_of_its_four_accountants():
    rows = [row for row in compare(table("alphacdp-table11"), []) if row.cell.work.instant]
    off = {row.cell.name for row in rows if row.light != "reproduced"}
    assert all("cyclic" in name for name in off)
    assert len(rows) == 20


def kept_lines(*names):
    """What the repository keeps of these tables."""
    return [line for name in names for line in read_lines(RESULTS / f"{name}.jsonl")]


@pytest.mark.slow
def test_what_is_kept_is_read_and_gets_its_lights():
    lines = kept_lines("geyer-table1", "beyond-client")
    found = {row.cell.name: row for row in compare(table("geyer-table1"), lines) if row.measure == "accuracy"}
    assert found["private/1000"].light == "reproduced"
    assert len(found["private/1000"].values) == 5
    privacy = [row for row in compare(table("geyer-table1"), lines) if row.measure == PROVEN]
    assert {row.light for row in privacy if not row.cell.change} == {"contradicted"}
    assert {row.light for row in privacy if "geyer-private" in row.cell.change} == {"reproduced"}
    kept = kept_lines("alphacdp-table6")
    six = {row.cell.name: row for row in compare(table("alphacdp-table6"), kept) if row.measure == "accuracy"}
    assert (six["Fed-CDP/MNIST"].light, six["Fed-CDP/MNIST"].note) == ("reproduced with", "sigma 0.5")
    attacked = compare(table("alphacdp-table3"), kept_lines("attacks"))
    known = [row for row in attacked if row.measure == "resilient" and row.values and not row.cell.change]
    assert len(known) == 36
    assert sum(row.light == "reproduced" for row in known) >= 18


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*-*.jsonl")), ids=lambda path: path.stem)
def test_a_kept_line_belongs_to_a_cell_of_its_table_and_is_small(path):
    keys = {cell.work.key(False) for cell in table(path.stem).cells}
    for line in read_lines(path):
        assert line["table"] == path.stem
        assert line["key"] in keys, f"{line['cell']}: its settings have changed since it was measured"
        assert "failed" not in line
        assert not line["quick"]
        assert len(line.get("curve", ())) <= 100


def test_an_audit_in_the_same_folder_is_no_measurement_of_a_cell():
    audit = {"algorithm": "pfl", "seed": 0, "measured": 1.0}
    (row,) = compare(one_cell(), [audit])
    assert row.light == "not run"


def test_a_claim_under_add_or_remove_is_compared_with_what_is_proven_under_it():
    proven = [["record", "server", 4.6, None]]
    for epsilon, expected in ((2.9, "reproduced"), (3.0, "not reproduced")):
        found = one_cell(claim=Claim("record", "server", 2.93, add_or_remove=lambda epsilon=epsilon: epsilon))
        _, privacy = compare(found, [line(found, proven=proven)])
        assert privacy.light == expected
        assert ("under add-or-remove 2.9" in privacy.note) == (expected == "reproduced")


def test_a_claim_that_a_change_makes_true_names_the_change():
    found = one_cell(claim=Claim("record", "server", 2.93, amended=("disjoint data", lambda: 2.9)))
    accuracy, privacy = compare(found, [line(found, proven=[["record", "server", 14.0, None]])])
    assert cells(privacy)[-1] == "reproduced with disjoint data (2.9 is proven)"
    assert accuracy.proven == "a record: 14"


@pytest.mark.slow
def test_mends_of_the_papers_claims_are_mends():
    claims = [cell.claim for found in tables().values() for cell in found.cells if cell.claim and cell.claim.amended]
    assert len(claims) > 50
    for claim in claims[::10]:
        assert claim.amended[1]() <= claim.epsilon * 1.001


def test_what_is_proven_is_shown_where_nothing_is_claimed():
    work = Run({"rounds": 1})
    found = Table("beyond-client", (), 0, (Cell("row", "column", work, proves=("client", "release")),))
    given = {"key": work.key(False), "seed": 0, "accuracy": 0.9, "proven": [["client", "release", 2.0, None]]}
    (row,) = compare(found, [given])
    assert (row.proven, row.light, row.published) == ("a client: 2", "", None)


def test_markdown_csv_and_page_hold_the_same_rows():
    lines = kept_lines("geyer-table1")
    found = table("geyer-table1")
    rows = compare(found, lines)
    assert to_markdown(found, rows).count("\n| ") == len(rows) + 1
    written = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert len(written) == len(rows)
    assert float(written[0]["published"]) == 0.97
    assert float(written[0]["ours"]) == rows[0].ours
    page = to_html(found, rows, lines)
    assert page.count("<tr") == len(rows) + 1
    assert summary(rows) in page


@pytest.mark.slow
def test_a_figure_is_drawn_beside_what_the_published_one_shows():
    lines = kept_lines("geyer-table1")
    found = table("geyer-figure3")
    page = to_html(found, compare(found, lines), lines)
    assert "data:image/png;base64" in page
    assert "V_c" in page
    assert "data:image/png" not in to_html(found, compare(found, []), [])


def shell(*words):
    return CliRunner().invoke(app, ["papers", *map(str, words)], catch_exceptions=False)


@pytest.mark.slow
def test_the_command_lists_shows_runs_and_compares(tmp_path):
    listed = json.loads(shell("list", "--json").stdout)["tables"]
    assert len(listed) == 34
    assert {"name", "paper", "needs", "minutes", "title", "about", "cells", "references"} == set(listed[0])
    assert "alphacdp-table11" in shell("list").stdout
    assert "per_round.noise_multiplier=1.44" in shell("show", "geyer-table1").stdout
    path = tmp_path / "found.jsonl"
    words = ("geyer-table1", "--quick", "--results", path)
    done = shell("run", *words, "--rows", "^private/100$", "--seeds", 1, "--device", "cpu")
    assert done.exit_code == 0
    assert "1 measurements to make" in done.stdout
    assert read_lines(path)[0]["device"] == "cpu"
    again = shell("run", *words, "--rows", "^private/100$", "--seeds", 1, "--device", "cpu")
    assert "0 measurements to make" in again.stdout
    assert "quick version" in shell("compare", *words).stdout
    shell("compare", *words, "--format", "html", "--to", tmp_path / "page.html")
    assert "<table>" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_from_the_root_of_the_repository_compare_shows_what_is_kept_and_what_was_run_here_counts_more(
    tmp_path, monkeypatch
):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results").symlink_to(RESULTS)
    monkeypatch.chdir(tmp_path)
    assert "0.9237 (0.9195 to 0.9270)" in shell("compare", "geyer-table1").stdout
    key = next(cell for cell in table("geyer-table1").cells if cell.name == "private/1000").work.key(False)
    newer = [{"key": key, "seed": seed, "accuracy": 0.5, "rounds": 54} for seed in range(3)]
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "geyer-table1.jsonl").write_text("".join(json.dumps(each) + "\n" for each in newer))
    assert "0.9237" not in shell("compare", "geyer-table1").stdout


def test_a_failed_cell_gives_the_exit_code_4_and_is_named(tmp_path, monkeypatch):
    def broken(self, job):
        raise ZeroDivisionError("no reason")

    monkeypatch.setattr(Run, "measure", broken)
    words = ("geyer-table1", "--quick", "--results", tmp_path / "found.jsonl")
    done = shell("run", *words, "--rows", "^private/100$", "--seeds", 1)  # --device auto
    assert done.exit_code == 4
    assert read_lines(tmp_path / "found.jsonl")[0]["device"] in ("cpu", "cuda")
    assert "failed  private/100, seed 0: ZeroDivisionError: no reason" in done.stdout
    assert "failed: ZeroDivisionError" in shell("compare", *words).stdout


def test_a_note_of_several_lines_breaks_no_table():
    found = one_cell()
    crash = {"key": found.cells[0].work.key(False), "seed": 0, "failed": "no data\n  tried a\n  fix: b"}
    rows = compare(found, [crash])
    for text in (to_markdown(found, rows), to_block(found, rows)):
        assert "failed: no data tried a fix: b |\n" in text


@pytest.mark.parametrize(
    ("epsilons", "word", "shown", "light"),
    [
        ((2.0, 2.5, 2.25), "a record: 2.5", "2.5", "reproduced"),
        ((2.0, 3.0, 2.5), "a record: 3", "3", "not reproduced"),
        ((2.0, 2.50001, 2.25), "a record: 2.51", "2.501", "reproduced"),
        ((2.0, 12345.1, 2.5), "a record: none in practice (1.3e4)", "none in practice (1.3e4)", "not reproduced"),
        ((2.0, None, 2.5), "none", "none", "not reproduced"),
    ],
)
def test_what_is_proven_of_a_cell_is_proven_of_its_worst_seed(epsilons, word, shown, light):
    found = one_cell(claim=Claim("record", "server", 2.93))
    lines = [
        line(found, seed=seed, proven=[["record", "server", epsilon, None]]) for seed, epsilon in enumerate(epsilons)
    ]
    accuracy, privacy = compare(found, lines)
    assert accuracy.proven == word
    assert (cells(privacy)[3], privacy.light) == (shown, light)
    written = next(csv.DictReader(io.StringIO(to_csv([privacy]))))
    if None not in epsilons:
        assert (float(written["least"]), float(written["greatest"])) == (2.0, max(epsilons))


def test_the_frontier_draws_the_worst_seed():
    key = next(cell for cell in table("geyer-table1").cells if cell.name == "private/1000").work.key(False)
    series = Series("x", ("geyer-table1",), "^private/1000$", "black")
    for epsilons, expected in (((2.0, 3.0), 3.0), ((2.0, None), BEYOND)):
        epsilons = 3 * (2.0,) + epsilons
        lines = [
            {"key": key, "seed": seed, "accuracy": 0.9, "proven": [["client", "release", epsilon, None]]}
            for seed, epsilon in enumerate(epsilons)
        ]
        ((found, *_),) = _points(series, ("client", "release"), lines)
        assert found == expected
        assert not list(_points(series, ("client", "release"), lines[1:]))  # four seeds are too few for a headline


@pytest.mark.slow
def test_where_nothing_was_measured_the_text_says_how_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hint = "nothing measured yet: shoal papers run alphacdp-table6"
    assert f"{hint} (or run this in the repository's root" in shell("compare", "alphacdp-table6").stdout
    assert shell("compare", "alphacdp-table6", "--quick").stdout.endswith(f"{hint} --quick\n")
    assert "nothing measured" not in shell("compare", "geyer-figure1").stdout
    assert (
        "nothing measured" not in shell("compare", "geyer-table1", "--results", RESULTS / "geyer-table1.jsonl").stdout
    )
    assert "Compare the small version." in shell("compare", "--help").stdout


@pytest.mark.slow
def test_curves_have_panels_and_a_legend_that_covers_none(monkeypatch):
    """IID and non-IID beside each other, with one colour a method; else a panel a quantity."""
    sheets = []

    def keep(self, *args, **more):
        self.draw_without_rendering()
        sheets.append(self)

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", keep)
    for name, kept, titles in (
        ("thesis-figure4.5", "thesis-table4.4", ["IID", "non-IID"]),
        ("geyer-figure3", "geyer-table1", ["", "", ""]),
    ):
        found, lines = table(name), kept_lines(kept)
        curves(found, compare(found, lines), lines)
        assert [axes.get_title() for axes in sheets[-1].axes] == titles
        (legend,) = sheets[-1].legends
        shown = {line.get_color() for axes in sheets[-1].axes for line in axes.lines}
        assert len(legend.get_texts()) == len({text.get_text() for text in legend.get_texts()}) == len(shown)
        assert all(axes.get_legend() is None for axes in sheets[-1].axes)
        assert legend.get_window_extent().x0 > sheets[-1].axes[-1].get_window_extent().x1


def test_times_are_compared_by_their_ratio():
    cell = Cell("Fed-CDP", "MNIST", Run({"rounds": 1}), ("step_seconds",))
    found = Table("alphacdp-table9", (), 0, (cell,))
    published = found.published["step_seconds"]["Fed-CDP"]["MNIST"]
    for ours, words in ((1 / 1050, "1,050 x faster"), (2, "2 x slower"), (1.001, "the same"), (0, "")):
        (row,) = compare(found, [{"key": cell.work.key(False), "step_seconds": published * ours}])
        assert cells(row)[6] == words


def test_attacks_that_were_written_without_a_leading_zero_are_still_found():
    old = {"cell": "figure3/lfw/noise .01/2", "success": 1.0, "rmse": 0.1, "rmse_of_successes": 0.1}
    rows = compare(table("alphacdp-figure3"), [old | {"iterations_to_success": 3, "iterations": 3}])
    found = {row.cell.name: row.values for row in rows if row.values}
    assert found == {"type 2/noise 0.01/resilient": (0.0,)}


def test_an_epsilon_that_means_nothing_is_not_printed_as_a_guarantee():
    found = one_cell(claim=Claim("client", "release", 8.0))
    _, privacy = compare(found, [line(found, proven=[["client", "release", 18_980_000.0, None]])])
    assert cells(privacy)[3] == "none in practice (1.9e7)"
