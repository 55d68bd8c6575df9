"""Events are facts: they check themselves, survive JSON, and nothing unknown gets in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.accounting.events import (
    NOTHING,
    Allocated,
    BySize,
    Compose,
    Event,
    Gaussian,
    OnClients,
    Repeat,
    Sampled,
    SampledUser,
    TwoLevel,
    Unbounded,
    from_json,
)
from shoal.accounting.leaves import block_length, blocks, by_size, for_worst_client, leaves
from shoal.errors import ConfigError, ShoalError

noises = st.floats(1e-3, 1e3)
rates = st.floats(0, 1)
uses = st.lists(st.tuples(st.integers(0, 10**6), rates, st.integers(1, 99)), min_size=1, max_size=4).map(
    lambda some: tuple(sorted({use[0]: use for use in some}.values()))
)
simple = st.one_of(
    noises.map(Gaussian),
    st.text(min_size=1).map(Unbounded),
    st.builds(SampledUser, st.integers(1, 99), rates, noises),
    st.lists(st.tuples(noises, st.integers(1, 99)), min_size=1, max_size=3).map(lambda some: Allocated(tuple(some))),
    st.builds(lambda noise, some: BySize(TwoLevel(0.5, 1.0, 99, noise), some), noises, uses),
    st.builds(
        TwoLevel,
        rates,
        rates,
        st.integers(1, 99),
        noises,
        st.sampled_from(["poisson", "fixed-size", "shuffled", "random-allocation"]),
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


@pytest.mark.slow
@settings(derandomize=True, database=None, deadline=None, max_examples=200)
@given(events)
def test_an_event_survives_json(event: Event) -> None:
    assert from_json(json.loads(json.dumps(event.to_json()))) == event


@pytest.mark.slow
@settings(derandomize=True, database=None, deadline=None, max_examples=120)
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
        (lambda: TwoLevel(0.1, 0.1, 1, 1, "shuffled", records=2), "local must be poisson for several records"),
        (lambda: SampledUser(0, 0.1, 1), "records must be"),
        (lambda: TwoLevel(0.1, 0.1, 1, 1, participation="seen"), "participation must be"),  # type: ignore[arg-type]
        (lambda: BySize(TwoLevel(1, 0.1, 2, 1), ()), "uses must be a list"),
        (lambda: BySize(TwoLevel(1, 0.1, 2, 1), ((5, 0.1, 2), (5, 0.1, 2))), "uses must be in ascending order"),
        (lambda: BySize(TwoLevel(1, 0.1, 2, 1), ((5, 0.2, 2),)), "uses must be no worse"),
        (lambda: BySize(TwoLevel(1, 0.1, 2, 1), ((5, 0.1, 3),)), "uses must be no worse"),
        (lambda: BySize(TwoLevel(1, 0.1, 2, 1), ((5, 0.1, "2"),)), "local_steps must be"),  # type: ignore[arg-type]
        (lambda: BySize(Gaussian(1), ((5, 0.1, 2),)), "a two-level event"),  # type: ignore[arg-type]
        (lambda: Allocated(()), "rounds must be a list"),
        (lambda: Allocated(((1.0, 0),)), "rounds must be a list"),
        (lambda: Allocated(((0.0, 3),)), "rounds must be a list"),
        (lambda: Allocated((("1", 3),)), "rounds must be a list"),  # type: ignore[arg-type]
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


def test_random_allocation_is_counted_in_blocks_and_one_that_was_begun_counts_in_full() -> None:
    step = Sampled("random-allocation", 1 / 49, Gaussian(2))
    block = Allocated(((2, 49),))
    assert [leaves(Repeat(step, count)) for count in (1, 49, 50)] == [{block: 1}, {block: 1}, {block: 2}]
    assert leaves(step) == {block: 1}
    assert leaves(Repeat(Sampled("random-allocation", 1.0, Gaussian(2)), 5)) == {Gaussian(2): 5}
    assert leaves(blocks([2.0] * 60, 49)) == {block: 2}
    assert leaves(blocks([1.0, 2.0, 3.0], 2)) == {Allocated(((1.0, 1), (2.0, 1))): 1, Allocated(((3.0, 2),)): 1}


def test_k_of_t_rounds_are_k_blocks_of_t_over_k_rounded_down() -> None:
    assert [block_length(1 / n) for n in range(1, 200)] == list(range(1, 200))
    assert [block_length(rate) for rate in (1.0, 0.3, 10 / 99, 0.7)] == [1, 3, 9, 1]
    assert leaves(Repeat(Sampled("random-allocation", 0.3, Gaussian(2)), 10)) == {Allocated(((2, 3),)): 4}


def test_random_allocation_of_what_has_no_bound_or_is_no_gaussian() -> None:
    assert leaves(Sampled("random-allocation", 0.5, Unbounded("so"))) == {Unbounded("so"): 1}
    with pytest.raises(ConfigError, match="Gaussian noise inside random-allocation"):
        leaves(Sampled("random-allocation", 0.5, Sampled("poisson", 0.5, Gaussian(1))))


SMALL, LARGE = TwoLevel(1.0, 0.5, 2, 3.0), TwoLevel(1.0, 0.1, 10, 3.0)
TWO_KINDS = BySize(TwoLevel(1.0, 0.5, 10, 3.0), ((20, 0.5, 2), (100, 0.1, 10)))


def test_clients_of_several_sizes_are_counted_each_for_itself() -> None:
    found = by_size(Compose((Repeat(TWO_KINDS, 3), Gaussian(2.0))))
    assert found == {
        0: leaves(Compose((Repeat(SMALL, 3), Gaussian(2.0)))),
        100: leaves(Compose((Repeat(LARGE, 3), Gaussian(2.0)))),
    }
    assert by_size(Gaussian(2.0)) == {0: {Gaussian(2.0): 1}}


def test_kinds_of_clients_that_are_cut_at_other_sizes_are_cut_at_both() -> None:
    other = BySize(TwoLevel(1.0, 0.9, 5, 3.0), ((1, 0.9, 1), (50, 0.3, 5)))
    found = by_size(Compose((TWO_KINDS, other)))
    assert found == {
        0: leaves(Compose((SMALL, TwoLevel(1.0, 0.9, 1, 3.0)))),
        50: leaves(Compose((SMALL, TwoLevel(1.0, 0.3, 5, 3.0)))),
        100: leaves(Compose((LARGE, TwoLevel(1.0, 0.3, 5, 3.0)))),
    }


def test_where_a_record_may_lie_with_any_client_it_is_charged_for_the_worst() -> None:
    worst = leaves(TWO_KINDS.event)
    assert leaves(TWO_KINDS) == worst
    assert by_size(for_worst_client(Repeat(Compose((TWO_KINDS,)), 3))) == {
        0: {leaf: 3 * n for leaf, n in worst.items()}
    }
    assert by_size(OnClients(2, TWO_KINDS)) == {0: {leaf: 2 * n for leaf, n in worst.items()}}
