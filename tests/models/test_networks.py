"""The papers' networks: sizes, shapes, starts, and that no example has a say in another's output."""

import pytest
import torch
from torch import nn

from shoal.errors import ModelError
from shoal.models import NETWORKS, auto, build, check, count, names
from support.layers import MNIST, OF_NUMBERS, SCATTER, home

CIFAR, DIGITS = (3, 32, 32), (1, 8, 8)
SCATTER_CIFAR = (243, 8, 8)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("thesis-mlp", MNIST, 10, 795_010),
        ("thesis-cnn", MNIST, 10, 1_663_370),
        ("geyer-mlp", MNIST, 10, 784 * 600 + 600 * 100 + 100 * 10),
        ("papernot-cnn", MNIST, 10, 26_010),
        ("papernot-cnn-ts", MNIST, 10, 26_010),
        ("pfl-cnn", MNIST, 10, 10_650),
        ("pfl-cnn-ts", MNIST, 10, 10_650),
        ("pfl-cifar-cnn", CIFAR, 10, 605_226),
        ("pfl-cifar-cnn-ts", CIFAR, 10, 605_226),
        ("alphacdp-cnn", MNIST, 10, 34_720),
        ("alphacdp-cnn", CIFAR, 62, 32 * 27 + 64 * 32 * 9 + 64 * 36 * 62),
        ("attack-cnn", MNIST, 10, (25 + 1) * 12 + 3 * (12 * 25 + 1) * 12 + 588 * 10 + 10),
        ("dlg-cnn", CIFAR, 62, (75 + 1) * 12 + 2 * (12 * 25 + 1) * 12 + 768 * 62 + 62),
        ("scatter-linear", SCATTER, 10, 2 * 3969 + 3969 * 10 + 10),
        ("scatter-linear", SCATTER_CIFAR, 10, 2 * 15552 + 15552 * 10 + 10),
        ("scatter-cnn", SCATTER, 10, 2 * 81 + 81 * 9 * 16 + 16 + 16 * 9 * 32 + 32 + 129 * 32 + 330),
        ("scatter-cnn", SCATTER_CIFAR, 10, 2 * 243 + 243 * 9 * 64 + 64 + 64 * 9 * 64 + 64 + 2570),
        ("adult-mlp", (105,), 2, 8_930),
        ("cancer-mlp", (30,), 2, 1_554),
        ("linear-without-bias", DIGITS, 10, 640),
        ("digits-mlp", DIGITS, 10, 64 * 64 + 64 + 650),
        ("digits-cnn", DIGITS, 10, 6_090),
        ("linear", (441,), 10, 4_420),
    ],
)
def test_a_network_has_the_parameters_its_paper_counts(name, shape, classes, parameters):
    model = build(name, shape, classes)
    assert count(model) == parameters
    assert model(torch.zeros(4, *shape)).shape == (4, classes)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_every_network_passes_the_check_of_example_level_privacy(name):
    check(build(name, home(name), 10), home(name), 10, record_level=True)


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_every_network_is_made_of_layers_that_the_engine_knows(name):
    known = (
        *(nn.Sequential, nn.Flatten, nn.Linear, nn.Conv2d, nn.GroupNorm, nn.ReLU, nn.Tanh, nn.Sigmoid),
        *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    )
    assert all(isinstance(layer, known) for layer in build(name, home(name), 10).modules())


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_every_network_works_at_the_least_size_it_states_and_refuses_the_next_smaller(name):
    least, channels = NETWORKS[name].least, home(name)[0]
    if least is None:
        assert build(name, (3,), 2)(torch.zeros(2, 3)).shape == (2, 2)
        return
    assert build(name, (channels, least, least), 3)(torch.zeros(2, channels, least, least)).shape == (2, 3)
    if least > 1:
        with pytest.raises(ModelError, match=rf"'{name}' takes pictures of at least {least}x{least}, got"):
            build(name, (channels, least, least - 1), 3)


def as_printed(act, dense):
    """The CNN of Papernot et al., activation before pooling, as it is printed."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, 2, 3), act(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), act()),
        *(nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), dense(), nn.Linear(32, 10)),
    )


@pytest.mark.parametrize(("name", "act"), [("papernot-cnn", nn.ReLU), ("papernot-cnn-ts", nn.Tanh)])
def test_pooling_first_changes_neither_the_function_nor_its_gradient(name, act):
    ours, printed = build(name, MNIST, 10, seed=3), as_printed(act, act)
    for p, q in zip(printed.parameters(), ours.parameters(), strict=True):
        p.data.copy_(q.data)
    x = torch.linspace(-1, 1, 4 * 784).sin().view(4, *MNIST)
    for model in (ours, printed):
        model(x).square().sum().backward()
    assert torch.allclose(ours(x), printed(x), atol=1e-6)
    for p, q in zip(printed.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-5)


def test_the_tempered_sigmoid_of_002_is_tanh():
    z = torch.linspace(-4, 4, 101)
    assert torch.allclose(2 / (1 + torch.exp(-2 * z)) - 1, torch.tanh(z), atol=1e-6)


def test_the_code_of_002_keeps_relu_between_its_linear_layers():
    kinds = [type(layer) for layer in build("pfl-cnn-ts", MNIST, 10)]
    assert kinds.count(nn.Tanh) == 2
    assert kinds[-2] is nn.ReLU


@pytest.mark.parametrize("name", [n for n in OF_NUMBERS if not n.startswith("linear")])
def test_the_seed_decides_the_weights_and_the_global_state_is_left_alone(name):
    shape = home(name)
    before = torch.get_rng_state()
    first, second, other = (build(name, shape, 10, seed=s) for s in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), before)
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


def test_the_starts_are_those_of_the_papers():
    geyer = next(build("geyer-mlp", MNIST, 10).parameters())
    assert geyer.abs().max() <= 2 / 28
    assert abs(geyer.std().item() * 28 - 0.88) < 0.01  # a normal cut off at two deviations has .880 of one
    glorot = list(build("alphacdp-cnn", MNIST, 10).parameters())[-1]
    bound = (6 / 1610) ** 0.5
    assert 0.99 * bound < glorot.abs().max() <= bound
    attack = torch.cat([p.flatten() for p in build("attack-cnn", MNIST, 10).parameters()])
    assert 0.49 < attack.abs().max() <= 0.5
    for name in ("linear", "linear-without-bias"):
        assert not any(p.any() for p in build(name, MNIST, 10).parameters())


@pytest.mark.parametrize("name", ["thesis-mlp", "thesis-cnn", "linear", "digits-cnn", "attack-cnn"])
@pytest.mark.parametrize("shape", [DIGITS, MNIST, CIFAR, (3, 20, 30)])
def test_networks_adapt_to_the_shape(name, shape):
    assert build(name, shape, 7)(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((30,), "cancer-mlp"),
        ((105,), "adult-mlp"),
        ((441,), "linear"),
        (DIGITS, "digits-cnn"),
        (MNIST, "alphacdp-cnn"),
        (CIFAR, "alphacdp-cnn"),
        ((3, 96, 96), "pfl-cifar-cnn"),
        (SCATTER, "scatter-linear"),
        ((1, 2, 2), "linear"),
    ],
)
def test_auto_picks_a_network_that_takes_the_shape(shape, name):
    assert auto(shape) == name
    assert build("auto", shape, 10)(torch.zeros(2, *shape)).shape == (2, 10)


def test_short_names_stand_for_the_thesis_networks():
    assert count(build("mlp", MNIST, 10)) == 795_010
    assert count(build("cnn", MNIST, 10)) == 1_663_370
    assert {"auto", "mlp", "cnn", *NETWORKS} == set(names())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "words"),
    [
        ("thesis-mpl", MNIST, 10, "there is no model 'thesis-mpl'.*did you mean 'thesis-mlp'"),
        ("papernot-cnn", DIGITS, 10, "at least 14x14, got 8x8; choose model=auto, which picks 'digits-cnn'"),
        ("thesis-cnn", (105,), 10, r"'thesis-cnn' takes pictures .* got shape \(105,\)"),
        ("scatter-cnn", MNIST, 10, "takes scattering features .* set data.features=scattering"),
        ("scatter-linear", (441,), 10, "takes scattering features"),
        ("linear", (), 10, "input_shape must hold"),
        ("linear", (0, 3), 10, "input_shape must hold"),
        ("linear", (3,), 0, "outputs must be at least 1, got 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(name, shape, classes, words):
    with pytest.raises(ModelError, match=words):
        build(name, shape, classes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits-cnn", "digits-mlp"])
def test_the_small_networks_learn_the_digits(name):
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(data.target)
    model = build(name, DIGITS, 10)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(8):
        for batch in torch.arange(1400).split(50):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimiser.step()
    assert (model(x[1400:]).argmax(1) == y[1400:]).float().mean() > 0.85
