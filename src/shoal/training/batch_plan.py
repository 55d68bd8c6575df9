"""Which records enter which local step (boundary `records`), and how each is augmented and dropped out of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from shoal.errors import PluginError
from shoal.gradients.dropout import mixed
from shoal.mechanisms.sampling import Records
from shoal.training.augmentation import drawn as drawn_views
from shoal.training.context import TrainingContext
from shoal.training.round_index import RoundIndex


@dataclass(frozen=True)
class BatchPlan:
    """The records of every batch, [steps, clients, batch], and each client's number of steps.

    `seeds`: what dropout drops of each record, [steps, clients, batch]; `dropout` says how.

    `views`: how each record is augmented, [steps, clients, batch, views].

    `padded`: the same batches, padded with a record of the client's own, which has no weight. A record of another
    client could still turn the update into NaN: 0 times Inf. (A client without records has none; its update counts as
    0 either way.)
    """

    batches: np.ndarray
    steps: np.ndarray
    own: np.ndarray
    seeds: Tensor
    views: np.ndarray | None = None

    @property
    def padded(self) -> np.ndarray:
        """The batches, padded."""
        return np.where(self.batches >= 0, self.batches, self.own[:, None])


def planned(context: TrainingContext, clients: np.ndarray, index: RoundIndex) -> BatchPlan:
    """The batches of these clients, and the views of their records.

    Each client's come from its own stream, so they are the same in any chunk, and at its site in a real federation.
    """
    sampler, local, secure = context.algorithm.records, context.algorithm.local, context.streams.mode == "secure"
    held = context.client_data.records_of(clients)
    streams = partial(context.streams.generators, last=clients.tolist())
    drawn = [
        _drawn(sampler, generator, len(records), local.steps or sampler.steps(len(records), local.epochs), secure)
        for records, generator in zip(held, streams("examples", index.t, index.attempt), strict=True)
    ]
    views = []
    if sampler.augmentations:
        views = [
            drawn_views(generator, (*batch.shape, sampler.augmentations))
            for batch, generator in zip(drawn, streams("augmentations", index.t, index.attempt), strict=True)
        ]
    steps, width = (max(rows.shape[axis] for rows in drawn) for axis in (0, 1))
    if secure and sampler.varies:
        # Matrices of another shape may be multiplied in another order: one more record would change the last digits
        # of every gradient, and with them which way a ReLU goes.
        width = max(width, *(sampler.widest(len(records)) for records in held))
    elif context.graphs and sampler.varies:
        width = _rounded_up(width)
    if secure and context.micro_batch and width > context.micro_batch:
        width = -(-width // context.micro_batch) * context.micro_batch  # for the same reason all pieces are alike
    positions = _side_by_side(drawn, steps, width, -1)
    if not sampler.repeats:
        _refuse_repeats(sampler, positions)
    steps_of_each = np.array([len(rows) for rows in drawn])
    seen = _side_by_side(views, steps, width, 0) if views else None
    if secure and sampler.varies:
        order = _orders(context, clients, index, steps, width)
        positions = np.take_along_axis(positions, order, 2)
        seen = None if seen is None else np.take_along_axis(seen, order[..., None], 2)
    sizes = np.array([len(records) for records in held])
    records = np.append(np.concatenate(held), 0).astype(np.int64)  # one at the end for a client without any
    first = (np.cumsum(sizes) - sizes)[:, None]
    batches = np.where(positions >= 0, records[first + positions], -1)
    own = np.where(sizes > 0, records[first[:, 0]], 0)
    return BatchPlan(batches, steps_of_each, own, _seeds(context, positions, clients, index), seen)


def _drawn(sampler: Records, generator: np.random.Generator, records: int, steps: int, secure: bool) -> np.ndarray:
    """What the scheme draws for a client; a PluginError where that is not what is charged."""
    rows = sampler.draw(generator, records, steps)
    if len(rows) != steps:
        raise PluginError(f"records.sampling {sampler.sampling} drew {len(rows)} steps, and {steps} are charged")
    if rows.max(initial=-1) >= records:
        raise PluginError(f"records.sampling {sampler.sampling} drew a record that its client does not have")
    most = sampler.most(() if sampler.repeats else (records,))
    if secure and sampler.varies:
        most = min(most, sampler.widest(records))
    if rows.shape[1] > most and (widest := (rows >= 0).sum(1).max(initial=0)) > most:
        raise PluginError(
            f"records.sampling {sampler.sampling} drew {widest} records at once; its `most` (in secure mode also its "
            f"`widest`) is {most}"
        )
    return rows


def _refuse_repeats(sampler: Records, batches: np.ndarray) -> None:
    """Raise a PluginError where a batch [..., B] holds a record more often than is charged; -1 is padding."""
    ordered = np.sort(batches, axis=-1)
    if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
        raise PluginError(f"records.sampling {sampler.sampling} drew a record more often than is charged")


def _orders(context: TrainingContext, clients: np.ndarray, index: RoundIndex, steps: int, width: int) -> np.ndarray:
    """A random order of the places of every batch, [steps, clients, width].

    The last digits of a gradient may depend on the place of its record. Drawn in order, one record more would move
    all that follow by a place. In random places those of the others have the same distribution with it as without.
    """
    generators = [context.streams.generator("places", index.t, index.attempt, client) for client in clients.tolist()]
    orders = [generator.permutation(width) for _ in range(steps) for generator in generators]
    return np.array(orders, dtype=np.int64).reshape(steps, len(clients), width)


def _seeds(context: TrainingContext, positions: np.ndarray, clients: np.ndarray, index: RoundIndex) -> Tensor:
    """A seed for each record in each step: of its client's key, the step, and its place among the client's records.

    So it is the same whatever other records are in the batch. Without dropout none is needed: 0.
    """
    found = torch.from_numpy(positions)
    if not context.network.drops:
        return torch.zeros_like(found)
    keys = [context.streams.key("dropout", index.t, index.attempt, client) for client in clients.tolist()]
    steps = torch.arange(len(found)).view(-1, 1, 1) << 40
    return mixed(mixed(steps + found + 1) + torch.tensor(keys).unsqueeze(1))


def _side_by_side(clients: list[np.ndarray], steps: int, width: int, padding: int) -> np.ndarray:
    """What was drawn for each client, [steps, batch, ...], as [steps, clients, batch, ...], padded."""
    found = np.full((steps, len(clients), width, *clients[0].shape[2:]), padding, dtype=np.int64)
    for place, rows in enumerate(clients):
        found[: rows.shape[0], place, : rows.shape[1]] = rows
    return found


def _rounded_up(width: int) -> int:
    """Round up to one of few widths, so that a recorded step fits the next round's batches too."""
    stride = max(4, 1 << max(width.bit_length() - 3, 0))
    return -(-width // stride) * stride
