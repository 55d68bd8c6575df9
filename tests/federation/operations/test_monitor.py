"""Events become log lines, lines of the audit log and counts; what sampling hides is in none of the latter."""

import errno
import json
import logging
import os
import threading

import pytest

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal import release
from shoal.errors import ConfigError
from shoal.federation.operations import audit_log
from shoal.federation.operations.monitor import MOST_OF_STRANGERS, Monitor
from support.operations import CLAIM, monitored


def audited(folder):
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


def rejected(address="10.0.0.9", **more):
    """What the link reports of a key that may not join."""
    return {"address": address, "reason": "unknown key", "path": "activate-node", "key": "ff", "times": 1} | more


def test_events_of_the_link_are_logged_audited_and_counted(tmp_path):
    """Also those from before the run has a folder; one event may stand for several."""
    monitor, lines = monitored()
    monitor.on_event("key-rejected", rejected())
    monitor.begin(tmp_path)
    monitor.on_event("authentication-failed", rejected(reason="wrong signature", times=7))
    monitor.on_event("connection-refused", {"address": "10.0.0.9", "reason": "too many", "times": 2})
    kinds = [line["kind"] for line in audited(tmp_path)]
    assert kinds == ["key-rejected", "authentication-failed", "connection-refused"]
    assert all(line["release"] == release.SITES for line in audited(tmp_path))
    assert audited(tmp_path)[1]["reason"] == "wrong signature"
    assert audited(tmp_path)[0]["time"] == "2026-01-01T12:00:00.000+00:00"
    assert monitor.counts == {"key-rejected": 1, "authentication-failed": 7, "connection-refused": 2}
    assert [level for level, *_ in lines] == [logging.WARNING] * 3
    assert "unknown key" in lines[0][1]
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600


def test_strangers_cannot_fill_the_disk(tmp_path):
    """Twenty lines a minute of each kind, then a count; sites' own events are all there."""
    now = [0.0]
    monitor = Monitor(lambda *_: None, clock=lambda: now[0])
    monitor.begin(tmp_path)
    for _ in range(500):
        monitor.on_event("key-rejected", rejected())
        monitor.on_event("joined", {"site": "north"})
    kinds = [line["kind"] for line in audited(tmp_path)]
    assert (kinds.count("key-rejected"), kinds.count("joined")) == (MOST_OF_STRANGERS, 500)
    now[0] = 61.0
    monitor.on_event("key-rejected", rejected())
    assert audited(tmp_path)[-1]["left_out"] == 500 - MOST_OF_STRANGERS
    assert monitor.counts["key-rejected"] == 501


def test_what_another_machine_wrote_stays_on_its_line(tmp_path):
    monitor, lines = monitored()
    monitor.begin(tmp_path)
    monitor.on_event("key-rejected", rejected(reason="\x1b[2J\nround 5 done" + 1000 * "x"))
    (line,) = audited(tmp_path)
    assert line["reason"].startswith("?[2J?round 5 done")
    assert len(line["reason"]) == 200
    assert "\n" not in lines[0][1]


def test_a_run_goes_on_where_the_audit_log_cannot_be_written(tmp_path, monkeypatch):
    """It is said once; the line that was torn does not spoil the next."""
    monitor, lines = monitored()
    monitor.begin(tmp_path)
    write, full = os.write, [True]

    def torn(file, raw):
        if full:
            write(file, raw[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, raw)

    monkeypatch.setattr(audit_log.os, "write", torn)
    monitor.on_event("joined", {"site": "north"})
    monitor.on_event("joined", {"site": "east"})
    assert [words for level, words, _ in lines if level == logging.ERROR] == [
        "the audit log cannot be written: No space left on device; the run goes on"
    ]
    full.clear()
    monitor.on_event("joined", {"site": "west"})
    assert json.loads((tmp_path / "audit.jsonl").read_text().splitlines()[-1])["site"] == "west"


def test_who_answered_is_logged_at_most(tmp_path):
    monitor, lines = monitored()
    monitor.begin(tmp_path)
    monitor.on_event("answered", {"message": "round 1: 2 of 3 answered: north, east", "level": logging.DEBUG})
    assert [level for level, *_ in lines] == [logging.DEBUG]
    assert not (tmp_path / "audit.jsonl").exists()
    assert not monitor.counts
    assert not monitor.recent
    assert monitor.answered is None, "the status says that sampling is secret"


def test_a_resumed_run_has_the_claims_of_its_last_round(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"round": 3, "proven": [CLAIM]}) + "\n")
    monitor, _ = monitored(None)
    monitor.begin(tmp_path)
    assert monitor.proven == [CLAIM]


def test_the_coordinator_carries_out_a_command_or_says_why_not():
    monitor, _ = monitored()
    answers = []

    def ask(command):
        try:
            answers.append(monitor.ask(command, {"site": "north"}))
        except ConfigError as error:
            answers.append(str(error))

    def act(command, values):
        if command == "drop":
            return {"dropped": values["site"]}
        raise ConfigError("unknown command")

    for command in ("drop", "eat"):
        asking = threading.Thread(target=ask, args=(command,))
        asking.start()
        while asking.is_alive():
            monitor.carry_out(act)
            asking.join(0.01)
    assert answers == [{"dropped": "north"}, "unknown command"]
