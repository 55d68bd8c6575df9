"""One round of federated learning, from top to bottom as the papers write it.

Each step is a boundary that a value crosses; the algorithm says what happens there. `run_round` is the server's
half. `SimulatedCohort` runs the clients' half in this process; in a real federation the sites run it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.partitions import Partition
from shoal.errors import RunError
from shoal.gradients import Layout
from shoal.mechanisms.noise_shares import add_shares, on_grid
from shoal.mechanisms.sampling import participation
from shoal.mechanisms.sanitiser import StepMetrics
from shoal.mechanisms.update_clipping import noisy_share, weighed_sum
from shoal.precision import no_autocast
from shoal.random.secure_streams import SecureGenerator, toward_zero
from shoal.training import server
from shoal.training.client_data import on_device
from shoal.training.cohort import Cohort, Population, State, Sum
from shoal.training.cohort_draw import draw_cohort
from shoal.training.context import TrainingContext
from shoal.training.finite import finite_or_zero
from shoal.training.local_training import train
from shoal.training.round_index import RoundIndex

NUMBERS = {
    "weight": float,
    "clients": int,
    "below": float,
    "shares": float,
    "square": float,
    "bad": int,
    "records": float,
    "clipped_records": float,
    "kept_steps": int,
}
"""The numbers of a `PartialSum` that add up, and their types."""


@no_autocast()
def run_round(
    cohort: Cohort, params: Tensor, state: State, index: RoundIndex
) -> tuple[Tensor, State, dict[str, Any]]:
    """Run round t, which must have been charged before.

    Args:
        cohort: The clients, with the algorithm and the random streams.
        params: The model [P].
        state: What was carried over from the round before.
        index: Which round this is, and which attempt at it.

    Returns:
        The new model, the state for the next round, and the round's metrics.
    """
    algorithm, streams = cohort.algorithm, cohort.streams
    t, rounds, attempt = index.t, index.total, index.attempt
    state = dict(state)

    # clients: who takes part, and how many are expected to, which is public
    count = cohort.population.clients
    clients = draw_cohort(cohort, state, index)
    expected = algorithm.clients.expected(t, rounds, count)

    # records, local, per_record, per_step: each client trains on its own records
    # per_update: its update is checked, and clipped before it leaves; the server sees the sum
    total = cohort.train(clients, params, state, index)

    # aggregate: the sum, over the public expected cohort (or, without privacy, by the clients' sizes)
    by_size = algorithm.aggregate.weights == "size" and total.weight > 0
    denominator = total.weight if by_size else expected

    # per_round: noise on the sum, once, scaled by what one client can add to it; an empty cohort gets it too
    noise = signal = 0.0
    per_update, per_round = algorithm.per_update, algorithm.per_round
    if per_round is not None and total.noise is None:
        assert per_update is not None, "noise is in units of a clip"
        z = per_update.update_noise(per_round.multiplier(t, rounds), expected)
        noise = z * total.clip_norm
        signal = float(torch.linalg.vector_norm(total.update, dtype=torch.float64))
        generator = streams.generator("noise", t, attempt)
        per_round = per_round.fitted(participation(algorithm.clients, rounds, count))
        total.update = per_round.add(total.update, z, total.clip_norm, state, generator)
    update = total.update.div_(denominator).to(params.dtype)

    # server: its step, after which the model is released
    params = server.step(algorithm.server, params, update, state, index)

    # adapt: the next round's clips
    if per_update is not None and per_update.counts:
        generator = streams.generator("count noise", t, attempt)
        share = noisy_share(per_update, total.below, total.clients, expected, noise, generator)
        per_update.adapt(state, share)
    if algorithm.per_record is not None and algorithm.per_record.counts:
        algorithm.per_record.adapt(state, total.shares / expected + 0.5)

    metrics: dict[str, Any] = {"clients": total.clients, "expected_clients": expected}
    if math.isfinite(total.clip_norm):
        metrics |= {"clip": total.clip_norm, "noise": noise if total.noise is None else total.noise}
    if noise > 0:  # the norm of the sum of clipped updates over the norm of its noise
        metrics["snr"] = signal / (noise * len(params) ** 0.5)
    return params, state, metrics | total.metrics


@dataclass(frozen=True, eq=False)
class SimulatedCohort(TrainingContext, Cohort):
    """Clients whose records are in this process, trained in batches of clients."""

    def train(self, clients: np.ndarray, params: Tensor, state: State, index: RoundIndex) -> Sum:
        """Train these clients, and sum their updates."""
        total = self.sum(clients, params, state, index)
        exact = torch.float64 if self.streams.mode == "secure" else params.dtype  # for sums on a grid
        total.update = total.update.to(exact)
        if (scale := self._share(total.clip_norm, index)) is not None:
            total.noise = scale * math.sqrt(total.clients)
        total.metrics = total.summary() | self._step_metrics(total, state, index)
        return total

    def sum(self, clients: np.ndarray, params: Tensor, state: State, index: RoundIndex) -> PartialSum:
        """The sum over these clients in float64; those of several processes add up to the cohort's.

        Nothing waits for a GPU before the last chunk: while it trains one, the next one's batches are drawn here.

        In secure mode no update may depend on who else takes part, not even in its last digits, which decide which
        way a ReLU goes: clients are trained one by one.
        """
        per_update, secure = self.algorithm.per_update, self.streams.mode == "secure"
        each = partial(self.workers.map, steady=secure and self.population.clients > 1)
        learn: Callable[[Any], Updates] = partial(self.updates, params=params, state=state, index=index)
        chunks: Iterable[Any] = self.chunker.chunks(clients, self.client_data.sizes(clients), one_by_one=secure)
        norms = None
        if per_update is not None and per_update.needs_cohort_norms:  # its bound depends on the whole cohort's norms
            chunks, learn = list(each(learn, chunks)), lambda trained: trained
            norms = self.cohort_norms([part.norms for part in chunks])
        clip_norm = self.algorithm.bound(state, index.t, index.total, norms)

        update, raw = torch.zeros_like(params, dtype=torch.float64), torch.zeros_like(params)
        numbers = update.new_zeros(len(NUMBERS))
        for parts in each(lambda part: self._sum(learn(part), clip_norm, index), chunks):
            for total, part in zip((update, raw, numbers), parts, strict=True):
                total += part
        return PartialSum.of(update, raw, numbers, clip_norm)

    def cohort_norms(self, own: Sequence[Tensor]) -> Tensor | None:
        """The norms of the whole cohort's updates, given those that were trained here."""
        return torch.cat(list(own)) if own else None

    def updates(self, clients: np.ndarray, params: Tensor, state: State, index: RoundIndex) -> Updates:
        """Local training of a chunk of the clients, and the check of their updates.

        A chunk that is too large for the memory is trained again in halves. Every client draws from its own streams,
        by round and attempt, and keeps nothing before its last step: its update is the same.
        """
        try:
            updates, metrics = train(self, params, clients, index, state)
        except torch.OutOfMemoryError:
            if len(clients) == 1:
                raise RunError(
                    "a single client does not fit into the GPU's memory: set engine.micro_batch, lower "
                    "records.batch, or use --device cpu"
                ) from None
        else:
            updates, norms, bad = finite_or_zero(updates)
            return Updates(clients, updates, norms, bad, metrics)
        self.chunker.halve(len(clients))
        if self.graphs is not None:
            self.graphs.forget()
        torch.cuda.empty_cache()
        halves = [self.updates(half, params, state, index) for half in np.array_split(clients, 2)]
        return Updates.joined(halves)

    def _sum(self, part: Updates, clip_norm: float, index: RoundIndex) -> tuple[Tensor, Tensor, Tensor]:
        """The sum over a chunk of the clients, the same of their raw updates, and the `NUMBERS`."""
        raw = part.updates.sum(0)
        weights = np.ones(len(part.clients))
        if self.algorithm.aggregate.weights == "size":
            weights = self.client_data.sizes(part.clients)
        if self.algorithm.per_update is None and (weights == weights[0]).all():
            update = raw * float(weights[0])
        else:
            left = self.with_shares(protected_updates(self, part, clip_norm, index), part.clients, clip_norm, index)
            update = weighed_sum(left[None], on_device(weights, left.device).to(left.dtype)[None])[0]
        numbers: dict[str, float | Tensor] = {
            "weight": float(weights.sum()),
            "clients": len(part.clients),
            "below": (part.norms <= clip_norm).sum(),
            "shares": part.shares.sum(),
            "square": part.norms.double().square().sum(),
            "bad": 0 if part.bad is None else part.bad.sum(),
            "records": part.metrics.records if part.metrics else 0.0,
            "clipped_records": part.metrics.clipped if part.metrics else 0.0,
            "kept_steps": part.metrics.kept.sum() if part.metrics else 0,
        }
        zero = raw.new_zeros((), dtype=torch.float64)
        return update, raw, torch.stack([zero + numbers[name] for name in NUMBERS])

    def with_shares(self, updates: Tensor, clients: np.ndarray, clip_norm: float, index: RoundIndex) -> Tensor:
        """The updates as they leave where clients add shares of the noise, the same as sites draw."""
        if (scale := self._share(clip_norm, index)) is None:
            return updates
        assert self.algorithm.per_update is not None
        names = [("noise share", index.t, index.attempt, client) for client in clients.tolist()]
        generators: Sequence[np.random.Generator]
        if on_grid(updates, self.streams.mode == "secure"):
            generators = [SecureGenerator(self.streams.keystream(*name)) for name in names]
        else:
            generators = [self.streams.generator(*name) for name in names]
        return add_shares(updates, scale, self.algorithm.per_update.step(clip_norm), generators)

    def _share(self, clip_norm: float, index: RoundIndex) -> float | None:
        """The standard deviation of a client's share of the noise; None where the server adds it to the sum."""
        per_round, when = self.algorithm.per_round, (index.t, index.total)
        if per_round is None:
            return None
        cohort = self.algorithm.clients.expected(*when, self.population.clients)
        return per_round.share(clip_norm, math.ceil(cohort), *when)

    def _step_metrics(self, total: PartialSum, state: State, index: RoundIndex) -> dict[str, float]:
        """Metrics of local steps; clip and noise where they are the same for every step."""
        per_record, per_step = self.algorithm.per_record, self.algorithm.per_step
        if per_record is None:
            return {}
        metrics = {"clipped_records": total.clipped_records / max(total.records, 1.0)}
        if per_step is not None and per_step.test is not None:
            metrics["kept_steps"] = total.kept_steps
        t, rounds, batch = index.t, index.total, self.algorithm.records.batch
        if (clip_norm := per_record.public_bound(state, t, rounds)) is not None:
            metrics["record_clip"] = clip_norm
            if per_step is not None and per_record.unproven is None:
                noise = per_record.update_noise(per_step.multiplier(t, rounds, batch), batch)
                metrics["step_noise"] = noise * clip_norm
        return metrics

    @property
    def layout(self) -> Layout:
        """Where each layer lies in the model's flat parameters; personal ones are not in it."""
        return self.network.layout.shared

    @cached_property
    def population(self) -> Population:
        """The public facts about the clients."""
        return Population.of(self.client_data.partition)

    @property
    def gradients(self) -> dict[str, str]:
        """How gradients are computed."""
        return {"way": self.network.way, "because": self.network.because}

    @property
    def partition(self) -> Partition:
        """Who holds which records."""
        return self.client_data.partition

    def close(self) -> None:
        """Shut the threads down."""
        self.workers.close()


def protected_updates(cohort: Cohort, part: Updates, clip_norm: float, index: RoundIndex) -> Tensor:
    """Boundary `per_update`: the updates [K, P] as they enter the sum; may overwrite the trained ones."""

    def draw(row: int) -> np.random.Generator:
        return cohort.streams.generator("update noise", index.t, index.attempt, int(part.clients[row]))

    per_update = cohort.algorithm.per_update
    if per_update is None:
        return part.updates
    layers = cohort.layout.named_layers
    left = per_update.apply(part.updates, part.norms, clip_norm, index.t, index.total, draw, layers)
    if cohort.streams.mode != "secure":
        return left
    rounded = toward_zero(left, per_update.step(clip_norm)) if cohort.algorithm.per_round is not None else left
    return rounded.double()


@dataclass
class Updates:
    """The checked updates [K, P] of some clients, their norms [K], and which were bad and count as zero."""

    clients: np.ndarray
    updates: Tensor
    norms: Tensor
    bad: Tensor | None = None
    metrics: StepMetrics | None = None

    @classmethod
    def joined(cls, parts: Sequence[Updates]) -> Updates:
        """The updates of several chunks as those of one."""
        return cls(
            np.concatenate([part.clients for part in parts]),
            torch.cat([part.updates for part in parts]),
            torch.cat([part.norms for part in parts]),
            torch.cat([part.bad for part in parts if part.bad is not None]),
            StepMetrics.joined([part.metrics for part in parts if part.metrics]),
        )

    @property
    def shares(self) -> Tensor:
        """Each client's noisy share of gradients below the clip, less 1/2, for methods that count them."""
        if self.metrics is None:
            return torch.zeros_like(self.norms)
        return self.metrics.shares / self.metrics.steps.clamp(min=1) - 0.5


@dataclass
class PartialSum(Sum):
    """The sum over some of the clients, with metrics that only a simulation has."""

    raw: Tensor = field(kw_only=True)
    square: float = 0.0
    bad: int = 0
    records: float = 0.0
    clipped_records: float = 0.0
    kept_steps: int = 0

    @classmethod
    def of(cls, update: Tensor, raw: Tensor, numbers: Tensor, clip_norm: float) -> PartialSum:
        """The sums of protected and of raw updates, and the `NUMBERS`, for which a GPU is waited for here."""
        found = zip(NUMBERS.items(), numbers.tolist(), strict=True)
        return cls(update, clip_norm, raw=raw, **{name: kind(number) for (name, kind), number in found})

    @property
    def numbers(self) -> list[float]:
        """The `NUMBERS`, in order."""
        return [float(getattr(self, name)) for name in NUMBERS]

    def summary(self) -> dict[str, Any]:
        """Metrics, with V_c (variance between clients) and U_s (scale of the update) of Geyer et al. (2017).

        Both are means over parameters.
        """
        size, clients = len(self.raw), max(self.clients, 1)
        scale = float(torch.linalg.vector_norm(self.raw, dtype=torch.float64)) ** 2 / clients**2 / size
        metrics: dict[str, Any] = {
            "bad_updates": self.bad,
            "v_c": max(0.0, self.square / clients / size - scale),
            "u_s": scale,
            "bytes_sent": 4 * size * self.clients,
        }
        return metrics | ({"clipped": 1 - self.below / clients} if math.isfinite(self.clip_norm) else {})
