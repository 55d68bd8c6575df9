"""Local training of many clients at once: the inner loop, from `records` to the client's update.

for each client k:      w_k <- w
    for each step:      g_k <- gradient(w_k; its next batch), clipped and with noise where the method says so;
                               batches larger than memory in pieces (engine.micro_batch)
                        g_k <- g_k + proximal (w_k - w), shortened to max_grad_norm, where the configuration says so
                        w_k <- w_k - lr g_k, or another optimiser's step (training/optimizers), which is undone
                               where the method tests it and it fails (training/step_selection)
    update_k <- w_k - w
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shoal.gradients import Network, RecordTape, Tape
from shoal.gradients.tapes import GradientTape
from shoal.mechanisms.noise_shares import on_grid
from shoal.mechanisms.sanitiser import Sanitiser, StepMetrics, Summed
from shoal.mechanisms.update_clipping import PIECE
from shoal.precision import Precision, autocast, no_autocast, rough
from shoal.random.noise_source import Product
from shoal.random.torch_generator import seeded
from shoal.training.augmentation import augmented
from shoal.training.batch_plan import BatchPlan, planned
from shoal.training.client_data import ClientData, on_device
from shoal.training.context import TrainingContext
from shoal.training.optimizers import OPTIMIZERS, Optimizer, optimizer
from shoal.training.optimizers.gradient_sum import SUM, GradientSum, OnGrid
from shoal.training.optimizers.optimizer import Pulled, Shortened
from shoal.training.round_index import RoundIndex
from shoal.training.sanitise import sanitiser
from shoal.training.step_selection import Selection

OPTIMIZER_STATE = tuple(f"{name}." for kind in OPTIMIZERS.values() for name in kind.names)
"""The prefixes of the state's keys under which clients keep the state of their optimisers."""
PERSONAL = "personal."
"""The prefix of those under which they keep their personal layers."""
KEPT = (*OPTIMIZER_STATE, PERSONAL)
"""The prefixes of all that is a client's own: at a site it never leaves."""

Inputs = tuple[Tensor, ...]
"""For every step: records [K, B], their mask, their weights in the loss, their seeds for dropout, which clients [K]
are active, and the views [K, B, V] of the records, where they are augmented."""

ALIGNED = 16
"""Numbers in 64 bytes."""


@no_autocast()
def train(
    context: TrainingContext, params: Tensor, clients: np.ndarray, index: RoundIndex, state: dict[str, Tensor]
) -> tuple[Tensor, StepMetrics | None]:
    """The updates of these clients after their local steps.

    Args:
        context: What they train with.
        params: The model [P] from which all of them start, but for their personal layers.
        clients: Their numbers [K].
        index: Which round this is.
        state: What is carried between rounds; what clients keep for themselves is written into it.

    Returns:
        The updates [K, P], and the metrics of their steps where records are clipped. Personal layers are not in it.
    """
    plan = planned(context, clients, index)
    inputs = _inputs(context, plan, params)
    with _drawing(context, clients, index):
        steps = _first(context, params, clients, index, state, len(plan.batches))
        steps = context.graphs.run(steps, inputs) if context.graphs else steps.run(inputs)
    if steps.sanitiser and steps.sanitiser.metrics.non_finite:
        with _drawing(context, clients, index):  # the same numbers: no record may choose what is drawn
            steps = _first(context, params, clients, index, state, len(plan.batches)).run_carefully(inputs)
    metrics = steps.sanitiser.metrics if steps.sanitiser else None
    if metrics is not None and steps.selection is not None:
        metrics.kept = steps.selection.kept
    if context.algorithm.sums_gradients:
        return steps.carried[SUM], metrics
    kept = dict(steps.carried) if context.algorithm.local.keep_momentum else {}
    if len(context.personal):
        kept["personal"] = steps.client_params[:, len(params) :]
    if kept:
        _keep(kept, clients, steps.client_params.isfinite().all(1), state)
    return steps.client_params[:, : len(params)].sub_(params), metrics


def _inputs(context: TrainingContext, plan: BatchPlan, params: Tensor) -> Inputs:
    """The plan on the device; without clips the n records of a batch weigh 1/n each, and padding 0."""
    device = params.device
    records = on_device(plan.padded, device)
    mask = on_device(plan.batches >= 0, device).to(params.dtype)
    active = on_device(np.arange(len(records))[:, None] < plan.steps, device).to(params.dtype)
    weights = mask if context.algorithm.per_record else mask / mask.sum(-1, keepdim=True).clamp(min=1)
    views = () if plan.views is None else (on_device(plan.views, device),)
    seeds = on_device(plan.seeds, device) if context.network.drops else torch.zeros_like(records)
    return records, mask, weights, seeds, active, *views


@contextmanager
def _drawing(context: TrainingContext, clients: np.ndarray, index: RoundIndex) -> Iterator[None]:
    """What the model draws, but for dropout, is from a seed of this chunk; other random state is unchanged."""
    if not context.network.draws:
        yield
        return
    seed = context.streams.number("random layers", index.t, index.attempt, int(clients[0]))
    with seeded(seed, context.client_data.device):
        yield


def _first(
    context: TrainingContext,
    params: Tensor,
    clients: np.ndarray,
    index: RoundIndex,
    state: dict[str, Tensor],
    count: int = 1,
) -> ClientSteps:
    """The state before the first of `count` steps: every client has the model, and its own personal layers."""
    algorithm, local = context.algorithm, context.algorithm.local
    client_params = params.expand(len(clients), -1)
    if len(context.personal):
        own = [state.get(f"{PERSONAL}{client}", context.personal).to(params) for client in clients]
        client_params = torch.cat([client_params, torch.stack(own)], 1)
    client_params = aligned(client_params)
    clipping = sanitiser(context, client_params, clients, index, state)
    rate, step = local.rate(index.t, index.total), None
    chosen = GradientSum(rate) if algorithm.sums_gradients else optimizer(local, rate, context.network.layout)
    secure = context.streams.mode == "secure"
    if algorithm.sums_gradients and algorithm.per_update is not None and on_grid(params, secure):
        step = algorithm.per_update.step(algorithm.bound(state, index.t, index.total))
    carried = chosen.state(client_params)
    for name, rows in carried.items():
        for place, client in enumerate(clients):
            if (saved := state.get(f"{name}.{client}")) is not None:
                rows[place] = saved.to(rows.device)
    return ClientSteps(
        context.network, context.client_data, params, client_params, clipping, chosen, carried,
        local.proximal, local.max_grad_norm, context.micro_batch, context.precision, step,
        Selection.of(context, client_params, clients, index, count),
    )  # fmt: skip


def _keep(kept: dict[str, Tensor], clients: np.ndarray, finite: Tensor, state: dict[str, Tensor]) -> None:
    """Write what each client keeps for its next round; one whose training diverged keeps what it had before."""
    for name, rows in kept.items():
        for client, row, trained in zip(clients, rows, finite.tolist(), strict=True):
            if trained:
                state[f"{name}.{client}"] = row.to("cpu", copy=True)


@dataclass
class ClientSteps:
    """The steps of K clients from one model [P], each with its own parameters [K, P].

    `carried`: what the optimiser carries from step to step, by name, with a row for each client. `micro_batch`: how
    many records of a client are run at once; None: its whole batch. `grid`: the step to whose multiples each record
    is rounded, if any. `selection`: tests each step, where the method does.
    """

    network: Network
    client_data: ClientData
    params: Tensor
    client_params: Tensor
    sanitiser: Sanitiser | None
    optimizer: Optimizer
    carried: dict[str, Tensor]
    proximal: float = 0.0
    max_grad_norm: float | None = None
    micro_batch: int | None = None
    precision: Precision = "auto"
    grid: float | None = None
    selection: Selection | None = None

    def run(self, inputs: Inputs) -> ClientSteps:
        """Run one step for each row of the inputs."""
        plain = self.optimizer.plain and self.sanitiser is None and not self.proximal and not self.max_grad_norm
        width = inputs[0].shape[2]
        rows = inputs[-1].shape[2:].numel() if len(inputs) > 5 else width  # a row for each view
        defers = plain and width <= (self.micro_batch or width) and self.precision != "bf16"
        with self.network.deferred_updates(self.params, self.client_params, rows) if defers else nullcontext():
            for step in zip(*inputs, strict=True):
                self.step(*step)
        return self

    def run_carefully(self, inputs: Inputs) -> ClientSteps:
        """The same, where some gradient has no finite norm: it is left out, and its client's noise is not.

        One such record would turn its client's update into NaN, and the check of updates that into 0, which would be
        visible. It is dropped from the same tape that found it: in another pass random layers would draw again.
        """
        for step in zip(*inputs, strict=True):
            self.step(*step, carefully=True)
        return self

    def step(self, *inputs: Tensor, carefully: bool = False) -> None:
        """One step of every client; `carefully` leaves out gradients without a finite norm."""
        if self.selection is not None:
            self._tried(self.selection, *inputs, carefully=carefully)
            return
        with rough(self.precision, self.params) if self.sanitiser is None else nullcontext():
            self._step(*inputs, carefully=carefully)

    def _tried(self, selection: Selection, *inputs: Tensor, carefully: bool) -> None:
        """One step, which is undone for the clients whose test it fails."""
        records, mask, weights, seeds, active, *views = inputs
        active = selection.active(active)
        if not bool(active.any()):
            return
        before = {"": self.client_params.clone()} | {name: rows.clone() for name, rows in self.carried.items()}
        self._step(records, mask, weights, seeds, active, *views, carefully=carefully)
        failed = ~selection.passed(before[""], self.client_params, active)
        for name, rows in before.items():
            (self.carried[name] if name else self.client_params)[failed] = rows[failed]

    def _step(
        self,
        records: Tensor,
        mask: Tensor,
        weights: Tensor,
        seeds: Tensor,
        active: Tensor,
        *views: Tensor,
        carefully: bool = False,
    ) -> None:
        backward = self._backward_carefully if carefully else self._backward
        width, most = records.shape[1], self.micro_batch or records.shape[1]
        parts = records, mask, weights, seeds, *views
        pieces = zip(*(torch.split(part, most, 1) for part in parts), strict=True)
        if width > most and not isinstance(self.optimizer, GradientSum):
            self._move(self._summed((backward(*piece) for piece in pieces), width, active), active)
            return
        for piece in pieces:  # one, or those of a sum
            self._move(self._sanitised(*backward(*piece), active), active)

    def _sanitised(self, tape: Tape, mask: Tensor, active: Tensor) -> Tape:
        """The gradient of a batch, clipped and with noise where the method says so."""
        if self.sanitiser is None:
            return tape
        return self.sanitiser(tape, mask, active)  # type: ignore[arg-type]  # such networks give RecordTapes

    def _backward(
        self, records: Tensor, mask: Tensor, weights: Tensor, seeds: Tensor, views: Tensor | None = None
    ) -> tuple[Tape, Tensor]:
        """The tape of these records, and which of them count. The loss of a record is the mean over its views."""
        x, y = self.client_data.rows(records)
        count = 1 if views is None else views.shape[2]
        if views is not None:
            x, y, weights = augmented(x, views), *(rows.repeat_interleave(count, 1) for rows in (y, weights / count))
            seeds = (seeds.unsqueeze(2) + torch.arange(count, device=seeds.device)).flatten(1)
        with rough(self.precision, self.params), autocast(self.precision, self.params):
            tape = self.network.backward(self.client_params, x, y, weights, seeds)
        if self.sanitiser is None:
            return tape, mask
        if views is not None:
            gradients = tape.records(count)  # type: ignore[attr-defined]  # such networks give RecordTapes
            tape = GradientTape.of(self.network.layout, gradients)
        if self.grid:
            tape = OnGrid(tape, self.grid, self.network.layout.named_layers)  # type: ignore[arg-type]
        return tape, mask

    def _backward_carefully(
        self, records: Tensor, mask: Tensor, weights: Tensor, seeds: Tensor, *views: Tensor
    ) -> tuple[Tape, Tensor]:
        """The same without records whose gradient has no finite norm."""
        assert self.sanitiser is not None
        tape, mask = self._backward(records, mask, weights, seeds, *views)
        without = Without(tape, self.sanitiser.non_finite(tape))  # type: ignore[arg-type]
        return without, mask * ~without.dropped

    def _summed(self, pieces: Iterator[tuple[Tape, Tensor]], width: int, active: Tensor) -> Tape:
        """The gradient of a batch of this width, of which one piece at a time is in memory.

        Clipped records are summed as in a whole batch: few in float32, many in float64 (summed_products says why).
        """
        many = self.sanitiser is not None and width > PIECE
        total = torch.zeros_like(self.client_params, dtype=torch.float64 if many else None)
        if self.sanitiser is not None:
            return self.sanitiser.in_pieces(pieces, total, active)  # type: ignore[arg-type]
        for tape, _ in pieces:
            tape.accumulate(total, 1.0)
            del tape  # before the next one is made
        return Summed(total)

    def _move(self, tape: Tape, active: Tensor) -> None:
        """A step of the optimiser, for the clients that have a step left."""
        if self.proximal:
            places = self.network.layout.shared.trained  # personal layers have no model to stay near
            tape = Pulled(tape, self.client_params, self.params, self.proximal, places, active)
        if self.max_grad_norm is not None:
            tape = Shortened(tape, self.max_grad_norm)
        self.optimizer.step(self.client_params, tape, active, self.carried)

    @property
    def constants(self) -> object:
        """The constants of a recorded step."""
        clipping = None if self.sanitiser is None else self.sanitiser.values
        return self.optimizer, self.proximal, self.max_grad_norm, self.grid, clipping

    def copied(self) -> ClientSteps:
        """A copy with its own memory."""
        return replace(
            self,
            params=self.params.clone(),
            client_params=aligned(self.client_params),
            sanitiser=deepcopy(self.sanitiser),
            carried={name: rows.clone() for name, rows in self.carried.items()},
        )

    def begin(self, other: ClientSteps) -> None:
        """Take over another one's values, in the same memory."""
        self.params.copy_(other.params)
        self.client_params.copy_(other.client_params)
        for name, rows in self.carried.items():
            rows.copy_(other.carried[name])
        if self.sanitiser is not None and other.sanitiser is not None:
            self.sanitiser.begin(other.sanitiser)


class Without:
    """A tape without some of its records: a gradient without a finite norm is clipped to 0."""

    def __init__(self, tape: RecordTape, dropped: Tensor) -> None:
        self._tape, self.dropped, self.layers = tape, dropped, tape.layers
        self._squares = tape.squares().masked_fill(dropped, float("inf"))
        tape.make_finite()

    def squares(self) -> Tensor:
        """The squared norm of every gradient, in float64."""
        return self._squares

    def accumulate(self, into: Tensor, scale: float, factors: Tensor | None = None) -> None:
        """into[K, P] += scale x gradient."""
        self._tape.accumulate(into, scale, factors)

    def accumulate_except(
        self, left: Callable[[Product], bool], into: Tensor, scale: float, factors: Tensor
    ) -> list[Product]:
        """The same, but for products that are added together with the noise."""
        return self._tape.accumulate_except(left, into, scale, factors)

    def records(self) -> Tensor:
        """The gradients of single records, [K, B, P]."""
        return self._tape.records().masked_fill(self.dropped.unsqueeze(2), 0.0)

    def make_finite(self) -> None:
        """Nothing to do: the tape is finite already."""


def aligned(vectors: Tensor) -> Tensor:
    """A copy whose rows begin at multiples of 64 bytes, so that a kernel may read several numbers at once."""
    size = vectors.shape[1]
    rows = vectors.new_empty(len(vectors), -(-size // ALIGNED) * ALIGNED)[:, :size]
    return rows.copy_(vectors)
