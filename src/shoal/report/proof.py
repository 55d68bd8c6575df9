"""What may be printed as proven of a run: what its ledger says, and no other file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from safetensors import SafetensorError, safe_open

from shoal.accounting.claims import Observer, Proven, Unit, prove, stated
from shoal.accounting.hash_chain import Verification
from shoal.accounting.privacy_ledger import FILE, Record
from shoal.accounting.theorems import Adjacency
from shoal.errors import LedgerError

CHECKPOINT = "checkpoint/state.safetensors"
_AFTERWARDS = "the run was charged again after a private selection had chosen it"
_TOO_LITTLE = "the ledger, of an earlier version, does not say what its claims assume; resume the run to its end"


@dataclass(frozen=True)
class Proof:
    """The check of a run's ledger, and the claims that follow from it.

    Attributes:
        ledger: None where there is no ledger.
        proven: Claims for every unit and observer.
        selected: Whether a private selection chose the run.
        simulated: Whether its clients are simulated.
        by_client: Whether the ledger confirms the result's figures by client.
    """

    ledger: Verification | None
    proven: list[dict[str, Any]] = field(default_factory=list)
    selected: bool = False
    simulated: bool = False
    by_client: bool = False


def proof_of(path: Path, result: Mapping[str, Any] | None) -> Proof:
    """Read the claims from the ledger: from its last line or, for an unfinished run, from what was charged.

    Args:
        path: The run's folder.
        result: Its result.json, which must agree with the ledger; None before the run has ended.
    """
    found, record = _read(path, result)
    if found is None or not found.whole:
        because = "there is no ledger" if found is None else "the ledger is broken"
        return Proof(found, _nothing(because))
    return Proof(
        ledger=found,
        proven=_claims(record),
        selected=record.selected is not None,
        simulated=bool((record.opened or {}).get("simulated")),
        by_client=bool((record.closed or {}).get("by_client")) and record.selected is None,
    )


def check(path: Path, result: Mapping[str, Any] | None) -> Verification | None:
    """Verify the ledger, and that the result agrees with it; None where there is no ledger."""
    return _read(path, result)[0]


def checkpoint_head(path: Path) -> str | None:
    """The ledger's head when the checkpoint was written, which must still be in the ledger.

    None where no checkpoint can be read.
    """
    checkpoint = path / CHECKPOINT
    if not checkpoint.is_file():
        return None
    with suppress(SafetensorError, OSError), safe_open(checkpoint, framework="np") as file:
        notes: dict[str, str] = file.metadata() or {}
        return notes.get("ledger")
    return None


def _read(path: Path, result: Mapping[str, Any] | None) -> tuple[Verification | None, Record]:
    ledger = path / FILE
    if not ledger.is_file():
        return None, Record(ledger)
    try:
        found, record = Record.read(ledger, checkpoint_head(path))
    except LedgerError as error:
        return Verification(False, 0, "", because=str(error)), Record(ledger)
    because = _contradiction(record, result or {}) if found.whole else None
    return (found if because is None else replace(found, whole=False, because=because)), record


def _contradiction(record: Record, result: Mapping[str, Any]) -> str | None:
    """Where result.json, which is written after the ledger's closing line, disagrees with the ledger."""
    closed = record.closed or {}
    if "proven" in result:
        if record.closed is None:
            return "result.json says that the run has ended, but the ledger has no closing line"
        if result["proven"] != closed.get("proven", result["proven"]):
            return "result.json and the ledger's closing line disagree on what is proven"
    if "selected" in result and result["selected"] != {"proven": record.selected}:
        return "result.json names a private selection that the ledger does not; resume the sweep"
    if {"by_client"} <= result.keys() & closed.keys() and _by_client(result["by_client"]) != closed["by_client"]:
        return "result.json and the ledger's closing line disagree on the clients' epsilons"
    return None


def _by_client(costs: Any) -> list[list[Any]] | None:
    try:
        return [[row["records"], row["epsilon"]] for row in costs["clients"]]
    except (KeyError, TypeError):
        return None


def _claims(record: Record) -> list[dict[str, Any]]:
    if record.selected is not None:
        return record.selected or _nothing(_AFTERWARDS)
    if record.closed is not None and "proven" in record.closed:
        return list(record.closed["proven"])
    units = {charge.unit for intent in record.charged for charge in intent.charges}
    return [_charged(record, *pair).to_json() for pair in _pairs(units)] if units else []


def _charged(record: Record, unit: Unit, observer: Observer) -> Proven:
    """What follows from everything that was charged, committed or not."""
    opened = record.opened or {}
    delta = (opened.get("budget") or {}).get("delta")
    adjacency = _neighbours(record, unit, observer)
    if adjacency is None or not isinstance(delta, float) or (unit == "user" and "users" not in opened):
        return Proven(unit, observer, None, None, None, _TOO_LITTLE)
    event = record.charged_event(unit, observer)
    found = prove(unit, observer, event, delta, adjacency=adjacency, clients=opened.get("clients"))
    return stated(found, opened)


def _neighbours(record: Record, unit: Unit, observer: Observer) -> Adjacency | None:
    """The one adjacency of all charges for this unit and observer."""
    charges = [charge for intent in record.charged for charge in intent.charges]
    named = {each.adjacency for each in charges if (each.unit, each.observer) == (unit, observer)} - {None}
    found = [adjacency for adjacency in get_args(Adjacency) if named == {adjacency}]
    return found[0] if found else None


def _nothing(because: str) -> list[dict[str, Any]]:
    return [Proven(*pair, None, None, None, because).to_json() for pair in _pairs()]


def _pairs(units: Collection[Unit] = ()) -> list[tuple[Unit, Observer]]:
    return list(product(sorted({"client", "record", *units}), get_args(Observer)))
