"""What Shoal does with its required dependencies alone, and which extra it names where it needs one."""

import subprocess
import sys
import tomllib
from hashlib import sha256

import pytest
import torch
from safetensors.torch import save

from shoal.extras import EXTRAS
from shoal.models.bundle import Bundle
from support.paths import ROOT

BLOCKED = (*EXTRAS, "flwr", "tensorboard", "opacus", "prv_accountant")
WITHOUT = f"""
import sys

def hiding(finder):
    class Hiding:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return None if name.partition(".")[0] in {BLOCKED} else finder.find_spec(name, path, target)
    return Hiding

sys.meta_path[:] = map(hiding, sys.meta_path)
"""
SHOAL = f"{WITHOUT}from shoal.cli.main import main\nmain()"


def shoal(folder, *arguments):
    """The command line in a process that has no extras."""
    return subprocess.run([sys.executable, "-c", SHOAL, *arguments], cwd=folder, capture_output=True, text=True)


def test_the_default_experiment_runs_without_any_extra(tmp_path):
    done = shoal(tmp_path, "run", "-c", "rounds=2")
    assert (done.returncode, done.stderr) == (0, "")
    (page,) = tmp_path.glob("runs/*/report.html")
    assert "<svg" in page.read_text(encoding="utf-8")


def saved_model(folder):
    """A model as a run saves it."""
    folder.mkdir()
    content = save({"1.weight": torch.zeros(2, 3), "1.bias": torch.zeros(2)})
    (folder / "model.safetensors").write_bytes(content)
    task = {"kind": "classification", "classes": ["a", "b"]}
    about = Bundle(release="", model="linear", input_shape=(3,), task=task, weights=sha256(content).hexdigest())
    (folder / "model.json").write_text(about.to_json(), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["run", "-c", "data.name=mine.csv", "-c", "algorithm=fedavg"], "tables"),
        (["init", "mine.csv"], "tables"),
        (["run", "-c", "data.features=scattering"], "scattering"),
        (["attack", "--iterations", "1"], "plots"),
        (["audit", "--algorithm", "dp-sgd", "--quick"], "plots"),
        (["run", "-c", "log=tensorboard"], "tensorboard"),
        (["serve"], "deploy"),
        (["export", "model"], "export"),
    ],
)
def test_what_needs_an_extra_names_it_in_one_line(tmp_path, arguments, extra):
    (tmp_path / "mine.csv").write_text("a,label\n1,0\n2,1\n", encoding="utf-8")
    saved_model(tmp_path / "model")
    done = shoal(tmp_path, *arguments)
    assert done.returncode == 2
    assert f"pip install 'shoal[{extra}]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_making_lfw_names_its_extra(tmp_path):
    code = f"{WITHOUT}from shoal.data.lfw import make\nmake('lfw62.npz')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.endswith("needs PIL: pip install 'shoal[lfw]'\n")


def test_every_extra_that_is_named_is_there_and_all_has_each():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (everything,) = extras["all"]
    listed = everything.removeprefix("shoal[").removesuffix("]").split(",")
    assert set(EXTRAS.values()) <= set(listed)
    assert set(listed) == set(extras) - {"all", "dev"}
