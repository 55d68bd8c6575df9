"""A rival's side: one process, which plays a round of its clients whenever it is told to.

    worker.py opacus|plain

With `opacus` it is run by the python of Opacus' own environment, so it must not import Shoal. Standard input gives
the task first, then a line of JSON for each round (see rivals.py). Timed is the training of the clients, one after
the other from the same start, and the sum of their models.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from against_opacus.plain_client import Client

Order = dict[str, Any]
Kind = Callable[[nn.Module, dict[str, Any], str, bool], "Client"]


def kind_of_client(side: str) -> Kind:
    if side == "opacus":
        from against_opacus.opacus_client import OpacusClient

        return OpacusClient
    from against_opacus.plain_client import Client

    return Client


class Side:
    """Plays rounds. A network is wrapped or compiled once for each setting."""

    def __init__(self, kind: Kind, task: dict[str, Any]) -> None:
        data = torch.load(task["data"], weights_only=False)
        self.task, self.x, self.y = task, data["x"], data["y"]
        self.start = [p.detach().clone() for p in data["module"].parameters()]

        @cache
        def client(mode: str, channels_last: bool, threads: int, mkldnn: bool) -> Client:
            return kind(data["module"], task, mode, channels_last)

        self.client = client

    def play(self, order: Order) -> tuple[dict[str, Any], list[Tensor]]:
        """What there is to answer, and the sum of the clients' weights."""
        client = self.client(*(order[key] for key in ("mode", "channels_last", "threads", "mkldnn")))
        each, used = self.task["steps"] * self.task["batch"], order["steps"] * self.task["batch"]
        total = [torch.zeros_like(p) for p in client.parameters]
        done = {"steps": 0, "examples": 0}
        start = time.perf_counter()
        for k in range(*order["clients"]):
            client.load(self.start)
            rows = torch.randperm(used) if order.get("shuffled", True) else torch.arange(used)
            for key, value in client.train(self.x, self.y, rows + k * each).items():
                done[key] += value
            for t, p in zip(total, client.parameters, strict=True):
                t += p.detach()
        return {"seconds": time.perf_counter() - start, **done}, total


def answer(side: Side, order: Order) -> dict[str, Any]:
    torch.set_num_threads(order["threads"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.mkldnn.set_flags(order["mkldnn"])
    try:
        told, total = side.play(order)
    except (RuntimeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    if order.get("save"):
        torch.save(torch.cat([t.reshape(-1) for t in total]), order["save"])
    return told


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that nothing a library prints gets among the answers
    side = Side(kind_of_client(sys.argv[1]), json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(side, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
