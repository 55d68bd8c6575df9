"""What the server does with the mean update: plain addition, FedAvgM, FedAdam, and averaging of models.

All of it is post-processing: it sees only what was released.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.algorithms.base import Server
from shoal.engine.moment import Moment

ADAM_DECAYS = (0.9, 0.99)


def step(server: Server, model: Tensor, update: Tensor, memory: dict[str, Tensor], moment: Moment) -> Tensor:
    """The next model; what the server remembers is kept in `memory`."""
    if server.adaptivity:
        update = _adam(server, update, memory)
    elif server.momentum:
        update = memory.get("server.velocity", torch.zeros_like(update)) * server.momentum + update
        memory["server.velocity"] = update
    model = torch.add(model, update, alpha=server.lr)
    # T - t <= share x T, and 7 of 10 rounds shall not become 6 by rounding
    if server.average and moment.total - moment.t <= server.average * moment.total + 1e-9:
        _average(model, memory)
    return model


def given_out(server: Server, model: Tensor, memory: dict[str, Tensor]) -> Tensor:
    """The model that users get: the mean over the last rounds, where one is kept."""
    return memory.get("server.average", model) if server.average else model


def _adam(server: Server, update: Tensor, memory: dict[str, Tensor]) -> Tensor:
    """Reddi et al. 2021, Algorithm 2: m and v without bias correction, v starts at tau^2."""
    first, second = ADAM_DECAYS
    mean = memory.get("server.velocity", torch.zeros_like(update))
    square = memory.get("server.square", torch.full_like(update, server.adaptivity**2))
    mean = first * mean + (1 - first) * update
    square = second * square + (1 - second) * update.square()
    memory |= {"server.velocity": mean, "server.square": square}
    return mean / (square.sqrt() + server.adaptivity)


def _average(model: Tensor, memory: dict[str, Tensor]) -> None:
    count = memory.get("server.averaged", torch.zeros((), dtype=torch.int64)) + 1
    mean = memory.get("server.average", torch.zeros_like(model))
    memory |= {"server.averaged": count, "server.average": mean + (model - mean) / int(count)}
