"""The site builds, with no broken link, no page that is left out and no snippet that is missing."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from support.paths import ROOT

needs_docs = pytest.mark.skipif(
    not (find_spec("material") and find_spec("mkdocstrings")), reason="needs the extra 'docs'"
)


@pytest.mark.slow
@needs_docs
def test_the_site_builds(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {str(page.relative_to(tmp_path / "site")) for page in (tmp_path / "site").rglob("*.html")}
    sources = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    expected = {str(path).replace("README.html", "index.html") for path in sources}
    assert expected <= pages
    everything = "".join(page.read_text(encoding="utf-8") for page in (tmp_path / "site").rglob("*.html"))
    assert "<!-- generated" not in everything
    assert '<p class="picture"><a href="natural.png"><img ' in everything, "phones scroll wide pictures"
    assert "fonts.googleapis" not in everything, "nothing is loaded from elsewhere"


def test_files_that_pages_include_exist():
    """A formatter of Python once wrote `--8 < --`, which is shown as it stands, without an error."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    lines = [line.strip() for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    marks = [line for line in lines if "--8" in line]
    found = [re.fullmatch(r'--8<-- "([^"]+)"', mark) for mark in marks]
    assert found
    assert all(match and (ROOT / match[1]).is_file() for match in found), marks
