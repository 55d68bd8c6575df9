"""Attention: its projections have rules, and what is between them has no parameters."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.gradients.layers.client_layer import ClientLayer, RuledLayer, Taped
from shoal.gradients.layers.linear import LinearRule
from shoal.gradients.layout import Entry


def attention_layer(
    module: nn.MultiheadAttention, entries: dict[int, Entry], taped: Taped, kernels: bool
) -> ClientLayer | None:
    """What replaces an nn.MultiheadAttention, or None where some of it is frozen or unusual."""
    own = {name: entries.get(id(p)) for name, p in module.named_parameters()}
    usual = module.bias_k is None and not module.add_zero_attn
    if not usual or None in own.values() or module.out_proj._forward_hooks or module.out_proj._forward_pre_hooks:
        return None
    return Attention(module, {name: entry for name, entry in own.items() if entry}, taped, kernels)


class Attention(ClientLayer):
    """nn.MultiheadAttention, with each client's own projections for its records."""

    num_heads: int
    embed_dim: int
    batch_first: bool
    dropout: float

    def __init__(self, layer: nn.MultiheadAttention, own: dict[str, Entry], taped: Taped, kernels: bool) -> None:
        size, bias = layer.embed_dim, own.get("in_proj_bias")
        if "in_proj_weight" in own:
            weights = [_rows(own["in_proj_weight"], size * part, size) for part in range(3)]
            self_rule = LinearRule(own["in_proj_weight"], bias, kernels)
        else:
            weights, self_rule = [own[f"{part}_proj_weight"] for part in "qkv"], None
        biases = [bias and _rows(bias, size * part, size) for part in range(3)]
        parts = tuple(LinearRule(*pair, kernels) for pair in zip(weights, biases, strict=True))
        super().__init__(layer, parts, tuple(entry for name, entry in own.items() if not name.startswith("out_proj")))
        self._self_rule, self._taped = self_rule, taped
        self._qkv_same_embed_dim = self_rule is not None
        out = LinearRule(own["out_proj.weight"], own.get("out_proj.bias"), kernels)
        self.out_proj = RuledLayer(layer.out_proj, out, lambda x: x, taped)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output and, where needed, the attention weights, as nn.MultiheadAttention gives them."""
        if query.dim() != 3:
            raise ModelError("attention takes records of shape [length, width]")
        q, k, v = (self._heads(x) for x in self._projected(query, key, value))
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q)
        weights = None
        if need_weights:
            scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
            weights = F.softmax(scores if mask is None else scores + mask, dim=3)
            weights = F.dropout(weights, self.dropout, self.training)
            attended = weights @ v
        else:
            dropout = self.dropout if self.training else 0.0
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)
        y = self.out_proj(attended.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values of every record, [N, T, E]; one product where all three have the same input."""
        if self._self_rule is not None and query is key and key is value:
            return list(self._taped(self._self_rule, self._records_first(query)).chunk(3, dim=2))
        inputs = map(self._records_first, (query, key, value))
        return [self._taped(rule, x) for rule, x in zip(self.rules, inputs, strict=True)]

    def _records_first(self, x: Tensor) -> Tensor:
        return x if self.batch_first else x.transpose(0, 1)

    def _heads(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, 2, (self.num_heads, -1)).transpose(1, 2)

    def _mask(self, attended: Tensor | None, padding: Tensor | None, query: Tensor) -> Tensor | None:
        """What is added to the scores [N, heads, T, S]."""
        attended, padding = (_added(mask, query) for mask in (attended, padding))
        if attended is not None and attended.dim() == 3:
            alike = len(attended) == 1
            attended = attended.unsqueeze(0) if alike else torch.unflatten(attended, 0, (-1, self.num_heads))
        if padding is None:
            return attended
        padding = padding[:, None, None]
        return padding if attended is None else attended + padding


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask of what is left out, as numbers to add."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)


def _rows(entry: Entry, first: int, count: int) -> Entry:
    """The place of some rows of a tensor."""
    width = math.prod(entry.shape[1:])
    start = entry.start + first * width
    return replace(entry, start=start, stop=start + count * width, shape=torch.Size((count, *entry.shape[1:])))


class RecordsFirst:
    """Mixed into PyTorch's own transformers: records come first inside, and no fast path of inference is taken."""

    transposed: bool

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """The output for arguments as the model gives them."""
        signature = inspect.signature(super().forward)  # type: ignore[misc]
        given = signature.bind(*args, **named).arguments
        for name in signature.parameters:
            if name.endswith("is_causal"):
                given[name] = bool(given.get(name))  # else they look at every number of the mask
        if self.transposed:
            given |= {name: given[name].transpose(0, 1) for name in ("src", "tgt", "memory") if name in given}
        y: Tensor = super().forward(**given)  # type: ignore[misc]
        return y.transpose(0, 1) if self.transposed else y


STACKS = (
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


def put_records_first(module: nn.Module) -> None:
    """Change one of PyTorch's own transformers so that its layers have their records along the first dimension."""
    if type(module) not in STACKS:
        return
    layers = [layer for layer in module.modules() if isinstance(layer, nn.MultiheadAttention | nn.Transformer)]
    transposed = not all(layer.batch_first for layer in layers)
    for layer in layers:
        layer.batch_first = True
    module.use_nested_tensor = False  # type: ignore[assignment]
    kind = type(module)
    module.__class__ = type(kind.__name__, (RecordsFirst, kind), {"transposed": transposed})
