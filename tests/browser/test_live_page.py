"""The live page of a federation in a real Chromium: it refreshes itself, escapes text, fetches nothing else."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.federation.operations.status_server import OperationsServer
from support import chromium
from support.axe import AXE, FOUND
from support.operations import CLAIM, SITES, STATUS, monitored
from support.pages import HOSTILE

pytestmark = pytest.mark.skipif(chromium.find() is None, reason="no Chromium here: apt-get install chromium")

PATIENCE = 120.0  # seconds for a refresh, which comes every two


@pytest.fixture
def federation():
    monitor, _ = monitored()
    monitor.on_event("joined", {"site": "east", "message": "site east (node 7) has joined"})
    monitor.on_event("key-rejected", {"address": "203.0.113.9", "reason": "the key may not join", "times": 3})
    server = OperationsServer("127.0.0.1:0", monitor)
    yield monitor, server
    server.close()


def opened(browser, server, width=1280, dark=False):
    page = browser.open(width, 900, dark)
    page.visit(f"http://127.0.0.1:{server.port}/")
    return page


def until(page, script, expected):
    end = time.monotonic() + PATIENCE
    while (found := page.do(script)) != expected:
        assert time.monotonic() < end, f"{script} is {found!r}"
        time.sleep(0.1)


def text(selector):
    return f"document.querySelector('{selector}')?.textContent.trim().replace(/\\s+/g, ' ')"


def rows(table):
    cells = "[...row.cells].map((cell) => cell.textContent.trim())"
    return f"[...document.querySelectorAll('#{table} tbody tr')].map((row) => {cells})"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_says_who_is_there_and_what_is_spent(browser, federation, width, dark):
    _, server = federation
    page = opened(browser, server, width, dark)
    assert page.do(text("#round")) == "4 of 40"
    assert page.do(text("#epsilon")) == "1.24 of 8"
    assert page.do(text("#connected")) == "1 of 4"
    assert [row[:3] for row in page.do(rows("sites"))] == [
        ["east", "connected", "0"],
        ["north", "away", "0"],
        ["south", "excluded", "3"],
        ["west", "not joined", "0"],
    ]
    assert page.do(rows("events"))[0] == [
        "2026-01-01 12:00:00",
        "key-rejected",
        "key-rejected: address 203.0.113.9, reason the key may not join, times 3",
    ]
    assert page.do("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.do((Path(__file__).parent / "contrast.js").read_text()) == [], "at least 4.5 to 1"
    assert page.complaints() == []


@pytest.mark.skipif(not AXE.is_file(), reason="no axe-core here: npm install --prefix build/axe axe-core@4")
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_has_no_serious_finding(browser, federation, width):
    _, server = federation
    page = opened(browser, server, width)
    until(page, text("#round"), "4 of 40")
    page.do(AXE.read_text(encoding="utf-8") + "; true")
    assert page.do(FOUND) == []


def test_it_refreshes_itself_and_asks_nobody_else(browser, federation):
    monitor, server = federation
    page = opened(browser, server)
    monitor.publish(replace(STATUS, done=5, sites=(SITES[0], replace(SITES[1], state="connected")), doing="round 6"))
    monitor.round({"proven": [CLAIM | {"epsilon": 1.5}]})
    until(page, text("#round"), "5 of 40")
    assert page.do(text("#epsilon")) == "1.5 of 8"
    assert [row[1] for row in page.do(rows("sites"))] == ["connected", "connected"]
    own = f"http://127.0.0.1:{server.port}/"
    assert {url.removeprefix(own) for url in page.requests()} == {"", "live.js", "live"}
    assert page.complaints() == []


def test_text_of_sites_is_shown_as_text(browser, federation):
    monitor, server = federation
    hostile = replace(SITES[0], name=HOSTILE, problem=HOSTILE)
    monitor.publish(replace(STATUS, run=HOSTILE, sites=(hostile,), doing=HOSTILE))
    page = opened(browser, server)
    monitor.on_event("refused", {"site": HOSTILE, "message": HOSTILE})
    until(page, "document.querySelectorAll('#events tbody tr').length", 3)
    for where in ("#sites tbody th", "#sites tbody td:last-child", "#events tbody tr td:last-child", "h1", "#doing"):
        assert page.do(f"document.querySelector('{where}').textContent") == HOSTILE
    assert page.do("document.querySelectorAll('main img, main script').length") == 0
    assert page.complaints() == []


def test_it_says_so_where_the_coordinator_does_not_answer_and_goes_on_once_it_does(browser):
    monitor, _ = monitored()
    server = OperationsServer("127.0.0.1:0", monitor)
    page = opened(browser, server)
    assert page.do("document.getElementById('lost').hidden")
    server.close()
    until(page, "document.getElementById('lost').hidden", False)
    assert page.do(text("#round")) == "4 of 40", "what was known stays"
    again = OperationsServer(str(server.port), monitor)
    try:
        until(page, "document.getElementById('lost').hidden", True)
    finally:
        again.close()


def test_before_the_run_begins(browser):
    monitor, _ = monitored(None)
    server = OperationsServer("0", monitor)
    try:
        page = opened(browser, server)
        assert page.do(text("h1")) == "Starting"
        monitor.publish(STATUS)
        until(page, text("#round"), "4 of 40")
        assert page.do(text("#epsilon")) == "–"
    finally:
        server.close()
