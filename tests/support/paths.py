"""Where things lie, whichever folder a test file is in."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
