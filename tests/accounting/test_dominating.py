"""Of several events, one that costs no less, however often they happened."""

import pytest

from shoal.accounting.accountants import epsilon
from shoal.accounting.dominating import dominating
from shoal.accounting.events import (
    NOTHING,
    Allocated,
    BySize,
    Compose,
    Gaussian,
    Repeat,
    Sampled,
    SamplerError,
    TwoLevel,
    Unbounded,
)
from shoal.mechanisms.mechanism import ADJACENCIES

RARE, OFTEN = Sampled("poisson", 0.01, Gaussian(0.7)), Sampled("poisson", 0.2, Gaussian(1.6))


def cost(event, times):
    return epsilon(Repeat(Compose((event,)), times), 1e-5, "rdp", "zero-out").epsilon


def test_what_costs_more_once_may_cost_less_twenty_times():
    assert cost(RARE, 1) > cost(OFTEN, 1)
    assert cost(RARE, 20) < cost(OFTEN, 20)
    assert dominating([RARE, OFTEN]) == Sampled("poisson", 0.2, Gaussian(0.7))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([RARE, NOTHING], RARE),
        ([RARE, Unbounded("no noise"), OFTEN], Unbounded("no noise")),
        ([RARE, Gaussian(3.0)], Compose((RARE, Gaussian(3.0)))),
        (
            [Compose((RARE, SamplerError(1e-9))), Compose((NOTHING, SamplerError(1e-8)))],
            Compose((RARE, SamplerError(1e-8))),
        ),
        (
            [Allocated(((1.0, 4),)), Sampled("poisson", 0.25, Gaussian(1.5)), Allocated(((2.0, 3), (0.5, 1)))],
            Allocated(((0.5, 4),)),
        ),
        (
            [Allocated(((1.0, 4),)), Sampled("poisson", 0.25, Gaussian(0.9))],
            Compose((Allocated(((1.0, 4),)), Sampled("poisson", 0.25, Gaussian(0.9)))),
        ),
        (
            [
                BySize(TwoLevel(0.1, 0.1, 10, 3.0), ((1, 0.1, 4), (20, 0.05, 10))),
                BySize(TwoLevel(0.1, 0.2, 10, 2.0), ((1, 0.2, 4), (20, 0.01, 10))),
            ],
            BySize(TwoLevel(0.1, 0.2, 10, 2.0), ((1, 0.2, 4), (20, 0.05, 10))),
        ),
    ],
)
def test_no_event_costs_more_than_the_one_that_stands_for_all(events, expected):
    assert dominating(events) == expected


def test_no_unit_is_charged_under_an_adjacency_where_a_larger_rate_may_cost_less():
    most, all_enter = (Sampled("fixed-size", rate, Gaussian(2.0)) for rate in (0.9, 1.0))
    displaced, alone = (epsilon(each, 1e-5, adjacency="add-or-remove").epsilon for each in (most, all_enter))
    assert displaced > alone
    assert "add-or-remove" not in ADJACENCIES.values()


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize("kind", ["poisson", "fixed-size", pytest.param("with-replacement", marks=pytest.mark.slow)])
def test_beside_anything_else_it_costs_no_less(kind, adjacency):
    draws = 5 if kind == "with-replacement" else None
    events = [Sampled(kind, rate, Gaussian(noise), draws) for rate, noise in ((0.01, 0.9), (0.2, 1.6), (0.5, 4.0))]
    stands = dominating(events)
    for times in (1, 30):
        for event in events:
            least, most = (
                epsilon(Compose((Gaussian(3.0), Repeat(Compose((each,)), times))), 1e-5, adjacency=adjacency).epsilon
                for each in (event, stands)
            )
            assert least <= most * (1 + 1e-3)
