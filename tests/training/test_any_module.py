"""Models that people bring: frozen parts, several inputs and outputs, sequences; trained from beginning to end."""

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.config import configure
from shoal.errors import ConfigError, DataError, ModelError
from shoal.prepare import prepare
from support.levels import CLIENT_LEVEL, LEVELS, RECORD_LEVEL

MODES = pytest.mark.parametrize("mode", ["research", "secure"])
GENERATOR = np.random.default_rng(3)
X = GENERATOR.standard_normal((240, 6)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)
OWNERS = np.repeat(np.arange(8), 30)


def backbone():
    """A frozen body with BatchNorm in eval mode, and a head."""
    torch.manual_seed(4)
    body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()).requires_grad_(False)
    body[1].eval()
    body[1].running_mean.fill_(0.25)
    return nn.Sequential(body, nn.Linear(8, 2))


class KeepsStatistics(nn.Sequential):
    """The usual way to keep BatchNorm frozen: a `train` that leaves it in eval mode."""

    def train(self, mode=True):
        super().train(mode)
        self[0][1].eval()
        return self


def trainer_of(config, data, model, mode="research"):
    settings = {**config, "random": mode, "engine": {"device": "cpu", "threads": 1}}
    return prepare(configure(settings), data, model)[1]


@pytest.mark.slow
@MODES
@LEVELS
def test_frozen_parts_stay_and_are_saved(config, mode):
    model = backbone()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = trainer_of(config, shoal.from_arrays(X, Y, client=OWNERS), model, mode)
    assert trainer.setting.parameters == trainer.params.numel() == 8 * 2 + 2
    for _ in range(config["rounds"]):
        trainer.run_round(0)
    state = trainer.model_state()
    assert state.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(state[name], tensor) is name.startswith("0."), name
    restored = backbone()
    restored.load_state_dict(state)
    x = trainer.evaluation.dataset.test_x
    predicted = restored.eval()(x).argmax(1)
    accuracy = float((predicted == trainer.evaluation.dataset.test_y).float().mean())
    assert trainer.evaluate()["accuracy"] == pytest.approx(accuracy)
    trainer.close()


@LEVELS
def test_a_frozen_part_adds_nothing_to_the_update_that_is_clipped(config):
    """However large the frozen weights are, the sum of updates has the size of the head alone."""
    model = backbone()
    trainer = trainer_of(config, shoal.from_arrays(X, Y, client=OWNERS), model)
    line = trainer.run_round(0)
    assert line["bytes_sent"] == 4 * 18 * 8
    assert all(entry.name.startswith("1.") for entry in trainer.cohort.layout.entries)
    trainer.close()


def test_a_model_that_keeps_its_statistics_itself_is_accepted():
    model = KeepsStatistics(*backbone())
    model[0][1].train()
    trainer = trainer_of(RECORD_LEVEL, shoal.from_arrays(X, Y, client=OWNERS), model)
    trainer.run_round(0)
    assert torch.equal(trainer.model_state()["0.1.running_mean"], torch.full((8,), 0.25))
    trainer.close()


def test_evaluating_leaves_every_layer_in_its_mode():
    trainer = trainer_of(RECORD_LEVEL, shoal.from_arrays(X, Y, client=OWNERS), backbone())
    modes = [layer.training for layer in trainer.evaluation.module.modules()]
    trainer.evaluate()
    assert [layer.training for layer in trainer.evaluation.module.modules()] == modes
    assert False in modes
    assert True in modes
    trainer.close()


@LEVELS
def test_batchnorm_that_is_not_frozen_is_refused_with_both_fixes(config):
    model = backbone()
    model[0][1].train()
    with pytest.raises(ModelError, match=r"layer '0.1' is BatchNorm1d.*nn.GroupNorm.*or freeze.*layer.eval\(\)"):
        trainer_of(config, shoal.from_arrays(X, Y, client=OWNERS), model)


class TwoInputs(nn.Module):
    """A category and a few numbers; its scores are not all that it gives."""

    def __init__(self, form=lambda scores: scores, dropout=0.0):
        super().__init__()
        torch.manual_seed(6)
        self.place, self.head, self.form = nn.Embedding(4, 3), nn.Linear(6 + 3, 2), form
        self.dropout = nn.Dropout(dropout)

    def forward(self, numbers, place):
        return self.form(self.head(self.dropout(torch.cat([numbers, self.place(place)], 1))))


PLACES = GENERATOR.integers(0, 4, 240)
TWO = {"numbers": X, "place": PLACES}
DECIDED_BY_PLACE = (PLACES > 1).astype(int)


@pytest.mark.slow
@LEVELS
@pytest.mark.parametrize(
    "form",
    [lambda scores: scores, lambda scores: (scores, "more"), lambda scores: {"logits": scores, "more": None}],
    ids=["tensor", "tuple", "mapping"],
)
def test_several_inputs_are_passed_by_name(config, form, tmp_path):
    data = shoal.from_arrays(TWO, DECIDED_BY_PLACE, client=OWNERS)
    assert data.input_shape == {"numbers": (6,), "place": ()}
    assert data.train_x["place"].dtype == torch.int64
    result = shoal.run(config | {"rounds": 12}, data=data, model=TwoInputs(form), runs=tmp_path)
    assert result.accuracy > 0.85
    assert len(result.figures_by_client) == 8


@pytest.mark.slow
@LEVELS
def test_several_inputs_and_dropout_train_without_rules(config, tmp_path):
    data = shoal.from_arrays(TWO, DECIDED_BY_PLACE, client=OWNERS)
    result = shoal.run(config | {"rounds": 12}, data=data, model=TwoInputs(dropout=0.2), runs=tmp_path)
    assert result.accuracy > 0.85


@pytest.mark.slow
def test_a_run_on_several_inputs_can_be_resumed_on_the_same_ones_only(tmp_path):
    data = shoal.from_arrays(TWO, DECIDED_BY_PLACE, client=OWNERS)
    run = shoal.run(CLIENT_LEVEL, data=data, model=TwoInputs(), runs=tmp_path).run
    again = shoal.run(resume=run, data=data, model=TwoInputs())
    assert again.rounds == CLIENT_LEVEL["rounds"]
    other = shoal.from_arrays(TWO | {"place": PLACES[::-1].copy()}, DECIDED_BY_PLACE, client=OWNERS)
    with pytest.raises(shoal.ShoalError):
        shoal.run(resume=run, data=other, model=TwoInputs())


def test_several_inputs_need_a_model_that_takes_them():
    data = shoal.from_arrays(TWO, Y, client=OWNERS)
    with pytest.raises(
        ModelError, match=r"model 'linear' takes one array, but records have several \(numbers, place\)"
    ):
        trainer_of(RECORD_LEVEL | {"model": "linear"}, data, None)
    with pytest.raises(ModelError, match=r"cannot take records of shape .*unexpected keyword argument 'numbers'"):
        trainer_of(RECORD_LEVEL, data, nn.Linear(6, 2))


class Mixes(TwoInputs):
    """One record's numbers in another's scores."""

    def forward(self, numbers, place):
        return super().forward(numbers - numbers.mean(0), place)


def test_a_model_that_mixes_records_of_several_inputs_is_refused():
    data = shoal.from_arrays(TWO, Y, client=OWNERS)
    with pytest.raises(ModelError, match="mixes the records of a batch"):
        trainer_of(RECORD_LEVEL, data, Mixes())


class Series(nn.Module):
    """Convolutions along a series [N, C, L]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.layer, self.head = nn.Conv1d(2, 4, 3), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer(x).relu().mean(2))


@pytest.mark.slow
@LEVELS
def test_series_keep_their_shape(config, tmp_path):
    series = GENERATOR.standard_normal((240, 2, 9)).astype(np.float32) + Y[:, None, None]
    data = shoal.from_arrays(series, Y, client=OWNERS, pictures=False)
    assert data.input_shape == (2, 9)
    assert shoal.run(config, data=data, model=Series(), runs=tmp_path).accuracy > 0.8


class Reader(nn.Module):
    """The mean of a sequence's own tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, ids, attention_mask):
        own = attention_mask.unsqueeze(2)
        return self.head((self.words(ids) * own).sum(1) / own.sum(1).clamp(min=1))


def sentences():
    lengths = GENERATOR.integers(1, 7, 240)
    return [GENERATOR.integers(0, 5, size=n) + 5 * label for n, label in zip(lengths, Y, strict=True)]


@pytest.mark.slow
@LEVELS
def test_sequences_are_padded_with_their_mask(config, tmp_path):
    words = sentences()
    data = shoal.from_arrays({"ids": words}, Y, client=OWNERS, length=5)
    assert data.input_shape == {"ids": (5,), "attention_mask": (5,)}
    lengths = sorted(min(len(own), 5) for own in words)
    found = torch.cat([data.train_x["attention_mask"], data.test_x["attention_mask"]]).sum(1)
    assert sorted(found.tolist()) == lengths
    assert shoal.run(config | {"rounds": 12}, data=data, model=Reader(), runs=tmp_path).accuracy > 0.9


class NextWord(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(9)
        self.words, self.head = nn.Embedding(10, 6), nn.Linear(6, 10)

    def forward(self, x):
        return self.head(self.words(x))


@pytest.mark.slow
@LEVELS
def test_targets_of_sequences_are_padded_with_what_counts_for_nothing(config, tmp_path):
    words = [own + 0 for own in sentences()]
    following = [(own + 1) % 10 for own in words]
    data = shoal.from_arrays(words, following, client=OWNERS, length=6, classes=list("abcdefghij"))
    assert data.task.kind == "next-token"
    assert ((data.train_y == -100) == (data.train_x == 0)).float().mean() > 0.8  # a word may be 0 too
    result = shoal.run(config | {"rounds": 12}, data=data, model=NextWord(), runs=tmp_path)
    assert result.learnt
    assert result.figures["perplexity"] < result.trivial["perplexity"]


def test_clients_may_give_several_inputs_and_sequences():
    words = sentences()
    rows = [slice(start, start + 30) for start in range(0, 240, 30)]
    clients = [({"ids": words[own], "numbers": X[own]}, Y[own]) for own in rows]
    data = shoal.from_clients(clients, length=6)
    assert data.input_shape == {"ids": (6,), "numbers": (6,), "attention_mask": (6,)}
    assert len(data.owner_names) == 8
    with pytest.raises(DataError, match=r"client 1: has the features \['other'\], client 0 has \['ids', 'numbers'\]"):
        shoal.from_clients([clients[0], ({"other": X[:2]}, Y[:2])], length=6)
    with pytest.raises(DataError, match="rows have 1 to 6 values; if they are sequences"):
        shoal.from_arrays(words, Y)
    with pytest.raises(ConfigError, match="length=6 has no effect"):
        shoal.from_arrays(X, Y, length=6)


def test_several_inputs_are_read_from_a_file_and_kept_by_name(tmp_path, monkeypatch):
    from shoal.data import imported

    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    np.savez(tmp_path / "two.npz", **{"x.numbers": X, "x.place": PLACES, "y": Y, "client": OWNERS})
    data = shoal.load(tmp_path / "two.npz")
    assert data.input_shape == {"numbers": (6,), "place": ()}
    imported.save(data, "two", "here")
    again = shoal.load("two")
    assert again.digest() == data.digest()
    assert again.input_shape == data.input_shape


class Patient(nn.Module):
    """Writes down what it sees only after the model's check, in a buffer and in what `state_dict` gives."""

    def __init__(self):
        super().__init__()
        self.scores, self.calls, self.kept = nn.Linear(6, 2), 0, torch.zeros(6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        self.calls += 1
        if self.calls > 20:
            self.kept = x.detach().reshape(-1, 6)[0].clone()
            self.seen.copy_(self.kept)
        return self.scores(x)

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


@LEVELS
def test_what_a_model_writes_down_is_not_released(config):
    trainer = trainer_of(config, shoal.from_arrays(X, Y, client=OWNERS), Patient())
    while trainer.evaluation.module.calls <= 20:
        trainer.evaluate()
    trainer.run_round(0)
    state = trainer.model_state()
    assert not state["seen"].any()
    assert not state["_extra_state"].any()
    assert torch.equal(state["scores.weight"], trainer.model_tensors()["scores.weight"])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(6, 2).double(), r"parameters of torch.float64; .* give model.float\(\)"),
        (nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 2).requires_grad_(False).bfloat16()), "torch.bfloat16"),
        (nn.Linear(6, 2).requires_grad_(False), "no parameters to train"),
    ],
)
def test_models_that_cannot_be_trained_are_refused_in_one_line(model, words):
    with pytest.raises(ModelError, match=words) as refused:
        trainer_of(CLIENT_LEVEL, shoal.from_arrays(X, Y, client=OWNERS), model)
    assert "\n" not in str(refused.value)
