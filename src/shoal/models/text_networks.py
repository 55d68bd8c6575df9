"""Small networks that predict the next token: tokens `[N, T]` in, scores `[N, T, V]` out."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.entry import Network, Shape


class CharLSTM(nn.Module):
    """An embedding, one LSTM layer (Hochreiter & Schmidhuber 1997) and a linear layer."""

    def __init__(self, tokens: int, embedded: int = 32, hidden: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedded)
        self.lstm = nn.LSTM(embedded, hidden, batch_first=True)
        self.scores = nn.Linear(hidden, tokens)
        nn.init.orthogonal_(cast(Tensor, self.lstm.weight_hh_l0))
        with torch.no_grad():
            cast(Tensor, self.lstm.bias_ih_l0)[hidden : 2 * hidden] = 1  # it begins by remembering

    def forward(self, x: Tensor) -> Tensor:
        """The scores of the token after each."""
        states, _ = self.lstm(self.embedding(x))
        scores: Tensor = self.scores(states)
        return scores


class CausalBlock(nn.Module):
    """Attention to what came before, then two linear layers; each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attended, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """`[N, T, width]` in and out."""
        n, length, width = x.shape
        parts = self.attended(self.before_attention(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(seen.transpose(1, 2).reshape(n, length, width))
        after: Tensor = x + self.layers(self.before_layers(x))
        return after


class CharTransformer(nn.Module):
    """A causal transformer (Vaswani et al. 2017; LayerNorm first, as Radford et al. 2019) with learned positions."""

    def __init__(self, tokens: int, length: int, width: int = 64, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(CausalBlock(width, heads) for _ in range(blocks)))
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, tokens)
        for embedding in (self.embedding, self.position):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """The scores of the token after each."""
        places = torch.arange(x.shape[1], device=x.device).expand_as(x)
        scores: Tensor = self.scores(self.norm(self.blocks(self.embedding(x) + self.position(places))))
        return scores


def char_lstm(shape: Shape, classes: int) -> nn.Module:
    """93,892 parameters for 68 tokens."""
    return CharLSTM(classes)


def char_transformer(shape: Shape, classes: int) -> nn.Module:
    """113,988 parameters for 68 tokens and sequences of 80."""
    return CharTransformer(classes, shape[0])


NETWORKS = (
    Network("char-lstm", "", "next token: embedding, LSTM of 128, linear layer", char_lstm, tokens=True),
    Network(
        "char-transformer",
        "",
        "next token: causal transformer, two blocks of width 64",
        char_transformer,
        tokens=True,
    ),
)
