"""A federation as its operators see it, without one: a monitor with a status."""

from __future__ import annotations

from shoal.federation.operations.monitor import Monitor
from shoal.federation.operations.status import SiteStatus, Status

SITES = (
    SiteStatus("east", "a1", "connected"),
    SiteStatus("north", "b2", "away", problem="round 3: gone: the site disconnected during the round"),
    SiteStatus("south", "c3", "excluded", strikes=3, problem="round 4: bad: its update contains NaN or Inf"),
    SiteStatus("west", "d4", "not joined"),
)
STATUS = Status(
    run="20260101-120000-geyer-private-digits",
    algorithm="geyer-private",
    done=4,
    rounds=40,
    places=4,
    doing="round 5",
    sites=SITES,
    hidden=True,
    unit="client",
    observer="release",
    budget=8.0,
)
CLAIM = {"unit": "client", "observer": "release", "epsilon": 1.2341, "delta": 1e-5, "adjacency": "zero-out"}
NOW = 1_767_268_800.0  # 2026-01-01, 12:00 UTC


def monitored(status: Status | None = STATUS, now: float = NOW) -> tuple[Monitor, list[tuple[int, str, dict]]]:
    """A monitor whose clock stands still, and what it logs."""
    lines: list[tuple[int, str, dict]] = []
    monitor = Monitor(lambda level, words, facts: lines.append((level, words, dict(facts))), clock=lambda: now)
    if status is not None:
        monitor.publish(status)
        monitor.round({"proven": [CLAIM], "clients": 2})
    return monitor, lines
