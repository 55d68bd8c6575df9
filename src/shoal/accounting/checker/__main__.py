"""`python -m checker certificate.json ...`, in the folder that holds this one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import BadInput, check, holds, printable, shown


def main() -> int:
    parser = argparse.ArgumentParser(description="Check a certificate of `shoal certify` without Shoal.")
    parser.add_argument("certificate", type=Path)
    for name in ("ledger", "config", "model", "public-key"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--site", action="append", default=[], metavar="NAME=LEDGER")
    parser.add_argument("--work", type=float, default=1.0, metavar="N", help="N times as much as usual")
    given = parser.parse_args()
    try:
        sites = {name: Path(file) for name, _, file in (each.partition("=") for each in given.site)}
        lines = check(given.certificate, given.ledger, given.config, given.model, given.public_key, sites, given.work)
    except BadInput as error:
        print(printable(f"checker: {error}"), file=sys.stderr)
        return 2
    print(shown(lines))
    return 0 if holds(lines) else 1


if __name__ == "__main__":
    sys.exit(main())
