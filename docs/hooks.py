"""What MkDocs takes from the code: a page's line `<!-- generated NAME -->` becomes the Markdown of that name.

So keys, commands, methods and schemas on the site are those of the program that built it.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
from pictures import PICTURES

if typing.TYPE_CHECKING:
    from pydantic import BaseModel

MARK = re.compile(r"^<!-- generated ([a-z-]+) -->$", re.MULTILINE)
PICTURE = re.compile(r'<p>(<img [^>]*src="([^"]+\.png)"[^>]*>)</p>')
SECTIONS = {
    "data": "Which data, and how they are split over clients.",
    "schema": "What a table's columns are: [your own data](../how-to/own-data.md).",
    "task": "What the model is trained for. All of it is public: nothing here is computed from records.",
    "clients": "Which clients take part in a round.",
    "records": "Which of a client's records enter each local step.",
    "local": "How a client trains: [local training](../explanation/local-training.md).",
    "per_record": "What happens to one record's gradient, inside the client.",
    "per_step": "Noise in every local step, on the sum of the batch's clipped gradients.",
    "per_update": "What happens to a client's update before it leaves.",
    "aggregate": "How updates are added up.",
    "per_round": "Noise on the sum of a round.",
    "server": "What the server does with the mean update, after the noise. This costs no privacy.",
    "budget": "What the run may spend.",
    "stop": "Early stopping by held-out records that are public. Every planned round is charged all the same.",
    "engine": "Where and how a simulation runs. Nothing here changes the results, except for rounding.",
    "federation": "How a real federation is run (`shoal serve`). A simulation ignores it.",
}
KEYS = ("key", "type", "default", "meaning")
Row = tuple[str, str, str, str]


def on_page_markdown(markdown: str, **_: object) -> str:
    """MkDocs' hook: fill in what is generated."""
    return MARK.sub(lambda found: PICTURES.get(found[1]) or GENERATED[found[1]](), markdown)


def on_page_content(html: str, **_: object) -> str:
    """MkDocs' hook: a picture links to itself in full size, and a phone scrolls it."""
    return PICTURE.sub(r'<p class="picture"><a href="\2">\1</a></p>', html)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# Configuration


def configuration() -> str:
    """Every key, section by section."""
    return "\n".join(f"## {title}\n\n{_section(title)}" for title in ("Outside sections", *SECTIONS))


def _section(name: str) -> str:
    from shoal.config import _SECTIONS, _TOP, Config
    from shoal.data.schema import Schema

    if name not in SECTIONS:
        rows = [(f"`{key}`", words(kind), value(given), meaning(Config, key)) for key, (kind, given) in _TOP.items()]
        return table(KEYS, rows)
    kinds = {each: type(section) for each, section in _SECTIONS.items()} | {"schema": Schema}
    body = table(KEYS, _fields(name, kinds[name])) if name in kinds else _boundary(name)
    return f"{SECTIONS[name]}\n\n{body}"


def _fields(section: str, kind: type, users: Mapping[str, Any] = types.MappingProxyType({})) -> Iterator[Row]:
    """The keys of a class; `users`: the methods that have it, with their settings."""
    hints = get_type_hints(kind)
    if hasattr(kind, "schemes"):
        hints["sampling"] = Literal[tuple(kind.schemes)]
    for each in fields(kind):
        found = {value(getattr(held, each.name)) for held in users.values()} or {value(default(each))}
        shown = found.pop() if len(found) == 1 else "[the method's](methods.md)"
        yield f"`{section}.{each.name}`", words(hints[each.name]), shown, meaning(kind, each.name)


def _boundary(section: str) -> str:
    """The keys of the mechanisms that methods have at a boundary, and which methods have them."""
    held: dict[str, dict[str, Any]] = {}
    for name, record in methods().items():
        if (mechanism := getattr(record, section)) is not None:
            family = "" if hasattr(mechanism, "schemes") else type(mechanism).__name__
            held.setdefault(family, {})[name] = mechanism
    parts = [_mechanism(section, family if len(held) > 1 else "", users) for family, users in held.items()]
    return "\n".join([*parts, _more_mechanisms(section, held)])


def _mechanism(section: str, title: str, users: Mapping[str, Any]) -> str:
    """One mechanism, with its keys."""
    kind = type(next(iter(users.values())))
    heading = f"### {section}: {title}\n\n{summary(kind)}\n\n" if title else ""
    rows = list(_fields(section, kind, users))
    keys = table(KEYS, rows) if rows else "It has no keys.\n"
    everyone = len(users) == len(methods())
    used = "all methods" if everyone else ", ".join(f"[`{name}`](methods.md#{name})" for name in users)
    return f"{heading}Used by: {used}.\n\n{keys}"


def _more_mechanisms(section: str, shown: Iterable[str]) -> str:
    from shoal.algorithms import MECHANISMS

    found = {name for name, kind in MECHANISMS.loadable().items() if getattr(kind, "section", "") == section}
    others = ", ".join(f"`{name}`" for name in sorted(found - set(shown)))
    return f"`{section}.mechanism` also takes {others}.\n" if others else ""


def methods() -> dict[str, Any]:
    """Shoal's own methods by name; those of other packages are not documented here."""
    from shoal.algorithms import REGISTRY, algorithms

    return {name: record for name, record in algorithms().items() if REGISTRY.origin(name) == "shoal"}


def meaning(kind: type, name: str) -> str:
    """What the docstring of a class, or of one that it derives from, says of a field under `Attributes`."""
    for each in kind.__mro__:
        text = inspect.cleandoc(vars(each).get("__doc__") or "")
        if said := re.search(rf"^    {name}: (.+(?:\n {{8}}.+)*)", text, re.MULTILINE):
            return " ".join(said[1].split())
    return ""


def summary(kind: type) -> str:
    """The first paragraph of a class's docstring, without the name of its boundary."""
    text = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    text = re.sub(r"^Boundary `\w+`: ", "", text)
    return text[:1].upper() + text[1:]


def words(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f"`{each}`" for each in get_args(kind))
    if get_origin(kind) in (typing.Union, types.UnionType):
        kinds = [each for each in get_args(kind) if each is not type(None)]
        return "number or schedule" if set(kinds) == {str, float} else " or ".join(map(words, kinds))
    if get_origin(kind) is tuple:
        held = get_args(kind)
        return f"list of {words(held[0])}" if held[-1] is ... else "two numbers"
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}.get(kind, "table")


def default(each: Field[Any]) -> Any:
    """The default of a field; None where it has none."""
    found = each.default if each.default_factory is MISSING else each.default_factory()
    return None if found is MISSING else found


def value(given: Any) -> str:
    """A setting as TOML writes it."""
    if isinstance(given, float):
        return f"`{given:.12g}`".replace("e-0", "e-")
    return "not set" if given is None else f"`{json.dumps(given)}`"


# Methods


def all_methods() -> str:
    """Every method: what it does, what it proves, its paper, its settings."""
    return "\n".join(_method(name, record) for name, record in methods().items())


def _method(name: str, record: Any) -> str:
    from shoal.algorithms.base import BOUNDARIES
    from shoal.algorithms.charges import proves

    facts = {"Paper": record.paper, "Proves": proves(record), "Its paper claims": record.claims}
    said = "".join(f"**{head}:** {text}<br>\n" for head, text in facts.items())
    held = {each: mechanism for each in BOUNDARIES if (mechanism := getattr(record, each)) is not None}
    rows = [(f"`{each}`", summary(type(mechanism)), _settings(mechanism)) for each, mechanism in held.items()]
    text = record.summary[:1].upper() + record.summary[1:]
    return f"## {name}\n\n{text}.\n\n{said}\n{table(('boundary', 'what happens', 'settings'), rows)}"


def _settings(section: Any) -> str:
    """What is set, and neither 0 nor false."""
    held = {each.name: getattr(section, each.name) for each in fields(section) if each.name != "sampling"}

    return ", ".join(f"{name} {value(given)}" for name, given in held.items() if given)


# Command line


def commands() -> str:
    """Every command with its arguments and options."""
    from shoal.cli.main import app

    root: Any = typer.main.get_command(app)
    return "\n".join(_command(f"shoal {name}", command, 2) for name, command in root.commands.items())


def _command(name: str, command: Any, level: int) -> str:
    """A command, or a group of them."""
    text = f"{'#' * level} {name}\n\n{inspect.cleandoc(command.help or '')}\n\n"
    if inner := getattr(command, "commands", None):
        return text + "\n".join(_command(f"{name} {each}", held, level + 1) for each, held in inner.items())
    context = typer.Context(command, info_name=name)
    usage = f"```text\n{name} {' '.join(command.collect_usage_pieces(context))}\n```\n\n"
    rows = [_option(each, context) for each in command.params if getattr(each, "help", "")]
    return text + usage + (table(("option", "default", "meaning"), rows) if rows else "")


def _option(each: Any, context: Any) -> tuple[str, str, str]:
    argument = each.param_type_name == "argument"
    flags = [each.human_readable_name] if argument else [*each.opts, *each.secondary_opts]
    takes = "" if argument or each.is_flag else f" {each.make_metavar(context)}"
    given = each.default
    shown = "" if given in (None, False, (), []) or callable(given) else f"`{given}`"
    return ", ".join(f"`{flag}{takes}`" for flag in flags), shown, each.help


# Python, JSON


def api() -> str:
    """The public names of the package, each for mkdocstrings."""
    import shoal

    return "\n".join(f"::: {home.replace(':', '.')}\n" for home in shoal._HOME.values())


def shapes() -> dict[str, type[BaseModel]]:
    """What Shoal's JSON objects hold, as pydantic models."""
    from shoal.accounting.claims import Proven, Published
    from shoal.models.bundle import Bundle
    from shoal.result import Result

    result: dict[str, Any] = {"release": str, "run": str, "score": float | None, "learnt": bool}
    result["proven"] = list[dict[str, Any]]  # of claims
    return {
        "Claim": _shape(Proven),
        "Published figure": _shape(Published),
        "result.json": _shape(Result, result, leave_out=("model", "metrics")),
        "model.json": _shape(Bundle),
    }


def _shape(kind: type, more: Mapping[str, Any] | None = None, leave_out: Iterable[str] = ()) -> type[BaseModel]:
    from pydantic import ConfigDict, Field, create_model

    hints = get_type_hints(kind, localns={"Tensor": object})
    held = {name: hints[name] for name in hints if name not in leave_out} | dict(more or {})
    own: Any = {
        name if name != "schema" else "schema_": (
            each,
            Field(alias=name, description=meaning(kind, name) or None),
        )
        for name, each in held.items()
        if get_origin(each) is not typing.ClassVar
    }
    return create_model(kind.__name__, __config__=ConfigDict(extra="allow"), **own)


def schemas() -> str:
    """JSON Schemas of what Shoal writes."""
    return "\n".join(f"## {name}\n\n{_schema(shape)}" for name, shape in shapes().items())


def _schema(shape: type[BaseModel]) -> str:
    """The fields as a table, and the whole schema to copy."""
    schema = shape.model_json_schema()
    rows = (
        (f"`{name}`", json_type(each), each.get("description", "")) for name, each in schema["properties"].items()
    )
    whole = json.dumps(schema, indent=2).replace("\n", "\n    ")
    return f'{table(KEYS[:2] + KEYS[3:], rows)}\n??? abstract "JSON Schema"\n    ```json\n    {whole}\n    ```\n'


def json_type(schema: Mapping[str, Any]) -> str:
    """The type of a property in words."""
    if "anyOf" in schema:
        return " or ".join(map(json_type, schema["anyOf"]))
    if "enum" in schema:
        return "one of " + ", ".join(f"`{each}`" for each in schema["enum"])
    return str(schema.get("type", "any"))


GENERATED: dict[str, Callable[[], str]] = {
    "configuration": configuration,
    "methods": all_methods,
    "commands": commands,
    "api": api,
    "schemas": schemas,
}
