"""Claims say what is proven against whom, and never pass a published figure off as proven."""

from __future__ import annotations

import pytest

from shoal.accounting import claims
from shoal.accounting.claims import Proven, Published
from shoal.accounting.events import Gaussian, Repeat, Sampled, TwoLevel, Unbounded
from shoal.errors import ConfigError


def test_a_proven_claim_has_the_shape_that_users_read() -> None:
    proven = claims.prove("client", "release", Repeat(Sampled("poisson", 0.1, Gaussian(3)), 100), 1e-5)
    assert proven.epsilon is not None
    assert proven.to_json() == {
        "unit": "client",
        "observer": "release",
        "epsilon": proven.epsilon,
        "delta": 1e-5,
        "accountant": "pld",
        "because": None,
        "simulated": False,
    }
    assert proven.words() == "epsilon 1.388 at delta 1e-05 (pld)"


def test_none_says_because_of_what() -> None:
    proven = claims.prove("example", "server", Unbounded("l2-max depends on the data"), 1e-5)
    assert proven.to_json()["epsilon"] is None
    assert proven.words() == "none, because l2-max depends on the data"


def test_a_figure_that_is_not_a_bound_is_not_proven() -> None:
    event = Repeat(Sampled("poisson", 0.1, Gaussian(3)), 100)
    proven = claims.prove("client", "release", event, 1e-5, accountant="zcdp")
    assert proven.epsilon is None
    assert "zCDP" in proven.words()


def test_a_bound_that_rests_on_something_says_so() -> None:
    event = Repeat(TwoLevel(0.1, 0.1, 5, 3, participation="hidden"), 10)
    assert "nobody can tell" in claims.prove("example", "release", event, 1e-5).words()


def test_a_published_claim_is_labelled() -> None:
    claim = Published("client", 8.0, 1e-3, "moments accountant, orders 2-33")
    assert claim.to_json() == {
        "unit": "client",
        "epsilon": 8.0,
        "delta": 1e-3,
        "recipe": "moments accountant, orders 2-33",
    }
    assert "published, not proven" in claim.words()


@pytest.mark.parametrize(
    ("unit", "observer", "epsilon", "because", "said"),
    [
        ("clients", "release", 1.0, None, "did you mean 'client'"),
        ("client", "serve", 1.0, None, "did you mean 'server'"),
        ("client", "server", None, None, "must say because"),
        ("client", "server", 1.0, None, "needs a delta"),
    ],
)
def test_a_claim_that_makes_no_sense_is_refused(
    unit: str, observer: str, epsilon: float | None, because: str | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Proven(unit, observer, epsilon, None, None, because)  # type: ignore[arg-type]
