"""Does a model fit the data and the privacy asked for? Under record-level DP records must not mix.

A gradient can be clipped per record only where one record's output depends on that record alone. Layers
that take statistics over the batch (BatchNorm) break that, and their running statistics leave without noise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from functools import reduce

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from shoal.calling import call, evaluating, in_training
from shoal.copying import copied
from shoal.errors import ModelError
from shoal.inputs import Inputs, InputShape, Shape, each, joined, parts, shape_of
from shoal.models.build import count
from shoal.precision import no_autocast
from shoal.random.torch_generator import seeded
from shoal.tasks import Classification, Task

RECORDS = 3


def check(
    model: nn.Module,
    input_shape: InputShape,
    task: Task | int,
    *,
    record_level: bool,
    noisy_updates: bool = False,
    targets: torch.Tensor | None = None,
    tokens: bool | Collection[str] = False,
) -> None:
    """Check that a model fits the data and the privacy asked for; copies are run, on the CPU.

    Args:
        model: The model, which is left as it was.
        input_shape: The shape of one record; those of several tensors by name.
        task: What it is trained for; a number stands for a classification into this many classes.
        record_level: Whether record-level DP is asked for: no record may have a say in another's output.
        noisy_updates: Whether updates get noise (client-level DP): records may mix, but running statistics would get
            noise as well.
        targets: A few targets, of which only the shape and the type matter; class labels if not given.
        tokens: Whether records are whole numbers; of several tensors, the names of those that are.

    Raises:
        ModelError: It does not fit; the message names the layer and the fix.
    """
    name = type(model).__name__
    _check_parameters(model, name)
    if record_level:
        _refuse_mixing_layers(model, "mixes the records of a batch, so record-level privacy cannot hold")
    elif noisy_updates:
        _refuse_mixing_layers(model, "keeps running statistics, which noise would spoil (a variance below 0)")
    batch, changed = _batches(model, input_shape, tokens)
    output = _run(_copied(model), batch, input_shape)
    if isinstance(task, int):
        task = Classification(classes=tuple(map(str, range(task))))
    like = torch.zeros(RECORDS, dtype=torch.int64) if targets is None else targets
    like = task.example_targets(RECORDS, like)
    task.check_outputs(name, output, like)
    _losses(task, output, like)
    if not output.isfinite().all():
        raise ModelError(f"model {name} gives NaN or infinite outputs before any training")
    if record_level or noisy_updates:
        before, after = (_run(_shaken(_copied(model)), each, input_shape) for each in (batch, changed))
        if record_level:
            _refuse_mixing(model, before, after)
            _refuse_mixing_loss(task, before, after, like)
        _refuse_memory(model, batch, changed, input_shape, after)


def _check_parameters(model: nn.Module, name: str) -> None:
    if any(is_lazy(p) for p in model.parameters()):
        raise ModelError(f"model {name} has lazy layers; give them their sizes, or run it once before")
    odd = next((p.dtype for p in model.parameters() if p.dtype != torch.float32), None)
    if odd is not None:
        raise ModelError(f"model {name} has parameters of {odd}; training is in torch.float32: give model.float()")
    if count(model) == 0:
        raise ModelError(f"model {name} has no parameters to train")


def takes_tokens(model: nn.Module, input_shape: Shape) -> bool:
    """Whether a model takes whole numbers as they are, as one with an embedding does."""
    batch = torch.zeros(RECORDS, *input_shape, dtype=torch.int64)
    try:
        _run(_copied(model), batch, input_shape)
    except ModelError:
        return False
    return True


def refuse_tokens(model: nn.Module, *data: Inputs) -> None:
    """Raise a ModelError where records [N, ...] have whole numbers that the model does not take.

    The least and the greatest at each place are tried: beyond an embedding, training would stop in the middle.
    """
    ends = [each(x, lambda part: torch.stack([part.amin(0), part.amax(0)])) for x in data]
    batch = reduce(joined, ends)
    whole = [part for part in parts(batch).values() if not part.is_floating_point()]
    least, greatest = min(int(part.min()) for part in whole), max(int(part.max()) for part in whole)
    try:
        _run(_copied(model), batch, shape_of(batch))
    except ModelError as error:
        raise ModelError(f"the data have whole numbers from {least} to {greatest}: {error}") from error


def mixing_layers(model: nn.Module) -> list[str]:
    """The paths of the layers that are known to take statistics over the batch."""
    return [name for name, layer in model.named_modules(remove_duplicate=False) if _mixes(layer)]


def replace_batchnorm(model: nn.Module) -> nn.Module:
    """A copy of the model with GroupNorm in place of BatchNorm, for record-level DP.

    Scale and shift are kept. InstanceNorm stays, without its running statistics.
    """
    model = copy.deepcopy(model)
    if _mixes(model):
        return _private(model)
    for path in mixing_layers(model):
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, _private(model.get_submodule(path)))
    return model


def _mixes(layer: nn.Module) -> bool:
    """In eval mode, with statistics of its own, a layer neither looks at the batch nor writes anything down."""
    if isinstance(layer, _InstanceNorm):
        return bool(layer.track_running_stats and layer.training)
    return isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)


def _private(layer: nn.Module) -> nn.Module:
    assert isinstance(layer, _BatchNorm | _InstanceNorm)
    if isinstance(layer, _InstanceNorm):
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        return layer
    group_norm = nn.GroupNorm(_groups(layer.num_features), layer.num_features, layer.eps, layer.affine)
    if layer.affine:
        group_norm.weight, group_norm.bias = layer.weight, layer.bias
    return group_norm


def _groups(channels: int) -> int:
    """At most 32 groups, and two channels in each: a group of one number would always become zero."""
    return next((g for g in range(min(32, channels // 2), 0, -1) if channels % g == 0), 1)


def _refuse_mixing_layers(model: nn.Module, why: str) -> None:
    for path in mixing_layers(model):
        layer = model.get_submodule(path)
        raise ModelError(
            f"layer '{path or 'model'}' is {type(layer).__name__}, which {why}; use nn.GroupNorm instead "
            f"(shoal.models.replace_batchnorm(model) puts it in), or freeze its statistics with layer.eval()"
        )


def _copied(model: nn.Module) -> nn.Module:
    """A copy in training mode, on the CPU."""
    return in_training(copied(model).cpu())


def _shaken(model: nn.Module) -> nn.Module:
    """The model with other weights, since a last layer that starts at zero would hide everything before it."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * _pattern(parameter.numel()).view(parameter.shape)
    return model


def _run(model: nn.Module, batch: Inputs, shape: InputShape) -> torch.Tensor:
    """The output of one forward pass, dropout drawn from a fixed seed."""
    with torch.no_grad(), seeded(0), no_autocast():
        try:
            return call(model, batch)
        except ModelError:
            raise
        except Exception as error:
            said = " ".join(str(error).split())
            raise ModelError(
                f"model {type(model).__name__} cannot take records of shape {shape}: {type(error).__name__}: {said}"
            ) from error


def _refuse_mixing(model: nn.Module, before: torch.Tensor, after: torch.Tensor) -> None:
    """The safety net for layers that nobody knows: change one record and look at the others."""
    others = [0, 2]
    if not _same(before[others], after[others]):
        raise ModelError(
            f"model {type(model).__name__} mixes the records of a batch (one record's output changes with "
            "another's input), so record-level privacy cannot hold; make each output depend on its own "
            "input only"
        )


def _refuse_mixing_loss(task: Task, output: torch.Tensor, changed: torch.Tensor, targets: torch.Tensor) -> None:
    """Change one record's output and target and look at the losses of the others."""
    changed = torch.stack([output[0], changed[1], output[2]])
    for y in (targets, targets[[1, 0, 1]]):
        before, after = _losses(task, output, y), _losses(task, changed, y[:1].expand_as(y))
        if not before.isfinite().all():
            raise ModelError("the loss of synthetic records is not finite, so that it may mix records unseen")
        if not torch.allclose(before[[0, 2]], after[[0, 2]]):
            raise ModelError(
                "task.loss mixes the records of a batch (one record's loss changes with another's output or target), "
                "so record-level privacy cannot hold; compute each loss from its own record only"
            )


def _losses(task: Task, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    try:
        return task.losses(output, targets)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"task.loss cannot take outputs of shape {tuple(output.shape)} and targets of shape "
            f"{tuple(targets.shape)}: {type(error).__name__}: {error}"
        ) from error


def _refuse_memory(
    model: nn.Module, first: Inputs, second: Inputs, shape: InputShape, expected: torch.Tensor
) -> None:
    """What a model keeps of a batch, or of the weights it had, goes past every clip, to the next client and out.

    Both batches are run one after the other, with other weights from then on. Buffers and frozen parameters may not
    change at all, since they are released; what is kept elsewhere shows in the second output.
    """
    used = _copied(model)
    _run(used, first, shape)
    with evaluating(used):
        _run(used, first, shape)
    output, kept = _run(_shaken(used), second, shape), _untrained(used)
    for name, tensor in _untrained(model).items():
        if name not in kept or not torch.equal(tensor.cpu(), kept[name]):
            raise ModelError(
                f"model {type(model).__name__} writes to '{name}', which is not trained, whenever it is run; that "
                "would leave without noise: privacy needs a model that keeps nothing"
            )
    if not _same(output, expected):
        raise ModelError(
            f"model {type(model).__name__} remembers earlier batches (its output changes with them), so that no "
            "privacy can hold; make each output depend on its own input only"
        )


def _untrained(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers and frozen parameters."""
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return dict(model.named_buffers()) | frozen


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


def _batches(model: nn.Module, shape: InputShape, tokens: bool | Collection[str]) -> tuple[Inputs, Inputs]:
    """A few fixed records, and the same with the middle one changed."""
    if isinstance(shape, dict):
        whole = tokens if isinstance(tokens, Collection) else ()
        pairs = {name: _named_batches(own, name in whole) for name, own in shape.items()}
        return {name: batch for name, (batch, _) in pairs.items()}, {
            name: changed for name, (_, changed) in pairs.items()
        }
    numbers = RECORDS * math.prod(shape)
    words = [layer.num_embeddings for layer in model.modules() if isinstance(layer, nn.Embedding)]
    if words or tokens:
        most = min((each for each in words if each > 1), default=2)  # one word alone could not change
        batch = (torch.arange(numbers) % most).view(RECORDS, *shape)
        middle = (batch[1] + 1) % most
    else:
        batch = _pattern(numbers).view(RECORDS, *shape).to(next(model.parameters()).dtype)
        middle = 3 - 5 * batch[1]
    return batch, torch.stack([batch[0], middle, batch[2]])


def _named_batches(shape: Shape, whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for one of several tensors: whole numbers are 0 and 1, which tokens, types and masks may all be."""
    size = math.prod(shape)
    if whole:
        batch = ((1 + torch.arange(size)) % 2).expand(RECORDS, size).view(RECORDS, *shape)
        middle = torch.full(shape, int(size > 1))
    else:
        batch = _pattern(RECORDS * size).view(RECORDS, *shape)
        middle = 3 - 5 * batch[1]
    return batch, torch.stack([batch[0], middle, batch[2]])


def _pattern(numbers: int) -> torch.Tensor:
    """Fixed numbers in (-1, 1) that look irregular: no random state is touched."""
    return torch.sin(torch.arange(numbers, dtype=torch.float64) * 12.9898).float()
