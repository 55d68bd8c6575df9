"""Parameters that are used several times for one record: tied weights, a layer that is called again and again.

The record's gradient is the sum over all uses, and only the norm of this sum may be clipped by.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.gradients.layers.affine import BiasRule
from shoal.gradients.layers.embedding import EmbeddingRule
from shoal.gradients.layers.linear import LinearRule
from shoal.gradients.layers.parameter import ParameterRule
from shoal.gradients.layers.rule import Item, Rule, gram, pair_squares, wide
from shoal.gradients.layout import Entry
from shoal.precision import widened


def merged(items: Sequence[Item]) -> list[Item]:
    """What a tape holds, such that no two of its items have a parameter in common."""
    return [item for group in _groups(items) for item in (_merged([*map(wide, group)]) if len(group) > 1 else group)]


def _groups(items: Sequence[Item]) -> list[list[Item]]:
    """Items that share parameters, directly or through others."""
    group_of = list(range(len(items)))
    places = ((entry, place) for place, (rule, _, _) in enumerate(items) for entry in rule.entries)
    end, last = 0, 0
    for entry, place in sorted(places, key=lambda each: each[0].start):
        if entry.start < end and group_of[place] != group_of[last]:
            group_of = [group_of[last] if group == group_of[place] else group for group in group_of]
        if entry.stop > end:
            end, last = entry.stop, place
    return [
        [item for item, own in zip(items, group_of, strict=True) if own == group] for group in dict.fromkeys(group_of)
    ]


def _merged(items: list[Item]) -> list[Item]:
    """Items that all share something, by the cheapest way that is right for them."""
    rules = [rule for rule, _, _ in items]
    kinds, places = {type(rule) for rule in rules}, {rule.entries for rule in rules}
    if len(kinds) == len(places) == 1 and isinstance(rules[0], LinearRule):
        return [_longer_linear(items)]
    if any(type(rule) is LinearRule and rule.bias is not None for rule in rules):
        return merged([piece for item in items for piece in _without_bias(item)])
    if len(places) > 1 or not kinds <= {LinearRule, EmbeddingRule}:
        return _made(items)
    embedded = _longer_embedding([item for item in items if isinstance(item[0], EmbeddingRule)])
    linear = [item for item in items if isinstance(item[0], LinearRule)]
    return [_tied(embedded, _longer_linear(linear)) if linear else embedded]


def _longer_linear(items: list[Item]) -> Item:
    """One linear layer with the positions of all."""
    (rule, rows, _), records = items[0], len(items[0][2])
    inputs = torch.cat([saved.view(records, -1, saved.shape[-1]) for _, saved, _ in items], 1)
    return rule, inputs.view(len(rows), -1, inputs.shape[-1]), _positions(items)


def _longer_embedding(items: list[Item]) -> Item:
    """One embedding of the words of all; gradients of padding are 0."""
    words = torch.cat([saved.reshape(len(saved), -1) for _, saved, _ in items], 1)
    own = [(rule, None, rule.unpadded(saved, grad)) for rule, saved, grad in items]  # type: ignore[attr-defined]
    return EmbeddingRule(items[0][0].entries[0], None), words, _positions(own)


def _positions(items: list[Item]) -> Tensor:
    """The gradients of all outputs, [N, T, out]."""
    return torch.cat([grad.reshape(len(grad), -1, grad.shape[-1]) for _, _, grad in items], 1)


def _without_bias(item: Item) -> list[Item]:
    rule, saved, grad = item
    if type(rule) is not LinearRule or rule.bias is None:
        return [item]
    return [(LinearRule(rule.weight, None, rule.kernels), saved, grad), (BiasRule(-1, rule.bias), None, grad)]


def _tied(embedded: Item, linear: Item) -> Item:
    embedding, words, word_grads = embedded
    head, rows, grads = linear
    return TiedRule(embedding, head), (words, word_grads, rows), grads


class TiedRule(Rule):
    """An embedding and a linear layer with the same weights: sum_t 1[w_t] e_t^T + sum_s g_s h_s^T.

    That is a linear layer whose inputs are the e_t and the h_s, and whose gradients are the words and the g_s.
    """

    def __init__(self, embedding: Rule, head: Rule) -> None:
        self.entries, self._embedding, self._head = head.entries, embedding, head

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Any]:
        """Never asked for: it is made in the backward pass."""
        raise AssertionError("tied layers run by their own rules")

    def input_gradient(self, saved: Any, grad: Tensor, params: Tensor) -> Tensor:
        """Never asked for."""
        raise AssertionError("tied layers run by their own rules")

    def accumulate(self, saved: Any, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        words, word_grads, rows = saved
        self._embedding.accumulate(words, word_grads, into, scale)
        self._head.accumulate(rows, grad, into, scale)

    def accumulate_weighted(
        self, saved: Any, kept: None, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        words, word_grads, rows = saved
        self._embedding.accumulate_weighted(words, None, word_grads, factors, into, scale)
        self._head.accumulate_weighted(rows, None, grad, factors, into, scale)

    def squares(self, saved: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The squared norm of every gradient, in float64."""
        words, word_grads, rows = saved
        inputs = torch.cat([word_grads, rows.view(len(words), -1, rows.shape[-1])], 1)
        same = (words.unsqueeze(1) == words.unsqueeze(2)).to(grad.dtype)
        across = grad.gather(2, words.unsqueeze(1).expand(-1, grad.shape[1], -1))
        outputs = torch.cat([torch.cat([same, across.transpose(1, 2)], 2), torch.cat([across, gram(grad)], 2)], 1)
        return pair_squares(gram(inputs), outputs, (inputs.shape[2], grad.shape[2]), grad.dtype), None


def _made(items: list[Item]) -> list[Item]:
    """The gradients themselves, of every record."""
    spans: list[Entry] = []
    for entry in sorted((entry for rule, _, _ in items for entry in rule.entries), key=lambda each: each.start):
        if spans and entry.start < spans[-1].stop:
            first = spans.pop()
            stop = max(first.stop, entry.stop)
            entry = replace(first, stop=stop, shape=torch.Size((stop - first.start,)))
        spans.append(entry)
    shift, width = {}, 0
    for span in spans:
        shift[span], width = width - span.start, width + span.stop - span.start
    gradients = widened(items[0][2].new_zeros(())).new_zeros(len(items[0][2]), width)
    for rule, saved, grad in items:
        moved = {
            id(entry): replace(entry, start=entry.start + by, stop=entry.stop + by)
            for entry in rule.entries
            for span, by in shift.items()
            if span.start <= entry.start < span.stop
        }
        copy.deepcopy(rule, dict(moved)).accumulate(saved, grad, gradients, 1.0)
    return [(ParameterRule(span), None, gradients[:, span.start + by : span.stop + by]) for span, by in shift.items()]
