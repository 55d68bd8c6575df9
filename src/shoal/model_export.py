"""A saved model as a file for other runtimes: ONNX or TorchScript, with a batch of any size.

The file is loaded again with its own runtime, and its outputs are compared with the model's, before it is kept.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.calling import call
from shoal.errors import ConfigError, ModelError, nearest
from shoal.extras import optional
from shoal.files import write_whole
from shoal.inputs import Shape
from shoal.models.bundle import DESCRIPTION, Bundle
from shoal.saved_model import Model

TOLERANCE = 1e-5
TRACED, OTHERS = 2, (1, 5)  # records in the batch that is traced, and in those that are compared
NAMES = {"onnx": "model.onnx", "torchscript": "model.pt"}


def file_name(kind: str) -> str:
    """The usual name of a file of this format.

    Raises:
        ConfigError: There is no such format.
    """
    if kind not in NAMES:
        raise ConfigError(f"--format '{kind}' is not known{nearest(kind, NAMES)}")
    return NAMES[kind]


def export(model: Model, path: Path, kind: str) -> float:
    """Write the model's network to a file; the claims and all else in `model.json` go with it.

    Args:
        model: What `shoal.load_model` gave.
        path: The file.
        kind: `onnx` or `torchscript`.

    Returns:
        The largest difference between the outputs of the file and those of the model.

    Raises:
        ModelError: The network cannot be exported, or the file gives other outputs.
        ConfigError: The format is not known, or what it needs is not installed.
    """
    file_name(kind)
    write, read = (_onnx, _run_onnx) if kind == "onnx" else (_torchscript, _run_torchscript)
    name, module = type(model.module).__name__, ByPlace(model.module, names_of(model.bundle)).eval()
    try:
        with _quiet(), torch.no_grad():
            content = write(module, _example(model.bundle, TRACED), model.bundle.to_json())
            run = read(content)
            worst = max(_difference(module, run, _example(model.bundle, records)) for records in OTHERS)
    except ConfigError:
        raise
    except Exception as error:  # exporters and runtimes raise what they like
        words = " ".join(str(error).split())[:200]
        raise ModelError(f"model {name} cannot be exported as {kind}: {type(error).__name__}: {words}") from error
    if not worst <= TOLERANCE:
        raise ModelError(f"model {name} cannot be exported as {kind}: its outputs would differ by {worst:.1g}")
    write_whole(path, content)
    return worst


class ByPlace(nn.Module):
    """A network whose inputs come by their places, and which gives the one tensor that counts."""

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.module, self.names = module, names

    def forward(self, *inputs: Tensor) -> Tensor:
        return call(self.module, dict(zip(self.names, inputs, strict=True)) if self.names else inputs[0])


def names_of(bundle: Bundle) -> list[str]:
    """The names of several inputs; none for a single one."""
    return list(bundle.input_shape) if isinstance(bundle.input_shape, dict) else []


def takes(bundle: Bundle) -> str:
    """In words, what the file takes."""
    words = []
    for name, (shape, kind) in _inputs(bundle).items():
        words.append(f"{name} {kind} [{', '.join(map(str, ('N', *shape)))}]".strip())
    return ", ".join(words)


def _inputs(bundle: Bundle) -> dict[str, tuple[Shape, str]]:
    """The shape and the type of each input, by name; a single one has none."""
    shape, kind = bundle.input_shape, bundle.input_type
    if isinstance(shape, dict) and isinstance(kind, dict):
        return {name: (shape[name], kind[name]) for name in shape}
    assert not isinstance(shape, dict)
    return {"": (shape, str(kind))}


def _example(bundle: Bundle, records: int) -> tuple[Tensor, ...]:
    """Records of fixed numbers: tokens 0 and 1, or fractions."""
    found = []
    for shape, kind in _inputs(bundle).values():
        numbers = torch.arange(records * math.prod(shape)).reshape(records, *shape)
        found.append(numbers % 2 if kind == "int64" else torch.sin(numbers * 12.9898))
    return tuple(found)


def _difference(module: nn.Module, run: Callable[..., Tensor], x: tuple[Tensor, ...]) -> float:
    expected, found = module(*x), run(*x)
    if found.shape != expected.shape:
        raise ValueError(f"a batch of {len(x[0])} gives the shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    scale = expected.abs().max().clamp(min=1.0)
    return float(((found - expected).abs() / scale).max())


def _onnx(module: ByPlace, x: tuple[Tensor, ...], about: str) -> bytes:
    onnx = optional("onnx", "--format onnx")
    optional("onnxscript", "--format onnx")
    batch = torch.export.Dim("batch")
    program = torch.onnx.export(
        module, x, dynamo=True, verbose=False, input_names=module.names or ["records"], output_names=["outputs"],
        dynamic_shapes=(tuple({0: batch} for _ in x),),
    )  # fmt: skip
    assert program is not None
    proto = program.model_proto
    for node in (*proto.graph.node, *(node for function in proto.functions for node in function.node)):
        del node.metadata_props[:]  # stack traces, with the paths of this machine
    onnx.helper.set_model_props(proto, {DESCRIPTION: about})
    content: bytes = proto.SerializeToString()
    return content


def _run_onnx(content: bytes) -> Callable[..., Tensor]:
    runtime = optional("onnxruntime", "--format onnx")
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(*x: Tensor) -> Tensor:
        given = {name: part.numpy() for name, part in zip(names, x, strict=True)}
        return torch.from_numpy(session.run(None, given)[0])

    return run


def _torchscript(module: ByPlace, x: tuple[Tensor, ...], about: str) -> bytes:
    traced = torch.jit.trace(module, x, check_trace=False)  # type: ignore[no-untyped-call]
    stream = io.BytesIO()
    torch.jit.save(traced, stream, _extra_files={DESCRIPTION: about})
    return stream.getvalue()


def _run_torchscript(content: bytes) -> Callable[..., Tensor]:
    return torch.jit.load(io.BytesIO(content))  # type: ignore[no-any-return, no-untyped-call]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Exporters print and warn a lot about themselves."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
