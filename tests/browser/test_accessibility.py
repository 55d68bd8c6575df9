"""Every page passes axe-core in Chromium, in light and dark, with no serious finding; and every page prints."""

import base64
import re

import pytest
from matplotlib.figure import Figure

from shoal.attacks import attack_report
from shoal.attacks.attack_plots import _png
from shoal.audit import audit_report
from shoal.report import certificate
from shoal.report.compare import write_comparison
from shoal.report.run_reader import read_run
from support import chromium
from support.axe import AXE, FOUND
from support.tiny import FEDAVG, PRIVATE, play, play_numbers

pytestmark = pytest.mark.skipif(chromium.find() is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of every kind."""
    folder = tmp_path_factory.mktemp("runs")
    configs = [PRIVATE | {"baseline": True, "rounds": 12}, FEDAVG, PRIVATE | {"per_round.noise_multiplier": 3.0}]
    runs = [play(folder, config).run for config in configs]
    numbers = play_numbers(folder, FEDAVG).run
    _, shown = certificate.write(runs[0], certificate.certificate(runs[0]))
    compared = write_comparison(folder / "comparison.html", [read_run(run) for run in (*runs, numbers)])
    command = (
        "shoal attack --membership --models 16 --records 200 -c rounds=30 -c model=digits-mlp -c data.clients=10"
    )
    audit, attack = folder / "audit.html", folder / "attack.html"
    audit.write_text(audit_report.html("Audit of a method", [], (PICTURE, PICTURE), command), encoding="utf-8")
    attack.write_text(
        attack_report.html("An attack", ["Words."], [ROW], PICTURE, "A picture", command), encoding="utf-8"
    )
    return {
        "audit": audit,
        "attack": attack,
        "run": runs[0] / "report.html",
        "regression": numbers / "report.html",
        "certificate": shown,
        "comparison": compared,
    }


KINDS = ["run", "regression", "certificate", "comparison", "audit", "attack"]
PICTURE = _png(Figure())
ROW = dict.fromkeys(attack_report.COLUMNS, 0.5) | {"algorithm": "fed-sdp", "model": "attack-cnn", "success": 1.0}


@pytest.mark.skipif(not AXE.is_file(), reason="no axe-core here: npm install --prefix build/axe axe-core@4")
@pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (1280, True), (390, False)], ids=["light", "dark", "narrow"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_axe_has_no_serious_finding(browser, pages, kind, width, dark):
    page = browser.open(width, 900, dark)
    page.go(pages[kind])
    page.do(AXE.read_text(encoding="utf-8") + "; true")
    assert page.do(FOUND) == []


@pytest.mark.skipif(not AXE.is_file(), reason="no axe-core here: npm install --prefix build/axe axe-core@4")
def test_axe_would_find_what_is_wrong(browser, tmp_path):
    wrong = tmp_path / "wrong.html"
    wrong.write_text("<html><body><img src='data:,'><p style='color:#ccc'>pale</p></body></html>", encoding="utf-8")
    page = browser.open()
    page.go(wrong)
    page.do(AXE.read_text(encoding="utf-8") + "; true")
    assert {each.partition(":")[0] for each in page.do(FOUND)} >= {"image-alt", "color-contrast"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_page_prints_within_its_margins(browser, pages, kind):
    page = browser.open(1280, 900)
    page.go(pages[kind])
    page.printed()
    width = 1040 if kind == "comparison" else 720  # what A4 leaves between its margins; a comparison is landscape
    page.size(width, 1000)
    assert page.do("document.documentElement.scrollWidth") <= width
    assert page.do("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    paper = base64.b64decode(page.call("Page.printToPDF", printBackground=False)["data"])
    assert paper.startswith(b"%PDF")
    assert len(re.findall(rb"/Type /Page\b", paper)) >= 1


def test_a_comparison_shows_every_column_at_1280_pixels_the_settings_that_differ_first(browser, pages):
    page = browser.open(1280, 900)
    page.go(pages["comparison"])
    inside = "((box) => box.scrollWidth <= box.clientWidth)(document.querySelector('#runs').parentElement)"
    assert page.do(inside)
    heads = page.do("[...document.querySelectorAll('#runs thead th')].map((h) => h.textContent)")
    first = page.do("document.querySelector('.head .words').textContent")
    assert first.startswith("These settings differ: ")
    settings = [name for name in heads if "." in name]
    assert settings
    assert heads.index(settings[-1]) < heads.index("Accuracy")
    assert all(name in first for name in settings)
    assert page.do("document.querySelectorAll('#frontier .point').length") == 3
