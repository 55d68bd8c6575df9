"""Canary clients in a real federation: sites are asked, claims and denominators stay, an audit measures by them."""

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal import release
from shoal.accounting.privacy_ledger import Record
from shoal.audit.federated_canaries import audit_federation
from shoal.cli.main import main
from shoal.errors import ConfigError, RunError
from shoal.federation.site_policy import Bounds
from shoal.federation.terms import TERMS
from shoal.mechanisms.gaussian import Gaussian
from shoal.report.certificate import certificate
from shoal.training.canaries import FILE, Canaries, read
from support.deployed import config, deployed
from support.federations import full_cohort, served, settings
from support.loopback import with_sites

ALLOWED = Bounds(canaries=(0, 500))


def with_canaries(folder, count, **changes):
    given = full_cohort(per_round__noise_multiplier=4.0) | {"federation.canaries": count}
    given |= {key.replace("__", "."): value for key, value in changes.items()}
    return served(folder, given, with_sites(folder, 4, bounds=ALLOWED))[0]


def command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["shoal", "audit", *words])
    main()


def flat(result):
    return torch.cat([tensor.flatten() for tensor in result.model.values()]).double()


@pytest.mark.slow
def test_a_site_refuses_canaries_unless_its_policy_allows_them(tmp_path):
    grid = with_sites(tmp_path, 1)
    offered = with_sites(tmp_path / "asked", 4, bounds=ALLOWED)
    served(tmp_path, full_cohort() | {"federation.canaries": 20}, offered)
    terms = next(p for to, _, kind, p in offered.wire if (to, kind) == ("to", TERMS))
    refused = grid.sites[100].answer(TERMS, terms).values["refused"]
    assert refused == "federation.canaries is 20, this site accepts 0 to 0 (its --bound canaries=LOW:HIGH)"


@pytest.mark.slow
def test_claims_and_denominators_are_those_of_the_sites_alone(tmp_path):
    plain, measured = (with_canaries(tmp_path / str(count), count, rounds=1) for count in (0, 50))
    assert measured.proven == plain.proven
    for key in ("clients", "expected_clients", "clip", "noise"):
        assert measured.metrics[0][key] == plain.metrics[0][key]
    head = json.loads((measured.run / FILE).read_text().splitlines()[0])
    canaries = Canaries(head["seed"], head["canaries"], head["parameters"])
    assert 10 < canaries.included.sum() < 40
    wanted = sum(each.double() for each, coin in zip(canaries.directions(), canaries.included, strict=True) if coin)
    moved = (flat(measured) - flat(plain)) * 4 / plain.metrics[0]["clip"]
    assert torch.allclose(moved, wanted, atol=1e-5)
    assert not (plain.run / FILE).exists()


def test_canaries_are_drawn_at_the_rate_of_the_sites():
    canaries = Canaries(3, 2_000, 1)
    came = np.array([len(canaries.drawn(t, 0, 0.25)) for t in range(20)]) / canaries.included.sum()
    assert abs(came.mean() - 0.25) < 0.03
    assert set(canaries.drawn(0, 0, 1.0)) == set(np.flatnonzero(canaries.included))
    assert set(canaries.drawn(0, 0, 0.25)) != set(canaries.drawn(0, 1, 0.25))


@pytest.mark.slow
@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.statistical(false_alarm=4e-9)
def test_an_audit_agrees_with_the_right_noise(tmp_path, seeded):
    result = with_canaries(tmp_path, 200, rounds=6, federation__seeded=seeded, per_round__noise_multiplier=12.0)
    found = audit_federation(result.run)
    (claim,) = (each for each in result.proven if (each["unit"], each["observer"]) == ("client", "release"))
    assert (found.claimed, found.rounds, found.canaries) == (claim["epsilon"], 6, 200)
    assert all(abs(seen.shift - math.sqrt(6) / 12) < 6 * math.sqrt(4 / 200) for seen in found.seen)


@pytest.mark.slow
def test_it_flags_a_quarter_of_the_noise(tmp_path, monkeypatch, capsys):
    add = Gaussian.add
    monkeypatch.setattr(Gaussian, "add", lambda self, total, z, *rest: add(self, total, z / 4, *rest))
    result = with_canaries(tmp_path, 400, rounds=6, per_round__noise_multiplier=6.0)
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, "--federation", str(result.run), "--json")
    assert ended.value.code == 3
    held = json.loads(capsys.readouterr().out)
    assert held["verdict"] != "consistent"
    assert [seen["observer"] for seen in held["seen"]] == ["final model", "every round"]
    assert json.loads((result.run / "audit" / "federation.json").read_text())["verdict"] == held["verdict"]
    assert held["release"].startswith(release.MODEL), "it is measured by models of the sites' records"


@pytest.mark.slow
def test_with_next_to_no_noise_what_an_audit_measures_is_not_for_release(tmp_path, monkeypatch, capsys):
    result = with_canaries(tmp_path, 40, rounds=2, per_round__noise_multiplier=0.001)
    with pytest.raises(SystemExit):
        command(monkeypatch, "--federation", str(result.run), "--json")
    assert json.loads(capsys.readouterr().out)["release"] == release.UNPROVEN


@pytest.mark.slow
def test_a_round_that_was_noted_twice_counts_once(tmp_path):
    result = with_canaries(tmp_path, 40, rounds=2)
    before, path = read(result.run), result.run / FILE
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], *lines[1:]]) + "\n" + '{"round": 2, "al')
    assert (read(result.run).along == before.along).all()
    path.write_text("\n".join(lines[:2]) + "\n")
    with pytest.raises(RunError, match="not what the run wrote"):
        read(result.run)


@pytest.mark.parametrize("name", ["fedavg", "dp-sgd", "dp-ftrl"])
def test_methods_without_a_place_for_canaries_refuse_them(tmp_path, name):
    with pytest.raises(ConfigError, match=f"federation.canaries 20: {name} has no place"):
        served(tmp_path, settings(name) | {"federation.canaries": 20})


@pytest.mark.slow
def test_a_run_without_canaries_says_what_to_do(tmp_path, monkeypatch, capsys):
    result = with_canaries(tmp_path, 0, rounds=1)
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, "--federation", str(result.run))
    assert ended.value.code == 2
    assert "federation.canaries" in capsys.readouterr().err


@pytest.mark.slow
def test_over_the_network_sites_agree_and_the_run_is_audited(tmp_path):
    """Processes with TLS and keys. A site whose owner has not allowed canaries takes no part."""
    config(tmp_path, rounds=3, seeded="false")
    federation = deployed(tmp_path)
    words = ("-c", "federation.canaries=100", "-c", "per_round.noise_multiplier=12.0")
    coordinator = federation.serve("federation.toml", *words, "-c", "federation.min_sites_to_start=2")
    reluctant = federation.join(2)
    federation.started.remove(reluctant)  # it refuses, and may end before the coordinator has said so
    try:
        federation.until(lambda: "federation.canaries is 100" in coordinator.said, "it refuses")
        sites = [federation.join(number, more=("--bound", "canaries=:1000")) for number in range(2)]
        assert federation.ended(coordinator, *sites) == [0, 0, 0], coordinator.said
        assert "100 canary clients, random updates that are nobody's data" in sites[0].said
        found = audit_federation(federation.run)
        assert (found.canaries, found.rounds) == (100, 3)
        assert all(np.isfinite([seen.estimate, seen.least]).all() for seen in found.seen)
        assert [line["expected_clients"] for line in federation.metrics()] == [3, 3, 3]
        heads = {site["name"]: site["head"] for site in certificate(federation.run)["sites"]}
        own = {f"site-{n}": Record.read(tmp_path / f"own-{n}" / "ledger.jsonl")[1].head for n in range(2)}
        assert heads == own, "the heads of their ledgers came over the network"
    finally:
        reluctant.away()
        federation.away()


def test_bounds_of_canaries_are_read_like_all_others():
    assert Bounds.read(["canaries=:50"]) == replace(Bounds(), canaries=(0, 50))
