"""What `shoal serve` logs of its rounds where there is no terminal, and how a service manager stops it."""

import json
import signal

import pytest

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.cli.round_log import RoundLog
from shoal.federation.operations import logs
from shoal.federation.operations.logs import Log
from shoal.result import Interrupted
from support.federations import served, settings


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr("warnings.showwarning", None)  # restored at the end
    made = RoundLog(Log("info", "json"))
    yield made
    made.end()
    logs.close()


@pytest.mark.slow
def test_there_is_one_line_a_round_and_it_does_not_say_how_many_took_part(tmp_path, watch, capsys):
    given = settings("trusted-curator", clients__sampling="poisson")
    result, _ = served(tmp_path, given, on_start=watch.start, on_round=watch.round)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert lines[0]["run"] == str(result.run)
    rounds = [line for line in lines if line["kind"] == "round"]
    assert [(line["round"], line["rounds"]) for line in rounds] == [(1, 2), (2, 2)]
    assert [line["accuracy"] for line in rounds] == [line["accuracy"] for line in result.metrics]
    assert rounds[0]["epsilon"] == result.metrics[0]["proven"][0]["epsilon"]
    assert rounds[0]["message"].startswith("round 1 of 2 done, accuracy ")
    assert not {"clients", "asked", "bytes_received", "seconds"} & set(rounds[0])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_run_after_the_round(tmp_path, watch, number, capsys):
    before = signal.getsignal(number)

    def one_round(line):
        watch.round(line)
        signal.getsignal(number)(number, None)

    with pytest.raises(Interrupted) as stopped:
        served(tmp_path, settings("fedavg", rounds=3), on_start=watch.start, on_round=one_round)
    assert stopped.value.done == 1
    assert "stopping at the next checkpoint" in capsys.readouterr().err
    watch.end()
    assert signal.getsignal(number) == before
