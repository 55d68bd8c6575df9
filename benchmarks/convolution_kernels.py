"""Milliseconds of each way to convolve for many clients at once, for the layers of ResNet-18 and WideResNet-16-4.

    python benchmarks/convolution_kernels.py [--device cuda] [--layers cifar.1,tv.2] [--clients 10] [--batch 32]

One JSON line for each layer, task and method: milliseconds (on CUDA, of a graph) and the largest error against
float64, relative to the largest number. The tasks are a layer's `output`, the gradient of its `input`, that of each
client's `weight`, the `norms` of each record's gradient, and the `weighted` sum of gradients of records.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.gradients.layers import convolution_cuda
from shoal.gradients.layers.convolution import Conv2dRule
from shoal.gradients.layers.convolution_cuda import Tile, TritonConv2dRule
from shoal.gradients.layers.rule import gram_squares, outer_squares, squared
from shoal.gradients.layout import Layout
from shoal.kernels import triton

PIECE = 2**26  # numbers of materialised gradients at a time
STREAMS = 4


class Layer(NamedTuple):
    """A convolution without bias and the side of its input's map."""

    ins: int
    outs: int
    side: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1


LAYERS = {
    "tv.stem": Layer(3, 64, 32, 7, 2, 3),
    "tv.1": Layer(64, 64, 8),
    "tv.2a": Layer(64, 128, 8, stride=2),
    "tv.2": Layer(128, 128, 4),
    "tv.3": Layer(256, 256, 2),
    "tv.4a": Layer(256, 512, 2, stride=2),
    "tv.4": Layer(512, 512, 1),
    "cifar.stem": Layer(3, 64, 32),
    "cifar.1": Layer(64, 64, 32),
    "cifar.2a": Layer(64, 128, 32, stride=2),
    "cifar.2": Layer(128, 128, 16),
    "cifar.3": Layer(256, 256, 8),
    "cifar.4": Layer(512, 512, 4),
    "wrn.1a": Layer(16, 64, 32),
}
TILES = {  # output, input gradient, weight gradient, and the most channels of a tile
    "small": (convolution_cuda.OUTPUT, convolution_cuda.INPUT, convolution_cuda.WEIGHTS, 64),
    "large": (Tile(128, 32, 8, 3), Tile(128, 32, 8, 3), Tile(128, 32, 8, 3), 128),
}


class Case:
    """A layer with inputs, gradients of outputs and parameters for every client."""

    def __init__(self, layer: Layer, clients: int, batch: int, device: str) -> None:
        self.layer, self.clients, self.batch = layer, clients, batch
        self.module = nn.Conv2d(*layer[:2], layer.kernel, layer.stride, layer.padding, bias=False)
        layout = Layout.of(self.module)
        self.entry = layout.entries[0]
        drawn = torch.Generator().manual_seed(0)
        start = layout.flatten(self.module)
        self.params = (start * (1 + 0.1 * torch.randn(clients, layout.size, generator=drawn))).to(device)
        self.x = torch.randn(clients * batch, layer.ins, layer.side, layer.side, generator=drawn).to(device)
        high = (layer.side + 2 * layer.padding - layer.kernel) // layer.stride + 1
        self.grad = torch.randn(clients * batch, layer.outs, high, high, generator=drawn).to(device)
        self.factors = torch.rand(clients, batch, generator=drawn).to(device)
        self.positions, self.patch = high * high, layer.ins * layer.kernel**2
        self.weights = self.entry.of(self.params)

    def rule(self, kind: type[Conv2dRule]) -> Conv2dRule:
        made = kind(self.module.to(self.x.device), self.entry, None)
        made.both_ways, made.shifts = True, 1
        return made

    def each(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(tensor.chunk(self.clients) for tensor in tensors), strict=True)

    def convolve(self, x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
        return torch.conv2d(x, weight, None, self.layer.stride, self.layer.padding, 1, groups)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, of_input: bool, groups: int = 1) -> Tensor:
        stride, padding = [self.layer.stride] * 2, [self.layer.padding] * 2
        found = torch.ops.aten.convolution_backward(
            grad, x, weight, None, stride, padding, [1, 1], False, [0, 0], groups, [of_input, not of_input, False]
        )
        return found[not of_input]

    def rows(self, x: Tensor | None = None) -> Tensor:
        """The patches of every record, [N, T, D]."""
        return F.unfold(
            self.x if x is None else x, self.layer.kernel, padding=self.layer.padding, stride=self.layer.stride
        ).transpose(1, 2)


# --- the ways


def by_rule(case: Case, task: str, kind: type[Conv2dRule]) -> Callable[[], Tensor]:
    """Today's rules."""
    rule = case.rule(kind)
    _, saved = rule.forward(case.x, case.params)
    into = torch.zeros_like(case.params)
    kept = rule.squares(saved, case.grad)[1] if task == "weighted" else None

    def weight() -> Tensor:
        into.zero_()
        rule.accumulate(saved, case.grad, into, 1.0)
        return into

    def weighted() -> Tensor:
        into.zero_()
        rule.accumulate_weighted(saved, kept, case.grad, case.factors, into, 1.0)
        return into

    return {
        "output": lambda: rule.forward(case.x, case.params)[0],
        "input": lambda: rule.input_gradient(saved, case.grad, case.params),
        "weight": weight,
        "norms": lambda: rule.squares(saved, case.grad)[0],
        "weighted": weighted,
    }[task]


def by_loop(case: Case, task: str, streams: int = 1, channels_last: bool = False) -> Callable[[], Tensor]:
    """The library's own kernels, client after client."""
    order = torch.channels_last if channels_last else torch.contiguous_format
    x, grad = (tensor.contiguous(memory_format=order) for tensor in (case.x, case.grad))
    if task == "weighted":
        grad = grad * case.factors.flatten()[:, None, None, None]
        return by_loop(_with(case, grad=grad), "weight", streams, channels_last)
    sides = [torch.cuda.Stream() for _ in range(streams - 1)] if x.is_cuda else []

    def one(own_x: Tensor, own_grad: Tensor, weight: Tensor) -> Tensor:
        weight = weight[0].contiguous(memory_format=order)
        if task == "output":
            return case.convolve(own_x, weight)
        return case.backward(own_grad, own_x, weight, task == "input")

    def all_clients() -> Tensor:
        if not sides:
            return torch.stack([one(*own) for own in case.each(x, grad, case.weights)])
        main, found = torch.cuda.current_stream(), []
        for side in sides:
            side.wait_stream(main)
        for k, own in enumerate(case.each(x, grad, case.weights)):
            with torch.cuda.stream([main, *sides][k % streams]):
                found.append(one(*own))
        for side in sides:
            main.wait_stream(side)
        return torch.stack(found)

    return all_clients


def by_groups(case: Case, task: str) -> Callable[[], Tensor]:
    """One grouped convolution of the library, with clients as groups."""

    def grouped(images: Tensor) -> Tensor:
        return images.unflatten(0, (case.clients, -1)).transpose(0, 1).flatten(1, 2)

    def run() -> Tensor:
        x, weights = grouped(case.x), case.weights.flatten(0, 1)
        if task == "output":
            return _apart(case.convolve(x, weights, case.clients), case.clients)
        found = case.backward(grouped(case.grad), x, weights, task == "input", case.clients)
        return _apart(found, case.clients) if task == "input" else found

    return run


def _apart(images: Tensor, clients: int) -> Tensor:
    return images.unflatten(1, (clients, -1)).transpose(0, 1).flatten(0, 1)


def by_products(case: Case, task: str, wide: bool = False) -> Callable[[], Tensor]:
    """Unfold, then one product for each client; sums of records in float64 with `wide`."""
    rule = case.rule(Conv2dRule)
    _, (rows, shape) = rule.forward(case.x, case.params)
    into = torch.zeros_like(case.params)
    kind = torch.float64 if wide else torch.float32

    def summed(grad: Tensor) -> Tensor:
        """With the rows as they were kept from the forward pass."""
        grads = grad.flatten(2).transpose(1, 2).reshape(case.clients, -1, case.layer.outs)
        product = torch.bmm(grads.transpose(1, 2).to(kind), rows.to(kind))
        k = case.layer.kernel
        into.zero_()
        product = product.view(case.clients, -1, k, k, case.layer.ins).permute(0, 1, 4, 2, 3)
        case.entry.of(into).add_(product)
        return into

    return {
        "output": lambda: rule.forward(case.x, case.params)[0],
        "input": lambda: rule.input_gradient((rows, shape), case.grad, case.params),
        "weight": lambda: summed(case.grad),
        "weighted": lambda: summed(case.grad * case.factors.flatten()[:, None, None, None]),
    }[task]


def in_pieces(case: Case, task: str) -> Callable[[], Tensor]:
    """Each record's gradient by one product, some records at a time."""
    many = max(1, PIECE // (case.layer.outs * case.patch))

    def norms() -> Tensor:
        pieces = zip(case.x.split(many), case.grad.flatten(2).split(many), strict=True)
        return torch.cat([squared(torch.bmm(grad, case.rows(x)).flatten(1)) for x, grad in pieces])

    return norms


def by_gram(case: Case, task: str) -> Callable[[], Tensor]:
    """From the products of positions with positions."""

    def norms() -> Tensor:
        rows, grads = case.rows(), case.grad.flatten(2).transpose(1, 2)
        if case.positions == 1:
            return outer_squares(rows.squeeze(1), grads.squeeze(1), False)
        return gram_squares(torch.bmm(rows, rows.transpose(1, 2)), grads, case.patch)

    return norms


def _with(case: Case, **changed: Tensor) -> Case:
    made = object.__new__(Case)
    made.__dict__.update(case.__dict__ | changed)
    return made


@contextmanager
def triton_as(precision: str, tiles: str) -> Iterator[None]:
    """Today's kernels in this precision and with these tiles, for all maps."""
    cuda, before = convolution_cuda, dict(vars(convolution_cuda))
    cuda.OUTPUT, cuda.INPUT, cuda.WEIGHTS, most = TILES[tiles]
    cuda._block = lambda size, _=None: before["_block"](size, most)
    cuda._precision, cuda.FEW_POSITIONS = lambda: precision, 0
    try:
        yield
    finally:
        for name in ("OUTPUT", "INPUT", "WEIGHTS", "_block", "_precision", "FEW_POSITIONS"):
            setattr(cuda, name, before[name])


@contextmanager
def library_as(tf32: bool) -> Iterator[None]:
    """The library's kernels, tuned, with TF32 or without."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    yield
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


Method = tuple[Callable[[Case, str], Callable[[], Tensor]], Callable[[], object], tuple[str, ...]]
SUMS = ("output", "input", "weight")


def methods(device: str) -> dict[str, Method]:
    exact, rough = partial(library_as, False), partial(library_as, True)
    found: dict[str, Method] = {
        "im2col": (by_products, exact, (*SUMS, "weighted")),
        "im2col float64": (partial(by_products, wide=True), exact, ("weighted",)),
        "groups": (by_groups, exact, SUMS),
        "loop": (by_loop, exact, (*SUMS, "weighted")),
        "loop channels-last": (partial(by_loop, channels_last=True), exact, SUMS),
        "pieces": (in_pieces, exact, ("norms",)),
        "gram": (by_gram, exact, ("norms",)),
    }
    if device != "cpu":
        found["im2col tf32"] = (by_products, rough, SUMS)
        found["loop tf32"] = (by_loop, rough, SUMS)
        found[f"loop, {STREAMS} streams"] = (partial(by_loop, streams=STREAMS), exact, SUMS)
        if triton is not None:
            ours = partial(by_rule, kind=TritonConv2dRule)
            for precision, tiles in (("ieee", "small"), ("tf32x3", "small"), ("tf32x3", "large"), ("tf32", "small")):
                tasks = (*SUMS, "norms", "weighted") if precision == "ieee" else (*SUMS, "norms")
                found[f"triton {precision} {tiles}"] = (ours, partial(triton_as, precision, tiles), tasks)
    return found


# --- measuring


def truth(case: Case) -> dict[str, Tensor]:
    """All that is asked for, in float64."""
    wide = _with(case, x=case.x.double(), grad=case.grad.double(), weights=case.weights.double())
    found = {task: by_loop(wide, task)() for task in SUMS}
    pieces = [
        torch.bmm(g.flatten(2), case.rows(x)) for x, g in zip(wide.x.split(16), wide.grad.split(16), strict=True)
    ]
    found["norms"] = torch.cat([piece.flatten(1).square().sum(1) for piece in pieces])
    sums = zip(torch.cat(pieces).unflatten(0, (case.clients, -1)), case.factors.double(), strict=True)
    found["weighted"] = torch.stack([torch.tensordot(factors, own, 1) for own, factors in sums])
    return found


def milliseconds(run: Callable[[], Tensor], device: str) -> float:
    """The least of several, on CUDA of a recorded graph."""
    if device == "cpu":
        best = min(_timed(run) for _ in range(2))
        return best * 1e3
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best


def _timed(run: Callable[[], Tensor]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def compile_layer(name: str, clients: int, batch: int, device: str) -> None:
    """Run our kernels once, so that they lie in Triton's cache."""
    case = Case(LAYERS[name], clients, batch, device)
    for method, (make, setting, tasks) in methods(device).items():
        if method.startswith("triton"):
            for task in tasks:
                try:
                    with setting():  # type: ignore[attr-defined]
                        make(case, task)()
                except Exception:  # main tells which
                    continue
    torch.cuda.synchronize()


@torch.no_grad()
def measure(name: str, clients: int, batch: int, device: str) -> None:
    case = Case(LAYERS[name], clients, batch, device)
    exact = truth(case)
    for method, (make, setting, tasks) in methods(device).items():
        for task in tasks:
            found: dict[str, object] = {"layer": name, "task": task, "method": method}
            try:
                with setting():  # type: ignore[attr-defined]
                    run = make(case, task)
                    ms = milliseconds(run, device)
                    made = run().double().flatten()
                true = exact[task].flatten()
                error = float((made - true).abs().max() / true.abs().max())
                found |= {"ms": round(ms, 4), "error": float(f"{error:.1e}")}
                if device != "cpu":
                    found["gflop_s"] = round(work(case) / ms / 1e6)
            except Exception as fault:
                found["failed"] = f"{type(fault).__name__}: {fault}"[:120]
            print(json.dumps(found), flush=True)


def work(case: Case) -> float:
    """Floating-point operations of a plain way, the same for each task."""
    return 2.0 * len(case.x) * case.positions * case.patch * case.layer.outs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    chosen = parser.parse_args()
    names = chosen.layers.split(",")
    rest = (chosen.clients, chosen.batch, chosen.device)
    if chosen.device != "cpu":
        with ProcessPoolExecutor(len(names), mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_layer, names, *([each] * len(names) for each in rest)))
    for name in names:
        measure(name, *rest)


if __name__ == "__main__":
    main()
