"""The sites of a run, each with a client number (for sampling and random streams), a name, and its strikes.

The list is saved in the run's folder (`sites.json`), so that a restarted coordinator recognises every site. A site is
identified by its key. Sites that agree before the first round are numbered by name, later ones as they join.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shoal import release
from shoal.errors import RunError
from shoal.files import write_whole

FILE = "sites.json"


@dataclass
class Member:
    """A site that has agreed at least once, or that an operator has dropped.

    `node` is its current Flower node, None while disconnected. `head` is the head of its own ledger at the run's end.
    `had_number`: it had one before it was dropped, so it may have been asked for rounds. `answered`: the last round
    (from 1) that it answered since the coordinator started; not saved, as sampling must hide it.
    """

    name: str
    number: int | None = None
    strikes: int = 0
    node: int | None = None
    agreed: bool = False
    dropped: bool = False
    had_number: bool = False
    head: str = ""
    answered: int = 0


class Roster:
    """The sites of a run, `places` at most; those with `strikes` bad answers are excluded."""

    def __init__(self, folder: Path, places: int, strikes: int) -> None:
        self._path, self.places, self._most_strikes = folder / FILE, places, strikes
        self.members: dict[str, Member] = {}
        if self._path.exists():
            try:
                kept = json.loads(self._path.read_text(encoding="utf-8"))
                self.members = {key: Member(**facts) for key, facts in kept.items() if key != release.KEY}
            except (ValueError, TypeError) as error:
                raise RunError(f"{self._path} cannot be read: {error}; restore it from a backup") from None

    def admit(self, identity: str, name: str, node: int, rotated: bool = False) -> Member | None:
        """Add a site that has agreed; return None where all places are taken.

        A site that disconnects before it has a number frees its place. With `rotated`, because the coordinator itself
        knows the key by this name, a site of the same name has changed its key, and keeps its place and strikes.
        """
        if rotated and identity not in self.members and (old := self._replaced(name)) is not None:
            self.members[identity] = self.members.pop(old)
            self.save()
        member = self.members.get(identity, Member(name))
        if member.number is None and not member.agreed and self.taken >= self.places:
            return None
        self.members[identity] = member
        member.node, member.agreed = node, True
        return member

    def may_have_been_asked(self, identity: str, name: str | None) -> bool:
        """Whether a site may have been asked for a round, with this key or, if its name is known, an earlier one."""
        return any(each.had_number or each.number is not None for each in self._known(identity, name))

    def answered(self, identity: str, name: str | None) -> int:
        """The last round (from 1) that a site answered since the coordinator started; 0 where there is none."""
        return max((each.answered for each in self._known(identity, name)), default=0)

    def _known(self, identity: str, name: str | None) -> list[Member]:
        """The entries of a site, by its key or, if its name is known, an earlier one."""
        return [each for key, each in self.members.items() if key == identity or each.name == name]

    def _replaced(self, name: str | None) -> str | None:
        """The key by which the site of this name is listed."""
        return next((key for key, each in self.members.items() if each.name == name and not each.dropped), None)

    @property
    def taken(self) -> int:
        """How many places are taken, by sites that have a number or have agreed and get one in the next round."""
        return sum(member.number is not None or member.agreed for member in self.members.values())

    @property
    def dropped(self) -> int:
        """How many sites were dropped."""
        return sum(member.dropped for member in self.members.values())

    def drop(self, identity: str, name: str) -> Member:
        """Take a site off the list for good; its number and its place are free for another one."""
        member = self.members.get(identity, Member(name))
        had_number = member.had_number or member.number is not None
        dropped = replace(member, number=None, dropped=True, had_number=had_number)
        self._write(self.members | {identity: dropped})  # first: it may fail
        member.number, member.agreed, member.dropped, member.had_number = None, False, True, had_number
        self.members[identity] = member
        return member

    def readmit(self, identity: str) -> None:
        """Let a dropped site join again."""
        if identity in self.members and self.members[identity].dropped:
            member = self.members[identity]
            self.members[identity] = Member(member.name, had_number=member.had_number, answered=member.answered)
            self.save()

    def assign_numbers(self) -> None:
        """Number the sites that have agreed and have no number yet, in the order of their names; save the list."""
        taken = {member.number for member in self.members.values()}
        free = iter(number for number in range(self.places) if number not in taken)
        waiting = [member for member in self.members.values() if member.number is None and member.agreed]
        for member in sorted(waiting, key=lambda member: member.name):
            member.number = next(free)
        if waiting:
            self.save()

    def connected(self, nodes: dict[int, str]) -> list[Member]:
        """The sites that have agreed, are connected and are not excluded; `nodes` maps nodes to identities."""
        current = {identity: node for node, identity in nodes.items()}
        for identity, member in self.members.items():
            node = current.get(identity)
            if node is None or node != member.node:
                member.node, member.agreed = None, False
        return [member for member in self.members.values() if member.agreed and not self.excluded(member)]

    def strike(self, member: Member) -> None:
        """Record a bad answer of a site."""
        member.strikes += 1
        self.save()

    def keep_head(self, identity: str, head: str) -> None:
        """Keep the head of a site's ledger; what is no SHA-256, or from a stranger, is passed over."""
        member = self.members.get(identity)
        if member is not None and re.fullmatch(r"[0-9a-f]{64}", head):
            member.head = head
            self.save()

    def forget_heads(self) -> None:
        """Forget the heads of an earlier end, because a round begins: sites' ledgers go on with this run."""
        if any(member.head for member in self.members.values()):
            for member in self.members.values():
                member.head = ""
            self.save()

    @property
    def heads(self) -> list[tuple[str, str]]:
        """The names of sites with a place in the run, and the heads of their ledgers, of those that sent theirs."""
        return [(each.name, each.head) for each in self.members.values() if each.head and each.number is not None]

    def excluded(self, member: Member) -> bool:
        """Whether a site has sent too many bad answers."""
        return member.strikes >= self._most_strikes

    def save(self) -> None:
        """Write the list to the run's folder."""
        self._write(self.members)

    def _write(self, members: Mapping[str, Member]) -> None:
        kept = {
            key: asdict(member) | {"node": None, "agreed": False, "answered": 0} for key, member in members.items()
        }
        write_whole(self._path, json.dumps({release.KEY: release.SITES, **kept}, indent=1).encode())
