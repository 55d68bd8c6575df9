"""`shoal models check MODEL`: can it be trained, how are its gradients computed, can records have privacy?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.cli.options import Change, Json, print_json

if TYPE_CHECKING:
    from shoal.config import Config
    from shoal.data import Dataset

app = typer.Typer(no_args_is_help=True, help="Check a model before it is trained.")
LEVELS = {"client": "trusted-curator", "record": "dp-sgd"}
"""A method that protects clients, and one that protects records."""
ANY_DATA = ["data.partition=iid", "clients.sampling=all"]
"""So that both methods can be set up on data without owners, or with few."""
ABOUT_DATA = ("data", "schema", "task")
"""The sections of a configuration that say what a model is trained on; the others belong to its method."""


@app.callback()
def _models() -> None:
    pass


@app.command("check")
def check(
    model: Annotated[str, typer.Argument(help="A name, or package.module:Class for your own.")],
    config: Annotated[Path | None, typer.Argument(help="A TOML file whose data, schema and task to use.")] = None,
    change: Change = None,
    as_json: Json = False,
) -> None:
    """Tell how a model would be trained on data (-c data.name=...), with privacy for clients and for records."""
    found = checked(model, change or [], config)
    if as_json:
        print_json(found)
    else:
        _show(found)


def checked(model: str, changes: list[str], file: Path | None = None) -> dict[str, Any]:
    """The facts about a model; raises the ModelError where it cannot be trained at all."""
    from shoal.config import configure, read_toml
    from shoal.errors import ModelError
    from shoal.prepare import dataset_of

    fixed = [word for word in ANY_DATA if not any(own.startswith(word.partition("=")[0]) for own in changes)]
    read = {} if file is None else read_toml(file)
    about = {key: value for key, value in read.items() if key.partition(".")[0] in ABOUT_DATA}
    configs = {
        level: configure(about or None, [f"algorithm={name}", *fixed, *changes, f"model={model}"])
        for level, name in LEVELS.items()
    }
    dataset = dataset_of(configs["client"], None)
    facts, refusals = _about(configs["client"], dataset), []
    for level, config in configs.items():
        try:
            facts[level] = _way(config, dataset)
        except ModelError as error:
            refusals.append(error)
            facts[level] = {"refused": str(error)}
    if len(refusals) == len(LEVELS):
        raise refusals[0]
    return facts


def _about(config: Config, dataset: Dataset) -> dict[str, Any]:
    from shoal.gradients import Layout
    from shoal.gradients.batched import without_rule
    from shoal.models import build, count

    module = build(config.model, dataset.input_shape, dataset.task.outputs)
    frozen = sum(p.numel() for p in module.parameters()) - count(module)
    layers = without_rule(module, Layout.of(module))
    return {"model": config.model, "data": config.data.name, "parameters": count(module), "frozen": frozen} | {
        "without_rules": layers
    }


def _way(config: Config, dataset: Dataset) -> dict[str, str]:
    """How gradients are computed, where this method trains the model."""
    from shoal.prepare import prepare

    _, trainer = prepare(config, dataset, None)
    trainer.close()
    return trainer.cohort.gradients


def _show(found: dict[str, Any]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    frozen = f", {found['frozen']:,} more are frozen" if found["frozen"] else ""
    table.add_row("model", f"{escape(found['model'])} on {escape(found['data'])}")
    table.add_row("parameters", f"{found['parameters']:,} are trained{frozen}")
    table.add_row("without rules", escape(", ".join(found["without_rules"]) or "no layer"))
    for level in LEVELS:
        table.add_row(f"{level} level", escape(_words(found[level])))
    Console(emoji=False).print(table)


def _words(level: dict[str, str]) -> str:
    if "refused" in level:
        return f"not possible: {level['refused']}"
    return level["way"] + (f": {level['because']}" if level["because"] else "")
