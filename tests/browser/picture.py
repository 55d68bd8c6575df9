"""The picture of a run's page for the README: `python tests/browser/picture.py runs/<id> docs/report.png`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from support.chromium import Browser

WIDTH = 1180


def picture(run: Path, to: Path) -> None:
    """From the top of the page down to what is proven."""
    from PIL import Image

    browser = Browser()
    try:
        page = browser.open()
        page.size(WIDTH, 900, scale=2)
        page.go(run / "report.html")
        end = page.do("document.getElementById('audit').getBoundingClientRect().top + scrollY - 11")
        page.size(WIDTH, round(end), scale=2)
        time.sleep(0.3)  # plots are drawn again at the new size
        page.screenshot(to, whole=False)
    finally:
        browser.close()
    with Image.open(to) as shot:
        shot.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(to, optimize=True)


if __name__ == "__main__":
    picture(Path(sys.argv[1]), Path(sys.argv[2]))
