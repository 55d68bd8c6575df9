"""The command `shoal`: one file a subcommand; errors become messages and exit codes here."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import warnings
from typing import Annotated

import typer

from shoal import __version__
from shoal.cli import (
    account,
    algorithms,
    attack,
    audit,
    certify,
    data,
    doctor,
    export,
    init,
    join,
    keys,
    ledger,
    models,
    papers,
    policy,
    predict,
    report,
    run,
    runs,
    serve,
    sites,
    sweep,
)
from shoal.cli.exit_codes import BAD_INPUT, EPILOG, NO_READER, STOPPED
from shoal.errors import ConfigError, ShoalError
from shoal.federation.operations import logs

app = typer.Typer(
    name="shoal",
    help="Differentially private federated learning that states exactly what it guarantees.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("init")(init.command)
app.command("run")(run.command)
app.command("sweep")(sweep.command)
app.command("predict")(predict.command)
app.command("export")(export.command)
app.command("report")(report.command)
app.command("certify")(certify.command)
app.command("algorithms")(algorithms.command)
app.command("attack")(attack.command)
app.command("audit")(audit.command)
app.command("serve")(serve.command)
app.command("join")(join.command)
app.command("doctor")(doctor.command)
app.add_typer(sites.app, name="sites")
app.add_typer(keys.app, name="keys")
app.add_typer(policy.app, name="policy")
app.add_typer(account.app, name="account")
app.add_typer(runs.app, name="runs")
app.add_typer(ledger.app, name="ledger")
app.add_typer(data.app, name="data")
app.add_typer(models.app, name="models")
app.add_typer(papers.app, name="papers")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    command, rank = context.invoked_subcommand, int(os.environ.get("RANK", 0))
    if command != "run" and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if rank:
            raise typer.Exit
        jobs = "; --jobs N runs N cells at a time" if command in ("sweep", "papers") else ""
        raise ConfigError(f"only `shoal run` is spread over ranks: start `shoal {command}` without torchrun{jobs}")


def main() -> None:
    """Run the command line; an error prints one line and exits with its code."""
    # OpenMP reads this when torch is loaded: on a busy machine threads that spin take twenty times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    atexit.register(gc.freeze)  # nothing to collect in what ends: a tenth of the time of a short command
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    try:
        app(prog_name="shoal")
    except ShoalError as error:
        if not getattr(error, "silent", False):
            logs.show_error(str(error))
        _exit(getattr(error, "exit_code", BAD_INPUT))
    except KeyboardInterrupt:
        logs.show_error("stopped")
        _exit(STOPPED)
    except SystemExit as ended:
        # Typer turns Ctrl-C into a silent exit, and an output that nobody reads into exit code 1.
        if isinstance(getattr(ended.__context__, "__cause__", None), KeyboardInterrupt):
            logs.show_error("stopped")
            _exit(int(ended.code or 0))
        if isinstance(ended.__context__, BrokenPipeError):
            sys.exit(NO_READER)
        raise
    finally:
        logs.close()


def _exit(code: int) -> None:
    """Exit; at once where a thread waits for ranks inside torch, which aborts the process if it wakes meanwhile."""
    if any(thread.name == "ranks meet" for thread in threading.enumerate()):
        logs.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _show_warning(message: Warning | str, *_: object) -> None:
    """In one line, as errors are; of several ranks the first one shows it."""
    if os.environ.get("RANK", "0") == "0":
        print(f"shoal: warning: {message}", file=sys.stderr)
