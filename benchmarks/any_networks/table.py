"""The Markdown tables of any_network.py, with the aims beside the figures."""

from __future__ import annotations

from typing import Any

Cells = dict[str, dict[str, Any]]

TITLES = {
    "plain": "plain PyTorch loop",
    "graph": "one client's step as a CUDA graph",
    "vmap": "vmap over clients",
    "client": "Shoal, client level",
    "per-example": "per-example by vmap, materialised",
    "opacus": "Opacus 1.6",
    "record": "Shoal, record level",
}
AIMS = {"resnet18": (26, 60), "transformer": (5, 10), "lstm": (20, 60)}
"""Milliseconds on an H200 at full scale, at client and at record level."""
TIMES_PLAIN = (1.0, 2.0)
"""The aims on a CPU, in times of the plain loop."""
TIMES_MEMORY = 3.0
"""The aim for record level's memory everywhere, likewise."""


def table(lines: list[dict[str, Any]]) -> str:
    """One table of times and one of memory for each device; of a cell's lines the last one counts."""
    found: dict[str, dict[str, Cells]] = {}
    for line in lines:
        found.setdefault(line["device"], {}).setdefault(line["network"], {})[line["column"]] = line
    return "\n\n".join(part for device, rows in found.items() for part in (_times(device, rows), _memory(rows)))


def _times(device: str, rows: dict[str, Cells]) -> str:
    head = ["network", "clients x batch"]
    for column, title in TITLES.items():
        head += [title, "aim"] if column in ("client", "record") else [title]
    body = []
    for network, cells in rows.items():
        some = next(iter(cells.values()))
        row = [network, f"{some['clients']} x {some['batch']}"]
        for column in TITLES:
            row.append(_time(cells, column))
            if column in ("client", "record"):
                row.append(_aim(device, network, cells, column))
        body.append(row)
    return _markdown(head, body)


def _time(cells: Cells, column: str) -> str:
    """Milliseconds, and how often those of the plain loop."""
    cell = cells.get(column, {})
    if "ms" not in cell:
        return str(cell.get("skipped") or cell.get("failed") or "")
    more = [cell["mode"]] if "mode" in cell else []
    if column != "plain" and "ms" in cells.get("plain", {}):
        more.append(f"{cell['ms'] / cells['plain']['ms']:.2f}x plain")
    beside = f" ({', '.join(more)})" if more else ""
    return _number(cell["ms"]) + beside


def _aim(device: str, network: str, cells: Cells, column: str) -> str:
    place = ("client", "record").index(column)
    if device == "cpu" and "ms" in cells.get("plain", {}):
        aim = TIMES_PLAIN[place] * cells["plain"]["ms"]
    elif device == "cuda" and network in AIMS:
        aim = AIMS[network][place]
    else:
        return ""
    return f"{_number(aim)}, {'reached' if cells.get(column, {}).get('ms', float('inf')) <= aim else 'missed'}"


def _memory(rows: dict[str, Cells]) -> str:
    columns = ("plain", "client", "record")
    head = ["network", *(f"{TITLES[c]}, MiB" for c in columns), f"record level <= {TIMES_MEMORY:g}x plain"]
    head += ["way at client level", "way at record level"]
    body = []
    for network, cells in rows.items():
        used = [
            cells.get(column, {}).get("memory_mib") if "ms" in cells.get(column, {}) else None for column in columns
        ]
        held = "" if not used[0] or not used[2] else f"{used[2] / used[0]:.1f}x"
        ways = [str(cells.get(column, {}).get("way", "")) for column in columns[1:]]
        body.append([network, *("" if each is None else f"{each:.0f}" for each in used), held, *ways])
    return _markdown(head, body)


def _number(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def _markdown(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in body)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
