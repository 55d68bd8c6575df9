"""The pages in docs/results: their tables are those that the kept files give, their sentences stay."""

import re
import shutil

import pytest
from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.papers import pages, table, tables
from shoal.papers.comparing import compare
from shoal.papers.pages import BLOCK, SHORT, to_block, write
from shoal.papers.running import read_lines
from support.paths import ROOT

RESULTS = ROOT / "docs" / "results"
PAGES = ("README.md", "thesis.md", "geyer.md", "pfl.md", "alphacdp.md")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The pages, written anew in another folder."""
    folder = tmp_path_factory.mktemp("results")
    for path in (*(RESULTS / name for name in PAGES), *RESULTS.glob("*.jsonl")):
        shutil.copy(path, folder)
    done = CliRunner().invoke(app, ["papers", "compare", "--all", "--write", str(folder)], catch_exceptions=False)
    assert done.exit_code == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_the_kept_files_say(written, name):
    assert (written / name).read_text(encoding="utf-8") == (RESULTS / name).read_text(encoding="utf-8"), (
        "give `shoal papers compare --all --write docs/results`"
    )


@pytest.mark.slow
def test_the_pictures_are_drawn(written):
    for name in ("frontier.png", "geyer-figure3.png"):
        assert (written / name).read_bytes().startswith(b"\x89PNG")


def test_every_table_stands_on_a_page_with_a_sentence_in_short():
    text = "".join((RESULTS / name).read_text(encoding="utf-8") for name in PAGES)
    shown = {name for _, kind, name, _ in BLOCK.findall(text) if kind == "compare"}
    numbered = {name for name in tables() if "table" in name}
    assert numbered <= shown
    assert numbered <= {name for name, _ in SHORT.findall(text)}


@pytest.mark.parametrize("name", PAGES)
def test_figures_that_a_table_is_quoted_with_are_in_it(name):
    """A sentence is written by hand, and stays when more seeds are run."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    for shown, short in SHORT.findall(text):
        rows = text[text.index(f"<!-- compare {shown} -->") : text.index(short)]
        figures = [float(figure) for figure in re.findall(r"\d+\.\d+", rows)]
        for quoted in re.findall(r"(?<![\d.])0\.\d\d+", short):
            half = 0.5000001 * 10.0 ** (2 - len(quoted))
            assert any(abs(figure - float(quoted)) <= half for figure in figures), (shown, quoted)


def test_a_claim_of_which_nothing_is_proven_is_shown_and_was_run():
    name = "thesis-table4.6"
    found = table(name)
    block = to_block(found, compare(found, read_lines(RESULTS / f"{name}.jsonl"), False))
    assert "| epsilon, proven | 8 | none |" in block
    assert "Not run" not in block


@pytest.mark.slow
def test_words_around_a_table_stay_and_old_figures_in_it_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "tables", lambda: {name: table(name) for name in ["thesis-table4.2"]})
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- compare thesis-table4.2 -->\nold\n<!-- end -->\n\n**In short:** so.\n", encoding="utf-8"
    )
    (tmp_path / "README.md").write_text("<!-- overview -->\n<!-- end -->\n", encoding="utf-8")
    assert {path.name for path in write(tmp_path, read_lines(RESULTS / "thesis-table4.2.jsonl"))} == {
        "page.md",
        "README.md",
    }
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("**In short:** so.\n")
    assert "old" not in text
    assert "| sigma 8/MNIST | accuracy | 0.8963 |" in text
    overview = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| [thesis-table4.2](page.md#thesis-table4.2) | 3 | 🟢 3 | 🟢 3 | 🟢 3 | so. |" in overview


@pytest.mark.slow
def test_a_name_or_all_with_a_folder(tmp_path):
    for words in ([], ["--all"], ["geyer-table1", "--all", "--write", str(tmp_path)]):
        done = CliRunner().invoke(app, ["papers", "compare", *words])
        assert done.exit_code != 0
    done = CliRunner().invoke(app, ["papers", "compare", "--all", "--write", str(tmp_path / "nosuch")])
    assert done.exit_code != 0
