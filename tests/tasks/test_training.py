"""Every task is trained from beginning to end, at client level and at record level."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.errors import ConfigError, DataError, ModelError
from shoal.prepare import with_task
from shoal.tasks import TaskSettings
from support.levels import CLIENT_LEVEL, LEVELS

GENERATOR = np.random.default_rng(5)
X = GENERATOR.standard_normal((240, 4)).astype(np.float32)
OWNERS = np.repeat(np.arange(8), 30)


def linear(outputs):
    """From zero, so that nothing depends on a seed."""
    layer = nn.Linear(4, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def trained(config, data, model, folder, **task):
    return shoal.run(config | {"task": task}, data=data, model=model, runs=folder)


@pytest.mark.slow
@LEVELS
def test_regression_learns(config, tmp_path):
    y = (2 + X[:, 0] - 0.5 * X[:, 1]).clip(0, 5).astype(np.float32)
    data = shoal.from_arrays(X, y, client=OWNERS)
    result = trained(config | {"local": {"lr": 0.1, "epochs": 4}}, data, linear(1), tmp_path, range=(0.0, 5.0))
    assert (result.task, result.headline) == ("regression", "rmse")
    assert result.score < 0.6 * result.trivial["rmse"]
    assert result.learnt
    assert len(result.figures_by_client) == 8
    with pytest.raises(shoal.errors.RunError, match=r"a regression has no accuracy.*result\.score"):
        _ = result.accuracy


@pytest.mark.slow
@LEVELS
def test_multi_label_learns(config, tmp_path):
    y = (np.stack([X[:, 0], X[:, 1] + X[:, 2], -X[:, 3]], 1) > 0).astype(np.float32)
    data = shoal.from_arrays(X, y, client=OWNERS, classes=["a", "b", "c"])
    result = trained(config, data, linear(3), tmp_path)
    assert result.task == "multi-label"
    assert result.score > result.trivial["f1"] + 0.1


@pytest.mark.slow
@LEVELS
def test_one_logit_learns_what_two_scores_learn(config, tmp_path):
    y = (X[:, 0] + X[:, 1] > 0).astype(np.int64)
    data = shoal.from_arrays(X, y, client=OWNERS)
    result = trained(config, data, linear(1), tmp_path)
    assert result.accuracy > 0.85
    assert result.figures["auroc"] > 0.95


@pytest.mark.slow
@LEVELS
def test_class_weights_shift_the_answers(config, tmp_path):
    y = (X[:, 0] + GENERATOR.standard_normal(240) > 1.5).astype(np.int64)
    data = shoal.from_arrays(X, y, client=OWNERS)
    if "per_record" in config:  # a weight that only lengthens a clipped gradient does nothing
        config = config | {"per_record": {"clip_norm": 20.0}, "local": {"lr": 0.1, "epochs": 2}}
    plain = trained(config, data, linear(2), tmp_path)
    weighted = trained(config, data, linear(2), tmp_path, class_weights=(1.0, 6.0))
    toward_yes = [float(run.model["bias"][1] - run.model["bias"][0]) for run in (plain, weighted)]
    assert toward_yes[1] > toward_yes[0] + 0.2


class Tokens(nn.Module):
    """Sees the token at each place and guesses the next."""

    def __init__(self):
        super().__init__()
        self.embedding, self.scores = nn.Embedding(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.scores(self.embedding(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.scores = nn.Embedding(6, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 6)

    def forward(self, x):
        return self.scores(self.lstm(self.embedding(x))[0])


@pytest.mark.slow
@pytest.mark.parametrize("model", [Tokens, Recurrent])
@LEVELS
def test_next_token_learns_with_whole_numbers_as_inputs(config, model, tmp_path):
    """The next token is the last one plus 1: a table of transitions is enough. The second half is padding."""
    first = GENERATOR.integers(0, 6, (240, 1))
    sequence = (first + np.arange(7)) % 6
    y = sequence[:, 1:].copy()
    y[:, 4:] = -100
    data = shoal.from_arrays(sequence[:, :-1], y, client=OWNERS, classes=list("abcdef"))
    torch.manual_seed(0)
    result = trained(config | {"local": {"lr": 3.0, "epochs": 4}}, data, model(), tmp_path)
    assert result.task == "next-token"
    assert result.score > 2 * result.trivial["accuracy"]
    assert result.figures["perplexity"] < result.trivial["perplexity"]


@pytest.mark.parametrize("token", [-1, 6])
def test_tokens_that_the_model_does_not_take_are_named_before_training(token, tmp_path):
    sequence = np.zeros((240, 6), np.int64)
    sequence[7, 3] = token
    data = shoal.from_arrays(sequence, np.zeros_like(sequence), client=OWNERS, classes=list("abcdef"))
    ends = f"{min(token, 0)} to {max(token, 0)}"
    with pytest.raises(ModelError, match=f"whole numbers from {ends}: model Tokens cannot take records of shape"):
        trained(CLIENT_LEVEL, data, Tokens(), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@LEVELS
def test_a_loss_and_a_metric_of_ones_own(config, tmp_path, monkeypatch):
    (tmp_path / "own_loss.py").write_text(
        "import torch\n"
        "def decile(outputs, targets):\n"
        "    wrong = targets - outputs[:, 0]\n"
        "    return torch.maximum(0.9 * wrong, -0.1 * wrong)\n"
        "def largest(predictions, targets):\n"
        "    return predictions.max()\n"
    )
    monkeypatch.chdir(tmp_path)
    data = shoal.from_arrays(X, X[:, 0] + 0.25, client=OWNERS)
    own = {"loss": "own_loss:decile", "metrics": ("own_loss:largest",)}
    result = trained(config, data, linear(1), tmp_path, kind="own", **own)
    first = next(line["mean_loss"] for line in result.metrics if "mean_loss" in line)
    assert result.score < first
    assert result.figures["largest"] >= result.score


@pytest.mark.slow
def test_classes_that_are_numbers_may_be_regressed(tmp_path):
    ratings = np.clip(np.round(3 + X[:, 0]), 1, 5)
    data = shoal.from_arrays(X, ratings, client=OWNERS)
    assert data.classes == ("1", "2", "3", "4", "5")
    config = CLIENT_LEVEL | {"local": {"lr": 0.1, "epochs": 4}}
    result = trained(config, data, linear(1), tmp_path, kind="regression", range=(1.0, 5.0))
    assert result.score < 0.8 * result.trivial["rmse"]
    named = shoal.from_arrays(X, np.where(X[:, 0] > 0, "yes", "no"))
    with pytest.raises(ConfigError, match="the targets are names"):
        trained(CLIENT_LEVEL, named, linear(1), tmp_path, kind="regression", range=(1.0, 5.0))


@pytest.mark.slow
def test_a_model_that_learnt_nothing_is_called_so(tmp_path):
    y = (GENERATOR.random(240) < 0.13).astype(np.int64)
    data = shoal.from_arrays(0 * X, y, client=OWNERS)
    result = trained(CLIENT_LEVEL, data, linear(2), tmp_path)
    assert result.accuracy == result.trivial["accuracy"]
    assert not result.learnt
    assert result.to_json()["learnt"] is False


class Spoilt(nn.Module):
    """Gives NaN once it is trained."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x) * (1.0 if self.training else torch.nan)


def absolute(outputs, targets):
    return (outputs[:, 0] - targets).abs()


@pytest.mark.parametrize("kind", ["regression", "own", "next-token", "multi-label", "classification"])
def test_a_model_that_gives_nan_has_not_learnt(kind, tmp_path):
    """NaN is no loss of 0, no perplexity of 1 and no number in the middle of the range."""
    x, y, classes, outputs, task = {
        "regression": (X, X[:, 0], None, 1, {"range": (-3.0, 3.0)}),
        "own": (X, X[:, 0], None, 1, {"kind": "own", "loss": f"{__name__}:absolute"}),
        "next-token": (*np.zeros((2, 240, 6), np.int64), list("abcdef"), 6, {}),
        "multi-label": (X, (X[:, :2] > 0).astype(np.float32), ["a", "b"], 2, {}),
        "classification": (X, (X[:, 0] > 0).astype(np.int64), None, 2, {}),
    }[kind]
    data = shoal.from_arrays(x, y, client=OWNERS, classes=classes)
    model = Spoilt(Tokens() if kind == "next-token" else linear(outputs))
    result = trained(CLIENT_LEVEL | {"rounds": 1}, data, model, tmp_path, **task)
    assert result.task == kind
    assert not result.learnt
    assert result.figures.get("perplexity") is None
    assert result.score is None or kind in ("next-token", "multi-label", "classification")


def accuracy(predictions, targets):
    return 1.0


def f1(predictions, targets):
    return 1.0


def undefined(predictions, targets):
    raise ValueError("no such record")


def test_a_metric_that_fails_does_not_lose_the_run(tmp_path):
    data = shoal.from_arrays(X, X[:, 0], client=OWNERS)
    with pytest.warns(UserWarning, match=r"task\.metrics 'undefined' failed: ValueError: no such record"):
        result = trained(
            CLIENT_LEVEL | {"rounds": 1}, data, linear(1), tmp_path, range=(-3.0, 3.0),
            metrics=(f"{__name__}:undefined",),
        )  # fmt: skip
    assert result.figures["undefined"] is None
    assert result.score is not None


@pytest.mark.slow
def test_a_large_vocabulary_is_evaluated_in_smaller_parts(tmp_path, monkeypatch):
    seen = []

    class Watched(Tokens):
        def forward(self, x):
            if not self.training:
                seen.append(len(x))
            return super().forward(x)

    sequence = (np.arange(240)[:, None] + np.arange(7)) % 6
    data = shoal.from_arrays(sequence[:, :-1], sequence[:, 1:], client=OWNERS, classes=list("abcdef"))
    torch.manual_seed(0)
    model, scores = Watched(), []
    for most in (6 * 6 * 5, 1, 10**6):
        monkeypatch.setattr("shoal.training.evaluation.OUTPUTS", most)
        seen.clear()
        scores.append(trained(CLIENT_LEVEL | {"rounds": 1}, data, model, tmp_path).figures["perplexity"])
        after_its_check = seen[1:]
        assert max(after_its_check) == {6 * 6 * 5: 5, 1: 1, 10**6: 48}[most]
    assert scores == pytest.approx(scores[:1] * 3, rel=1e-6)


def ratio(outputs, targets):
    """Smallest where outputs are twice the targets, or the first of them."""
    return (outputs[:, 0] / 2 - targets.reshape(len(targets), -1)[:, 0]).square()


@pytest.mark.parametrize("width", [None, 2])
def test_a_loss_of_ones_own_sees_whole_numbers_as_they_are(width, tmp_path):
    """Counts of 20 and 30 are no codes 0 and 1."""
    counts = np.where(X[:, 0] > 0, 20, 30) if width is None else np.full((240, 2), 20)
    data = shoal.from_arrays(X, counts, client=OWNERS)
    task = TaskSettings(kind="own", loss=f"{__name__}:ratio")
    result = trained(CLIENT_LEVEL | {"rounds": 1}, data, linear(1), tmp_path, kind=task.kind, loss=task.loss)
    assert result.score > 15**2
    again = with_task(with_task(data, task), task)
    assert again.train_y.shape == data.train_y.shape
    assert set(again.train_y.unique().tolist()) <= {20, 30}


@pytest.mark.slow
def test_a_range_means_regression_whatever_values_the_targets_happen_to_have(tmp_path):
    data = shoal.from_arrays(X, np.clip(np.round(3 + X[:, 0]), 1, 5), client=OWNERS)
    assert trained(CLIENT_LEVEL | {"rounds": 1}, data, linear(1), tmp_path, range=(1.0, 5.0)).task == "regression"
    data = shoal.from_arrays(X, np.full((240, 2), 4), client=OWNERS)
    assert trained(CLIENT_LEVEL | {"rounds": 1}, data, linear(2), tmp_path, range=(1.0, 5.0)).trivial["rmse"] == 0


@pytest.mark.parametrize("kind", [int, np.float32])
def test_numbers_that_are_all_the_same_may_be_targets_of_a_regression_but_not_labels(kind, tmp_path):
    data = shoal.from_arrays(X, np.full(240, 3, kind), client=OWNERS)
    result = trained(CLIENT_LEVEL | {"rounds": 1}, data, linear(1), tmp_path, range=(1.0, 5.0))
    assert (result.task, result.trivial["rmse"]) == ("regression", 0)
    with pytest.raises(DataError, match=r"needs at least two classes, got \['3'\]"):
        trained(CLIENT_LEVEL, data, linear(2), tmp_path)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (("numpy:ptp", "own_loss:ptp"), "task.metrics names two figures 'ptp'"),
        ((f"{__name__}:accuracy",), "task.metrics names a figure 'accuracy', which classification has itself"),
        ((f"{__name__}:f1",), "task.metrics names a figure 'f1', which classification has itself: rename"),
    ],
)
def test_figures_of_one_name_are_refused(metrics, words, tmp_path):
    data = shoal.from_arrays(X, (X[:, 0] > 0).astype(np.int64), client=OWNERS)
    with pytest.raises(ConfigError, match=words):
        trained(CLIENT_LEVEL, data, linear(2), tmp_path, metrics=metrics)


@pytest.mark.slow
def test_every_line_of_metrics_is_json_where_nothing_is_proven(tmp_path):
    """Noise far too small for any bound: no infinite epsilon is written."""
    config = CLIENT_LEVEL | {"per_round": {"noise_multiplier": 1e-9}, "rounds": 2}
    data = shoal.from_arrays(X, (X[:, 0] > 0).astype(np.int64), client=OWNERS)
    result = trained(config, data, linear(2), tmp_path)

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    for line in (result.run / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
