"""Where clients are sampled in secret, logs, audit log, metrics and page of a run do not show who was in a sum."""

import json
import logging

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.federation.key_files import public_pem
from shoal.federation.messages import Payload
from shoal.federation.operations.live_page import body
from shoal.federation.operations.metrics import metrics_text
from shoal.federation.operations.monitor import Monitor
from shoal.federation.secagg.encoding import UNMASK
from shoal.federation.site import Owner, Site
from shoal.federation.site_records import reader
from shoal.federation.terms import ROUND
from support.federations import BAD, full_cohort, served, settings
from support.loopback import Loopback, Peer, with_sites


class Keyed(Loopback):
    """Sites known by their keys."""

    def get_nodes(self):
        return [Peer(node, public_pem(each.owner.key.public_key())) for node, each in self.sites.items()]


def watched(folder, given, grid):
    """The result, the monitor and the lines of the log, with their levels."""
    lines = []
    monitor = Monitor(lambda level, words, _facts: lines.append((level, words)))
    result, _ = served(folder, given, grid, monitor=monitor)
    return result, monitor, lines


def told_of(name, result, monitor, lines):
    """Everything about a site that is logged from level info on, audited or shown, except that it joined."""
    audit = [json.loads(line) for line in (result.run / "audit.jsonl").read_text().splitlines()]
    found = [words for level, words in lines if level >= logging.INFO and name in words and "has joined" not in words]
    found += [line["message"] for line in audit if line.get("site") == name and line["kind"] != "joined"]
    (status,) = (site for site in monitor.status.sites if site.name == name)
    return [*found, status.problem] if status.problem else found


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["fixed-size", "poisson", "all"])
def test_who_answered_is_logged_for_debugging_only(tmp_path, sampling):
    given = settings("trusted-curator", clients__sampling=sampling)
    result, monitor, lines = watched(tmp_path, given, with_sites(tmp_path, 4))
    levels = {level for level, words in lines if " answered: " in words}
    assert levels == {logging.INFO if sampling == "all" else logging.DEBUG}
    assert (told_of("site-01", result, monitor, lines) == []) == (sampling != "all")
    assert monitor.status.hidden == (sampling != "all")
    assert monitor.answered == (4 if sampling == "all" else None)


@pytest.mark.slow
def test_a_site_that_breaks_off_when_its_numbers_are_in_the_sum_is_not_named(tmp_path):
    """Secure aggregation, four of five sites, the coordinator's noise: sampling counts against released models."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(5)]
    sites = {
        100 + n: Site(Owner(f"site-{n:02}", tmp_path / f"{n}", reader("digits", part=n), key=key))
        for n, key in enumerate(keys)
    }
    grid = Keyed(sites)
    grid.changes[BAD] = lambda kind, answer: None if kind == UNMASK else answer
    given = settings("trusted-curator", clients__sampling="fixed-size", data__clients=5, clients__cohort=4)
    given |= {"federation.aggregation": "secure", "federation.threshold": 3, "federation.deadline": 0.5}
    result, monitor, lines = watched(tmp_path, given | {"rounds": 4}, grid)
    assert ("site-01", "late") in [(r["site"], r["what"]) for m in result.metrics for r in m.get("reports", ())]
    assert told_of("site-01", result, monitor, lines) == []
    assert "late" not in body(monitor) + metrics_text(monitor).decode()


@pytest.mark.slow
def test_a_site_cannot_flood_logs_and_page_with_its_reasons(tmp_path):
    grid = with_sites(tmp_path, 4)
    grid.changes[BAD] = lambda kind, answer: Payload({"refused": 10**6 * "x"}) if kind == ROUND else answer
    result, monitor, lines = watched(tmp_path, full_cohort(), grid)
    assert max(len(words) for _, words in lines) < 1000
    assert len(body(monitor)) < 20_000
    assert (result.run / "metrics.jsonl").stat().st_size < 20_000


@pytest.mark.slow
def test_a_site_that_is_not_in_the_sum_is_named(tmp_path):
    grid = with_sites(tmp_path, 4)
    grid.changes[BAD] = lambda kind, answer: None if kind == ROUND else answer
    result, monitor, lines = watched(tmp_path, full_cohort() | {"rounds": 1, "federation.deadline": 0.2}, grid)
    words = told_of("site-01", result, monitor, lines)
    assert any("late: no answer to round 1" in each for each in words)
    assert 'shoal_events_total{kind="late"} 1.0' in metrics_text(monitor).decode()
