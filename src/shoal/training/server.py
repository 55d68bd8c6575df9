"""What the server does with the mean update: plain addition, FedAvgM, FedAdam, and averaging of models.

All of it is post-processing of released values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.algorithms.base import Server
from shoal.training.round_index import RoundIndex

ADAM_DECAYS = (0.9, 0.99)


def step(server: Server, params: Tensor, update: Tensor, state: dict[str, Tensor], index: RoundIndex) -> Tensor:
    """The next model; the server keeps its own state in `state`."""
    if server.adaptivity:
        update = _adam(server, update, state)
    elif server.momentum:
        update = state.get("server.velocity", torch.zeros_like(update)) * server.momentum + update
        state["server.velocity"] = update
    params = torch.add(params, update, alpha=server.lr)
    # T - t <= share x T; rounding must not turn 7 of 10 rounds into 6
    if server.average and index.total - index.t <= server.average * index.total + 1e-9:
        _average(params, state)
    return params


def given_out(server: Server, params: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The model that is released to users: the mean over the last rounds, where there is one."""
    return state.get("server.average", params) if server.average else params


def _adam(server: Server, update: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Reddi et al. 2021, Algorithm 2: m and v without bias correction, v starts at tau^2."""
    first, second = ADAM_DECAYS
    mean = state.get("server.velocity", torch.zeros_like(update))
    square = state.get("server.square", torch.full_like(update, server.adaptivity**2))
    mean = first * mean + (1 - first) * update
    square = second * square + (1 - second) * update.square()
    state |= {"server.velocity": mean, "server.square": square}
    return mean / (square.sqrt() + server.adaptivity)


def _average(params: Tensor, state: dict[str, Tensor]) -> None:
    count = state.get("server.averaged", torch.zeros((), dtype=torch.int64)) + 1
    mean = state.get("server.average", torch.zeros_like(params))
    state |= {"server.averaged": count, "server.average": mean + (params - mean) / int(count)}
