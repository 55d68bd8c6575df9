"""The attacks of Wei et al. (2023): Tables 1 and 3, Figure 3; 100 victims, success as in `attacks.quality`."""

from __future__ import annotations

from typing import Any

from shoal.attacks.matrix import Method, methods
from shoal.config import override
from shoal.papers.table import Cell, Table
from shoal.papers.work import Leak, Run

PICTURES = {"MNIST": "mnist", "CIFAR10": "cifar10", "LFW": "lfw"}
FOUND = ("success", "rmse", "iterations")
SEEN = ("resilient", "rmse", "iterations")
RECORDS = "quantile, records"  # quantile clipping of each record's gradient; the paper does not say which it attacked


def table1() -> Table:
    """Three attacks on plain gradients."""
    cells = []
    for row, attack in (("DLG", "dlg"), ("GradInv", "gradinv"), ("CPL", "cpl")):
        for column, data in PICTURES.items():
            work = Leak(attack, "fedavg", (), data, 2)
            cells.append(Cell(row, column, work, FOUND, attacked=f"table1/{data}/{attack}"))
            if attack == "gradinv":
                newton = Leak("gradinv-lbfgs", "fedavg", (), data, 2)
                old = f"table1/{data}/gradinv-lbfgs"
                cells.append(Cell(row, column, newton, FOUND, "L-BFGS", attacked=old))
    return Table("alphacdp-table1", tuple(PICTURES.values()), 30, tuple(cells))


def table3() -> Table:
    """Which method resists which attack type."""
    cells = []
    for kind in (0, 1, 2):
        for method in methods("table3"):
            for column in ("MNIST", "LFW"):
                cells.append(_seen(method, kind, column))
    return Table("alphacdp-table3", ("mnist", "lfw"), 60, tuple(cells))


def _seen(method: Method, kind: int, column: str) -> Cell:
    work = Leak("cpl", method.algorithm, method.changes, PICTURES[column], kind)
    label, change = ("quantile", "clip per record") if method.label == RECORDS else (method.label, "")
    old = f"table3/{PICTURES[column]}/{method.label}/{kind}"
    return Cell(f"type {kind} {label}", column, work, SEEN, change, attacked=old)


def figure3(plain: dict[str, Any], small: dict[str, Any]) -> Table:
    """Figure 3; `plain` is how the paper trains on LFW with every method."""
    cells = []
    for method in methods("figure3"):
        if method.algorithm == "fed-alpha-cdp-sigma":
            continue  # not in the published picture
        changes = dict(map(override, method.changes))
        given = {"algorithm": method.algorithm} | plain | changes
        cells.append(Cell("LFW", method.label, Run(given, small)))
        for kind in (0, 1, 2):
            work = Leak("cpl", method.algorithm, method.changes, "lfw", kind)
            cells.append(
                Cell(
                    f"type {kind}", method.label, work, ("resilient",), attacked=f"figure3/lfw/{method.label}/{kind}"
                )
            )
    return Table("alphacdp-figure3", ("lfw",), 60, tuple(cells))
