"""Every file of a run says inside it whether it may be released."""

import html
import json
import time
import tomllib
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from safetensors import safe_open

import shoal
from shoal import release
from shoal.accounting.privacy_ledger import Ledger
from shoal.attacks import attack_report as attack_page
from shoal.attacks.attack_plots import _png
from shoal.audit import audit_report as audit_page
from shoal.report.run_page import write_report
from shoal.sweep.cells import cell_folder, why_failed
from shoal.training.run_folder import RunFolder
from support.deploy_children import start
from support.deployed import PATIENCE
from support.tiny import FEDAVG, PRIVATE, dataset, go_on, play, unbalanced

EMPTY = {".lock"}
SAID = [said for name, said in vars(release).items() if name.isupper() and name != "KEY"]
PICTURE = _png(Figure())


def label(path: Path) -> str:
    """What a file says of itself, wherever its format has room for it."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="np") as file:
            return (file.metadata() or {})["release"]
    if path.suffix == ".png":
        found = path.read_bytes().split(b"tEXtrelease\x00")[1]
        return next(said for said in SAID if found.startswith(said.encode()))
    if path.name.startswith("events.out"):
        found = path.read_bytes()
        return next(said for said in SAID if said.encode() in found)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        first = json.loads(text.splitlines()[0])
        return first.get("body", first)["release"]
    if path.suffix == ".json":
        return json.loads(text)["release"]
    if path.suffix == ".html":
        return html.unescape(text.split('<meta name="release" content="')[1].partition('"')[0])
    return next(line.partition("release: ")[2] for line in text.splitlines() if "release: " in line)


def labels(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in EMPTY]
    return {str(path.relative_to(folder)): label(path) for path in files}


@pytest.mark.slow
def test_every_file_of_a_finished_run_says_whether_it_may_be_released(tmp_path):
    given = PRIVATE | {"baseline": True, "random": "secure"}
    found = labels(play(tmp_path, given).run)
    assert set(found) >= {
        "config.toml",
        "environment.txt",
        "ledger.jsonl",
        "metrics.jsonl",
        "baseline.jsonl",
        "result.json",
        "report.html",
        "model.safetensors",
        "model.json",
        "checkpoint/state.safetensors",
    }
    assert found["model.safetensors"] == release.MODEL + release.BEGAN, "with a model that was passed in Python"
    may = {name for name, said in found.items() if not said.startswith("not for release")}
    assert found["model.json"] == release.DESCRIPTION
    assert may == {"model.safetensors", "model.json", "config.toml", "environment.txt", "ledger.jsonl"}


@pytest.mark.slow
def test_every_line_of_metrics_says_so_also_after_a_resume(tmp_path):
    run = play(tmp_path, PRIVATE).run
    go_on(run)
    for line in (run / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["release"] == release.METRICS


def test_a_seed_that_gives_away_the_noise_is_not_for_release_with_the_model(tmp_path):
    found = labels(play(tmp_path, PRIVATE).run)
    assert found["config.toml"] == release.SEED
    assert "as long as nobody learns or guesses the seed" in found["model.safetensors"]


def test_no_guess_of_the_seed_can_be_tested_against_the_ledger(tmp_path):
    """It may be released, and names the digest of the configuration."""
    runs = [play(tmp_path, PRIVATE | {"rounds": 1, "seed": 5}).run for _ in range(2)]
    configs = {tuple((run / "config.toml").read_text().splitlines()[2:]) for run in runs}
    digests = {json.loads((run / "ledger.jsonl").read_text().splitlines()[0])["config"] for run in runs}
    assert (len(configs), len(digests)) == (1, 2)
    with safe_open(runs[0] / "checkpoint" / "state.safetensors", framework="np") as file:
        assert len(file.metadata()["salt"]) == 32, "so for checkpoints, which hold correlated noise"


def test_a_model_of_which_nothing_is_proven_says_so(tmp_path):
    found = labels(play(tmp_path, FEDAVG).run)
    assert found["model.safetensors"] == found["model.json"] == release.UNPROVEN


def test_a_model_that_began_with_one_that_is_not_for_release_is_not_said_to_be_covered(tmp_path):
    """Its weights may still be those of the other, whose data no claim of this run is about."""
    first = shoal.run(FEDAVG | {"model": "linear"}, data=dataset(), runs=tmp_path).run
    assert labels(first)["model.safetensors"] == release.UNPROVEN
    keys = PRIVATE | {"model": "linear", "random": "secure"}
    for init, said in (({}, ""), ({"init": str(first)}, release.BEGAN)):
        found = labels(shoal.run(keys | init, data=unbalanced(), runs=tmp_path).run)
        assert found["model.safetensors"] == release.MODEL + said


def test_what_is_printed_as_json_says_so_too(tmp_path):
    assert play(tmp_path, FEDAVG).to_json()["release"].startswith("not for release")


def test_files_of_before_are_still_read(tmp_path):
    """A run whose files say nothing is resumed, and its page is made again."""
    run = play(tmp_path, PRIVATE | {"rounds": 2}).run
    config = run / "config.toml"
    assert tomllib.loads(config.read_text())["rounds"] == 2
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in metrics:
        del line["release"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    result = json.loads((run / "result.json").read_text())
    del result["release"]
    (run / "result.json").write_text(json.dumps(result))
    write_report(run)
    with RunFolder.open(run) as folder:
        assert len(folder.metrics()) == 2


def test_a_ledger_of_before_goes_on(tmp_path):
    """Its first line says nothing about release, and is no other run's for that."""
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger._append("open", {"run": "a", "algorithm": "b", "config": "c", "budget": None})
    with Ledger(path) as ledger:
        ledger.begin("a", "b", "c")
        assert "release" not in ledger.opened


def test_tensorboard_files_say_so(tmp_path):
    pytest.importorskip("tensorboard")
    found = labels(play(tmp_path, FEDAVG | {"log": "tensorboard", "rounds": 1}).run)
    assert [said for name, said in found.items() if "tensorboard" in name] == [release.METRICS]


@pytest.mark.slow
def test_the_files_of_a_sweep_say_so(tmp_path):
    settings = ["-c", "rounds=1", "-c", "engine.threads=1", "-c", "model=linear"]
    words = [*settings, "--grid", "local.lr=1", "--jobs", "1"]
    sweeping = start(tmp_path, "said.txt", ["sweep", *words])
    assert sweeping.ended(time.monotonic() + PATIENCE) == 0, sweeping.said
    (sweep,) = (tmp_path / "runs").iterdir()
    found = labels(sweep)
    assert found["sweep.json"].startswith("not for release")
    assert sum(name.endswith("log.txt") for name in found) == 1


def test_why_a_cell_failed_is_the_first_line_and_the_label_the_second(tmp_path):
    folder = cell_folder(tmp_path, 3)
    folder.mkdir(parents=True)
    (folder / "failed.txt").write_text("no memory\nrelease: not for release\n")
    assert why_failed(tmp_path, 3) == "no memory"


def test_an_audit_says_so(tmp_path):
    audit_page.write(tmp_path, "nothing", [], (PICTURE, PICTURE))
    found = labels(tmp_path)
    assert found.pop("audit.png") == release.ATTACK, "the one that stands in for it"
    assert found == dict.fromkeys(["audit.json", "report.html"], release.AUDIT)


def test_an_attack_says_so(tmp_path):
    folder = attack_page.write(
        tmp_path, "x", title="t", words=[], rows=[], png=PICTURE, about="", facts={}
    )  # fmt: skip
    assert labels(folder) == dict.fromkeys(["attack.json", "attack.png", "report.html"], release.ATTACK)


@pytest.mark.slow
def test_what_a_site_keeps_says_so_and_is_still_read(tmp_path):
    pytest.importorskip("flwr", reason="needs the extra 'deploy'")
    from shoal.federation.federated_run import serve
    from support.loopback import with_sites

    grid = with_sites(tmp_path, 2)
    given = {"algorithm": "fedavg", "model": "linear", "rounds": 1, "data.name": "digits", "data.clients": 2}
    given |= {"clients.cohort": 2, "local.momentum": 0.5, "local.keep_momentum": True, "engine.threads": 1}
    result = serve(grid, given, runs=tmp_path / "served", no_guarantee=True)
    for site in grid.sites.values():
        assert site._kept_terms().run == result.run.name
        site.close()
    assert labels(result.run)["sites.json"] == release.SITES
    found = labels(tmp_path / "site-0")
    assert set(found) == {"ledger.jsonl", "terms.json", "head.json", "memory.safetensors"}
    assert found.pop("terms.json") == release.TERMS
    assert set(found.values()) == {release.SITE}
    path = tmp_path / "site-0" / "terms.json"
    path.write_text(json.loads(path.read_text())["terms"])
    assert grid.sites[100]._kept_terms().run == result.run.name, "as it was written before"


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({}, release.TERMS),
        ({"federation.seeded": True}, release.SEED),
        ({"schema.unconfirmed": ["age"]}, release.FROM_DATA),
    ],
)
def test_terms_are_no_more_for_release_than_the_configuration_in_them(tmp_path, changes, label):
    pytest.importorskip("flwr", reason="needs the extra 'deploy'")
    from shoal.federation.federated_run import planned_terms

    (tmp_path / "own.csv").write_text("age,label\n" + "".join(f"{k},{k % 2}\n" for k in range(20)))
    given = PRIVATE | {"data.name": str(tmp_path / "own.csv"), "data.clients": 4, "model": "linear"}
    given |= {"schema.label": "label", "schema.classes": [0, 1]}
    given |= {"schema.columns": {"age": {"kind": "number", "range": [0, 20], "missing": 5}}}
    terms = planned_terms(given | changes)
    assert terms.label == label
    assert terms.to_toml().startswith(f"# release: {label}\n")
