"""Group consistency: several searches for the same batch, then again with a pull to what they agree on.

H. Yin, A. Mallya, A. Vahdat, J. M. Alvarez, J. Kautz, P. Molchanov (2021), See through Gradients: Image Batch
Recovery via GradInversion. https://arxiv.org/abs/2104.07586. Their term is weight |x - E[x]|^2, with the mean of all
searches of records that were matched first. Here records are matched by label and distance. In the first half of the
iterations the searches are alone; in the second half the mean of the first one pulls. Their statistics of batch
normalisation are left out: no network of ours has any.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from shoal.attacks.objective import Objective
from shoal.attacks.reconstruct import Found, Watch, reconstruct
from shoal.random.streams import Streams


def agreed(objective: Objective, streams: Streams, watch: Watch | None = None) -> Found:
    """Run the objective's recipe `copies` times for each victim; the copy that explains most is given back."""
    recipe, count = objective.recipe, len(objective.seen)
    half = replace(recipe, iterations=max(1, recipe.iterations // 2), copies=1)
    rows = torch.arange(count, device=objective.seen.device).repeat_interleave(recipe.copies)
    alone = replace(
        objective, recipe=half, seen=objective.seen[rows],
        labels=None if objective.labels is None else objective.labels[rows],
    )  # fmt: skip
    first = reconstruct(alone, streams)
    anchors = torch.cat([_anchors(first, rows == victim) for victim in range(count)])
    together = replace(alone, anchor=anchors.flatten(1), labels=first.labels.unsqueeze(1))
    second = reconstruct(together, streams, start=first.x.flatten(1))
    best = torch.stack([_least(second, rows == victim) for victim in range(count)])
    if watch is not None:
        watch(recipe.iterations, torch.arange(count, device=rows.device), second.x[best])
    return Found(**{each.name: getattr(second, each.name)[best] for each in fields(Found)})


def _least(found: Found, chosen: Tensor) -> Tensor:
    left = torch.where(chosen, torch.nan_to_num(found.left, nan=torch.inf), torch.inf)
    return left.argmin()


def _anchors(found: Found, chosen: Tensor) -> Tensor:
    """The mean of one victim's copies [G, B, ...], for each copy in the order of its own records."""
    from scipy.optimize import linear_sum_assignment

    x, labels = found.x[chosen], found.labels[chosen]
    lead = int(torch.nan_to_num(found.left[chosen], nan=torch.inf).argmin())
    orders = []
    for copy in range(len(x)):
        distances = torch.cdist(x[lead].flatten(1), x[copy].flatten(1))
        other = labels[lead].unsqueeze(1) != labels[copy]
        orders.append(linear_sum_assignment((distances + 1e6 * other).cpu().numpy())[1])
    mean = torch.stack([each[torch.from_numpy(order)] for each, order in zip(x, orders, strict=True)]).mean(0)
    return torch.stack([mean[torch.from_numpy(np.argsort(order))] for order in orders])
