"""The figures on docs/results/pfl-benchmark.md are what its commands give."""

import re
import shlex

import pytest
from typer.testing import CliRunner

from shoal.cli import account
from support.paths import ROOT

PAGE = (ROOT / "docs" / "results" / "pfl-benchmark.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    shoal account (.+?) +# ([\d.]+)$", PAGE, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "figure"), COMMANDS)
def test_a_reader_who_repeats_a_command_finds_its_figure(command, figure):
    words = shlex.split(command)
    shown = CliRunner().invoke(account.app, words, catch_exceptions=False).stdout
    found = float(re.search(rf"^ *{words[0]} +(\S+)", shown, re.MULTILINE)[1])
    assert found == pytest.approx(float(figure), rel=1e-3)


def test_the_page_has_all_commands_and_the_scaled_noise():
    assert len(COMMANDS) == 5
    assert float(re.search(r"\| (0\.0239386): ", PAGE)[1]) == pytest.approx(0.478771 * 50 / 1000, rel=1e-5)
    assert round(6.18179 / 0.0239386) == 258
