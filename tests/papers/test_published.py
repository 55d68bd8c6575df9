"""The published figures are as printed: counts, ranges, sums, and tables of one paper that repeat each other."""

import tomllib
from collections import Counter

import pytest

from shoal.config import configure
from shoal.papers import beyond_tables, geyer_tables, table, tables
from shoal.papers.table import PAPERS, published, read
from shoal.papers.work import Run
from support.paths import ROOT

NAMES = {
    *(f"thesis-table4.{number}" for number in range(1, 7)),
    *(f"thesis-figure4.{number}" for number in range(1, 8)),
    "geyer-table1",
    *(f"geyer-figure{number}" for number in range(1, 4)),
    *(f"pfl-table{number}" for number in range(2, 6)),
    "alphacdp-table1",
    *(f"alphacdp-table{number}" for number in range(3, 12)),
    "alphacdp-figure3",
}
OURS = {"beyond-client", "beyond-example"}
SUMS = {  # table: measure: rows, figures, sum. Those of Bhaskar et al. and Wei et al. were added up from the texts
    "thesis-table4.1": {"accuracy": (2, 4, 3.9397), "rounds": (2, 4, 2400)},
    "thesis-table4.2": {"accuracy": (3, 3, 2.7728), "epsilon": (3, 3, 10.5), "rounds": (3, 3, 1028)},
    "thesis-table4.3": {"accuracy": (3, 6, 5.0702), "rounds": (3, 6, 1964)},
    "thesis-table4.4": {"accuracy": (3, 5, 3.6125), "rounds": (3, 5, 3175)},
    "thesis-table4.5": {"accuracy": (3, 5, 4.2029), "rounds": (3, 5, 8700)},
    "thesis-table4.6": {"accuracy": (3, 5, 4.6404), "rounds": (3, 5, 75000)},
    "geyer-table1": {"accuracy": (2, 4, 3.63), "rounds": (2, 4, 857), "communication": (2, 4, 259930)},
    "pfl-table2": {"accuracy": (6, 72, 62.0708)},
    "pfl-table3": {"accuracy": (6, 72, 54.7622)},
    "pfl-table4": {"accuracy": (6, 72, 26.6352)},
    "pfl-table5": {"accuracy": (5, 60, 45.9232)},
    "alphacdp-table1": {"success": (3, 9, 8.249), "rmse": (3, 9, 0.912), "iterations": (3, 9, 5073.9)},
    "alphacdp-table3": {"resilient": (18, 36, 12), "rmse": (18, 36, 15.5211), "iterations": (18, 36, 4005)},
    "alphacdp-table4": {"accuracy": (4, 48, 44.886), "step_seconds": (4, 4, 0.0591)},
    "alphacdp-table5": {"accuracy": (20, 125, 90.755)},
    "alphacdp-table6": {"accuracy": (4, 20, 16.339), "epsilon": (3, 15, 8.218)},
    "alphacdp-table7": {"rounds": (2, 10, 391), "epsilon": (2, 10, 4.529)},
    "alphacdp-table8": {"accuracy": (7, 35, 28.937), "rounds": (6, 30, 1533)},
    "alphacdp-table9": {"step_seconds": (5, 25, 1.0406)},
    "alphacdp-table10": {"accuracy": (4, 20, 16.497), "step_seconds": (4, 20, 1.2826)},
    "alphacdp-table11": {"epsilon": (1, 4, 132.786), "accuracy": (6, 24, 23.45), "rounds": (6, 24, 2267)},
    "alphacdp-figure3": {"accuracy": (1, 11, 6.888), "resilient": (1, 11, 7)},
}


def test_every_table_and_figure_of_the_papers_is_there_and_no_other():
    assert set(tables()) == NAMES | OURS
    assert {name for paper in (*PAPERS, "beyond") for name in read(paper)} == NAMES | OURS
    assert not any(published(name) for name in OURS)


@pytest.mark.parametrize("name", SUMS)
def test_rows_figures_and_sums_are_those_of_the_paper(name):
    for measure, (rows, figures, total) in SUMS[name].items():
        found = published(name)[measure]
        values = [value for row in found.values() for value in row.values()]
        assert (len(found), len(values)) == (rows, figures)
        assert sum(values) == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_figures_are_in_range(name):
    ranges = {
        "accuracy": (0.05, 1),
        "success": (0.5, 1),
        "resilient": (0, 1),
        "rmse": (0, 1),
        "epsilon": (0.05, 130),
        "example_delta": (1e-14, 1e-5),
        "client_delta": (1e-6, 1e-3),
        "rounds": (1, 15_000),
        "iterations": (1, 3000),
        "communication": (500, 250_000),
        "step_seconds": (0.004, 0.25),
    }
    for measure, rows in published(name).items():
        low, high = ranges[measure]
        assert all(low <= value <= high for row in rows.values() for value in row.values()), measure


def test_ten_clients_of_pfl_are_the_first_rows_of_its_other_tables_but_for_one_misprint():
    ten = published("pfl-table5")["accuracy"]["10"]
    differ = []
    for name, data, epsilon in (
        ("pfl-table2", "MNIST", "2.93"),
        ("pfl-table3", "Fashion-MNIST", "2.7"),
        ("pfl-table4", "CIFAR-10", "7.53"),
    ):
        first = published(name)["accuracy"]["(1, 20)"]
        for model in ("CNN+RL", "CNN+TS", "SN+Lin", "SN+CNN"):
            pair = ten[f"{data} {model}"], first[f"PFL {epsilon} {model}"]
            differ += [(data, model, *pair)] if pair[0] != pair[1] else []
    assert differ == [("MNIST", "CNN+RL", 0.9306, 0.9386)]


def test_the_tables_of_004_repeat_each_other():
    six, eleven = published("alphacdp-table6"), published("alphacdp-table11")
    for method in ("non-private", "Fed-SDP", "Fed-CDP", "Fed-alphaCDP"):
        assert published("alphacdp-table4")["accuracy"][method]["1000 10%"] == six["accuracy"][method]["MNIST"]
        for data, value in six["accuracy"][method].items():
            assert published("alphacdp-table5")["accuracy"][f"{data} {method}"]["C=4"] == value
    assert published("alphacdp-table7")["accuracy"]["target"] == six["accuracy"]["Fed-SDP"]
    assert published("alphacdp-table7")["epsilon"]["Fed-SDP"] == six["epsilon"]["Fed-SDP"]
    assert published("alphacdp-table8")["epsilon"]["Fed-CDP"] == six["epsilon"]["Fed-CDP"]
    assert published("alphacdp-table10")["accuracy"]["non-private"] == six["accuracy"]["non-private"]
    for row, rounds in published("alphacdp-table8")["rounds"].items():
        assert eleven["rounds"][row]["moments"] == rounds["MNIST"]
        assert eleven["accuracy"][row]["moments"] == published("alphacdp-table8")["accuracy"][row]["MNIST"]
    for method in ("non-private", "Fed-SDP", "Fed-CDP", "Fed-alphaCDP"):
        seconds = published("alphacdp-table9")["step_seconds"][method]["MNIST"]
        assert published("alphacdp-table4")["step_seconds"][method]["1000 10%"] == seconds


@pytest.mark.parametrize("name", sorted(NAMES))
def test_cells_have_names_of_their_own_and_stand_beside_published_figures(name):
    found = table(name)
    assert [word for word, times in Counter(cell.name for cell in found.cells).items() if times > 1] == []
    if not found.published:
        assert found.about
        return
    for cell in found.cells:
        for measure in cell.measures:
            if not (name == "alphacdp-figure3" and cell.row in ("type 1", "type 2")):  # pictures without a figure
                assert cell.column in found.published[measure][cell.row], cell.name


SETTINGS = {("rounds", "thesis-table4.1"), ("rounds", "geyer-table1"), ("epsilon", "thesis-table4.2")}
"""Figures that are settings of the runs, or are claims that stand beside what is proven."""


@pytest.mark.parametrize("name", sorted(SUMS))
def test_every_published_figure_has_a_cell(name):
    found = table(name)
    covered = {(measure, cell.row, cell.column) for cell in found.cells for measure in cell.measures}
    for measure, rows in found.published.items():
        for row, columns in rows.items():
            given = (
                measure == "rounds" and row in ("Fed-SDP", "Fed-CDP", "Fed-alphaCDP") and name != "alphacdp-table7"
            )
            given |= (measure, name) in SETTINGS or (name == "alphacdp-table7" and row in ("target", "Fed-SDP"))
            missing = [column for column in columns if (measure, row, column) not in covered]
            assert given or not missing, (measure, row, missing)


@pytest.mark.slow
def test_the_settings_of_every_cell_are_ones_that_a_run_takes():
    seen = set()
    for found in tables().values():
        for cell in found.cells:
            if isinstance(cell.work, Run):
                for quick in (False, True):
                    if (key := cell.work.key(quick)) not in seen:
                        seen.add(key)
                        configure(cell.work.settings(quick))
    assert len(seen) > 300


def test_a_quick_version_needs_no_data_that_does_not_come_with_shoal():
    for found in tables().values():
        for cell in found.cells:
            if isinstance(cell.work, Run):
                assert cell.work.settings(quick=True)["data.name"] in ("digits", "cancer")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (f"sites-{data}-{sites}", beyond_tables.disjoint(data, sites, 3.0))
        for data in beyond_tables.NAMES
        for sites in (10, 100)
    ]
    + [(f"geyer-private-{clients}", geyer_tables.proven(clients)) for clients in geyer_tables.SIZES]
    + [
        (f"geyer-{features.removeprefix('hog-')}-{clients}", beyond_tables.transferred(clients, epsilon))
        for (clients, epsilon), (features, *_) in beyond_tables.TRANSFERRED.items()
    ]
    + [("dp-ftrl-1000", beyond_tables.cyclic(8.0))],
)
def test_a_preset_is_what_its_table_ran(name, settings):
    assert configure(ROOT / "examples" / f"{name}.toml") == configure(settings)


def test_the_files_of_figures_are_in_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "papers/published/*.toml" in project["tool"]["setuptools"]["package-data"]["shoal"]
