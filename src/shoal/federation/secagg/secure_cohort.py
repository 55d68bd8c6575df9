"""Sites under secure aggregation: the coordinator learns a round's sum and nothing else.

A round in which too few sites answer, or whose sum is impossible under the algorithm, counts as a round without
answers: it is charged, its sum is zero, and the run continues, up to `federation.max_failed_rounds` in a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from shoal.errors import RunError
from shoal.federation.coordinator import RemoteCohort, Replies
from shoal.federation.messages import Payload
from shoal.federation.secagg.aggregator import Failed, SecureAggregator, Take
from shoal.federation.secagg.round_keys import context
from shoal.federation.secagg.round_plan import COUNT_STEP, Plan
from shoal.federation.validation import Request
from shoal.random.discrete_gaussian import Whole
from shoal.training.cohort import State, Sum
from shoal.training.round_index import RoundIndex


class SecureCohort(RemoteCohort):
    """Sites that exchange five messages a round, and whose sum is unmasked."""

    _failed = 0  # rounds in a row

    @property
    def _most_bytes(self) -> int:
        return super()._most_bytes + 4  # the count

    def begin(self, run: Path, done: int) -> None:
        """Set up a run; log what a sparse graph risks."""
        super().begin(run, done)
        index = RoundIndex(0, self.setting.rounds)
        graph = self._plan(index, self._clip_norm({}, index)).graph
        if graph.sparse:
            self._log(f"secure aggregation: {graph.words()}")

    def _wanted(self, state: State, index: RoundIndex) -> int:
        """How many sites to wait for, at least the threshold."""
        return max(super()._wanted(state, index), self._plan(index, self._clip_norm(state, index)).threshold)

    def ready(self, state: State, index: RoundIndex, stopped: Callable[[], bool]) -> bool:
        """Wait for enough sites; raise a RunError, before anything is charged, where round after round has failed."""
        if self._failed >= self.section.max_failed_rounds:
            self.end("failed", index.t)
            raise RunError(
                f"stopped after round {index.t}: {self._failed} rounds in a row gave no sum "
                f"(federation.max_failed_rounds), the last because {self._why}; "
                f"remove the cause, then continue with --resume"
            )
        return super().ready(state, index, stopped)

    def _gather(self, replies: Replies, asked: list[int], params: Tensor, state: State, index: RoundIndex) -> Sum:
        clip_norm = self._clip_norm(state, index)
        plan = self._plan(index, clip_norm)
        members = {member.number: member for member in self._roster.members.values()}  # a drop takes the number

        def blame(number: int, why: str, certain: bool) -> None:
            if certain:
                self._strike(replies, members[number], why)
            else:
                self._report(replies, members[number], "disputed", why)

        aggregator = SecureAggregator(
            plan, context(self._terms.run, self._terms.digest, index.t, index.attempt), self._known, blame
        )

        def ask(
            kind: str, messages: Mapping[int, Payload], values: set[str], vectors: Mapping[str, int], take: Take
        ) -> None:
            def check(request: Request, answer: Payload) -> None:
                answer.require(set(request.names) | values, vectors)
                request.refuse_other(answer)
                take(request.number, answer)

            self._exchange(replies, kind, messages, index, check)

        try:
            numbers = aggregator.gather(ask, asked, self._message(params, state))
            total = self._summed(plan, numbers, len(aggregator.sent), params)
            self._failed = 0
        except Failed as why:
            total = Sum(torch.zeros_like(params))
            self._failed, self._why = self._failed + 1, str(why)
            replies.reports.append({"site": "", "node": "", "what": "failed", "why": str(why)})
            self._log(f"round {index.t + 1}: no sum: {why}")
        total.clip_norm = clip_norm
        if self.algorithm.per_round is not None and self.algorithm.per_round.at == "shared":
            total.noise = plan.noise_of(total.clients)
        return total

    def _summed(self, plan: Plan, numbers: Whole, clients: int, params: Tensor) -> Sum:
        """The sum in the trainer's units; `below` is recovered from the centred count of +1/2 and -1/2.

        In float64, which represents every sum: rounding before the noise would let one site move it by more.
        """
        update = torch.from_numpy(numbers[: plan.parameters] * plan.step).to(params.device)
        below = float(numbers[-1]) * COUNT_STEP + clients / 2 if plan.count_noise is not None else 0.0
        return Sum(update, weight=clients, clients=clients, below=below)

    def _plan(self, index: RoundIndex, clip_norm: float) -> Plan:
        return Plan.of(self.algorithm, self.section, self.setting, self.layout.size, index.t, clip_norm)

    def _known(self, number: int, identity: bytes) -> bool:
        """Whether this is the public key that identifies the site of this number."""
        known = {member.number: key for key, member in self._roster.members.items()}
        return known.get(number) == hashlib.sha256(identity).hexdigest()[:16]
