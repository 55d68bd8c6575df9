"""`shoal audit --federation RUN`: what the canary clients of a real federation say about its epsilon."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from shoal import release
from shoal.accounting.privacy_ledger import FILE as LEDGER
from shoal.accounting.privacy_ledger import Record
from shoal.accounting.rounding import up
from shoal.cli.exit_codes import REFUTED
from shoal.cli.options import command_line, print_json
from shoal.report.claim_rows import at_least

FILE = "federation.json"


def report(run: Path, as_json: bool) -> None:
    """Measure, write audit/federation.json to the run's folder, and print; exit code 3 where one is above a claim."""
    from shoal.audit.audit_report import place
    from shoal.audit.federated_canaries import ALPHA, Measured, audit_federation
    from shoal.files import write_whole

    found: Measured = audit_federation(run)
    with place(run / "audit") as folder:
        # The canaries are nobody's data, but the models that they are measured by are trained on the sites'.
        random = (Record.read(run / LEDGER)[1].opened or {}).get("random", "")
        label = release.of_model([{"epsilon": found.claimed}], random, from_data=False)
        held = {release.KEY: label, "command": command_line(), "confidence": 1 - ALPHA} | found.to_json()
        write_whole(folder / FILE, (json.dumps(held, indent=1) + "\n").encode())
    if as_json:
        print_json({"run": str(run), **held})
    else:
        console = Console()
        table = Table(
            "observer", "at least", "estimate", "guesses correct", box=None, pad_edge=False, padding=(0, 2, 0, 0)
        )
        for seen in found.seen:
            estimate = f"{seen.estimate:.2f} (from {seen.estimate_least:.2f})"
            table.add_row(seen.observer, at_least(seen.least), estimate, f"{seen.right} of {seen.guesses}")
        claimed = "nothing" if found.claimed is None else f"epsilon {up(found.claimed, 3)} at delta {found.delta:g}"
        console.print(
            f"{found.canaries} canary clients, {found.included} of them in the run, {found.rounds} rounds; "
            f"proven for a client: {claimed}", highlight=False, soft_wrap=True,
        )  # fmt: skip
        console.print(table)
        console.print(
            "the estimate (Andrew et al., 2023) is no bound: it and its lower end assume normal, independent scores",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        console.print(f"verdict: {found.verdict}", highlight=False)
    if found.verdict not in ("consistent", "no claim"):
        raise typer.Exit(REFUTED)
