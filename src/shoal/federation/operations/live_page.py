"""The federation's status as a page that refreshes itself.

It needs nothing from outside, and all text is escaped: sites choose their names, and their messages are shown.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal import release
from shoal.accounting.rounding import epsilon, plain
from shoal.federation.operations.monitor import Monitor
from shoal.federation.operations.status import STATES
from shoal.report.plots import OBSERVERS, UNITS

if TYPE_CHECKING:
    import jinja2

SCRIPT = Path(__file__).with_name("live_page.js")


def page(monitor: Monitor) -> str:
    """The whole page."""
    return _template("live_page.html").render(body=body(monitor), release=release.SITES)


def body(monitor: Monitor) -> str:
    """What changes on it."""
    status, claims = monitor.status, [_claim(claim) for claim in monitor.proven]
    asked = () if status is None else (status.unit, status.observer)
    main = next((claim for claim in claims if claim["pair"] == asked), None)
    return _template("live_body.html").render(
        status=status,
        claims=claims,
        main=main,
        states=STATES,
        recent=[(at.replace("T", " ")[:19], kind, message) for at, kind, message in monitor.events()[1]],
    )


def _claim(claim: dict[str, Any]) -> dict[str, Any]:
    unit, observer = str(claim["unit"]), str(claim["observer"])
    return {
        "pair": (unit, observer),
        "unit": UNITS.get(unit, unit),
        "observer": OBSERVERS.get(observer, observer),
        "epsilon": epsilon(float(claim["epsilon"]), 3),
        "delta": plain(float(claim["delta"])),
        "adjacency": claim.get("adjacency", ""),
    }


@cache
def _template(name: str) -> jinja2.Template:
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(autoescape=True, loader=loader, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(name)
