"""Layers that are other layers' rules after, or between, operations without parameters."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

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


def recurrent_cell(module: nn.Module, entries: dict[int, Entry], taped: Taped, kernels: bool) -> ClientLayer | None:
    """What replaces a cell that the model's own code calls at every time step, or None where some of it is frozen."""
    kind = {nn.LSTMCell: LSTMCell, nn.GRUCell: GRUCell, nn.RNNCell: RNNCell}.get(type(module))
    own = {name: entries.get(id(p)) for name, p in module.named_parameters(recurse=False)}
    if kind is None or None in own.values():
        return None
    inputs, hidden = (
        LinearRule(cast(Entry, own[f"weight_{part}"]), own.get(f"bias_{part}"), kernels) for part in ("ih", "hh")
    )
    return kind(module, inputs, hidden, taped)


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


class _Cell(ClientLayer):
    """A recurrent cell: two linear layers, whose gradients are summed over all calls (`merging`), and their gates."""

    hidden_size: int
    nonlinearity: str

    def __init__(self, layer: nn.Module, inputs: LinearRule, hidden: LinearRule, taped: Taped) -> None:
        super().__init__(layer, (inputs, hidden))
        self._inputs, self._hidden, self._taped = inputs, hidden, taped

    def _linear(self, x: Tensor, hx: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """What the inputs and the state contribute to the gates, and the state, which may be missing at first."""
        if x.dim() != 2 or len(x) != self._taped.records:
            raise ModelError("a recurrent cell must get one row per record; set engine.way=sequential")
        h = x.new_zeros(len(x), self.hidden_size) if hx is None else hx
        return self._taped(self._inputs, x), self._taped(self._hidden, h), h


class LSTMCell(_Cell):
    """i, f, g, o = W x + U h;  c <- sigmoid(f) c + sigmoid(i) tanh(g);  h <- sigmoid(o) tanh(c)."""

    def forward(self, x: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The next states, with each client's own parameters for its records."""
        given, inner, h = self._linear(x, hx[0] if hx else None)
        i, f, g, o = (given + inner).chunk(4, 1)
        c = f.sigmoid() * (hx[1] if hx else torch.zeros_like(h)) + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class GRUCell(_Cell):
    """r, z = sigmoid(W x + U h);  n = tanh(W x + r U h);  h <- (1 - z) n + z h."""

    def forward(self, x: Tensor, hx: Tensor | None = None) -> Tensor:
        """The next state, with each client's own parameters for its records."""
        given, inner, h = self._linear(x, hx)
        (r, z, n), (inner_r, inner_z, inner_n) = given.chunk(3, 1), inner.chunk(3, 1)
        n = torch.tanh(n + (r + inner_r).sigmoid() * inner_n)
        return torch.lerp(n, h.to(n.dtype), (z + inner_z).sigmoid())


class RNNCell(_Cell):
    """h <- tanh(W x + U h), or relu."""

    def forward(self, x: Tensor, hx: Tensor | None = None) -> Tensor:
        """The next state, with each client's own parameters for its records."""
        given, inner, _ = self._linear(x, hx)
        return torch.relu(given + inner) if self.nonlinearity == "relu" else torch.tanh(given + inner)


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
