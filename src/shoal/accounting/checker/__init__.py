"""Check a certificate of `shoal certify` without Shoal: this folder imports nothing of it, and runs by itself.

    pip install dp-accounting cryptography
    python -m checker certificate.json [--ledger F] [--config F] [--model F] [--public-key F] [--site NAME=F] ...

It reads the ledger's hash chain, counts the events, and computes every epsilon anew from the events' JSON. Shoal
composes curves of its own; this takes dp-accounting's privacy loss distributions, or the closed form where all noise
is Gaussian without sampling. Every figure is an upper bound.

    certificate_file     how a certificate is written, hashed, signed and bound to other files
    charged_rounds       whether ledgers are unbroken, and charge what is claimed
    claim_figures        whom a claim may cover, and its epsilon
    event_costs          what each kind of event costs: one function each, under all of its fields
    loss_distributions   pairs of distributions, and their composition
    block_ratio          the ratio of densities where a unit enters one round of a block
    work_limit           how much a certificate may ask for

Exit code 0: every line that could be compared holds. 1: a line does not hold, or cannot be checked. 2: bad input.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .certificate_file import FORMAT, BadInput, Line, digest_line, file_line, read_bytes, refuse, signature_line
from .charged_rounds import ledger_lines, site_lines
from .claim_figures import claim_line
from .work_limit import Work

__all__ = ["BadInput", "Line", "check", "holds", "printable", "shown"]

LONGEST = 1000  # characters of a line
_MARKS = {"yes": "yes", "no": "NO", "unknown": "?", "absent": "-"}


def check(
    path: Path,
    ledger: Path | None = None,
    config: Path | None = None,
    model: Path | None = None,
    public_key: Path | None = None,
    sites: Mapping[str, Path] | None = None,
    work: float = 1.0,
) -> list[Line]:
    """Check a certificate against these files; what is not given is said to be `absent`.

    `work`: how many times as much is done for it as usual, before it is left unchecked.
    """
    raw, allowed = read_bytes(path), Work(work)
    try:
        held = json.loads(raw.decode("utf-8"), parse_constant=refuse)
        if held["format"] != FORMAT:
            raise BadInput(f"{path} has the format {held['format']!r}; this checker reads {FORMAT}")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadInput(f"{path} is not a certificate") from None
    try:
        return [
            digest_line(held, raw),
            signature_line(held, public_key),
            *(claim_line(claim, allowed) for claim in held["claims"]),
            file_line("configuration", held["hashes"]["config"], config),
            file_line("model", held["hashes"]["model"], model),
            *ledger_lines(held, ledger, allowed),
            *site_lines(held, sites or {}),
        ]
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise BadInput(f"{path} is malformed: {type(error).__name__} {error}") from None


def holds(lines: list[Line]) -> bool:
    """Whether nothing is wrong, and nothing is beyond this checker."""
    return all(line.verdict in ("yes", "absent") for line in lines)


def shown(lines: list[Line]) -> str:
    """The lines, and the answer in one."""
    said = [*(f"{_MARKS[line.verdict]:<4}{line.what}: {line.words}" for line in lines), verdict(lines)]
    return "\n".join(map(printable, said))


def printable(words: str) -> str:
    """One line: a stranger's words must neither end it nor draw on the terminal."""
    short = words if len(words) <= LONGEST else f"{words[:LONGEST]}..."
    return "".join(each if each.isprintable() else "?" for each in short)


def verdict(lines: list[Line]) -> str:
    """The answer in one line."""
    if holds(lines):
        missing = [line.what for line in lines if line.verdict == "absent" and "not given" in line.words]
        return "yes: every figure holds" + (f"; not compared: {', '.join(missing)}" if missing else "")
    wrong = next((line for line in lines if line.verdict == "no"), None)
    if wrong is not None:
        return f"NO: {wrong.what}: {wrong.words}"
    return "cannot say yes: some lines cannot be checked"
