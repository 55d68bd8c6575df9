"""The coordinator under secure aggregation: it learns the sum of a round and nothing else of it.

A round in which too few answer, or whose sum cannot come of the method, counts as one to which nobody came: it was
charged, its sum is zero, and the run goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.deploy.coordinator import Coordinator, Heard
from shoal.deploy.gate import Question
from shoal.deploy.parcel import Parcel
from shoal.deploy.secure_keys import context
from shoal.deploy.secure_plan import COUNT_STEP, Plan
from shoal.deploy.secure_tally import Failed, Take, Tally
from shoal.engine.moment import Moment
from shoal.engine.round import Sum, release
from shoal.privacy.secure import Whole


class SecureCoordinator(Coordinator):
    """Asks five times a round, and unmasks the sum."""

    @property
    def _most_bytes(self) -> int:
        return super()._most_bytes + 4  # the count

    def _wanted(self) -> int:
        """Fewer than the threshold need not begin."""
        bound = self._clip(self.done)
        return max(super()._wanted(), self._plan(Moment(self.done, self.rounds), bound).threshold)

    def _gather(
        self, cohort: np.ndarray, moment: Moment, memory: dict[str, Tensor], bound: float
    ) -> tuple[Heard, int, Sum, float]:
        heard, asked, plan = Heard(), self._present(cohort), self._plan(moment, bound)
        tally = Tally(plan, context(self._terms.run, self._terms.digest, moment.t, moment.attempt), self._known)

        def ask(
            kind: str, letters: Mapping[int, Parcel], values: set[str], vectors: Mapping[str, int], take: Take
        ) -> None:
            def check(question: Question, answer: Parcel) -> None:
                answer.require(set(question.names) | values, vectors)
                question.refuse_other(answer)
                take(question.number, answer)

            self._exchange(heard, kind, letters, moment, check)

        try:
            total = self._summed(plan, tally.gather(ask, asked, self._letter()), len(tally.sent))
        except Failed as why:
            total = Sum(torch.zeros_like(self.state.model))
            heard.reports.append({"site": "", "node": "", "what": "failed", "why": str(why)})
            self._tell(f"round {self.done + 1}: it gave no sum: {why}")
        return heard, len(asked), total, bound

    def _summed(self, plan: Plan, numbers: Whole, clients: int) -> Sum:
        """The sum as the engine takes it; of the count, as many below as with `clients` gives what was counted."""
        update = torch.from_numpy(numbers[: plan.parameters] * plan.step).to(self.state.model)
        below = float(numbers[-1]) * COUNT_STEP + clients / 2 if plan.count_noise is not None else 0.0
        return Sum(update, weight=clients, clients=clients, below=below)  # type: ignore[arg-type]

    def _release(
        self, memory: dict[str, Tensor], total: Sum, bound: float, expected: float, moment: Moment
    ) -> tuple[Tensor, float, float]:
        """Noise that the sites have added is in the sum already."""
        algorithm = self.stage.algorithm
        if algorithm.per_round is None or algorithm.per_round.at == "server":
            return super()._release(memory, total, bound, expected, moment)
        stage = replace(self.stage, algorithm=replace(algorithm, per_round=None))
        model, _, _ = release(stage, self.state.model, memory, total, bound, expected, moment)
        return model, self._plan(moment, bound).noise_of(total.clients), 0.0

    def _metrics(self, *facts: Any) -> dict[str, Any]:
        """The sum without its noise is known to nobody: nor is how it compares with that."""
        told = super()._metrics(*facts)
        shared = self.stage.algorithm.per_round is not None and self.stage.algorithm.per_round.at == "shared"
        return {key: value for key, value in told.items() if not (shared and key == "snr")}

    def _plan(self, moment: Moment, bound: float) -> Plan:
        algorithm, parameters = self.stage.algorithm, self.state.model.numel()
        return Plan.of(algorithm, self.section, self.setting, parameters, moment.t, bound)

    def _clip(self, t: int) -> float:
        per_update = self.stage.algorithm.per_update
        assert per_update is not None
        return per_update.bound(self.state.memory, t, self.rounds, None)

    def _known(self, number: int, identity: bytes) -> bool:
        """Is this the public key by which the site of this number is known?"""
        known = {member.number: key for key, member in self._roster.members.items()}
        return known.get(number) == hashlib.sha256(identity).hexdigest()[:16]
