"""What Shoal does with its required dependencies alone, and which extra it names where it needs one."""

import json
import subprocess
import sys
import tomllib
from hashlib import sha256

import pytest
import torch
from safetensors.torch import save

from shoal.data.lfw import make
from shoal.errors import ShoalError
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
SHOAL = f"""{WITHOUT}
import json, os
import dp_accounting.pld, shoal.prepare  # what each would import again
from shoal.cli.main import main

for number, words in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        for stream in (1, 2):
            os.dup2(os.open(f"{{number}}.{{stream}}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv = ["shoal", *words]
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        sys.stdout.flush(), sys.stderr.flush(), os._exit(code)  # what a fork tears down it must copy first
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
NEEDS = [
    (["run", "-c", "data.name=mine.csv", "-c", "algorithm=fedavg"], "tables"),
    (["init", "mine.csv"], "tables"),
    (["run", "-c", "data.features=scattering"], "scattering"),
    (["attack", "--iterations", "1"], "plots"),
    (["audit", "--algorithm", "dp-sgd", "--quick"], "plots"),
    (["run", "-c", "log=tensorboard"], "tensorboard"),
    (["serve"], "deploy"),
    (["export", "model"], "export"),
]


def saved_model(folder):
    """A model as a run saves it."""
    folder.mkdir()
    content = save({"1.weight": torch.zeros(2, 3), "1.bias": torch.zeros(2)})
    (folder / "model.safetensors").write_bytes(content)
    task = {"kind": "classification", "classes": ["a", "b"]}
    about = Bundle(release="", model="linear", input_shape=(3,), task=task, weights=sha256(content).hexdigest())
    (folder / "model.json").write_text(about.to_json(), encoding="utf-8")


@pytest.mark.slow
def test_the_default_experiment_runs_without_any_extra_and_what_needs_one_names_it_in_one_line(tmp_path):
    """Each command in a fork of one process that has no extras."""
    (tmp_path / "mine.csv").write_text("a,label\n1,0\n2,1\n", encoding="utf-8")
    saved_model(tmp_path / "model")
    commands = [["run", "-c", "rounds=2"], *(words for words, _ in NEEDS)]
    process = [sys.executable, "-c", SHOAL, json.dumps(commands)]
    done = subprocess.run(process, cwd=tmp_path, capture_output=True, text=True, check=True)
    codes = list(map(int, done.stdout.split()))
    said = [(tmp_path / f"{number}.2").read_text(encoding="utf-8") for number in range(len(commands))]
    assert (codes[0], said[0]) == (0, "")
    (page,) = tmp_path.glob("runs/*/report.html")
    assert "<svg" in page.read_text(encoding="utf-8")
    for (words, extra), code, line in zip(NEEDS, codes[1:], said[1:], strict=True):
        assert code == 2, words
        assert f"pip install 'shoal[{extra}]'" in line, words
        assert line.count("\n") == 1, words


def test_making_lfw_names_its_extra(monkeypatch):
    for name in ("PIL", "PIL.Image"):  # also where another test has imported it
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ShoalError, match=r"needs PIL: pip install 'shoal\[lfw\]'"):
        make("lfw62.npz")


def test_every_extra_that_is_named_is_there_and_all_has_each():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (everything,) = extras["all"]
    listed = everything.removeprefix("shoal[").removesuffix("]").split(",")
    assert set(EXTRAS.values()) <= set(listed)
    assert set(listed) == set(extras) - {"all", "dev", "docs"}
