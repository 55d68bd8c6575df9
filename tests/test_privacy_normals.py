"""Noise for many clients at once: normal, independent, and each client's own whoever is computed beside it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from scipy import stats

from shoal.privacy import normals as module
from shoal.privacy.normals import Product, add_normals, normals
from shoal.privacy.random import Keystream, Streams

STREAMS = Streams(11)


def drawn(clients, size, *, steps=1, numbers=(0, 0), scales=None, purpose="step noise"):
    into = torch.zeros(len(clients), size)
    source = normals(STREAMS, purpose, numbers, clients, into)
    wanted = torch.ones(len(clients)) if scales is None else torch.tensor(scales)
    out = []
    for _ in range(steps):
        into.zero_()
        source.add(into, wanted)
        out.append(into.clone())
    return torch.stack(out)


def test_numbers_are_normal():
    """Kolmogorov and Smirnov on a million numbers, alpha 1e-6; a variance 1% off fails every time."""
    numbers = drawn([0], 1_000_001).flatten().double()
    assert stats.kstest(numbers.numpy(), "norm").pvalue > 1e-6
    assert abs(float(numbers.square().mean()) - 1) < 5 * (2 / 1e6) ** 0.5
    assert 4.5 < float(numbers.abs().max()) < 6.67


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_client_gets_its_own_numbers_whoever_is_beside_it(size):
    together, alone = drawn([3, 5, 9], size, steps=2), drawn([5], size, steps=2)
    assert torch.equal(together[:, 1:2], alone)


def test_clients_steps_rounds_attempts_and_purposes_share_nothing():
    """Correlations of 20,000 numbers each; |r| < 6/sqrt(n) fails by chance with 2e-9 a pair."""
    size = 20_000
    rows = [*drawn([0, 1], size, steps=2).flatten(0, 1), *drawn([0], size, numbers=(1, 0))[0]]
    rows += [*drawn([0], size, numbers=(0, 1))[0], *drawn([0], size, purpose="step count")[0]]
    table = torch.corrcoef(torch.stack(rows))
    assert float((table - torch.eye(len(rows))).abs().max()) < 6 / size**0.5


def test_pieces_of_a_long_vector_share_nothing(monkeypatch):
    monkeypatch.setattr(module, "PIECE", 5_000)
    pieces = drawn([0], 20_000)[0, 0].view(4, 5_000)
    assert float((torch.corrcoef(pieces) - torch.eye(4)).abs().max()) < 6 / 5_000**0.5
    assert torch.equal(drawn([7, 0], 20_000)[0, 1], pieces.flatten())


def test_the_halves_of_a_vector_are_independent():
    """Both come from the same radii: their squares too must not be correlated."""
    halves = drawn([0], 200_000)[0, 0].view(2, -1)
    for pair in (halves, halves.square()):
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 6 / 100_000**0.5


def test_scales_are_each_clients_own_and_zero_draws_nothing():
    first = drawn([0, 1, 2], 1001, steps=2, scales=[2.0, 0.0, 0.5])
    plain = drawn([0, 1, 2], 1001, steps=2)
    torch.testing.assert_close(first[:, 0], 2 * plain[:, 0])
    torch.testing.assert_close(first[:, 2], 0.5 * plain[:, 2])
    assert not first[:, 1].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_too():
    into = torch.zeros(3, 1_000_001, device="cuda")
    source = normals(STREAMS, "step noise", (0, 0), [4, 5, 6], into)
    source.add(into, torch.tensor([1.0, 0.0, 2.0], device="cuda"))
    first = into.cpu().double()
    assert stats.kstest(first[0].numpy(), "norm").pvalue > 1e-6
    assert stats.kstest(first[2].numpy() / 2, "norm").pvalue > 1e-6
    assert not first[1].any()
    source.add(into.zero_(), torch.ones(3, device="cuda"))
    assert abs(float(torch.corrcoef(torch.stack([first[0], into.cpu().double()[0]]))[0, 1])) < 6e-3


def test_a_thread_may_begin_with_nothing_to_draw():
    """As where no parameter of an update was selected."""
    nothing = torch.zeros(2, 0)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(add_normals, nothing, torch.ones(2), [Keystream(bytes(16)), Keystream(bytes(16))]).result()
    assert nothing.shape == (2, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("start", "out", "width"), [(840, 50, 36), (0, 33, 36), (100, 1, 4004)])
def test_a_product_that_is_added_with_the_noise_is_the_product_and_the_same_noise(start, out, width):
    into = torch.zeros(3, 5000, device="cuda")
    rows, grads = (torch.randn(3, 5, size, device="cuda") for size in (width, out))
    scales = torch.tensor([1.0, 0.0, 2.0], device="cuda")
    apart, fused = into.clone(), into.clone()
    product = Product(start, rows, grads, -0.3)
    source = normals(STREAMS, "step noise", (0, 0), [1, 2, 3], into, fused=True)
    assert source.takes(product)
    source.add(fused, scales, [product])
    matrix = apart[:, start : start + width * out].unflatten(1, (out, width))
    matrix += -0.3 * grads.transpose(1, 2) @ rows
    normals(STREAMS, "step noise", (0, 0), [1, 2, 3], into).add(apart, scales)
    torch.testing.assert_close(fused, apart, rtol=1e-4, atol=1e-5)
