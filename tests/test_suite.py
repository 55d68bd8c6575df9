"""The suite itself: how often it may fail by chance, and that no clock and no fresh example can fail it."""

import inspect
import re

import pytest
from hypothesis import HealthCheck

from support.paths import TESTS
from support.ports import free_port

MOST = 1e-4  # of whole runs that may fail by chance, at most

DRAWS = re.compile(r"pvalue|chi_square_fits|far_apart|\bALPHA\b|\bFAR\b|\bchi2\.isf|\bchi2\.ppf|corrcoef")


def rate(item: pytest.Item) -> float:
    """How often a test may fail by chance: what its mark says, 0 without one."""
    return sum(mark.kwargs["false_alarm"] for mark in item.iter_markers("statistical"))


def test_the_whole_suite_fails_by_chance_less_than_once_in_ten_thousand_runs(request):
    """As if no seed were fixed: another platform or another PyTorch may draw other numbers from the same seed."""
    assert sum(map(rate, request.session.items)) < MOST


def test_no_test_alone_fails_by_chance_more_than_once_in_a_hundred_thousand_runs(request):
    assert not [item.nodeid for item in request.session.items if rate(item) > 1e-5]


@pytest.mark.slow
def test_whoever_compares_with_a_quantile_says_how_often_it_fails_by_chance(request):
    """Else the sum above is not the suite's."""
    tests = {item.function: item for item in request.session.items if item.path.name != "test_suite.py"}
    assert not [i.nodeid for f, i in tests.items() if DRAWS.search(inspect.getsource(f)) and not rate(i)]


def test_no_test_file_imports_another():
    """What tests share is in tests/support."""
    imports = re.compile(r"^\s*(?:from|import)\s+(?:\w+\.)*test_\w+", re.M)
    files = TESTS.rglob("*.py")
    assert not [path.name for path in files if imports.search(path.read_text(encoding="utf-8"))]


def test_no_hypothesis_looks_at_a_clock_or_draws_examples_of_its_own(request):
    for item in request.session.items:
        if getattr(item.function, "is_hypothesis_test", False):
            found = item.function._hypothesis_internal_use_settings
            assert (found.derandomize, found.deadline, found.database) == (True, None, None), item.nodeid
            assert HealthCheck.too_slow in found.suppress_health_check, item.nodeid


def test_no_two_tests_are_given_one_port():
    """Workers' numbers are neighbours, and a coordinator listens a while after its port was chosen."""
    assert len({free_port() for _ in range(3)}) == 3
