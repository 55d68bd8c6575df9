"""A user's own networks, as a bundle names them."""

from torch import cat, nn


class Small(nn.Module):
    """A frozen layer, a buffer and a trained layer; built by its name."""

    def __init__(self, input_shape, outputs):
        super().__init__()
        self.fixed = nn.Linear(input_shape[0], 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5, affine=False).requires_grad_(False).eval()
        self.scores = nn.Linear(5, outputs)

    def forward(self, x):
        return self.scores(self.norm(self.fixed(x)).tanh())


class Tokens(nn.Module):
    """Sees the token at each place and guesses the next; its two tables of weights are one."""

    def __init__(self, tokens=6):
        super().__init__()
        self.embedding, self.scores = nn.Embedding(tokens, 8), nn.Linear(8, tokens, bias=False)
        self.scores.weight = self.embedding.weight

    def forward(self, x):
        return self.scores(self.embedding(x))


class Rating(nn.Module):
    """Two inputs by name: a number of a user, and numbers that say what is rated."""

    def __init__(self):
        super().__init__()
        self.users, self.scores = nn.Embedding(5, 3), nn.Linear(7, 2)

    def forward(self, user, item):
        return {"logits": self.scores(cat([self.users(user), item.flatten(1)], 1))}
