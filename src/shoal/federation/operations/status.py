"""The federation at one moment, as metrics, page and `shoal sites list` show it.

It says who is connected and what went wrong, never who was sampled or answered well: sampling must hide that. A site
of which a problem is told was not in that round's sum, unless it broke the protocol.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.federation.roster import Roster

State = Literal["connected", "joining", "away", "not joined", "refused", "excluded", "dropped"]
STATES: dict[State, str] = {
    "connected": "takes part",
    "joining": "connected, has not agreed to the terms yet",
    "away": "not connected; may come back",
    "not joined": "may join, has not yet",
    "refused": "connected, refused; will be sent the terms again",
    "excluded": "sent too many bad answers",
    "dropped": "dropped by an operator",
}


@dataclass(frozen=True)
class SiteStatus:
    """One site: its name, the hash of its key, its state, its bad answers, and what last went wrong."""

    name: str
    key: str
    state: State
    strikes: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Status:
    """The federation at one moment.

    Attributes:
        run: The run's name.
        algorithm: The method's name.
        done: How many of the `rounds` are done.
        places: How many sites the federation has.
        doing: What the coordinator is doing, in words.
        sites: All sites that are known.
        hidden: Who takes part in a round is sampled in secret.
        unit, observer: Those of the run's privacy budget.
        budget: The most epsilon that the run may spend, if there is a limit.
    """

    run: str
    algorithm: str
    done: int
    rounds: int
    places: int
    doing: str
    sites: tuple[SiteStatus, ...]
    hidden: bool
    unit: str
    observer: str
    budget: float | None

    def count(self, state: State) -> int:
        """How many sites are in a state."""
        return sum(site.state == state for site in self.sites)


def site_statuses(
    roster: Roster,
    names: Mapping[str, str],
    connected: Mapping[int, str],
    refusing: Collection[int],
    problems: Mapping[str, str],
) -> tuple[SiteStatus, ...]:
    """The sites by name.

    Args:
        roster: The sites that have agreed at least once.
        names: The names of the sites with known keys, by identity.
        connected: The identities of the connected nodes.
        refusing: The nodes whose last answer was a refusal.
        problems: What last went wrong, by identity.
    """
    nodes = {identity: node for node, identity in connected.items()}

    def state(identity: str) -> State:
        member, node = roster.members.get(identity), nodes.get(identity)
        if member is not None and member.dropped:
            return "dropped"
        if member is not None and roster.excluded(member):
            return "excluded"
        if node is None:
            return "not joined" if member is None else "away"
        if member is not None and member.agreed and member.node == node:
            return "connected"
        return "refused" if node in refusing else "joining"

    found = []
    for identity in {**names, **roster.members, **nodes}:
        member = roster.members.get(identity)
        name = names.get(identity) or (member.name if member else identity)
        strikes = member.strikes if member else 0
        found.append(SiteStatus(name, identity, state(identity), strikes, problems.get(identity, "")))
    return tuple(sorted(found, key=lambda site: (site.name, site.key)))
