"""pfl's side: one worker process, which plays a round of central Gaussian DP whenever it is told to.

It is run by the python of pfl's own environment, so it must not import Shoal. Standard input gives a line of JSON for
each round, {"mkldnn": true, "save": null}; the answer is {"seconds": 0.4, "steps": 30, "examples": 3000}, and the new
model is put at `save`. The time is that of one turn of the loop of `FederatedAveraging.run`: choosing the cohort,
training, clipping, the sum over the processes, noise, the server's step. Then the first model is put back, so
that every round is the same work. (pfl also evaluates each user in its very first round: that is the warm-up.)
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from torch import Tensor, nn

NEVER = 10**9
"""The round in which pfl ends, or looks at the loss."""


class Counted(nn.Module):
    """The network with the two methods that pfl wants; it counts its own local steps."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.steps = self.records = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        self.records += len(y)
        return F.cross_entropy(self.network(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(float(F.cross_entropy(self.network(x), y, reduction="sum")), len(y))}


class Conductor(TrainingProcessCallback):
    """Between two rounds: answer for the last, put the first model back, wait for the word to go on."""

    def __init__(self, counted: Counted, cuda: bool) -> None:
        self.counted, self.cuda = counted, cuda
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # gloo and pfl print to standard output

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.first = model.get_parameters()
        if not self._wait():
            sys.exit()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        if self.cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.start
        if self.save:
            torch.save(torch.cat([p.detach().cpu().reshape(-1) for p in self.counted.parameters()]), self.save)
        model.set_parameters(self.first)
        answer = {"seconds": seconds, "steps": self.counted.steps, "examples": self.counted.records}
        print(json.dumps(answer), file=self.answers, flush=True)
        return not self._wait(), Metrics()

    def _wait(self) -> bool:
        """False at the end of the benchmark."""
        line = sys.stdin.readline()
        if not line:
            return False
        told = json.loads(line)
        self.save = told["save"]
        torch.backends.mkldnn.set_flags(told["mkldnn"])
        self.counted.steps = self.counted.records = 0
        if self.cuda:
            torch.cuda.synchronize()
        self.start = time.perf_counter()
        return True


def users(task: dict[str, Any], x: Tensor, y: Tensor) -> FederatedDataset:
    """Each user's records lie together, on the device; the batches are views that pfl cuts once and keeps.

    Users of the same records share them.
    """
    each = task["steps"] * task["batch"]
    held = [
        PyTorchTensorDataset((x[first : first + each], y[first : first + each])) for first in range(0, len(x), each)
    ]
    sampler = get_user_sampler("minimize_reuse", range(task["clients"]))
    return FederatedDataset(lambda user: held[user % len(held)], sampler)


def main() -> None:
    task, data = json.loads(sys.argv[1]), torch.load(Path(sys.argv[2]), weights_only=False)
    device = torch.device(os.environ["PFL_PYTORCH_DEVICE"])
    torch.backends.cudnn.benchmark = True
    np.random.seed(0)  # as pfl asks for: all processes draw the same cohorts and the same noise
    x, y = data["x"].to(device), data["y"].to(device)
    counted = Counted(data["module"]).to(device)
    if task["channels_last"]:
        counted, x = counted.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    model = PyTorchModel(counted, torch.optim.SGD, torch.optim.SGD(counted.parameters(), lr=1.0))
    clients = users(task, x, y)
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(task["clip"], task["noise"]))
    FederatedAveraging().run(
        NNAlgorithmParams(NEVER, NEVER, train_cohort_size=task["cohort"], val_cohort_size=0),
        SimulatedBackend(clients, clients, postprocessors=[noise]),
        model,
        NNTrainHyperParams(task["batch"], None, task["lr"], local_num_steps=task["steps"]),
        NNEvalHyperParams(None),
        callbacks=[Conductor(counted, device.type == "cuda")],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
