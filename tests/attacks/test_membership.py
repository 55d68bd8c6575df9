"""Membership inference: what scores can tell, and that overfitting is found while ignorance is not."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import shoal
from shoal.accounting.events import Gaussian, Sampled, Unbounded
from shoal.attacks.allowed import Allowed, claimed, most_true_positives
from shoal.attacks.membership import (
    Membership,
    Roc,
    _losses,
    confidence,
    likelihood_ratios,
    membership,
    offline_scores,
)
from shoal.config import configure
from shoal.errors import ConfigError
from shoal.random.streams import Streams
from support.tiny import PRIVATE, dataset, numbers

STREAMS = Streams(11)
GENERATOR = STREAMS.generator


def test_the_roc_of_perfect_useless_and_tied_scores():
    member = np.array([True, True, False, False])
    perfect = Roc.of(np.array([4.0, 3.0, 2.0, 1.0]), member, STREAMS)
    assert (perfect.advantage, perfect.auc) == (1.0, 1.0)
    tied = Roc.of(np.zeros(4), member, STREAMS)
    assert (tied.advantage, tied.guessing, tied.auc) == (0.0, 0.0, 0.5)
    turned = Roc.of(np.array([1.0, 2.0, 3.0, 4.0]), member, STREAMS)
    assert (turned.advantage, turned.auc) == (0.0, 0.0)


@pytest.mark.parametrize(("others", "told"), [(99, None), (100, 0.5)])
def test_one_percent_of_fewer_than_a_hundred_is_nobody(others, told):
    """Half of the members score above all the others, the other half below."""
    member = np.repeat([True, False, True], [50, others, 50])
    assert Roc.of(-np.arange(100.0 + others), member, STREAMS).tpr_at_1_percent_fpr == told


@pytest.mark.parametrize(("others", "told"), [(999, None), (1000, 0.5)])
def test_a_thousandth_of_fewer_than_a_thousand_is_nobody(others, told):
    member = np.repeat([True, False, True], [50, others, 50])
    assert Roc.of(-np.arange(100.0 + others), member, STREAMS).tpr_at_0_1_percent_fpr == told


@pytest.mark.statistical(false_alarm=1e-7)
def test_scores_without_information_reach_the_advantage_that_is_told():
    """The mean of 1,000 maxima over 200 scores each (Kolmogorov-Smirnov: .084, with a spread of .046) is within .02
    of what 200 of them tell: 5.6 standard deviations."""
    member = np.repeat([True, False], 100)
    told = Roc.of(GENERATOR("luck").standard_normal(200), member, STREAMS).guessing
    shuffled = GENERATOR("shuffled").permuted(np.tile(np.where(member, 0.01, -0.01), (1000, 1)), axis=1)
    reached = np.maximum(shuffled.cumsum(axis=1).max(axis=1), 0)
    assert 0.05 < told < 0.12
    assert reached.mean() == pytest.approx(told, abs=0.02)
    assert Roc.of(1.0 * member, member, STREAMS).advantage == 1.0


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=1e-15)
def test_the_points_of_a_curve_lie_where_false_positives_are_few():
    """Over seeds they are 53.9 and 49.4, each with a spread below .5."""
    member = GENERATOR("member").random(20_000) < 0.5
    points = Roc.of(GENERATOR("scores").standard_normal(20_000) + member, member, STREAMS).points
    fpr = np.array([false for false, _ in points])
    assert points[0] == (0.0, 0.0)
    assert points[-1] == (1.0, 1.0)
    assert len(points) <= 200
    assert (fpr[fpr > 0] < 0.01).sum() > 50
    assert (fpr > 0.1).sum() > 40
    assert (np.diff(points, axis=0) >= 0).all()


def test_the_area_is_the_chance_that_a_member_scores_higher():
    member = GENERATOR("member").random(300) < 0.5
    scores = GENERATOR("scores").integers(5, size=300) + 1.0 * member
    pairs = scores[member][:, None] - scores[~member][None, :]
    assert Roc.of(scores, member, STREAMS).auc == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean(), abs=1e-12)


def test_confidence_is_the_logit_of_the_true_class():
    p = np.array([0.01, 0.5, 0.99])
    assert confidence(-np.log(p)) == pytest.approx(np.log(p / (1 - p)))
    assert np.isfinite(confidence(np.array([0.0, 1e9]))).all()


@pytest.mark.statistical(false_alarm=1e-15)
def test_likelihood_ratios_find_a_shift_that_every_record_has_at_a_place_of_its_own():
    """Records differ by 5, membership by 1, models by .3: one threshold for all sees little, LiRA nearly all. Over
    seeds the areas are .988 and .554, with spreads of .0008 and .0028."""
    models, records = 16, 400
    member = GENERATOR("in").random((models, records)) < 0.5
    phi = (
        5 * GENERATOR("place").standard_normal(records)
        + member
        + 0.3 * GENERATOR("noise").standard_normal(member.shape)
    )
    assert Roc.of(likelihood_ratios(phi, member).ravel(), member.ravel(), STREAMS).auc > 0.95
    assert Roc.of(phi.ravel(), member.ravel(), STREAMS).auc < 0.6


def by_hand(phi, member):
    """LiRA with SciPy, record by record: means and one spread of the other models, each mean off by itself."""
    from scipy.stats import norm

    online, offline = np.zeros_like(phi), np.zeros_like(phi)
    for target in range(len(phi)):
        others = [model for model in range(len(phi)) if model != target]
        density = {}
        for side in (True, False):
            rows = [[phi[m, j] for m in others if member[m, j] == side] for j in range(phi.shape[1])]
            left = sum(((np.array(row) - np.mean(row)) ** 2).sum() for row in rows)
            spread = np.sqrt(left / sum(len(row) - 1 for row in rows))
            density[side] = [norm(np.mean(row), (spread + 1e-6) * np.sqrt(1 + 1 / len(row))) for row in rows]
        for j, x in enumerate(phi[target]):
            online[target, j] = density[True][j].logpdf(x) - density[False][j].logpdf(x)
            offline[target, j] = density[False][j].cdf(x)
    return online, offline


def test_scores_are_those_of_the_paper_computed_one_by_one():
    """Offline they are a probability in the paper, 1 - Pr[Z > phi]; deviations from the mean have the same order."""
    from scipy.stats import norm

    member = GENERATOR("in").random((9, 5)) < 0.5
    member[:2], member[2:4] = True, False  # at least one of the others on each side
    phi = GENERATOR("phi").standard_normal(member.shape) + member
    online, offline = by_hand(phi, member)
    assert likelihood_ratios(phi, member) == pytest.approx(online)
    assert norm.cdf(offline_scores(phi, member)) == pytest.approx(offline)


@pytest.mark.statistical(false_alarm=1e-15)
def test_without_models_trained_on_a_record_its_place_is_still_known():
    """As above: over seeds the area is .977, with a spread of .001."""
    member = GENERATOR("in").random((16, 400)) < 0.5
    place, noise = GENERATOR("place").standard_normal(400), GENERATOR("noise").standard_normal(member.shape)
    scores = offline_scores(5 * place + member + 0.3 * noise, member)
    assert Roc.of(scores.ravel(), member.ravel(), STREAMS).auc > 0.95


def test_the_most_that_an_epsilon_allows_is_reached_by_randomised_response():
    """With probability e^epsilon/(1 + e^epsilon) it tells the truth: one point of the curve at delta 0."""
    truth = np.e**2 / (1 + np.e**2)
    most = most_true_positives(np.array([0.0, 1 - truth, 1.0]), np.array([0.0, 2.0]), np.array([1.0, 0.0]))
    assert most == pytest.approx([0.0, truth, 1.0])


def test_the_most_that_is_allowed_names_its_epsilon_rounded_up():
    assert Allowed.by(Gaussian(0.6), 1e-5).row()["attack"] == "most at epsilon 8.01"  # of 8.0037


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0])
def test_the_most_that_a_gaussian_allows_is_its_own_trade_off_and_never_less(noise):
    """Dong, Roth & Su (2022): TPR = Phi(Phi^-1(FPR) + 1/noise)."""
    from scipy.stats import norm

    allowed = Allowed.by(Gaussian(noise), 1e-5)
    fpr, tpr = np.array(allowed.points).T
    exact = norm.cdf(norm.ppf(fpr) + 1 / noise)
    assert (tpr >= exact - 1e-6).all()
    assert tpr == pytest.approx(exact, abs=5e-3)
    assert allowed.tpr(0.01) == pytest.approx(norm.cdf(norm.ppf(0.01) + 1 / noise), rel=0.05)
    for rate in np.geomspace(1e-7, 0.999, 2000):  # between points too
        assert allowed.tpr(rate) >= norm.cdf(norm.ppf(rate) + 1 / noise) - 1e-6
    row = allowed.row()
    assert 0 <= row["advantage"] - (2 * norm.cdf(0.5 / noise) - 1) < 1e-3
    assert 0 <= row["auc"] - norm.cdf(np.sqrt(0.5) / noise) < 1e-3


def test_where_nothing_is_proven_nothing_bounds_an_attack():
    assert Allowed.by(Unbounded("the noise is 0"), 1e-5) is None
    shuffled = Sampled("shuffled", 0.1, Gaussian(1.0))  # one record more displaces others
    assert Allowed.by(shuffled, 1e-5) is None
    assert "displaces others" in claimed(shuffled, 1e-5).because


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "words", "because"),
    [
        ("dp-sgd", {"records.rate": 0.25, "records.nominal_records": 20, "local.steps": 2}, None),
        ("dp-sgd", {"records.batch": 4}, "from the number of records"),
        ("dp-sgd", {"data.clients": 2, "records.batch": 4}, "divided among clients"),
        ("dp-ftrl", {"records.batch": 40, "clients.cohort": 1}, "reverse an update"),
    ],
)
def test_a_curve_is_drawn_only_where_one_record_more_moves_no_other(algorithm, words, because):
    """Charges are for a record in another's place: whole updates then move by two clips, and clients keep theirs."""
    config = {"algorithm": algorithm, "rounds": 1, "data.partition": "iid", "data.clients": 1, "model": "linear"}
    quick = {"engine.device": "cpu", "engine.threads": 1, "clients.sampling": "all"}
    found = membership(configure(config | quick | words), models=4, records=40, data=dataset())
    assert (found.allowed is None) == (because is not None)
    assert because is None or because in found.unbounded
    assert ("allowed" in found.facts()["roc"]) == (because is None)


@pytest.mark.slow
def test_private_models_have_a_curve_beside_them_and_others_none():
    private = settings("rounds=2", "data.partition=iid", "data.clients=1")
    by_rate = {"algorithm": "dp-sgd", "records.rate": 0.1, "records.nominal_records": 20, "local.steps": 2}
    private = replace(private, algorithm=configure(by_rate).algorithm)
    found = membership(private, models=4, records=40, data=dataset())
    assert found.rows()[-1]["attack"].startswith("most at epsilon")
    assert found.allowed.claim.adjacency == "add-or-remove"
    assert set(found.facts()["roc"]) == {"threshold", "lira", "lira offline", "allowed"}
    plain = membership(settings("rounds=1", "data.partition=iid"), models=4, records=40, data=dataset())
    assert plain.allowed is None
    assert plain.facts()["claim"] is None


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=1e-10)
def test_likelihood_ratios_find_nothing_where_there_is_nothing():
    """25,600 scores of pure noise: the area spreads by .0047 (.0093 with a quarter of them, over seeds)."""
    member = GENERATOR("in").random((16, 1600)) < 0.5
    phi = GENERATOR("nothing").standard_normal(member.shape)
    assert abs(Roc.of(likelihood_ratios(phi, member).ravel(), member.ravel(), STREAMS).auc - 0.5) < 0.03


def settings(*changes):
    words = ["data.clients=3", "engine.threads=1", "records.batch=4", "model=linear", *changes]
    return configure({"algorithm": "fedavg", "engine.device": "cpu", "clients.sampling": "all"}, words)


@pytest.mark.slow
def test_whole_inference_runs_on_trained_models_and_can_be_repeated():
    config = settings("rounds=3", "data.partition=iid")
    first, second = (membership(config, models=4, records=40, data=dataset()) for _ in range(2))
    assert first.rows() == second.rows()
    assert {row["attack"] for row in first.rows()} == {"threshold", "lira", "lira offline"}
    assert all(0 <= row["advantage"] <= 1 for row in first.rows())
    assert first.records == 40


@pytest.mark.slow
def test_losses_are_those_of_the_features_and_they_are_computed_once(monkeypatch):
    from shoal import prepare

    def doubled(name, x, folder):
        seen.append(name)
        return torch.cat([x, x], dim=1)

    seen = []
    monkeypatch.setattr(prepare, "cached", doubled)
    config = settings("rounds=1", "data.partition=iid")
    config = replace(config, data=replace(config.data, features="hog"))
    found = membership(config, models=4, records=40, data=dataset())
    assert found.records == 40
    assert seen == ["hog", "hog"]  # training and test rows


def private(epsilon):
    config = PRIVATE | {"model": "linear", "rounds": 30, "data.partition": "iid", "data.clients": 8}
    return config | {"budget.epsilon": epsilon, "engine.device": "cpu"}


@pytest.mark.slow
def test_as_many_rounds_are_played_as_a_run_would_play_with_the_budget(tmp_path):
    played = shoal.run(private(6.0), data=dataset(), runs=tmp_path)
    assert (played.stopped, played.rounds < 30) == ("budget", True)
    assert membership(configure(private(6.0)), models=4, records=40, data=dataset()).rounds == played.rounds
    assert membership(configure(private(1000.0)), models=4, records=40, data=dataset()).rounds == 30


def test_a_budget_that_pays_for_no_round_is_refused_as_a_run_refuses_it():
    with pytest.raises(ConfigError, match="does not pay for the first round"):
        membership(configure(private(0.001)), models=4, records=40, data=dataset())


@pytest.mark.parametrize(("train", "guessed", "warned"), [(0.25, 0.1, True), (0.7, 0.63, True), (0.98, 0.1, False)])
def test_models_that_learnt_next_to_nothing_draw_a_warning(train, guessed, warned):
    roc, none = Roc(0.1, 0.1, 0.5, None, None, []), np.zeros((4, 60))
    found = Membership(
        "fedavg", "digits", 4, 60, 1, train, train, guessed, roc, roc, roc, None, "", 0.0, none, none > 0
    )
    assert ("barely better than guessing" in found.warning) == warned
    assert found.facts()["warning"] == found.warning


@pytest.mark.parametrize("task", ["auto", "regression", "multi-label", "next-token", "own"])
def test_what_is_no_classification_is_refused_by_name(task):
    named = "regression" if task == "auto" else task
    with pytest.raises(ConfigError, match=f"task.kind is {named}, and attacks are for classification alone"):
        membership(settings(f"task.kind={task}"), models=4, data=numbers())


class OneLogit(torch.nn.Linear):
    """The logit of the second of two classes; as two scores it would be (0, logit)."""

    def __init__(self):
        super().__init__(4, 1)


@pytest.mark.slow
def test_a_model_of_one_logit_is_attacked_by_the_probability_of_its_class():
    module, data = OneLogit(), dataset()
    two = torch.nn.Linear(4, 2)
    with torch.no_grad():
        two.weight.copy_(torch.cat([0 * module.weight, module.weight]))
        two.bias.copy_(torch.cat([0 * module.bias, module.bias]))
    losses, hits = _losses(module, data.task, data.train_x, data.train_y)
    logits = two(data.train_x).detach().double()
    expected = torch.nn.functional.cross_entropy(logits, data.train_y, reduction="none")
    assert losses == pytest.approx(expected.numpy(), rel=1e-6)
    assert (hits == (logits.argmax(1) == data.train_y).numpy()).all()
    config = settings("rounds=1", "data.partition=iid", f"model={OneLogit.__module__}:OneLogit")
    assert membership(config, models=4, records=40, data=data).records == 40


@pytest.mark.slow
def test_whole_numbers_are_attacked_as_they_were_trained():
    data = dataset()
    whole = replace(data, train_x=data.train_x.mul(4).long(), test_x=data.test_x.mul(4).long())
    config = settings("rounds=1", "data.partition=iid")
    assert membership(config, models=4, records=40, data=whole).records == 40


def test_too_few_models_or_records_are_refused():
    with pytest.raises(ConfigError, match="at least 4"):
        membership(settings(), models=3, data=dataset())
    with pytest.raises(ConfigError, match="records must be 8 to"):
        membership(settings(), models=4, records=10**6, data=dataset())
