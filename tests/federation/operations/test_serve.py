"""`shoal serve` and `shoal join` as processes, watched and asked as their operators would."""

import json
import signal
import time

import httpx
import pytest

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal import release
from shoal.federation.operations.control import ask, running
from support.deploy_children import start
from support.ports import free_port

pytestmark = pytest.mark.slow

PATIENCE = 240.0  # seconds for all that the test waits for; a quiet machine needs a twentieth
CONFIG = """
algorithm = "trusted-curator"
model = "linear"
rounds = 10000
[data]
name = "digits"
clients = 2
[clients]
sampling = "all"
[local]
steps = 2
[engine]
device = "cpu"
threads = 1
"""


def test_a_federation_is_watched_asked_and_stopped(tmp_path):
    (tmp_path / "federation.toml").write_text(CONFIG)
    port, metrics = free_port(), free_port()
    as_json = ["--log-format", "json"]
    words = ["serve", "federation.toml", "--port", str(port), "--metrics", str(metrics), *as_json]
    coordinator = start(tmp_path, "serve.log", words)
    started = [coordinator]
    for name in ("north", "south"):
        words = ["join", f"127.0.0.1:{port}", "--data", "digits", "--part", "0", "--name", name, "--folder", name]
        started.append(start(tmp_path, f"{name}.log", [*words, "--against", "release", *as_json]))
    end = time.monotonic() + PATIENCE

    def until(fact):
        while not (found := fact()):
            assert time.monotonic() < end, "".join(f"\n--- {child.words}\n{child.said}" for child in started)
            time.sleep(0.1)
        return found

    def health():
        try:
            answer = httpx.get(f"http://127.0.0.1:{metrics}/health", timeout=60)
        except httpx.TransportError:
            return {}
        return answer.json() if answer.status_code == 200 else {}

    try:
        until(lambda: health().get("rounds_done", 0) >= 2)
        (run,) = running(tmp_path / "runs")
        assert [(site["name"], site["state"]) for site in ask(run, command="list")["sites"]] == [
            ("north", "connected"),
            ("south", "connected"),
        ]
        text = httpx.get(f"http://127.0.0.1:{metrics}/metrics", timeout=60).text
        assert 'shoal_site_connected{site="north"} 1.0' in text
        assert 'shoal_epsilon{delta="1e-5",observer="release",unit="client"}' in text
        assert ask(run, command="drop", site="south")["left"] == 1
        assert started[2].ended(end) == 0, started[2].said
        assert "dropped by the coordinator's operator" in started[2].said
        done = health()["rounds_done"]
        until(lambda: health()["rounds_done"] > done)
        coordinator.signal(signal.SIGTERM)
        assert coordinator.ended(end) == 130, coordinator.said
    finally:
        for child in started:
            child.away()
    assert not (run / "control.sock").exists()
    audit = [json.loads(line) for line in (run / "audit.jsonl").read_text().splitlines()]
    assert sorted((line["kind"], line["site"]) for line in audit) == [
        ("dropped", "south"), ("joined", "north"), ("joined", "south")
    ]  # fmt: skip
    assert {line["release"] for line in audit} == {release.SITES}
    for child in started:
        assert all({"time", "level", "message"} <= set(json.loads(line)) for line in child.said.splitlines())
