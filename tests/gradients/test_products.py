"""Which products tensor cores compute; test_kernels_cuda.py has what they give."""

import pytest
import torch

from shoal.gradients import network
from shoal.gradients.layers import products_cuda
from shoal.gradients.layers.products_cuda import LEAST, add_product, multiply
from shoal.precision import tf32

MEASURED = torch.cuda.is_available() and products_cuda._measured(torch.device("cuda"))


class OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def on_cuda(*shape):
    return torch.empty(shape).as_subclass(OnCuda)


@pytest.fixture
def suits(monkeypatch):
    """As on a GPU that was measured."""
    monkeypatch.setattr(products_cuda, "_measured", lambda device: True)

    def suits(left, right, other=None):
        return products_cuda._suits(left, right, other)

    return suits


def test_tensor_cores_compute_large_products_of_moderate_sides(suits):
    for clients, rows, columns, depth in [(50, 128, 128, 1024), (50, 1024, 384, 128), (13, 512, 256, 512)]:
        assert suits(on_cuda(clients, rows, depth), on_cuda(clients, depth, columns))
    for clients, rows, columns, depth in [
        (49, 128, 128, 1024),
        (200, 1024, 64, 128),
        (50, 1040, 128, 128),
        (0, 128, 128, 128),
    ]:
        assert not suits(on_cuda(clients, rows, depth), on_cuda(clients, depth, columns))


def test_which_are_computed_so_does_not_depend_on_the_clock(suits, monkeypatch):
    """Ranks, resumed and repeated runs must round alike: nothing is run, timed or remembered to choose."""
    monkeypatch.setattr(torch.cuda, "Event", lambda *given, **more: pytest.fail("timed"))
    monkeypatch.setattr(products_cuda, "launch", lambda *given: pytest.fail("run"))
    before = dict(vars(products_cuda))
    assert suits(on_cuda(50, 1024, 128), on_cuda(50, 128, 384))
    assert vars(products_cuda) == before


def test_pytorch_computes_what_is_not_aligned_or_not_in_float32(suits):
    left, right = on_cuda(50, 1024, 128), on_cuda(50, 128, 384)
    others = [
        (left.as_subclass(torch.Tensor), right),
        (left.double(), right.double()),
        (left, right, on_cuda(50, 1024, 384).double()),
        (left, right, on_cuda(50, 385)[:, 1:]),
        (on_cuda(50, 1024, 129)[:, :, :128], right),
        (on_cuda(50 * 1024 * 128 + 1)[1:].view(50, 1024, 128), right),
    ]
    assert not any(suits(*given) for given in others)


def test_pytorch_computes_what_has_too_many_numbers_to_index():
    for step, readable in ((2**20, True), (2**21, False)):
        far = torch.empty_strided((50, 1024, 128), (0, step, 1), device="meta")
        assert products_cuda._readable(far) == readable


def test_pytorch_computes_what_may_be_in_tf32_by_any_of_its_switches(suits):
    left, right = on_cuda(50, 1024, 128), on_cuda(50, 128, 384)
    with tf32(left, True):
        assert not suits(left, right)
    with tf32(left, False):
        assert suits(left, right)
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # from PyTorch 2.9 on
        before, matmul.fp32_precision = matmul.fp32_precision, "tf32"  # the older switch cannot be read then
        try:
            assert not suits(left, right)
            with tf32(left, False):
                assert suits(left, right)
            assert not suits(left, right)
        finally:
            matmul.allow_tf32, matmul.fp32_precision = False, before


def test_other_gpus_leave_every_product_to_pytorch(monkeypatch):
    monkeypatch.setattr(products_cuda, "triton", products_cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, measured in [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), False)]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert products_cuda._measured(torch.device("cuda")) == measured


def test_kernels_off_leave_every_product_to_pytorch(monkeypatch):
    monkeypatch.setattr(products_cuda, "_suits", lambda *given: pytest.fail("kernels are off"))
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    net = network(module, kernels=False)
    params = net.layout.flatten(module).repeat(2, 1)
    tape = net.backward(params, torch.rand(2, 5, 3), torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5))
    tape.accumulate(torch.zeros_like(params), 1.0)


@pytest.mark.parametrize("positions", [1, 6])
def test_what_is_added_of_a_record_is_as_long_as_measured_however_wrong_products_are(positions, monkeypatch):
    def wrong(into, left, right, added, scale):
        into.copy_(scale * left @ right * (1 + torch.rand(into.shape)) + (0 if added is None else added))

    monkeypatch.setattr(products_cuda, "_suits", lambda *given: True)
    monkeypatch.setattr(products_cuda, "launch", lambda tile, *given: wrong(*given))
    module = torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.Tanh(), torch.nn.Linear(40, 8), torch.nn.Flatten())
    net = network(module, per_record=True)
    params = net.layout.flatten(module).repeat(2, 1)
    x, y = torch.rand(2, 5, positions, 8), torch.zeros(2, 5, dtype=torch.int64)
    tape = net.backward(params, x, y, torch.ones(2, 5))
    norms = tape.squares().sum(0).sqrt()
    for record in range(5):
        added, alone = torch.zeros_like(params), torch.zeros(1, 2, 5)
        alone[:, :, record] = 1.0
        tape.accumulate(added, 1.0, alone)
        assert bool((added.double().norm(dim=1) <= norms[:, record] * (1 + 2.0**-17)).all())


@pytest.mark.skipif(not MEASURED, reason="needs a GPU of the measured kind")
def test_products_on_a_gpu_are_as_in_float64_also_where_they_are_recorded(monkeypatch):
    calls, launch = [], products_cuda.launch
    monkeypatch.setattr(products_cuda, "launch", lambda *given: calls.append(given) or launch(*given))
    clients = -(-LEAST // (2 * 512 * 256 * 256))
    left, right = torch.randn(clients, 512, 256, device="cuda"), torch.randn(clients, 256, 256, device="cuda")
    bias, into = torch.randn(clients, 256, device="cuda"), torch.zeros(clients, 512, 256, device="cuda")

    def step():
        return multiply(left, right, bias), add_product(into, left, right, 0.5)

    step()
    into.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, _ = step()
    graph.replay()
    assert len(calls) == 4
    wanted = left.double() @ right.double()
    torch.testing.assert_close(found.double(), wanted + bias.double().unsqueeze(1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(into.double(), 0.5 * wanted, rtol=1e-5, atol=1e-4)
