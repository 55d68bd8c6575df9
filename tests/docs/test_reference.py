"""What the site takes from the code: no key without a meaning, no paper without a link to it, no key undescribed."""

import json
import re
import sys
from dataclasses import fields, is_dataclass

import pytest

from shoal.algorithms.base import BOUNDARIES
from shoal.bibliography import ACCOUNTING, BIBLIOGRAPHY
from shoal.config import _SECTIONS, _TOP
from support.paths import ROOT
from support.tiny import PRIVATE, play

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def hooks():
    sys.path.insert(0, str(DOCS))
    try:
        import hooks

        yield hooks
    finally:
        sys.path.remove(str(DOCS))


def rows(text):
    """The cells of all table rows."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("| "))] for line in lines]


@pytest.mark.slow
def test_every_key_of_the_configuration_is_there_with_a_type_a_default_and_a_meaning(hooks):
    found = {cells[0].strip("`"): cells for cells in rows(hooks.configuration())}
    keys = set(_TOP) | {f"{name}.{each.name}" for name, section in _SECTIONS.items() for each in fields(section)}
    for record in hooks.methods().values():
        held = {name: getattr(record, name) for name in BOUNDARIES}
        keys |= {f"{name}.{each.name}" for name, one in held.items() if is_dataclass(one) for each in fields(one)}
    assert keys <= found.keys()
    assert {key: cells for key, cells in found.items() if len(cells) != 4 or not all(cells)} == {}


def test_every_section_of_a_configuration_is_described(hooks):
    assert set(hooks.SECTIONS) == {*_SECTIONS, *BOUNDARIES, "schema"}


def test_every_command_has_a_heading_and_a_sentence(hooks):
    parts = re.split(r"^#+ ", hooks.commands(), flags=re.MULTILINE)[1:]
    assert len(parts) > 30
    assert [part for part in parts if len(part.split("\n\n")[1]) < 10] == []


def test_marks_are_filled_in(hooks):
    assert hooks.on_page_markdown("a\n<!-- generated methods -->\nb") == f"a\n{hooks.all_methods()}\nb"
    pages = [path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")]
    marks = {name for text in pages for name in hooks.MARK.findall(text)}
    assert marks == {*hooks.GENERATED, *hooks.PICTURES}


def test_every_paper_of_the_program_is_in_the_bibliography():
    text = (DOCS / "reference" / "bibliography.md").read_text(encoding="utf-8")
    for each in (*BIBLIOGRAPHY, *ACCOUNTING):
        assert f"| {each.short} |" in text
        assert each.link in text


@pytest.mark.slow
def test_what_a_run_writes_is_what_the_schemas_and_the_page_on_files_say(hooks, tmp_path):
    result = play(tmp_path, PRIVATE)
    written = {name: json.loads((result.run / name).read_text()) for name in ("result.json", "model.json")}
    shapes = hooks.shapes()
    for name, held in written.items():
        shapes[name].model_validate(held)
        assert shapes[name].model_json_schema()["properties"].keys() <= held.keys()
    for claim in written["result.json"]["proven"]:
        shapes["Claim"].model_validate(claim)
    page = (DOCS / "reference" / "files.md").read_text(encoding="utf-8")
    files = [path.name for path in result.run.rglob("*") if path.is_file()]
    assert [name for name in files if name not in page and not name.startswith(".")] == []
    lines = (result.run / "metrics.jsonl").read_text().splitlines()
    assert {key for line in lines for key in json.loads(line) if f"`{key}`" not in page} == set()
