"""Personal layers in a federation: they are in no message and no file of the coordinator, and stay at their site."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.accounting.privacy_ledger import Ledger
from shoal.config import configure
from shoal.errors import ConfigError
from shoal.federation.messages import Payload
from shoal.federation.site import STATE, Owner, Site
from shoal.federation.site_records import reader
from shoal.federation.terms import ROUND, TERMS, Terms
from shoal.prepare import prepare
from support.federations import asked, farthest, served, settings, simulated

SHARED, PERSONAL = 64 * 64 + 64, 64 * 10 + 10  # of digits-mlp, whose last layer is personal
PRIVATE = {"clients.sampling": "poisson", "model": "digits-mlp", "local.personal": 1, "rounds": 3}
METHODS = {
    "fedper": settings("fedper", rounds=3),
    "client level": settings("trusted-curator") | PRIVATE,
    "record level": settings("dp-sgd") | PRIVATE | {"clients.sampling": "all", "records.sampling": "shuffled"},
    "both kept": settings("fedper", rounds=3) | {"local.optimizer": "adamw", "local.keep_momentum": True},
}


@pytest.fixture(scope="module", params=METHODS)
def federation(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    given = METHODS[request.param]
    result, grid = served(folder, given)
    return folder, given, result, grid


@pytest.mark.slow
def test_it_ends_where_the_simulator_does_and_every_site_has_its_clients_layers(federation):
    folder, given, result, grid = federation
    expected = simulated(folder, given)
    assert farthest(result, expected) <= 1e-5
    with safe_open(expected.run / "personal.safetensors", framework="pt") as file:
        weights = {name.partition("/")[0]: file.get_tensor(name) for name in file.keys() if "weight" in name}  # noqa: SIM118
    found = 0
    for site in grid.sites.values():
        for key, row in site._state.items():
            if key.startswith("personal."):
                own = weights[str(int(key.removeprefix("personal.")) + 1)]
                torch.testing.assert_close(row[: own.numel()], own.flatten(), rtol=0, atol=1e-5)
                found += 1
    assert found == len(weights) > 0


@pytest.mark.slow
def test_no_personal_layer_crosses_the_wire(federation):
    """Every vector is as long as the shared layers, and no stretch of a site's own layers is in any message."""
    _, _, _, grid = federation
    kept = [row for site in grid.sites.values() for key, row in site._state.items() if key.startswith("personal.")]
    assert all(len(row) == PERSONAL for row in kept)
    rounds = 0
    for _, _, kind, payload in grid.wire:
        if kind == ROUND:
            ((name, vector),) = payload.vectors.items()
            assert name in ("model", "update")
            assert len(vector) == SHARED
            rounds += 1
        else:
            assert not payload.vectors
        numbers = {number for vector in payload.vectors.values() for number in vector.tolist()}
        for row in kept:
            assert len(numbers.intersection(row.tolist()) - {0.0}) <= 2, "two floats may be equal by chance"
    assert rounds > 0


@pytest.mark.slow
def test_no_personal_layer_is_in_a_file_of_the_coordinator(federation):
    _, _, result, _ = federation
    assert list(result.model) == ["1.weight", "1.bias"]
    assert not (result.run / "personal.safetensors").exists()
    with safe_open(result.run / "checkpoint" / "state.safetensors", framework="pt") as file:
        assert not [name for name in file.keys() if name.startswith("personal")]  # noqa: SIM118
        assert file.get_tensor("model").numel() == SHARED


@pytest.mark.slow
def test_the_coordinator_says_that_its_figures_are_not_those_of_the_clients(federation):
    _, _, result, _ = federation
    text = (result.run / "result.json").read_text()
    assert "the coordinator has none, so its figures are those of their initial values" in text


@pytest.mark.slow
def test_a_site_that_starts_again_goes_on_with_its_layers(federation):
    _, _, _, grid = federation
    for site in grid.sites.values():
        with_layers = any(key.startswith("personal.") for key in site._state)
        assert (site.owner.folder / STATE).exists() == with_layers
        again = Site(site.owner)
        assert site._terms is not None
        found = again._kept_state(site._terms)
        assert found.keys() == site._state.keys()
        assert all(torch.equal(found[key], row) for key, row in site._state.items())


@pytest.mark.slow
def test_the_ledgers_of_both_charge_the_same(tmp_path):
    given = METHODS["client level"]
    ledgers = []
    for result in (served(tmp_path, given)[0], simulated(tmp_path, given)):
        with Ledger(result.run / "ledger.jsonl") as ledger:
            ledgers.append([ledger.charged_event("client", observer) for observer in ("release", "server")])
    assert ledgers[0] == ledgers[1]


@pytest.mark.slow
def test_a_site_counts_the_parameters_itself(tmp_path):
    """Noise in steps is on every layer: a coordinator that counts fewer has its terms refused."""
    _, sim = prepare(configure(METHODS["record level"]), None, None)
    assert sim.setting.parameters == SHARED + PERSONAL
    terms = Terms("run", "", sim.setting, (), (1, 8, 8), SHARED, None)
    assert terms.charged.parameters == SHARED + PERSONAL
    assert terms.charged.secure
    assert replace(terms, setting=replace(sim.setting, parameters=0)).charged.parameters == SHARED
    _, grid = served(tmp_path, METHODS["record level"] | {"rounds": 1})
    told = json.loads(asked(grid, TERMS).values["terms"])
    told["setting"]["parameters"] = SHARED
    site = Site(Owner("new", tmp_path / "new", reader("digits", part=0)))
    answer = site.answer(TERMS, Payload({"terms": json.dumps(told, sort_keys=True), "round": 0}))
    assert f"at the coordinator {SHARED} and {SHARED}" in answer.values["refused"]
    site.close()


def test_saved_weights_to_begin_with_are_refused(tmp_path):
    """Only the coordinator has the file: sites would begin with other personal layers than in a simulation."""
    first = simulated(tmp_path, settings("fedavg", model="digits-mlp"))
    with pytest.raises(ConfigError, match=r"init '.*' is a file that sites do not have.*leave out init"):
        served(tmp_path, METHODS["fedper"] | {"init": str(first.run)})
