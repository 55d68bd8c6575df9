"""What a victim would show, for many of them at once, as a function that can be differentiated again.

    gradients(module)       G[v] = d/dw mean_b loss(w; x[v, b], y[v, b]), all victims at the same weights w
    clipped(...)            the same, with each record's gradient clipped first, as the method does it
    updates(module, ...)    what a client's whole local training would send, from the same w

An attacker knows the model (it is the global one of the round) and searches for examples that explain what was
seen. Layers that every attack network is made of (convolutions, linear layers) are taped: one backward pass to
their outputs, then one product a victim. Anything else goes through torch.func, slower and as right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from shoal.gradients import Layout

GradientMap = Callable[[Tensor, Tensor], Tensor]
"""(x [V, B, ...], y [V, B, C], whose rows are probabilities) -> [V, P], differentiable in both."""
Shrink = Callable[[Tensor], Tensor]
"""Vectors [N, P] -> the same, each clipped."""


def gradients(module: nn.Module) -> GradientMap:
    """The gradient of each victim's mean loss, by the fastest way that is right for this model."""
    module = copy.deepcopy(module).eval()
    return _Taped(module) if _all_taped(module) else vmap(_slope(module))


def clipped(each: GradientMap, clip: Shrink) -> GradientMap:
    """The mean over a batch of gradients that are clipped one by one."""

    def mean(x: Tensor, y: Tensor) -> Tensor:
        alone = each(x.flatten(0, 1).unsqueeze(1), y.flatten(0, 1).unsqueeze(1))
        return clip(alone).view(*x.shape[:2], alone.shape[1]).mean(1)

    return mean


def updates(
    module: nn.Module,
    batches: Sequence[Sequence[int]],
    *,
    lr: float,
    momentum: float,
    clip: Shrink | None,
    divisor: float | None = None,
) -> GradientMap:
    """The update of a local SGD step for each of the batches, which number the victim's records.

    A batch's gradients are summed and divided by the `divisor`, or by how many they are.
    """
    module = copy.deepcopy(module).eval()
    start = Layout.of(module).flatten(module)
    slope = _slope_at(module)
    places = [torch.tensor(batch, device=start.device) for batch in batches]

    def update(x: Tensor, y: Tensor) -> Tensor:
        params, velocity = start, torch.zeros_like(start)
        for place in places:
            part_x, part_y = x[place], y[place]
            if clip is None:
                step = slope(params, part_x, part_y)
            else:
                alone = vmap(slope, in_dims=(None, 0, 0))(params, part_x.unsqueeze(1), part_y.unsqueeze(1))
                step = clip(alone).mean(0)
            velocity = momentum * velocity + step * (len(place) / (divisor or len(place)))
            params = params - lr * velocity
        return params - start

    return vmap(update)


def soft_losses(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy with probabilities for labels, one number a row."""
    return -(y * F.log_softmax(logits, dim=-1)).sum(-1)


def _slope_at(module: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The gradient of one client's mean loss at any parameters [P]."""
    layout = Layout.of(module)
    rest = {name: tensor.detach() for name, tensor in module.named_buffers()}

    def loss(params: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return soft_losses(functional_call(module, rest | layout.views(params), (x,)), y).mean()

    return grad(loss)


def _slope(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    slope, params = _slope_at(module), Layout.of(module).flatten(module)
    return lambda x, y: slope(params, x, y)


class _Taped:
    """Convolutions and linear layers: inputs and output gradients are caught, their products are the gradient."""

    def __init__(self, module: nn.Module) -> None:
        self._layout = Layout.of(module)
        self._module = module.requires_grad_(False)
        self._seen: list[tuple[str, nn.Module, Tensor, Tensor]] = []
        for name, child in module.named_modules():
            if isinstance(child, nn.Conv2d | nn.Linear):
                child.register_forward_hook(self._catch(f"{name}." if name else ""))

    def _catch(self, prefix: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(child: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self._seen.append((prefix, child, inputs[0], output))

        return hook

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        victims, batch = x.shape[:2]
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        self._seen.clear()
        logits = self._module(x.flatten(0, 1))
        loss = soft_losses(logits, y.flatten(0, 1)).sum() / batch
        seen, self._seen = self._seen, []
        after = torch.autograd.grad(loss, [output for *_, output in seen], create_graph=True)
        found: dict[str, Tensor] = {}
        for (prefix, child, before, _), slope in zip(seen, after, strict=True):
            found[f"{prefix}weight"], found[f"{prefix}bias"] = _products(child, before, slope, victims)
        return torch.cat([found[entry.name].flatten(1) for entry in self._layout.entries], dim=1)


def _products(child: nn.Module, before: Tensor, after: Tensor, victims: int) -> tuple[Tensor, Tensor]:
    """A layer's weight and bias gradient, summed over each victim's batch."""
    if isinstance(child, nn.Conv2d):
        assert not isinstance(child.padding, str)
        before = F.unfold(before, child.kernel_size, child.dilation, child.padding, child.stride)
        after = after.flatten(2)
    else:
        before, after = (part.flatten(1, -2).mT if part.dim() > 2 else part.unsqueeze(2) for part in (before, after))
    # In this order the slope of the patches comes out as they lie, and need not be copied.
    weight, bias = torch.bmm(before, after.mT).mT, after.sum(2)
    if len(before) == victims:
        return weight, bias
    return _by_victim(weight, victims), _by_victim(bias, victims)


def _by_victim(each: Tensor, victims: int) -> Tensor:
    return each.reshape(victims, len(each) // victims, *each.shape[1:]).sum(1)


def _all_taped(module: nn.Module) -> bool:
    """Whether the model is a chain of layers that can be taped, none of which shares a parameter."""
    if list(module.buffers()) or not _chain(module):
        return False
    layers = [child for child in module.modules() if _tapeable(child)]
    held = [id(p) for child in layers for p in child.parameters(recurse=False)]
    return len(set(held)) == len(held) and set(held) == {id(p) for p in module.parameters()}


def _chain(module: nn.Module) -> bool:
    return all(isinstance(child, nn.Sequential) or not list(child.children()) for child in module.modules())


def _tapeable(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return isinstance(layer, nn.Linear)
