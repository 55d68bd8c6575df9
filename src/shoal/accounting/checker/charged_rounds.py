"""The ledgers that a certificate is bound to: unbroken chains of hashes, with a charge for each round."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .certificate_file import Line, canonical, read_bytes, refuse
from .event_costs import Event, Unknown, field_of, whole
from .work_limit import TooMuch, Work, too_much


def ledger_lines(held: Mapping[str, Any], path: Path | None, work: Work) -> Iterator[Line]:
    head, count = held["hashes"]["ledger"]["head"], held["hashes"]["ledger"]["lines"]
    if path is None:
        yield Line("absent", "ledger", "not given: that its events are those of the certificate was not checked")
        return
    try:
        lines = read_chain(path)
    except ValueError as error:
        yield Line("no", "ledger", f"{path}: {error}")
        return
    if (len(lines), lines[-1]["hash"] if lines else "") != (count, head):
        yield Line("no", "ledger", f"{path} has {len(lines)} lines and another head than the {count} certified ones")
        return
    yield Line("yes", "ledger", f"{path} is intact: {count} lines, head {head[:16]}")
    yield from _contents(held, lines, work)


def _contents(held: Mapping[str, Any], lines: list[dict[str, Any]], work: Work) -> Iterator[Line]:
    if (because := _unread(lines)) is not None:
        yield Line("unknown", "ledger", f"cannot be checked: this checker does not know {because}")
    opened = next((line for line in lines if line["kind"] == "open"), {})
    if not opened or (opened.get("config"), opened.get("run")) != (held["hashes"]["config"], held["run"]):
        yield Line("no", "ledger", "it is of a run with another name or configuration")
    if any(line["kind"] == "selected" for line in lines):
        yield Line("unknown", "ledger", "a private selection chose the run: its cost cannot be checked")
    rounds = [line for line in lines if line["kind"] == "intent"]
    if (because := _uncharged(lines, held["rounds"])) is not None:
        yield Line("no", "ledger", because)
    yield from (_closing(held, line) for line in lines[-1:] if line["kind"] == "close")
    for claim in held["claims"]:
        if claim["epsilon"] is not None:
            try:
                work.take(100 * len(rounds), "so many claims and rounds")
                yield counted_line(claim, rounds)
            except TooMuch as error:
                yield Line("unknown", "ledger", too_much(error))
            except Unknown as error:
                yield Line("unknown", "ledger", f"cannot be checked: this checker does not know {error}")


def _closing(held: Mapping[str, Any], line: Mapping[str, Any]) -> Line:
    """The ledger's last line binds the claims, the model and the heads of sites' ledgers; earlier versions' fewer."""
    own = [{key: value for key, value in claim.items() if key != "chain"} for claim in held["claims"]]
    if line["proven"] != own:
        return Line("no", "ledger", "its closing line makes other claims")
    if line.get("model", held["hashes"]["model"]) != held["hashes"]["model"]:
        return Line("no", "ledger", "its closing line names another model")
    sent = sorted([site["name"], site["head"]] for site in held["sites"] if site.get("sent"))
    if (sent or "sites" in line) and line.get("sites") != hashlib.sha256(canonical(sent)).hexdigest():
        return Line("no", "ledger", "its closing line names other heads of sites' ledgers")
    also = (" and the same model" if "model" in line else "") + (
        f", and the heads of {len(sent)} sites" if sent else ""
    )
    return Line("yes", "ledger", f"its closing line makes the same claims{also}")


LINES = ("open", "recovered", "intent", "commit", "close", "selected")
CHARGE = {"unit", "observer", "adjacency", "event"}


def _unread(lines: list[dict[str, Any]]) -> str | None:
    """What a ledger says that is not read here: it might say that more was done."""
    for line in lines:
        if line["kind"] not in LINES:
            return f"lines of kind {line['kind']!r}"
        for charge in line["charges"] if line["kind"] == "intent" else ():
            if unread := sorted(charge.keys() - CHARGE):
                return f"field {unread[0]!r} of a charge"
    return "a ledger of several runs" if sum(line["kind"] == "open" for line in lines) > 1 else None


def _uncharged(lines: list[dict[str, Any]], rounds: int) -> str | None:
    """What is released or skipped without a charge: rounds go from 1 to `rounds`, some of them run again."""
    furthest, pending = 0, None
    for line in lines:
        if line["kind"] == "intent":
            if not 1 <= line.get("first", line["round"]) <= min(furthest + 1, line["round"]):
                return f"round {furthest + 1} was not charged"
            furthest, pending = max(furthest, line["round"]), (line["round"], line["attempt"])
        elif line["kind"] == "commit":
            if (line["round"], line["attempt"]) != pending:
                return f"round {line['round']} was released without a charge before"
            pending = None
    return None if furthest == rounds else f"it charges {furthest} rounds, not the {rounds} of the certificate"


def counted_line(claim: Mapping[str, Any], rounds: list[dict[str, Any]]) -> Line:
    """Are the events of a claim those that the ledger charged?"""
    what = f"{claim['unit']}, {claim['observer']}"
    pair = {"unit": claim["unit"], "observer": claim["observer"], "adjacency": claim["adjacency"]}
    counts: Counter[bytes] = Counter()
    for line in rounds:
        found = [charge for charge in line["charges"] if pair.items() <= charge.items()]
        if not found:
            return Line("no", what, f"the ledger has no charge for round {line['round']} under {claim['adjacency']}")
        if (because := _too_few(line, [charge["event"] for charge in found])) is not None:
            return Line("no", what, because)
        counts.update(canonical(charge["event"]) for charge in found)
    certified = {canonical(each["event"]): each["times"] for each in claim["chain"]["events"]}
    if counts != certified:
        return Line("no", what, "the events and how often they happened are not those of the ledger")
    return Line("yes", what, f"its {sum(counts.values())} charges are those of the ledger")


def _too_few(line: Mapping[str, Any], events: list[Event]) -> str | None:
    """Why a charge for several rounds is not one of as many."""
    first, last = line.get("first", line["round"]), line["round"]
    for event in events if last > first else ():
        named, free = _rounds_of(event)
        if not (named == last - first + 1 or (free and named <= last - first)):
            return f"the ledger charges rounds {first} to {last} with the events of {named}"
    return None


def _rounds_of(event: Event) -> tuple[int, bool]:
    """How many rounds the charge of several names, and whether there may be more, of no cost or with no proof.

    Equal rounds in a row are a `repeat` of a `compose` of one event; others stand one after the other.
    """
    if event["event"] == "compose":
        parts = [_part_of(each) for each in event["of"]]
        return sum(count for count, _ in parts), not parts or any(free for _, free in parts)
    return _part_of(event)


def _part_of(event: Event) -> tuple[int, bool]:
    inner: Any = event.get("of")
    if event["event"] == "unbounded" or (event["event"] == "compose" and not inner):
        return 0, True
    if event["event"] == "repeat" and inner["event"] == "compose" and len(inner["of"]) == 1:
        return int(field_of(event, "count", whole(0))), False
    return int(event["event"] != "sampler-error"), False  # which stands beside the noise of a round


def site_lines(held: Mapping[str, Any], given: Mapping[str, Path]) -> Iterator[Line]:
    bound = {site["name"]: site for site in held["sites"]}
    for name, times in Counter(site["name"] for site in held["sites"]).items():
        if times > 1:
            yield Line("unknown", f"site {name}", f"the certificate binds {times} ledgers under this name")
    for name in sorted(given.keys() - bound.keys()):
        yield Line("no", f"site {name}", "its ledger is not bound by this certificate")
    for name, site in bound.items():
        if name not in given:
            yield Line("absent", f"site {name}", "its ledger was not given")
            continue
        try:
            lines = read_chain(given[name])
        except ValueError as error:
            yield Line("no", f"site {name}", f"{given[name]}: {error}")
            continue
        yield _site(f"site {name}", given[name], lines, site["head"], str(held["run"]))


def _site(what: str, path: Path, lines: list[dict[str, Any]], head: str, run: str) -> Line:
    """A site's ledger goes on with other runs after the head, but not with this one: all its charges are bound."""
    place = next((place for place, line in enumerate(lines, 1) if line["hash"] == head), 0)
    if not place:
        return Line("no", what, f"{path} lacks the certified head")
    of_run = [
        at
        for at, line in enumerate(lines, 1)
        if line["kind"] == "intent" and run.startswith(str(line.get("run") or "\0"))
    ]
    if later := sum(at > place for at in of_run):
        return Line("no", what, f"{path} charges this run in {later} lines after the certified head")
    return Line("yes", what, f"{path} has the certified head, and charges this run in {len(of_run)} lines up to it")


def read_chain(path: Path) -> list[dict[str, Any]]:
    """The lines of a ledger; a ValueError says which one breaks the chain."""
    lines: list[dict[str, Any]] = []
    before, content = "0" * 64, read_bytes(path)
    if content and not content.endswith(b"\n"):
        raise ValueError("the last line is incomplete")
    for at, raw in enumerate(content.splitlines()):
        try:
            line = json.loads(raw.decode("ascii"), parse_constant=refuse)
            own = {key: value for key, value in line.items() if key != "hash"}
            right = canonical(line) == raw and line["hash"] == hashlib.sha256(canonical(own)).hexdigest()
            right = right and (line["n"], line["before"]) == (at, before) and isinstance(line["kind"], str)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            right = False
        if not right:
            raise ValueError(f"line {at + 1} breaks the hash chain")
        before = line["hash"]
        lines.append(line)
    return lines
