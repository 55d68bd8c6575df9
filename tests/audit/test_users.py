"""The audit of claims for users: capped contributions pass, and the same method without its cap is flagged."""

from dataclasses import replace

import pytest

from shoal.algorithms import algorithm
from shoal.audit.auditing import Effort, audit
from shoal.audit.broken import VARIANTS, whole
from shoal.audit.cases import cases
from shoal.audit.checks import noise_checks
from shoal.audit.game import play, step_neighbours
from shoal.audit.testbed import federation, silent, steps_of
from shoal.random.streams import Streams

FEW = Effort(step_trials=1000, canaries=200, pairs=0)


def capped(name="dp-sgd", most=3):
    record = algorithm(name)
    return replace(record, records=replace(record.records, max_per_user=most))


@pytest.mark.slow
def test_capped_contributions_are_consistent_with_the_claim():
    (outcome,) = audit(capped("fed-cdp-private", 2), level="user", effort=FEW)
    assert (outcome.case.unit, outcome.case.kind, outcome.case.claim.adjacency) == ("user", "proven", "zero-out")
    assert outcome.verdict == "consistent", outcome.flagged


@pytest.mark.slow
def test_contributions_are_flagged_where_they_are_not_capped():
    (case,) = cases(capped(), "user")
    right, broken = whole(case, Streams(0)), VARIANTS["users uncapped"](case, Streams(0))
    assert broken.played.records.max_per_user is None
    scales = [check for each in (right, broken) for check in noise_checks(each, 50) if check.name == "noise scale"]
    assert [check.flagged for check in scales] == [False, True]
    assert scales[1].measured == pytest.approx(1 / 4, rel=0.05)
    assert play(case, case.record, 500, Streams(0)).epsilon(1e-5) < case.claim.epsilon
    assert play(case, broken.played, 2000, Streams(0)).epsilon(1e-5) > case.claim.epsilon


def test_a_method_without_a_cap_has_no_claim_for_users_to_audit():
    assert {case.unit for case in cases(algorithm("dp-sgd"))} == {"record"}
    assert {case.unit for case in cases(capped())} == {"record", "user"}


def test_a_user_that_contributes_nothing_adds_nothing_to_a_count():
    """Two records over the clip count -1/2 each; gradients of 0 would count 1/2 each, twice as far away."""
    (case,) = cases(capped("quantile-record", 2), "user")
    quiet = silent(case.record)
    shares = steps_of(federation(quiet, step_neighbours(case, Streams(0)), 50, Streams(0)), quiet).extras
    assert shares[0] - shares[1] == pytest.approx(2 * 0.5 / case.record.records.batch)
