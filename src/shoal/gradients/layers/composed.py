"""Layers that are other layers' rules after, or between, operations without parameters."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.gradients.layers.client_layer import ClientLayer, Taped
from shoal.gradients.layers.embedding import EmbeddingRule
from shoal.gradients.layers.linear import LinearRule
from shoal.gradients.layers.parameter import ParameterRule
from shoal.gradients.layers.rule import Rule
from shoal.gradients.layout import Entry


def composed_layer(module: nn.Module, entries: dict[int, Entry], taped: Taped, kernels: bool) -> ClientLayer | None:
    """What replaces such a layer, or None where it is another, or unusual, or partly frozen."""
    own = {name: entries.get(id(p)) for name, p in module.named_parameters(recurse=False)}
    weight = own.get("weight")
    if weight is None or None in own.values():
        return None
    if type(module) is nn.PReLU:
        return PReLU(module, ParameterRule(weight), taped, weight)
    if type(module) is nn.Bilinear:
        return Bilinear(module, LinearRule(_flat(weight), own.get("bias"), kernels), taped, weight)
    if type(module) is nn.EmbeddingBag and _is_plain(module):
        return EmbeddingBag(module, EmbeddingRule(weight), taped, weight)
    return None


def _flat(weight: Entry) -> Entry:
    """[out, in1, in2] as [out, in1 x in2]."""
    return replace(weight, shape=torch.Size((weight.shape[0], math.prod(weight.shape[1:]))))


def _is_plain(module: nn.EmbeddingBag) -> bool:
    unusual = module.scale_grad_by_freq or module.sparse or module.include_last_offset
    return module.mode in ("sum", "mean") and module.max_norm is None and module.padding_idx is None and not unusual


class _Composed(ClientLayer):
    """A layer of one rule; `weight` is the place of its weights, whatever shape the rule sees them in."""

    def __init__(self, layer: nn.Module, rule: Rule, taped: Taped, weight: Entry) -> None:
        super().__init__(layer, (rule,), (weight, *rule.entries[1:]))
        self._rule, self._taped = rule, taped


class PReLU(_Composed):
    """x where it is above 0, else w x, with one w or one for each channel."""

    def forward(self, x: Tensor) -> Tensor:
        """The output, with each client's own parameters for its records."""
        slopes = self._taped(self._rule, x.new_empty(self._taped.records, 0))
        return torch.where(x > 0, x, slopes.view(*slopes.shape, *[1] * (x.dim() - 2)) * x)


class Bilinear(_Composed):
    """x^T W z + b: linear in the products of all pairs."""

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """The output, with each client's own parameters for its records."""
        return self._taped(self._rule, (x.unsqueeze(-1) * z.unsqueeze(-2)).flatten(-2))


class EmbeddingBag(_Composed):
    """The sum or the mean of the embeddings of as many words in every record."""

    mode: str

    def forward(self, x: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """The output, with each client's own parameters for its records."""
        if x.dim() != 2 or offsets is not None or per_sample_weights is not None:
            raise ModelError("an nn.EmbeddingBag has a rule for bags of one length, without weights")
        words = self._taped(self._rule, x)
        return words.sum(1) if self.mode == "sum" else words.mean(1)
