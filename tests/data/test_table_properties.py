"""Tables in every kind of disorder: each is read as it stands or refused in one line; no value changes silently."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.data.columns import MISSING_TEXTS
from shoal.data.common_columns import find_client, find_label
from shoal.data.load import load, with_schema
from shoal.data.propose import propose
from shoal.data.schema import Schema
from shoal.data.schema_encoding import encode_by_schema, read_by_schema
from shoal.data.table_files import column_names, read_columns
from shoal.errors import ShoalError

FEW = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
NUMBERS = st.one_of(
    st.integers(-1000, 1000).map(str),
    st.floats(-1e6, 1e6, allow_nan=False).map(repr),
    st.sampled_from(["", "NA", "?", "nan", "1e3", " 7 ", "+2", ".5"]),
)
ODD = st.sampled_from(["high", "inf", "-inf", "1e999", "12,5", "1_000", "0x10", "٣", "1 2", "½"])
TEXTS = st.one_of(
    st.sampled_from(["F", "M", "F", "M", "", "NA", "X", "007", "7", "7.0", "true", "True"]),
    st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=6),
)
LABELS = st.sampled_from(["0", "1", "0", "1", "0.0"])
OWNERS = st.sampled_from(["north", "south", "east"])
SCHEMA = Schema.of(
    {
        "label": "label",
        "classes": [0, 1],
        "client_column": "site",
        "columns": {
            "number": {"kind": "number", "range": [-100, 300], "missing": 0},
            "group": {"kind": "category", "categories": ["F", "M", "7", "007", "true"]},
        },
    }
)


@st.composite
def tables(draw: Any, numbers: Any = NUMBERS, labels: Any = LABELS) -> tuple[list[str], list[list[str]]]:
    """The header and rows of a table with SCHEMA's columns, in any order, and others."""
    kinds = {"number": numbers, "group": TEXTS, "label": labels, "site": OWNERS}
    others = draw(
        st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\x00\r\n"), min_size=1), max_size=2)
    )
    names = draw(st.permutations([*kinds, *(name for name in dict.fromkeys(others) if name not in kinds)]))
    rows = draw(st.lists(st.tuples(*(kinds.get(name, TEXTS) for name in names)), min_size=2, max_size=12))
    return list(names), [list(row) for row in rows]


def written(header: list[str], rows: list[list[str]], **form: Any) -> bytes:
    """A .csv: `end`, `mark`, `quote` and `encoding` as given."""
    out = io.StringIO()
    rule = csv.QUOTE_ALL if form.get("quote", True) else csv.QUOTE_MINIMAL
    writer = csv.writer(out, lineterminator=form.get("end", "\n"), delimiter=form.get("mark", ","), quoting=rule)
    writer.writerow(header)
    writer.writerows(rows)
    return out.getvalue().encode(form.get("encoding", "utf-8"))


def refusal(read: Callable[[], Any]) -> str | None:
    """What a ShoalError says, in one line; any other error is a failure."""
    try:
        read()
    except ShoalError as error:
        words = str(error)
        assert "\n" not in words, words
        return words
    return None


def expected(cell: str) -> tuple[float, bool]:
    """What `number` becomes, from first principles."""
    if cell.strip() in MISSING_TEXTS:
        return 2 * (0 + 100) / 400 - 1, True
    return 2 * (min(max(float(cell), -100.0), 300.0) + 100) / 400 - 1, False


def group(cell: str) -> str:
    """However a table writes yes and no, and 7."""
    return cell.lower() if cell.lower() in ("true", "false") else {"7.0": "7"}.get(cell, cell)


@pytest.mark.slow
@FEW
@given(tables(), st.sampled_from(["\n", "\r\n"]), st.sampled_from([",", ";", "\t"]), st.booleans())
def test_what_is_read_is_what_is_written(
    tmp_path: Path, table: tuple[list[str], list[list[str]]], end: str, mark: str, bom: bool
) -> None:
    header, rows = table
    path = tmp_path / "t.csv"
    path.write_bytes(written(header, rows, end=end, mark=mark, encoding="utf-8-sig" if bom else "utf-8"))
    found = encode_by_schema(SCHEMA, read_by_schema(SCHEMA, path))
    cells = {name: [row[at] for row in rows] for at, name in enumerate(header)}
    features = dict(zip(SCHEMA.features, found.inputs.T, strict=True))
    assert len(found.inputs) == len(rows)
    numbers, absent = zip(*map(expected, cells["number"]), strict=True)
    assert np.allclose(features["number"], numbers, rtol=0, atol=1e-6)
    assert features["number is missing"].tolist() == list(absent)
    for name in SCHEMA.columns["group"].categories:  # type: ignore[union-attr]
        assert features[f"group={name}"].tolist() == [group(cell) == name for cell in cells["group"]], name
    assert found.targets is not None
    assert found.targets.tolist() == [int(float(cell)) for cell in cells["label"]]
    assert found.owners is not None
    assert found.owners.tolist() == cells["site"]
    changed = any(
        not -100 <= float(cell) <= 300 for cell, gap in zip(cells["number"], absent, strict=True) if not gap
    )
    assert changed == any("clipped to their public ranges: number" in note for note in found.notes)


@pytest.mark.slow
@FEW
@given(tables(numbers=st.one_of(NUMBERS, ODD), labels=st.one_of(LABELS, TEXTS)))
def test_what_is_no_number_or_no_class_is_refused_in_one_line_and_nothing_else_is(
    tmp_path: Path, table: tuple[list[str], list[list[str]]]
) -> None:
    header, rows = table
    path = tmp_path / "t.csv"
    path.write_bytes(written(header, rows))
    cells = {name: [row[at].strip() for row in rows] for at, name in enumerate(header)}
    usable = all(cell in MISSING_TEXTS or is_number(cell) for cell in cells["number"])
    labels = [row[header.index("label")] for row in rows]
    usable &= all(label in ("0", "1", "0.0") for label in labels)
    refused = refusal(lambda: encode_by_schema(SCHEMA, read_by_schema(SCHEMA, path)))
    assert (refused is None) == usable
    assert refused is None or "column 'number'" in refused or "label column 'label'" in refused


def is_number(cell: str) -> bool:
    """Python reads a few more forms than a table may have."""
    try:
        return cell.isascii() and "_" not in cell and math.isfinite(float(cell))
    except ValueError:
        return False


@pytest.mark.slow
@FEW
@given(tables(numbers=st.one_of(NUMBERS, ODD), labels=st.one_of(LABELS, TEXTS)), st.integers(0, 2))
def test_a_proposal_reads_its_own_table_or_says_why_not(
    tmp_path: Path, table: tuple[list[str], list[list[str]]], copies: int
) -> None:
    header, rows = table
    path = tmp_path / "t.csv"
    path.write_bytes(written(header, rows * (10**copies)))
    names = column_names(path)
    found: list[Any] = []

    def read() -> None:
        found.append(proposal := propose(path, [find_label(names) or "label"], find_client(names)))
        found.append(with_schema(path, proposal.schema))

    if refusal(read) is not None:
        return
    proposal, dataset = found
    assert len(dataset.train_y) + len(dataset.test_y) == len(rows) * 10**copies == proposal.rows
    for name in proposal.schema.unconfirmed:
        assert name in proposal.why


@pytest.mark.slow
@FEW
@given(
    tables(), st.binary(min_size=1, max_size=4), st.integers(0, 10**6), st.sampled_from(["replace", "insert", "cut"])
)
def test_damaged_bytes_give_errors_of_one_line_only(
    tmp_path: Path, table: tuple[list[str], list[list[str]]], bad: bytes, at: int, how: str
) -> None:
    data = written(*table)
    at %= len(data)
    path = tmp_path / "t.csv"
    path.write_bytes(
        data[:at] if how == "cut" else data[:at] + bad + data[at + (len(bad) if how == "replace" else 0) :]
    )
    for read in (
        lambda: encode_by_schema(SCHEMA, read_by_schema(SCHEMA, path)),
        lambda: load(path),
        lambda: propose(path, ["label"], "site"),
    ):
        refusal(read)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le", "cp1252"])
def test_another_encoding_is_refused_and_named(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(
        written(["number", "group", "label", "site"], [["1", "é", "0", "Zürich"]] * 4, encoding=encoding)
    )
    with pytest.raises(ShoalError) as refused:
        encode_by_schema(SCHEMA, read_by_schema(SCHEMA, path))
    assert "UTF-8" in str(refused.value) or "UTF8" in str(refused.value) or "no columns" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_two_columns_of_one_name_are_refused_where_they_matter(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("number,group,label,site,x,x\n1,F,0,n,1,2\n2,M,1,s,1,2\n")
    assert read_by_schema(SCHEMA, path).num_rows == 2
    for text in ("number,number,group,label,site\n1,1,F,0,n\n", "x,x,label\n1,2,0\n"):
        path.write_text(text)
        for read in (
            lambda: read_by_schema(SCHEMA, path),
            lambda: load(path),
            lambda: propose(path, ["label"], None),
        ):
            with pytest.raises(ShoalError, match=r"several columns named|no columns"):
                read()


def test_one_class_and_no_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("number,group,label,site\n1,F,0,n\n2,M,0,s\n")
    with pytest.raises(ShoalError, match=r"label column 'label' holds '0' only; two classes are needed"):
        propose(path, ["label"], "site")
    path.write_text("number,group,label,site\n")
    with pytest.raises(ShoalError, match="has no rows"):
        read_by_schema(SCHEMA, path)
    path.write_bytes(b"")
    with pytest.raises(ShoalError, match="no columns"):
        read_by_schema(SCHEMA, path)


@pytest.mark.slow
def test_of_a_million_columns_a_few_are_read_and_all_are_refused_by_the_header(tmp_path: Path) -> None:
    names = ["number", "group", "label", "site", *(f"c{k}" for k in range(10**6 - 4))]
    path = tmp_path / "wide.csv"
    row = ",5" * (10**6 - 4)
    path.write_text(f"{','.join(names)}\n1,F,0,n{row}\n2,M,1,s{row}\n")
    assert encode_by_schema(SCHEMA, read_by_schema(SCHEMA, path)).targets.tolist() == [0, 1]  # type: ignore[union-attr]
    for read in (lambda: load(path), lambda: propose(path, ["label"], "site"), lambda: read_columns(path, names)):
        with pytest.raises(ShoalError, match="has 1,000,000 columns, more than 100,000") as refused:
            read()
        assert len(str(refused.value)) < 300
