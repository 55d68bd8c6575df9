"""One Chromium for the tests of a file."""

import pytest

from support import chromium


@pytest.fixture(scope="module")
def browser():
    started = chromium.Browser()
    yield started
    started.close()
