"""Evaluation of a model on the held-out rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.calling import call, evaluating
from shoal.copying import copied
from shoal.data.dataset import Dataset
from shoal.gradients import Layout
from shoal.inputs import Inputs, each, take
from shoal.tasks import Figures
from shoal.training.workers import Workers

ROWS = 250  # evaluated at once
IN_FULL = 100  # clients at most, each with all figures; of more the headline alone
NO_ONE: Mapping[int, Tensor] = {}
OUTPUTS = 2**25
"""Numbers that the model may give at once, 128 MiB: of a large vocabulary fewer rows."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A network, and the held-out rows on which it is evaluated.

    Where it has personal layers, `users` names the client that each row is for, if clients are here, and the row is
    predicted with that client's own: `personal`, in what follows, has those of the clients that took part. The
    others have the `initial` ones, to which the module is set back after each evaluation. `unused` is a copy of the
    module that no record ever passes through, so that nothing in it can depend on one.
    """

    module: nn.Module
    unused: nn.Module
    layout: Layout
    dataset: Dataset
    x: Inputs
    y: Tensor
    workers: Workers
    initial: Tensor
    users: np.ndarray | None = None

    @classmethod
    def of(
        cls, module: nn.Module, layout: Layout, dataset: Dataset, workers: Workers, users: np.ndarray | None = None
    ) -> Evaluation:
        """On the device where the module is."""
        device = next(module.parameters()).device
        x, initial = each(dataset.test_x, lambda part: part.to(device)), layout.flatten(module)[layout.shared.size :]
        unused = copied(module).cpu()
        return cls(module, unused, layout, dataset, x, dataset.test_y.to(device), workers, initial, users)

    @property
    def about_personal(self) -> list[str]:
        """How personal layers are evaluated, and what is claimed for them; nothing where there are none."""
        layers = ", ".join(self.layout.personal_layers)
        if not layers:
            return []
        used = (
            "the coordinator has none, so its figures are those of their initial values"
            if self.users is None
            else "each held-out record is predicted with those of its client, or with the initial ones if that "
            "client never took part"
        )
        return [f"personal layers ({layers}) never leave their clients, and nothing is claimed for them; {used}"]

    def metrics(self, params: Tensor, personal: Mapping[int, Tensor] = NO_ONE) -> dict[str, float | None]:
        """The task's headline figure and the mean loss; None where one is not finite."""
        predictions, loss = self._predicted(params, personal)
        return finite(self.dataset.task.cheap_figures(predictions, self._targets) | {"loss": loss})

    def figures(self, params: Tensor, personal: Mapping[int, Tensor] = NO_ONE) -> dict[str, Any]:
        """All figures, over all held-out rows and by client, beside those of the trivial prediction."""
        task, (predictions, _) = self.dataset.task, self._predicted(params, personal)
        return {
            "task": task.kind,
            "headline": task.headline,
            "higher_is_better": task.higher_is_better,
            "trivial_answer": task.trivial_answer,
            "figures": finite(task.all_figures(predictions, self._targets)),
            "trivial": finite(task.trivial_figures(self._targets)),
            "figures_by_client": self._by_client(predictions),
        }

    def _by_client(self, predictions: np.ndarray) -> list[dict[str, Any]]:
        """The figures of each client's held-out rows, where owners are known; of many the headline alone."""
        task, owners, found = self.dataset.task, self.dataset.test_owners, []
        if owners is None:
            return []
        order = np.argsort(owners, kind="stable")
        cuts = np.flatnonzero(np.diff(owners[order])) + 1
        figures_of = task.all_figures if len(cuts) < IN_FULL else task.cheap_figures
        for rows in np.split(order, cuts):
            figures = finite(figures_of(predictions[rows], self._targets[rows]))
            name = self.dataset.owner_names[owners[rows[0]]]
            found.append({"client": name, "records": len(rows), "figures": figures})
        return found

    def confusion(self, params: Tensor, personal: Mapping[int, Tensor] = NO_ONE) -> np.ndarray | None:
        """The confusion matrix of a classification: true classes by row, predicted classes by column."""
        if self.dataset.task.kind != "classification":
            return None
        predictions, _ = self._predicted(params, personal)
        classes = self.dataset.class_count
        counts = np.bincount(self._targets * classes + predictions.argmax(1), minlength=classes * classes)
        return counts.reshape(classes, classes)

    @property
    def _targets(self) -> np.ndarray:
        return self.dataset.test_y.numpy()

    def _predicted(self, params: Tensor, personal: Mapping[int, Tensor]) -> tuple[np.ndarray, float]:
        """The predictions for all held-out rows, and the mean loss."""
        if self.users is None:
            predictions, loss = self._with(params, self.initial, self.x, self.y)
            return predictions, loss / len(self.y)
        found, total = [], 0.0
        order = np.argsort(self.users, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(self.users[order])) + 1):
            own = personal.get(int(self.users[rows[0]]), self.initial)
            predictions, loss = self._with(params, own, take(self.x, rows), self.y[rows])
            found.append(predictions)
            total += loss
        self.layout.load(self.module, torch.cat([params, self.initial]))
        return np.concatenate(found)[np.argsort(order)], total / len(self.y)

    def _with(self, params: Tensor, own: Tensor, x: Inputs, y: Tensor) -> tuple[np.ndarray, float]:
        """The predictions for some rows with these personal layers, and the sum of their losses."""
        self.layout.load(self.module, torch.cat([params, own.to(params)]))
        task = self.dataset.task
        count = rows_at_once(math.prod(task.output_shape(self.y[:1])))

        def part(rows: slice) -> tuple[Tensor, float]:
            with torch.inference_mode():
                outputs = outputs_of(self.module, take(x, rows))
                predictions, losses = task.predictions(outputs, y[rows]), task.losses(outputs, y[rows])
                self.dataset.release()
                return predictions.cpu(), float(losses.sum())

        with evaluating(self.module):
            parts = list(self.workers.map(part, in_parts(len(y), count)))
        return torch.cat([found for found, _ in parts]).numpy(), sum(loss for _, loss in parts)


def finite(figures: Figures) -> dict[str, float | None]:
    """Figures, None for one that is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def rows_at_once(outputs: int) -> int:
    """How many rows to evaluate at once, where each has this many outputs."""
    return max(1, min(ROWS, OUTPUTS // outputs))


def in_parts(rows: int, most: int) -> list[slice]:
    """The rows, at most this many at once."""
    return [slice(start, start + most) for start in range(0, rows, most)]


def outputs_of(module: nn.Module, x: Inputs) -> Tensor:
    """The outputs for these records.

    Images are passed in channels-last order, the fastest for convolutions and pooling, where the model takes it.

    A single channel has both orders, and PyTorch assumes the other one unless its strides say otherwise.
    """
    if isinstance(x, Tensor) and x.dim() == 4:
        _, c, h, w = x.shape
        last = x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, (c * h * w, 1, c * w, c))
        with suppress(RuntimeError):  # x.view(...) in the model's own code needs the usual order
            return call(module, last)
    return call(module, x)
