"""`shoal run` on several ranks: what it prints, how a rank that dies ends it, and what is refused."""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch

from shoal.accounting.privacy_ledger import verify
from shoal.cli import main as main_module
from shoal.cli import run as run_module
from shoal.cli.main import main
from shoal.training import ranks
from support.deploy_children import start

SMALL = ["-c", "algorithm=fedavg", "-c", "model=linear", "-c", "data.clients=20", "-c", "clients.cohort=5"]
SMALL += ["-c", "engine.threads=1", "-c", "baseline=false", "--device", "cpu"]
PATIENCE = 600  # seconds, for what hangs: a busy machine takes its time


def called(monkeypatch, capsys, *arguments):
    """In this process: exit code, standard error."""
    monkeypatch.setattr(sys, "argv", ["shoal", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err


def started(folder, name, *arguments):
    """Forked, and so are its other ranks."""
    return start(folder, f"{name}.out", ["run", *arguments], errors=f"{name}.err")


def ended(process):
    """Exit code, standard output, standard error."""
    return process.ended(time.monotonic() + PATIENCE), process.said, process.complained


def wait_for(process, fact):
    until = time.monotonic() + PATIENCE
    while not fact():
        assert process.process.is_alive(), process.complained
        assert time.monotonic() < until
        time.sleep(0.05)


def other_rank(pid):
    """The process id of rank 1."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        (child,) = file.read().split()
    return int(child)


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_in_one_line_and_another_number_of_ranks_goes_on(tmp_path):
    process = started(tmp_path, "two", *SMALL, "-c", "rounds=100000", "--processes", "2")
    wait_for(process, lambda: any(path.stat().st_size for path in tmp_path.glob("runs/*/metrics.jsonl")))
    os.kill(other_rank(process.process.pid), signal.SIGKILL)
    code, shown, said = ended(process)
    assert "over 2 ranks" in shown
    (run,) = tmp_path.glob("runs/*")
    assert said == (
        "shoal: rank 1 of 2 has gone: its process was killed, or its machine or network failed; resume with: "
        f"shoal run --resume runs/{run.name}\n"
    )
    assert code == 1
    assert verify(run / "ledger.jsonl").whole
    done = len((run / "metrics.jsonl").read_text().splitlines())

    alone = started(tmp_path, "alone", "--resume", f"runs/{run.name}")
    wait_for(alone, lambda: len((run / "metrics.jsonl").read_text().splitlines()) >= done + 2)
    alone.signal(signal.SIGINT)
    assert "stopped after round" in ended(alone)[2]


@pytest.mark.slow
def test_ranks_print_one_result_and_what_is_wrong_in_one_line(tmp_path):
    _, shown, _ = ended(started(tmp_path, "right", *SMALL, "-c", "rounds=2", "--processes", "2", "--json"))
    assert json.loads(shown)["rounds"] == 2
    assert len(list(tmp_path.glob("runs/*"))) == 1
    code, shown, said = ended(started(tmp_path, "wrong", *SMALL, "-c", "rounds=none", "--processes", "2"))
    assert (shown, code) == ("", 2)
    assert re.fullmatch("shoal: .*rounds.*\n", said)


def test_the_other_ranks_get_the_same_command():
    words = run_module._words(run_module.Path("a.toml"), ["rounds=3", "seed=-1"], None, "cpu", True)
    assert words == ["run", "-crounds=3", "-cseed=-1", "--device=cpu", "--no-guarantee", "--", "a.toml"]
    assert run_module._words(None, None, run_module.Path("-x"), None, False) == ["run", "--resume=-x"]


def test_processes_of_their_own_are_refused_under_torchrun(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, said = called(monkeypatch, capsys, "run", "--processes", "2")
    assert (code, said) == (2, "shoal: --processes 2: torchrun has started 4 already; leave it out\n")


@pytest.mark.parametrize(("rank", "code"), [("0", 2), ("1", 0)])
def test_commands_that_are_not_spread_are_refused_once_with_what_to_do(rank, code, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    found, said = called(monkeypatch, capsys, "sweep", "a.toml", "--grid", "seed=0,1")
    lines = [
        "shoal: only `shoal run` is spread over ranks: start `shoal sweep` without torchrun; "
        "--jobs N runs N cells at a time\n",
        "",
    ]
    assert (found, said) == (code, lines[int(rank)])


@pytest.mark.parametrize(("gpus", "said"), [(1, ""), (8, "on one of 8 GPUs; to use all: shoal run --processes 8")])
def test_with_several_gpus_it_says_that_it_uses_one_and_how_to_use_all(gpus, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert run_module._about_ranks(torch.device("cuda")) == said
    assert run_module._about_ranks(torch.device("cpu")) == ""


def test_a_warning_is_shown_by_rank_0_only(monkeypatch, capsys):
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        main_module._show_warning("once")
    assert capsys.readouterr().err == "shoal: warning: once\n"


def test_a_rank_that_gives_up_ends_without_the_thread_that_waits_inside_torch(monkeypatch, capsys):
    """A thread that woke while Python ends would abort the process (exit code 134)."""
    left = []
    monkeypatch.setattr(ranks, "MEETING", timedelta(seconds=1))
    monkeypatch.setattr(os, "_exit", left.append)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # never answers
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        for name, value in ({"RANK": "1", "WORLD_SIZE": "2"} | where).items():
            monkeypatch.setenv(name, value)
        code, said = called(monkeypatch, capsys, "run", *SMALL)
    assert left == [code] == [1]
    assert "has not met rank 0" in said
    for thread in threading.enumerate():
        if thread.name == "ranks meet":
            thread.join()
