"""A coordinator names the algorithm; a site imports nothing for that but what its owner allowed."""

import sys

import pytest

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.config import configure, to_toml
from shoal.data import load
from shoal.federation.flower.apps import owner
from shoal.federation.messages import Payload
from shoal.federation.site import INTERNAL_ERROR, Owner, Site
from shoal.federation.site_records import reader
from shoal.federation.terms import TERMS, Terms
from shoal.mechanisms.setting import Setting
from support.plugins import install

CONFIG = {
    "algorithm": "trusted-curator",
    "model": "linear",
    "rounds": 1,
    "data.clients": 2,
    "clients.cohort": 2,
    "engine.threads": 1,
}
SIDE_EFFECT = """
from pathlib import Path
Path(__file__).with_suffix(".imported").touch()
from dataclasses import replace
from shoal.algorithms import algorithm
MINE = replace(algorithm("trusted-curator"), name="mine")
"""
REFUSED = "is not Shoal's, and the owner of this site allows no package that has it: --allow-plugin PACKAGE"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    install(tmp_path, "a-trap", "[shoal.algorithms]\nmine = trap:MINE\n", trap=SIDE_EFFECT, trapped=SIDE_EFFECT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in {"trap", "trapped"} & set(sys.modules):
        del sys.modules[name]


def answer(folder, name, *allowed, model="linear", more="", task=""):
    """What a site says to terms with that algorithm."""
    written = to_toml(configure(CONFIG)).replace('"trusted-curator"', f'"{name}"').replace('"linear"', f'"{model}"')
    written = written.replace("[per_update]", f"[per_update]\n{more}")
    written += f"\n[task]\n{task}\n" if task else ""
    digits, setting = load("digits"), Setting(2, 1, all_answer=False)
    terms = Terms("run", written, setting, digits.classes, digits.input_shape, 650, None)
    site = Site(Owner("site", folder / "site", reader("digits", part=0), plugins=allowed))
    try:
        return site.answer(TERMS, Payload({"terms": terms.text, "round": 0})).values
    finally:
        site.close()


@pytest.mark.parametrize("allowed", [(), ("another_package",), ("",), (".",), ("tra",), ("trap.MINE",), ("*",)])
@pytest.mark.parametrize(
    "name", ["os:system", "trap:MINE", "trap:", "mine", "trap.x:MINE", "this:s", "shoal.cli.main:main"]
)
def test_terms_that_name_code_import_nothing(folder, name, allowed):
    before = set(sys.modules)
    assert REFUSED in answer(folder, name, *allowed)["refused"]
    assert not {"trap", "this"} & (set(sys.modules) - before)
    assert not list(folder.glob("*.imported"))


@pytest.mark.parametrize("name", ["os:system", "trap:MINE", "trap:", "this:s"])
def test_nor_do_terms_that_name_a_mechanism(folder, name):
    said = answer(folder, "trusted-curator", "another_package", more=f'mechanism = "{name}"')["refused"]
    assert f"mechanism '{name}' {REFUSED}" in said
    assert not list(folder.glob("*.imported"))


def test_a_site_needs_no_figures_and_imports_none(folder):
    """Only the coordinator evaluates; a loss is needed, so it is refused like an algorithm."""
    assert "agreed" in answer(folder, "trusted-curator", task='metrics = ["trap:MINE"]')
    assert "internal error" in answer(folder, "trusted-curator", task='loss = "trap:MINE"')["refused"]
    assert not list(folder.glob("*.imported"))


@pytest.mark.parametrize("allowed", ["trap", "a-trap", "a_trap"])
def test_an_owner_allows_a_package_by_its_name(folder, allowed):
    assert "agreed" in answer(folder, "mine", allowed)


def test_an_owner_allows_a_module_but_no_other_whose_name_begins_alike(folder):
    assert "agreed" in answer(folder, "trap:MINE", "trap")
    assert REFUSED in answer(folder, "trapped:MINE", "trap")["refused"]
    assert not (folder / "trapped.imported").exists()


def test_a_refusal_does_not_tell_what_is_installed(folder):
    said = {name: answer(folder, name)["refused"] for name in ("mine", "nine")}
    assert said["mine"].replace("mine", "nine") == said["nine"]
    assert answer(folder, "trap:OTHER", "trap")["refused"] == INTERNAL_ERROR.format(site="the site")


def test_a_model_is_still_the_one_that_the_owner_named(folder):
    said = answer(folder, "trusted-curator", "trap", model="trap:MINE")["refused"]
    assert "the model 'trap:MINE' would be imported at this site; to allow it: --model trap:MINE" in said
    assert not list(folder.glob("*.imported"))


def test_flower_nodes_allow_by_their_configuration(tmp_path):
    given = {"data": "digits", "folder": str(tmp_path)}
    assert owner(given).plugins == ()
    assert owner(given | {"allow-plugin": "one two.three"}).plugins == ("one", "two.three")
