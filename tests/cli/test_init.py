"""`shoal init`: a first experiment for a table that works at once, and says what was guessed from what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.config import configure
from shoal.data.common_columns import find_client, find_label
from shoal.data.propose import propose, rounded_range
from shoal.data.schema import TaskKind
from shoal.errors import ConfigError, DataError, ShoalError
from shoal.suggest import suggest

# typer 0.20 reads names that click 8.5 deprecates
pytestmark = pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")


def patients(path: Path, rows: int = 400, hospitals: int = 6) -> Path:
    """A hospital's table: identifiers, dates, gaps, categories, some of them rare."""
    rng = np.random.default_rng(5)
    lines = ["patient_id,hospital,age,sex,creatinine,ward,smoker,diabetes,admitted_on,died"]
    for row in range(rows):
        age = int(rng.integers(20, 95))
        died = int(rng.random() < 1 / (1 + np.exp((80 - age) / 8)))
        cells = [f"P{row:05}", f"h{row % hospitals}", age, rng.choice(["F", "M"]), round(float(rng.gamma(4, 25)), 1)]
        cells += [rng.choice(["icu", "surgery", "medicine"]), rng.choice(["yes", "no", ""]), row % 2]
        cells += [f"2023-01-{1 + row % 28:02}", died]
        if row % 7 == 0:
            cells[4] = ""
        if row == 3:
            cells[5] = "leprosy"  # one patient's ward
        lines.append(",".join(map(str, cells)))
    path.write_text("\n".join(lines) + "\n")
    return path


def invoke(*arguments: str) -> Any:
    """The outcome of `shoal ...`."""
    from typer.testing import CliRunner

    from shoal.cli.main import app

    return CliRunner().invoke(app, arguments)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_decimal_commas_are_refused_with_all_their_columns(folder: Path) -> None:
    rows = "".join(f"{row},5;{row};1.{row};{row % 2};{row % 3},{row % 2}\n" for row in range(40))
    (folder / "german.csv").write_text(f"lactate;age;weight;died;answers\n{rows}")
    with pytest.raises(DataError, match=r"numbers have commas \(columns lactate\); write 12.5 for 12,5"):
        propose(folder / "german.csv", ["died"], None)
    (folder / "german.csv").write_text("lactate;died\n" + "".join(f"{row},5;{row},1\n" for row in range(40)))
    with pytest.raises(DataError, match=r"columns lactate, died"):
        propose(folder / "german.csv", ["died"], None)


def test_a_column_that_happens_to_hold_0_and_1_is_marked_too(folder: Path) -> None:
    rows = "".join(f"{row % 2},{row % 2}\n" for row in range(40))
    (folder / "strokes.csv").write_text(f"strokes,died\n{rows}")
    assert invoke("init", "strokes.csv", "--client-column", "none").exception is None
    assert "CONFIRM: a flag, 0 or 1, read from the data" in (folder / "experiment.toml").read_text()


@pytest.mark.slow
def test_what_is_proposed_works_at_once_and_is_marked_until_confirmed(folder: Path) -> None:
    patients(folder / "patients.csv")
    result = invoke("init", "patients.csv")
    assert result.exception is None
    text = (folder / "experiment.toml").read_text()
    config = configure(folder / "experiment.toml", ["rounds=2", "engine.threads=1"])
    schema = config.schema
    assert schema is not None
    assert (schema.label, schema.classes, schema.client_column) == ("died", ("0", "1"), "hospital")
    assert schema.unconfirmed == ("creatinine", "ward", "smoker", "diabetes")
    kinds = {name: column.kind for name, column in schema.columns.items()}
    assert [name for name, kind in kinds.items() if kind == "ignore"] == ["patient_id", "admitted_on"]
    assert schema.columns["ward"].categories == ("icu", "medicine", "surgery"), "no single patient's ward"  # type: ignore[union-attr]
    assert schema.columns["age"].range == (0, 120)  # type: ignore[union-attr]
    marked = [line for line in text.splitlines() if "CONFIRM: " in line]
    assert [line.partition(" ")[0] for line in marked] == ["creatinine", "ward", "smoker", "diabetes"]
    for words in (
        "ward, smoker, diabetes",
        "no guarantee covers it",
        "6 clients are too few",
        "shoal run experiment.toml",
    ):
        assert words in result.stdout
    (trained := shoal.run(folder / "experiment.toml", overrides=["rounds=2", "engine.threads=1"]))
    assert any("proposed from the data, outside any guarantee" in note for note in notes(trained.run))
    (claim,) = [each for each in trained.proven if (each["unit"], each["observer"]) == ("record", "release")]
    assert claim["epsilon"] <= config.budget.epsilon  # type: ignore[operator]


@pytest.mark.parametrize(("gap", "marked"), [("", ("age", "sex")), ("40,F", ())])
def test_a_value_that_is_missing_is_a_fact_of_the_data(folder: Path, gap: str, marked: tuple[str, ...]) -> None:
    """One empty cell gives the model an input more, whatever the column's name says of its range."""
    rows = "".join(f"{20 + k},{'FM'[k % 2]},{k % 2}\n" for k in range(40))
    (folder / "few.csv").write_text(f"age,sex,died\n{rows}{gap or ','},1\n")
    schema = propose(folder / "few.csv", ["died"], None).schema
    assert (schema.unconfirmed, len(schema.features)) == (marked, 3 + len(marked))


def notes(run: Path) -> list[str]:
    return list(json.loads((run / "result.json").read_text())["notes"])


def test_the_datas_own_extremes_are_not_in_the_file(folder: Path) -> None:
    path = patients(folder / "patients.csv")
    values = [float(line.split(",")[4]) for line in path.read_text().splitlines()[1:] if line.split(",")[4]]
    schema = propose(path, ["died"], "hospital").schema
    low, high = schema.columns["creatinine"].range  # type: ignore[union-attr]
    assert (low, high) == (0, 400)
    assert min(values) not in (low, high)
    assert max(values) not in (low, high)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (np.linspace(31, 260, 500), (0, 400)),
        (np.linspace(1990, 2020, 31), (1980, 2020)),
        (np.linspace(-0.02, 0.03, 100), (-0.05, 0.05)),
        (np.full(9, 7.0), (5, 10)),
        (np.zeros(9), (0, 0.5)),
    ],
)
def test_ranges_are_round_and_wide(numbers: np.ndarray, expected: tuple[float, float]) -> None:
    low, high = rounded_range(numbers)
    assert (low, high) == expected
    assert np.mean((numbers < low) | (numbers > high)) <= 0.02


def test_columns_are_found_by_their_names() -> None:
    assert find_client(["age", "Hospital_ID", "patient_id"]) == "Hospital_ID"
    assert find_client(["age", "patientId"]) == "patientId"
    assert find_client(["age", "visits"]) is None
    assert find_label(["x", "Outcome", "y_old"]) == "Outcome"
    assert find_label(["x", "hospital_died"]) == "hospital_died"
    assert find_label(["x", "Died in hospital?"]) == "Died in hospital?"
    assert find_label(["x", "dyed", "event_date"]) is None
    assert find_label(["diagnosis", "readmitted"]) == "readmitted"


@pytest.mark.parametrize(
    ("header", "arguments", "reason"),
    [
        ("x,result", [], "which column is to be predicted?"),
        ("x,label", [], "--client-column NAME, or --client-column none"),
        ("x,label,site", ["--label", "lable"], "no column 'lable'; did you mean 'label'"),
        ("x,label, the site ", ["--client-column", "the site"], "no column 'the site'; did you mean ' the site '?"),
        ("x,label,site", ["--label", "lable", "--client-column", "sight"], "no columns 'lable', 'sight'"),
        ("label,site", [], "no column to learn from: there is none besides the label"),
        ("x,label,site", ["--task", "ranking"], "--task cannot be 'ranking'"),
        ("x,label,site", ["--out", "nowhere/e.toml"], "nowhere/e.toml cannot be written"),
    ],
)
def test_what_is_missing_is_said_in_one_line(folder: Path, header: str, arguments: list[str], reason: str) -> None:
    rows = "\n".join(",".join(str(row % 3 + at) for at in range(header.count(",") + 1)) for row in range(9))
    (folder / "t.csv").write_text(f"{header}\n{rows}\n")
    result = invoke("init", "t.csv", *arguments)
    assert isinstance(result.exception, ShoalError)
    assert reason in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not (folder / "experiment.toml").exists()


@pytest.mark.slow
def test_nothing_is_overwritten_unless_asked(folder: Path) -> None:
    patients(folder / "patients.csv", rows=60)
    (folder / "experiment.toml").write_text("mine")
    assert isinstance(invoke("init", "patients.csv").exception, ConfigError)
    assert (folder / "experiment.toml").read_text() == "mine"
    assert invoke("init", "patients.csv", "--replace").exception is None
    assert isinstance(invoke("init", "nothing.csv").exception, DataError)


@pytest.mark.slow
def test_other_tasks_are_proposed_too(folder: Path) -> None:
    rows = "".join(f"{k % 9},s{k % 3},{k * 1.5},{k % 2},{(k + 1) % 2}\n" for k in range(60))
    path = folder / "t.csv"
    path.write_text("x,site,target,fever,cough\n" + rows)
    stay = propose(path, ["target"], "site").schema
    assert (stay.task, stay.range, "target" in stay.unconfirmed) == ("regression", (0, 100), True)
    both = propose(path, ["fever", "cough"], "site").schema
    assert (both.task, both.labels) == ("multi-label", ("fever", "cough"))
    shown = json.loads(invoke("init", "t.csv", "--label", "fever", "--label", "cough", "--json").stdout)
    assert shown["schema"]["task"] == "multi-label"
    assert shoal.run(folder / "experiment.toml", overrides=["rounds=1", "engine.threads=1"]).task == "multi-label"


def test_a_person_with_several_rows_is_pointed_out(folder: Path) -> None:
    path = folder / "t.csv"
    path.write_text(
        "patient_id,hospital,x,label\n" + "".join(f"{k // 2},h{k % 3},{k % 7},{k % 2}\n" for k in range(40))
    )
    (hint,) = propose(path, ["label"], "hospital").hints
    assert "--client-column patient_id" in hint


@pytest.mark.parametrize(
    ("rows", "clients", "unit"),
    [(8000, 12, "record"), (500, 0, "record"), (9000, 300, "client"), (10**6, 20_000, "client")],
)
def test_the_budget_fits_the_number_of_clients(rows: int, clients: int, unit: str) -> None:
    plan = suggest(rows, [rows // clients] * clients if clients else [], "classification", 20)
    budget = plan.keys["budget"]
    units = clients if unit == "client" else rows
    assert (plan.unit, budget["unit"]) == (unit, unit)
    assert budget["delta"] < 1 / units
    assert plan.keys.get("clients", {}).get("cohort", 0) <= clients
    tables = {
        f"{name}.{key}" if name else key: value for name, keys in plan.keys.items() for key, value in keys.items()
    }
    assert configure(tables).budget.unit == unit


@pytest.mark.parametrize("task", ["classification", "multi-label", "regression"])
def test_the_learning_rate_falls_with_the_noise(task: TaskKind) -> None:
    def lr(rows: int, clients: int, parameters: int, epsilon: float) -> float:
        plan = suggest(rows, [rows // clients] * clients, task, parameters, epsilon=epsilon)
        assert plan.keys["budget"]["epsilon"] == epsilon
        return plan.keys["local"]["lr"]

    large, small = lr(100_000, 4, 200, 4.0), lr(1000, 4, 200, 4.0)
    assert large == {"regression": 0.3}.get(task, 10.0)
    assert small <= large / 2
    assert lr(1000, 4, 200, 1.0) == pytest.approx(small / 4, rel=0.4)
    assert lr(1000, 4, 1800, 4.0) == pytest.approx(small / 3, rel=0.4)
    assert lr(1000, 16, 200, 4.0) == pytest.approx(small / 2, rel=0.4)


def test_init_takes_the_budget_and_suits_the_learning_rate_to_it(folder: Path) -> None:
    patients(folder / "patients.csv", rows=200)
    plans = [
        json.loads(
            invoke("init", "patients.csv", "--label", "died", "--replace", "--json", "--epsilon", epsilon).stdout
        )
        for epsilon in ("1", "8")
    ]
    low, high = (each["plan"] for each in plans)
    assert (low["budget"]["epsilon"], high["budget"]["epsilon"]) == (1.0, 8.0)
    assert low["local"]["lr"] < high["local"]["lr"]
    refused = invoke("init", "patients.csv", "--label", "died", "--replace", "--epsilon", "0")
    assert "--epsilon must be > 0" in str(refused.exception)


def test_a_bare_table_is_answered_with_the_command_to_give(folder: Path) -> None:
    patients(folder / "patients.csv", rows=30)
    for words in (
        ["data.name=patients.csv", "data.label=died"],
        ["data.name=patients.csv", "data.label=died", "rounds=3"],
    ):
        with pytest.raises(ConfigError) as refused:
            shoal.run(overrides=words)
        assert "`shoal init patients.csv --label died` writes them to experiment.toml" in str(refused.value)
    with pytest.raises(ConfigError, match="shoal init patients"):
        shoal.run(data="patients.csv")


def test_codes_and_times_are_ignored_rather_than_hashed(folder: Path) -> None:
    changed = {
        "Record No": lambda row: row,
        "barcode": lambda row: f"A{row * 7919:06}",
        "seen_at": lambda row: f"{row % 24:02}:{row:02}",
        "note": lambda row: f"no pain on day {row}",
    }
    ignored = propose(table(folder / "t.csv", **changed), ["died"], "hospital").why
    assert ignored["Record No"] == "an identifier, by its name"
    assert ignored["barcode"] == "another word in every row, as of identifiers"
    assert ignored["seen_at"].startswith("dates or times")
    assert ignored["note"].startswith("text of many values")


def test_labels_of_several_are_0_or_1_or_refused_at_once(folder: Path) -> None:
    path = table(folder / "t.csv", fell=lambda row: ("no", "yes")[row % 2])
    with pytest.raises(DataError, match="label column 'fell': data row 1 holds 'no'"):
        propose(path, ["died", "fell"], "hospital")


def test_heavy_tails_of_the_label_and_spellings_of_categories_are_pointed_out(folder: Path) -> None:
    heavy = {"cost": lambda row: 10.5 ** (row / 10), "icu": lambda row: ("JA", "ja", "nein")[row % 3]}
    hints = propose(table(folder / "t.csv", **heavy), ["cost"], "hospital").hints
    assert "half of the values of 'cost' lie within 5% of its range" in hints[0]
    assert "column 'icu' holds 'JA' and 'ja', two categories" in hints[1]
    assert propose(table(folder / "t.csv", cost=lambda row: row + 0.5), ["cost"], "hospital").hints == ()


@pytest.mark.slow
def test_brackets_in_the_name_of_a_column_are_printed(folder: Path) -> None:
    table(folder / "t.csv", **{"stay [d]": lambda row: row + 0.5})
    assert invoke("init", "t.csv").exit_code == 0
    shown = invoke("run", "experiment.toml", "-c", "rounds=1", "-c", "engine.threads=1")
    assert "stay [d]" in " ".join(shown.output.split())


def table(path: Path, **changed: Any) -> Path:
    """60 rows of age, sex, hospital and died, but for columns as functions of the row."""
    columns = {"hospital": lambda row: f"h{row % 3}", "age": lambda row: 20 + row, "sex": lambda row: "fm"[row % 2]}
    columns |= {"died": lambda row: row % 2} | changed
    rows = (",".join(f'"{cell(row)}"' for cell in columns.values()) for row in range(60))
    path.write_text("\n".join([",".join(columns), *rows]) + "\n")
    return path


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"died": lambda row: "" if row % 9 == 4 else row % 2, "hospital": lambda row: " " if row == 8 else "h"},
            "values are missing (died in 7 of 60 rows, first in data row 5; hospital in 1 of 60 rows, first in data "
            "row 9); remove these rows",
        ),
        ({"hospital": lambda row: f"h{row}"}, "no client has a row to hold out; give --client-column none"),
        ({"paid": lambda row: f"1,0{10 + row}.50"}, "numbers have commas (columns paid)"),
        ({"paid": lambda row: f"1.0{10 + row},50"}, "numbers have commas (columns paid)"),
    ],
)
def test_what_a_run_would_refuse_is_refused_at_once(folder: Path, changed: dict[str, Any], reason: str) -> None:
    result = invoke("init", str(table(folder / "t.csv", **changed)))
    assert isinstance(result.exception, DataError)
    assert reason in str(result.exception)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("t.xlsx", "PK", "must be a .csv or .parquet file; save its sheet as 'CSV UTF-8'"),
        ("t.tsv", "x\ty\n", "rename it to t.csv: commas, semicolons and tabs are understood"),
        ("T.CSV", "x,y\n", "rename it to T.csv"),
        ("t.csv", "sep=;\nx;y\n1;2\n", "its first line is 'sep=;', which only Excel reads; remove that line"),
    ],
)
def test_a_file_of_another_form_is_refused_with_the_fix(folder: Path, name: str, text: str, reason: str) -> None:
    (folder / name).write_text(text)
    result = invoke("init", name)
    assert isinstance(result.exception, DataError)
    assert reason in str(result.exception)
    if not name.endswith(".csv"):
        with pytest.raises(DataError, match=r"save its sheet|rename it"):
            shoal.load(name)


def test_a_column_of_spoilt_numbers_is_left_out_with_the_reason(folder: Path) -> None:
    changed = {
        "weight": lambda row: f"{60 + row % 4} kg/m²",
        "lactate": lambda row: "not done" if row % 5 == 0 else row / 7,
        "potassium": lambda row: "n/a" if row % 5 == 0 else row / 7,
        "stage": lambda row: ["1a", "2a", "2b"][row % 3],
    }
    found = propose(table(folder / "t.csv", **changed), ["died"], "hospital")
    kinds = {name: column.kind for name, column in found.schema.columns.items()}
    assert kinds["weight"] == kinds["lactate"] == "ignore"
    assert (kinds["potassium"], kinds["stage"]) == ("number", "category")
    assert found.why["weight"] == "numbers with 'kg/m²' after them; leave that out to use them"
    assert found.why["lactate"] == "numbers but for cells such as 'not done'; leave those empty to use it"


def test_clients_that_are_written_in_two_ways_are_pointed_out(folder: Path) -> None:
    found = propose(
        table(folder / "t.csv", hospital=lambda row: ["7", "007", "north", "north "][row % 4]), ["died"], "hospital"
    )
    assert len(found.sizes) == 3  # spaces around a name do not count
    assert found.hints == ("column 'hospital' holds '007' and '7', two clients: write them alike if they are one",)


def test_without_a_schema_codes_that_would_become_one_number_are_refused(folder: Path) -> None:
    path = table(folder / "t.csv", hospital=lambda row: ["7", "007", " 8"][row % 3], sex=lambda row: row % 2)
    with pytest.raises(DataError, match="codes such as 007 and 7, which would be one client"):
        shoal.load(path, label="died", client="hospital")
    path = table(folder / "t.csv", hospital=lambda row: ["007", "008"][row % 2], sex=lambda row: row % 2)
    assert len(shoal.load(path, label="died", client="hospital").owner_names) == 2


def test_another_column_that_may_be_the_label_is_named(folder: Path) -> None:
    rows = "".join(f"{row},{'AB'[row % 2]},{row % 2}\n" for row in range(40))
    (folder / "t.csv").write_text(f"age,diagnosis,readmitted\n{rows}")
    hint = "if 'diagnosis' is the label: add --label diagnosis --replace"
    assert hint in invoke("init", "t.csv", "--client-column", "none").stdout
    assert hint not in invoke("init", "t.csv", "--client-column", "none", "--label", "readmitted", "--replace").stdout
