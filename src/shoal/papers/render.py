"""A comparison as Markdown, CSV or HTML, and the curves of a figure as a PNG."""

from __future__ import annotations

import csv
import io
import math
from base64 import b64encode
from collections.abc import Iterable
from html import escape
from typing import Any

from shoal.accounting.rounding import epsilon, plain
from shoal.extras import optional
from shoal.papers.comparing import (
    CONTRADICTED,
    EXCEEDED,
    FAILED,
    LIGHTS,
    NOT,
    PROVEN,
    REPRODUCED,
    WITH,
    Compared,
    lights,
)
from shoal.papers.table import Line, Table

HEADINGS = ("cell", "figure", "published", "ours", "seeds", "device", "difference", "proven", "claim")
NUMBERS = (
    *("row", "column", "change", "figure", "published", "ours", "least", "greatest", "seeds", "device", "difference"),
    *("proven", "claim", "note", "quick"),
)
COLOURS = {REPRODUCED: "green", EXCEEDED: "green", WITH: "yellow", NOT: "red", CONTRADICTED: "red", FAILED: "magenta"}
LEGEND = 2.5  # inches, on the right of a figure's curves
QUICK = "quick version: small data, few clients and rounds; it is not expected to reach the published figures"


def cells(row: Compared) -> list[str]:
    """One row of the table, as text."""
    name = f"{row.cell.row}/{row.cell.column}" + (f" ({row.cell.change})" if row.cell.change else "")
    claim = f"{row.light} {row.note}" if row.light == WITH else ": ".join(filter(None, (row.light, row.note)))
    return [
        name,
        f"{row.measure}, by its recipe" if row.cell.work.instant else row.measure,
        figure(row.published, row.measure),
        _ours(row),
        str(len(row.values) or ""),
        row.device,
        _signed(row),
        row.proven,
        claim,
    ]


def figure(value: float | None, measure: str) -> str:
    """A figure as text; the measure decides on its digits."""
    if value is None:
        return ""
    if measure == PROVEN:
        return epsilon(value)
    if math.isinf(value):
        return "never"
    if measure == "resilient":
        return {0.0: "no", 1.0: "yes"}.get(value, f"{value:.2f}")
    if measure in ("accuracy", "success", "rmse"):
        return f"{value:.4f}"
    return plain(value, 4) if abs(value) < 1e4 else f"{value:.0f}"


def _ours(row: Compared) -> str:
    """The mean over seeds and their range; of proven bounds the greatest."""
    if row.ours is None:
        return "none" if row.measure == PROVEN else ""
    mean = figure(row.ours, row.measure)
    if row.measure == PROVEN:
        return mean
    if row.spread is None or math.isinf(row.spread[1]) or math.isclose(*row.spread, rel_tol=1e-6):
        return mean
    least, greatest = (figure(value, row.measure) for value in row.spread)
    return f"{mean} ({least} to {greatest})"


def _signed(row: Compared) -> str:
    if row.difference is None or row.measure in ("resilient", PROVEN):
        return ""
    if row.measure == "step_seconds":
        return _times(row)
    text = figure(abs(row.difference), row.measure)
    return ("+" if row.difference >= 0 else "-") + text


def _times(row: Compared) -> str:
    """How much faster ours is."""
    if not row.published or not row.ours:
        return ""
    ratio = row.published / row.ours
    text = f"{float(f'{max(ratio, 1 / ratio):.3g}'):,.10g}"
    return "the same" if text == "1" else f"{text} x {'faster' if ratio > 1 else 'slower'}"


def summary(rows: Iterable[Compared]) -> str:
    """The counts of all verdicts, in one line."""
    counted = lights(rows)
    return ", ".join(
        f"{counted[light]} {light}" + (" a change" * (light == WITH)) for light in LIGHTS if counted[light]
    )


def markdown_line(words: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(" ".join(word.split()).replace("|", "\\|") for word in words) + " |"


def to_markdown(table: Table, rows: list[Compared]) -> str:
    """The comparison as a section of Markdown."""
    head = [f"## {table.name}, {table.paper}: {table.title}", ""]
    head += [f"*Published:* {table.about}", ""] if table.about else []
    head += [f"*{QUICK}*", ""] if any(row.quick for row in rows) else []
    body = [markdown_line(HEADINGS), "|" + "---|" * len(HEADINGS), *(markdown_line(cells(row)) for row in rows)]
    return "\n".join([*head, *body, "", f"{summary(rows)}", ""])


def to_csv(rows: list[Compared]) -> str:
    """The comparison as numbers, for other programs."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(NUMBERS)
    for row in rows:
        least, greatest = row.spread or (row.ours, row.ours)
        place = (row.cell.row, row.cell.column, row.cell.change, row.measure)
        numbers = (row.published, row.ours, least, greatest, len(row.values), row.difference)
        *words, difference = ["" if number is None else repr(number) for number in numbers]
        writer.writerow([*place, *words, row.device, difference, row.proven, row.light, row.note, int(row.quick)])
    return file.getvalue()


def to_html(table: Table, rows: list[Compared], lines: list[Line]) -> str:
    """One self-contained page."""
    picture = curves(table, rows, lines)
    shown = f'<img alt="curves" src="data:image/png;base64,{b64encode(picture).decode()}">' if picture else ""
    head = "".join(f"<th>{word}</th>" for word in HEADINGS)
    body = "\n".join(
        f'<tr class="{row.light.replace(" ", "-")}">'
        + "".join(f"<td>{escape(word)}</td>" for word in cells(row))
        + "</tr>"
        for row in rows
    )
    quick = f"<p><b>{QUICK}</b></p>" if any(row.quick for row in rows) else ""
    about = f"<p><i>Published:</i> {escape(table.about)}</p>" if table.about else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(table.name)}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: left; }}
tr.reproduced td:last-child, tr.exceeded td:last-child {{ background: #d9f2dd; }}
tr.reproduced-with td:last-child {{ background: #fff1c2; }}
tr.not-reproduced td:last-child, tr.contradicted td:last-child, tr.failed td:last-child {{ background: #f9d9d6; }}
img {{ max-width: 100%; }}
</style></head><body>
<h1>{escape(table.name)}</h1>
<p>{escape(table.paper)}: {escape(table.title)}</p>{quick}{about}{shown}
<p>{escape(summary(rows))}</p>
<table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table></body></html>
"""


def curves(table: Table, rows: list[Compared], lines: list[Line]) -> bytes | None:
    """Plot a figure's quantities over rounds, one curve a cell (its first seed); None where nothing was measured."""
    panels = _panels(table, any(row.quick for row in rows), lines)
    if not panels:
        return None
    figures = optional("matplotlib.figure", "a paper's figure")
    names = list(dict.fromkeys(name for _, _, drawn in panels for name in drawn))
    sheet = figures.Figure(figsize=(5.5 * len(panels) + LEGEND, 3.6), layout="constrained")
    every = sheet.subplots(1, len(panels), squeeze=False, sharey=len(table.plots) == 1)[0]
    legend = {}
    for axes, (quantity, title, drawn) in zip(every, panels, strict=True):
        place = ("round", "accuracy", "v_c", "u_s").index(quantity)
        for name, curve in drawn.items():
            points = [point[0] for point in curve], [point[place] for point in curve]
            (legend[name],) = axes.plot(*points, color=f"C{names.index(name)}")
        axes.set(xlabel="round", ylabel=quantity, title=title)
        if quantity != "accuracy":
            axes.set(xscale="log", yscale="log")
    sheet.legend(legend.values(), legend.keys(), loc="outside right upper", fontsize=8)
    file = io.BytesIO()
    sheet.savefig(file, format="png", dpi=120)
    return file.getvalue()


def _panels(table: Table, quick: bool, lines: list[Line]) -> list[tuple[str, str, dict[str, Any]]]:
    """Each panel's quantity, title, and curves by name.

    A column with several curves of a single quantity has its own panel.
    """
    columns = _curves_by_column(table, quick, lines)
    if len(table.plots) == 1 and all(len(drawn) > 1 for drawn in columns.values()):
        return [(table.plots[0], column, drawn) for column, drawn in columns.items()]
    together = {f"{name}/{column}": curve for column, drawn in columns.items() for name, curve in drawn.items()}
    return [(quantity, "", together) for quantity in table.plots] if together else []


def _curves_by_column(table: Table, quick: bool, lines: list[Line]) -> dict[str, dict[str, Any]]:
    found = {line.get("key", line.get("cell")): line for line in reversed(lines) if "curve" in line}
    columns: dict[str, dict[str, Any]] = {}
    for cell in table.cells:
        if line := found.get(cell.work.key(quick)) or found.get(cell.attacked):
            name = f"{cell.row} ({cell.change})" if cell.change else cell.row
            columns.setdefault(cell.column, {})[name] = line["curve"]
    return columns
