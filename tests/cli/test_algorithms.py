"""`shoal algorithms` tells of every method what it does, what it proves and what its paper claims."""

import json

import pytest
import typer
from typer.testing import CliRunner

from shoal.algorithms import algorithm
from shoal.algorithms.charges import proves
from shoal.cli.algorithms import command
from shoal.config import configure
from support.small_federation import NAMES

APP = typer.Typer()
APP.command()(command)


def told(*words: str) -> str:
    ran = CliRunner().invoke(APP, list(words), env={"COLUMNS": "400"})
    assert ran.exit_code == 0, ran.output
    return ran.stdout


def test_the_table_holds_every_method_with_its_paper_claims_and_proof():
    lines = {line.split()[0]: line for line in told().splitlines() if line.strip()}
    for name in NAMES:
        record = algorithm(name)
        for words in (record.paper, record.claims, proves(record)):
            assert words in lines[name]


@pytest.mark.parametrize("name", NAMES)
def test_one_method_is_told_boundary_by_boundary(name):
    text = told(name)
    record = algorithm(name)
    assert text.startswith(f"{name}: {record.summary}")
    assert record.paper in text, "nothing in it is taken for markup"
    lines = text.splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith("per_record"))
    if record.per_record is None:
        assert "nothing happens here" in lines[place]
    else:
        assert type(record.per_record).__doc__.split("\n")[0].split(",")[0] in lines[place]
        assert lines[place + 1].split()[0].startswith("per_record.")


@pytest.mark.parametrize("name", NAMES)
def test_the_keys_that_are_shown_are_those_that_a_config_takes(name):
    shown = json.loads(told(name, "--json"))["algorithms"][0]
    assert shown["proves"] == proves(algorithm(name))
    keys = {
        f"{boundary}.{key}": value
        for boundary, values in shown["boundaries"].items()
        for key, value in (values or {}).items()
        if value is not None
    }
    assert len(keys) > 8
    assert configure({"algorithm": name} | keys).algorithm == algorithm(name)
