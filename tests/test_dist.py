"""What is released: a wheel that runs the default experiment by itself, and files that say the same of it."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

import shoal
from support.paths import ROOT

SITE_PACKAGES = Path(torch.__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("build", reason="the package build is not installed: pip install build")
    folder = tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    made = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", folder], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return next(folder.glob("dist/*.whl"))


@pytest.mark.slow
def test_the_wheel_runs_the_default_experiment_in_an_empty_environment(wheel, tmp_path):
    """Empty of Shoal: its dependencies are those of this environment, but for whatever shoal is there."""
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    (site / "borrowed.pth").write_text(f"{SITE_PACKAGES}\n", encoding="utf-8")
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [tmp_path / "venv" / "bin" / "python", "-m", "shoal"]
    where = subprocess.run(
        [command[0], "-c", "import shoal; print(shoal.__file__)"],
        env=plain,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(tmp_path)
    done = subprocess.run(
        [*command, "run", "-c", "baseline=false", "--json"], cwd=tmp_path, env=plain, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["accuracy"] > 0.9
    bound = next(claim for claim in result["proven"] if (claim["unit"], claim["observer"]) == ("client", "release"))
    assert bound["epsilon"] <= 4.0
    assert (Path(tmp_path) / result["run"] / "report.html").is_file()


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_complete_metadata(wheel):
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        metadata = packed.read(f"shoal-{shoal.__version__}.dist-info/METADATA").decode()
    source = ROOT / "src"
    needed = {path for path in (source / "shoal").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path.relative_to(source).as_posix() for path in needed} <= names
    for field in (
        "Author",
        "Keywords",
        "Classifier",
        "License-Expression",
        "Requires-Python",
        "Description-Content-Type",
    ):
        assert f"\n{field}: " in metadata


def test_one_version_everywhere():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert f"\n## {shoal.__version__}" in changes
    assert str(cited["version"]) == shoal.__version__


def test_workflows_run_targets_of_the_makefile_on_every_version_that_is_promised():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    used = {command.split()[1] for command in commands if command.startswith("make ")}
    assert {"lint", "test", "test-browser", "dist"} <= used
    for target in used - {"docs"}:
        assert f"\n{target}:" in text, target
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: 3."
    promised = {each.removeprefix(prefix[:-2]) for each in project["classifiers"] if each.startswith(prefix)}
    assert set(jobs["test"]["strategy"]["matrix"]["python"]) == promised


@pytest.mark.parametrize("form", ["bug", "claim", "wish"])
def test_issue_forms_have_what_github_needs(form):
    held = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{form}.yml").read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= held.keys()
    ids = [part["id"] for part in held["body"] if part["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0


def test_paths_that_contributing_names_exist():
    words = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("`", " ").replace(",", " ").split()
    paths = [word.strip(".:;)") for word in words if word.startswith(("src/", "tests/", "examples/"))]
    assert len(paths) > 8
    for path in paths:
        assert (ROOT / path).exists() or "your_" in path, path
