"""What people expect of any command: exit codes that are listed, NO_COLOR, completion in the shell."""

import os
import re
import signal
import subprocess
import sys

import pytest

from shoal.cli.exit_codes import CELL_FAILED, EXIT_CODES, NO_READER
from shoal.cli.main import main
from shoal.cli.run import Watch
from shoal.random import platform_checks
from support.tiny import FEDAVG, play

RUN = ["run", "-c", "algorithm=fedavg", "-c", "model=linear", "-c", "clients.cohort=2", "-c", "data.clients=20"]
COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:[349][0-9]|10[0-7])[;m]")


def code_of(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["shoal", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


def unsound(monkeypatch, _folder):
    monkeypatch.setattr(platform_checks, "_FACTS", ((lambda: False, "it is broken", "repair it"),))
    return ["doctor"]


def edited(_monkeypatch, folder):
    ledger = play(folder, FEDAVG).run / "ledger.jsonl"
    ledger.write_text(ledger.read_text(encoding="utf-8").replace("fedavg", "fedavh"), encoding="utf-8")
    return ["ledger", "verify", ledger.parent]


def interrupted(monkeypatch, folder):
    monkeypatch.setattr(Watch, "round", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    return [*RUN, "-c", "rounds=3", "--runs", folder]


WAYS = {
    0: lambda *_: ["--version"],
    1: unsound,
    2: lambda *_: ["run", "nowhere.toml"],
    3: edited,
    130: interrupted,
}


@pytest.mark.parametrize("code", WAYS)
def test_each_exit_code_occurs(code, monkeypatch, tmp_path):
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    assert code_of(monkeypatch, *WAYS[code](monkeypatch, tmp_path)) == code


@pytest.mark.slow
def test_output_that_nobody_reads_is_exit_code_141():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "shoal", "--help"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (NO_READER, b"")


def test_the_help_lists_each_exit_code_and_every_one_has_a_test(monkeypatch, capsys):
    elsewhere = {CELL_FAILED}  # tests/cli/test_sweep.py
    assert set(EXIT_CODES) == {*WAYS, *elsewhere, NO_READER}
    code_of(monkeypatch, "--help")
    said = capsys.readouterr().out
    for code, meaning in EXIT_CODES.items():
        assert f"{code}: {meaning[:30]}" in said


@pytest.mark.parametrize("wanted", [True, False])
def test_no_color_turns_colours_off(monkeypatch, capsys, wanted):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    if wanted:
        monkeypatch.delenv("NO_COLOR")
    code_of(monkeypatch, "algorithms", "geyer-private")
    assert (COLOUR.search(capsys.readouterr().out) is not None) == wanted


def test_the_shell_completes_commands(monkeypatch, capsys):
    monkeypatch.setenv("_SHOAL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "shoal do")
    monkeypatch.setenv("COMP_CWORD", "1")
    code_of(monkeypatch)
    assert capsys.readouterr().out.split() == ["doctor"]
