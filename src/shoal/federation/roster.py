"""Who the sites of a run are: each has a number (its client's, for sampling and streams), a name, and its strikes.

It is kept in the run's folder (`sites.json`), so that a restarted coordinator knows everyone again. A site is known
by its key. Numbers are given in the order of names to those who agree before the first round, then as they come.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal import release
from shoal.errors import RunError
from shoal.training.run_folder import write_whole

FILE = "sites.json"


@dataclass
class Member:
    """A site that has agreed at least once. `node` is where it is now, None where it is not connected."""

    name: str
    number: int | None = None
    strikes: int = 0
    node: int | None = None
    agreed: bool = False


class Roster:
    """At most so many sites."""

    def __init__(self, folder: Path, places: int, strikes: int) -> None:
        self._path, self.places, self._most_strikes = folder / FILE, places, strikes
        self.members: dict[str, Member] = {}
        if self._path.exists():
            try:
                kept = json.loads(self._path.read_text(encoding="utf-8"))
                self.members = {key: Member(**facts) for key, facts in kept.items() if key != release.KEY}
            except (ValueError, TypeError) as error:
                raise RunError(f"{self._path} cannot be read: {error}; put the right one back") from None

    def admit(self, identity: str, name: str, node: int) -> Member | None:
        """A site has agreed; None where all places are taken (one that went before round 1 left its own)."""
        member = self.members.get(identity)
        if member is None:
            if len(self.members) >= self.places and (left := self._left()) is not None:
                del self.members[left]
            if len(self.members) >= self.places:
                return None
            member = self.members[identity] = Member(name)
        member.node, member.agreed = node, True
        return member

    def _left(self) -> str | None:
        """Who came, and went before it had a number."""
        return next((key for key, each in self.members.items() if each.number is None and not each.agreed), None)

    def place(self) -> None:
        """Give numbers to those who have none, by name, and keep the list."""
        taken = {member.number for member in self.members.values()}
        free = iter(number for number in range(self.places) if number not in taken)
        waiting = [member for member in self.members.values() if member.number is None]
        for member in sorted(waiting, key=lambda member: member.name):
            member.number = next(free)
        if waiting:
            self.keep()

    def here(self, nodes: dict[int, str]) -> list[Member]:
        """Those who agreed, are connected, and are not left out."""
        connected = {identity: node for node, identity in nodes.items()}
        for identity, member in self.members.items():
            node = connected.get(identity)
            if node is None or node != member.node:
                member.node, member.agreed = None, False
        return [member for member in self.members.values() if member.agreed and not self.excluded(member)]

    def strike(self, member: Member) -> None:
        member.strikes += 1
        self.keep()

    def excluded(self, member: Member) -> bool:
        return member.strikes >= self._most_strikes

    def keep(self) -> None:
        kept = {key: asdict(member) | {"node": None, "agreed": False} for key, member in self.members.items()}
        write_whole(self._path, json.dumps({release.KEY: release.SITES, **kept}, indent=1).encode())
