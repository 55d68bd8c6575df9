"""A model of ratings (shoal.data.ratings): the client's own mean, plus what each public token adds to it."""

from __future__ import annotations

from torch import Tensor, nn

from shoal.models.entry import Network, Shape

TOKENS, FEW_TOKENS = (1 << 14) + 64, 1 << 12
THOUSANDTHS = 1000
OTHERS = 0.1  # the weight of all tokens but the first


class Ratings(nn.Module):
    """rating = own mean + b[first token] + 0.1 sum b[other tokens], on the scale [0, 1]; token 0 is none.

    Every bias begins at zero, so that the first prediction is the client's own mean. The first token is the thing
    that is rated; the others are shared by many things, so that their gradients would crowd out those of the things.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.biases = nn.Embedding(tokens, 1)
        nn.init.zeros_(self.biases.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Whole numbers `[N, 1 + tokens]`, the own mean in thousandths first, to ratings `[N, 1]`."""
        own, tokens = x[:, :1] / THOUSANDTHS, x[:, 1:]
        biases = (self.biases(tokens) * (tokens > 0).unsqueeze(-1)).squeeze(-1)
        rating: Tensor = own + biases[:, :1] + OTHERS * biases[:, 1:].sum(1, keepdim=True)
        return rating


def ratings(shape: Shape, outputs: int) -> nn.Module:
    """For up to 16,448 tokens."""
    return Ratings(TOKENS)


def ratings_small(shape: Shape, outputs: int) -> nn.Module:
    """For up to 4,096 tokens."""
    return Ratings(FEW_TOKENS)


NETWORKS = (
    Network("ratings", "", "own mean plus a bias a token, up to 16,448 tokens", ratings, tokens=True),
    Network("ratings-small", "", "own mean plus a bias a token, up to 4,096 tokens", ratings_small, tokens=True),
)
