"""The code blocks of a Markdown page, and how a reader would run them."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from shoal.cli.main import app

FENCED = re.compile(r"^```(\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file that its title names, and its text."""

    language: str
    title: str | None
    text: str


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(found[1], found["title"], found[3]) for found in FENCED.finditer(text)]


def commands(text: str) -> Iterator[list[str]]:
    """Every `shoal ...` in a code block of a page, as words; comments, pipes and line breaks are taken away."""
    code = [block.text for block in blocks(text) if block.language in ("sh", "processes")]
    for part in (*code, *INDENTED.findall(text)):
        for line in part.replace("\\\n", " ").splitlines():
            if found := re.match(r"\s*(?:\.venv/bin/)?(shoal .*)", line):
                yield shlex.split(found[1], comments=True)[1:]


@dataclass
class Reader:
    """Follows a page in a folder: Python in one namespace, commands in this process.

    Attributes:
        folder: The working folder.
        small: What is appended to every `shoal run`, so that it takes a second.
    """

    folder: Path
    small: tuple[str, ...] = ()
    names: dict[str, Any] = field(default_factory=dict)

    def follow(self, text: str) -> Iterator[Block]:
        """Run the page's blocks; those of other languages are left to the caller."""
        for block in blocks(text):
            if block.title:
                (self.folder / block.title).write_text(block.text, encoding="utf-8")
            elif block.language == "python":
                exec(compile(block.text, "page", "exec"), self.names)
            elif block.language == "sh":
                for line in block.text.replace("\\\n", " ").splitlines():
                    self.run(line)
            else:
                yield block

    def run(self, line: str) -> None:
        """One line of a shell."""
        if line.startswith("RUN="):
            return
        runs = sorted(self.folder.glob("runs/*/config.toml"), key=lambda path: path.stat().st_mtime_ns)
        words = shlex.split(line.replace("$RUN", str(runs[-1].parent) if runs else ""), comments=True)
        if words[0] == "cp":
            for name in words[1:-1]:
                shutil.copy(self.folder / name, self.folder / words[-1])
            return
        words = [word for each in words[1:] for word in (map(str, self.folder.glob(each)) if "*" in each else [each])]
        if words[0] == "run":
            words += [word for each in self.small for word in ("-c", each)]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, f"{line}\n{done.output}"
