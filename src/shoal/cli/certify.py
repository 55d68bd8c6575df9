"""`shoal certify RUN`: a certificate that an auditor can check, and `--check`, which checks one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.exit_codes import NOT_HELD
from shoal.cli.options import Json, PasswordFile, password_of, print_json
from shoal.errors import ConfigError

Evidence = Annotated[Path | None, typer.Option(help="With --check: the file to compare with the certificate.")]


def command(
    run: Annotated[Path, typer.Argument(help="A run's folder; with --check a certificate, or a folder with one.")],
    check: Annotated[bool, typer.Option("--check", help="Check a certificate instead of making one.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where to write it; by default the run's folder.")] = None,
    key: Annotated[Path | None, typer.Option(help="The operator's private key, which signs it (Ed25519).")] = None,
    password_file: PasswordFile = None,
    site: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=LEDGER", help="The ledger of a federation's site, to bind or to compare."),
    ] = None,
    ledger: Evidence = None,
    config: Evidence = None,
    model: Evidence = None,
    public_key: Annotated[
        Path | None, typer.Option(help="With --check: the key that must have signed, as a .pub or PEM file.")
    ] = None,
    work: Annotated[
        float | None,
        typer.Option(metavar="N", help="With --check: do up to N times as much work as usual."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the certificate of a run: claims, how they follow, assumptions, hashes, a signature. Or check one.

    A check recomputes every epsilon by another way, and ends with exit code 1 where a line does not hold.
    """
    sites = _sites(site or [])
    evidence = {"ledger": ledger, "config": config, "model": model, "public_key": public_key}
    if check:
        _refuse({"out": out, "key": key, "password_file": password_file}, "makes a certificate: leave out --check")
        _check(run, evidence, sites, 1.0 if work is None else work, as_json)
    else:
        _refuse({**evidence, "work": work}, "is for --check")
        _certify(run, out or run, key, password_file, sites, as_json)


def _certify(
    run: Path, out: Path, key: Path | None, password_file: Path | None, sites: dict[str, Path], as_json: bool
) -> None:
    from shoal.federation.key_files import read_operator_key
    from shoal.report.certificate import certificate, signed, write

    signing = None if key is None else read_operator_key(key, password_of(key, password_file))
    held = certificate(run, sites)
    held = held if signing is None else signed(held, signing)
    written, page = write(out, held)
    if as_json:
        print_json({"certificate": str(written), "page": str(page), "signed": signing is not None})
        return
    typer.echo(f"{written}\n{page}")
    if signing is None:
        typer.echo("UNSIGNED: sign it with --key (`shoal keys operator` makes one)")


def _check(path: Path, evidence: dict[str, Path | None], sites: dict[str, Path], work: float, as_json: bool) -> None:
    from shoal.accounting import checker

    if path.is_dir():
        beside = {"ledger": "ledger.jsonl", "config": "config.toml", "model": "model.safetensors"}
        found = {name: path / file for name, file in beside.items() if (path / file).is_file()}
        evidence = evidence | {name: evidence[name] or file for name, file in found.items()}
        path = path / "certificate.json"
    try:
        lines = checker.check(path, **evidence, sites=sites, work=work)
    except checker.BadInput as error:
        raise ConfigError(str(error)) from None
    if as_json:
        print_json({"holds": checker.holds(lines), "lines": [asdict(line) for line in lines]})
    else:
        typer.echo(checker.shown(lines))
    if not checker.holds(lines):
        raise typer.Exit(NOT_HELD)


def _sites(given: list[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for each in given:
        name, equals, file = each.partition("=")
        if not (name and equals and file) or name in found:
            raise ConfigError(f"--site must be NAME=LEDGER, each name once, got {each!r}")
        found[name] = Path(file)
    return found


def _refuse(options: Mapping[str, object], why: str) -> None:
    if given := [name for name, value in options.items() if value is not None]:
        raise ConfigError(f"--{given[0].replace('_', '-')} {why}")
