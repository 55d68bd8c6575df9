"""`build`: a network by name, the user's own by its path, or one that is already there."""

from __future__ import annotations

from torch import nn

from shoal.calling import in_training
from shoal.errors import ModelError
from shoal.inputs import InputShape, read_shape
from shoal.models import custom
from shoal.models.networks import network
from shoal.random.torch_generator import seeded


def build(
    name: str | nn.Module | type[nn.Module], input_shape: InputShape, outputs: int, *, seed: int = 0
) -> nn.Module:
    """The model for records of one shape.

    Args:
        name: A name of the registry, `auto`, `package.module:Class` for the user's own, an nn.Module (taken as it is)
            or a class of one.
        input_shape: The shape of one record, without the batch axis; those of several tensors by name.
        outputs: How many numbers the model gives: one score a class, for example.
        seed: The same seed gives the same weights; the global random state is left as it was.

    Returns:
        The model in training mode, but for layers that it has put into eval().

    Raises:
        ModelError: There is no such model, or it cannot be built for this shape.
    """
    shape = _checked(input_shape, outputs)
    if isinstance(name, nn.Module):
        return in_training(name)
    make: custom.Make
    if isinstance(name, str) and ":" not in name:
        make = _named(name, shape)
    else:
        with seeded(seed):  # apart from the making, since only a module's first import draws random numbers
            make = custom.factory(name)
    with seeded(seed):
        return in_training(make(shape, outputs))


def _named(name: str, shape: InputShape) -> custom.Make:
    if isinstance(shape, dict):
        raise ModelError(
            f"model '{name}' takes one array, but records have several ({', '.join(shape)}); give a model of your "
            f"own, which takes them by name: model=package.module:Class"
        )
    make = network(name, shape).make
    return lambda _shape, outputs: make(shape, outputs)


def _checked(input_shape: InputShape, outputs: int) -> InputShape:
    shape = read_shape(input_shape)
    several = isinstance(shape, dict)
    for sizes in shape.values() if isinstance(shape, dict) else [shape]:
        if not (sizes or several) or min(sizes, default=1) < 1:
            raise ModelError(f"input_shape must hold sizes of at least 1, without the batch axis, got {sizes}")
    if outputs < 1:
        raise ModelError(f"outputs must be at least 1, got {outputs}")
    return shape


def count(model: nn.Module) -> int:
    """How many parameters are trained; one that several layers share counts once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
