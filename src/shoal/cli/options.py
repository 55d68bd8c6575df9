"""Options and output that several commands share."""

from __future__ import annotations

import gc
import getpass
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
LogLevel = Annotated[str, typer.Option(help="The least level to log: debug, info, warning or error.")]
LogFormat = Annotated[str, typer.Option(help="The format of the log on standard error: text or json.")]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Import the code that model.json names, such as a network of your own.")
]
PasswordFile = Annotated[
    Path | None,
    typer.Option(help="A file with the password of the private key; else SHOAL_KEY_PASSWORD, or a terminal asks."),
]
PersonalClient = Annotated[
    str | None, typer.Option("--client", help="The client whose personal layers to use, where the run kept them.")
]
OutputFolder = Annotated[Path, typer.Option(help="Where the folder with table, figure and page is made.")]


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import without collecting garbage: what is imported stays, and going through it takes a tenth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def given_password(file: Path | None) -> bytes | None:
    """The password in a file, or in SHOAL_KEY_PASSWORD; None where neither is given."""
    if file is None:
        word = os.environ.get("SHOAL_KEY_PASSWORD")
        return word.encode() if word else None
    try:
        found = file.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--password-file {file} cannot be read: {error}") from None
    if not found:
        raise ConfigError(f"--password-file {file} is empty")
    return found.encode()


def password_of(key: Path, file: Path | None) -> bytes | None:
    """The password of a private key: as given, or as typed in a terminal where the key has one."""
    from shoal.federation.key_files import has_password

    given = given_password(file)
    if given is None and key.is_file() and sys.stdin.isatty() and has_password(key):
        given = getpass.getpass(f"Password of {key}: ").encode()
    return given


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
