"""The saved model: `model.safetensors` with every weight, `model.json` with all that is needed to use them.

Neither is trusted when it is read: the description is checked key by key, weights by their SHA-256 and their shapes,
and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shoal.checked import checked
from shoal.errors import ConfigError, ModelError, RunError, nearest
from shoal.inputs import InputShape
from shoal.models.build import build
from shoal.models.networks import network

WEIGHTS, DESCRIPTION, PERSONAL = "model.safetensors", "model.json", "personal.safetensors"
FORMAT = 1
DESCRIPTION_LIMIT = 256 << 20  # bytes
NAMES = 20  # that a message lists
NUMBERS_LIMIT = 1 << 31  # in one record
Type = Literal["float32", "int64"]
PASS_AGAIN = "passed in Python: pass it again, shoal.load_model(RUN, model=...)"


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What `model.json` says.

    Attributes:
        release: Whether the model may be released.
        model: The name of the network, or `package.module:Class`.
        passed_in_python: Whether it was passed as an object, so that no name can build it again.
        note: What else a user has to know.
        input_shape: The shape of one record, as the model takes it; of several arrays by name.
        input_type: Its type.
        task: The task, as `shoal.tasks.saved` writes it.
        classes: The names of classes, labels or tokens.
        data: The name of the data set.
        scale: The scale of its pixels.
        features: Public features, computed from pictures.
        columns: The names of a row's numbers, where it came from a table.
        ranges: Public bounds (low, high) of columns in a table without a schema that are scaled to [0, 1].
        label: The label's column in such a table.
        schema: The table's schema, as a mapping.
        claims: What is proven, each with unit, adjacency, observer, epsilon and delta.
        versions: Of Shoal, PyTorch and Python.
        weights: The SHA-256 of `model.safetensors`.
    """

    format: int = FORMAT
    release: str
    model: str
    passed_in_python: bool = False
    note: str = ""
    input_shape: InputShape
    input_type: Type | dict[str, Type] = "float32"
    task: dict[str, Any]
    classes: tuple[str, ...] = ()
    data: str = ""
    scale: str = "unit"
    features: str = "none"
    columns: tuple[str, ...] = ()
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    label: str | None = None
    schema: dict[str, Any] | None = None
    claims: tuple[dict[str, Any], ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    weights: str

    def to_json(self) -> str:
        """The text of `model.json`."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def of(cls, found: Any) -> Bundle:
        """What a JSON object says; ConfigError for a key or a value that cannot be."""
        given = checked("it", found, dict[str, Any])
        if given.get("format") != FORMAT:
            raise ConfigError(f"format is {given.get('format')!r}, this version reads {FORMAT}")
        if lacks := [each.name for each in fields(cls) if _needed(each) and each.name not in given]:
            raise ConfigError(f"it lacks {', '.join(lacks)}")
        for key in ("input_shape", "ranges"):
            if isinstance(lists := given.get(key), dict):
                given[key] = {name: tuple(each) if isinstance(each, list) else each for name, each in lists.items()}
        hints = get_type_hints(cls)
        bundle = cls(**{name: checked(name, given[name], kind) for name, kind in hints.items() if name in given})
        _refuse_odd_inputs(bundle.input_shape, bundle.input_type)
        return bundle


def _refuse_odd_inputs(shape: InputShape, kind: Type | dict[str, Type]) -> None:
    """Raise a ConfigError for shapes that no record has."""
    several = isinstance(shape, dict)
    for sizes in shape.values() if isinstance(shape, dict) else [shape]:
        if not (sizes or several) or min(sizes, default=1) < 1 or math.prod(sizes) > NUMBERS_LIMIT:
            raise ConfigError(f"input_shape cannot be {list(sizes)}")
    names = list(shape) if isinstance(shape, dict) else None
    if names == [] or (list(kind) if isinstance(kind, dict) else None) != names:
        raise ConfigError("input_type and input_shape must name the same inputs")


def _needed(each: Any) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def read_bundle(folder: Path) -> Bundle:
    """The description of the model in a run's folder.

    Raises:
        RunError: There is none, or it is damaged.
    """
    path = folder / DESCRIPTION
    try:
        if path.stat().st_size > DESCRIPTION_LIMIT:
            raise ConfigError(f"it has more than {DESCRIPTION_LIMIT:,} bytes")
        return Bundle.of(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise RunError(
            f"{folder} has no {DESCRIPTION}: the run has not ended (shoal run --resume {folder}), or an earlier "
            f"version made it"
        ) from None
    except (OSError, ValueError, RecursionError, ConfigError) as error:
        raise RunError(f"{path} is damaged: {_one_line(error)}; copy it again from the run") from None


def read_weights(folder: Path, bundle: Bundle) -> dict[str, Tensor]:
    """The weights that belong to a description.

    Raises:
        RunError: They are missing, were changed or are damaged.
    """
    path = folder / WEIGHTS
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != bundle.weights:
            raise RunError(
                f"{path} is not the file that {DESCRIPTION} describes (SHA-256 {digest[:12]}..., expected "
                f"{bundle.weights[:12]}...): it was changed or cut off; copy both again from the run"
            )
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise RunError(f"{folder} has no {WEIGHTS}: copy it again from the run") from None
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is damaged: {_one_line(error)}; copy it again from the run") from None


def read_personal(folder: Path, client: str) -> dict[str, Tensor]:
    """The personal layers of a client, where the run kept them.

    Raises:
        RunError: It kept none, or none of this client.
    """
    path = folder / PERSONAL
    if not path.is_file():
        raise RunError(
            f"client '{client}': {folder} has no {PERSONAL}; only a simulation with local.personal keeps its "
            f"clients' layers, in a federation they stay at their sites"
        )
    try:
        with safe_open(path, framework="pt") as file:
            kept = {name: name.rpartition("/") for name in file.keys()}  # noqa: SIM118
            found = {place: file.get_tensor(name) for name, (own, _, place) in kept.items() if own == client}
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is damaged: {_one_line(error)}; copy it again from the run") from None
    if not found:
        names = sorted({own for own, _, _ in kept.values()})[:NAMES]
        choices = nearest(client, names)
        raise RunError(f"{path} has no layers of client '{client}', who may never have trained{choices}")
    return found


def put_personal(module: nn.Module, own: Mapping[str, Tensor]) -> None:
    """Give the network these personal layers.

    Raises:
        RunError: They are those of another network.
    """
    there = module.state_dict()
    if odd := next((name for name in own if name not in there or there[name].shape != own[name].shape), None):
        raise RunError(f"{PERSONAL} is of another model: '{odd}' does not fit; copy it again from the run")
    module.load_state_dict(own, strict=False)


def rebuild(bundle: Bundle, weights: Mapping[str, Tensor], outputs: int, model: Any = None) -> nn.Module:
    """The network with its weights, in eval mode.

    Args:
        bundle: The description.
        weights: What `read_weights` gave.
        outputs: How many numbers the task needs.
        model: A module, or a class of modules, instead of the one that the description names.

    Raises:
        ModelError: It cannot be built, or the weights are those of another network.
    """
    if model is None and bundle.passed_in_python:
        raise ModelError(f"the model, of class {bundle.model}, was {PASS_AGAIN}")
    wanted, shape = bundle.model if model is None else deepcopy(model), bundle.input_shape
    if isinstance(wanted, str) and ":" not in wanted:
        with torch.device("meta"):  # its sizes alone, since a damaged description may ask for any
            _refuse_other(_built(wanted, shape, outputs), weights)
    module = _built(wanted, shape, outputs)
    _refuse_other(module, weights)
    module.load_state_dict(weights, strict=False)  # names and shapes agree; extra state holds no weights
    return module.eval()


def resolved(name: str, shape: InputShape) -> str:
    """The name of a network as it can be built again: what `auto` and short forms stand for."""
    return name if ":" in name or isinstance(shape, dict) else network(name, shape).name


def _built(wanted: Any, shape: InputShape, outputs: int) -> nn.Module:
    try:
        return build(wanted, shape, outputs)
    except (RuntimeError, MemoryError, OverflowError, ValueError) as error:
        raise ModelError(f"model '{wanted}' cannot be built for records of {shape}: {_one_line(error)}") from None


def _refuse_other(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise a ModelError where names or shapes of weights are not the module's."""
    own = {name: tuple(each.shape) for name, each in module.state_dict().items() if isinstance(each, Tensor)}
    saved = {name: tuple(each.shape) for name, each in weights.items()}
    if own == saved:
        return
    name = min(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
    has, was = (f"of shape {found[name]}" if name in found else "missing" for found in (own, saved))
    raise ModelError(
        f"the saved weights are those of another model: '{name}' is {was} in {WEIGHTS}, {has} in "
        f"{type(module).__name__}"
    )


def _one_line(error: BaseException) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 300 else words[:297] + "..."
