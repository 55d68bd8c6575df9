"""The package in examples/plugin adds a method without a change to Shoal: it runs, and is charged, audited, attacked
and served over a network.

It is put on the path with the entry points of its pyproject.toml; nothing is installed.
"""

import json
import math
import shutil
import sys
import time
import tomllib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import shoal
from shoal.accounting.privacy_ledger import Ledger
from shoal.algorithms import algorithm
from shoal.algorithms.charges import charges
from shoal.audit.auditing import Effort, audit
from shoal.config import configure
from shoal.mechanisms.record_clipping import RecordClip
from shoal.mechanisms.setting import Setting
from shoal.random.streams import Streams
from support.paths import ROOT
from support.plugins import install

EXAMPLE = ROOT / "examples" / "plugin"
FEW = Effort(step_trials=600, canaries=1000, pairs=0)
SMALL = {
    "algorithm": "layered",
    "model": "digits-mlp",
    "rounds": 2,
    "data.name": "digits",
    "data.clients": 2,
    "engine.device": "cpu",
    "engine.threads": 1,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the package lies, as if it had been installed there."""
    told = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = told["entry-points"].items()
    points = "\n".join(f"[{name}]\n" + "\n".join(f"{k} = {v}" for k, v in group.items()) for name, group in groups)
    install(tmp_path / "packages", told["name"], points)
    shutil.copy(EXAMPLE / "shoal_layers.py", tmp_path / "packages")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("shoal_layers", None)


def test_it_is_one_file_of_less_than_sixty_lines():
    (file,) = EXAMPLE.glob("*.py")
    assert len(file.read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.usefixtures("folder")
def test_each_layer_is_clipped_by_a_bound_of_its_own():
    clip, layers = algorithm("layered").per_record, {"large": slice(0, 9), "small": slice(9, 10)}
    norms = torch.tensor([[1e3, 0.5, 1e-3]] * 2, dtype=torch.float64).unsqueeze(1)
    left = (norms * clip.factors(norms**2, 1.0, layers)).squeeze(1)
    bounds = [math.sqrt(0.9), math.sqrt(0.1)]
    assert left[:, 0].tolist() == pytest.approx(bounds, rel=1e-4)
    assert left[:, 1].tolist() == pytest.approx([0.5, bounds[1]], rel=1e-4)
    assert left[:, 2].tolist() == [1e-3, 1e-3]
    assert bool((left.norm(dim=0) <= 1.0).all())


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("way", ["rules", "vmap", "sequential"])
@pytest.mark.parametrize("model", ["digits-mlp", "digits-cnn"])
def test_the_engine_clips_each_layer_by_the_bound_of_that_layer(model, way):
    """One step of one record, whose gradient is beyond every bound: each layer moves by just its own."""
    from shoal.gradients import Layout
    from shoal.models import build
    from shoal.prepare import prepare

    changes = {"model": model, "rounds": 1, "records.sampling": "shuffled", "records.batch": 1, "local.steps": 1}
    changes |= {"local.lr": 1.0, "per_record.clip_norm": 1e-3, "per_step.noise_multiplier": 0.0, "data.clients": 1437}
    changes |= {"clients.sampling": "fixed-size", "clients.cohort": 1, "engine.way": way}
    config = configure(SMALL | changes)
    _, trainer = prepare(config, None, None)
    before = trainer.params.clone()
    trainer.run_round(0)
    moved = trainer.params - before
    layers = Layout.of(build(model, (1, 8, 8), 10)).named_layers
    for place in layers.values():
        share = (place.stop - place.start) / len(moved)
        assert float(moved[place].norm()) == pytest.approx(1e-3 * math.sqrt(share), rel=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_it_runs_and_is_charged_as_the_same_noise_on_a_flat_clip():
    result = shoal.run(SMALL)
    assert result.algorithm == "layered"
    record = algorithm("layered")
    flat = replace(record, per_record=RecordClip(1.0))
    setting = Setting(2, 2, sizes=(700,))
    assert charges(record, setting, 0) == charges(flat, setting, 0)
    proven = {(claim["unit"], claim["observer"]): claim["epsilon"] for claim in result.proven}
    assert proven["record", "server"] > 0
    assert shoal.run(resume=result.run).rounds == 2


@pytest.mark.usefixtures("folder")
def test_its_clip_serves_other_methods_by_its_name():
    config = configure({"algorithm": "fed-cdp"}, ["per_record.mechanism=layer-clip", "per_record.clip_norm=2.0"])
    assert type(config.algorithm.per_record).__name__ == "LayerClip"
    assert config.algorithm.per_record.clip_norm == 2.0


@pytest.mark.slow
@pytest.mark.usefixtures("folder", "rarely")
@pytest.mark.statistical(false_alarm=3e-7)
def test_an_audit_finds_it_consistent_and_flags_it_without_its_clip():
    record = algorithm("layered")
    (found,) = audit(record, level="record", effort=FEW)
    assert found.verdict == "consistent"
    (flagged,) = audit(replace(record, per_record=record.per_record.unclipped()), level="record", effort=FEW)
    assert flagged.verdict == "VIOLATED"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_an_attacker_of_every_type_knows_its_clip(kind):
    """With noise x 0 the true records, replayed by the attacker, show exactly what was seen."""
    from shoal.attacks.leakage import Aim, choose
    from shoal.attacks.observe import observe

    aim = Aim(0, 3, 1 if kind == 2 else 2)
    victims = choose(shoal.load("digits"), aim, Streams(7), torch.device("cpu"))
    module = shoal.models.build("digits-mlp", (1, 8, 8), 10)
    record = configure(SMALL, ["per_step.noise_multiplier=0.0"]).algorithm
    seen = observe(record, kind, module, victims, Streams(0), rounds=10)
    shown = seen.replay(seen.shown(victims.x, F.one_hot(victims.y, 10).float()), seen.gradients).detach()
    assert torch.allclose(shown, seen.gradients, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_it_is_served_over_a_network_to_sites_that_allow_it(folder):
    """A coordinator and two sites, each a process that finds the package where this one does."""
    pytest.importorskip("flwr", reason="needs the extra 'deploy'")
    from shoal.config import to_toml
    from support.deploy_children import start
    from support.ports import free_port

    given = SMALL | {"federation.min_records": 700, "federation.max_records": 720, "federation.deadline": 300.0}
    (folder / "federation.toml").write_text(to_toml(configure(given)))
    port = free_port()

    def join(name, part, *words):
        where = ["join", f"127.0.0.1:{port}", "--data", "digits", "--part", str(part), "--folder", name]
        return start(folder, f"{name}.log", [*where, "--name", name, *words])

    started = [start(folder, "serve.log", ["serve", "federation.toml", "--port", str(port), "--json"])]
    started += [join(f"site-{n}", n, "--allow-plugin", "shoal-layers") for n in (0, 1)]
    try:
        codes = [child.ended(time.monotonic() + 600) for child in started]
        assert codes == [0, 0, 0], [child.said for child in started]
    finally:
        for child in started:
            child.away()
    served = json.loads(next(line for line in started[0].said.splitlines() if line.startswith("{")))
    assert (served["algorithm"], served["rounds"]) == ("layered", 2)
    proven = {(claim["unit"], claim["observer"]): claim["epsilon"] for claim in served["proven"]}
    assert proven["record", "server"] > 0
    for name in ("site-0", "site-1"):
        with Ledger(folder / name / "ledger.jsonl") as ledger:
            assert len(ledger.charged) == 2
