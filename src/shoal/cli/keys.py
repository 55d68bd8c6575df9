"""`shoal keys`: certificates for a federation, and the keys of its sites."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Make certificates and keys for a federation.", no_args_is_help=True)


@app.command("coordinator")
def coordinator(
    hosts: Annotated[list[str], typer.Argument(help="Host names and addresses of the coordinator.")],
    folder: Annotated[Path, typer.Option(help="Where to write them.")] = Path("keys"),
    days: Annotated[int, typer.Option(help="Days for which the certificates are valid.")] = 365,
) -> None:
    """Make a certificate authority and the coordinator's certificate, for TLS in `shoal serve`."""
    from shoal.federation.keys import make_authority

    ca, secret, *_ = make_authority(folder, hosts, days)
    print(f"written to {folder}: give {ca} to every site, keep {secret} safe,")
    print(f"put each site's NAME.pub into {folder / 'sites'}; then: shoal serve CONFIG.toml --keys {folder}")


@app.command("site")
def site(
    name: Annotated[str, typer.Argument(help="This site's name.")],
    folder: Annotated[Path, typer.Option(help="Where to write them.")] = Path("keys"),
) -> None:
    """Make this site's key: NAME.key stays here, NAME.pub goes to the coordinator."""
    from shoal.federation.keys import make_site

    private, public = make_site(folder, name)
    print(f"send {public} to the coordinator, and ask for its ca.pem; then:")
    print(f"shoal join HOST --data FILE.csv --key {private} --ca ca.pem")
