"""Dependencies go one way, and starting costs little."""

import ast
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import shoal

SOURCE = Path(shoal.__file__).parent
LAYERS = {
    "bibliography": 0,
    "errors": 0,
    "html_text": 0,
    "files": 0.1,
    "checked": 0.1,
    "cache": 0,
    "toml_text": 0,
    "extras": 0.5,
    "kernels": 0.5,
    "registry": 0.4,
    "tasks": 0.5,
    "renamed": 0.1,
    "precision": 0,
    "standardised_convolution": 0,
    "inputs": 0.2,
    "calling": 0.3,
    "copying": 0,
    "accounting": 0.5,
    "random": 1,
    "mechanisms": 1.5,
    "algorithms": 2,
    "gradients": 3,
    "models": 3,
    "data": 3,
    "training": 4,
    "config_sections": 4,
    "config": 5,
    "prepare": 5.1,
    "suggest": 5.1,
    "write_table": 5.1,
    "saved_model": 5.15,
    "model_export": 5.2,
    "experiment_file": 5.15,
    "report": 5.15,
    "result": 5.16,
    "execution": 5.2,
    "api": 5.25,
    "estimator": 5.3,
    "attacks": 6,
    "audit": 6,
    "federation": 6,
    "papers": 6.5,
    "sweep": 7,
    "cli": 8,
}


@cache
def imported(path):
    """The statements of a file that import something, in functions too."""
    inside = [ast.parse(path.read_text(encoding="utf-8"))]
    found = []
    for node in inside:  # which grows: statements only, as expressions import nothing
        inside += [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr | ast.alias)]
        found += [node] if isinstance(node, ast.Import | ast.ImportFrom) else []
    return found


def imports(path):
    for node in imported(path):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif node.module:
            yield node.module


def files():
    return [path for path in sorted(SOURCE.rglob("*.py")) if path.name not in ("__main__.py",)]


def test_imports_go_one_way():
    for path in files():
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for module in imports(path) if own != "__init__" else ():
            other = module.split(".")[1] if module.startswith("shoal.") else own
            assert other == own or LAYERS[other] < LAYERS[own], f"{path} must not import {module}"


def test_no_modules_import_each_other_in_a_circle():
    """Not inside functions either; types that only a checker reads count too."""
    names = {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path for path in files()}
    graph = {
        name: {
            module if module in names else module.rpartition(".")[0]
            for node in imported(path)
            if isinstance(node, ast.ImportFrom) and node.module and not node.level
            for module in (f"{node.module}.{each.name}" for each in node.names)
        }
        & names.keys()
        for name, path in names.items()
    }
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the modules


def test_no_two_modules_have_the_same_name():
    counts = Counter(path.name for path in files() if path.name != "__init__.py")
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.slow
def test_flower_and_scipy_are_loaded_only_where_they_are_needed():
    """Simulating needs no flwr; nor do the command line and what a federation's two halves are made of. And a site
    that starts needs no library of numerics besides torch, also where it holds the default data set."""
    modules = "shoal.cli.main, shoal.api, shoal.prepare, " + ", ".join(
        f"shoal.federation.{name}" for name in ("coordinator", "site", "key_files")
    )
    late = ("flwr", "fastapi", "httpx", "scipy", "sklearn", "dp_accounting", "matplotlib", "pandas")
    code = f"import {modules}, sys; shoal.load('digits'); print([m for m in {late} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
def test_importing_shoal_or_its_command_line_loads_no_heavy_library():
    heavy = ("torch", "scipy", "sklearn", "dp_accounting")
    code = f"import shoal, shoal.cli.main, sys; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(("own", "wanted"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_that_wait_are_told_to_sleep_before_torch_is_loaded(own, wanted):
    told = (
        "import os, sys; from shoal.cli import main\n"
        "main.app = lambda **_: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)\n"
        "main.main()"
    )
    others = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    printed = subprocess.run(
        [sys.executable, "-c", told], env=others | own, capture_output=True, text=True, check=True
    )
    assert printed.stdout.split() == [wanted, "False"]
