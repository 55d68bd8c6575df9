"""What a policy would refuse of a federation's terms, without joining: all of it, not only the first."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from shoal.accounting.privacy_ledger import FILE, Record
from shoal.errors import ConfigError, ShoalError
from shoal.federation.consent import Refused, SiteLedger
from shoal.federation.policy_file import Policy
from shoal.federation.terms import Terms


def refusals(
    policy: Policy, terms: Terms, folder: Path | None = None, authorities: Collection[str] | None = None
) -> list[str]:
    """The refusals, one line each; none where the terms are accepted.

    Args:
        policy: The policy.
        terms: The terms.
        folder: The site's folder, whose ledger says what was charged before; None: nothing was.
        authorities: The fingerprints in the coordinator's ca.pem; None leaves open who asks.
    """
    found = [] if authorities is None else _refusal(lambda: policy.refuse_coordinator(authorities))
    try:
        outside = list(policy.bounds.problems(terms))
    except ShoalError as error:  # the terms contradict themselves
        return [*found, str(error)]
    return found + outside + _refusal(lambda: _agree(policy, terms, folder))


def _agree(policy: Policy, terms: Terms, folder: Path | None) -> None:
    """Agree as a site would, on a copy of its ledger: the site may be running."""
    site = "site"
    with tempfile.TemporaryDirectory() as scratch:
        ledger = Path(scratch) / FILE
        if folder is not None:
            site = _copied(folder / FILE, ledger)
        site_ledger = SiteLedger(ledger, site, policy.requirements, terms)
        try:
            site_ledger.agree()
        finally:
            site_ledger.close()


def _copied(own: Path, copy: Path) -> str:
    """Copy a site's ledger, and return the site's name."""
    if not own.exists():
        raise ConfigError(f"there is no ledger {own}: leave out --folder for a site that has not taken part yet")
    shutil.copyfile(own, copy)
    opened = Record.read(copy)[1].opened
    return str(opened["run"]) if opened else "site"


def _refusal(agree: Callable[[], None]) -> list[str]:
    try:
        agree()
    except Refused as refused:
        return [str(refused)]
    return []
