"""The firewall at the coordinator: every answer is checked against what was asked, before it counts.

Run, round, attempt, nonce, names, kinds, lengths, finite, no longer than the clip allows. A bad answer counts as zero
and is told of with its site; a site that keeps sending them is left out (`roster`).
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

MOST_RECORDS = 10**6  # of a site, where the configuration does not say


@dataclass(frozen=True)
class Request:
    """What one site is asked in one round; the nonce is for this question alone."""

    run: str
    terms: str
    number: int
    index: RoundIndex
    kind: str = ROUND
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    @property
    def names(self) -> dict[str, Value]:
        """What the answer must repeat."""
        return {
            "run": self.run,
            "terms": self.terms,
            "number": self.number,
            "round": self.index.t,
            "attempt": self.index.attempt,
            "nonce": self.nonce,
        }

    def refuse_other(self, answer: Payload) -> None:
        """Spoilt unless the answer, whose values are those that were asked for, is to this question."""
        for key, value in self.names.items():
            if answer.values[key] != value:
                raise InvalidMessage(f"its {key} is {str(answer.values[key])[:40]!r}, not the one that was asked for")


@dataclass(frozen=True)
class SiteUpdate:
    """One site's part of the sum."""

    number: int
    update: Tensor
    norm: float
    weight: float = 1.0
    below: int = 0
    share: float = 0.0


class Validator:
    """Knows what an answer may hold under one algorithm."""

    def __init__(self, algorithm: Algorithm, parameters: int, largest: float, most_records: int | None) -> None:
        self._algorithm, self._parameters = algorithm, parameters
        self._largest, self._most_records = largest, most_records or MOST_RECORDS
        self._crossing = Crossing.of(algorithm)

    @property
    def raw(self) -> bool:
        """Are updates clipped, or given their noise, here?"""
        return self._crossing.raw

    @property
    def most_bytes(self) -> int:
        """Of an answer's vectors."""
        return 4 * self._parameters

    def check(self, request: Request, payload: Payload, bound: float) -> SiteUpdate:
        """The answer to a question, under this round's clip; Spoilt, with the reason, where it is none."""
        payload.require(set(request.names) | self._crossing.values, {"update": self._parameters})
        request.refuse_other(payload)
        updates, norms, bad = finite_or_zero(payload.vectors["update"].unsqueeze(0))
        if bad.any():
            raise InvalidMessage("its update holds NaN or Inf, or is too great for a float")
        norm, longest = float(norms[0]), self._longest(request.index, bound)
        if norm > longest:
            raise InvalidMessage(f"its update has norm {norm:.4g}, at most {longest:.4g} can come of the method")
        return SiteUpdate(
            request.number,
            updates[0],
            norm,
            weight=self._weight(payload),
            below=self._below(payload),
            share=self._share(payload),
        )

    def _longest(self, index: RoundIndex, bound: float) -> float:
        """The greatest norm that an honest update can have."""
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
            raise InvalidMessage(f"it claims {records:,} records, 1 to {self._most_records:,} can be")
        return float(records)

    def _below(self, payload: Payload) -> int:
        below = payload.number("below") if self._crossing.below else 0
        if below not in (0, 1):
            raise InvalidMessage(f"its bit 'below' is {below}")
        return below

    def _share(self, payload: Payload) -> float:
        clip = self._algorithm.per_record
        if clip is None or not clip.counts:
            return 0.0
        share, most = payload.real("share"), clip.most_share()
        if not abs(share) <= most:
            raise InvalidMessage(f"its share is {share:g}, within {most:g} of 0 can come of the method")
        return share


def stacked(answers: list[SiteUpdate], like: Tensor) -> tuple[Tensor, Tensor]:
    """The updates [k, P] and their norms [k]."""
    if not answers:
        return like.new_zeros(0, len(like)), like.new_zeros(0)
    updates = torch.stack([answer.update for answer in answers]).to(like.device)
    return updates, torch.tensor([answer.norm for answer in answers], dtype=like.dtype, device=like.device)
