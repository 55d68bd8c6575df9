"""What a rival is and which settings it has; Opacus and plain PyTorch as rivals.

All rivals answer the same orders, {"clients": 10, "steps": 6, ...} with the fields of a Choice, by
{"seconds": 0.4, "steps": 60, "examples": 6000}, or {"error": "..."} where a setting does not work.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from against_opacus.ours import Bench, require
from against_opacus.processes import Processes

WORKER = Path(__file__).with_name("worker.py")

OPACUS_MODES = ("hooks", "functorch", "ew", "ghost", "fast")


@dataclass(frozen=True)
class Choice:
    """A rival's setting."""

    processes: int
    threads: int
    mkldnn: bool
    channels_last: bool
    mode: str


@dataclass(frozen=True)
class Size:
    """So many of the task's clients and steps."""

    clients: int
    steps: int


class Rival(Protocol):
    bench: Bench
    modes: tuple[str, ...]
    private: bool
    trial_clients: int
    """As many as a trial needs to last longer than what a round costs apart from training."""

    def play(self, choice: Choice, size: Size, **more: Any) -> dict[str, Any]:
        """The answer to an order; `more` may hold shuffled and save (a file for the sum of the models)."""
        ...

    def close(self) -> None: ...


class Loops:
    """Opacus, or plain PyTorch, one client after the other; of two processes each has half of the clients.

    The sums of two processes are not joined in the time that counts: less work than a true round.
    """

    def __init__(self, bench: Bench, python: str, modes: tuple[str, ...], *, private: bool) -> None:
        self.bench, self.modes, self.private, self.trial_clients = bench, modes, private, cores()
        side = "opacus" if private else "plain"
        self.workers = Processes([python, str(WORKER), side], cores(), bench.folder)
        self.workers.ask([bench.told] * cores())

    def play(self, choice: Choice, size: Size, **more: Any) -> dict[str, Any]:
        edges = [size.clients * rank // choice.processes for rank in range(choice.processes + 1)]
        order = asdict(choice) | asdict(size) | more
        save = more.get("save")
        orders = [
            order | {"clients": list(part), "save": save and f"{save}.{rank}"}
            for rank, part in enumerate(itertools.pairwise(edges))
        ]
        answers = self.workers.ask(orders)
        if failed := [answer for answer in answers if "error" in answer]:
            return failed[0]
        if save:
            torch.save(torch.stack([torch.load(order["save"]) for order in orders]).sum(0), save)
        work = {key: sum(answer[key] for answer in answers) for key in ("steps", "examples")}
        return {"seconds": max(answer["seconds"] for answer in answers), **work}

    def close(self) -> None:
        self.workers.close()


def choices(rival: Rival) -> list[Choice]:
    """Every setting that might be the best: threads in one process, or a process of one thread for each core."""
    ways = sorted({(1, 1), (1, cores()), (cores(), 1)})
    layouts = (False, True) if rival.bench.task.pictures else (False,)
    flags = itertools.product(ways, (True, False), layouts, rival.modes)
    return [Choice(*way, mkldnn, last, mode) for way, mkldnn, last, mode in flags]


def update(rival: Rival, choice: Choice, **more: Any) -> Tensor | str:
    """The update of a full round that is not timed, or why there is none."""
    bench, task = rival.bench, rival.bench.task
    saved = bench.folder / "model.pt"
    told = rival.play(choice, Size(task.clients, task.steps), save=str(saved), **more)
    if "error" in told:
        return str(told["error"])
    done = {key: told[key] for key in task.work}
    require(done == task.work, f"{task.name}: the rival did {done}, not {task.work}")
    summed: Tensor = torch.load(saved)
    return summed / task.clients - bench.first


def cores() -> int:
    return torch.get_num_threads()
