"""Which layer has which rule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.gradients.layers.affine import AffineRule, BiasRule
from shoal.gradients.layers.attention import attention_layer
from shoal.gradients.layers.client_layer import ClientLayer, RuledLayer, SpecialLayer, SpecialRule, Taped
from shoal.gradients.layers.composed import composed_layer, recurrent_cell
from shoal.gradients.layers.convolution_cuda import TritonConv2dRule
from shoal.gradients.layers.convolutions import CONVOLUTIONS, convolution_rule
from shoal.gradients.layers.embedding import EmbeddingRule
from shoal.gradients.layers.group_norm_cuda import GroupNormRule
from shoal.gradients.layers.linear import LinearRule, TransposedLinearRule
from shoal.gradients.layers.record_convolution_cuda import RecordConvolutionRule
from shoal.gradients.layers.recurrent import recurrent_layer
from shoal.gradients.layers.rule import Rule
from shoal.gradients.layers.standardised import StandardisedRule, alone, without_standardising
from shoal.gradients.layout import Entry
from shoal.standardised_convolution import StandardisedConv2d

INSTANCE_NORMS = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
Found = tuple[Rule, Callable[[Tensor], Tensor]]
"""A rule, and what comes before it."""


def client_layer(
    module: nn.Module, entries: dict[int, Entry], taped: Taped, kernels: bool = True
) -> ClientLayer | None:
    """What replaces a layer where every client has parameters of its own, or None where no rule is certain.

    Args:
        module: The layer.
        entries: The place of each trained parameter, by its id.
        taped: What runs rules.
        kernels: Whether to use the fastest kernels of the device.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) is nn.MultiheadAttention:
        return attention_layer(module, entries, taped, kernels)
    found = rule_for(module, entries, kernels)
    if found:
        special = _special(module, found[0]) if kernels else None
        return SpecialLayer(module, *found, taped, special) if special else RuledLayer(module, *found, taped)
    for layer in (composed_layer, recurrent_cell, recurrent_layer):
        if made := layer(module, entries, taped, kernels):
            return made
    return None


def rule_for(module: nn.Module, entries: dict[int, Entry], kernels: bool = True) -> Found | None:
    """The rule of a layer and what comes before it, or None where no rule is certain to be correct.

    With `kernels` it is the fastest one for where the layer lies, else the plainest.
    """
    own = {name: entries.get(id(p)) for name, p in module.named_parameters(recurse=False)}
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None:
        return _bias_alone(module, bias) if bias is not None and set(own) == {"weight", "bias"} else None
    if None in own.values():
        return None
    if type(module) is nn.Linear:
        return LinearRule(weight, bias, kernels), _same
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        return TransposedLinearRule(weight, bias, kernels), _same
    if type(module) in CONVOLUTIONS:
        return convolution_rule(module, weight, bias, kernels)
    if type(module) is StandardisedConv2d:
        rule, padded = convolution_rule(without_standardising(module), *alone(weight, bias), kernels)
        return StandardisedRule(rule, weight, bias), padded
    if type(module) is nn.Embedding:
        usual = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return (EmbeddingRule(weight, module.padding_idx), _same) if usual else None
    return _norm_rule(module, weight, bias)


def _norm_rule(module: nn.Module, weight: Entry, bias: Entry | None) -> Found | None:
    """A layer that normalises, then shifts and scales."""
    eps = cast(float, getattr(module, "eps", 0.0))
    if type(module) is nn.GroupNorm:
        groups = module.num_groups
        return AffineRule(1, weight, bias), lambda x: F.group_norm(x, groups, eps=eps)
    if type(module) is nn.LayerNorm:
        shape = module.normalized_shape
        return AffineRule(-len(shape), weight, bias), lambda x: F.layer_norm(x, shape, eps=eps)
    if type(module) is nn.RMSNorm:
        sizes, least = module.normalized_shape, module.eps  # which may be None
        return AffineRule(-len(sizes), weight, None), lambda x: F.rms_norm(x, sizes, eps=least)
    if type(module) in INSTANCE_NORMS and module.running_mean is None:
        return AffineRule(1, weight, bias), lambda x: F.group_norm(x, x.shape[1], eps=eps)
    if type(module) in BATCH_NORMS and not module.training:
        return _frozen_statistics(cast(nn.BatchNorm2d, module), weight, bias)
    return None


def _special(module: nn.Module, rule: Rule) -> SpecialRule | None:
    """The rule of one client on CUDA, where there is one."""
    if type(module) is nn.GroupNorm and isinstance(rule, AffineRule):
        return GroupNormRule(module, rule.weight, rule.bias)
    if isinstance(rule, TritonConv2dRule) and rule.even:
        return RecordConvolutionRule(rule.plain, rule.weight, rule.bias)
    if isinstance(rule, StandardisedRule) and (plain := _special(module, rule.plain)):
        return StandardisedRule(plain, rule.weight, rule.bias)
    return None


def _bias_alone(module: nn.Module, bias: Entry) -> Found | None:
    """A layer whose weights are frozen: the same for all clients, up to the bias."""
    if type(module) not in (nn.Linear, nn.GroupNorm, *CONVOLUTIONS):
        return None
    frozen = copy.deepcopy(module)
    frozen.register_parameter("bias", None)
    return BiasRule(-1 if type(module) is nn.Linear else 1, bias), frozen


def _frozen_statistics(module: nn.BatchNorm2d, weight: Entry, bias: Entry | None) -> Found | None:
    """BatchNorm in eval mode: a constant shift and scale, then those that are trained."""
    mean, variance, eps = module.running_mean, module.running_var, module.eps
    if mean is None or variance is None:
        return None
    return AffineRule(1, weight, bias), lambda x: F.batch_norm(x, mean, variance, eps=eps)


def _same(x: Tensor) -> Tensor:
    return x
