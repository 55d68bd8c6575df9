"""Claims say what is proven against whom, and never pass a published figure off as proven."""

from __future__ import annotations

import numpy as np
import pytest

import shoal
from shoal.accounting import claims, theorems
from shoal.accounting.claims import CLASSES, Proven, Published
from shoal.accounting.events import BySize, Gaussian, Repeat, Sampled, SampledUser, TwoLevel, Unbounded
from shoal.data import from_arrays
from shoal.errors import ConfigError
from shoal.report.certificate import certificate


@pytest.mark.slow
def test_a_proven_claim_has_the_shape_that_users_read() -> None:
    event = Repeat(Sampled("poisson", 0.1, Gaussian(3)), 100)
    proven = claims.prove("client", "release", event, 1e-5, adjacency="zero-out")
    assert proven.epsilon is not None
    assert proven.to_json() == {
        "unit": "client",
        "observer": "release",
        "epsilon": proven.epsilon,
        "delta": 1e-5,
        "accountant": "pld",
        "because": None,
        "adjacency": "zero-out",
        "simulated": False,
        "sampler_delta": None,
    }
    assert proven.words() == "epsilon 1.388 at delta 1e-5 (pld, zero-out)"


def test_a_claim_names_its_adjacency_and_calls_the_number_of_clients_public() -> None:
    event = Repeat(Sampled("poisson", 0.1, Gaussian(3)), 100)
    client = claims.prove("client", "release", event, 1e-5, adjacency="zero-out", clients=1200)
    assert client.adjacency == "zero-out"
    assert client.because == "the number of clients, 1,200, is public"
    record = claims.prove("record", "release", event, 1e-5, adjacency="replace-one", clients=1200)
    assert (record.adjacency, record.because) == ("replace-one", None)
    unbounded = claims.prove("client", "server", Unbounded("no noise"), 1e-5, adjacency="zero-out", clients=12)
    assert unbounded.because == "no noise"


@pytest.mark.parametrize("observer", ["release", "server", "client-process"])
@pytest.mark.parametrize("adjacency", ["add-or-remove", "zero-out", "replace-one"])
@pytest.mark.parametrize(
    ("scheme", "event"),
    [
        ("none", Gaussian(3)),
        ("poisson", Repeat(Sampled("poisson", 0.1, Gaussian(3)), 2)),
        ("fixed-size", Sampled("fixed-size", 0.1, Gaussian(3))),
    ],
)
def test_nothing_is_proven_for_a_client_that_the_table_refuses(scheme, event, adjacency, observer) -> None:
    refused = theorems.TABLE["clients", scheme, adjacency, observer].refused
    if observer != "release" and scheme != "none":  # its theorem is for participation that can be seen
        refused = refused or theorems.IN_SIGHT
    found = claims.prove("client", observer, event, 1e-5, adjacency=adjacency)
    assert (found.epsilon is None) == bool(refused)
    assert not refused or found.because == refused
    assert claims.prove("record", observer, event, 1e-5, adjacency=adjacency).epsilon is not None


def test_a_claim_from_before_adjacency_was_named_can_be_read() -> None:
    old = {
        "unit": "client",
        "observer": "release",
        "epsilon": 2.0,
        "delta": 1e-5,
        "accountant": "pld",
        "because": None,
    }
    assert Proven(**old).words() == "epsilon 2 at delta 1e-5 (pld)"
    with pytest.raises(ConfigError, match="did you mean 'zero-out'"):
        Proven(**old, adjacency="zero out")


@pytest.mark.parametrize(
    ("unit", "delta", "units", "warned"),
    [
        ("client", 1e-3, 5000, True),
        ("client", 1e-3, 1000, False),
        ("record", 1e-5, 10**6, True),
        ("client", 0.5, 0, False),
    ],
)
def test_a_delta_above_one_over_the_number_of_units_draws_a_warning(
    unit: str, delta: float, units: int, warned: bool
) -> None:
    said = claims.large_delta(unit, delta, units)
    assert (said is not None) is warned
    assert said is None or f"1/{units:,}" in said


def test_none_says_because_of_what() -> None:
    proven = claims.prove("record", "server", Unbounded("l2-max depends on the data"), 1e-5, adjacency="replace-one")
    assert proven.to_json()["epsilon"] is None
    assert proven.words() == "none, because l2-max depends on the data"


def test_a_figure_that_is_not_a_bound_is_not_proven() -> None:
    event = Repeat(Sampled("poisson", 0.1, Gaussian(3)), 100)
    proven = claims.prove("client", "release", event, 1e-5, accountant="zcdp", adjacency="zero-out")
    assert proven.epsilon is None
    assert "zCDP" in proven.words()


def test_a_bound_that_rests_on_something_says_so() -> None:
    event = Repeat(TwoLevel(0.1, 0.1, 5, 3, participation="hidden"), 10)
    proven = claims.prove("record", "release", event, 1e-5, adjacency="replace-one")
    assert "hidden whether the record's client took part" in proven.words()


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
        ("client", "server", None, None, "must give a reason"),
        ("client", "server", 1.0, None, "needs a delta"),
    ],
)
def test_a_claim_that_makes_no_sense_is_refused(
    unit: str, observer: str, epsilon: float | None, because: str | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Proven(unit, observer, epsilon, None, None, because)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rate", "observer", "said"), [(0.5, "server", True), (1.0, "server", False), (0.5, "release", False)]
)
def test_a_claim_against_the_server_says_that_it_draws_the_cohorts(rate, observer, said):
    found = claims.prove("record", observer, TwoLevel(rate, 0.1, 3, 2.0), 1e-5, adjacency="replace-one")
    assert found.epsilon is not None
    assert (claims.COHORTS in (found.because or "")) == said


@pytest.mark.parametrize(("classes", "said"), [(None, True), (["0", "1"], False)])
def test_a_claim_says_that_class_names_were_read_from_the_labels(tmp_path, classes, said):
    """Whoever is the only one of a class is named by it: claims, ledger and certificate say that these are public."""
    x, y = np.linspace(-1, 1, 120, dtype=np.float32).reshape(60, 2), np.tile([0, 1], 30)
    data = from_arrays(x, y, client=np.repeat(np.arange(6), 10), classes=classes)
    changes = {"model": "linear", "rounds": 1, "algorithm": "trusted-curator", "clients.cohort": 3}
    result = shoal.run(changes, data=data, runs=tmp_path)
    claims = [claim for claim in result.proven if claim["epsilon"] is not None]
    assert claims
    assert all((CLASSES in claim["because"]) == said for claim in claims)
    assert (CLASSES in certificate(result.run)["assumptions"]) == said


@pytest.mark.parametrize("observer", ["server", "client-process"])
def test_hidden_participation_proves_nothing_to_who_sees_it(observer: theorems.Observer) -> None:
    poisson, hidden = Sampled("poisson", 0.1, Gaussian(2.0)), TwoLevel(0.1, 0.1, 3, 2.0, participation="hidden")
    assert claims.prove("client", observer, poisson, 1e-5, adjacency="zero-out").because == theorems.IN_SIGHT
    assert claims.prove("record", observer, hidden, 1e-5, adjacency="replace-one").because == theorems.IN_SIGHT
    assert claims.prove("record", observer, poisson, 1e-5, adjacency="replace-one").epsilon is not None
    visible = TwoLevel(0.1, 1.0, 1, 2.0, local="none")
    assert claims.prove("client", observer, visible, 1e-5, adjacency="zero-out").epsilon is not None


@pytest.mark.parametrize("observer", ["release", "server", "client-process"])
@pytest.mark.parametrize(
    "event",
    [
        TwoLevel(0.1, 0.1, 3, 2.0),
        BySize(TwoLevel(0.1, 0.2, 3, 2.0), ((20, 0.2, 3), (50, 0.1, 2))),
        SampledUser(5, 0.1, 2.0),
        Repeat(SampledUser(1, 0.1, 2.0), 3),
    ],
)
def test_which_records_a_step_draws_hides_no_client(event, observer: theorems.Observer) -> None:
    """All records of a client change. The event is of a record, or of a user who owns few of them."""
    assert claims.prove("client", observer, event, 1e-5, adjacency="zero-out").because == theorems.DRAWN
    assert claims.prove("user", observer, event, 1e-5, adjacency="zero-out").epsilon is not None


@pytest.mark.parametrize("kind", ["shuffled", "with-replacement"])
@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_no_theorem_covers_clients_sampled_as_only_records_are(kind, rate) -> None:
    event = Repeat(Sampled(kind, rate, Gaussian(4.0), 5 if kind == "with-replacement" else None), 10)
    found = claims.prove("client", "release", event, 1e-5, adjacency="zero-out")
    if (kind, rate) == ("shuffled", 1.0):  # every client in every round
        assert found.epsilon is not None
    else:
        assert found.because == f"no theorem covers {kind} sampling of clients"
    assert claims.prove("record", "release", event, 1e-5, adjacency="zero-out").epsilon is not None
