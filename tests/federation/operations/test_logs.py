"""Log lines: levels, time stamps where there is no terminal, JSON."""

import io
import json
import logging
import re
import sys
import warnings

import pytest

from shoal.errors import ConfigError
from shoal.federation.operations import logs
from shoal.federation.operations.logs import Log


@pytest.fixture(autouse=True)
def as_before():
    shown = warnings.showwarning
    yield
    logs.close()
    warnings.showwarning = shown


def test_a_line_has_time_and_level_where_there_is_no_terminal(capsys):
    log = Log("info", "text")
    log("north has joined\nround 5 done")
    log.write(logging.DEBUG, "not shown")
    log.write(logging.WARNING, "a strike")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO north has joined\?round 5 done", first)
    assert second.endswith(" WARNING a strike")
    assert not log.on_terminal


def test_on_a_terminal_it_is_words(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    log = Log("info", "text")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)  # as while a progress bar stands in its place
    log("north has joined")
    logs.show_error("no such file")
    assert capsys.readouterr().err == "north has joined\nshoal: no such file\n"
    assert log.on_terminal


def test_json_has_the_facts_of_the_event_and_everything_that_is_shown_is_json(capsys):
    log = Log("warning", "json")
    log("not shown")
    log.write(logging.WARNING, "a strike", {"kind": "strike", "site": "north", "round": 5})
    warnings.warn("an old key", FutureWarning, stacklevel=1)
    logging.getLogger("shoal").warning("the page of %s could not be written", "run")
    logs.show_error("the ledger cannot be written")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in lines] == ["warning", "warning", "warning", "error"]
    assert (lines[0]["kind"], lines[0]["site"], lines[0]["round"]) == ("strike", "north", 5)
    assert lines[3]["message"] == "the ledger cannot be written"


@pytest.mark.parametrize(
    ("level", "format", "words"),
    [("loud", "text", "must be one of debug, info, warning, error, got 'loud'"), ("info", "xml", "--log-format")],
)
def test_other_levels_and_formats_are_refused(level, format, words):
    with pytest.raises(ConfigError, match=words):
        Log(level, format)


def test_without_a_log_an_error_is_one_line(capsys):
    logs.show_error("no such file")
    assert capsys.readouterr().err == "shoal: no such file\n"


def test_a_line_goes_to_standard_error_as_it_is_then_though_the_first_one_was_closed(monkeypatch, capsys):
    first = io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", first)
        log = Log("info", "text")
    first.close()
    log("north has joined")
    assert capsys.readouterr().err.endswith("INFO north has joined\n")
