"""Names of other packages: found by entry point or reference, imported only when asked for, and errors that help."""

import json
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import shoal
from shoal.accounting import accountants
from shoal.accounting.events import Gaussian
from shoal.algorithms import algorithm, algorithms
from shoal.cli.main import app
from shoal.config import configure, to_dict, to_toml
from shoal.errors import ConfigError, PluginError, ShoalError
from support.plugins import install

MODULE = """
from dataclasses import replace
import torch
from shoal.accounting.accountants import Figures
from shoal.algorithms import algorithm
from shoal.data import Dataset, from_arrays
from shoal.data.known import Known

MINE = replace(algorithm("geyer-private"), name="my own", summary="as ever")
number = 3

def always_seven(counts, neighbours, orders):
    return Figures(lambda delta: 7.0, lambda epsilon: 0.0, lambda delta: None)

def _read(known, scale, mirror):
    x, y = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1] * 3)
    return Dataset("six", x[:4], y[:4], x[4:], y[4:], ("no", "yes"))

SIX = Known("six", (2,), 4, 2, 2, source="a test", licence="none", read=_read)

def _unnamed(known, scale, mirror):
    return from_arrays(torch.arange(12.0).reshape(6, 2), [0, 1] * 3)

UNNAMED = Known("unnamed", (2,), 5, 1, 2, source="a test", licence="none", read=_unnamed)
"""
POINTS = """
[shoal.algorithms]
mine = a_plugin:MINE
fedavg = a_plugin:MINE
[shoal.accountants]
seven = a_plugin:always_seven
[shoal.datasets]
six = a_plugin:SIX
"""


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A folder on the path, whose modules are forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def plugin(path):
    install(path, "a-plugin", POINTS, a_plugin=MODULE)
    return path


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("name", ["mine", "a_plugin:MINE"])
def test_an_algorithm_of_another_package_is_configured_by_name_or_reference_and_written_so(name):
    config = configure(None, [f"algorithm={name}", "per_update.initial_clip_norm=2.0"])
    assert config.algorithm.name == name
    assert config.algorithm.summary == "as ever"
    assert to_dict(config)["algorithm"] == name
    assert configure(tomllib.loads(to_toml(config))) == config


@pytest.mark.usefixtures("plugin")
def test_names_of_shoal_are_never_taken_by_others():
    assert algorithm("fedavg").summary != "as ever"
    assert "a_plugin" not in sys.modules


@pytest.mark.usefixtures("plugin")
def test_the_list_says_where_an_algorithm_comes_from():
    said = CliRunner().invoke(app, ["algorithms", "--json"]).stdout
    listed = {entry["name"]: entry for entry in json.loads(said)["algorithms"]}
    assert listed["mine"]["from"] == "a-plugin 1.0"
    assert listed["fedavg"]["from"] == "shoal"


@pytest.mark.usefixtures("plugin")
def test_an_accountant_of_another_package_is_asked():
    assert accountants.epsilon(Gaussian(1.0), 1e-5, "seven").epsilon == 7.0
    with pytest.raises(ConfigError, match="there is no accountant 'sevn'; did you mean 'seven'"):
        accountants.epsilon(Gaussian(1.0), 1e-5, "sevn")


@pytest.mark.usefixtures("plugin")
def test_classes_that_another_package_reads_from_labels_are_not_called_public():
    assert shoal.load("a_plugin:UNNAMED").read_classes
    assert not shoal.load("a_plugin:SIX").read_classes


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("name", ["six", "a_plugin:SIX"])
def test_a_data_set_of_another_package_is_loaded_and_listed(name):
    from shoal.data.catalogue import inspect

    assert shoal.load(name).train_x.shape == (4, 2)
    assert shoal.load(name).name == name
    assert inspect("six").train_rows == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("minne", "there is no algorithm 'minne'; did you mean 'mine'"),
        ("a_plugin:MINNE", "'a_plugin:MINNE': a_plugin has no 'MINNE'; did you mean 'MINE'"),
        ("a_pluggin:MINE", "'a_pluggin:MINE': no module 'a_pluggin'.*did you mean 'a_plugin'"),
        ("a_plugin.py:MINE", "'a_plugin.py:MINE': name the module without .py: 'a_plugin'"),
        ("a_plugin.inner:MINE", "no module 'a_plugin.inner'"),
        ("a_plugin.MINE", "there is no algorithm 'a_plugin.MINE'; for one of your own write 'a_plugin:MINE'"),
        ("a_plugin:number", "'a_plugin:number' is a int, not of type Algorithm"),
        ("a_plugin:", "'a_plugin:' is not of the form package.module:NAME"),
        ("a plugin:MINE", "'a plugin:MINE' is not of the form package.module:NAME"),
        ("needy:MINE", "needy needs the module 'nobody_has_this', which is not installed"),
        ("broken:MINE", "importing broken failed: ZeroDivisionError"),
        ("python:mine", "was passed in Python: pass it again"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_fix(plugin, name, words):
    (plugin / "needy.py").write_text("import nobody_has_this")
    (plugin / "broken.py").write_text("1 / 0")
    with pytest.raises(ShoalError, match=words) as caught:
        configure(None, [f"algorithm={name}"])
    assert "\n" not in str(caught.value)


def test_a_name_that_two_packages_claim_is_refused_but_both_can_be_had(plugin):
    install(plugin, "b-plugin", "[shoal.algorithms]\nmine = b_plugin:MINE\n", b_plugin=MODULE)
    with pytest.raises(PluginError, match=r"claimed by .*a_plugin:MINE.* and .*write package.module:NAME instead"):
        algorithm("mine")
    assert algorithm("b_plugin:MINE").summary == "as ever"


def test_one_broken_package_does_not_hide_the_others(path):
    install(path, "bad", "[shoal.algorithms]\nworst = bad:MINE\n", bad="1 / 0")
    with pytest.warns(UserWarning, match="left out: algorithm 'bad:MINE': importing bad failed"):
        found = algorithms()
    assert "fedavg" in found
    assert "worst" not in found


@pytest.mark.slow
@pytest.mark.usefixtures("plugin")
def test_a_run_of_it_can_be_resumed_and_its_folder_has_a_plain_name():
    result = shoal.run(algorithm="a_plugin:MINE", rounds=1, model="linear", data={"clients": 50})
    assert result.algorithm == "a_plugin:MINE"
    assert ":" not in result.run.name
    assert shoal.run(resume=result.run).rounds == 1


@pytest.mark.slow
def test_a_record_given_in_python_runs_and_resume_says_what_it_needs(path):
    record = replace(algorithm("fedavg"), name="mine")
    result = shoal.run(algorithm=record, rounds=1, model="linear", data={"clients": 20})
    with pytest.raises(ConfigError, match=r"'python:mine' was passed in Python: pass it again, as in shoal.run"):
        shoal.run(resume=result.run)
    assert shoal.run(resume=result.run, algorithm=record).rounds == 1
    with pytest.raises(ConfigError, match="was run with algorithm 'python:mine', it cannot be resumed with 'fedavg'"):
        shoal.run(resume=result.run, algorithm=algorithm("fedavg"))


@pytest.mark.usefixtures("plugin")
def test_a_record_that_a_module_holds_is_written_by_its_reference():
    from a_plugin import MINE

    assert configure({"algorithm": MINE}).algorithm.name == "a_plugin:MINE"
    assert configure({"algorithm": algorithm("fedavg")}).algorithm.name == "fedavg"


@pytest.mark.slow
def test_public_names_are_the_same_at_every_access():
    """In a process of its own: what has been imported before must not matter."""
    code = """
import shoal
first = {name: getattr(shoal, name) for name in [*shoal.__all__, "algorithms"]}
assert shoal.list_algorithms()["fedavg"].name == "fedavg"
assert shoal.algorithms.algorithm("fedavg").name == "fedavg"
assert all(getattr(shoal, name) is value for name, value in first.items())
"""
    subprocess.run([sys.executable, "-c", code], check=True)
