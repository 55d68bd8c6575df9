"""`shoal policy`: would a data owner's policy accept a federation? Tells before anybody joins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.exit_codes import NOT_HELD
from shoal.cli.options import Change, Json, print_json
from shoal.errors import ConfigError

app = typer.Typer(help="Check a federation's terms against a data owner's policy.", no_args_is_help=True)


@app.command("terms")
def terms(
    config: Annotated[Path, typer.Argument(help="The federation's TOML file, as for `shoal serve`.")],
    change: Change = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")] = Path("terms.toml"),
) -> None:
    """Write the terms that `shoal serve` would send to every site, for their owners to check."""
    from shoal.federation.missing import require_flower

    require_flower()
    from shoal.federation.federated_run import planned_terms

    try:
        output.write_text(planned_terms(config, change or []).to_toml(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from None
    print(f"written to {output}; a site's owner checks it with: shoal policy check site-policy.toml {output}")


@app.command("check")
def check(
    policy: Annotated[Path, typer.Argument(help="The policy, site-policy.toml.")],
    terms: Annotated[Path, typer.Argument(help="The terms, from `shoal policy terms`.")],
    folder: Annotated[
        Path | None, typer.Option(help="The site's folder: count what its ledger has charged already.")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="The coordinator's ca.pem: may it ask?")] = None,
    allow_plugin: Annotated[
        list[str] | None, typer.Option(help="As for `shoal join`: whose algorithms may be named.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a policy forbids of a federation's terms: one line each, and exit code 1 where there is any."""
    from shoal.federation.key_files import authorities
    from shoal.federation.policy_check import refusals
    from shoal.federation.policy_file import read_policy
    from shoal.federation.terms import Terms

    accepted = read_policy(policy)
    try:
        text = terms.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the terms {terms} cannot be read: {error}") from None
    asked = Terms.from_toml(text, tuple(allow_plugin or ()))
    found = refusals(accepted, asked, folder, None if ca is None else authorities(ca))
    if as_json:
        print_json({"accepted": not found, "refused": found})
    else:
        print("\n".join(f"refused: {line}" for line in found) or f"{terms} is accepted by {policy}")
    if found:
        raise typer.Exit(NOT_HELD)
