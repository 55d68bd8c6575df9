"""What the README shows, works as it stands there."""

import re

import pytest

from support.paths import ROOT

README = ROOT / "README.md"


def python_lines():
    text = README.read_text(encoding="utf-8")
    return re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)


@pytest.mark.slow
def test_the_ten_lines_for_own_data_and_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = python_lines()
    assert len([line for line in lines.splitlines() if line.strip()]) <= 10
    exec(compile(lines, "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert float(re.search(r"accuracy (\S+),", said).group(1)) > 0.8
    epsilon = float(re.search(r"'epsilon': (\S+),", said).group(1))
    assert 7.9 < epsilon <= 8


def test_every_method_stands_in_the_table():
    from shoal.algorithms import algorithms

    text = README.read_text(encoding="utf-8")
    assert [name for name in algorithms() if f"`{name}`" not in text] == []


@pytest.mark.slow
def test_the_table_claims_no_more_than_is_proven():
    from shoal.algorithms import algorithms
    from shoal.algorithms.charges import proves

    rows = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    for row in rows:
        names, _, says, *_ = (part.strip() for part in row.strip("|").split("|"))
        for name in re.findall(r"`([a-z-]+)`", names):
            assert says.startswith("nothing") == proves(algorithms()[name]).startswith("nothing"), row


@pytest.mark.parametrize("link", re.findall(r"\]\((docs/[^)]+)\)", README.read_text(encoding="utf-8")))
def test_links_lead_somewhere(link):
    assert (README.parent / link).is_file()
