"""What people read of a bound is never better than the bound."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import shoal
from shoal.accounting.claims import Proven
from shoal.accounting.rounding import down, up
from shoal.cli import account
from shoal.cli.run import Watch
from shoal.report import claim_rows
from shoal.report.series import figure

POSITIVE = st.floats(min_value=1e-300, max_value=1e300)


@given(POSITIVE, st.integers(1, 9))
def test_up_is_no_less_and_down_no_more_and_both_are_near(value: float, digits: int) -> None:
    assert value <= float(up(value, digits)) <= value * (1 + 1.001 * 10.0 ** (1 - digits))
    assert value * (1 - 1.001 * 10.0 ** (1 - digits)) <= float(down(value, digits)) <= value


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0, "0"), (0.1, "0.1"), (8.0, "8"), (1.1, "1.1"), (7.99901, "8"), (1.00001, "1.001"), (math.inf, "inf")],
)
def test_what_is_short_stays_as_it_is_and_the_rest_goes_up(value: float, said: str) -> None:
    assert up(value) == said


@given(st.floats(min_value=1e-12, max_value=1e12))
def test_a_figure_on_a_page_is_never_less_than_the_epsilon(epsilon: float) -> None:
    assert float(figure(epsilon)) >= epsilon


def proven(epsilon: float, delta: float = 1e-5) -> Proven:
    return Proven("client", "release", epsilon, delta, "pld", None)


def test_a_claim_in_words_is_rounded_up() -> None:
    assert proven(7.9992, 1.00000049e-5).words() == "epsilon 8 at delta 1.00001e-5 (pld)"
    assert proven(1.23401).words().startswith("epsilon 1.235 ")


def test_the_factor_between_the_rates_is_rounded_up() -> None:
    run: Any = SimpleNamespace(proven=[proven(7.99).to_json()], budget={})
    factor = float(claim_rows.in_words(run).split("at most ")[1].split(" times")[0])
    assert math.exp(7.99) == pytest.approx(2951.3, abs=0.1)
    assert factor == 2960


def test_the_progress_bar_rounds_up() -> None:
    watch = Watch(Console(quiet=True))
    watch._budget = SimpleNamespace(unit="client", observer="release", epsilon=8.0)
    watch._task = watch.progress.add_task("", name="", accuracy="-", spent="", total=1)
    watch.round({"round": 1, "proven": [proven(7.981).to_json()]})
    assert watch.progress.tasks[0].fields["spent"] == "  epsilon 7.99/8 (client)"


def test_the_calculator_rounds_what_holds_up_and_what_is_at_least_down() -> None:
    shown = {"epsilon": 1.0000001, "at_least": 0.9999999, "delta": 1.0000001e-5, "noise": 4.0000001}
    said = {key: float(account._text(key, value)) for key, value in shown.items()}
    assert said == {"epsilon": 1.00001, "at_least": 0.999999, "delta": 1.00001e-5, "noise": 4.00001}


def test_no_message_rounds_a_proven_epsilon_to_the_nearest() -> None:
    source = Path(shoal.__file__).parent
    found = [
        f"{path.relative_to(source)}: {line.strip()}"
        for path in sorted(source.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"(?:epsilon|costs) \{[^}]*:\.\d[efg]\}", line) and "not proven" not in line
    ]
    assert found == []
