"""Search over what the papers leave open, where their figures are not reproduced: one JSON line a run.

    SHOAL_DATA=... python benchmarks/paper_search.py GROUP [GROUP ...] --out FILE [--jobs 16] [--device cuda]
    SHOAL_DATA=... python benchmarks/paper_search.py GROUP [GROUP ...] --out FILE --apply mnist --seeds 5
    python benchmarks/paper_search.py --list

A group is a cell of a paper's table and a grid of settings that its text does not state. Seed 0 unless `--seeds`
says otherwise. Lines have the form of `shoal papers run`, so that `shoal papers compare` counts one whose
configuration is that of a table's cell. Runs that FILE holds are not run again; interrupted ones resume. `--apply`
runs the best setting that FILE holds of a group on another data set.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from shoal.papers import geyer_tables, pfl_tables, thesis_tables
from shoal.papers.running import plan, play, read_lines
from shoal.papers.table import Cell, Line, Table
from shoal.papers.work import Run


@dataclass(frozen=True)
class Search:
    """A cell's configuration and the values that are tried, all combinations of them."""

    row: str
    base: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]

    def cells(self) -> Iterator[Cell]:
        """One cell a combination."""
        for values in product(*self.grid.values()):
            changed = dict(zip(self.grid, values, strict=True))
            words = ", ".join(f"{key} {value}" for key, value in changed.items())
            yield Cell(self.row, "search", Run(dict(self.base) | changed), change=words)


def _thesis(method: str, table: str, split: str) -> dict[str, Any]:
    return thesis_tables.federated(method, *thesis_tables.SIZES[table], thesis_tables.SPLITS[split])


def _naive(table: str) -> list[Search]:
    """Both clip norms of the naive method, of which the thesis states neither."""
    grid = {"per_record.clip_norm": (0.5, 1.0, 2.0, 4.0), "per_update.clip_norm": (0.05, 0.1, 0.2, 0.4)}
    return [Search("naive", _thesis("naive", table, "IID"), grid)]


def _curator() -> list[Search]:
    """The clip norm's decay and the learning rate, of which the thesis says "a low-resolution grid search"."""
    clips = ("decay:0.4:0.003:0.02", "decay:0.4:0.005:0.02", "decay:0.4:0.01:0.02", "decay:0.4:0.01:0.05")
    grid = {"local.lr": (0.1, 0.2, 0.5), "per_update.clip_norm": clips}
    return [Search("trusted curator", _thesis("trusted-curator", "thesis-table4.4", "non-IID"), grid)]


def _pfl_noise() -> list[Search]:
    """The noise multiplier at the stricter epsilon, where rounds are long."""
    grid = {"per_step.noise_multiplier": (1.1, 1.286, 1.4, 1.5)}
    return [
        Search(f"(10, 2) {model}", pfl_tables.pfl("MNIST", model, 1.66, 10, 2).config, grid)
        for model in ("CNN+RL", "CNN+TS", "SN+CNN")
    ]


def _pfl_plain() -> list[Search]:
    """The step of plain averaging, which diverges in long rounds with lr 0.3."""
    return [
        Search(
            f"({epochs}, {rounds}) FedAvg CNN+RL, momentum {momentum}",
            dict(pfl_tables.pfl("MNIST", "CNN+RL", None, epochs, rounds, momentum=momentum).config),
            {"local.lr": rates},
        )
        for epochs, rounds in ((2, 10), (10, 2))
        for momentum, rates in ((0.5, (0.05, 0.1, 0.2)), (0.9, (0.1,)))
    ]


def _pfl_alone() -> list[Search]:
    """One client with all records of Fashion-MNIST."""
    base = pfl_tables.pfl("Fashion-MNIST", "CNN+TS", pfl_tables.ALONE["Fashion-MNIST"], clients=1).config
    return [Search("1 CNN+TS", base, {"local.lr": (0.01, 0.05, 0.1), "local.momentum": (0.5, 0.9)})]


def _variance() -> list[Search]:
    """V_c without privacy, by learning rate, epochs and batch."""
    grid = {"local.lr": (0.01, 0.03, 0.3), "local.epochs": (1, 4)}
    return [Search("non-private", geyer_tables.not_private(), grid)]


def _client(
    features: str, clients: int, epsilon: float, data: str = "fashion-mnist", **grid: Sequence[Any]
) -> list[Search]:
    """Client level on data that chose the form of the features too; others then use the best settings."""
    shown = geyer_tables.quantile(clients, epsilon, features) | {"data.name": data}
    return [Search(f"{clients} clients, epsilon {epsilon:g}, {features}", shown, _named(grid))]


def _sampled(features: str, data: str) -> list[Search]:
    """1,000 clients, of whom 100 take part in a round."""
    fixed = {"clients.sampling": ("poisson",), "clients.cohort": (100.0,)}
    bias = {"model": ("linear-without-bias", "linear")}
    return _client(features, 1000, 3.0, data, rounds=(50, 100), quantile=(0.2, 0.5), epochs=(5, 20), **fixed, **bias)


def _named(grid: dict[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    keys = {"quantile": "per_update.quantile", "momentum": "server.momentum"}
    keys |= {"epochs": "local.epochs", "lr": "local.lr"}
    return {keys.get(name, name): values for name, values in grid.items()}


GROUPS = {
    "client-fourier-100": _client(
        "hog-fourier", 100, 8.0, rounds=(20, 40), quantile=(0.1, 0.2, 0.4), momentum=(0.8, 0.9), lr=(20.0, 50.0)
    ),
    "client-fourier-1000-1": [
        *_client("hog-fourier", 1000, 1.0, rounds=(20, 40), quantile=(0.05, 0.1, 0.2), momentum=(0.8, 0.9)),
        *_client("hog-fourier", 1000, 1.0, rounds=(10, 20), quantile=(0.4, 0.6), momentum=(0.5, 0.8), epochs=(5, 10)),
    ],
    "client-fourier-1000": _client("hog-fourier", 1000, 8.0, quantile=(0.1, 0.2, 0.4), momentum=(0.9, 0.95)),
    "client-fourier-10000": _client("hog-fourier", 10_000, 8.0, quantile=(0.1, 0.2, 0.4), momentum=(0.95,)),
    "client-sampled-fashion": _sampled("hog-sharp", "fashion-mnist"),
    "client-sampled-mnist": _sampled("hog2", "mnist"),
    "client-sharp-100": [
        *_client(
            "hog-sharp", 100, 8.0, rounds=(20, 40), quantile=(0.1, 0.2, 0.4), momentum=(0.8, 0.9), lr=(20.0, 50.0)
        ),
        *_client("hog-sharp", 100, 8.0, rounds=(10, 20), quantile=(0.6, 0.8), momentum=(0.8, 0.9), lr=(50.0, 100.0)),
    ],
    "client-sharp-1000-1": [
        *_client(
            "hog-sharp", 1000, 1.0, rounds=(20, 40), quantile=(0.1, 0.2, 0.4), momentum=(0.5, 0.8), epochs=(5, 10)
        ),
        *_client(
            "hog-sharp", 1000, 1.0, rounds=(40,), quantile=(0.1, 0.2, 0.4), momentum=(0.2, 0.5), epochs=(20, 40)
        ),
        *_client("hog-sharp", 1000, 1.0, rounds=(80,), quantile=(0.1, 0.2), momentum=(0.2, 0.5), epochs=(10, 20)),
    ],
    "naive-100": _naive("thesis-table4.4"),
    "naive-1000": _naive("thesis-table4.5"),
    "naive-10000": _naive("thesis-table4.6"),
    "curator-100": _curator(),
    "pfl-noise": _pfl_noise(),
    "pfl-plain": _pfl_plain(),
    "pfl-alone": _pfl_alone(),
    "variance": _variance(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []])
    parser.add_argument("--out", type=Path, default=Path("papers/paper_search.jsonl"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--apply", metavar="DATA", help="run the best setting of each group on this data set")
    parser.add_argument("--list", action="store_true", help="print the runs of all groups, and end")
    given = parser.parse_args()
    lines = read_lines(given.out)
    for name in GROUPS if given.list else given.groups:
        cells = [cell for search in GROUPS[name] for cell in search.cells()]
        if given.apply:
            cells = [_best(cells, lines, given.apply)]
        todo = plan(cells, given.seeds, False, lines)
        print(f"{name}: {len(cells)} settings, {len(todo)} runs to make", flush=True)
        if given.list:
            continue
        table = Table(f"search-{name}", (), 0, tuple(cells))
        for line in play(todo, table, given.out, given.device, False, _report, given.jobs):
            print(name, line["cell"], line.get("accuracy", line.get("failed")), line["seconds"], flush=True)


def _best(cells: list[Cell], lines: list[Line], data: str) -> Cell:
    """The cell with the highest accuracy at seed 0, on another data set."""
    found = {line["key"]: line["accuracy"] for line in lines if line.get("seed") == 0 and "accuracy" in line}
    best = max(cells, key=lambda cell: found.get(cell.work.key(False), 0.0))
    if best.work.key(False) not in found:
        raise SystemExit("--apply: --out holds no run of this group; search it first, without --apply")
    assert isinstance(best.work, Run)
    return replace(best, column=data, work=replace(best.work, config=dict(best.work.config) | {"data.name": data}))


def _report(cell: str, done: int, part: float) -> None:
    if cell and part == done:
        print(f"{done} done: {cell}", flush=True)


if __name__ == "__main__":
    main()
