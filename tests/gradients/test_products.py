"""Which products tensor cores compute; test_kernels_cuda.py has what they give."""

import pytest
import torch

from shoal.gradients import network
from shoal.gradients.layers import products_cuda
from shoal.gradients.layers.products_cuda import TILES, add_product, multiply
from shoal.precision import tf32

GPU = torch.cuda.is_available()


class OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def on_cuda(*shape):
    return torch.zeros(shape).as_subclass(OnCuda)


@pytest.fixture
def measured(monkeypatch):
    """The shapes that were measured, on a GPU where tensor cores are always faster."""
    shapes = []
    monkeypatch.setattr(products_cuda, "_tiles", {})
    monkeypatch.setattr(products_cuda, "LEAST", 2 * 64 * 32 * 16)
    monkeypatch.setattr(products_cuda, "SHORTEST", 16)
    monkeypatch.setattr(products_cuda, "_has_tf32", lambda device: True)
    monkeypatch.setattr(products_cuda, "_fastest", lambda left, *others: shapes.append(left.shape) or TILES[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return shapes


def tile_of(left, right, bias=None, into=None):
    return products_cuda._tile(left, right, bias, into)


def test_a_shape_is_measured_once(measured):
    for clients in (2, 2, 3):
        assert tile_of(on_cuda(clients, 64, 32), on_cuda(clients, 32, 16)) == TILES[0]
    assert measured == [(2, 64, 32), (3, 64, 32)]


def test_nothing_is_measured_while_a_graph_is_recorded(measured, monkeypatch):
    left, right = on_cuda(2, 64, 32), on_cuda(2, 32, 16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tile_of(left, right) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tile_of(left, right) == TILES[0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tile_of(left, right) == TILES[0]
    assert len(measured) == 1


def test_pytorch_computes_what_is_small_or_not_aligned_or_not_in_float32(measured):
    left, right = on_cuda(2, 64, 32), on_cuda(2, 32, 16)
    others = [
        (left.as_subclass(torch.Tensor), right),
        (on_cuda(1, 32, 32), on_cuda(1, 32, 16)),
        (on_cuda(2, 8, 32), on_cuda(2, 32, 256)),
        (left.double(), right.double()),
        (left, right, None, on_cuda(2, 64, 16).double()),
        (left, right, on_cuda(2, 17)[:, 1:]),
        (on_cuda(2, 64, 33)[:, :, :32], right),
        (on_cuda(2 * 64 * 32 + 1)[1:].view(2, 64, 32), right),
    ]
    assert [tile_of(*given) for given in others] == [None] * len(others)
    assert measured == []


def test_pytorch_computes_what_may_be_in_tf32(measured):
    left, right = on_cuda(2, 64, 32), on_cuda(2, 32, 16)
    with tf32(left, True):
        assert tile_of(left, right) is None
    with tf32(left, False):
        assert tile_of(left, right) == TILES[0]


def test_kernels_off_leave_every_product_to_pytorch(measured, monkeypatch):
    monkeypatch.setattr(products_cuda, "_tile", lambda *given: pytest.fail("kernels are off"))
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    net = network(module, kernels=False)
    params = net.layout.flatten(module).repeat(2, 1)
    tape = net.backward(params, torch.rand(2, 5, 3), torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5))
    tape.accumulate(torch.zeros_like(params), 1.0)


@pytest.mark.parametrize(
    ("plain", "taken", "chosen"),
    [(1.0, (0.95, 2, 2, 2, 2), None), (1.0, (0.8, 0.7, 0.75, 2, 2), 1), (1.0, (0.8, 0.3, 0.2, 0.1, 2), 1)],
)
def test_the_fastest_tile_is_taken_if_it_gains_a_tenth_and_gives_the_same(plain, taken, chosen, monkeypatch):
    times, run = {None: plain, **dict(zip(TILES, taken, strict=True))}, products_cuda._run

    def by_tile(tile, *given):
        if tile == TILES[2] and taken[2] < 0.5:
            raise ValueError("out of shared memory")
        return run(None, *given) * (1.001 if tile == TILES[3] else 1)

    monkeypatch.setattr(products_cuda, "_run", by_tile)
    monkeypatch.setattr(products_cuda, "_milliseconds", lambda tile, *given: times[tile])
    for into in (None, torch.rand(2, 3, 4)):
        found = products_cuda._fastest(torch.rand(2, 3, 5), torch.rand(2, 5, 4), None, into)
        assert found == (None if chosen is None else TILES[chosen])


@pytest.mark.skipif(not GPU or products_cuda.triton is None, reason="needs a GPU")
def test_products_on_a_gpu_are_as_in_float64_also_where_they_are_recorded(monkeypatch):
    monkeypatch.setattr(products_cuda, "_tiles", {})
    monkeypatch.setattr(products_cuda, "FASTER", 1e9)  # by the kernel, however long it takes
    left, right = torch.randn(8, 512, 256, device="cuda"), torch.randn(8, 256, 256, device="cuda")
    bias, into = torch.randn(8, 256, device="cuda"), torch.zeros(8, 512, 256, device="cuda")

    def step():
        return multiply(left, right, bias), add_product(into, left, right, 0.5)

    step()
    assert all(products_cuda._tiles.values())
    into.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, _ = step()
    graph.replay()
    wanted = left.double() @ right.double()
    torch.testing.assert_close(found.double(), wanted + bias.double().unsqueeze(1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(into.double(), 0.5 * wanted, rtol=1e-5, atol=1e-4)
