"""examples/deploy: containers, services, and the same federation as plain processes, without a container engine."""

import configparser
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
import typer

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.accounting.privacy_ledger import Ledger
from shoal.cli.main import app
from shoal.federation.federated_run import planned_terms
from shoal.federation.policy_check import refusals
from shoal.federation.policy_file import read_policy
from support.paths import ROOT
from support.ports import free_port

DEPLOY = ROOT / "examples" / "deploy"
SITES = ["north", "south", "east"]
UNITS = ["shoal-coordinator.service", "shoal-site@.service"]


def understood(words):
    """The options of a `shoal` command as it would read them; unknown ones raise."""
    command = typer.main.get_command(app).commands[words[0]]
    return command.make_context(words[0], list(words[1:])).params


def served(words):
    """The options of `shoal serve` behind coordinator.sh CONFIG OPTIONS."""
    assert words[0].endswith("coordinator.sh")
    return understood(["serve", *words[1:]])


# ---------------------------------------------------------------- compose.yaml and Dockerfile

ITEM = {
    "image": str,
    "build": dict,
    "read_only": bool,
    "tmpfs": list,
    "cap_drop": list,
    "security_opt": list,
    "stop_signal": str,
    "stop_grace_period": str,
    "restart": str,
    "depends_on": dict,
    "entrypoint": list,
    "command": list,
    "volumes": list,
    "ports": list,
}
"""The keys of a service in the Compose specification that are used here, with their types."""


@pytest.fixture
def compose():
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_compose_has_the_structure_of_its_specification(compose):
    assert {key for key in compose if not key.startswith("x-")} == {"name", "services", "volumes"}
    assert set(compose["services"]) == {"keys", "coordinator", *SITES}
    for name, service in compose["services"].items():
        for key, value in service.items():
            assert isinstance(value, ITEM[key]), (name, key)
            assert not isinstance(value, list) or all(isinstance(each, str) for each in value), (name, key)
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
        for needed, how in service.get("depends_on", {}).items():
            assert needed in compose["services"]
            assert how == {"condition": "service_completed_successfully"}
        for volume in service["volumes"]:
            source, target = volume.split(":")
            assert source in compose["volumes"]
            assert f" {target}" in (DEPLOY / "Dockerfile").read_text(), "else the volume would belong to root"
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True


def test_a_container_sees_its_own_volumes_and_no_other(compose):
    for name in SITES:
        assert compose["services"][name]["volumes"] == [f"{name}:/state/{name}"]
        assert "ports" not in compose["services"][name]


@pytest.mark.slow
def test_the_commands_in_the_containers_exist(compose):
    services = compose["services"]
    coordinator = services["coordinator"]
    options = served([coordinator["entrypoint"][1], *coordinator["command"]])
    assert (options["host"], options["keys"]) == ("0.0.0.0", "keys")
    for part, name in enumerate(SITES):
        options = understood(services[name]["command"])
        assert (options["host"], options["part"]) == ("coordinator", part)
        assert options["host"] in services["keys"]["command"], "the certificate is for this name"
        assert options["policy"].endswith("site-policy.toml")


def test_the_image_copies_what_there_is_and_does_not_run_as_root():
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert {word for word, _ in lines} <= {
        "FROM",
        "RUN",
        "WORKDIR",
        "COPY",
        "ENV",
        "USER",
        "STOPSIGNAL",
        "ENTRYPOINT",
        "CMD",
    }
    for word, rest in lines:
        if word == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources)
    assert next(rest for word, rest in lines if word == "FROM") == "python:3.13-slim"
    assert [rest for word, rest in lines if word == "USER"] == ["shoal"]
    assert json.loads(next(rest for word, rest in lines if word == "ENTRYPOINT")) == ["shoal"]


# ---------------------------------------------------------------- systemd


def started(unit):
    """The words of ExecStart."""
    text = (DEPLOY / unit).read_text().replace("\\\n", " ")
    line = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    return shlex.split(line.removeprefix("ExecStart="))


def test_the_commands_of_the_units_exist():
    assert served(started(UNITS[0])[1:])["host"] == "0.0.0.0"
    options = understood(started(UNITS[1])[1:])
    assert (options["host"], options["name"], options["key"]) == ("${COORDINATOR}", "%i", "%d/key")


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_hardened_and_does_not_try_again_what_was_refused(unit):
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.optionxform = str
    found.read_string((DEPLOY / unit).read_text())
    service = found["Service"]
    assert service["RestartPreventExitStatus"] == "2"
    assert service["KillSignal"] == "SIGINT"
    assert (service["User"], service["ProtectSystem"], service["CapabilityBoundingSet"]) == ("shoal", "strict", "")


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_understands_a_unit_and_finds_little_exposed(tmp_path, unit):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    path = tmp_path / unit
    path.write_text((DEPLOY / unit).read_text().replace("/opt/shoal/bin/shoal", "/bin/sh"))  # a program that is here
    for words in (["verify"], ["security", "--offline=true", "--threshold=20"]):
        done = subprocess.run(["systemd-analyze", *words, path], capture_output=True, text=True)
        if "offline" in done.stderr:
            pytest.skip("this systemd-analyze is older than 250")
        assert (done.returncode, done.stderr) == (0, ""), done.stdout


# ---------------------------------------------------------------- the federation itself


def test_the_policy_accepts_the_federation_and_little_more():
    policy, config = read_policy(DEPLOY / "site-policy.toml"), DEPLOY / "federation.toml"
    assert refusals(policy, planned_terms(config)) == []
    (refused,) = refusals(policy, planned_terms(config, ["rounds=40"]))
    assert "(site-policy.toml, line 5: epsilon_per_run = 6.0)" in refused
    known = set(
        tomllib.loads(
            (DEPLOY / "site-policy.toml").read_text().replace("# hours", "hours").replace("# coord", "coord")
        )
    )
    assert {"hours", "coordinators", "epsilon_per_month"} <= known


@pytest.fixture
def environment(tmp_path):
    """Where `shoal` is this one; what it is told by the test is in SHOAL."""
    (tmp_path / "bin").mkdir()
    shoal = tmp_path / "bin" / "shoal"
    shoal.write_text(f'#!/bin/sh\nexec ${{SHOAL:-{shlex.quote(sys.executable)} -m shoal}} "$@"\n')
    shoal.chmod(0o755)
    return os.environ | {"PATH": f"{shoal.parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def test_the_coordinators_script_starts_resumes_and_ends(tmp_path, environment):
    def said():
        words = ["sh", DEPLOY / "coordinator.sh", "my.toml", "--keys", "keys"]
        given = environment | {"SHOAL": "echo"}
        return subprocess.run(words, cwd=tmp_path, env=given, capture_output=True, text=True, check=True).stdout

    assert said() == "serve my.toml --keys keys\n"
    for name in ("20260101-old", "20260102-new"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "20260101-old" / "result.json").touch()
    assert said() == "serve --resume runs/20260102-new/ --keys keys\n"
    (tmp_path / "runs" / "20260102-new" / "result.json").touch()
    assert said().startswith("the run in runs/20260102-new/ has ended")


@pytest.mark.slow
def test_the_same_federation_runs_as_plain_processes(tmp_path, environment):
    words = ["sh", DEPLOY / "local.sh", tmp_path / "trial", str(free_port())]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "trial" / "runs").iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["clients"] for line in lines if "clients" in line] == [3] * 20
    for name in SITES:
        with Ledger(tmp_path / "trial" / name / "state" / "ledger.jsonl") as ledger:
            assert {intent.run for intent in ledger.charged} == {run.name}
            assert sum(intent.round - intent.first + 1 for intent in ledger.charged) == 20
