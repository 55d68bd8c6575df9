"""The table of faults in docs/explanation/reliability.md stays true: every test that it names is there."""

import re

import pytest

from support.paths import ROOT

PAGE = ROOT / "docs" / "explanation" / "reliability.md"
NAMED = re.compile(r"`([\w/]+)::(test_\w+)`")
FAULTS = (
    "crash", "slow", "NaN", "1e30", "zero", "wrong shape", "missing key", "extra key", "1e9", "replayed", "duplicate",
    "empty cohort", "torn ledger", "edited ledger", "full disk", "read-only", "old checkpoint", "two runs",
    "killed data download", "10^12 rows", "pickle", "outside the run folder",
)  # fmt: skip


def rows() -> list[str]:
    table = PAGE.read_text(encoding="utf-8").split("| fault |")[1].split("\n\n")[0]
    return [line for line in table.splitlines()[2:] if line.startswith("|")]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split("|")[1].strip()[:40])
def test_every_fault_names_tests_that_exist(row):
    named = NAMED.findall(row)
    assert named, f"no test is named for: {row}"
    for file, test in named:
        path = ROOT / "tests" / f"{file}.py"
        assert path.is_file(), path
        assert re.search(rf"^def {test}\(", path.read_text(encoding="utf-8"), re.MULTILINE), f"{file} has no {test}"


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_is_forgotten(fault):
    assert any(fault in row for row in rows())
