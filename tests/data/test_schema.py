"""The schema of a table: public constants alone decide, and what cannot be used is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from shoal.config import configure, read_toml, to_toml
from shoal.data.load import load, with_schema
from shoal.data.schema import Schema
from shoal.data.schema_encoding import encode_by_schema, read_by_schema
from shoal.errors import ConfigError, DataError

HOSPITAL: dict[str, Any] = {
    "label": "died",
    "classes": [0, 1],
    "client_column": "hospital",
    "columns": {
        "age": {"kind": "number", "range": [0, 100], "missing": 50},
        "sex": {"kind": "category", "categories": ["F", "M"]},
        "ward": {"kind": "category", "categories": ["a", "b", "unknown"], "missing": "unknown"},
        "patient_id": {"kind": "ignore"},
    },
}
ROWS = [
    ("P1", "north", "25", "F", "a", "0"),
    ("P2", "north", "", "M", "", "1"),
    ("P3", "south", "150", "X", "b", "1.0"),
    ("P4", "south", "100", "", "z", "0"),
]


def hospital(**changes: Any) -> Schema:
    return Schema.of(HOSPITAL | changes)


def with_column(name: str, **settings: Any) -> Schema:
    return Schema.of(HOSPITAL | {"columns": HOSPITAL["columns"] | {name: settings}})


def write(
    path: Path, rows: list[tuple[str, ...]] = ROWS, order: str = "patient_id,hospital,age,sex,ward,died"
) -> Path:
    names = ["patient_id", "hospital", "age", "sex", "ward", "died"]
    places = [names.index(name) for name in order.split(",")]
    path.write_text(
        "\n".join([order, *(",".join(row[at] for at in places) for row in rows)]) + "\n", encoding="utf-8"
    )
    return path


def test_a_table_becomes_numbers_by_public_constants_alone(tmp_path: Path) -> None:
    schema = hospital()
    found = encode_by_schema(schema, read_by_schema(schema, write(tmp_path / "t.csv")))
    assert found.features == schema.features
    assert schema.features == ("age", "age is missing", "sex=F", "sex=M", "ward=a", "ward=b", "ward=unknown")
    assert found.inputs.tolist() == [
        [-0.5, 0, 1, 0, 1, 0, 0],
        [0.0, 1, 0, 1, 0, 0, 1],
        [1.0, 0, 0, 0, 0, 1, 0],
        [1.0, 0, 0, 0, 0, 0, 0],
    ]
    assert found.targets is not None
    assert found.targets.tolist() == [0, 1, 1, 0]
    assert found.owners is not None
    assert found.owners.tolist() == ["north", "north", "south", "south"]
    filled, clipped, unknown = found.notes
    assert "missing values filled by public constants: age 1, ward 1 (" in filled
    assert "values clipped to their public ranges: age 1 (" in clipped
    assert "in no public category, taken as none of them: sex 2, ward 1 (" in unknown
    assert all("not for release" in note for note in found.notes)


def test_neither_the_order_of_a_file_nor_that_of_the_schema_matters(tmp_path: Path) -> None:
    first, other = write(tmp_path / "a.csv"), write(tmp_path / "b.csv", order="died,ward,age,hospital,patient_id,sex")
    turned = Schema.of(HOSPITAL | {"columns": dict(reversed(HOSPITAL["columns"].items()))})
    assert turned.digest == hospital().digest
    a, b = (
        encode_by_schema(schema, read_by_schema(schema, path))
        for schema, path in ((hospital(), first), (turned, other))
    )
    assert np.array_equal(a.inputs, b.inputs)
    assert np.array_equal(a.targets, b.targets)


def test_a_parquet_file_of_other_types_means_the_same(tmp_path: Path) -> None:
    columns = {
        "age": pa.array([25.0, None, 150.0, 100.0]),
        "sex": pa.array(["F", "M", "X", None]).dictionary_encode(),
        "ward": ["a", None, "b", "z"],
        "died": pa.array([False, True, True, False]),
        "hospital": [1, 1, 2, 2],
    }
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    schema = hospital(classes=[False, True])
    found = encode_by_schema(schema, read_by_schema(schema, tmp_path / "t.parquet"))
    expected = encode_by_schema(hospital(), read_by_schema(hospital(), write(tmp_path / "t.csv")))
    assert np.array_equal(found.inputs, expected.inputs)
    assert np.array_equal(found.targets, expected.targets)


def test_predictions_need_no_label_and_sites_no_client_column(tmp_path: Path) -> None:
    path = tmp_path / "new.csv"
    path.write_text("ward,sex,age\na,F,25\n")
    table = read_by_schema(hospital(), path, targets=False, owners=False)
    found = encode_by_schema(hospital(), table, targets=False, owners=False)
    assert found.inputs.shape == (1, 7)
    assert (found.targets, found.owners) == (None, None)


def test_all_missing_columns_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("age,gender\n1,F\n")
    with pytest.raises(DataError, match="no columns 'sex', 'ward', 'died', 'hospital'; it has age, gender"):
        read_by_schema(hospital(), path)
    path.write_text("age,sexx,ward,died,hospital\n1,F,a,0,n\n")
    with pytest.raises(DataError, match="no column 'sex'; did you mean 'sexx'"):
        read_by_schema(hospital(), path)


def test_codes_stay_what_they_are_and_a_category_may_be_called_na(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("code,label\n007,0\n7,1\nNA,0\n,1\n")
    schema = Schema.of(
        {"label": "label", "classes": [0, 1], "columns": {"code": {"kind": "category", "categories": ["007", "NA"]}}}
    )
    assert encode_by_schema(schema, read_by_schema(schema, path)).inputs.tolist() == [[1, 0], [0, 0], [0, 1], [0, 0]]


def test_spaces_around_categories_labels_and_owners_do_not_count_but_those_of_text_do(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("site,sex,note,label\nnorth , F, a,0 \nnorth,F ,a, 1\n")
    columns = {"sex": {"kind": "category", "categories": ["F"]}, "note": {"kind": "text", "buckets": 2}}
    schema = Schema.of({"label": "label", "classes": [0, 1], "client_column": "site", "columns": columns})
    found = encode_by_schema(schema, read_by_schema(schema, path))
    assert found.inputs[:, schema.features.index("sex=F")].tolist() == [1, 1]
    assert found.targets is not None
    assert found.owners is not None
    assert (found.targets.tolist(), found.owners.tolist()) == ([0, 1], ["north", "north"])
    schema = Schema.of({"task": "next-token", "columns": {"note": {"kind": "text", "tokens": 3}}})
    read = encode_by_schema(schema, read_by_schema(schema, path)).inputs
    assert read.tolist() == [[ord(" ") + 1, ord("a") + 1], [ord("a") + 1, 0]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (("P", "n", "high", "F", "a", "0"), "column 'age': data row 5 holds 'high', which is not a number"),
        (("P", "n", '"12,5"', "F", "a", "0"), "column 'age': data row 5 holds '12,5', which is not a number; write"),
        (("P", "n", "12,5", "F", "a", "0"), "Expected 6 columns, got 7: P,n,12,5,F,a,0; quote values"),
        (("P", "n", "inf", "F", "a", "0"), "column 'age': data row 5 holds 'inf'"),
        (("P", "n", "1e999", "F", "a", "0"), "column 'age': data row 5 holds '1e999'"),
        (
            ("P", "n", "1", "F", "a", "2"),
            "label column 'died': data row 5 holds '2', which is not a class; choose from 0, 1",
        ),
        (
            ("P", "n", "1", "F", "a", ""),
            "label column 'died': 1 of 5 values are missing, first in data row 5; remove",
        ),
        (("P", "", "1", "F", "a", "0"), "client column 'hospital': 1 of 5 values are missing"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_column_and_row(
    tmp_path: Path, row: tuple[str, ...], reason: str
) -> None:
    path = write(tmp_path / "t.csv", [*ROWS, row])
    with pytest.raises(DataError) as refused:
        encode_by_schema(hospital(), read_by_schema(hospital(), path))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_number_without_a_constant_is_refused(tmp_path: Path) -> None:
    schema = with_column("age", kind="number", range=[0, 100])
    with pytest.raises(DataError, match=r"'age': 1 of 4 values are missing; set schema\.columns\.age\.missing"):
        encode_by_schema(schema, read_by_schema(schema, write(tmp_path / "t.csv")))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"classes": ["0"]}, "schema.classes must name 2 to 1000"),
        ({"classes": ["0", 0]}, "schema.classes names '0' twice"),
        ({"lable": "x"}, "no key 'schema.lable'; did you mean 'label'"),
        ({"label": None}, "schema.label is missing"),
        ({"label": "age"}, "column 'age' is schema.label, so it is no input"),
        ({"client_column": "died"}, "both name column 'died'"),
        ({"range": [0, 1]}, "schema.classes, the label's public classes, belong to classification, not regression"),
        ({"task": "clustering"}, "schema.task cannot be 'clustering'"),
        ({"columns": {}}, "schema.columns has no column to learn from"),
        ({"columns": {"a": {"kind": "numbr"}}}, "schema.columns.a.kind cannot be 'numbr'"),
        ({"columns": {"a": {"kind": "number"}}}, "schema.columns.a is a number, so it needs range"),
        ({"columns": {"a": {"kind": "number", "range": [1, 1]}}}, "schema.columns.a.range must be two numbers"),
        ({"columns": {"a": {"kind": "number", "range": [0, float("inf")]}}}, "schema.columns.a.range"),
        ({"columns": {"a": {"kind": "number", "range": [0, 1], "missing": 2}}}, "a.missing 2 is outside its range"),
        ({"columns": {"a": {"kind": "number", "range": "0 to 1"}}}, "schema.columns.a.range cannot be '0 to 1'"),
        ({"columns": {"a": {"kind": "category", "categories": []}}}, "a.categories must name 1 to 1000 values"),
        ({"columns": {"a": {"kind": "category", "categories": ["x"], "missing": "y"}}}, "'y' is not among"),
        ({"columns": {"a": {"kind": "category", "categories": ["x"], "range": [0, 1]}}}, "no key 'schema"),
        ({"columns": {"a": {"kind": "text"}}}, "text needs either buckets (hashed words) or tokens"),
        ({"columns": {"a": {"kind": "text", "buckets": 0}}}, "a.buckets must be in 1 to 65,536"),
        ({"columns": {"a": 3}}, "schema.columns.a cannot be 3"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_used_is_refused_in_one_line(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        hospital(**changes)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_toml_and_json_hold_the_whole_schema(tmp_path: Path) -> None:
    schema = with_column('odd "name".here', kind="text", buckets=8)
    config = configure({"algorithm": "fedavg", "schema": schema, "data": {"name": "t.csv"}})
    (tmp_path / "e.toml").write_text(to_toml(config), encoding="utf-8")
    assert configure(tmp_path / "e.toml").schema == schema
    assert configure(read_toml(tmp_path / "e.toml")).schema == schema
    assert Schema.of(json.loads(json.dumps(schema.to_mapping(), sort_keys=True))).digest == schema.digest


def test_one_setting_of_one_column_can_be_changed() -> None:
    given = {"algorithm": "fedavg", "schema": HOSPITAL}
    config = configure(given, ["schema.columns.age.missing=70", "schema.label=dead"])
    assert config.schema is not None
    assert (config.schema.columns["age"].missing, config.schema.label) == (70, "dead")  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"there is no schema\.columns\.agee; did you mean 'age'"):
        configure(given, ["schema.columns.agee.missing=70"])
    with pytest.raises(ConfigError, match=r"task\.kind regression and schema\.task classification contradict"):
        configure(given, ["task.kind=regression"])


@pytest.mark.parametrize("change", ["range", "categories", "missing", "label", "classes", "new"])
def test_the_digest_is_of_all_that_a_model_sees(change: str) -> None:
    columns = HOSPITAL["columns"]
    changed = {
        "range": with_column("age", kind="number", range=[0, 101], missing=50),
        "missing": with_column("age", kind="number", range=[0, 100], missing=51),
        "categories": with_column("sex", kind="category", categories=["M", "F"]),
        "label": hospital(label="dead"),
        "classes": hospital(classes=[1, 0]),
        "new": Schema.of(HOSPITAL | {"columns": columns | {"bmi": {"kind": "number", "range": [10, 70]}}}),
    }
    assert changed[change].digest != hospital().digest
    assert hospital(unconfirmed=["age"]).digest == hospital().digest


def test_what_nobody_confirmed_is_noted(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv")
    (note,) = (note for note in load(path, schema=hospital(unconfirmed=["age"])).notes if "proposed" in note)
    assert "1 column (age) were proposed from the data, outside any guarantee" in note
    assert not any("proposed" in note for note in load(path, schema=hospital()).notes)


def test_what_the_schema_says_is_not_said_twice(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv")
    with pytest.raises(DataError, match=r"data\.label would be ignored, since the schema says it"):
        load(path, schema=hospital(), label="died")
    with pytest.raises(DataError, match="schema would be ignored, since digits comes with its own"):
        load("digits", schema=hospital())


def test_every_task_gets_its_targets(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x,stars,fever,cough,text\n" + "".join(f"{k},{k},{k % 2},1,ab{k}\n" for k in range(10)))
    x = {"x": {"kind": "number", "range": [0, 10]}}
    numbers = with_schema(path, Schema.of({"label": "stars", "range": [0, 5], "columns": x}))
    assert (numbers.task.kind, numbers.train_y.dtype, numbers.classes) == ("regression", torch.float32, ())
    assert sorted([*numbers.train_y.tolist(), *numbers.test_y.tolist()]) == list(range(10)), (
        "figures need them unclipped"
    )
    assert "values clipped to their public ranges: stars 4 (" in numbers.notes[0]
    labels = with_schema(path, Schema.of({"label": ["fever", "cough"], "columns": x}))
    assert (labels.task.kind, labels.classes, labels.train_y.shape) == ("multi-label", ("fever", "cough"), (8, 2))
    text = {"text": {"kind": "text", "tokens": 6}}
    tokens = with_schema(path, Schema.of({"columns": text}))
    assert (tokens.task.kind, tokens.train_x.dtype, tokens.input_shape) == ("next-token", torch.int64, (5,))
    a, b, digit = ord("a") + 1, ord("b") + 1, tokens.train_x[0, 2]
    assert tokens.train_x[0].tolist() == [a, b, digit, 0, 0]
    assert tokens.train_y[0].tolist() == [b, digit, -100, -100, -100]


def test_words_are_hashed_the_same_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('note,label\n"Chest pain, acute",0\nacute PAIN,1\n,0\n')
    schema = Schema.of({"label": "label", "classes": [0, 1], "columns": {"note": {"kind": "text", "buckets": 16}}})
    first, second, empty = encode_by_schema(schema, read_by_schema(schema, path)).inputs
    assert np.flatnonzero(first).tolist() == [1, 5, 7]
    assert set(np.flatnonzero(second)) < set(np.flatnonzero(first))
    assert not empty.any()
