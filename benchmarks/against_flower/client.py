"""A Flower client that trains under Opacus. Ray's actors import it by name, so that what it keeps outlives a message.

It is run by the python of Flower's own environment, so it must not import Shoal.
"""

from __future__ import annotations

import json
import warnings
from functools import cache
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from against_opacus.opacus_client import OpacusClient

app = ClientApp()


@cache
def data(path: str) -> dict[str, Any]:
    held: dict[str, Any] = torch.load(path, weights_only=False)
    return held


@cache
def client(told: str, mode: str, channels_last: bool) -> OpacusClient:
    """A network is wrapped once in every actor for each of its settings."""
    task = json.loads(told)
    return OpacusClient(data(task["data"])["module"], task, mode, channels_last)


@app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    task, order = json.loads(config["task"]), json.loads(config["order"])
    torch.set_num_threads(order["threads"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.mkldnn.set_flags(order["mkldnn"])
    trained = client(config["task"], order["mode"], order["channels_last"])
    arrays = message.content["arrays"].to_torch_state_dict()
    trained.load(list(arrays.values()))
    each, used = task["steps"] * task["batch"], order["steps"] * task["batch"]
    rows = torch.randperm(used) if order.get("shuffled", True) else torch.arange(used)
    held = data(task["data"])
    done = trained.train(held["x"], held["y"], rows + context.node_config["partition-id"] * each)
    weights = {name: p.detach() for name, p in zip(arrays, trained.parameters, strict=True)}
    metrics = MetricRecord({"num-examples": done["examples"], "steps": done["steps"]})
    return Message(RecordDict({"arrays": ArrayRecord(weights), "metrics": metrics}), reply_to=message)
