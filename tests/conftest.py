"""What every test starts from: the same random numbers, and no clock that could fail it."""

from __future__ import annotations

import gc
import os
import random
import sys
from functools import cache

import hypothesis.core
import numpy as np
import pytest
import typer.main
import typer.testing
from hypothesis import HealthCheck, settings

RARELY = 1e-7  # how often the game and each check of an audit flag what is right, in tests that ask for it
SLOW_IS_FINE = [HealthCheck.too_slow]  # a check by the clock, which a busy machine fails

settings.register_profile("same", derandomize=True, deadline=None, database=None, suppress_health_check=SLOW_IS_FINE)
settings.load_profile("same")

os.fsync = os.fstat  # type: ignore[assignment]  # the file is open, all that a test without a power cut can see
# The tree of all commands, which else is made again for each command.
typer.main.get_command = typer.testing._get_command = cache(typer.main.get_command)
# The digest of a test's source, by which its random numbers are drawn, and which is the same for all its parameters.
hypothesis.core.function_digest = cache(hypothesis.core.function_digest)
gc.disable()  # until all tests are collected: what is imported stays


def pytest_collection_finish() -> None:
    """From now on garbage is looked for, and only in what tests make; models that are alike are compared once."""
    if "shoal.gradients.ways" in sys.modules:
        from support.compared import compare_once

        compare_once()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collectstart(collector: pytest.Collector) -> None:
    """A file that draws when it is imported, for its parameters, draws the same numbers in every run."""
    _same_numbers()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Whoever draws from a library's own generator draws the same numbers in every run and in every order."""
    _same_numbers()


def _same_numbers() -> None:
    random.seed(0)
    np.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        # Without a GPU, manual_seed writes down the whole stack for each kind of device that may come yet.
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture
def rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit whose game, checks and canaries flag what is right with RARELY at most, not with their own 1e-4."""
    from shoal.audit import bounds, checks, one_run

    monkeypatch.setattr(bounds, "ALPHA", RARELY)
    monkeypatch.setattr(checks, "ALPHA", RARELY)
    monkeypatch.setattr(one_run, "FLAG", 1e-3)
    monkeypatch.setattr(one_run, "AGAIN", 1e-2)
    monkeypatch.setattr(bounds.points, "__defaults__", (RARELY,))
