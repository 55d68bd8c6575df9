"""The rules of layers with parameters, and which layer has one; those of convolutions are in separate files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.gradients.convolution import Conv2dRule
from shoal.gradients.convolution_cpu import cpu_rule
from shoal.gradients.convolution_cuda import cuda_rule
from shoal.gradients.layer_rule import Rule, gram_squares, kept_sum, product_squares, squared, trained, weighed
from shoal.gradients.layout import Entry
from shoal.mechanisms.update_clipping import PIECE, row_sums, summed_products
from shoal.random.noise_source import Product


def outputs(rows: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """Each client's rows [K, B, in] times its weights [K, out, in], transposed, plus its bias [K, out].

    For batches of about ten and large matrices, CPU libraries take up to twice as long in this order as in the other.
    """
    count, size = rows.shape[1], weights[0].numel()
    if 8 <= count <= 32 and size >= 250_000 and not rows.is_cuda:
        y = torch.bmm(weights, rows.transpose(1, 2)).transpose(1, 2).contiguous()
        return y if bias is None else y.add_(bias.unsqueeze(1))
    if bias is None:
        return torch.bmm(rows, weights.transpose(1, 2))
    return torch.baddbmm(bias.unsqueeze(1), rows, weights.transpose(1, 2))


class LinearRule(Rule):
    """y = x W^T + b, for inputs [N, ..., in]."""

    def __init__(self, weight: Entry, bias: Entry | None, kernels: bool = True) -> None:
        self.entries, self.weight, self.bias, self.kernels = trained(weight, bias), weight, bias, kernels

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and what the backward pass needs of the input."""
        rows = x.reshape(len(params), -1, x.shape[-1])
        y = outputs(rows, self.weight.of(params), None if self.bias is None else self.bias.of(params))
        return y.view(*x.shape[:-1], y.shape[-1]), rows

    def input_gradient(self, saved: Tensor, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""
        weight = self.weight.of(params)
        rows = torch.bmm(grad.reshape(len(params), -1, grad.shape[-1]), weight)
        return rows.view(*grad.shape[:-1], weight.shape[-1])

    def accumulate(self, saved: Tensor, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        grad = grad.reshape(len(into), -1, grad.shape[-1])
        rows = saved.view(len(into), -1, saved.shape[-1])
        self.weight.of(into).baddbmm_(grad.transpose(1, 2), rows, alpha=scale)
        if self.bias is not None:
            self.bias.of(into).add_(grad.sum(1), alpha=scale)

    def product(self, saved: Tensor, kept: None, grad: Tensor, factors: Tensor, scale: float) -> Product | None:
        """What `accumulate_weighted` adds, as a product that is added together with the noise."""
        if saved.shape[:2].numel() > factors.numel():  # several positions per record, which float32 must not sum
            return None
        grads = weighed(grad, factors).reshape(*factors.shape, -1)
        return Product(self.weight.start, saved.view(*factors.shape, -1), grads, scale)

    def accumulate_rest(self, product: Product, into: Tensor) -> None:
        """Add the gradient of the bias."""
        if self.bias is not None:
            self.bias.of(into).add_(row_sums(product.grads), alpha=product.scale)

    def accumulate_weighted(
        self, saved: Tensor, kept: None, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        rows = saved.view(len(factors), -1, saved.shape[-1])
        grads = weighed(grad, factors).reshape(*rows.shape[:2], -1)
        positions = rows.shape[1] // max(factors.shape[1], 1)
        if rows.shape[1] <= PIECE and positions == 1:
            self.accumulate(saved, grads, into, scale)
            return
        self.weight.of(into).add_(summed_products(grads, rows, positions), alpha=scale)
        if self.bias is not None:
            self.bias.of(into).add_(row_sums(grads, positions), alpha=scale)

    def squares(self, saved: Tensor, grad: Tensor) -> tuple[Tensor, None]:
        """The squared norm of every gradient, in float64."""
        grad = grad.reshape(len(grad), -1, grad.shape[-1])
        return product_squares(saved.view(len(grad), -1, saved.shape[-1]), grad, self.bias is not None), None


class AffineRule(Rule):
    """y = x w + b after a normalisation without parameters; `w` spans dimensions from `first` on."""

    def __init__(self, first: int, weight: Entry, bias: Entry | None) -> None:
        self.first, self.entries, self.weight, self.bias = first, trained(weight, bias), weight, bias

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and what the backward pass needs of the input."""
        shaped = x.reshape(len(params), -1, *x.shape[1:])
        y = shaped * self._shaped(self.weight, params, shaped)
        if self.bias is not None:
            y = y + self._shaped(self.bias, params, shaped)
        return y.view(x.shape), shaped

    def input_gradient(self, saved: Tensor, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""
        return (grad.reshape(saved.shape) * self._shaped(self.weight, params, saved)).view(grad.shape)

    def accumulate(self, saved: Tensor, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        shape = (len(into), -1, *saved.shape[2:])
        grad, x = grad.reshape(shape), saved.reshape(shape)
        self.weight.of(into).add_(self._summed(grad * x), alpha=scale)
        if self.bias is not None:
            self.bias.of(into).add_(self._summed(grad), alpha=scale)

    def squares(self, saved: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The squared norm of every gradient, in float64."""
        shape = (len(grad), 1, *saved.shape[2:])
        grad, x = grad.reshape(shape), saved.reshape(shape)
        kept = [self._summed(grad * x).flatten(1)]
        if self.bias is not None:
            kept.append(self._summed(grad).flatten(1))
        return sum((squared(gradients) for gradients in kept[1:]), squared(kept[0])), kept

    def accumulate_weighted(
        self, saved: Tensor, kept: list[Tensor] | None, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        kept = self.squares(saved, grad)[1] if kept is None else kept
        for entry, gradients in zip((self.weight, self.bias), kept, strict=False):
            assert entry is not None
            entry.of(into).flatten(1).add_(kept_sum(gradients, factors), alpha=scale)

    def _span(self, dims: int) -> tuple[int, int]:
        """The first and one past the last dimension of [K, B, ...] that the weights span."""
        first = self.first + 1 if self.first > 0 else dims + self.first
        return first, first + len(self.weight.shape)

    def _shaped(self, entry: Entry, params: Tensor, x: Tensor) -> Tensor:
        first, last = self._span(x.dim())
        shape = [1] * x.dim()
        shape[0] = len(params)
        shape[first:last] = entry.shape
        return entry.of(params).reshape(shape)

    def _summed(self, x: Tensor) -> Tensor:
        first, last = self._span(x.dim())
        return x.sum([d for d in range(1, x.dim()) if not first <= d < last])


class BiasRule(Rule):
    """y = x + b, with `b` along one dimension of the records."""

    def __init__(self, dimension: int, bias: Entry) -> None:
        self.dimension, self.entries, self.bias = dimension, (bias,), bias

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, None]:
        """The output, and what the backward pass needs of the input."""
        shaped = x.reshape(len(params), -1, *x.shape[1:]).movedim(self._place, -1)
        bias = self.bias.of(params).view(len(params), *[1] * (shaped.dim() - 2), -1)
        return (shaped + bias).movedim(-1, self._place).reshape(x.shape), None

    def input_gradient(self, saved: None, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""
        return grad

    def accumulate(self, saved: None, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        shaped = grad.reshape(len(into), -1, *grad.shape[1:]).movedim(self._place, -1)
        self.bias.of(into).add_(shaped.flatten(1, -2).sum(1), alpha=scale)

    def squares(self, saved: None, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The squared norm of every gradient, in float64."""
        shaped = grad.unsqueeze(1).movedim(self._place, -1)
        kept = shaped.flatten(1, -2).sum(1)
        return squared(kept), kept

    def accumulate_weighted(
        self, saved: None, kept: Tensor | None, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        kept = self.squares(saved, grad)[1] if kept is None else kept
        self.bias.of(into).add_(kept_sum(kept, factors), alpha=scale)

    @property
    def _place(self) -> int:
        """The dimension in [K, B, ...]."""
        return self.dimension + 1 if self.dimension > 0 else self.dimension


class EmbeddingRule(Rule):
    """y = W[x], for whole numbers [N, ...]."""

    def __init__(self, module: nn.Embedding, weight: Entry) -> None:
        self.entries, self.weight, self.padding = (weight,), weight, module.padding_idx

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and what the backward pass needs of the input."""
        return self.weight.of(params).reshape(-1, self.weight.shape[1])[self._places(x, len(params))], x

    def input_gradient(self, saved: Tensor, grad: Tensor, params: Tensor) -> Tensor:
        """Never asked for: the inputs are whole numbers."""
        raise AssertionError("whole numbers have no gradient")

    def accumulate_weighted(
        self, saved: Tensor, kept: None, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        self.accumulate(saved, weighed(grad, factors).double(), into, scale)

    def accumulate(self, saved: Tensor, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        clients, (words, width) = len(into), self.weight.shape
        total = grad.new_zeros(clients * words, width)
        total.index_add_(0, self._places(saved, clients).reshape(-1), grad.reshape(-1, width))
        total = total.view(clients, words, width)
        if self.padding is not None:
            total[:, self.padding] = 0
        self.weight.of(into).add_(total, alpha=scale)

    def squares(self, saved: Tensor, grad: Tensor) -> tuple[Tensor, None]:
        """Gradients of repeated words are summed before the norm is taken."""
        words, grad = saved.reshape(len(saved), -1), grad.reshape(len(saved), -1, grad.shape[-1])
        if self.padding is not None:
            grad = grad * (words != self.padding).unsqueeze(2)
        same = words.unsqueeze(1) == words.unsqueeze(2)
        return gram_squares(same.to(grad.dtype), grad, 1), None

    def _places(self, x: Tensor, clients: int) -> Tensor:
        """The row of every word in all clients' tables, one below the other: a word beyond its own is another's."""
        torch._assert_async(((x >= 0) & (x < self.weight.shape[0])).all(), "index out of range of an nn.Embedding")
        client = torch.arange(clients, device=x.device).repeat_interleave(len(x) // clients)
        return x + self.weight.shape[0] * client.view(-1, *[1] * (x.dim() - 1))


def rule_for(
    module: nn.Module, entries: dict[int, Entry], kernels: bool = True
) -> tuple[Rule, Callable[[Tensor], Tensor]] | None:
    """The rule of a layer and what comes before it, or None where no rule is certain to be correct.

    With `kernels` it is the fastest one for where the layer lies, else the plainest.
    """
    own = {name: entries.get(id(p)) for name, p in module.named_parameters(recurse=False)}
    weight, bias = own.get("weight"), own.get("bias")
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if weight is None:
        return _bias_alone(module, bias) if bias is not None and set(own) == {"weight", "bias"} else None
    if None in own.values():
        return None
    if type(module) is nn.Linear:
        return LinearRule(weight, bias, kernels), _same
    if type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros":
        rule = {"cpu": cpu_rule, "cuda": cuda_rule}.get(module.weight.device.type) if kernels else None
        return (rule or Conv2dRule)(module, weight, bias), _same
    if type(module) is nn.GroupNorm:
        groups, eps = module.num_groups, module.eps
        return AffineRule(1, weight, bias), lambda x: F.group_norm(x, groups, eps=eps)
    if type(module) is nn.LayerNorm:
        shape, eps = module.normalized_shape, module.eps
        return AffineRule(-len(shape), weight, bias), lambda x: F.layer_norm(x, shape, eps=eps)
    if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) and not module.training:
        return _frozen_statistics(cast(nn.BatchNorm2d, module), weight, bias)
    plain = type(module) is nn.Embedding and module.max_norm is None
    if plain and not module.scale_grad_by_freq and not module.sparse:
        return EmbeddingRule(cast(nn.Embedding, module), weight), _same
    return None


def _bias_alone(module: nn.Module, bias: Entry) -> tuple[Rule, Callable[[Tensor], Tensor]] | None:
    """A layer whose weights are frozen: the same for all clients, up to the bias."""
    if type(module) not in (nn.Linear, nn.Conv2d, nn.GroupNorm):
        return None
    frozen = copy.deepcopy(module)
    frozen.register_parameter("bias", None)
    return BiasRule(-1 if type(module) is nn.Linear else 1, bias), frozen


def _frozen_statistics(
    module: nn.BatchNorm2d, weight: Entry, bias: Entry | None
) -> tuple[Rule, Callable[[Tensor], Tensor]] | None:
    """BatchNorm in eval mode: a constant shift and scale, then those that are trained."""
    mean, variance, eps = module.running_mean, module.running_var, module.eps
    if mean is None or variance is None:
        return None
    return AffineRule(1, weight, bias), lambda x: F.batch_norm(x, mean, variance, eps=eps)


def _same(x: Tensor) -> Tensor:
    return x
