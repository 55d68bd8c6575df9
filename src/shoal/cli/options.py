"""Options and output that several commands share."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shoal.errors import ConfigError

Change = Annotated[
    list[str] | None, typer.Option("-c", metavar="KEY=VALUE", help="Change one key of the configuration.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
JsonWithProgress = Annotated[
    bool, typer.Option("--json", help="One JSON object on standard output; progress on standard error.")
]
NoGuarantee = Annotated[bool, typer.Option("--no-guarantee", help="Allow methods that claim privacy but prove none.")]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Import the code that model.json names, such as a network of your own.")
]
PersonalClient = Annotated[
    str | None, typer.Option("--client", help="The client whose personal layers to use, where the run kept them.")
]
OutputFolder = Annotated[Path, typer.Option(help="Where the folder with table, figure and page is made.")]


def print_json(value: Any) -> None:
    """Write one JSON object to standard output."""
    sys.stdout.write(json.dumps(value) + "\n")


def bound(epsilon: float | None) -> str:
    """A proven epsilon in a column: `epsilon 4`, `none in practice (1.9e7)` or `none`."""
    from shoal.accounting.rounding import IN_NAME_ONLY
    from shoal.accounting.rounding import epsilon as words

    if epsilon is None:
        return "none"
    return words(epsilon) if epsilon > IN_NAME_ONLY else f"epsilon {words(epsilon)}"


def open_page(page: Path) -> None:
    """Open a page in the user's browser.

    Raises:
        ConfigError: Where there is none.
    """
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        raise ConfigError(f"no browser can be started here; open {page} yourself")


def command_line() -> str:
    """The command as it was given."""
    return shlex.join(["shoal", *sys.argv[1:]])


def wide_console(width: int = 200) -> Console:
    """A console that does not wrap lines where the output is a pipe or a file."""
    console = Console(emoji=False)
    return console if console.is_terminal else Console(emoji=False, width=width)
