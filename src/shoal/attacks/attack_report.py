"""The results of an attack: `runs/attack-.../` with attack.json, attack.png and report.html, which has both."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal import release
from shoal.errors import RunError
from shoal.report.small_page import render

COLUMNS = {
    "method": "method",
    "algorithm": "algorithm",
    "model": "model",
    "type": "type",
    "attack": "attack",
    "records": "records",
    "sites": "sites",
    "honest": "honest",
    "naive": "naive",
    "success": "success",
    "rmse": "RMSE",
    "psnr": "PSNR",
    "ssim": "SSIM",
    "label_hits": "labels",
    "iterations": "iterations",
    "iterations_to_success": "to success",
    "seconds": "seconds",
    "advantage": "advantage",
    "guessing": "by guessing",
    "auc": "AUC",
    "tpr_at_0_1_percent_fpr": "TPR at 0.1% FPR",
    "tpr_at_1_percent_fpr": "TPR at 1% FPR",
}

PROVES_NOTHING = "A failed attack proves nothing; only an epsilon does."

_BODY = """
{% for line in words %}<p>{{ line }}</p>{% endfor %}
<figure tabindex="0"><img alt="{{ about }}" src="data:image/png;base64,{{ picture }}"></figure>
<div class="scroll" tabindex="0" role="region" aria-label="Figures"><table class="figures">
<thead><tr>{% for name in head %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}<tr class="{{ row.tone }}">{% for value in row.cells %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
"""


def shown(value: object) -> str:
    """A value as text."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
    return str(value)


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The columns that occur in the rows, as key and heading."""
    return {key: name for key, name in COLUMNS.items() if any(key in row for row in rows)}


def caveats(model: str) -> str:
    """What a reconstruction does not show; printed on every page."""
    return (
        f"The attacked model, {model}, is untrained and easy to attack; it is not one of your runs. Types 0 and 1 "
        f"see one step with learning rate 1 on 3 records, unless --honest or --records says otherwise. "
        f"{PROVES_NOTHING}"
    )


def html(
    title: str, words: Sequence[str], rows: Sequence[Mapping[str, Any]], png: bytes, about: str, command: str = ""
) -> str:
    """The page as one self-contained HTML file."""
    chosen = columns(rows)
    return render(
        _BODY,
        png,
        title=title,
        words=words,
        rows=[{"cells": [shown(row.get(key)) for key in chosen], "tone": _tone(row)} for row in rows],
        head=chosen.values(),
        about=about,
        command=command,
        release=release.ATTACK,
    )


def write(
    runs: Path,
    name: str,
    *,
    title: str,
    words: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    png: bytes,
    about: str,
    facts: Mapping[str, Any],
    command: str = "",
) -> Path:
    """Write a new folder with figures, picture and page.

    Args:
        runs: Where the folder is made.
        name: The end of its name.
        title: The page's title.
        words: Its paragraphs.
        rows: The figures.
        png: The picture.
        about: The picture in words.
        facts: Further entries of attack.json.
        command: The command that made it.

    Returns:
        The folder.

    Raises:
        RunError: Where it cannot be written.
    """
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    folder = runs / f"attack-{stamp}-{name.replace(':', '-')}"
    try:
        folder.mkdir(parents=True)
        results = {release.KEY: release.ATTACK, "title": title, "command": command, **facts, "rows": list(rows)}
        (folder / "attack.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (folder / "attack.png").write_bytes(png)
        (folder / "report.html").write_text(html(title, words, rows, png, about, command), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror or error}; choose another path") from None
    return folder


def _tone(row: Mapping[str, Any]) -> str:
    """Red where anything leaked; never green, since another attack may succeed."""
    return "leaks" if row.get("success") else ""
