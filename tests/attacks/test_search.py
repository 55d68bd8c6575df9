"""The search: L-BFGS over many rows, its history, starts, signs and labels."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.attacks.arithmetic import exact
from shoal.attacks.attack_recipes import CPL, CPL_TV, DLG, GRADINV, recipe
from shoal.attacks.gradient_map import gradients, soft_losses, updates
from shoal.attacks.history import History
from shoal.attacks.labels import infer
from shoal.attacks.lbfgs import Lbfgs
from shoal.attacks.objective import Objective, total_variation
from shoal.attacks.quality import judge, rmse, ssim
from shoal.attacks.reconstruct import reconstruct
from shoal.attacks.signed_adam import SignedAdam
from shoal.attacks.starts import start
from shoal.errors import ConfigError, ModelError
from shoal.models import build
from shoal.random.streams import Streams

STREAMS = Streams(7)


def numbers(*shape, name="numbers"):
    return torch.from_numpy(STREAMS.generator(name).standard_normal(shape))


def two_loops(pairs, slope):
    """Nocedal & Wright, Algorithm 7.4, for one row."""
    result, factors = slope.clone(), []
    for move, turn in reversed(pairs):
        factors.append(move @ result / (move @ turn))
        result -= factors[-1] * turn
    if pairs:
        result *= (pairs[-1][0] @ pairs[-1][1]) / (pairs[-1][1] @ pairs[-1][1])
    for (move, turn), factor in zip(pairs, reversed(factors), strict=True):
        result += move * (factor - turn @ result / (move @ turn))
    return result


def test_the_compact_history_is_the_two_loop_recursion_for_rows_that_learn_at_different_times():
    rows, places, size = 3, 4, 10
    bends = numbers(rows, size, size, name="bends")
    bends = bends @ bends.mT + torch.eye(size, dtype=torch.float64)
    history, pairs = History(rows, places, torch.zeros(rows, size, dtype=torch.float64)), [[] for _ in range(rows)]
    for turn in range(9):
        who = torch.tensor([(turn + row) % 3 > 0 or turn == 0 for row in range(rows)])
        move = numbers(rows, size, name=f"moves {turn}")
        turned = torch.bmm(bends, move.unsqueeze(2)).squeeze(2)
        history.add(who, move, turned)
        for row in who.nonzero().squeeze(1).tolist():
            pairs[row] = [*pairs[row], (move[row], turned[row])][-places:]
        slope = numbers(rows, size, name=f"slopes {turn}")
        expected = torch.stack([two_loops(pairs[row], slope[row]) for row in range(rows)])
        assert torch.allclose(history.times_inverse(slope), expected, atol=1e-10)


def rosenbrock(x):
    x = x.detach().requires_grad_()
    value = (100 * (x[:, 1:] - x[:, :-1] ** 2) ** 2 + (1 - x[:, :-1]) ** 2).sum(1)
    (slope,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), slope


@pytest.mark.slow
def test_rows_find_their_minima_independently_of_their_neighbours():
    starts = numbers(
        5, 6, name="starts"
    ).abs()  # on the side of the global minimum; there is another near (-1, 1, ...)
    together = Lbfgs(starts.clone(), "armijo", 10)
    for _ in range(400):
        together.take(*rosenbrock(together.trial))
    assert torch.allclose(together.x, torch.ones_like(starts), atol=1e-4)
    alone = Lbfgs(starts[2:3].clone(), "armijo", 10)
    for _ in range(60):
        alone.take(*rosenbrock(alone.trial))
    together = Lbfgs(starts.clone(), "armijo", 10)
    for _ in range(60):
        together.take(*rosenbrock(together.trial))
    assert torch.allclose(together.x[2], alone.x[0], atol=1e-6)


@pytest.mark.parametrize("search", ["fixed", "armijo"])
def test_a_row_that_meets_nan_leaves_the_others_alone(search):
    def poisoned(x):
        value, slope = (x**2).sum(1), 2 * x
        value[1], slope[1] = torch.nan, torch.nan
        return value, slope

    rows = Lbfgs(numbers(3, 4, name="poisoned"), search, 5)
    for _ in range(50):
        rows.take(*poisoned(rows.trial))
    assert rows.ended[1]
    assert torch.allclose(rows.x[[0, 2]], torch.zeros(2, 4, dtype=torch.float64), atol=1e-6)


def test_signed_adam_stays_in_the_box_and_finds_the_corner():
    rows = SignedAdam(torch.full((1, 3), 0.5), lr=0.1, steps=100, boxed=2)
    for _ in range(100):
        rows.take(torch.ones(1), torch.tensor([[1.0, -1.0, -1.0]]))
    assert rows.x[0, :2].tolist() == [0.0, 1.0]
    assert rows.x[0, 2] > 1


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 7, 9), (5,)])
def test_a_tile_repeats_itself_and_a_half_tone_is_black_and_white(shape):
    tile = start("tile", shape, STREAMS.generator("tile"))
    assert tile.shape == shape
    for axis in range(1 if len(shape) == 3 else 0, len(shape)):
        half = -(-shape[axis] // 2)
        length = shape[axis] - half
        assert torch.equal(tile.narrow(axis, 0, length), tile.narrow(axis, half, length))
    dots = start("half-tone", shape, STREAMS.generator("dots"))
    assert set(dots.unique().tolist()) <= {0.0, 1.0}
    uniform = start("uniform", shape, STREAMS.generator("uniform"))
    assert 0 <= uniform.min() < uniform.max() < 1


class Odd(nn.Module):
    """A model that no layer rule covers."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(torch.tanh(self.scale * x.flatten(1)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attack-cnn", "alphacdp-cnn", "odd"])
def test_gradients_of_victims_are_those_of_plain_autograd(name):
    shape = (1, 12, 12) if name == "alphacdp-cnn" else (1, 8, 8)
    module = Odd() if name == "odd" else build(name, shape, 10)
    x, y = numbers(3, 2, *shape, name="x").float(), numbers(3, 2, 10, name="y").float().softmax(-1)
    found = gradients(module)(x, y)
    for victim in range(3):
        loss = soft_losses(module(x[victim]), y[victim]).mean()
        slopes = torch.autograd.grad(loss, list(module.parameters()))
        assert torch.allclose(found[victim], torch.cat([s.flatten() for s in slopes]), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_simulated_update_is_that_of_plain_sgd_with_momentum():
    module = build("attack-mlp", (6,), 2)
    x, y = numbers(2, 3, 6, name="x").float(), F.one_hot(torch.tensor([[0, 1, 1], [1, 0, 1]]), 2).float()
    found = updates(module, [[0, 1], [2], [0, 1]], lr=0.3, momentum=0.5, clip=None)(x, y)
    for victim in range(2):
        plain = build("attack-mlp", (6,), 2)
        before = torch.cat([p.detach().flatten().clone() for p in plain.parameters()])
        optimiser = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.5)
        for batch in ([0, 1], [2], [0, 1]):
            optimiser.zero_grad()
            soft_losses(plain(x[victim, batch]), y[victim, batch]).mean().backward()
            optimiser.step()
        after = torch.cat([p.detach().flatten() for p in plain.parameters()])
        assert torch.allclose(found[victim], after - before, atol=1e-5)


@pytest.mark.parametrize("way", ["rows", "signs"])
@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_a_single_label_is_read_off_a_clean_gradient_also_after_a_clip(way, scale):
    module = build("attack-cnn", (1, 8, 8), 10, seed=3)
    x = torch.from_numpy(STREAMS.generator("pictures").random((40, 1, 1, 8, 8), dtype=np.float32))
    y = torch.arange(40).view(40, 1) % 10
    seen = scale * gradients(module)(x, F.one_hot(y, 10).float()).detach()
    assert torch.equal(infer(way, seen, module, 1, x[:8, 0])[:, 0], y)


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_labels_of_a_batch_are_counted(scale):
    module = build("attack-cnn", (1, 8, 8), 10, seed=3)
    x = torch.from_numpy(STREAMS.generator("pictures").random((30, 3, 1, 8, 8), dtype=np.float32))
    y = torch.from_numpy(STREAMS.generator("labels").integers(10, size=(30, 3)))
    seen = scale * gradients(module)(x, F.one_hot(y, 10).float()).detach()
    guesses = infer("rows", seen, module, 3, x[:8, 0])
    assert torch.equal(guesses[:, 0].sort(1).values, y.sort(1).values)
    assert all(len({tuple(sorted(guess)) for guess in victim}) == guesses.shape[1] for victim in guesses.tolist())


def test_labels_need_a_last_linear_layer():
    with pytest.raises(ModelError, match="use the attack dlg"):
        infer("rows", torch.zeros(1, 9), nn.Conv2d(1, 1, 3, bias=False), 1, torch.zeros(1, 1, 4, 4))


def linear_objective(chosen, x, y, **changes):
    """An attack on softmax regression, whose gradient gives its input away: dL/dW_c = (dL/db_c) x."""
    module = nn.Linear(x.shape[-1], 3)
    with torch.no_grad():
        module.weight.copy_(numbers(3, x.shape[-1], name="weights"))
    shown = gradients(module)
    seen = shown(x, F.one_hot(y, 3).float()).detach()
    dummies = torch.rand(8, x.shape[-1], generator=torch.Generator().manual_seed(0))
    labels = infer("rows", seen, module, 1, dummies) if chosen.labels != "joint" else None
    fields = {"recipe": chosen, "shown": shown, "replay": lambda a, _: a, "shape": tuple(x.shape[2:]), "batch": 1,
              "classes": 3, "seen": seen, "labels": labels}  # fmt: skip
    return Objective(**fields | changes), module


@pytest.mark.slow
def test_an_attack_on_an_unprotected_linear_model_recovers_the_input_that_algebra_gives():
    x = torch.from_numpy(STREAMS.generator("rows").random((6, 1, 12), dtype=np.float32))
    y = torch.arange(6).view(6, 1) % 3
    objective, _ = linear_objective(CPL, x, y)
    found = reconstruct(objective, STREAMS)
    weight, bias = objective.seen[:, :36].view(6, 3, 12), objective.seen[:, 36:]
    algebra = weight[:, 0] / bias[:, :1]
    assert torch.allclose(algebra, x[:, 0], atol=1e-4)
    assert torch.allclose(found.x[:, 0], algebra, atol=2e-3)
    assert torch.equal(found.labels, y)
    assert (found.left < 1e-8).all()


@pytest.mark.slow
def test_divergence_is_restarted_or_reported_and_never_spoils_the_batch():
    x = torch.from_numpy(STREAMS.generator("rows").random((4, 1, 12), dtype=np.float32))
    y = torch.arange(4).view(4, 1) % 3
    objective, _ = linear_objective(CPL, x, y)
    seen = objective.seen.clone()
    seen[1] = torch.nan
    found = reconstruct(Objective(**vars(objective) | {"seen": seen}), STREAMS)
    assert found.diverged.tolist() == [False, True, False, False]
    assert found.restarts[1] == CPL.restarts
    assert torch.isfinite(found.x).all()
    assert torch.allclose(found.x[[0, 2, 3]], x[[0, 2, 3]], atol=2e-3)
    once = replace(DLG, restarts=0)
    plain = reconstruct(Objective(**vars(objective) | {"seen": seen, "recipe": once, "labels": None}), STREAMS)
    assert plain.diverged[1]
    assert plain.restarts[1] == 0


@pytest.mark.slow
def test_a_search_can_be_repeated_and_a_victim_does_not_depend_on_the_others():
    x = torch.from_numpy(STREAMS.generator("rows").random((3, 1, 12), dtype=np.float32))
    y = torch.arange(3).view(3, 1)
    objective, _ = linear_objective(CPL, x, y)
    first, second = reconstruct(objective, STREAMS), reconstruct(objective, STREAMS)
    assert torch.equal(first.x, second.x)
    one = Objective(**vars(objective) | {"seen": objective.seen[:1], "labels": objective.labels[:1]})
    assert torch.allclose(reconstruct(one, STREAMS).x[0], first.x[0], atol=1e-3)


def test_arithmetic_is_exact_during_a_search_and_as_it_was_afterwards():
    with exact():
        assert not torch.backends.cudnn.allow_tf32
        assert float(torch.tensor(1e-40) * 1.0) == 0
    x = torch.from_numpy(STREAMS.generator("rows").random((1, 1, 12), dtype=np.float32))
    objective, _ = linear_objective(CPL, x, torch.zeros(1, 1, dtype=torch.int64))
    reconstruct(objective, STREAMS)
    assert float(torch.tensor(1e-40) * 1.0) > 0
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.slow
def test_gradinv_matches_directions_inside_the_box():
    x = torch.from_numpy(STREAMS.generator("rows").random((3, 1, 1, 8, 8), dtype=np.float32)).round()
    x = F.avg_pool2d(x.flatten(0, 1), 3, 1, 1).unsqueeze(1)
    y = torch.arange(3).view(3, 1)
    module = build("attack-cnn", (1, 8, 8), 10, seed=1)
    shown = gradients(module)
    seen = 17.0 * shown(x, F.one_hot(y, 10).float()).detach()
    short = type(GRADINV)(**vars(GRADINV) | {"iterations": 160})
    objective = Objective(short, shown, lambda a, _: a, (1, 8, 8), 1, 10, seen, y.unsqueeze(1))
    found = reconstruct(objective, STREAMS)
    assert (rmse(found.x, x) < 0.1).all()
    assert found.iterations.tolist() == [160] * 3


def test_total_variation_is_the_mean_step_between_neighbours():
    x = torch.tensor([[0.0, 1.0], [0.0, 0.0]]).view(1, 1, 1, 2, 2)
    assert float(total_variation(x)) == pytest.approx(0.5 + 0.5)


@pytest.mark.slow
def test_of_all_pictures_that_explain_what_was_seen_the_prior_takes_a_smooth_one():
    """32 linear measurements of 64 pixels: without the prior the start's noise stays where nothing was measured."""
    x = torch.linspace(0.2, 0.8, 8).expand(1, 1, 1, 8, 8)
    measured = numbers(64, 32, name="measurements").float()

    def shown(x, y):
        return x.flatten(1) @ measured

    def error(chosen):
        short = replace(chosen, iterations=20)
        labels = torch.zeros(1, 1, 1, dtype=torch.int64)
        objective = Objective(short, shown, lambda a, _: a, (1, 8, 8), 1, 2, shown(x, None), labels)
        found = reconstruct(objective, STREAMS)
        assert float(found.left) < 1e-4
        return float(rmse(found.x, x))

    assert error(CPL) > 0.1
    assert error(CPL_TV) < 0.05


def test_quality_of_a_perfect_and_of_a_shuffled_batch():
    x = torch.from_numpy(STREAMS.generator("batch").random((2, 3, 1, 9, 9), dtype=np.float32))
    y = torch.tensor([[0, 1, 2], [3, 4, 5]])
    perfect = judge(x[:, [2, 0, 1]], y[:, [2, 0, 1]], x, y)
    assert perfect.success.all()
    assert perfect.label_hit.all()
    assert torch.equal(perfect.x, x)
    assert torch.allclose(perfect.ssim, torch.ones(2, 3))
    assert (perfect.psnr > 100).all()
    wrong = judge(1 - x, y, x, y)
    assert not wrong.success.any()


def test_ssim_is_what_scikit_image_computes():
    """Against the formula written out for one 7 x 7 picture, where there is a single window."""
    a, b = (numbers(7, 7, name=name).clamp(0, 1) for name in "ab")
    cov = ((a - a.mean()) * (b - b.mean())).sum() / 48
    expected = (2 * a.mean() * b.mean() + 1e-4) * (2 * cov + 9e-4)
    expected /= (a.mean() ** 2 + b.mean() ** 2 + 1e-4) * (a.var() + b.var() + 9e-4)
    assert float(ssim(a.view(1, 1, 1, 7, 7), b.view(1, 1, 1, 7, 7))) == pytest.approx(float(expected), rel=1e-6)


def test_an_unknown_attack_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'gradinv'"):
        recipe("gradinf")
