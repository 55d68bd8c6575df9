"""Attention and PyTorch's own transformers get rules, as users write and call them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.gradients import network
from shoal.gradients.batched import without_rule
from shoal.gradients.layers.attention import Attention
from shoal.gradients.layout import Layout
from support.both_ways import assert_both_ways_agree

WORDS, WIDTH, LENGTH = 11, 8, 5


class Attends(nn.Module):
    """One attention, of words to themselves or to numbers, with masks of every kind."""

    def __init__(self, sort, masks, weights, batch_first=True, bias=True, heads=2):
        super().__init__()
        torch.manual_seed(3)
        width = {"kdim": 6, "vdim": 6} if sort == "other widths" else {}
        self.words, self.other = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, width.get("kdim", WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, heads, bias=bias, batch_first=batch_first, **width)
        self.head = nn.Linear(WIDTH, 3)
        self.sort, self.masks, self.weights, self.first = sort, masks, weights, batch_first

    def forward(self, x):
        query, keys = self.words(x), self.other(x[:, 1:] if self.sort == "cross" else x)
        if self.sort == "self":
            keys = query
        if not self.first:
            query, keys = query.transpose(0, 1), keys.transpose(0, 1)
            keys = query if self.sort == "self" else keys
        values = keys.flip(1 if self.first else 0) if self.sort == "three inputs" else keys
        y, seen = self.attention(query, keys, values, **self.given(x, keys), **self.weights)
        y = y if self.first else y.transpose(0, 1)
        return self.head(y.mean(1)) if seen is None else self.head(y.mean(1)) * seen.square().sum((1, 2)).view(-1, 1)

    def given(self, x, keys):
        source = keys.shape[1 if self.first else 0]
        found = {}
        if "padding" in self.masks:
            found["key_padding_mask"] = (x[:, :source] == 0) & (torch.arange(source) > 0)
        if "causal" in self.masks:
            found["attn_mask"] = torch.ones(x.shape[1], source, dtype=torch.bool).triu(1)
            found["is_causal"] = self.masks == "causal" and source == x.shape[1]
        if "numbers" in self.masks:
            found["attn_mask"] = torch.linspace(-1, 1, x.shape[1] * source).double().view(x.shape[1], source)
        return found


SORTS = ["self", "cross", "three inputs", "other widths"]
MASKS = ["", "padding", "causal", "causal, padding", "numbers"]
WEIGHTS = [{"need_weights": False}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("sort", range(len(SORTS)), ids=SORTS.__getitem__)
@pytest.mark.parametrize("masks", range(len(MASKS)), ids=MASKS.__getitem__)
def test_attention_of_every_sort(sort, masks):
    """Each sort with each mask, and each of both with weights and without: every pair, not every triple."""
    torch.manual_seed(0)
    module = Attends(SORTS[sort], MASKS[masks], WEIGHTS[(sort + masks) % 2])
    assert_both_ways_agree(module, torch.randint(0, WORDS, (2, 3, LENGTH)))


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)  # pairs of sorts, masks and weights are all tried above
@given(
    st.sampled_from(SORTS),
    st.sampled_from(MASKS),
    st.sampled_from(WEIGHTS),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.sampled_from([0, 1, 4]),
    st.sampled_from([2, 5, 12]),
)
def test_random_attention(sort, masks, weights, first, bias, heads, clients, batch, length):
    torch.manual_seed(0)
    module = Attends(sort, masks, weights, first, bias, heads)
    assert_both_ways_agree(module, torch.randint(0, WORDS, (clients, batch, length)))


@pytest.mark.slow
def test_a_mask_for_each_record_and_head():
    """vmap cannot tell such a mask's records apart; the batch and one record after another can."""

    class Near(Attends):
        def given(self, x, keys):
            distance = (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).abs().double()
            return {"attn_mask": -(distance * x[:, :1, None] * 0.1).repeat_interleave(2, 0)}

    torch.manual_seed(0)
    assert_both_ways_agree(Near("self", "", {"need_weights": False}), torch.randint(0, WORDS, (2, 3, LENGTH)))


@pytest.mark.slow
def test_weights_of_every_head_come_as_pytorch_gives_them():
    class PerHead(Attends):
        def forward(self, x):
            query = self.words(x)
            y, seen = self.attention(query, query, query, average_attn_weights=False)
            assert seen.shape == (len(x), 2, LENGTH, LENGTH)
            return self.head(y.mean(1)) * seen.square().sum((1, 2, 3)).view(-1, 1)

    torch.manual_seed(0)
    assert_both_ways_agree(PerHead("self", "", {}), torch.randint(0, WORDS, (2, 3, LENGTH)))


class Encoder(nn.Module):
    """nn.TransformerEncoder as a classifier of texts."""

    def __init__(self, batch_first, dropout=0.0, evaluating=False, **options):
        super().__init__()
        torch.manual_seed(4)
        self.words, self.head, self.first = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3), batch_first
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout, batch_first=batch_first, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH))
        if evaluating:
            self.encoder.eval()

    def forward(self, x):
        words = self.words(x) if self.first else self.words(x).transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) != 0
        padding = (x == 0) & (torch.arange(x.shape[1]) > 0)
        y = self.encoder(words, mask if self.first else None, src_key_padding_mask=padding)
        return self.head(y.mean(1 if self.first else 0))


NESTED = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")


@pytest.mark.slow
@NESTED
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("evaluating", [False, True])
@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}, {"bias": False}])
def test_transformer_encoder(batch_first, evaluating, options):
    torch.manual_seed(0)
    module = Encoder(batch_first, evaluating=evaluating, **options)
    assert_both_ways_agree(module, torch.randint(0, WORDS, (2, 3, LENGTH)))


@pytest.mark.slow
@NESTED
def test_a_frozen_embedding_does_not_lead_to_the_fast_path_of_inference():
    torch.manual_seed(0)
    module = Encoder(True, evaluating=True)
    module.words.requires_grad_(False)
    assert_both_ways_agree(module, torch.randint(0, WORDS, (2, 3, LENGTH)))


@pytest.mark.slow
@NESTED
@pytest.mark.parametrize("batch_first", [True, False])
def test_encoder_and_decoder(batch_first):
    class Translates(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3)
            self.body = nn.Transformer(WIDTH, 2, 1, 1, 16, 0.0, batch_first=batch_first)

        def forward(self, x):
            words = self.words(x) if batch_first else self.words(x).transpose(0, 1)
            source, target = (words, words[:, 1:]) if batch_first else (words, words[1:])
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1] - 1)
            y = self.body(source, target, tgt_mask=mask.to(words.dtype))
            return self.head(y.mean(1 if batch_first else 0))

    torch.manual_seed(0)
    assert_both_ways_agree(Translates(), torch.randint(0, WORDS, (2, 3, LENGTH)))


def test_attention_that_is_unusual_has_no_rule():
    for attention in (
        nn.MultiheadAttention(4, 2, add_bias_kv=True),
        nn.MultiheadAttention(4, 2, add_zero_attn=True),
    ):
        module = nn.Sequential(attention)
        assert without_rule(module, Layout.of(module))[0] == "0 (MultiheadAttention)"


class MixesRecords(Attends):
    """Records in the place of words: attention of one record to another."""

    def forward(self, x):
        words = self.words(x).transpose(0, 1)
        return self.head(self.attention(words, words, words)[0].mean(0))


class Unbatched(Attends):
    def forward(self, x):
        words = self.words(x).mean(1)
        return self.head(self.attention(words, words, words)[0])


@pytest.mark.parametrize("make", [MixesRecords, Unbatched])
@pytest.mark.parametrize("per_record", [False, True])
def test_attention_between_records_goes_one_client_after_the_other(make, per_record):
    module = make("self", "", {})
    assert network(module, torch.randint(0, WORDS, (3, LENGTH)), per_record=per_record).way != "rules"


def test_what_replaces_attention_says_what_it_is():
    class Asks(Attends):
        def forward(self, x):
            assert isinstance(self.attention, Attention | nn.MultiheadAttention)
            assert self.attention.embed_dim == self.attention.out_proj.in_features == WIDTH
            assert self.attention.in_proj_weight.shape == (3 * WIDTH, WIDTH)
            return super().forward(x)

    assert network(Asks("self", "", {}), torch.randint(0, WORDS, (3, LENGTH))).way == "rules"
