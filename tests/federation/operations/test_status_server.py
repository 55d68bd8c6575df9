"""/health, /metrics and the live page: what they say, what they never say, and who may ask."""

import http.client
import json
import socket
import time
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.errors import ConfigError, RunError
from shoal.federation.operations import status_server
from shoal.federation.operations.status_server import MOST_CONNECTIONS, OperationsServer, health, split
from support.operations import NOW, SITES, STATUS, monitored
from support.pages import HOSTILE


@pytest.fixture
def served():
    monitor, _ = monitored()
    server = OperationsServer("127.0.0.1:0", monitor)
    yield server, monitor
    server.close()


def get(server, path, **headers):
    asked = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        asked.request("GET", path, headers=headers)
        answer = asked.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        asked.close()


def values(text):
    return {
        (sample.name, *(label for _, label in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_prometheus_text(served):
    server, monitor = served
    monitor.on_event("joined", {"site": "north"})
    status, text, headers = get(server, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=")
    found = values(text)
    assert found["shoal_rounds_done",] == 4
    assert found["shoal_rounds_planned",] == 40
    assert found["shoal_epsilon", "1e-5", "release", "client"] == 1.2341
    assert found["shoal_epsilon_budget", "release", "client"] == 8
    assert found["shoal_sites", "connected"] == found["shoal_sites", "away"] == 1
    assert (found["shoal_site_connected", "east"], found["shoal_site_connected", "north"]) == (1, 0)
    assert found["shoal_site_strikes", "south"] == 3
    assert found["shoal_events_total", "joined"] == 1


def test_where_sampling_is_secret_nothing_depends_on_who_took_part(served):
    """Metrics and page after a round of two answers are those after a round of four; else the number is there."""
    server, monitor = served
    monitor.on_event("answered", {"message": "round 5: 2 of 2 answered: east, north", "level": 10})
    before = [get(server, path)[1] for path in ("/", "/live", "/metrics", "/health")]
    monitor.round({"proven": monitor.proven, "clients": 4, "asked": 4, "bytes_received": 10**9, "seconds": 99.0})
    monitor.on_event("answered", {"message": "round 6: 4 of 4 answered: east, north, south, west", "level": 10})
    after = [get(server, path)[1] for path in ("/", "/live", "/metrics", "/health")]
    assert [text for text in before if "seconds_since_seen" not in text] == [
        text for text in after if "seconds_since_seen" not in text
    ]
    assert "process_cpu" not in before[2]
    assert "answered" not in before[2]
    monitor.publish(replace(STATUS, hidden=False))
    monitor.round({"proven": monitor.proven, "clients": 4})
    assert values(get(server, "/metrics")[1])["shoal_sites_answered",] == 4


def test_two_sites_of_one_name_are_two_in_the_metrics(served):
    server, monitor = served
    monitor.publish(replace(STATUS, sites=(SITES[0], replace(SITES[1], name="east"))))
    found = values(get(server, "/metrics")[1])
    assert (found["shoal_site_connected", "east (a1)"], found["shoal_site_connected", "east (b2)"]) == (1, 0)


@pytest.mark.parametrize(
    ("status", "silent", "code", "word"),
    [(None, 0, 503, "starting"), (STATUS, 1, 200, "ok"), (STATUS, 601, 503, "stuck")],
)
def test_health(status, silent, code, word):
    monitor, _ = monitored(status)
    found, kind, content = health(monitor, NOW + silent)
    assert (found, kind, json.loads(content)["status"]) == (code, "application/json", word)


def test_text_of_sites_is_escaped(served):
    server, monitor = served
    monitor.publish(replace(STATUS, sites=(replace(SITES[0], name=HOSTILE, problem=HOSTILE),), doing=HOSTILE))
    monitor.on_event("refused", {"site": HOSTILE, "message": HOSTILE})
    for path in ("/", "/live"):
        _, text, headers = get(server, path)
        assert HOSTILE not in text
        assert "<img" not in text
        assert text.count("&lt;img") == 4
        assert "script-src 'self'" in headers["content-security-policy"]
    monitor.publish(replace(STATUS, sites=(replace(SITES[0], name='a"b\\c\nd'),)))
    assert values(get(server, "/metrics")[1])["shoal_site_connected", 'a"b\\c\nd'] == 1


def test_another_web_site_cannot_read_it_through_a_browser(served):
    """A name that leads to loopback (DNS rebinding) is refused; there is nothing but GET and no CORS header."""
    server, _ = served
    assert get(server, "/", Host="evil.example")[0] == 403
    assert get(server, "/", Host=f"localhost:{server.port}")[0] == 200
    assert get(server, "/", Host=f"[::1]:{server.port}")[0] == 200
    assert get(server, "/elsewhere")[0] == 404
    assert get(server, "/../metrics.py")[0] == 404
    assert "access-control-allow-origin" not in get(server, "/live")[2]
    asked = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    asked.request("POST", "/")
    assert asked.getresponse().status == 501
    asked.close()


def test_idle_connections_take_few_descriptors_and_no_more(served, monkeypatch):
    """The next one is closed at once; it is served again once they are gone."""
    server, _ = served
    monkeypatch.setattr(status_server._Handler, "timeout", 600.0)
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(MOST_CONNECTIONS)]
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as one_more:
        assert one_more.recv(1) == b""
    for each in idle:
        each.close()
    while server._server.free._value < MOST_CONNECTIONS:
        time.sleep(0.01)
    assert get(server, "/metrics")[0] == 200


def test_addresses():
    assert split("9100") == ("127.0.0.1", 9100)
    assert split("0.0.0.0:9100") == ("0.0.0.0", 9100)
    assert split("[::1]:9100") == ("::1", 9100)
    for wrong in ("", "host", ":9100", "host:", "host:x"):
        with pytest.raises(ConfigError, match="--metrics must be HOST:PORT or PORT"):
            split(wrong)
    monitor, _ = monitored()
    taken = OperationsServer("0", monitor)
    try:
        with pytest.raises(RunError, match="choose another address for --metrics"):
            OperationsServer(str(taken.port), monitor)
    finally:
        taken.close()
    assert status_server._loopback("127.3.2.1")
    assert not status_server._loopback("10.0.0.1")
