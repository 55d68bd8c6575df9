"""Every task: its loss against PyTorch's, its figures against scikit-learn's, and its checks."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from shoal.errors import ConfigError, DataError, ModelError
from shoal.tasks import Classification, MultiLabel, NextToken, Own, Regression, TaskSettings, choose
from shoal.tasks.classification import calibration_error
from shoal.tasks.ranking import f1, ranking


def numbers(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


CLASSES = Classification(classes=("a", "b", "c"))
TWO = Classification(classes=("no", "yes"))
LABELS = MultiLabel(labels=("x", "y", "z"))
RATING = Regression(low=1.0, high=5.0)
TOKENS = NextToken(vocabulary=7)


def of_task(task, records=40):
    """Outputs and targets of a task."""
    generator = np.random.default_rng(1)
    if task.kind == "classification":
        return numbers(records, task.outputs), torch.from_numpy(generator.integers(0, task.outputs, records))
    if task.kind == "multi-label":
        return numbers(records, 3), torch.from_numpy(generator.integers(0, 2, (records, 3))).float()
    if task.kind == "regression":
        return numbers(records, 1), torch.from_numpy(generator.uniform(1, 5, records)).float()
    targets = torch.from_numpy(generator.integers(0, 7, (records, 5)))
    targets[:, 3:][torch.from_numpy(generator.random((records, 2)) < 0.5)] = -100
    return numbers(records, 5, 7), targets


@pytest.mark.parametrize("task", [CLASSES, TWO, LABELS, RATING, TOKENS], ids=lambda task: task.kind)
def test_a_records_loss_is_its_own(task):
    """One value a record, which no other record changes: what record-level privacy rests on."""
    outputs, targets = of_task(task)
    losses = task.losses(outputs, targets)
    assert losses.shape == (40,)
    for place in (0, 17, 39):
        alone = task.losses(outputs[place : place + 1], targets[place : place + 1])
        torch.testing.assert_close(alone[0], losses[place])


def test_losses_are_pytorchs():
    outputs, y = of_task(CLASSES)
    torch.testing.assert_close(CLASSES.losses(outputs, y), F.cross_entropy(outputs, y, reduction="none"))
    weighted = Classification(classes=("a", "b", "c"), class_weights=(1.0, 5.0, 0.5))
    expected = F.cross_entropy(outputs, y, weight=torch.tensor([1.0, 5.0, 0.5]), reduction="none")
    torch.testing.assert_close(weighted.losses(outputs, y), expected)
    logit, y = numbers(40, 1), of_task(TWO)[1]
    two_scores = torch.cat([torch.zeros(40, 1), logit], 1)
    for shaped in (logit, logit[:, 0]):
        torch.testing.assert_close(TWO.losses(shaped, y), TWO.losses(two_scores, y))
    heavier = Classification(classes=("no", "yes"), class_weights=(1.0, 7.0))
    torch.testing.assert_close(heavier.losses(logit, y), heavier.losses(two_scores, y))
    outputs, y = of_task(RATING)
    torch.testing.assert_close(RATING.losses(outputs, y), (outputs[:, 0] - (y - 1) / 4).square())
    outputs, y = of_task(TOKENS)
    means = [F.cross_entropy(outputs[n], y[n], ignore_index=-100) for n in range(40)]
    torch.testing.assert_close(TOKENS.losses(outputs, y), torch.stack(means))


def test_a_target_outside_the_range_is_trained_as_its_end():
    outputs = numbers(2, 1)
    far, near = torch.tensor([-1e9, 1e9]), torch.tensor([1.0, 5.0])
    torch.testing.assert_close(RATING.losses(outputs, far), RATING.losses(outputs, near))


def test_padding_alone_costs_nothing():
    padding = torch.full((2, 5), -100)
    assert TOKENS.losses(numbers(2, 5, 7), padding).tolist() == [0.0, 0.0]


@pytest.mark.slow
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 5)), min_size=2, max_size=30))
def test_rankings_with_ties_and_f1_are_scikit_learns(records):
    """A class that no record has, or every one, is not ranked."""
    hits, answers, scores = map(np.array, zip(*records, strict=True))
    (found,) = f1(hits[:, None], answers[:, None])
    assert found == pytest.approx(metrics.f1_score(hits, answers, zero_division=0.0))
    if 0 < hits.sum() < len(hits):
        area, precision = ranking(hits, scores)
        assert area == pytest.approx(metrics.roc_auc_score(hits, scores))
        assert precision == pytest.approx(metrics.average_precision_score(hits, scores))


def test_figures_are_scikit_learns():
    outputs, y = of_task(CLASSES)
    probabilities, truth = CLASSES.predictions(outputs, y).numpy(), y.numpy()
    found, answers = CLASSES.all_figures(probabilities, truth), probabilities.argmax(1)
    assert found["accuracy"] == metrics.accuracy_score(truth, answers)
    assert found["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(truth, answers))
    assert found["auroc"] == pytest.approx(metrics.roc_auc_score(truth, probabilities, multi_class="ovr"))
    assert found["f1"] == pytest.approx(metrics.f1_score(truth, answers, average="macro"))
    outputs, y = of_task(TWO)
    probabilities, truth = TWO.predictions(outputs, y).numpy(), y.numpy()
    found = TWO.all_figures(probabilities, truth)
    assert found["auroc"] == pytest.approx(metrics.roc_auc_score(truth, probabilities[:, 1]))
    assert found["average_precision"] == pytest.approx(metrics.average_precision_score(truth, probabilities[:, 1]))
    assert found["f1"] == pytest.approx(metrics.f1_score(truth, probabilities.argmax(1)))
    outputs, y = of_task(RATING)
    predicted, truth = RATING.predictions(outputs, y).numpy(), y.numpy()
    found = RATING.all_figures(predicted, truth)
    assert found["rmse"] == pytest.approx(metrics.root_mean_squared_error(truth, predicted), rel=1e-5)
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(truth, predicted), rel=1e-5)
    assert found["r2"] == pytest.approx(metrics.r2_score(truth, predicted), rel=1e-5)
    outputs, y = of_task(LABELS)
    probabilities, truth = LABELS.predictions(outputs, y).numpy(), y.numpy()
    found = LABELS.all_figures(probabilities, truth)
    assert found["auroc"] == pytest.approx(metrics.roc_auc_score(truth, probabilities, average="macro"))
    assert found["f1"] == pytest.approx(metrics.f1_score(truth, probabilities > 0.5, average="micro"))
    assert found["average_precision"] == pytest.approx(metrics.average_precision_score(truth, probabilities))
    outputs, y = of_task(TOKENS)
    found = TOKENS.all_figures(TOKENS.predictions(outputs, y).numpy(), y.numpy())
    counted = y.flatten() != -100
    loss = F.cross_entropy(outputs.flatten(0, 1)[counted], y.flatten()[counted])
    assert found["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)
    right = (outputs.argmax(2).flatten() == y.flatten())[counted]
    assert found["accuracy"] == pytest.approx(float(right.float().mean()))


@pytest.mark.parametrize("task", [CLASSES, TWO, RATING, LABELS, TOKENS], ids=lambda task: task.kind)
def test_a_task_names_all_its_figures(task):
    """So that no figure of a user's can take the place of one."""
    outputs, y = of_task(task)
    assert set(task.figures(task.predictions(outputs, y).numpy(), y.numpy())) == set(task.figure_names)


def test_calibration_error_of_a_known_case():
    """Two records at confidence 0.9, one right: the gap is 0.4."""
    probabilities, truth = np.array([[0.9, 0.1], [0.9, 0.1]]), np.array([0, 1])
    assert calibration_error(probabilities, truth) == pytest.approx(0.4)


def test_the_trivial_prediction_is_the_best_constant():
    truth = np.array([0] * 87 + [1] * 13)
    found = TWO.trivial_figures(truth)
    assert found["accuracy"] == 0.87
    assert found["auroc"] == 0.5
    assert found["balanced_accuracy"] == 0.5
    values = np.array([1.0, 2.0, 4.0, 5.0], np.float32)
    assert RATING.trivial_figures(values)["rmse"] == pytest.approx(values.std())
    assert RATING.trivial_figures(values)["r2"] == pytest.approx(0.0)
    tokens = np.array([[1, 1, 2], [1, -100, -100]])
    assert TOKENS.trivial_figures(tokens)["accuracy"] == 0.75
    shares = np.array([0.75, 0.25])
    entropy = -(shares * np.log(shares)).sum()
    assert TOKENS.trivial_figures(tokens)["perplexity"] == pytest.approx(np.exp(entropy))


@pytest.mark.slow
@given(st.lists(st.integers(0, 1), min_size=1, max_size=30), st.integers(0, 2**32 - 1))
def test_figures_exist_for_any_held_out_records(labels, seed):
    """One class alone, one record alone: what cannot be computed is left out, nothing fails."""
    truth = np.array(labels)
    probabilities = TWO.predictions(numbers(len(labels), 2, seed=seed), torch.from_numpy(truth)).numpy()
    found = TWO.all_figures(probabilities, truth)
    assert all(0 <= value <= 1 for value in found.values())
    assert ("auroc" in found) == (len(set(labels)) == 2)


@pytest.mark.parametrize(
    ("task", "targets", "words"),
    [
        (CLASSES, torch.tensor([0, 3]), "labels run from 0 to 3, but there are 3 classes"),
        (CLASSES, torch.tensor([0.5]), "labels must be int64"),
        (LABELS, torch.tensor([[0.0, 1.0, 0.5]]), "must be 0 or 1"),
        (LABELS, torch.zeros(2, 2), r"must be float32 \[N, 3\]"),
        (RATING, torch.tensor([float("nan")]), "finite float32"),
        (TOKENS, torch.tensor([[1, 7]]), "row 0 has token 7, outside 0 to 6"),
        (TOKENS, torch.tensor([1, 2]), r"int64 \[N, T\]"),
    ],
)
def test_targets_of_another_kind_are_refused(task, targets, words):
    with pytest.raises(DataError, match=words):
        task.check_targets(targets, "data 'x'")


@pytest.mark.parametrize(
    ("task", "shape", "targets"),
    [
        (CLASSES, (3, 2), torch.zeros(3, dtype=torch.int64)),
        (CLASSES, (3, 1), torch.zeros(3, dtype=torch.int64)),
        (RATING, (3, 2), torch.zeros(3)),
        (LABELS, (3,), torch.zeros(3, 3)),
        (TOKENS, (3, 7), torch.zeros(3, 5, dtype=torch.int64)),
    ],
)
def test_outputs_of_another_shape_are_refused(task, shape, targets):
    with pytest.raises(ModelError, match="gives outputs of shape"):
        task.check_outputs("M", torch.zeros(shape), targets)


def test_auto_goes_by_type_and_shape_alone():
    settings = TaskSettings()
    assert choose(settings, torch.zeros(3, dtype=torch.int64), ("a", "b")).kind == "classification"
    assert choose(settings, torch.zeros(3, 2, dtype=torch.int64), ("a", "b")).kind == "next-token"
    assert choose(settings, torch.zeros(3, 2), ("a", "b")).kind == "multi-label"
    assert choose(TaskSettings(range=(0.0, 1.0)), torch.zeros(3), ()).kind == "regression"
    with pytest.raises(ConfigError, match=r"task\.range is missing"):
        choose(settings, torch.zeros(3), ())


def test_the_data_sets_own_task_stays_unless_it_is_changed():
    y = torch.zeros(3)
    assert choose(TaskSettings(), y, (), RATING) is RATING
    assert choose(TaskSettings(range=(0.0, 9.0)), y, (), RATING) == Regression(low=0.0, high=9.0)
    weighted = choose(TaskSettings(class_weights=(1.0, 2.0)), y.long(), ("no", "yes"), TWO)
    assert weighted == Classification(classes=("no", "yes"), class_weights=(1.0, 2.0))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "clasification"}, "there is no task.kind 'clasification'; did you mean 'classification'"),
        ({"kind": "own"}, r"task\.loss must name the loss"),
        ({"loss": "no.such:thing"}, r"task\.loss 'no\.such:thing'"),
        ({"class_weights": (1.0,)}, "1 weights, but there are 2 classes"),
        ({"kind": "json:dumps"}, "is a function"),
        ({"kind": "json:JSONDecoder"}, "is not a task"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings, words):
    with pytest.raises((ConfigError, Exception), match=words) as caught:
        choose(TaskSettings(**settings), torch.zeros(3, dtype=torch.int64), ("a", "b"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings", [{"class_weights": (0.0, 1.0)}, {"class_weights": (float("inf"),)}, {"range": (2.0, 1.0)}]
)
def test_values_that_cannot_be_are_refused(settings):
    with pytest.raises(ConfigError, match=rf"task\.{next(iter(settings))}"):
        TaskSettings(**settings)


def test_a_site_imports_a_loss_only_where_its_owner_allows_the_package():
    settings = TaskSettings(loss="torch.nn.functional:mse_loss")
    with pytest.raises(ConfigError, match="--allow-plugin"):
        choose(settings, torch.zeros(3, dtype=torch.int64), ("a", "b"), allowed=("other",))
    assert choose(settings, torch.zeros(3, dtype=torch.int64), ("a", "b"), allowed=("torch",)).own_loss is F.mse_loss


def test_an_own_loss_gives_one_value_a_record():
    task = Own(own_loss=lambda outputs, targets: (outputs - targets).abs().mean(1))
    assert task.losses(numbers(4, 2), numbers(4, 2, seed=1)).shape == (4,)
    wrong = Own(own_loss=lambda outputs, targets: (outputs - targets).abs().mean())
    with pytest.raises(ModelError, match="one loss a record"):
        wrong.losses(numbers(4, 2), numbers(4, 2, seed=1))


def test_class_weights_that_evaluation_used_first_can_be_trained_with():
    """As where nobody was sampled for the first round."""
    weighted = Classification(classes=("a", "b", "c"), class_weights=(1.0, 5.0, 0.5))
    outputs, y = of_task(CLASSES)
    with torch.inference_mode():
        weighted.losses(outputs, y)
    weighted.losses(outputs.requires_grad_(), y).sum().backward()
    assert outputs.grad is not None


def test_settings_that_would_have_no_effect_are_refused():
    _, y = of_task(CLASSES)
    with pytest.raises(ConfigError, match=r"task\.range is for regression; leave it out for classification"):
        choose(TaskSettings(kind="classification", range=(0.0, 5.0)), y, CLASSES.classes)
    with pytest.raises(ConfigError, match=r"task\.class_weights has no effect on a task\.loss"):
        TaskSettings(loss="own:loss", class_weights=(1.0, 2.0))
