"""Events are facts: they check themselves, survive JSON, and nothing unknown gets in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.accounting.events import (
    NOTHING,
    Compose,
    Event,
    Gaussian,
    OnClients,
    Repeat,
    Sampled,
    TwoLevel,
    Unbounded,
    from_json,
    leaves,
)
from shoal.errors import ConfigError, ShoalError

noises = st.floats(1e-3, 1e3)
rates = st.floats(0, 1)
simple = st.one_of(
    noises.map(Gaussian),
    st.text(min_size=1).map(Unbounded),
    st.builds(
        TwoLevel,
        rates,
        rates,
        st.integers(1, 99),
        noises,
        st.sampled_from(["poisson", "fixed-size", "shuffled"]),
        st.sampled_from(["visible", "hidden"]),
    ),
)
events = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.builds(Sampled, st.sampled_from(["poisson", "fixed-size", "shuffled"]), rates, inner),
        st.builds(Sampled, st.just("with-replacement"), rates, inner, st.integers(1, 99)),
        st.builds(Repeat, inner, st.integers(0, 99)),
        st.builds(OnClients, st.integers(1, 9), inner),
        st.lists(inner, max_size=3).map(lambda some: Compose(tuple(some))),
    ),
    max_leaves=8,
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["event", "of", "noise", "rate", "kind", "count", "because", "draws", "x"]),
            inner | st.sampled_from(["gaussian", "sampled", "compose", "repeat", "two-level", "poisson"]),
            max_size=5,
        )
    ),
    max_leaves=12,
)


@settings(derandomize=True, database=None, deadline=None, max_examples=200)
@given(events)
def test_an_event_survives_json(event: Event) -> None:
    assert from_json(json.loads(json.dumps(event.to_json()))) == event


@settings(derandomize=True, database=None, deadline=None, max_examples=300)
@given(anything)
def test_whatever_json_holds_it_is_read_as_an_event_or_refused_in_words(written: Any) -> None:
    try:
        event = from_json(written)
    except ShoalError:
        return
    assert from_json(event.to_json()) == event


def test_json_is_readable() -> None:
    event = Repeat(Sampled("poisson", 0.01, Gaussian(6.0)), 100)
    assert event.to_json() == {
        "event": "repeat",
        "of": {
            "event": "sampled",
            "kind": "poisson",
            "rate": 0.01,
            "of": {"event": "gaussian", "noise": 6.0},
            "draws": None,
        },
        "count": 100,
    }


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"event": "gausian", "noise": 1}, "did you mean 'gaussian'"),
        ({"event": "gaussian", "noise": 1, "sigma": 2}, "no key 'sigma'"),
        ({"event": "gaussian"}, "cannot be read"),
        ({"event": "gaussian", "noise": "1"}, "noise must be"),
        ({"event": "compose", "of": {"event": "gaussian", "noise": 1}}, "a list of events"),
        ({"noise": 1}, "with the key 'event'"),
        ([1], "with the key 'event'"),
    ],
)
def test_unknown_json_is_refused(written: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_json(written)


def test_json_that_is_nested_too_deep_is_refused() -> None:
    written: dict[str, Any] = {"event": "gaussian", "noise": 1.0}
    for _ in range(1000):
        written = {"event": "repeat", "of": written, "count": 1}
    with pytest.raises(ConfigError, match="nested"):
        from_json(written)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Gaussian(0), "noise must be > 0"),
        (lambda: Gaussian(-1), "noise must be > 0"),
        (lambda: Gaussian(float("nan")), "noise must be > 0"),
        (lambda: Gaussian(float("inf")), "noise must be > 0"),
        (lambda: Gaussian(True), "noise must be > 0"),
        (lambda: Sampled("poison", 0.1, Gaussian(1)), "did you mean 'poisson'"),  # type: ignore[arg-type]
        (lambda: Sampled("poisson", 1.1, Gaussian(1)), r"rate must be in \[0, 1\], got 1.1"),
        (lambda: Sampled("none", 0.5, Gaussian(1)), "rate must be 1"),
        (lambda: Sampled("with-replacement", 0.5, Gaussian(1)), "draws must be"),
        (lambda: Sampled("poisson", 0.5, Gaussian(1), draws=3), "draws must be left out"),
        (lambda: Sampled("poisson", 0.5, 6.0), "must be an event"),  # type: ignore[arg-type]
        (lambda: Repeat(Gaussian(1), -1), "count must be a whole number"),
        (lambda: Repeat(Gaussian(1), 2.5), "count must be a whole number"),  # type: ignore[arg-type]
        (lambda: OnClients(0, Gaussian(1)), "clients must be"),
        (lambda: TwoLevel(0.1, 0.1, 0, 1), "local_steps must be"),
        (lambda: TwoLevel(0.1, 2, 1, 1), "rate must be in"),
        (lambda: TwoLevel(0.1, 0.1, 1, 1, participation="seen"), "participation must be"),  # type: ignore[arg-type]
        (lambda: Unbounded(""), "because must be a reason"),
        (lambda: Compose([Gaussian(1)]), "a tuple of events"),  # type: ignore[arg-type]
    ],
)
def test_an_impossible_fact_is_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_leaves_multiply_and_add_up() -> None:
    step = Sampled("poisson", 0.1, Gaussian(2))
    event = Compose((Repeat(step, 3), OnClients(2, Repeat(step, 5)), Repeat(Gaussian(7), 0), NOTHING))
    assert leaves(event) == {step: 13}


def test_several_gaussians_on_one_sample_are_one() -> None:
    together = Sampled("poisson", 0.1, Compose((Gaussian(3), Repeat(Gaussian(6), 4))))
    (found,) = leaves(together)
    assert isinstance(found, Sampled)
    assert isinstance(found.event, Gaussian)
    assert found.event.noise == pytest.approx((1 / 9 + 4 / 36) ** -0.5)


def test_sampling_all_is_no_sampling_and_sampling_none_is_nothing() -> None:
    assert leaves(Sampled("poisson", 1.0, Gaussian(2))) == {Gaussian(2): 1}
    assert leaves(Sampled("none", 1.0, Gaussian(2))) == {Gaussian(2): 1}
    assert leaves(Sampled("fixed-size", 0.0, Gaussian(2))) == {}
    assert leaves(TwoLevel(0.0, 0.5, 3, 2)) == {}
