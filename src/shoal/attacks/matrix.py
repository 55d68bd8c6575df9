"""Methods x attack types: which method resists which attacker (Wei et al. (2023), Table 3 and Figure 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from shoal.algorithms import algorithms
from shoal.attacks.attack_recipes import Recipe
from shoal.attacks.leakage import Aim, Outcome, attack, refuse_unseen
from shoal.attacks.observe import Kind
from shoal.config import configure
from shoal.prepare import load_data

LEAKS = 0.5  # a method that leaks this share of the records is not resilient


@dataclass(frozen=True)
class Method:
    """A column: an algorithm in one setting, labelled as in the paper."""

    label: str
    algorithm: str
    changes: tuple[str, ...] = ()
    tables: tuple[str, ...] = ("figure3",)


METHODS = (
    Method("non-private", "fedavg", tables=("table3", "figure3")),
    Method("compression 10%", "compression", ("per_update.share=0.1",)),
    Method("compression 90%", "compression", ("per_update.share=0.9",)),
    Method("DSSGD", "dssgd", ("per_update.fraction=0.1", "per_update.cap=1.0")),
    Method("DSSGD, noise", "dssgd-noise", ("per_update.fraction=0.1", "per_update.cap=1.0")),
    Method("noise 0.001", "random-noise", ("per_update.scale=0.0316",)),
    Method("noise 0.01", "random-noise", ("per_update.scale=0.1",)),
    Method("Fed-SDP", "fed-sdp", ("per_update.at=server",), ("table3", "figure3")),
    Method("Fed-SDP at client", "fed-sdp", ("per_update.at=client",), ("table3", "figure3")),
    Method("quantile", "quantile", tables=("table3",)),
    Method("quantile, records", "quantile-record", tables=("table3",)),
    Method("AdaClip", "adaclip", tables=("table3",)),
    Method("Fed-CDP C=1 sigma=2", "fed-cdp", ("per_record.clip_norm=1.0", "per_step.noise_multiplier=2.0")),
    Method("Fed-CDP C=4 sigma=6", "fed-cdp", ("per_record.clip_norm=4.0", "per_step.noise_multiplier=6.0")),
    Method("Fed-alphaCDP[sigma]", "fed-alpha-cdp-sigma", tables=("table3", "figure3")),
)
"""DSSGD's cap, in units of the observed gradient, leaves most coordinates unchanged. Random noise is labelled by its
variance, as in the paper and in DLG."""

TYPES: tuple[Kind, ...] = (2, 1, 0)

Started = Callable[[str, int], None]


def methods(table: str | None = None) -> list[Method]:
    """The methods of one of the paper's tables, or all."""
    known = algorithms()
    return [m for m in METHODS if m.algorithm in known and (table is None or table in m.tables)]


def matrix(
    base: dict[str, Any],
    recipe: Recipe,
    aim: Aim,
    *,
    changes: tuple[str, ...] = (),
    on_cell: Started | None = None,
) -> Iterator[tuple[Method, Outcome]]:
    """Attack every method at every type, with the same victims and the same model.

    Args:
        base: Settings that all methods share.
        recipe: The attack.
        aim: Victims; its `records` and `honest` concern types 0 and 1.
        changes: Further settings, as `key=value`.
        on_cell: Called with a method's label and a type before each attack.

    Yields:
        The method and the outcome of each attack.
    """
    data = None
    chosen = methods()
    configs = [configure(base | {"algorithm": each.algorithm}, [*each.changes, *changes]) for each in chosen]
    cells = [(*each, _of_kind(aim, kind)) for each in zip(chosen, configs, strict=True) for kind in TYPES]
    for _, config, aimed in cells:
        refuse_unseen(config, aimed)
    for method, config, aimed in cells:
        if on_cell is not None:
            on_cell(method.label, aimed.kind)
        data = data or load_data(config)
        yield method, attack(config, recipe, aimed, data)


def _of_kind(aim: Aim, kind: Kind) -> Aim:
    return replace(aim, kind=2, records=None, honest=False) if kind == 2 else replace(aim, kind=kind)


def cell(method: Method, outcome: Outcome) -> dict[str, Any]:
    """The figures of one attack, as a row of a table."""
    row = outcome.row()
    return {"method": method.label, "resilient": row["success"] < LEAKS} | row
