"""Parameters that a model's own code uses get a rule, in the shape in which they are used."""

from itertools import product

import pytest
import torch
from torch import nn

from shoal.gradients import network
from shoal.gradients.batched import BatchedNetwork, without_rule
from shoal.gradients.layers.parameter import LARGEST
from shoal.gradients.layout import Layout
from shoal.gradients.sequential import RecordNetwork
from support.both_ways import assert_both_ways_agree

WIDTH, PATCHES = 8, 4


class Scale(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x):
        return x * self.gamma


class Block(nn.Module):
    """A transformer's block, with LayerScale."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.between = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.scale = Scale(width)

    def forward(self, x):
        y = self.first(x)
        x = x + self.scale(self.attention(y, y, y, need_weights=False)[0])
        return x + self.between(self.second(x))


class VisionTransformer(nn.Module):
    """Class token and positions, in the two shapes in which people write them, and a temperature."""

    def __init__(self, leading=(1,)):
        super().__init__()
        torch.manual_seed(2)
        self.patches = nn.Conv2d(1, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.randn(*leading, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(*leading, PATCHES + 1, WIDTH))
        self.blocks = nn.Sequential(Block(WIDTH), Block(WIDTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0]) / self.temperature


@pytest.mark.slow
@pytest.mark.parametrize("leading", [(1,), ()], ids=["[1, T, D]", "[T, D]"])
def test_vision_transformer(leading):
    torch.manual_seed(0)
    x = torch.rand(2, 3, 1, 8, 8, dtype=torch.float64)
    assert_both_ways_agree(VisionTransformer(leading), x, sizes=[(2, 0), (2, 1), (2, 3)])


class Uses(nn.Module):
    """A parameter of any shape in any dimensions, twice if asked."""

    def __init__(self, shape, records, twice):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.twice, self.records = nn.Linear(WIDTH, WIDTH), twice, records
        self.own = nn.Parameter(torch.rand(shape) + 0.5)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.first(x).tanh()
        y = x.movedim(0, self.records) * self.own
        y = y.tanh() + self.own if self.twice else y
        y = y.movedim(self.records, 0) if y.dim() == x.dim() else y
        return self.last(y.flatten(1, -2).mean(1) if y.dim() > 2 else y)


SHAPES = [
    ((), (), 0),
    ((), (WIDTH,), 0),
    ((5,), (WIDTH,), 0),
    ((5,), (5, WIDTH), 0),
    ((5,), (5, 1), 0),
    ((5,), (1, WIDTH), 0),
    ((5,), (1, 5, WIDTH), 0),
    ((5,), (5, 1, WIDTH), 1),
    ((3, 5), (WIDTH,), 0),
    ((3, 5), (5, WIDTH), 0),
    ((3, 5), (3, 1, 1), 0),
    ((2, 3, 5), (), 0),
]


@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(("inner", "shape", "records"), SHAPES)
def test_any_shape_that_broadcasts(inner, shape, records, twice):
    torch.manual_seed(0)
    x = torch.rand(3, 4, *inner, WIDTH, dtype=torch.float64)
    assert_both_ways_agree(Uses(shape, records, twice), x, sizes=product([1, 2, 3], [0, 1, 4]))


class Product(nn.Module):
    """A matrix that multiplies rows: broadcasting cannot give each record its own."""

    def __init__(self):
        super().__init__()
        self.matrix, self.last = nn.Parameter(torch.rand(4, 4)), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(x @ self.matrix)


class MixesRecords(Product):
    def forward(self, x):
        return self.last((x - x.mean(0)) * self.matrix[0])


@pytest.mark.parametrize("make", [Product, MixesRecords])
@pytest.mark.parametrize("per_record", [False, True])
def test_other_uses_go_one_client_after_the_other(make, per_record):
    assert network(make(), torch.rand(3, 4), per_record=per_record).way != "rules"


@pytest.mark.slow
def test_a_matrix_times_words_is_one_matrix_for_each_record():
    torch.manual_seed(0)

    class Words(Product):
        def forward(self, x):
            return self.last((x @ self.matrix).mean(1))

    assert_both_ways_agree(Words(), torch.rand(2, 3, 5, 4, dtype=torch.float64))


def test_without_a_sample_nothing_is_known_of_their_shapes():
    assert network(Scale(4)).way != "rules"
    assert network(Scale(4), torch.rand(3, 4)).way == "rules"


@pytest.mark.slow
def test_a_large_parameter_is_not_copied_for_each_record():
    assert network(Scale(LARGEST + 1), torch.rand(1, LARGEST + 1)).way != "rules"


def test_a_class_that_cannot_be_derived_from_goes_one_client_after_the_other():
    class Final(Scale):
        def __init_subclass__(cls):
            raise TypeError("this class is final")

    assert without_rule(Final(4), Layout.of(Final(4))) == ["the model (Final)"]
    assert network(Final(4), torch.rand(3, 4)).way != "rules"


@pytest.mark.slow
def test_the_model_that_was_given_stays_as_it_is():
    module = VisionTransformer()
    assert isinstance(network(module, torch.rand(3, 1, 8, 8)), BatchedNetwork)
    assert type(module) is VisionTransformer
    assert isinstance(module.token, nn.Parameter)


@pytest.mark.parametrize("length", [5, 6])
def test_positions_by_an_embedding_even_where_they_are_as_many_as_records(length):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.words, self.places, self.head = nn.Embedding(9, 4), nn.Embedding(length, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(torch.tanh(self.words(x) + self.places(torch.arange(x.shape[1]))).mean(1))

    torch.manual_seed(0)
    assert_both_ways_agree(Positions(), torch.randint(0, 9, (2, 3, length)))


class Sliced(nn.Module):
    """Takes as many of its positions as a record has, and single numbers."""

    def __init__(self, length):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 3)
        self.positions, self.shares = nn.Parameter(torch.randn(length, WIDTH)), nn.Parameter(torch.randn(2))

    def forward(self, x):
        x = torch.tanh(self.first(x) + self.positions[: x.shape[1]])
        return self.last(self.shares[0] * x.mean(1) + self.shares[1] * x[:, 0])


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 6, 7])
@pytest.mark.parametrize("batch", [1, 3, 9])
def test_an_index_is_one_of_the_parameter_whatever_the_number_of_records(length, batch):
    """In a trial, with no more records than positions, a slice of the records looked right."""
    torch.manual_seed(0)
    assert_both_ways_agree(Sliced(length), torch.rand(2, batch, length, 2, dtype=torch.float64))


class Deep(nn.Module):
    """A scale before many sigmoids, through which hardly any gradient passes until they are trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.layers = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(6, 6), nn.Sigmoid())])

    def forward(self, x):
        return self.layers(x * self.scale)


@pytest.mark.slow
def test_a_trial_sees_small_gradients():
    """Of six records of six numbers: one scale for each record could be one for each number."""
    torch.manual_seed(0)
    module, x = Deep().double(), torch.rand(2, 3, 6, dtype=torch.float64)
    net = network(module, x[0], per_record=True)
    params = torch.stack([net.layout.flatten(module) * scale for scale in (8, 12)])
    y, weights = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.float64)
    ours, theirs = (way.backward(params, x, y, weights).records() for way in (net, RecordNetwork(module)))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


class Mean(nn.Module):
    """Divides by the number of its vectors."""

    def __init__(self, count):
        super().__init__()
        torch.manual_seed(2)
        self.vectors, self.last = nn.Parameter(torch.rand(count, WIDTH)), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.last(torch.tanh(x.unsqueeze(1) * self.vectors).sum(1) / len(self.vectors))


@pytest.mark.parametrize("count", [4, 6, 7])
def test_a_length_that_is_the_number_of_records_of_a_trial_is_not_taken_for_it(count):
    module = Mean(count)
    assert network(module, torch.rand(3, WIDTH)).way != "rules"
