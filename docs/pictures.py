"""Pictures of who sees what, drawn for the page on threat models; their colours follow the page's."""

from __future__ import annotations

from html import escape

WIDTH, HEIGHT, GAP = 440, 74, 34
PLACES = ("Client process", "Server", "Released model")
Row = tuple[str, str, bool]
"""What is there, what its observer sees, and whether something is proven against that observer."""


def who_sees(title: str, rows: tuple[Row, Row, Row]) -> str:
    """Three boxes from the client to the released model, each with what its observer sees."""
    drawn = "".join(_row(number, PLACES[number], *row) for number, row in enumerate(rows))
    height = 3 * HEIGHT + 2 * GAP + 4
    return (
        f'<svg class="flow" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{drawn}</svg>\n"
    )


def _row(number: int, place: str, holds: str, sees: str, proven: bool) -> str:
    top, kind = 2 + number * (HEIGHT + GAP), "proven" if proven else "none"
    arrow = (
        f'<path class="arrow" d="M105 {top + HEIGHT} v{GAP - 7} m-5 -6 l5 7 l5 -7"/>'
        if number < len(PLACES) - 1
        else ""
    )
    return (
        f'<rect class="box" x="2" y="{top}" width="206" height="{HEIGHT}" rx="8"/>'
        f'<text class="place" x="14" y="{top + 22}">{place}</text>{_lines(holds, 14, top + 42)}'
        f'<path class="eye" d="M212 {top + HEIGHT / 2} h14"/>'
        f'<rect class="{kind}" x="230" y="{top + 8}" width="208" height="{HEIGHT - 16}" rx="8"/>'
        f'{_lines(sees, 240, top + 32)}<text class="verdict" x="240" y="{top + 54}">'
        f"{'something is proven' if proven else 'none'}</text>{arrow}"
    )


def _lines(text: str, x: int, y: int) -> str:
    lines = enumerate(text.split("\n"))
    return "".join(f'<text x="{x}" y="{y + 18 * number}">{escape(line)}</text>' for number, line in lines)


PICTURES = {
    "noise-at-the-server": who_sees(
        "Noise at the server: proven against released models only",
        (
            ("trains, clips its update", "sees the records", False),
            ("adds up, adds noise", "sees each clipped update", False),
            ("has the noise", "is seen by everybody", True),
        ),
    ),
    "shared-noise": who_sees(
        "Shared noise under secure aggregation: proven against the server and released models",
        (
            ("clips, adds a share of\nthe noise, and a mask", "sees its own records", False),
            ("adds up: masks cancel", "sees the noisy sum alone", True),
            ("has the noise", "is seen by everybody", True),
        ),
    ),
    "noise-on-updates": who_sees(
        "Noise on each update: proven against the server and released models",
        (
            ("clips, adds noise", "sees its own records", False),
            ("adds up noisy updates", "sees each noisy update", True),
            ("has all the noise", "is seen by everybody", True),
        ),
    ),
    "noise-in-steps": who_sees(
        "Noise in every local step: proven against all three observers",
        (
            ("each step: clips records,\nadds noise", "sees noisy steps", True),
            ("adds up updates", "sees each update", True),
            ("has the noise", "is seen by everybody", True),
        ),
    ),
}
