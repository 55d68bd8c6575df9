"""AdaClip against its paper's formulas in a slow loop, in float64; and what one record can do."""

import math

import numpy as np
import pytest
import torch

from shoal.errors import ConfigError
from shoal.mechanisms.coordinate_clipping import AdaClip
from shoal.mechanisms.update_clipping import MARGIN
from shoal.random.streams import Streams

CLIENTS, BATCH, SIZE, STEPS = 2, 4, 9, 6


def drawn(*shape, seed=0):
    return Streams(seed).generator("adaclip", *shape).normal(size=shape)


def by_loop(clip, gradients, real, noise, sigma, batch):
    """Pichapati et al. 2019, one client, one step, one record and one coordinate at a time."""
    released = np.zeros((STEPS, CLIENTS, SIZE))
    for k in range(CLIENTS):
        m, s = np.zeros(SIZE), np.full(SIZE, math.sqrt(clip.h1 * clip.h2))
        for step in range(STEPS):
            b = [math.sqrt(s[i]) * math.sqrt(sum(s)) for i in range(SIZE)]
            total = [sigma * noise[step, k, i] for i in range(SIZE)]
            for j in range(BATCH):
                if real[k, j]:
                    w = [(gradients[step, k, j, i] - m[i]) / b[i] for i in range(SIZE)]
                    length = math.sqrt(sum(each**2 for each in w))
                    total = [total[i] + w[i] / max(1.0, length / (1 - MARGIN)) for i in range(SIZE)]
            for i in range(SIZE):
                found = b[i] * total[i] / batch + m[i]
                v = min(max((found - m[i]) ** 2 - b[i] ** 2 * sigma**2 / batch**2, clip.h1), clip.h2)
                released[step, k, i] = found
                m[i] = clip.beta1 * m[i] + (1 - clip.beta1) * found
                s[i] = clip.beta2 * s[i] + (1 - clip.beta2) * v
    return released


@pytest.mark.parametrize("clip", [AdaClip(), AdaClip(h1=1e-2, h2=10.0, beta1=0.5, beta2=0.3)])
@pytest.mark.parametrize("sigma", [0.0, 1.5])
def test_every_step_is_that_of_the_slow_loop(clip, sigma):
    gradients, noise = drawn(STEPS, CLIENTS, BATCH, SIZE), drawn(STEPS, CLIENTS, SIZE)
    real = np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
    expected = by_loop(clip, gradients, real, noise, sigma, batch=5)
    at = clip.start(torch.zeros(CLIENTS, SIZE, dtype=torch.float64))
    for step in range(STEPS):
        total = clip.clipped_sum(at, torch.from_numpy(gradients[step]), torch.from_numpy(real).double())
        found = clip.gradient(at, total + sigma * torch.from_numpy(noise[step]), sigma, 5)
        np.testing.assert_allclose(found.numpy(), expected[step], rtol=1e-9, atol=1e-12)


def test_the_sum_moves_by_at_most_1_with_a_record_and_by_that_much_with_a_long_one():
    clip, moved = AdaClip(), []
    for seed in range(50):
        gradients = torch.from_numpy(drawn(1, BATCH, SIZE, seed=seed) * 10.0 ** (seed % 9 - 6))
        at = clip.start(torch.zeros(1, SIZE, dtype=torch.float64))
        at.mean += torch.from_numpy(drawn(1, SIZE, seed=seed + 100))
        real = torch.ones(1, BATCH, dtype=torch.float64)
        here = clip.clipped_sum(at, gradients, real)
        real[0, seed % BATCH] = 0
        moved.append(float((here - clip.clipped_sum(at, gradients, real)).norm()))
    assert max(moved) <= (1 + 1e-12) * clip.excess(layers=7)
    assert max(moved) > 0.999


def test_an_empty_batch_has_no_sum():
    clip = AdaClip()
    at = clip.start(torch.zeros(2, SIZE))
    assert torch.equal(clip.clipped_sum(at, torch.zeros(2, 0, SIZE), torch.zeros(2, 0)), torch.zeros(2, SIZE))
    assert torch.equal(clip.clipped_sum(at, torch.ones(2, 3, SIZE), torch.zeros(2, 3)), torch.zeros(2, SIZE))


def test_coordinates_follow_only_what_is_released():
    """Other records, the same released sums: the same coordinates afterwards."""
    clip, after = AdaClip(), []
    for seed in (1, 2):
        at = clip.start(torch.zeros(1, SIZE, dtype=torch.float64))
        clip.clipped_sum(at, torch.from_numpy(drawn(1, BATCH, SIZE, seed=seed)), torch.ones(1, BATCH).double())
        clip.gradient(at, torch.from_numpy(drawn(1, SIZE)), 1.0, 4)
        after.append(torch.cat([at.mean, at.scale]))
    assert torch.equal(*after)


@pytest.mark.parametrize(
    "changes", [{"h1": 0}, {"h1": 1.0, "h2": 0.5}, {"h2": math.inf}, {"beta1": 1}, {"beta2": -0.1}]
)
def test_what_cannot_be_is_refused_by_its_key(changes):
    with pytest.raises(ConfigError, match=r"per_record\.(h1|h2|beta1|beta2) must be"):
        AdaClip(**changes)
