"""Trap weights: a malicious server makes rows that few records activate, and reads those records off.

    W_i = -|z| at a random half of the inputs, s |z| at the others; b_i = 0
    dW_i/db_i = x             where x alone has <W_i, x> > 0, whatever layers follow

With s < 1 the negative half outweighs the positive one. The server chooses s on held-out records so that one record
in 32 activates a row. A row that several records activate gives a mixture of them, inside [0, 1] only where all their
slopes have one sign; then it lies between records. So the server takes the corners of what lies inside (successive
projections, Gillis & Vavasis 2014). No layer but the first is changed, which must be linear and followed by ReLU.

F. Boenisch, A. Dziedzic, R. Schuster, A. S. Shamsabadi, I. Shumailov, N. Papernot (2023), When the Curious Abandon
Honesty: Federated Learning Is Not Private. https://arxiv.org/abs/2112.02918
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

from shoal.attacks.imprint import SMALL, first_layer
from shoal.attacks.reconstruct import Found
from shoal.gradients import Layout
from shoal.random.streams import Streams

ACTIVE = 1 / 32  # of the records that activate a row
MOST = 2**24  # numbers that torch.quantile takes
ALIKE = 1e-2  # the largest root mean square distance of two answers that agree
BOX = 1e-2  # how far outside [0, 1] a record's features may be, by rounding
FAINT = 1e-4  # of the largest slope: below it rounding hides a record


def planted(module: nn.Module, held_out: Tensor, streams: Streams) -> nn.Module:
    """The network with trap weights in its first layer.

    Args:
        module: The agreed network.
        held_out: Records [N, ...] like the victims', which the server has.
        streams: The source of the weights.

    Raises:
        ModelError: The network does not begin with a linear layer and ReLU.
    """
    module = copy.deepcopy(module)
    _, first = first_layer(module, "trap-weights")
    rows, generator = held_out.flatten(1).to(first.weight), streams.generator("trap weights")
    size = np.abs(generator.standard_normal(first.weight.shape, np.float32)) / first.weight.shape[1] ** 0.5
    above = generator.permuted(np.arange(first.weight.shape[1])[None].repeat(len(size), 0), axis=1) % 2 == 0
    positive, negative = (torch.from_numpy(np.where(side, size, 0)).to(rows) for side in (above, ~above))
    up, down = rows @ positive.T, rows @ negative.T
    scale = float(torch.quantile((down / up.clamp(min=1e-12)).flatten()[:MOST], ACTIVE))  # <W_i, x> > 0: s up > down
    with torch.no_grad():
        first.weight.copy_(SMALL * (scale * positive - negative))
        first.bias.zero_()
    return module


def read_off(module: nn.Module, gradients: Tensor, shape: tuple[int, ...], batch: int) -> Found:
    """The records in mean gradients [V, P] over this many records: the answers that are no mixture of others."""
    name, _ = first_layer(module, "trap-weights")
    entries = {entry.name: entry for entry in Layout.of(module).entries}
    weight, bias = (entries[f"{name}.{part}"].of(gradients.double()) for part in ("weight", "bias"))
    bias = bias.view(len(gradients), -1)
    answers = torch.nan_to_num(weight / bias.unsqueeze(2), posinf=0.0, neginf=0.0)
    x = torch.stack([_corners(each, slopes, batch) for each, slopes in zip(answers, bias, strict=True)])
    x = x.clamp(0, 1).to(gradients.dtype).view(len(gradients), batch, *shape)
    nothing = torch.zeros(len(gradients), dtype=torch.int64, device=gradients.device)
    with torch.no_grad():
        labels = module(x.flatten(0, 1)).argmax(1).view(len(gradients), batch)  # a guess: rows say nothing of them
    left = torch.full((len(gradients),), torch.nan, device=gradients.device)
    return Found(x=x, labels=labels, left=left, iterations=nothing + 1, restarts=nothing, diverged=nothing.bool())


def _corners(answers: Tensor, slopes: Tensor, batch: int) -> Tensor:
    """So many of the rows' answers [k, n], [batch, n]: each the farthest from all that those before it span.

    Answers on which two rows agree come first: mixtures outside the corners hardly ever do.
    """
    near = ALIKE * answers.shape[1] ** 0.5
    inside = ((answers >= -BOX) & (answers <= 1 + BOX)).all(1) & (slopes.abs() > FAINT * slopes.abs().max())
    alike = (torch.cdist(answers, answers) <= near) & inside & inside.unsqueeze(1)
    found, left, place = answers.new_zeros(batch, answers.shape[1]), answers, 0
    for chosen in (alike.sum(1) >= 2, inside):
        while place < batch:
            lengths = left.norm(dim=1) * chosen
            farthest = int(lengths.argmax())
            if lengths[farthest] <= near:
                break
            best = int(
                (slopes.abs() * alike[farthest]).argmax()
            )  # of rows that agree, the one with the least rounding
            found[place], place = answers[best], place + 1
            along = left[best] / left[best].norm()
            left = left - (left @ along).unsqueeze(1) * along
    return found
