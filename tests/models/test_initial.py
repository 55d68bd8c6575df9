"""A run may begin from saved weights."""

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shoal
from shoal.accounting.claims import INITIAL
from shoal.errors import ConfigError, ModelError
from shoal.models import build
from shoal.models.initial import load_initial


@pytest.fixture
def model():
    return build("digits-mlp", (64,), 10, seed=1)


def test_all_weights_are_taken(model, tmp_path):
    other = build("digits-mlp", (64,), 10, seed=2)
    save_file(other.state_dict(), tmp_path / "model.safetensors")
    assert load_initial(model, tmp_path / "model.safetensors") == []
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), other.parameters(), strict=True))


def test_a_run_may_be_named_instead_of_its_file(model, tmp_path):
    save_file({"3.bias": torch.ones(10)}, tmp_path / "model.safetensors")
    load_initial(model, tmp_path)
    assert torch.equal(model[3].bias, torch.ones(10))


def test_a_last_layer_of_another_size_stays_as_it_was(model, tmp_path):
    other, before = build("digits-mlp", (64,), 5, seed=2), model[3].weight.clone()
    save_file(other.state_dict(), tmp_path / "model.safetensors")
    assert load_initial(model, tmp_path) == ["3.weight", "3.bias"]
    assert torch.equal(model[1].weight, other[1].weight)
    assert torch.equal(model[3].weight, before)


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"a": torch.ones(1)}, "has no weight that fits the model; it holds a"),
        ({"1.weight": torch.full((64, 64), torch.nan)}, "'1.weight' holds NaN or Inf"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(model, tmp_path, saved, said):
    save_file(saved, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=said):
        load_initial(model, tmp_path)


def test_a_file_that_cannot_be_read_is_named(model, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    for path in (tmp_path, tmp_path / "other.safetensors"):
        with pytest.raises(ModelError, match=r"cannot be read.*a run's folder"):
            load_initial(model, path)


def test_a_frozen_layer_is_taken_as_well(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    save_file({"0.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    load_initial(model, tmp_path)
    assert torch.equal(model[0].bias, torch.ones(2))


@pytest.mark.slow
def test_a_run_begins_from_them(model, tmp_path):
    save_file(model.state_dict(), tmp_path / "public.safetensors")
    run = {"model": "digits-mlp", "init": str(tmp_path / "public.safetensors"), "rounds": 1, "local.lr": 0.0}
    result = shoal.run(run | {"data.clients": 2, "clients.sampling": "all"}, runs=tmp_path)
    assert all(torch.equal(held, result.model[name]) for name, held in model.state_dict().items())
    assert "public.safetensors" in (result.run / "config.toml").read_text()


@pytest.mark.slow
def test_a_private_run_says_that_it_began_with_them_and_refuses_those_of_a_run_on_the_same_data(tmp_path):
    """Else a second run could continue a first: charged for its own rounds alone, and with the same noise."""
    keys = {"model": "linear", "rounds": 1, "data.clients": 4, "clients.sampling": "all"}
    private = keys | {"algorithm": "trusted-curator"}
    first = shoal.run(private, runs=tmp_path)
    assert all(INITIAL not in (claim["because"] or "") for claim in first.proven)
    for init in (first.run, first.run / "model.safetensors"):
        with pytest.raises(ConfigError, match="learnt from the same data"):
            shoal.run(private, init=str(init), runs=tmp_path)
    (tmp_path / "linked.safetensors").symlink_to(first.run / "model.safetensors")
    for split, init in product(({"seed": 1}, {"data.clients": 5}), (first.run, tmp_path / "linked.safetensors")):
        with pytest.raises(ConfigError, match="learnt from the same data"):
            shoal.run(private | split, init=str(init), runs=tmp_path)
    half = shoal.load("digits")
    half = replace(half, train_x=half.train_x[700:], train_y=half.train_y[700:])
    assert shoal.run(private, data=half, init=str(first.run), runs=tmp_path).rounds == 1, "only the caller knows"
    shutil.copy(first.run / "model.safetensors", tmp_path / "public.safetensors")
    second = shoal.run(private, init=str(tmp_path / "public.safetensors"), runs=tmp_path)
    assert [INITIAL in claim["because"] for claim in second.proven if claim["epsilon"] is not None] == [True, True]
    assert shoal.run(keys | {"algorithm": "fedavg"}, init=str(first.run), runs=tmp_path).rounds == 1


@pytest.mark.slow
def test_the_same_data_are_known_by_their_rows_and_through_runs_in_between(tmp_path, monkeypatch):
    keys = {"model": "linear", "rounds": 1, "data.clients": 4, "clients.sampling": "all", "data.partition": "iid"}
    for folder, shift in (("here", 0), ("there", 1)):
        (tmp_path / folder).mkdir()
        rows = "".join(f"{(k + shift) % 7},{k % 5},{k % 2}\n" for k in range(50))
        (tmp_path / folder / "table.csv").write_text(f"a,b,label\n{rows}")
    monkeypatch.chdir(tmp_path / "here")
    first = shoal.run(keys | {"algorithm": "trusted-curator"}, data="table.csv", runs=tmp_path).run
    monkeypatch.chdir(tmp_path / "there")
    between = shoal.run(keys | {"algorithm": "fedavg"}, data="table.csv", init=str(first), runs=tmp_path).run
    shutil.copy(tmp_path / "here" / "table.csv", "copied.csv")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "model.safetensors").symlink_to(first / "model.safetensors")
    private, same = keys | {"algorithm": "trusted-curator", "seed": 1}, str(tmp_path / "here" / "table.csv")
    for data in (same, "copied.csv", shoal.load(same)):
        for init in (first, tmp_path / "linked", between):
            with pytest.raises(ConfigError, match="learnt from the same data"):
                shoal.run(private, data=data, init=str(init), runs=tmp_path)


@pytest.mark.slow
def test_names_of_data_and_weights_are_those_of_the_folder_in_which_a_run_was_started(tmp_path, monkeypatch):
    """Other data may have the same name there, and the same ones, in another split, another name here."""
    keys = {"model": "linear", "rounds": 1, "data.clients": 4, "clients.sampling": "all", "data.partition": "iid"}
    private, tables = keys | {"algorithm": "trusted-curator"}, {}
    for number, folder in enumerate(("here", "there")):
        tables[folder] = str(tmp_path / folder / "table.csv")
        (tmp_path / folder).mkdir()
        rows = "".join(f"{(k + number) % 7},{k % 5},{k % 2}\n" for k in range(50))
        (tmp_path / folder / "table.csv").write_text(f"a,b,label\n{rows}")
    monkeypatch.chdir(tmp_path / "here")
    first = shoal.run(private, data="table.csv", runs="runs").run
    between = shoal.run(keys, algorithm="fedavg", data=tables["there"], init=str(first), runs="runs").run
    first, between = first.absolute(), between.absolute()
    monkeypatch.chdir(tmp_path / "there")
    assert shoal.run(private, data="table.csv", init=str(first), runs=tmp_path).rounds == 1
    for init in (first, between):
        with pytest.raises(ConfigError, match="learnt from the same data"):
            shoal.run(private | {"data.test_fraction": 0.5}, data=tables["here"], init=str(init), runs=tmp_path)


@pytest.mark.slow
def test_data_and_weights_that_were_moved_are_known_in_the_new_folder(tmp_path, monkeypatch):
    keys = {"model": "linear", "rounds": 1, "data.clients": 4, "clients.sampling": "all", "data.partition": "iid"}
    private, here, there = keys | {"algorithm": "trusted-curator"}, tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    for number, name in enumerate(("table.csv", "other.csv")):
        rows = "".join(f"{(k + number) % 7},{k % 5},{k % 2}\n" for k in range(50))
        (here / name).write_text(f"a,b,label\n{rows}")
    monkeypatch.chdir(here)
    first = shoal.run(private, data="table.csv", runs="runs").run
    between = shoal.run(keys, algorithm="fedavg", data="other.csv", init=str(first), runs="runs").run
    for name in ("runs", "table.csv", "other.csv"):
        shutil.move(name, there / name)
    monkeypatch.chdir(there)
    for init in (first, between):
        for changed in ({}, {"data.test_fraction": 0.5}):
            with pytest.raises(ConfigError, match="learnt from the same data"):
                shoal.run(private | changed, data="table.csv", init=str(init), runs="runs")
    digits = shoal.run(private, data="digits", runs="runs").run
    Path("digits").mkdir()
    with pytest.raises(ConfigError, match="learnt from the same data"):
        shoal.run(private | {"data.scale": "standard"}, data="digits", init=str(digits), runs="runs")


@pytest.mark.slow
def test_a_run_with_a_model_that_was_passed_says_that_its_weights_were_not_learnt_from_the_data(model, tmp_path):
    keys = {"algorithm": "trusted-curator", "rounds": 1, "data.clients": 4, "clients.sampling": "all"}
    result = shoal.run(keys, model=model, runs=tmp_path)
    assert [INITIAL in claim["because"] for claim in result.proven if claim["epsilon"] is not None] == [True, True]
