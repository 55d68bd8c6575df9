"""The columns of any_network.py: each is a way to train all clients, timed in milliseconds for one step of them."""

from __future__ import annotations

import gc
import itertools
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, func, nn

from against_opacus.plain_client import Client
from any_networks.networks import Case
from shoal.algorithms import algorithm
from shoal.algorithms.base import Aggregate, Algorithm, Local
from shoal.data.dataset import Dataset
from shoal.data.partitions import Partition, partition
from shoal.mechanisms.gaussian import Gaussian, StepNoise
from shoal.mechanisms.record_clipping import RecordClip
from shoal.mechanisms.sampling import Clients, Records
from shoal.mechanisms.update_clipping import Clip
from shoal.random.streams import Streams
from shoal.training.engine_settings import Settings
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import Trainer, simulate

LR, CLIP, NOISE = 0.01, 1.0, 1.0
OPACUS_MODES = ("hooks", "ghost", "ew", "functorch")
Found = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """A network at one scale on one device, and how long a cell may take to measure."""

    case: Case
    clients: int
    batch: int
    steps: int
    device: torch.device
    repeats: int
    seconds: float

    def records(self) -> tuple[Tensor, Tensor]:
        return self.case.records(self.clients * self.steps * self.batch)

    def on_device(self) -> tuple[nn.Module, Tensor, Tensor]:
        x, y = self.records()
        return self.case.module().to(self.device), x.to(self.device), y.to(self.device)

    def order(self, client: int) -> Tensor:
        """The rows of a client's batches."""
        each = self.steps * self.batch
        return (torch.randperm(each) + client * each).to(self.device)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, run: Callable[[], object]) -> tuple[float, float]:
        """Seconds that passed, and seconds of all processor cores, which a busy machine changes less."""
        self.wait()
        start = time.perf_counter(), time.process_time()
        run()
        self.wait()
        return time.perf_counter() - start[0], time.process_time() - start[1]

    def of_rounds(self, play: Callable[[], object]) -> Found:
        """The best of some rounds; the first one, which compiles and records, does not count."""
        first, _ = self.timed(play)
        times = [self.timed(play)]
        while len(times) < self.repeats and first + sum(wall for wall, _ in times) + times[-1][0] < self.seconds:
            times.append(self.timed(play))
        wall, cpu = (min(column) / self.steps * 1e3 for column in zip(*times, strict=True))
        return {"ms": wall, "cpu_ms": cpu, "first_ms": first / self.steps * 1e3}

    def of_clients(self, train: Callable[[int], object]) -> Found:
        """The same where clients are trained one by one: of some of them where all would take too long."""
        first, _ = self.timed(lambda: train(0))
        one, _ = self.timed(lambda: train(0))
        count = max(1, min(self.clients, int(self.seconds / (self.repeats + 1) / one)))
        found = self.of_rounds(lambda: [train(client) for client in range(count)])
        scaled = {key: found[key] * self.clients / count for key in ("ms", "cpu_ms")}
        scaled["first_ms"] = first / self.steps * 1e3 * self.clients
        return scaled | ({} if count == self.clients else {"of_clients": count})


def plain(bench: Bench) -> Found:
    """nn.Module and torch.optim.SGD, client after client, under the best of the settings that suit it."""
    cores = torch.get_num_threads()
    threads = sorted({1, cores}) if bench.device.type == "cpu" else (cores,)
    layouts = (False, True) if bench.case.pictures else (False,)
    settings = list(itertools.product(threads, layouts))
    shared = replace(bench, seconds=bench.seconds / len(settings))
    found = []
    for count, last in settings:
        torch.set_num_threads(count)
        told = shared.of_clients(sequential(bench, Client, "eager", last))
        found.append(told | {"setting": {"threads": count, "channels_last": last}})
    torch.set_num_threads(cores)
    return min(found, key=lambda told: told["ms"])


def sequential(bench: Bench, kind: type[Client], mode: str, channels_last: bool = False) -> Callable[[int], object]:
    """A client's training from the first weights."""
    module, x, y = bench.on_device()
    task = {"batch": bench.batch, "lr": LR, "clip": CLIP, "noise": NOISE}
    client = kind(module, task, mode, channels_last)
    for layer in client.module.modules():
        if isinstance(layer, nn.RNNBase):
            layer.flatten_parameters()  # which a copy of it has lost
    start = [parameter.detach().clone() for parameter in client.parameters]

    def train(number: int) -> None:
        client.load(start)
        client.train(x, y, bench.order(number))

    return train


def graph(bench: Bench) -> Found:
    """One client's SGD step as a CUDA graph, replayed for one client after another."""
    if bench.device.type != "cuda":
        return {"skipped": "needs CUDA"}
    module, x, y = bench.on_device()
    parameters = [p for p in module.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in parameters]
    own_x, own_y = x[: bench.batch].clone(), y[: bench.batch].clone()

    def step() -> None:
        gradients = torch.autograd.grad(F.cross_entropy(module(own_x), own_y), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-LR)

    recorded = _recorded(step)

    @torch.no_grad()
    def train(number: int) -> None:
        torch._foreach_copy_(parameters, start)
        for rows in bench.order(number).split(bench.batch):
            own_x.copy_(x[rows])
            own_y.copy_(y[rows])
            recorded.replay()

    return bench.of_clients(train)


def _recorded(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        step()
    return recorded


def vmap(bench: Bench) -> Found:
    """torch.func.vmap over clients, compiled on CUDA."""
    module, x, y = bench.on_device()
    start, loss = _functional(module)
    gradients = func.vmap(func.grad(loss), in_dims=(0, None, 0, 0), randomness="different")
    frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}

    def step(params: dict[str, Tensor], records: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = gradients(params, frozen, records, labels)
        return {name: p - LR * found[name] for name, p in params.items()}

    step = torch.compile(step) if bench.device.type == "cuda" else step

    def play() -> None:
        params = {name: p.expand(bench.clients, *p.shape).clone() for name, p in start.items()}
        order = torch.stack([bench.order(client) for client in range(bench.clients)])
        for rows in order.split(bench.batch, 1):
            params = step(params, x[rows], y[rows])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bench.of_rounds(play)


def per_example(bench: Bench) -> Found:
    """Every record's gradient by torch.func.vmap, in memory, clipped, with noise; client after client."""
    module, x, y = bench.on_device()
    start, loss = _functional(module)
    gradients = func.vmap(func.grad(loss), in_dims=(None, None, 0, 0), randomness="different")
    frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}

    def train(number: int) -> None:
        params = dict(start)
        for rows in bench.order(number).split(bench.batch):
            found = gradients(params, frozen, x[rows].unsqueeze(1), y[rows].unsqueeze(1))
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
            factors = (CLIP / (norms + 1e-6)).clamp(max=1.0)
            for name, rows_of in found.items():
                total = torch.einsum("b,b...->...", factors, rows_of)
                noise = torch.randn_like(total) * NOISE * CLIP
                params[name] = params[name] - LR / bench.batch * (total + noise)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bench.of_clients(train)


def _functional(module: nn.Module) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
    """The trained parameters, and the loss of some records as a function of them and of the frozen ones."""
    start = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}

    def loss(params: dict[str, Tensor], frozen: dict[str, Tensor], records: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(func.functional_call(module, params | frozen, (records,)), labels)

    return start, loss


def opacus(bench: Bench) -> Found:
    """The best of Opacus' modes; a network is changed as its ModuleValidator says, and has no in-place layers."""
    try:
        from opacus.validators import ModuleValidator

        from against_opacus.opacus_client import OpacusClient
    except ImportError as error:
        return {"skipped": f"no Opacus: {error}"}

    def fit() -> nn.Module:
        module = ModuleValidator.fix(bench.case.module().train())
        for layer in module.modules():
            if hasattr(layer, "inplace"):
                layer.inplace = False
        return module

    fitted = replace(bench, case=replace(bench.case, build=fit), seconds=bench.seconds / len(OPACUS_MODES))
    modes: dict[str, float | str] = {}
    best: Found = {}
    warnings.simplefilter("ignore")  # of its hooks, at every step
    for mode in OPACUS_MODES:
        try:
            told = fitted.of_clients(sequential(fitted, OpacusClient, mode))
        except Exception as error:
            modes[mode] = reason(error)
            continue
        modes[mode] = told["ms"]
        best = told | {"mode": mode} if told["ms"] <= best.get("ms", told["ms"]) else best
    return best | {"modes": modes} | ({} if best else {"failed": next(iter(modes.values()))})


def client_level(bench: Bench) -> Found:
    """Shoal: every client's update is clipped, and the sum gets noise."""
    return _shoal(bench, per_update=Clip(CLIP), per_round=Gaussian(NOISE))


def record_level(bench: Bench) -> Found:
    """Shoal: every record's gradient is clipped, and every step gets noise."""
    return _shoal(bench, per_record=RecordClip(CLIP), per_step=StepNoise(NOISE))


def _shoal(bench: Bench, **private: Any) -> Found:
    x, y = bench.records()
    played = simulated(bench, x, y, replace(fedavg(bench), **private))
    try:
        found = bench.of_rounds(lambda: run_round(played.cohort, played.params, played.state, RoundIndex(0, 1)))
    finally:
        played.close()
    return found | {"way": way(played)}


def fedavg(bench: Bench) -> Algorithm:
    return replace(
        algorithm("fedavg"),
        clients=Clients("all"),
        records=Records("shuffled", bench.batch),
        local=Local(epochs=1, lr=LR),
        aggregate=Aggregate("equal"),
    )


def simulated(bench: Bench, x: Tensor, y: Tensor, method: Algorithm) -> Trainer[Any]:
    data = Dataset("synthetic", x, y, x[:100], y[:100], tuple("0123456789"))
    parts: Partition = partition("iid", y, clients=bench.clients, generator=Streams(0).generator("partition"))
    settings = Settings(str(bench.device), threads=torch.get_num_threads())
    return simulate(method, bench.case.module(), data, parts, rounds=1, streams=Streams(0), settings=settings)


def way(played: Trainer[Any]) -> str:
    """How Shoal computed the gradients."""
    network = played.cohort.network
    return str(getattr(network, "way", "rules" if network.batched else type(network).__name__))


COLUMNS: dict[str, Callable[[Bench], Found]] = {
    "plain": plain,
    "client": client_level,
    "record": record_level,
    "graph": graph,
    "per-example": per_example,
    "opacus": opacus,
    "vmap": vmap,
}
"""By name, in the order in which they are measured: what is most likely to hang comes last."""


def measure(bench: Bench, columns: list[str]) -> Iterator[tuple[str, Found]]:
    """The cells of a network, one after another, each with the peak of its memory."""
    for column in columns:
        before = _peak(bench.device, begin=True)
        try:
            found = COLUMNS[column](bench)
        except Exception as error:
            found = {"failed": reason(error)}
        yield column, found | {"memory_mib": (_peak(bench.device) - before) / 2**20}
        gc.collect()


def _peak(device: torch.device, begin: bool = False) -> int:
    """Bytes at most in use so far: on CUDA by tensors, on a CPU by the process, with what it imported."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if begin:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return torch.cuda.max_memory_allocated()


def reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
