"""What operators may change in a running federation: drop a site for good, invite another one.

A dropped site is no longer waited for or asked; a round that waits for its answer goes on without it. Under secure
aggregation a round with fewer sites than the threshold has no sum. The threshold is part of the terms and of the
noise, so it stays: with too few sites left the run waits for an invited one, which takes the free place, or ends with
the model that it has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, RunError
from shoal.federation.flower.transport import Transport, key_identity
from shoal.federation.key_files import NAME, parse_public_key, public_pem, read_revoked, read_sites
from shoal.federation.operations.monitor import Monitor
from shoal.federation.roster import Roster


class SiteCommands:
    """Carries out commands in the coordinator's thread.

    Attributes:
        end_if_too_few: The run ends where too few sites are left for another round.
    """

    def __init__(
        self,
        roster: Roster,
        names: dict[str, str],
        transport: Transport,
        monitor: Monitor,
        outlook: Callable[[], tuple[int, int]],
    ) -> None:
        """Keep what commands change.

        Args:
            roster: The sites that have agreed at least once.
            names: The names of the sites with known keys, by identity; invited ones are added.
            transport: Lets an invited site join.
            monitor: Receives events.
            outlook: Returns how many rounds are done, and how many sites the next one needs.
        """
        self._roster, self._names, self._transport = roster, names, transport
        self._monitor, self._outlook = monitor, outlook
        self.end_if_too_few = False

    def __call__(self, command: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out a command, and return its answer.

        Raises:
            ConfigError: It cannot be carried out.
        """
        if command == "drop":
            return self._drop(str(values.get("site", "")), bool(values.get("end")))
        if command == "invite":
            return self._invite(str(values.get("name", "")), str(values.get("key", "")))
        raise ConfigError(f"unknown command {command[:40]!r}")

    @property
    def left(self) -> int:
        """How many sites may still take part, of those that are known."""
        gone = {
            key for key, member in self._roster.members.items() if member.dropped or self._roster.excluded(member)
        }
        return min(len({*self._names, *self._roster.members} - gone), self._roster.places)

    def is_dropped(self, identity: str) -> bool:
        """Whether a site was dropped."""
        member = self._roster.members.get(identity)
        return member is not None and member.dropped

    def _drop(self, site: str, end: bool) -> dict[str, Any]:
        known = {**{key: member.name for key, member in self._roster.members.items()}, **self._names}
        named = [key for key, name in known.items() if site in (name, key)]
        found = [key for key in named if not self.is_dropped(key)] or (named if end else [])
        if len(found) != 1:
            why = "no such site takes part or may join" if not found else "several sites have this name: give the key"
            raise ConfigError(f"{site!r} cannot be dropped: {why}; `shoal sites list` lists them")
        (key,) = found
        done, _ = self._outlook()
        if end and not done:
            raise ConfigError("--end needs a model to end with, but no round is done yet: stop the coordinator")
        self._roster.drop(key, known[key])
        self.end_if_too_few = self.end_if_too_few or end
        _, wanted = self._outlook()
        if self.left >= wanted:
            follows = f"the run goes on; sites left: {self.left}"
        elif end:
            follows = "too few sites are left, the run ends after this round"
        else:
            follows = (
                f"too few sites are left, {self.left} of {wanted}: the run waits until another one is invited; "
                f"to end it: shoal sites drop {known[key]} --end"
            )
        message = f"site {known[key]} was dropped; {follows}"
        facts = {"message": message, "level": logging.WARNING, "site": known[key], "key": key}
        self._monitor.on_event("dropped", facts)
        return {"site": known[key], "key": key, "left": self.left, "wanted": wanted, "message": message}

    def _invite(self, name: str, text: str) -> dict[str, Any]:
        folder = self._monitor.keys
        if folder is None:
            raise ConfigError("this coordinator has no keys, so any site may join without an invitation")
        content = text.strip().encode(errors="replace")
        pem = _public_key(name, content)
        key = key_identity(pem)
        taken = self._names.get(key)
        if taken is not None and not self.is_dropped(key):
            raise ConfigError(f"this key is already that of site {taken}")
        if pem in read_revoked(folder):
            raise ConfigError(f"the key of {name} was revoked, it is in {folder / 'revoked'}: invite a new one")
        if taken is None:
            _write_new(folder / "sites" / f"{name}.pub", content)
        if not self._transport.allow(list(read_sites(folder).values())):
            raise ConfigError("this Flower link decides itself who may join")
        self._roster.readmit(key)
        self._names[key] = name
        free = self._roster.places - self._roster.taken
        message = f"site {name} was invited; free places: {free} of {self._roster.places}"
        self._monitor.on_event("invited", {"message": message, "level": logging.INFO, "site": name, "key": key})
        return {"site": name, "key": key, "free": free, "message": message}


def _public_key(name: str, content: bytes) -> bytes:
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a site's name: the file must be called NAME.pub")
    return public_pem(parse_public_key(content, f"{name}.pub"))


def _write_new(path: Path, content: bytes) -> None:
    """Keep an invited site's key for the next start of the coordinator."""
    try:
        with path.open("xb") as file:
            file.write(content + b"\n")
    except FileExistsError:
        raise ConfigError(f"{path} already exists and is not overwritten; move it away first") from None
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from None
