"""The pages in docs/results: hand-written prose around tables that are generated from results files.

A page has a block for each table, `<!-- compare NAME -->` to `<!-- end -->`, which is regenerated; the paragraph
after it that begins with `**In short:**` is hand-written and copied into the overview. The overview has
`<!-- overview -->`, a line a table. Figures that a page shows as `NAME.png` are drawn again.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from shoal.errors import RunError
from shoal.papers import table as find
from shoal.papers import tables
from shoal.papers.comparing import (
    CONTRADICTED,
    EXCEEDED,
    FAILED,
    NOT,
    NOT_RUN,
    PROVEN,
    REPRODUCED,
    WITH,
    Compared,
    compare,
)
from shoal.papers.frontier import frontier
from shoal.papers.render import HEADINGS, cells, curves, markdown_line
from shoal.papers.running import SEEDS
from shoal.papers.table import Line, Table

DOTS = {REPRODUCED: "🟢", EXCEEDED: "🟢", WITH: "🟡", NOT: "🔴", CONTRADICTED: "⛔", FAILED: "⚠️", NOT_RUN: "⚪"}
BLOCK = re.compile(r"(<!-- (compare|overview) ?(\S*) -->\n).*?(<!-- end -->)", re.DOTALL)
SHORT = re.compile(
    r"<!-- compare (\S+) -->\n(?:(?!<!-- end -->).)*<!-- end -->\s+\*\*In short:\*\* (.+?)(?:\n\n|\Z)", re.DOTALL
)
PICTURE = re.compile(r"\]\(([\w.-]+)\.png\)")
FRONTIER = "frontier"


def write(folder: Path, lines: list[Line]) -> list[Path]:
    """Regenerate all blocks and figures of the pages in a folder.

    Args:
        folder: The folder with the pages.
        lines: Measurements.

    Returns:
        The files that were written.
    """
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md"))}
    found = {name: compare(each, lines) for name, each in tables().items() if each.cells}
    shorts = {name: " ".join(text.split()) for page in texts.values() for name, text in SHORT.findall(page)}
    places = {name: path.name for path, page in texts.items() for _, kind, name, _ in BLOCK.findall(page) if name}

    def block(match: re.Match[str]) -> str:
        head, kind, name, tail = match.groups()
        if kind == "overview":
            return head + overview(found, shorts, places) + tail
        return head + to_block(find(name), found[name]) + tail

    written = []
    for path, page in texts.items():
        if BLOCK.search(page):
            _write(path, BLOCK.sub(block, page))
            written += [path, *_pictures(path, page, found, lines)]
    return written


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error}") from None


def _pictures(page: Path, text: str, found: dict[str, list[Compared]], lines: list[Line]) -> list[Path]:
    drawn = []
    for name in PICTURE.findall(text):
        picture = frontier(lines) if name == FRONTIER else None
        if name in tables():
            picture = curves(find(name), found[name], lines)
        if picture:
            (page.parent / f"{name}.png").write_bytes(picture)
            drawn.append(page.parent / f"{name}.png")
    return drawn


def to_block(table: Table, rows: list[Compared]) -> str:
    """A table of what was measured, and a sentence on what was not."""
    places = {name: place for place, name in reversed(list(enumerate(_name(row) for row in rows)))}
    shown = [row for row in rows if not _missing(row)]
    shown.sort(key=lambda row: places[_name(row)])
    head = [f'<a id="{table.name}"></a>', "", f"    shoal papers run {table.name} --seeds {SEEDS} --device cuda", ""]
    head += [f"*Published:* {table.about}", ""] if table.about else []
    body = [*_grid(shown), ""] if shown else []
    return "\n".join([*head, *body, *_left_out(rows)])


def _grid(rows: list[Compared]) -> list[str]:
    """The table, without empty columns and repeated names."""
    lines = [list(HEADINGS)]
    before = ""
    for row in rows:
        name, *words, claim = cells(row)
        lines.append(["" if name == before else name, *words, f"{DOTS.get(row.light, '')} {claim}".strip()])
        before = name
    kept = [column for column in range(len(lines[0])) if any(line[column] for line in lines[1:])]
    head, *body = (markdown_line(line[column] for column in kept) for line in lines)
    return [head, "|" + "---|" * len(kept), *body]


def _name(row: Compared) -> tuple[str, str, str]:
    return row.cell.row, row.cell.column, row.cell.change


def _left_out(rows: list[Compared]) -> list[str]:
    """Cells that were not run, by row, a line for each reason."""
    missing = list(filter(_missing, rows))
    return [line for why in dict.fromkeys(row.note for row in missing) for line in (_not_run(missing, why), "")]


def _missing(row: Compared) -> bool:
    """Was it not run? A claim is compared only where it was, and may then have no proven value."""
    return not row.values and row.measure != PROVEN and row.light != FAILED


def _not_run(missing: list[Compared], why: str) -> str:
    counted = Counter(
        row.cell.row + (f" ({row.cell.change})" if row.cell.change else "") for row in missing if row.note == why
    )
    words = "; ".join(f"{row} {count}" for row, count in counted.items())
    figures = "1 figure" if counted.total() == 1 else f"{counted.total()} figures"
    return f"⚪ Not run, {figures}: {words}." + (f" Why: {why}." if why else "")


def overview(found: dict[str, list[Compared]], shorts: dict[str, str], places: dict[str, str]) -> str:
    """A line a table: its seeds, and counts of verdicts on its figures and on its claimed epsilons."""
    headings = ("table", "seeds", "measured", "by its recipe", "epsilon claimed, for what was run", "in short")
    lines = [markdown_line(headings), "|" + "---|" * len(headings)]
    total: Counter[tuple[str, str]] = Counter()
    for name, rows in found.items():
        if name not in places or name.startswith("beyond"):
            continue
        counted = Counter((_kind(row), DOTS[row.light]) for row in rows if row.light and not row.cell.change)
        total += counted
        numbers = [_dots(counted, kind) for kind in KINDS]
        link = f"[{name}]({places[name]}#{name})"
        lines.append(markdown_line([link, _seeds(rows), *numbers, shorts.get(name, "")]))
    lines.append(markdown_line(["**all**", "", *(_dots(total, kind) for kind in KINDS), ""]))
    return "\n".join([*lines, ""])


def _seeds(rows: list[Compared]) -> str:
    """How many seeds its figures have: the least and the greatest number."""
    numbers = sorted({len(row.values) for row in rows if row.values and row.cell.work.seeded})
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else "".join(map(str, numbers))


KINDS = ("measured", "recipe", "epsilon")


def _kind(row: Compared) -> str:
    return "recipe" if row.cell.work.instant else "epsilon" if row.measure == PROVEN else "measured"


def _dots(counted: Counter[tuple[str, str]], kind: str) -> str:
    return " ".join(f"{dot} {counted[kind, dot]}" for dot in dict.fromkeys(DOTS.values()) if counted[kind, dot])
