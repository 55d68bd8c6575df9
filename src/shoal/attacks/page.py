"""The results of an attack: `runs/attack-.../` with attack.json, attack.png and report.html, which has both."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal import release
from shoal.errors import RunError

COLUMNS = {
    "method": "method",
    "algorithm": "algorithm",
    "model": "model",
    "type": "type",
    "attack": "attack",
    "records": "records",
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
    "tpr_at_1_percent_fpr": "TPR at 1% FPR",
}

PROVES_NOTHING = "A failed attack proves nothing; only an epsilon does."

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="release" content="{{ release }}"><meta name="color-scheme" content="light dark">
<title>{{ title }} · Shoal</title><link rel="icon" href="data:,">
<style>
:root {
  --paper: #fbfbf9; --card: #fff; --ink: #1a1d21; --soft: #5b6470; --rule: #e4e5e1; --bad: #a63314;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #111417; --card: #181c20; --ink: #e8eaec; --soft: #a3adb8; --rule: #2a3037; --bad: #ff9a7c;
  }
}
body {
  margin: 0 auto; max-width: 1120px; padding: 32px; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, sans-serif; font-variant-numeric: tabular-nums;
}
h1 { font-size: 30px; letter-spacing: -.02em; line-height: 1.2; margin: 0 0 8px; }
p { max-width: 76ch; color: var(--soft); }
figure {
  margin: 24px 0; padding: 12px; overflow-x: auto; background: #fff;
  border: 1px solid var(--rule); border-radius: 12px;
}
img { display: block; max-width: none; }
@media (min-width: 900px) { img { max-width: 100%; } }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; }
th, td {
  text-align: left; padding: 7px 18px 7px 0; border-bottom: 1px solid var(--rule);
  font-weight: 400; white-space: nowrap;
}
thead th { color: var(--soft); } .leaks { color: var(--bad); }
pre {
  overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px;
  font-size: 12.5px;
}
</style></head><body><main>
<h1>{{ title }}</h1>
{% for line in words %}<p>{{ line }}</p>{% endfor %}
<figure><img alt="{{ about }}" src="data:image/png;base64,{{ picture }}"></figure>
<div class="scroll"><table>
<thead><tr>{% for name in head %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}<tr class="{{ row.tone }}">{% for value in row.cells %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
{% if command %}<p>Command</p><pre>{{ command }}</pre>{% endif %}
</main></body></html>
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
    import jinja2

    chosen = columns(rows)
    filled = [
        {"cells": [shown(row.get(key)) for key in chosen], "tone": _tone(row)} for row in rows
    ]  # fmt: skip
    template = jinja2.Environment(autoescape=True).from_string(_TEMPLATE)
    return template.render(
        title=title, words=words, rows=filled, head=chosen.values(), about=about, command=command,
        picture=base64.b64encode(png).decode(), release=release.ATTACK,
    )  # fmt: skip


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
