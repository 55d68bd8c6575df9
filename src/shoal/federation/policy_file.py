"""A data owner's policy, `site-policy.toml`: who may ask, for what, when, and for how much privacy.

    shoal join HOST --policy site-policy.toml           refuse whatever is outside
    shoal policy check site-policy.toml terms.toml      tell before

A refusal names the line of the policy that forbids the terms.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import time
from pathlib import Path
from typing import Any, Literal

from shoal.accounting.claims import Observer, Unit
from shoal.checked import checked
from shoal.errors import ConfigError, nearest
from shoal.federation.consent import Refused, Requirements
from shoal.federation.site_policy import RANGES, Bounds, Period, Range

UNASKED = (
    "the default without --policy; to trust the coordinator: --against release; to accept anything: --no-guarantee"
)
PRIVACY: dict[str, Any] = {
    "epsilon_per_run": float,
    "epsilon_per_month": float,
    "epsilon_total": float,
    "delta": float,
    "noise_multiplier": float,
    "unit": Literal["client", "record", "user"],
    "observer": Literal["release", "server", "client-process", "none"],
}
AMOUNTS = frozenset({"epsilon_per_run", "epsilon_per_month", "epsilon_total", "noise_multiplier"})
REST: dict[str, Any] = {
    "methods": tuple[str, ...],
    "hours": tuple[str, ...],
    "coordinators": tuple[str, ...],
}


@dataclass(frozen=True)
class Policy:
    """What a site's owner accepts.

    Attributes:
        requirements: The privacy that must be proven.
        bounds: The values, methods and hours.
        coordinators: The fingerprints of the authorities (ca.pem) whose coordinators may ask; None: any.
        sources: Where the owner set each of these, for refusals.
    """

    requirements: Requirements
    bounds: Bounds
    coordinators: frozenset[str] | None = None
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def refuse_coordinator(self, authorities: Collection[str]) -> None:
        """Raise Refused unless each authority by which the coordinator may prove itself (--ca) is known."""
        if self.coordinators is None:
            return
        where = self.sources["coordinators"]
        if not authorities:
            raise Refused(f"without TLS anyone could be the coordinator: give --ca ({where})")
        for each in authorities:
            if each not in self.coordinators:
                raise Refused(f"the authority {each} of --ca may not ask ({where})")


def read_policy(path: Path) -> Policy:
    """Read a policy; a key that it leaves out has its default, and the observer is the server."""
    given, sources = _written(path)
    kinds: dict[str, Any] = dict.fromkeys(RANGES, Range) | PRIVACY | REST
    for key in given:
        if key not in kinds:
            raise ConfigError(f"{sources[key]}: there is no key '{key}'{nearest(key, kinds)}")
    try:
        found = {key: checked(key, value, kinds[key]) for key, value in given.items()}
        hours = tuple(_period(word) for word in found.get("hours", ()))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    observer = found.get("observer", "server")
    names = {"epsilon_total": "epsilon", "noise_multiplier": "noise"}
    privacy = {names.get(key, key): found[key] for key in PRIVACY if key in found and key != "observer"}
    unset = {"observer": f"{path.name} names no observer, so it is the server"} | sources
    requirements = Requirements(
        **privacy,
        observer="release" if observer == "none" else observer,
        guarantee=observer != "none",
        sources={names.get(key, key): words for key, words in unset.items()},
    )
    for key in found.keys() & AMOUNTS:
        if "unit" not in found:  # else the coordinator would choose the cheaper one
            raise ConfigError(f'{sources[key]}: for whom? Add unit = "record", unit = "user" or unit = "client"')
        if observer == "none":
            raise ConfigError(f"{sources[key]}: against whom? It contradicts {sources['observer']}")
    ranges = {name: found[name] for name in RANGES if name in found}
    bounds = Bounds(**ranges, methods=found.get("methods"), hours=hours, sources=sources)
    coordinators = frozenset(found["coordinators"]) if "coordinators" in found else None
    return Policy(requirements, bounds, coordinators, sources)


def policy_of(
    *,
    epsilon: float | None = None,
    delta: float = 1e-5,
    noise: float | None = None,
    unit: Unit | None = None,
    against: Observer | None = None,
    bounds: Iterable[str] = (),
    no_guarantee: bool = False,
) -> Policy:
    """The policy that the options of `shoal join` state: without any, a guarantee against the server is required."""
    if no_guarantee and any(given is not None for given in (epsilon, noise, against)):
        raise ConfigError("--no-guarantee and --against or --require-... contradict each other: leave one out")
    for option, given in {"--require-epsilon": epsilon, "--require-noise": noise}.items():
        if given is not None and unit is None:  # else the coordinator would choose the cheaper one
            raise ConfigError(f"{option} {given:g}: for whom? Add --unit record, --unit user or --unit client")
    observer = against or ("release" if no_guarantee else "server")
    sources = {} if against else {"observer": UNASKED}
    requirements = Requirements(epsilon, delta, noise, unit, observer, guarantee=not no_guarantee, sources=sources)
    return Policy(requirements, Bounds.read(bounds))


def _written(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The keys of a policy with their values, and with the lines that set them."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        given = tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the policy {path} cannot be read: {error}") from None
    sources = dict.fromkeys(given, path.name)
    for number, line in enumerate(text.splitlines(), 1):
        key, equals, _ = line.partition("=")
        if equals and sources.get(key := key.strip().strip("\"'")) == path.name:
            shown = re.sub(r"\s+", " ", line.partition(" #")[0].strip())
            sources[key] = f"{path.name}, line {number}: {shown[:80]}"
    return given, sources


def _period(word: str) -> Period:
    """`20:00-06:00`; the end may be on the next day."""
    try:
        start, end = (time.fromisoformat(each) for each in word.split("-"))
    except ValueError:
        raise ConfigError(f"hours cannot be {word!r}: write HH:MM-HH:MM, for example 20:00-06:00") from None
    if start == end or start.tzinfo or end.tzinfo:
        raise ConfigError(f"hours cannot be {word!r}: start and end must differ, without a time zone")
    return start, end
