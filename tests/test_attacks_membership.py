"""Membership inference: what scores can tell, and that overfitting is found while ignorance is not."""

import numpy as np
import pytest

from shoal.attacks.membership import Roc, confidence, likelihood_ratios, membership
from shoal.config import configure
from shoal.errors import ConfigError
from shoal.privacy.random import Streams
from tiny import dataset

GENERATOR = Streams(11).generator


def test_the_roc_of_perfect_useless_and_tied_scores():
    member = np.array([True, True, False, False])
    perfect = Roc.of(np.array([4.0, 3.0, 2.0, 1.0]), member)
    assert (perfect.advantage, perfect.auc, perfect.tpr_at_1_percent_fpr) == (1.0, 1.0, 1.0)
    tied = Roc.of(np.zeros(4), member)
    assert (tied.advantage, tied.auc, tied.tpr_at_1_percent_fpr) == (0.0, 0.5, 0.0)
    turned = Roc.of(np.array([1.0, 2.0, 3.0, 4.0]), member)
    assert (turned.advantage, turned.auc) == (0.0, 0.0)


def test_the_area_is_the_chance_that_a_member_scores_higher():
    member = GENERATOR("member").random(300) < 0.5
    scores = GENERATOR("scores").integers(5, size=300) + 1.0 * member
    pairs = scores[member][:, None] - scores[~member][None, :]
    assert Roc.of(scores, member).auc == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean(), abs=1e-12)


def test_confidence_is_the_logit_of_the_true_class():
    p = np.array([0.01, 0.5, 0.99])
    assert confidence(-np.log(p)) == pytest.approx(np.log(p / (1 - p)))
    assert np.isfinite(confidence(np.array([0.0, 1e9]))).all()


def test_likelihood_ratios_find_a_shift_that_every_record_has_at_a_place_of_its_own():
    """Records differ by 5, membership by 1, models by .3: one threshold for all sees little, LiRA nearly all."""
    models, records = 16, 400
    member = GENERATOR("in").random((models, records)) < 0.5
    phi = (
        5 * GENERATOR("place").standard_normal(records)
        + member
        + 0.3 * GENERATOR("noise").standard_normal(member.shape)
    )
    assert Roc.of(likelihood_ratios(phi, member).ravel(), member.ravel()).auc > 0.95
    assert Roc.of(phi.ravel(), member.ravel()).auc < 0.6


def test_likelihood_ratios_find_nothing_where_there_is_nothing():
    """6,400 scores of pure noise: an area more than .03 off one half has a chance of about 1e-5."""
    member = GENERATOR("in").random((16, 400)) < 0.5
    phi = GENERATOR("nothing").standard_normal(member.shape)
    assert abs(Roc.of(likelihood_ratios(phi, member).ravel(), member.ravel()).auc - 0.5) < 0.03


def settings(*changes):
    words = ["data.clients=3", "engine.threads=1", "examples.batch=4", "model=linear", *changes]
    return configure({"algorithm": "fedavg", "engine.device": "cpu", "clients.sampling": "all"}, words)


def test_whole_inference_runs_on_trained_models_and_can_be_repeated():
    config = settings("rounds=3", "data.partition=iid")
    first, second = (membership(config, models=4, records=40, data=dataset()) for _ in range(2))
    assert first.rows() == second.rows()
    assert {row["attack"] for row in first.rows()} == {"threshold", "lira"}
    assert all(0 <= row["advantage"] <= 1 for row in first.rows())
    assert first.records == 40


def test_too_few_models_or_records_are_refused():
    with pytest.raises(ConfigError, match="at least 4"):
        membership(settings(), models=3, data=dataset())
    with pytest.raises(ConfigError, match="records must be 8 to"):
        membership(settings(), models=4, records=10**6, data=dataset())
