"""Every command that the documentation shows is one that Shoal knows, with options that it has."""

import pytest
import typer

from shoal.cli.main import app
from support.markdown import commands
from support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def unknown(words):
    """The first word that no command has; None where all are known."""
    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    if hasattr(command, "commands") and words and not words[0].startswith("-"):
        return words[0]
    known = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)} | {"--help"}
    if command.name == "shoal":
        known |= {"--install-completion", "--show-completion"}
    return next((word for word in words if word.startswith("-") and word not in known), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_known(page):
    wrong = {
        " ".join(words): found for words in commands(page.read_text(encoding="utf-8")) if (found := unknown(words))
    }
    assert wrong == {}


def test_commands_are_found_at_all():
    shown = [words for page in PAGES for words in commands(page.read_text(encoding="utf-8"))]
    assert len(shown) > 100
    assert unknown(["run", "--nosuch"]) == "--nosuch"
    assert unknown(["nosuch"]) == "nosuch"
