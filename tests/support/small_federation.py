"""Any registered method, cut down so that a round of it takes milliseconds: what the contract suite plays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import binom
from scipy.stats import chi2, norm
from torch import Tensor, nn

import shoal
from shoal.accounting.claims import Observer, Unit
from shoal.accounting.events import Event, Gaussian, Sampled, Unbounded
from shoal.algorithms import algorithm, algorithms
from shoal.algorithms.base import BOUNDARIES, Algorithm, Server
from shoal.algorithms.charges import event
from shoal.audit.testbed import silent as silent
from shoal.data import Dataset, Partition, load, partition
from shoal.gradients import Network, network
from shoal.mechanisms.correlated import Correlated
from shoal.mechanisms.mechanism import altered
from shoal.mechanisms.sampling import Clients
from shoal.mechanisms.setting import Setting
from shoal.mechanisms.update_clipping import QuantileClip
from shoal.random.streams import Streams
from shoal.training import context
from shoal.training import round as round_module
from shoal.training.cohort import Cohort, Sum
from shoal.training.engine_settings import Settings
from shoal.training.round import SimulatedCohort, run_round
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import Trainer, simulate

CLIENTS, COHORT, ROUNDS = 10, 4, 4
SETTING = Setting(CLIENTS, ROUNDS, layers=1, sizes=(10,))
CPU = torch.device("cpu")
WIDE = 1600  # outputs of a model of 104,000 parameters, for many numbers of noise in one round
ALPHA = 1e-7  # how often a statistical check may fail by chance
FAR = float(norm.isf(ALPHA / 2))  # 5.3 standard deviations


@dataclass
class State:
    """What a round leaves to the next one: the model, and what is carried besides."""

    model: Tensor
    memory: dict[str, Tensor]


def small(name: str, **changes: object) -> Algorithm:
    """The method with a small cohort, small batches and few steps; `changes` replace whole boundaries."""
    record = algorithm(name)
    few = {
        "clients": record.clients if record.clients.sampling == "all" else replace(record.clients, cohort=COHORT),
        "records": replace(record.records, batch=min(record.records.batch, 5)),
        "local": replace(record.local, epochs=1, steps=record.local.steps and min(record.local.steps, 2)),
    }
    if isinstance(record.per_update, QuantileClip) and record.per_round is not None:
        # The same share of the noise goes to the count, whatever the cohort.
        noise = record.per_round.multiplier(0, ROUNDS)
        few["per_update"] = replace(record.per_update, count_noise_multiplier=noise / COHORT)
    return replace(record, **(few | changes))


def plain_server(record: Algorithm) -> Algorithm:
    """The method with a server that only adds: the new model then is the old one plus the mean."""
    return replace(record, server=Server())


def idle(record: Algorithm) -> Algorithm:
    """The method whose clients learn nothing: every update is 0, and a sum holds noise only."""
    return replace(record, local=replace(record.local, lr=0.0))


def model_for(record: Algorithm) -> str:
    """The name of the smallest model that it can train."""
    return "digits-mlp" if record.local.personal else "linear"


def keys(record: Algorithm) -> dict[str, object]:
    """How a configuration would turn the registered method into this record."""
    told: dict[str, object] = {"algorithm": record.name}
    for boundary in BOUNDARIES:
        ours, theirs = getattr(record, boundary), getattr(algorithm(record.name), boundary)
        for field in fields(ours) if ours is not None else ():
            if getattr(ours, field.name) != getattr(theirs, field.name):
                told[f"{boundary}.{field.name}"] = getattr(ours, field.name)
    return told


@cache
def digits() -> Dataset:
    """A hundred digits of the embedded set."""
    whole = load("digits")
    rows = slice(100)
    return replace(
        whole,
        train_x=whole.train_x[rows],
        train_y=whole.train_y[rows],
        test_x=whole.test_x[rows],
        test_y=whole.test_y[rows],
    )


def parted(clients: int = CLIENTS) -> Partition:
    return partition("iid", digits().train_y, clients=clients, generator=Streams(0).generator("partition"))


def with_much_to_remember(name: str) -> Algorithm:
    """The method with every kind of state that may go from round to round."""
    record = small(name)
    own = {} if record.sums_gradients else {"momentum": 0.5, "keep_momentum": True}
    return replace(
        record,
        local=replace(record.local, **own),
        server=replace(record.server, momentum=0.5, average=0.9),
    )


def finished(record: Algorithm, folder: Path, **more: Any) -> shoal.Result:
    """A whole run."""
    settings = keys(record) | {"data.clients": CLIENTS, "rounds": ROUNDS, "engine.threads": 1}
    settings |= {"model": model_for(record)} | more.pop("change", {})
    with one_thread():
        return shoal.run(settings, data=digits(), runs=folder, no_guarantee=True, device="cpu", **more)


_NETWORKS: dict[tuple[Any, ...], Network] = {}


@contextmanager
def compared_once(*model: Any) -> Iterator[None]:
    """What compares ways with plain gradients, which takes longer than a round, does so once for such a model."""

    def known(*given: Any, per_record: bool, personal: Any, **more: Any) -> Network:
        key = (*model, per_record, personal)
        if key not in _NETWORKS:
            _NETWORKS[key] = network(*given, per_record=per_record, personal=personal, **more)
        return copy(_NETWORKS[key])  # some tests change it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "network", known)
        yield


def simulator(
    record: Algorithm,
    *,
    seed: int = 5,
    clients: int = CLIENTS,
    width: int = 10,
    layers: int = 1,
    settings: Settings | None = None,
) -> Trainer[SimulatedCohort]:
    """A linear model on the hundred digits, or one of more layers; `width` outputs make many parameters.

    A method with personal layers has one layer more, which is shared.
    """
    torch.default_generator.manual_seed(3)
    layers += bool(record.local.personal)
    hidden = [layer for _ in range(layers - 1) for layer in (nn.Linear(64, 64), nn.Tanh())]
    module = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, width))
    settings = settings or Settings("cpu", threads=1)
    with one_thread(), compared_once(layers, width, settings):
        return simulate(
            record, module, digits(), parted(clients), rounds=ROUNDS, streams=Streams(seed), settings=settings
        )


def twin(sim: Trainer, **changes: object) -> Trainer:
    """The same simulation with another algorithm, federation or streams."""
    other = copy(sim)
    other.cohort = replace(sim.cohort, **changes)
    return other


def play(sim: Trainer, t: int = 0, attempt: int = 0, memory: dict[str, Tensor] | None = None):
    """Round t from a model of zeros, so that under a plain server the new model is the mean update itself."""
    with one_thread():
        params, state, told = run_round(
            sim.cohort, torch.zeros_like(sim.params), memory or {}, RoundIndex(t, ROUNDS, attempt)
        )
    return State(params, state), told


class StillCohort(Cohort):
    """A simulation's clients who learn nothing, with a model of four numbers: a round is the server's half only.

    `came` says who was asked to train, in order; with `noise` 0 the server draws none either.
    """

    layout = population = None

    def __init__(self, sim: Trainer, noise: float | None = None) -> None:
        self.noise = noise
        self.algorithm, self.streams, self.population = (
            sim.cohort.algorithm,
            sim.cohort.streams,
            sim.cohort.population,
        )
        self.came: list[int] = []

    def train(self, clients: np.ndarray, params: Tensor, state: dict[str, Tensor], index: RoundIndex) -> Sum:
        self.came += clients.tolist()
        bound = self.algorithm.per_update.bound(state, index.t, index.total, None)
        count, update = len(clients), torch.zeros_like(params, dtype=torch.float64)
        return Sum(update, bound, weight=count, clients=count, below=count, noise=self.noise)

    def play(self, t: int, attempt: int) -> tuple[State, dict[str, float]]:
        """Round t from a model of zeros."""
        params, state, told = run_round(self, torch.zeros(4), {}, RoundIndex(t, ROUNDS, attempt))
        return State(params, state), told


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take five times as long for so little work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def total(sim: Trainer, t: int = 0, attempt: int = 0, memory: dict[str, Tensor] | None = None):
    """The sum that is released (the mean times the public cohort), in float64, and what is told of the round."""
    state, told = play(sim, t, attempt, memory)
    return state.model.double() * told["expected_clients"], told


def stubbed(monkeypatch: pytest.MonkeyPatch, updates_of: Callable[[int, int], Tensor]) -> None:
    """Put updates of our own making in the place of local training."""

    def train(context, model, clients, index, memory) -> tuple[Tensor, None]:
        return torch.stack([updates_of(int(client), len(model)) for client in clients]), None

    monkeypatch.setattr(round_module, "train", train)


def of_one_length(client: int, size: int) -> Tensor:
    """An update of norm .01 that is this client's alone."""
    update = torch.from_numpy(np.random.default_rng(client).normal(size=size)).float()
    return update * (0.01 / update.norm())


def restricted(record: Algorithm, kept: tuple[int, ...]) -> Algorithm:
    """Sampling as ever, of which only some clients really come."""
    scheme = type(record.clients)

    def draw(self: Clients, *given: object) -> np.ndarray:
        drawn = scheme.draw(self, *given)
        return drawn[np.isin(drawn, kept)]

    return replace(record, clients=altered(record.clients, draw=draw))


def cohort(sim: Trainer, t: int = 0, attempt: int = 0) -> list[int]:
    """Who takes part in a round."""
    stream = sim.cohort.streams.generator("clients", t, attempt)
    return sim.cohort.algorithm.clients.draw(stream, t, ROUNDS, len(sim.cohort.client_data)).tolist()


def against_release(record: Algorithm, t: int = 0, setting: Setting = SETTING) -> Event:
    """What a round is charged for a client, against those who see the released models."""
    return event(record, setting, t, "client", "release")


def noise_charged(charged: Event) -> float:
    """The noise multiplier in an event."""
    inner = charged.event if isinstance(charged, Sampled) else charged
    assert isinstance(inner, Gaussian)
    return inner.noise


def update_noise(record: Algorithm, t: int = 0) -> float:
    """What the sum of updates must carry, in units of the clip, so that the event's noise is true.

    Where the norms are counted as well, the count tells something too: in units of what one client adds to it, 1/2,
    its noise is 2 sigma_b, and both together must amount to the event's. Where rounds share noise it is a round's
    fresh noise, which hides the client that came first and then in its turns.
    """
    charged = noise_charged(against_release(record, t)) * reach(record, t)
    if not isinstance(record.per_update, QuantileClip):
        return charged
    count = 2 * record.per_update.count_noise_multiplier * record.clients.expected(t, ROUNDS, CLIENTS)
    return (charged**-2 - count**-2) ** -0.5


def weights(record: Algorithm) -> np.ndarray:
    """Where rounds share noise: the power series of ((1 - x) (1 - momentum x))^(-1/2), as long as there are bands."""
    if not isinstance(record.per_round, Correlated):
        return np.ones(1)
    j = np.arange(record.per_round.bands)
    root = binom(-0.5, j) * (-1.0) ** j
    return np.convolve(root, root * record.per_round.momentum**j)[: len(j)]


def reach(record: Algorithm, t: int) -> float:
    """How many clips of client 0 are in what round t gives away: its turns so far, each by its weight."""
    if record.clients.sampling != "cyclic" and not isinstance(record.per_round, Correlated):
        return 1.0
    turns = CLIENTS // COHORT + 1 if record.clients.sampling == "cyclic" else 1
    ages = t - np.arange(0, t + 1, turns)
    return float(np.pad(weights(record), (0, t + 1))[ages].sum())


def fresh(record: Algorithm, rounds: np.ndarray) -> np.ndarray:
    """The noise of rounds one after the other, with what they share added up again: all that can be worked out."""
    shares = np.pad(weights(record), (0, len(rounds)))
    return np.stack([shares[: t + 1] @ rounds[t::-1] for t in range(len(rounds))])


def chi_square_fits(numbers: np.ndarray, spare: float = 1.0) -> bool:
    """Is the sum of squares what it is for standard normal numbers? `spare` is for those that are only nearly so."""
    n = numbers.size
    low, high = (chi2.ppf(p, n) / n - 1 for p in (ALPHA / 2, 1 - ALPHA / 2))
    return spare * low <= float(np.square(numbers).sum()) / n - 1 <= spare * high


def _proven(record: Algorithm, unit: Unit, observer: Observer) -> bool:
    return not isinstance(event(record, SETTING, 0, unit, observer), Unbounded)


NAMES = list(algorithms())
BOUNDED = [name for name in NAMES if algorithm(name).per_step is None or algorithm(name).per_round is not None]
BOUNDED = [name for name in BOUNDED if _proven(small(name), "client", "release")]
"""Those that protect clients, by noise on updates or on their sum."""
FOR_RECORDS = [name for name in NAMES if algorithm(name).per_step is not None]
PER_EXAMPLE = [name for name in FOR_RECORDS if _proven(small(name), "record", "client-process")]
"""Those that protect records, by noise in every step."""
SHARED = [name for name in NAMES if algorithm(name).sums_gradients]
"""Those that protect records, by noise on the sum that sites share."""
UNPROVEN = [name for name in NAMES if name not in BOUNDED + PER_EXAMPLE + SHARED]
ADAPTIVE = [name for name in BOUNDED if isinstance(algorithm(name).per_update, QuantileClip)]
EQUAL = [name for name in NAMES if algorithm(name).aggregate.weights == "equal"]
IN_TURN = [name for name in BOUNDED if algorithm(name).clients.sampling == "cyclic"]
"""Those whose clients are not sampled."""
