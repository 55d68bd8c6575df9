"""Transformers as people write them: a round by their rules ends where the sequential way ends."""

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.config import configure
from shoal.errors import ModelError
from shoal.prepare import prepare
from support.levels import CLIENT_LEVEL, LEVELS, RECORD_LEVEL

WORDS, LENGTH, WIDTH = 12, 6, 8
GENERATOR = np.random.default_rng(5)
TEXTS = GENERATOR.integers(0, WORDS, (96, LENGTH))
PICTURES = GENERATOR.standard_normal((96, 1, 8, 8)).astype(np.float32)
LABELS, OWNERS = TEXTS[:, 0] % 2, np.repeat(np.arange(6), 16)


class Classifier(nn.Module):
    """Words, learnt positions, nn.TransformerEncoder as PyTorch makes it by default."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, 1, WIDTH))
        self.body = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.head(self.body(self.words(x).transpose(0, 1) + self.positions).mean(0))


class Vision(nn.Module):
    """Patches with a class token and positions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.patches = nn.Conv2d(1, WIDTH, 4, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 5, WIDTH))
        self.body = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.body(x)[:, 0])


class Language(nn.Module):
    """In the manner of nanoGPT: positions by an embedding, a head that is tied to the words."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        y, hidden = self.norm(x), torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.head(x + self.attention(y, y, y, attn_mask=hidden, need_weights=False)[0])


MODELS = {
    "classifier": (Classifier, lambda: shoal.from_arrays(TEXTS, LABELS, client=OWNERS)),
    "vision": (Vision, lambda: shoal.from_arrays(PICTURES, LABELS, client=OWNERS)),
    "language": (
        Language,
        lambda: shoal.from_arrays(
            TEXTS, np.roll(TEXTS, -1, 1), client=OWNERS, classes=[str(word) for word in range(WORDS)]
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@LEVELS
def test_a_round_ends_where_the_sequential_way_ends(name, config):
    make, data = MODELS[name]
    found = []
    for way in ("rules", "sequential"):
        engine = {"device": "cpu", "threads": 1, "way": way}
        trainer = prepare(configure({**config, "engine": engine}), data(), make())[1]
        assert trainer.cohort.network.way == way
        start = trainer.params.clone()
        trainer.run_round(0)
        found.append(trainer.params - start)
        trainer.close()
    assert float(found[0].abs().max()) > 0.01
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


class Mixes(Classifier):
    """Records in the place of words."""

    def forward(self, x):
        return self.head(self.body(self.words(x) + self.positions[:, 0]).mean(1))


@pytest.mark.slow
def test_attention_between_records_is_refused():
    settings = {**RECORD_LEVEL, "engine": {"device": "cpu", "threads": 1}}
    with pytest.raises(ModelError, match="mixes the records of a batch"):
        prepare(configure(settings), shoal.from_arrays(TEXTS, LABELS, client=OWNERS), Mixes())
    settings = {**CLIENT_LEVEL, "engine": {"device": "cpu", "threads": 1}}
    trainer = prepare(configure(settings), shoal.from_arrays(TEXTS, LABELS, client=OWNERS), Mixes())[1]
    assert trainer.cohort.network.way == "sequential"
    trainer.close()
