"""Models of `transformers`, and with adapters of `peft`, from tiny random configurations."""

import copy

import numpy as np
import pytest
import torch

import shoal
from shoal.calling import call
from shoal.config import configure
from shoal.gradients import network
from shoal.gradients.layout import Layout
from shoal.inputs import each
from shoal.prepare import prepare
from shoal.tasks import Classification, NextToken
from support import levels

pytestmark = pytest.mark.slow  # importing the two takes seconds

WORDS, LENGTH, CLIENTS, RECORDS = 20, 8, 2, 4
GENERATOR = np.random.default_rng(11)
SENTENCES = [GENERATOR.integers(1, WORDS, size=n) for n in GENERATOR.integers(2, LENGTH + 1, 96)]
LABELS = np.array([int(own[0] >= WORDS // 2) for own in SENTENCES])
OWNERS = np.repeat(np.arange(6), 16)
FEW = {"rounds": 2, "local": {"lr": 0.1, "epochs": 1}}
CLIENT_LEVEL, RECORD_LEVEL = levels.CLIENT_LEVEL | FEW, levels.RECORD_LEVEL | FEW | {"records": {"batch": 4}}


def library(name):
    """Imported by the tests that use it, as collecting tests should be quick."""
    return pytest.importorskip(name, reason=f"needs {name} (extra 'dev')")


def bert(dropout=0.0):
    transformers = library("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2(dropout=0.0):
    """Its embedding and its output share one matrix."""
    transformers = library("transformers")
    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    none = {"bos_token_id": None, "eos_token_id": None}
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, **drops, **none
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    """Its norms are parameters of its own code; its output is tied as well."""
    transformers = library("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    return transformers.LlamaForCausalLM(config)


def lora_bert(dropout=0.0):
    peft = library("peft")
    adapter = peft.LoraConfig(r=2, lora_dropout=dropout, target_modules=["query", "value"], task_type="SEQ_CLS")
    return awake(peft.get_peft_model(bert(dropout), adapter))


def lora_gpt2(dropout=0.0):
    peft = library("peft")
    adapter = peft.LoraConfig(
        r=2, lora_dropout=dropout, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    return awake(peft.get_peft_model(gpt2(dropout), adapter))


def awake(model):
    """Adapters start at zero, where half of their gradients are zero too."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def classification(rows=96):
    return shoal.from_arrays({"input_ids": SENTENCES[:rows]}, LABELS[:rows], client=OWNERS[:rows], length=LENGTH)


def next_token(rows=96):
    own, words = SENTENCES[:rows], [str(k) for k in range(WORDS)]
    ahead = [np.append(each[1:], -100) for each in own]
    return shoal.from_arrays({"input_ids": own}, ahead, client=OWNERS[:rows], length=LENGTH, classes=words)


KINDS = {
    "bert": (bert, classification, Classification(classes=("0", "1"))),
    "gpt2": (gpt2, next_token, NextToken(vocabulary=WORDS)),
    "llama": (llama, next_token, NextToken(vocabulary=WORDS)),
    "lora bert": (lora_bert, classification, Classification(classes=("0", "1"))),
    "lora gpt2": (lora_gpt2, next_token, NextToken(vocabulary=WORDS)),
}
EVERY = pytest.mark.parametrize("kind", list(KINDS))


def plain_gradients(module, task, params, x, y):
    """Every record's gradient by a loop of plain PyTorch, [K, B, P]."""
    layout, rows = Layout.of(module), []
    for k in range(CLIENTS):
        own = copy.deepcopy(module)
        layout.load(own, params[k])
        for b in range(RECORDS):
            own.zero_grad()
            one = each(x, lambda part, k=k, b=b: part[k, b : b + 1])
            task.losses(call(own, one), y[k, b : b + 1]).sum().backward()
            rows.append(torch.cat([p.grad.flatten() for p in own.parameters() if p.requires_grad]))
    return torch.stack(rows).view(CLIENTS, RECORDS, -1)


@EVERY
@pytest.mark.parametrize("way", ["auto", "sequential"])
def test_record_gradients_are_those_of_a_plain_loop(kind, way):
    make, read, task = KINDS[kind]
    module, data = make(), read()
    x = each(data.train_x, lambda part: part[: CLIENTS * RECORDS].view(CLIENTS, RECORDS, *part.shape[1:]))
    y = data.train_y[: CLIENTS * RECORDS].view(CLIENTS, RECORDS, *data.train_y.shape[1:])
    sample = each(x, lambda part: part[0, :3])
    net = network(module, sample, y[0, :3], losses=task.losses, per_record=True, way=way)
    assert net.way == ("rules" if way == "auto" else way)
    params = torch.stack([net.layout.flatten(module) * (1 + 0.1 * k) for k in range(CLIENTS)])
    tape = net.backward(params, x, y, torch.ones(CLIENTS, RECORDS))
    expected = plain_gradients(module, task, params, x, y)
    assert float(expected.abs().max()) > 0.01
    torch.testing.assert_close(tape.records(), expected, rtol=1e-5, atol=1e-5)
    squares = tape.squares().sum(0)
    assert (squares >= expected.double().square().sum(2) * (1 - 1e-5)).all()
    torch.testing.assert_close(squares, expected.double().square().sum(2), rtol=1e-3, atol=1e-8)


@EVERY
@pytest.mark.parametrize("config", [CLIENT_LEVEL, RECORD_LEVEL], ids=["client", "record"])
def test_they_train_and_what_is_frozen_stays(kind, config):
    """Each kind at both levels and in both modes, and each level in both modes."""
    make, read, _ = KINDS[kind]
    mode = ("research", "secure")[(list(KINDS).index(kind) + (config is RECORD_LEVEL)) % 2]
    module = make()
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    settings = {**config, "random": mode, "engine": {"device": "cpu", "threads": 1}}
    trainer = prepare(configure(settings), read(48), module)[1]
    assert trainer.setting.parameters == sum(p.numel() for p in module.parameters() if p.requires_grad)
    before = trainer.model_state()
    assert trainer.run_round(0)["bad_updates"] == 0
    after = trainer.model_state()
    moved = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert moved >= trained
    tied = {"lm_head.weight"} if kind in ("gpt2", "llama") else set()
    assert moved <= trained | tied
    trainer.close()


@pytest.mark.parametrize("kind", ["bert", "lora gpt2"])
@pytest.mark.parametrize("config", [CLIENT_LEVEL, RECORD_LEVEL], ids=["client", "record"])
def test_dropout_is_drawn_and_is_repeated_by_the_seed(kind, config):
    make, read, _ = KINDS[kind]
    models = []
    for dropout in (0.2, 0.2, 0.0):
        settings = {**config, "engine": {"device": "cpu", "threads": 1}}
        trainer = prepare(configure(settings), read(24), make(dropout=dropout))[1]
        trainer.run_round(0)
        models.append(trainer.model)
        trainer.close()
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])
