"""Dropout by masks of each record's own, whatever is computed beside it.

A record has a seed in every step, drawn from its client's stream (`batch_plan.planned`). It alone decides what is
dropped of this record: number `e` of the record in the model's draw number `c` is dropped by the bits of
SplitMix64(seed, c, e). So all ways drop the same, in any chunk or piece of a batch, and in a step that is run again.
What a record contributes is then a function of itself, the model and its own seed: it is clipped as without dropout.

Which dimension of a draw has the records is found out with as many records and twice as many.
SplitMix64: Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from shoal.errors import ModelError

STEP, FIRST, SECOND = (
    -0x61C8864680B583EB,
    -0x40A7B892E31B1A47,
    -0x6B2FB644ECCEEE15,
)
"""The constants of SplitMix64, as signed numbers."""


def mixed(words: Tensor) -> Tensor:
    """The finaliser of SplitMix64, in place: a bijection of 64-bit words that leaves no trace of their order."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        words ^= _shifted(words, shift)
        words *= factor
    words ^= _shifted(words, 31)
    return words


def _shifted(words: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left: `>>` keeps the sign."""
    return (words >> by).bitwise_and_((1 << 64 - by) - 1)


class Dropping(TorchFunctionMode):
    """While it is open, dropout of the model's code is by the masks of records with these seeds [N].

    `places` is the dimension of the records in each draw of a pass; `shapes` gets the shapes of its draws.
    """

    def __init__(self, seeds: Tensor, places: Sequence[int]) -> None:
        super().__init__()
        self._seeds, self._places = seeds, places
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Exchange the functions that draw."""
        ours = _OURS.get(function)
        return function(*args, **(kwargs or {})) if ours is None else ours(self, function, *args, **(kwargs or {}))

    def kept(self, shape: Sequence[int], probability: float) -> Tensor:
        """Which numbers of a draw of this shape are kept, where each is dropped with this probability."""
        if _runs_again():
            raise ModelError("dropout in a checkpointed part of the model is run twice; set its probability to 0")
        draw, records = len(self.shapes), len(self._seeds)
        self.shapes.append(tuple(shape))
        place = self._places[draw] if draw < len(self._places) else len(shape)
        if place >= len(shape) or shape[place] % records:
            raise ModelError(f"dropout of shape {[*shape]} is not of {records} records; set its probability to 0")
        rows = shape[place], *shape[:place], *shape[place + 1 :]
        if probability >= 1:
            return torch.zeros(shape, dtype=torch.bool, device=self._seeds.device)
        count = math.prod(rows) // records
        first = mixed(self._seeds + (draw + 1) * STEP % 2**63)
        words = mixed(first.unsqueeze(1) + torch.arange(-(-count // 2), device=first.device) * STEP)
        bits = _halves(words)[:, :count]  # uniform from -2^31 on
        dropped = min(round(probability * 2**32), 2**32 - 1)  # of 2^32; one more would be no int32
        return (bits >= dropped - 2**31).reshape(rows).movedim(0, place)


def _halves(words: Tensor) -> Tensor:
    """The two numbers of 32 bits in each word of 64, the lower one first."""
    try:
        return words.view(torch.int32)
    except RuntimeError:  # vmap cannot transform that before PyTorch 2.13
        return torch.stack([words << 32 >> 32, words >> 32], -1).flatten(-2)


def _runs_again() -> bool:
    """Is this part checkpointed? It then has no gradients for now, or hooks for what is saved."""
    try:
        with disable_saved_tensors_hooks(""):  # fails where there are any
            return not torch.is_grad_enabled()
    except RuntimeError:
        return True


def dropping(seeds: Tensor | None, places: Sequence[int] | None) -> AbstractContextManager[object]:
    """The mode for records with these seeds, [N] or [K, B]; nothing where the model has no such draws."""
    if not places:
        return nullcontext()
    assert seeds is not None, "a model with dropout needs a seed for each record"
    return Dropping(seeds.flatten(), places)


class _Watching(Dropping):
    """Draws nothing, and writes down what would be drawn."""

    def kept(self, shape: Sequence[int], probability: float) -> Tensor:
        self.shapes.append(tuple(shape))
        return torch.ones(shape, dtype=torch.bool, device=self._seeds.device)


def places_of(run: Callable[[int], object], device: torch.device) -> list[int] | None:
    """The dimension of the records in each draw of a pass, which is run with 1 and with 2 times as many records.

    None where a draw has no such dimension: one mask for all records, or for all pairs of them.
    """
    seen = []
    for times in (1, 2):
        with torch.no_grad(), _Watching(torch.zeros(1, device=device), ()) as watching:
            run(times)
        seen.append(watching.shapes)
    one, two = seen
    if [*map(len, one)] != [*map(len, two)]:
        return None
    found = [
        [place for place, sizes in enumerate(zip(*pair, strict=True)) if sizes[0] != sizes[1]]
        for pair in zip(one, two, strict=True)
    ]
    return [places[0] for places in found] if all(len(places) == 1 for places in found) else None


def _dropout(
    mode: Dropping, function: Any, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return _dropped(mode, function, x, x.shape, p, training, inplace)


def _feature_dropout(
    mode: Dropping, function: Any, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if x.dim() < 3:
        return _dropped(mode, function, x, (), p, training, inplace)  # of no record: its channels may be records
    drawn = 1 if function is F.dropout3d and x.dim() != 5 else 2  # PyTorch takes others for one record's channels
    return _dropped(mode, function, x, (*x.shape[:drawn], *[1] * (x.dim() - drawn)), p, training, inplace)


def _dropped(
    mode: Dropping, function: Any, x: Tensor, shape: Sequence[int], p: float, training: bool, inplace: bool
) -> Tensor:
    """`x` without what is dropped of masks of this shape; the rest is larger by as much."""
    if not training or not 0 < p <= 1:
        return function(x, p, training)  # type: ignore[no-any-return]
    factors = mode.kept(shape, p).to(x.dtype).mul_(1 / (1 - p) if p < 1 else 0.0)
    return x.mul_(factors) if inplace else x * factors


def _attention(
    mode: Dropping,
    function: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    if not dropout_p:
        return function(query, key, value, attn_mask, dropout_p, is_causal, **options)  # type: ignore[no-any-return]
    if is_causal:
        attn_mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if options.get("enable_gqa"):
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scale = options.get("scale") or 1 / math.sqrt(query.shape[-1])
    scores = query @ key.transpose(-2, -1) * scale
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = torch._safe_softmax(scores, -1)  # 0 where all is masked, as in PyTorch
    return _dropout(mode, F.dropout, weights, dropout_p) @ value


def _attention_layer(mode: Dropping, function: Any, *args: Any, **named: Any) -> Any:
    """Its own code, which PyTorch would run outside of the mode."""
    with mode:
        return _attention_code(*args, **named)


_attention_code = FunctionType(
    F.multi_head_attention_forward.__code__,
    vars(F) | {"has_torch_function": lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def _recurrent(mode: Dropping, function: Any, x: Tensor, hx: Any, weights: Any, *options: Any) -> Any:
    """One layer after the other, with dropout between them."""
    packed = not isinstance(options[0], bool)
    biases, layers, dropout, training, both, first = (False, 1, 0.0, False, False, False) if packed else options
    if not (training and dropout and layers > 1):
        return function(x, hx, weights, *options)
    several, each = isinstance(hx, tuple), len(weights) // layers
    states = [state.chunk(layers) for state in (hx if several else (hx,))]
    found = []
    for layer in range(layers):
        own = tuple(state[layer] for state in states)
        part = weights[layer * each : (layer + 1) * each]
        y, *last = function(x, own if several else own[0], part, biases, 1, 0.0, training, both, first)
        found.append(last)
        x = _dropout(mode, F.dropout, y, dropout) if layer < layers - 1 else y
    return x, *map(torch.cat, zip(*found, strict=True))


def _bernoulli(mode: Dropping, function: Any, x: Tensor, p: float = 0.5, **options: Any) -> Tensor:
    """As in stochastic depth, which draws whether a record is kept."""
    if isinstance(p, Tensor) or options or not 0 < p < 1:
        return function(x, p, **options)  # type: ignore[no-any-return]
    return x.copy_(mode.kept(x.shape, 1 - p))


_OURS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.dropout, torch.dropout), _dropout),
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout), _feature_dropout),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _attention_layer,
    Tensor.bernoulli_: _bernoulli,
}
