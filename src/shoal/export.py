"""A saved model as a file for other runtimes: ONNX or TorchScript, with a batch of any size.

The file is loaded again with its own runtime, and its outputs are compared with the model's, before it is kept.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, ModelError, nearest
from shoal.extras import optional
from shoal.models.bundle import DESCRIPTION
from shoal.saved_model import Model
from shoal.training.run_folder import write_whole

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
    module, name = model.module, type(model.module).__name__
    try:
        with _quiet():
            content = write(module, _example(model, TRACED), model.bundle.to_json())
            run = read(content)
            worst = max(_difference(module, run, _example(model, records)) for records in OTHERS)
    except ConfigError:
        raise
    except Exception as error:  # exporters and runtimes raise what they like
        words = " ".join(str(error).split())[:200]
        raise ModelError(f"model {name} cannot be exported as {kind}: {type(error).__name__}: {words}") from error
    if not worst <= TOLERANCE:
        raise ModelError(f"model {name} cannot be exported as {kind}: its outputs would differ by {worst:.1g}")
    write_whole(path, content)
    return worst


def _example(model: Model, records: int) -> Tensor:
    """Records of fixed numbers: tokens 0 and 1, or fractions."""
    shape = (records, *model.bundle.input_shape)
    numbers = torch.arange(records * int(torch.tensor(shape[1:]).prod())).reshape(shape)
    return numbers % 2 if model.bundle.input_type == "int64" else torch.sin(numbers * 12.9898)


def _difference(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> float:
    with torch.no_grad():
        expected = module(x)
    found = run(x)
    if found.shape != expected.shape:
        raise ValueError(f"a batch of {len(x)} gives the shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    scale = expected.abs().max().clamp(min=1.0)
    return float(((found - expected).abs() / scale).max())


def _onnx(module: nn.Module, x: Tensor, about: str) -> bytes:
    onnx = optional("onnx", "--format onnx")
    optional("onnxscript", "--format onnx")
    program = torch.onnx.export(
        module, (x,), dynamo=True, verbose=False, input_names=["records"], output_names=["outputs"],
        dynamic_shapes=({0: torch.export.Dim("records_count")},),
    )  # fmt: skip
    assert program is not None
    proto = program.model_proto
    onnx.helper.set_model_props(proto, {DESCRIPTION: about})
    content: bytes = proto.SerializeToString()
    return content


def _run_onnx(content: bytes) -> Callable[[Tensor], Tensor]:
    runtime = optional("onnxruntime", "--format onnx")
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"records": x.numpy()})[0])


def _torchscript(module: nn.Module, x: Tensor, about: str) -> bytes:
    with torch.no_grad():
        traced = torch.jit.trace(module, x, check_trace=False)  # type: ignore[no-untyped-call]
    stream = io.BytesIO()
    torch.jit.save(traced, stream, _extra_files={DESCRIPTION: about})
    return stream.getvalue()


def _run_torchscript(content: bytes) -> Callable[[Tensor], Tensor]:
    loaded = torch.jit.load(io.BytesIO(content))  # type: ignore[no-untyped-call]

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            return loaded(x)  # type: ignore[no-any-return]

    return run


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
