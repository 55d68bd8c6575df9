"""Coordinator and sites as processes of their own on loopback, with TLS and keys: kills, slow and hostile sites."""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

import shoal
from deploy_children import start
from shoal.accounting.ledger import Ledger, verify
from shoal.deploy.keys import make_authority, make_site, public_pem, read_site_key, read_sites
from shoal.deploy.node import Door, JoinError, Link, attend
from shoal.deploy.parcel import Parcel
from shoal.deploy.records import reader
from shoal.deploy.serve import serve
from shoal.deploy.site import Owner, Site
from shoal.deploy.superlink import SuperLink, Tls, identity
from shoal.deploy.terms import ROUND
from shoal.errors import ConfigError

pytestmark = [
    pytest.mark.timeout(600),  # machines are shared: a paused minute is no failure
    pytest.mark.skipif("SHOAL_TEST_NETWORK" not in os.environ, reason="real processes: set SHOAL_TEST_NETWORK=1"),
]
PATIENCE = 240.0
CONFIG = """
algorithm = "{algorithm}"
model = "linear"
rounds = {rounds}
[data]
name = "digits"
clients = 3
[clients]
sampling = "all"
[local]
steps = 2
[engine]
device = "cpu"
threads = 1
[federation]
seeded = {seeded}
deadline = {deadline}
"""


def config(folder, algorithm="trusted-curator", rounds=4, seeded="true", deadline=60.0):
    path = folder / "federation.toml"
    path.write_text(CONFIG.format(algorithm=algorithm, rounds=rounds, seeded=seeded, deadline=deadline))
    return path


def free_port():
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


@dataclass
class Federation:
    """A folder with keys for three sites and one stranger, and the processes that were started in it."""

    folder: Path
    port: int
    started: list[BaseProcess] = field(default_factory=list)

    def serve(self, *words, moment="never", round=0):
        words = ["serve", "--keys", "keys", "--port", str(self.port), *words]
        return self._start("serve.log", words, moment, round)

    def join(self, number, key=None, ca="keys/ca.pem", folder=None):
        name = key or f"site-{number}"
        words = ["join", f"127.0.0.1:{self.port}", "--data", "digits", "--part", str(number)]
        words += ["--key", f"{name}.key", "--ca", ca, "--folder", folder or f"own-{number}"]
        return self._start(f"{name}.log", words)

    def _start(self, log, words, *death):
        self.started.append(start(self.folder, log, words, *death))
        return self.started[-1]

    def said(self, log):
        path = self.folder / log
        return path.read_text() if path.exists() else ""

    def until(self, fact, what):
        end = time.monotonic() + PATIENCE
        while not fact():
            assert time.monotonic() < end, f"{what}\n{self.said('serve.log')}"
            time.sleep(0.05)

    @property
    def run(self):
        (found,) = (self.folder / "runs").iterdir()
        return found

    def metrics(self):
        files = list(self.folder.glob("runs/*/metrics.jsonl"))
        return [json.loads(line) for line in files[0].read_text().splitlines()] if files else []


@pytest.fixture
def federation(tmp_path):
    make_authority(tmp_path / "keys", ["127.0.0.1", "localhost"], 30)
    for name in ("site-0", "site-1", "site-2", "stranger"):
        _, public = make_site(tmp_path, name)
        if name != "stranger":
            public.rename(tmp_path / "keys" / "sites" / public.name)
    made = Federation(tmp_path, free_port())
    yield made
    for process in made.started:
        process.kill()
        process.join()


def ended(process):
    process.join(PATIENCE)
    return process.exitcode


def test_a_federation_over_tls_ends_where_the_simulator_does(federation, tmp_path):
    """Three sites with keys; a stranger's key and another authority are refused meanwhile."""
    path = config(tmp_path)
    coordinator = federation.serve("federation.toml")
    make_authority(tmp_path / "false", ["127.0.0.1"], 30)
    stranger = federation.join(0, key="stranger", folder="stranger")
    misled = federation.join(1, ca="false/ca.pem", folder="misled")
    sites = [federation.join(0), federation.join(2)]
    assert ended(stranger) == 2
    assert "does not let this site in" in federation.said("stranger.log")
    assert ended(misled) == 2
    assert "--ca did not sign" in federation.said("site-1.log")
    assert coordinator.is_alive(), "they have not disturbed anybody"
    sites.append(federation.join(1))
    assert [ended(process) for process in (coordinator, *sites)] == [0, 0, 0, 0], federation.said("serve.log")

    expected = shoal.run(path, runs=tmp_path / "simulated")
    found = load_file(federation.run / "model.safetensors")
    assert all(torch.allclose(found[key], expected.model[key], rtol=0, atol=1e-5) for key in expected.model)
    assert {"config.toml", "ledger.jsonl", "report.html", "checkpoint", "sites.json"} <= {
        path.name for path in federation.run.iterdir()
    }
    assert verify(federation.run / "ledger.jsonl").whole
    assert [line["clients"] for line in federation.metrics()] == [3, 3, 3, 3]
    names = json.loads((federation.run / "sites.json").read_text()).values()
    assert {facts["name"]: facts["number"] for facts in names} == {"site-0": 0, "site-1": 1, "site-2": 2}


def test_a_coordinator_killed_at_five_moments_completes_its_run(federation, tmp_path):
    """Sites stay and come back; every attempt is charged, by the coordinator and by each site."""
    config(tmp_path, rounds=6, seeded="false")
    moments = [("charged", 2), ("asked", 3), ("answered", 4), ("written", 5), ("committed", 5)]
    sites = [federation.join(number) for number in range(3)]
    arguments = ["federation.toml"]
    for moment, round in moments:
        process = federation.serve(*arguments, moment=moment, round=round)
        assert ended(process) == -signal.SIGKILL, federation.said("serve.log")
        assert verify(federation.run / "ledger.jsonl").whole
        arguments = ["--resume", str(federation.run)]
        if moment == "written":  # the commit is made good; the round is not played again
            moments[4] = ("committed", 6)
    last = federation.serve(*arguments)
    assert [ended(process) for process in (last, *sites)] == [0, 0, 0, 0], federation.said("serve.log")

    with Ledger(federation.run / "ledger.jsonl") as ledger:
        intents = [(intent.round, intent.attempt) for intent in ledger.charged]
        commits = [(commit.round, commit.attempt) for commit in ledger.commits]
    assert len(set(intents)) == len(intents)
    assert [round for round, _ in commits] == [1, 2, 3, 4, 5, 6], "each round is released once"
    assert set(commits) <= set(intents)
    assert sorted(round for round, _ in intents) == [1, 2, 2, 3, 3, 4, 4, 5, 6]
    assert [line["round"] for line in federation.metrics()] == [1, 2, 3, 4, 5, 6]
    for number in range(3):
        path = tmp_path / f"own-{number}" / "ledger.jsonl"
        assert verify(path).whole
        with Ledger(path) as own:
            # asked and answered: the round reached the site before the kill, and is charged again after it
            assert 6 <= len(own.charged) <= 9


def test_sites_that_die_come_late_or_come_back(federation, tmp_path):
    """One is killed in the middle of a round and comes back; another joins when rounds are being played."""
    config(tmp_path, rounds=400, seeded="false", deadline=30.0)
    coordinator = federation.serve("federation.toml", "-c", "federation.first=2")
    victim, other = federation.join(0), federation.join(1)
    federation.until(lambda: len(federation.metrics()) >= 3, "rounds are played by two of three")
    assert federation.metrics()[0]["clients"] == 2
    assert federation.metrics()[0]["expected_clients"] == 3
    late = federation.join(2)
    victim.kill()
    federation.until(
        lambda: federation.metrics()[-1]["clients"] == 2 and "site-2" in federation.said("serve.log"), "late"
    )
    federation.until(
        lambda: any(r["what"] == "gone" for m in federation.metrics() for r in m.get("reports", ())), "gone"
    )
    before = len(federation.metrics())
    back = federation.join(0)
    federation.until(lambda: any(line["clients"] == 3 for line in federation.metrics()[before:]), "it is back")
    os.kill(coordinator.pid, signal.SIGINT)
    assert ended(coordinator) == 130
    assert "shoal serve --resume" in federation.said("serve.log")
    for process in (back, late, other):
        os.kill(process.pid, signal.SIGINT)
        assert ended(process) == 130
    names = json.loads((federation.run / "sites.json").read_text()).values()
    assert len({facts["number"] for facts in names}) == 3


# ---------------------------------------------------------------- odd sites, in threads, over the same wire


class Odd(Site):
    """A site that does something else in rounds."""

    def __init__(self, owner, odd):
        super().__init__(owner)
        self.odd = odd

    def answer(self, kind, letter):
        answer = super().answer(kind, letter)
        return self.odd(answer) if kind == ROUND else answer


def blob(answer):
    return Parcel(answer.values, {"update": torch.zeros(2**28)})  # 1 GiB


def slow(answer):
    time.sleep(4)
    return answer


@pytest.mark.parametrize("odd", [blob, slow], ids=["1 GiB", "slow"])
def test_a_round_goes_on_without_an_odd_site(tmp_path, odd):
    link = SuperLink("127.0.0.1", 0, None, [])
    threads = []
    for number in range(3):
        owner = Owner(f"site-{number}", tmp_path / str(number), reader("digits", part=number))
        private, _ = make_site(tmp_path, f"site-{number}")
        door = Door(f"127.0.0.1:{link.port}", read_site_key(private), None, registers=True)
        site = Odd(owner, odd) if number == 1 else Site(owner)
        threads.append(threading.Thread(target=_tolerant, args=(site, door), daemon=True))
        threads[-1].start()
    path = config(tmp_path, rounds=2, deadline=2.0)
    try:
        result = serve(link, path, runs=tmp_path / "runs")
    finally:
        link.close()
    assert [line["clients"] for line in result.metrics] == [2, 2]
    assert all(line["reports"][0]["site"] == "site-1" for line in result.metrics if "reports" in line)
    assert sum("reports" in line for line in result.metrics) >= 1
    assert len(list(result.run.glob("model.safetensors"))) == 1


def _tolerant(site, door):
    try:
        attend(site, door, 5.0, lambda _words: None)
    except (JoinError, httpx.HTTPError):
        pass
    finally:
        site.close()


def pour(wire):
    for _ in range(1000):
        wire.sendall(bytes(2**20))


@pytest.mark.parametrize("claimed", [None, "2000000000"], ids=["of no length", "of 2 GB"])
def test_a_body_that_is_too_large_is_cut_off_unread(claimed):
    """Also before anybody has shown a key."""
    link = SuperLink("127.0.0.1", 0, None, [])
    try:
        with socket.create_connection(("127.0.0.1", link.port), timeout=60) as wire:
            length = f"content-length: {claimed}" if claimed else "transfer-encoding: chunked"
            wire.sendall(f"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\n{length}\r\n\r\n".encode())
            assert wire.recv(100).split()[1] in (b"411", b"413")
            with pytest.raises(OSError, match=r"."):
                pour(wire)
    finally:
        link.close()


@pytest.mark.parametrize("path", ["/v1/control/register-node", "/v1/runtime/acquire-task", "/docs", "/openapi.json"])
def test_only_the_fleet_api_is_open(path):
    link = SuperLink("127.0.0.1", 0, None, [])
    try:
        headers = {"content-type": "application/protobuf"}
        assert httpx.post(f"http://127.0.0.1:{link.port}{path}", content=b"", headers=headers).status_code == 404
    finally:
        link.close()


def test_without_its_key_nobody_speaks_for_a_node(tmp_path):
    """A registered key, TLS: a request that is signed by another key, or by none, is refused."""
    make_authority(tmp_path, ["127.0.0.1"], 5)
    private, public = make_site(tmp_path, "one")
    other, _ = make_site(tmp_path, "other")
    public.rename(tmp_path / "sites" / public.name)
    keys = read_sites(tmp_path)
    tls = Tls(tmp_path / "server.pem", tmp_path / "server.key")
    link = SuperLink("127.0.0.1", 0, tls, list(keys.values()))
    ca = (tmp_path / "ca.pem").read_bytes()
    try:
        own = Door(f"127.0.0.1:{link.port}", read_site_key(private), ca, registers=False)
        with Link(own) as good:
            assert [node.node_id for node in link.get_nodes()] == [good.node]
            assert identity(link.get_nodes()[0].public_key) == identity(keys["one"])
        assert not link.get_nodes()
        for registers in (False, True):
            stranger = Door(own.address, read_site_key(other), ca, registers)
            with pytest.raises(httpx.HTTPStatusError), Link(stranger):
                pass
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"http://127.0.0.1:{link.port}/v1/fleet/pull-messages")
        assert public_pem(read_site_key(private).public_key()) == keys["one"]
    finally:
        link.close()


# ---------------------------------------------------------------- what the command line refuses


def test_nothing_is_open_to_the_world_by_mistake(tmp_path):
    from shoal.cli.join import _address
    from shoal.cli.serve import opened

    with pytest.raises(ConfigError, match="--insecure"):
        opened("0.0.0.0", 0, None, False, print)
    with pytest.raises(ConfigError, match="--insecure"):
        _address("example.org", None, False)
    assert _address("localhost", None, False) == "localhost:8000"
    assert _address("[::1]:99", None, False) == "[::1]:99"
    assert _address("example.org:99", tmp_path / "ca.pem", False) == "example.org:99"
    (tmp_path / "sites").mkdir()
    with pytest.raises(ConfigError, match="no site could join"):
        opened("127.0.0.1", 0, tmp_path, False, print)


def test_keys_are_for_their_owner_only_and_never_written_over(tmp_path):
    made = make_authority(tmp_path / "keys", ["10.0.0.1", "host.example"], 30)
    private, public = make_site(tmp_path, "north")
    assert {path.name: path.stat().st_mode & 0o777 for path in (*made, private, public)} == {
        "ca.pem": 0o644,
        "ca.key": 0o600,
        "server.pem": 0o644,
        "server.key": 0o600,
        "north.key": 0o600,
        "north.pub": 0o644,
    }
    assert (tmp_path / "keys").stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="not written over"):
        make_authority(tmp_path / "keys", ["10.0.0.1"], 30)
    with pytest.raises(ConfigError, match="not written over"):
        make_site(tmp_path, "north")
    for name in ("../up", "", "a b", "-x"):
        with pytest.raises(ConfigError, match="a site's name"):
            make_site(tmp_path, name)
    private.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_site_key(private)
    public.chmod(0o600)
    with pytest.raises(ConfigError, match="is no private key"):
        read_site_key(public)


def test_the_command_makes_keys(tmp_path, monkeypatch, capsys):
    from shoal.cli.main import main

    for words, said in (
        (["coordinator", "127.0.0.1"], r"give .*ca\.pem to every site"),
        (["site", "north"], "shoal join"),
    ):
        monkeypatch.setattr(sys, "argv", ["shoal", "keys", *words, "--folder", str(tmp_path / "k")])
        with pytest.raises(SystemExit) as done:
            main()
        assert done.value.code == 0
        assert re.search(said, capsys.readouterr().out)
    assert {path.name for path in (tmp_path / "k").iterdir()} >= {"ca.pem", "server.key", "north.key", "north.pub"}
