"""What every test starts from: the same random numbers, and no clock that could fail it."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

SLOW_IS_FINE = [HealthCheck.too_slow]  # a check by the clock, which a busy machine fails

settings.register_profile("same", derandomize=True, deadline=None, database=None, suppress_health_check=SLOW_IS_FINE)
settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Whoever draws from a library's own generator draws the same numbers in every run and in every order."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
