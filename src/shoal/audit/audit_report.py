"""The results of an audit: audit.json, audit.png and report.html, which has both.

In `runs/audit-.../`, or in `audit/` of a run's folder, whose own page shows them too.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal import release
from shoal.accounting.rounding import up
from shoal.audit.audit_plot import COLOURS
from shoal.audit.bounds import CONFIDENCE
from shoal.errors import RunError
from shoal.report.claim_rows import at_least
from shoal.report.small_page import render

_BODY = """
<p>A claim is an upper bound on epsilon; an audit attacks the code that runs and measures a lower bound. “At least”
holds with confidence {{ confidence }}, and 95% where canaries are used too. The audit runs in a small
setting of its own, in which this epsilon is claimed: it checks whether the code keeps its claims, not how large the
epsilon of a run is.</p>
<div class="scroll" tabindex="0" role="region" aria-label="Verdicts"><table><thead><tr>
{% for name in head %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr>{% for value in row.cells %}<td>{{ value }}</td>{% endfor %}
<td class="{{ row.tone }}">{{ row.verdict }}</td></tr>
{% endfor %}</tbody></table></div>
<figure><picture>
<source media="(max-width: 700px)" srcset="data:image/png;base64,{{ narrow }}">
<img alt="What is claimed and what was measured" src="data:image/png;base64,{{ picture }}"></picture></figure>
<h2>Details</h2>
{% for row in rows %}<h3>{{ row.name }}: <span class="{{ row.tone }}">{{ row.verdict }}</span></h3>
<p>{{ row.setting }}</p><ul>{% for line in row.words %}<li>{{ line }}</li>{% endfor %}</ul>
{% endfor %}
"""

HEAD = ("method", "unit", "claim", "at least", "verdict")


Row = Mapping[str, Any]
"""An `Outcome.row()`, or the same from a file."""


def cells(row: Row) -> list[str]:
    """One claim as a row of a table, without the verdict."""
    claimed = row["kind"] if row["claimed"] is None else f"{row['kind']} {up(row['claimed'], 3)}"
    return [row["algorithm"], row["unit"], claimed, at_least(row["measured"])]


def words(row: Row) -> list[str]:
    """What each part of the audit found, and which broken variants it would catch."""
    lines = [f"game: {row['trials']:,} trials of each kind, epsilon at least {at_least(row['game'])}"]
    lines += [f"{check['name']}: {check['words']}" for check in row["checks"]]
    if (found := row["one_run"]) is not None:
        runs = f"{found['runs']} runs" if found["runs"] > 1 else "one run"
        lines.append(
            f"canaries: {found['right']:,} of {found['guesses']:,} guesses correct, {found['canaries']:,} canaries, "
            f"{runs}, epsilon at least {at_least(found['epsilon'])}"
        )
        lines.append(f"canaries, if their scores are assumed independent: {at_least(found['independent'])}")
    if (found := row["final_model"]) is not None:
        lines.append(
            f"final model only: epsilon at least {at_least(found['final'])}, where every round shows "
            f"{at_least(found['epsilon'])} ({found['canaries']:,} canaries, clients sampled as the method does)"
        )
    if row["true_bound"] is not None:
        lines.append(f"the shift suggests an epsilon of {row['estimate']:.0f}")
        lines.append(f"the true bound for this setting is {math.ceil(row['true_bound'])}")
    if row["flagged"]:
        lines.append(f"flagged by: {', '.join(row['flagged'])}")
    lines += [
        f"{name}: caught by {', '.join(by)}" if by else f"{name}: NOT caught"
        for name, by in row["would_catch"].items()
    ]
    return lines


def html(title: str, found: Sequence[Row], pictures: tuple[bytes, bytes], command: str) -> str:
    """The page as one self-contained HTML file; of the two pictures the second is for narrow screens."""
    rows = [
        {
            "cells": cells(row),
            "tone": row["verdict"] if row["verdict"] in COLOURS and " " not in row["verdict"] else "",
            "verdict": row["verdict"],
            "name": f"{row['algorithm']}, {row['unit']} level",
            "setting": row["setting"],
            "words": words(row),
        }
        for row in found
    ]
    return render(
        _BODY,
        pictures[0],
        narrow=base64.b64encode(pictures[1]).decode(),
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


def write(folder: Path, name: str, rows: Sequence[Row], pictures: tuple[bytes, bytes], command: str = "") -> Path:
    """Write figures, picture and page; return the page's path.

    Args:
        folder: Where to.
        name: What was audited.
        rows: What was found.
        pictures: For wide and for narrow screens.
        command: The command line that asked for it.

    Raises:
        RunError: Where they cannot be written.
    """
    results = {release.KEY: release.AUDIT, "command": command, "confidence": CONFIDENCE, "rows": list(rows)}
    try:
        (folder / "audit.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (folder / "audit.png").write_bytes(pictures[0])
        page = folder / "report.html"
        page.write_text(html(f"Audit of {name}", rows, pictures, command), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror or error}; choose another path") from None
    return page
