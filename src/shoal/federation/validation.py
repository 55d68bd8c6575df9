"""The coordinator's validation: every answer is checked against its request before it counts.

The checks: run, terms, round, attempt, nonce, field names, types, lengths, finite values, and a norm within the clip
norm. A bad answer counts as zero and is reported with its site; a site that keeps sending them is excluded (roster).
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.algorithms.base import Algorithm
from shoal.federation.messages import InvalidMessage, Payload, Value
from shoal.federation.terms import ROUND, Crossing
from shoal.training.finite import finite_or_zero
from shoal.training.round_index import RoundIndex

MOST_RECORDS = 10**6  # of a site, unless configured


@dataclass(frozen=True)
class Request:
    """A request to one site in one round; its nonce is unique."""

    run: str
    terms: str
    number: int
    index: RoundIndex
    kind: str = ROUND
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    @property
    def names(self) -> dict[str, Value]:
        """The values that the answer must repeat."""
        return {
            "run": self.run,
            "terms": self.terms,
            "number": self.number,
            "round": self.index.t,
            "attempt": self.index.attempt,
            "nonce": self.nonce,
        }

    def refuse_other(self, answer: Payload) -> None:
        """Raise InvalidMessage unless the answer, which has all required fields, is to this request."""
        for key, value in self.names.items():
            if answer.values[key] != value:
                raise InvalidMessage(f"its {key} is {str(answer.values[key])[:40]!r}, not that of the request")


@dataclass(frozen=True)
class SiteUpdate:
    """One site's contribution to the sum."""

    number: int
    update: Tensor
    norm: float
    weight: float = 1.0
    below: int = 0
    share: float = 0.0


class Validator:
    """Checks answers under one algorithm."""

    def __init__(self, algorithm: Algorithm, parameters: int, largest: float, most_records: int | None) -> None:
        self._algorithm, self._parameters = algorithm, parameters
        self._largest, self._most_records = largest, most_records or MOST_RECORDS
        self._crossing = Crossing.of(algorithm)

    @property
    def raw(self) -> bool:
        """Whether updates are clipped, or get their noise, at the coordinator."""
        return self._crossing.raw

    @property
    def most_bytes(self) -> int:
        """The most bytes that an answer's vectors may have."""
        return 4 * self._parameters

    def check(self, request: Request, payload: Payload, bound: float) -> SiteUpdate:
        """Return the update of an answer to a request, under this round's clip norm.

        Raises:
            InvalidMessage: The answer is malformed, or impossible under the algorithm.
        """
        payload.require(set(request.names) | self._crossing.values, {"update": self._parameters})
        request.refuse_other(payload)
        updates, norms, bad = finite_or_zero(payload.vectors["update"].unsqueeze(0))
        if bad.any():
            raise InvalidMessage("its update contains NaN or Inf, or is too large for a float")
        norm, longest = float(norms[0]), self._longest(request.index, bound)
        if norm > longest:
            raise InvalidMessage(f"its update has norm {norm:.4g}, the algorithm allows at most {longest:.4g}")
        return SiteUpdate(
            request.number,
            updates[0],
            norm,
            weight=self._weight(payload),
            below=self._below(payload),
            share=self._share(payload),
        )

    def _longest(self, index: RoundIndex, bound: float) -> float:
        """The largest norm that an honest update can have."""
        per_update = self._algorithm.per_update
        if self._crossing.raw or per_update is None:
            return self._largest
        longest = per_update.longest(bound, index.t, index.total, self._parameters)
        return longest if longest < math.inf else self._largest

    def _weight(self, payload: Payload) -> float:
        if not self._crossing.records:
            return 1.0
        records = payload.number("records")
        if not 1 <= records <= self._most_records:
            raise InvalidMessage(f"it claims {records:,} records, must be 1 to {self._most_records:,}")
        return float(records)

    def _below(self, payload: Payload) -> int:
        below = payload.number("below") if self._crossing.below else 0
        if below not in (0, 1):
            raise InvalidMessage(f"field 'below' must be 0 or 1, got {below}")
        return below

    def _share(self, payload: Payload) -> float:
        clip, records = self._algorithm.per_record, self._algorithm.records
        if clip is None or not clip.counts:
            return 0.0
        share, most = payload.real("share"), clip.most_share(records.widest(self._most_records) / records.batch)
        if not abs(share) <= most:
            raise InvalidMessage(f"field 'share' must be from {-most:g} to {most:g}, got {share:g}")
        return share


def stacked(answers: list[SiteUpdate], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the updates [k, P] and their norms [k]."""
    if not answers:
        return like.new_zeros(0, len(like)), like.new_zeros(0)
    updates = torch.stack([answer.update for answer in answers]).to(like.device)
    return updates, torch.tensor([answer.norm for answer in answers], dtype=like.dtype, device=like.device)
