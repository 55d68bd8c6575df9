"""The results of an audit: audit.json, audit.png and report.html, which has both.

In `runs/audit-.../`, or in `audit/` of a run's folder, whose own page shows them too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from shoal import release
from shoal.accounting.rounding import up
from shoal.audit.audit_plot import COLOURS, picture
from shoal.audit.auditing import Outcome
from shoal.audit.bounds import CONFIDENCE
from shoal.audit.cases import DELTA
from shoal.errors import RunError
from shoal.report.claim_rows import at_least
from shoal.report.small_page import render

_BODY = """
<p>A claim is an upper bound on epsilon; an audit attacks the code that runs and measures a lower bound. “At least”
holds with confidence {{ confidence }} (99% where canaries are used too) for any mechanism. The audit runs in a small
setting of its own, in which this epsilon is claimed: it checks whether the code keeps its claims, not how large the
epsilon of a run is.</p>
<div class="scroll" tabindex="0" role="region" aria-label="Verdicts"><table><thead><tr>
{% for name in head %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr>{% for value in row.cells %}<td>{{ value }}</td>{% endfor %}
<td class="{{ row.tone }}">{{ row.verdict }}</td></tr>
{% endfor %}</tbody></table></div>
<figure tabindex="0"><img alt="False negatives against false positives, and the curve that each claim allows"
 src="data:image/png;base64,{{ picture }}"></figure>
<h2>Details</h2>
{% for row in rows %}<h3>{{ row.name }}: <span class="{{ row.tone }}">{{ row.verdict }}</span></h3>
<p>{{ row.setting }}</p><ul>{% for line in row.words %}<li>{{ line }}</li>{% endfor %}</ul>
{% endfor %}
"""

HEAD = ("method", "unit", "claim", "at least", "verdict")


def cells(outcome: Outcome) -> list[str]:
    """One claim as a row of a table, without the verdict."""
    row = outcome.row()
    claimed = row["kind"] if row["claimed"] is None else f"{row['kind']} {up(row['claimed'], 3)}"
    return [outcome.algorithm, row["unit"], claimed, at_least(row["measured"])]


def words(outcome: Outcome) -> list[str]:
    """What each part of the audit found, and which broken variants it would catch."""
    game = outcome.game
    lines = [f"game: {game.trials:,} trials of each kind, epsilon at least {at_least(game.epsilon(DELTA))}"]
    lines += [f"{check.name}: {check.words}" for check in outcome.checks]
    if outcome.guesses is not None:
        found = outcome.guesses
        least = at_least(found.epsilon)
        lines.append(f"canaries: {found.right} of {found.guesses} guesses correct, epsilon at least {least}")
    if outcome.case.true is not None:
        lines.append(f"the shift suggests an epsilon of {outcome.row()['estimate']:.0f}")
        lines.append(f"the true bound for this setting is {math.ceil(outcome.case.true)}")
    if outcome.flagged:
        lines.append(f"flagged by: {', '.join(outcome.flagged)}")
    lines += [
        f"{name}: caught by {', '.join(by)}" if by else f"{name}: NOT caught" for name, by in outcome.power.items()
    ]
    return lines


def html(title: str, outcomes: Sequence[Outcome], png: bytes, command: str) -> str:
    """The page as one self-contained HTML file."""
    rows = [
        {
            "cells": cells(outcome),
            "tone": outcome.verdict if outcome.verdict in COLOURS and " " not in outcome.verdict else "",
            "verdict": outcome.verdict,
            "name": f"{outcome.algorithm}, {outcome.case.unit} level",
            "setting": outcome.case.note,
            "words": words(outcome),
        }
        for outcome in outcomes
    ]
    return render(
        _BODY,
        png,
        title=title,
        rows=rows,
        head=HEAD,
        command=command,
        confidence=f"{CONFIDENCE:.2%}",
        release=release.AUDIT,
    )


def new_folder(runs: Path, name: str) -> Path:
    """The folder of an audit that belongs to no run."""
    return runs / f"audit-{datetime.now().strftime('%Y%m%d-%H%M%S-%f')}-{name.replace(':', '-')}"


@contextmanager
def place(folder: Path) -> Iterator[Path]:
    """Make the folder before the work starts, and remove it if it stays empty.

    Raises:
        RunError: Where it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder} cannot be made: {error.strerror or error}; choose another path") from None
    try:
        yield folder
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()


def write(folder: Path, name: str, outcomes: Sequence[Outcome], command: str = "") -> Path:
    """Write figures, picture and page; return the page's path.

    Raises:
        RunError: Where they cannot be written.
    """
    png = picture(outcomes)
    results = {release.KEY: release.AUDIT, "command": command, "confidence": CONFIDENCE}
    results["rows"] = [outcome.row() for outcome in outcomes]
    try:
        (folder / "audit.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (folder / "audit.png").write_bytes(png)
        page = folder / "report.html"
        page.write_text(html(f"Audit of {name}", outcomes, png, command), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror or error}; choose another path") from None
    return page
