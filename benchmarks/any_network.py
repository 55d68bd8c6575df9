"""Milliseconds for one step of all clients, for networks as users write them: Shoal at both levels, and its peers.

    python benchmarks/any_network.py --out any.jsonl [--device cuda] [--scale small] [--only lstm,client,record]
    python benchmarks/any_network.py --table any.jsonl

Networks are in any_networks/networks.py, columns in any_networks/columns.py:

    plain        nn.Module and SGD in PyTorch, client after client, under the best of its settings
    graph        one client's step as a CUDA graph, client after client (CUDA only)
    vmap         torch.func.vmap over clients, compiled on CUDA
    client       Shoal at client level: a round of the simulator, everything included
    per-example  every record's gradient by torch.func.vmap, in memory, clipped, with noise, client after client
    opacus       Opacus 1.6, the best of hooks, ghost, ew and functorch, client after client
    record       Shoal at record level: a round of the simulator, everything included

The first round does not count; the best of the others does. Where clients are trained one by one and all of them
would take too long, some are timed and the time is scaled ("of_clients"). A cell that fails, crashes or takes longer
than --limit gives a line with the reason. A line is written when a cell is done; --resume leaves out those that the
file has. Memory is the peak: on CUDA of tensors, on a CPU of the process beyond what it imported.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from any_networks.columns import COLUMNS, Bench, Found, measure
from any_networks.networks import CASES, Case
from any_networks.table import table

CELL = ("network", "column", "device", "clients", "batch")
Cell = tuple[str | int, ...]
"""What a line of the results is about."""

FORK = multiprocessing.get_context("fork")  # torch is imported once, and used in children alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--scale", default="full", choices=("full", "small"), help="small: fewer clients and records")
    parser.add_argument("--steps", type=int, default=8, help="steps in a round")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a cell may take")
    parser.add_argument("--only", default="", help="names of networks and columns, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("any_network.jsonl"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the Markdown table of results, and end")
    chosen = parser.parse_args()
    if chosen.table:
        print(table([json.loads(line) for line in chosen.table.read_text().splitlines()]))
        return
    names = set(filter(None, chosen.only.split(",")))
    if unknown := names - COLUMNS.keys() - {case.name for case in CASES}:
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}")
    done = _done(chosen.out) if chosen.resume else set()
    columns = [name for name in COLUMNS if not names & COLUMNS.keys() or name in names]
    for case in CASES:
        if not names - COLUMNS.keys() or case.name in names:
            _run(case, columns, done, chosen)


def _done(out: Path) -> set[Cell]:
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return {tuple(line[key] for key in CELL) for line in lines}


def _run(case: Case, columns: list[str], done: set[Cell], chosen: argparse.Namespace) -> None:
    """Measure the cells that are not done; on a CPU each has its own process, whose memory is then its own."""
    clients, batch = case.few if chosen.scale == "small" else (case.clients, case.batch)
    wanted = [name for name in columns if (case.name, name, chosen.device, clients, batch) not in done]
    for group in [[column] for column in wanted] if chosen.device == "cpu" else [wanted]:
        for column, found in _cells(case, group, clients, batch, chosen):
            cell = dict(zip(CELL, (case.name, column, chosen.device, clients, batch), strict=True))
            line = json.dumps(cell | found)
            print(line, flush=True)
            with chosen.out.open("a") as file:
                file.write(line + "\n")


def _cells(
    case: Case, columns: list[str], clients: int, batch: int, chosen: argparse.Namespace
) -> Iterator[tuple[str, Found]]:
    """Each cell's result; after one that hangs or crashes a new process goes on with the next."""
    while columns:
        ours, theirs = FORK.Pipe(duplex=False)
        child = FORK.Process(target=_child, args=(theirs, case, columns, clients, batch, chosen))
        child.start()
        theirs.close()
        try:
            while columns:
                if not ours.poll(chosen.limit):
                    yield columns[0], {"failed": f"took longer than {chosen.limit:g} s"}
                    columns = columns[1:]
                    break
                yield ours.recv()
                columns = columns[1:]
        except EOFError:
            child.join()
            if child.exitcode:
                yield columns[0], {"failed": f"the process ended with exit code {child.exitcode}"}
                columns = columns[1:]
        child.kill()
        child.join()


def _child(
    answers: Connection, case: Case, columns: list[str], clients: int, batch: int, chosen: argparse.Namespace
) -> None:
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    device = torch.device(chosen.device)
    cuda = device.type == "cuda"
    machine = {
        "machine": torch.cuda.get_device_name() if cuda else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    bench = Bench(case, clients, batch, chosen.steps, device, chosen.repeats, chosen.limit / 4)
    for column, found in measure(bench, columns):
        answers.send((column, found | machine))
        if "failed" in found:  # after an error a GPU may be of no use to this process
            return


if __name__ == "__main__":
    main()
