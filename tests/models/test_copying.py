"""A model's copy is the one that copy.deepcopy makes."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from shoal.copying import copied
from shoal.models import build


class Keeps(nn.Linear):
    """A layer that keeps things, some of them in two places."""

    def __init__(self):
        super().__init__(3, 2)
        self.seen, self.named, self.words = [], OrderedDict(), set()
        self.same = self.named
        self.register_buffer("counts", torch.zeros(2))
        self.register_forward_hook(print)


def state(model):
    """What every layer holds, in its order; a number for each thing, the same for the same thing."""
    numbers = {}

    def told(value):
        if isinstance(value, dict):
            held = [(key, told(each)) for key, each in value.items()]
        elif isinstance(value, torch.Tensor):
            held = value.tolist()
        else:
            held = value if isinstance(value, bool | int | float | str | set) else None
        return type(value), numbers.setdefault(id(value), len(numbers)), held

    return [[(name, told(value)) for name, value in vars(layer).items()] for layer in model.modules()]


MODELS = {
    "layers": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LSTM(4, 2)),
    "twice": lambda: nn.Sequential(*[nn.Linear(3, 3)] * 2),
    "weight norm": lambda: weight_norm(nn.Linear(3, 4)),
    "keeps": Keeps,
    "attention": lambda: nn.TransformerEncoderLayer(8, 2),
    "a network by name": lambda: build("digits-cnn", (1, 8, 8), 10),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_holds_what_a_deep_copy_holds(name):
    model = MODELS[name]()
    whole, ours = copy.deepcopy(model), copied(model)
    assert state(ours) == state(whole)
    theirs = {id(value) for layer in model.modules() for value in vars(layer).values() if isinstance(value, dict)}
    assert not theirs & {id(value) for layer in ours.modules() for value in vars(layer).values()}


def test_shared_tensors_are_the_same():
    model = nn.Linear(3, 2)
    ours = copied(model, [model.weight])
    assert ours.weight is model.weight
    assert ours.bias is not model.bias
    assert torch.equal(ours.bias, model.bias)
