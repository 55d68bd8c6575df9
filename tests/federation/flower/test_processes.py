"""Coordinator and sites as processes of their own on loopback, with TLS and keys: kills, slow and hostile sites."""

import json
import re
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

import shoal
from shoal.accounting.privacy_ledger import Ledger, verify
from shoal.errors import ConfigError
from shoal.federation.federated_run import serve
from shoal.federation.flower.node import Endpoint, JoinError, Link, run_site
from shoal.federation.flower.superlink import ALIVE, SuperLink, Tls, identity
from shoal.federation.flower.transport import Transport
from shoal.federation.key_files import public_pem, read_site_key, read_sites
from shoal.federation.key_making import make_authority, make_site, revoke
from shoal.federation.messages import Payload
from shoal.federation.site import Owner, Site
from shoal.federation.site_records import reader
from shoal.federation.terms import ROUND, TERMS
from support.deploy_children import start
from support.deployed import PATIENCE, config, deployed

pytestmark = pytest.mark.slow


@pytest.fixture
def federation(tmp_path):
    made = deployed(tmp_path)
    yield made
    made.away()


def sites_of(run):
    """What the roster says of each site."""
    return [facts for facts in json.loads((run / "sites.json").read_text()).values() if isinstance(facts, dict)]


def test_a_federation_over_tls_ends_where_the_simulator_does(federation, tmp_path):
    """Three sites with keys; a stranger's key and another authority are refused meanwhile."""
    path = config(tmp_path)
    coordinator = federation.serve("federation.toml")
    make_authority(tmp_path / "false", ["127.0.0.1"], 30)
    stranger = federation.join(0, key="stranger", folder="stranger")
    misled = federation.join(1, ca="false/ca.pem", folder="misled")
    sites = [federation.join(0), federation.join(2)]
    assert federation.ended(stranger, misled) == [2, 2]
    assert "rejected this site" in stranger.said
    assert "--ca did not sign" in misled.said
    assert coordinator.process.is_alive(), "they have not disturbed anybody"
    sites.append(federation.join(1))
    assert federation.ended(coordinator, *sites) == [0, 0, 0, 0], coordinator.said

    expected = shoal.run(path, runs=tmp_path / "simulated")
    found = load_file(federation.run / "model.safetensors")
    assert all(torch.allclose(found[key], expected.model[key], rtol=0, atol=1e-5) for key in expected.model)
    assert {"config.toml", "ledger.jsonl", "report.html", "checkpoint", "sites.json"} <= {
        path.name for path in federation.run.iterdir()
    }
    assert verify(federation.run / "ledger.jsonl").whole
    assert [line["clients"] for line in federation.metrics()] == [3, 3, 3, 3]
    names = sites_of(federation.run)
    assert {facts["name"]: facts["number"] for facts in names} == {"site-0": 0, "site-1": 1, "site-2": 2}


def test_a_coordinator_killed_at_five_moments_completes_its_run(federation, tmp_path):
    """Sites stay and come back; every attempt is charged, by the coordinator and by each site."""
    config(tmp_path, rounds=6, seeded="false")
    moments = [("charged", 2), ("asked", 3), ("answered", 4), ("written", 5), ("committed", 5)]
    sites = [federation.join(number) for number in range(3)]
    arguments = ["federation.toml"]
    for index, round in moments:
        killed = federation.serve(*arguments, index=index, round=round)
        assert federation.ended(killed) == [-signal.SIGKILL], killed.said
        assert verify(federation.run / "ledger.jsonl").whole
        arguments = ["--resume", str(federation.run)]
        if index == "written":  # the commit is made good; the round is not played again
            moments[4] = ("committed", 6)
    last = federation.serve(*arguments)
    assert federation.ended(last, *sites) == [0, 0, 0, 0], last.said

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
            assert 6 <= own.charged[-1].round <= 9


def test_sites_that_die_come_late_or_come_back(federation, tmp_path):
    """One is killed in the middle of a round and comes back; another joins when rounds are being played."""
    config(tmp_path, rounds=10_000, seeded="false", deadline=60.0)  # more than are ever played
    coordinator = federation.serve("federation.toml", "-c", "federation.min_sites_to_start=2")
    victim, other = federation.join(0), federation.join(1)
    federation.until(lambda: len(federation.metrics()) >= 3, "rounds are played by two of three")
    assert federation.metrics()[0]["clients"] == 2
    assert federation.metrics()[0]["expected_clients"] == 3
    late = federation.join(2)
    victim.signal(signal.SIGSTOP)  # whenever that is, it owes the next answer: it dies in the middle of a round
    federation.until(federation.still(5.0), "a round waits for it")
    victim.signal(signal.SIGKILL)
    federation.until(lambda: federation.metrics()[-1]["clients"] == 2 and "site-2" in coordinator.said, "late")
    federation.until(
        lambda: any(r["what"] == "gone" for m in federation.metrics() for r in m.get("reports", ())), "gone"
    )
    before = len(federation.metrics())
    back = federation.join(0)
    federation.until(lambda: any(line["clients"] == 3 for line in federation.metrics()[before:]), "it is back")
    for child in (coordinator, back, late, other):
        child.signal(signal.SIGINT)
        assert federation.ended(child) == [130], child.said
    assert "shoal serve --resume" in coordinator.said
    names = sites_of(federation.run)
    assert len({facts["number"] for facts in names}) == 3


def test_a_revoked_site_is_out_of_a_running_federation_and_a_rotated_one_comes_back(federation, tmp_path):
    config(tmp_path, rounds=10_000, seeded="false", deadline=60.0)  # more than are ever played
    coordinator = federation.serve("federation.toml")
    sites = [federation.join(number) for number in range(3)]
    federation.until(lambda: federation.metrics()[-1:] and federation.metrics()[-1]["clients"] == 3, "all take part")
    revoke(tmp_path / "keys", "site-2")
    federation.until(lambda: federation.metrics()[-1]["clients"] == 2, "one is out")
    assert "site site-2: its key" in coordinator.said
    sites[1].signal(signal.SIGKILL)
    federation.ended(sites[1])
    _, public = make_site(tmp_path / "new", "site-1")
    public.rename(tmp_path / "keys" / "sites" / "site-1.pub")
    (tmp_path / "new" / "site-1.key").rename(tmp_path / "site-1.key")
    federation.until(lambda: coordinator.said.count("site site-1: its key") == 2, "the new key is known")
    federation.join(1)
    federation.until(lambda: "site site-1 (node" in coordinator.said.split("may join")[-1], "it is back")
    federation.until(lambda: federation.metrics()[-1]["clients"] == 2, "in rounds")
    coordinator.signal(signal.SIGINT)
    assert federation.ended(coordinator) == [130], coordinator.said
    assert {facts["name"]: facts["number"] for facts in sites_of(federation.run)}["site-1"] == 1


# ---------------------------------------------------------------- odd sites, in threads, over the same wire


class Slow(Site):
    """A site that answers its first round when that is over."""

    over = threading.Event()

    def answer(self, kind, message):
        answer = super().answer(kind, message)
        if kind == ROUND:
            self.over.wait(PATIENCE)
        return answer


def with_one(odd, name, folder, rounds, deadline, on_round=None):
    """A run with two good sites and that one."""
    link = SuperLink("127.0.0.1", 0, None, [])
    for number, (kind, called) in enumerate([(Site, "site-0"), (odd, name), (Site, "site-2")]):
        site = kind(Owner(called, folder / called, reader("digits", part=number)))
        private, _ = make_site(folder, called)
        endpoint = Endpoint(f"127.0.0.1:{link.port}", read_site_key(private), None, registers=True)
        threading.Thread(target=_tolerant, args=(site, endpoint), daemon=True).start()
    try:
        given = config(folder, rounds=rounds, deadline=deadline)
        return serve(link, given, runs=folder / "runs", on_round=on_round)
    finally:
        link.close()


def reports(result):
    return [(report["site"], report["what"]) for line in result.metrics for report in line.get("reports", ())]


def test_a_round_does_not_wait_for_a_slow_site_which_may_answer_the_next(tmp_path, monkeypatch):
    """The deadline is long enough for the two good sites on a machine that has much else to do."""
    monkeypatch.setattr(Slow, "over", threading.Event())
    result = with_one(Slow, "slow", tmp_path, rounds=2, deadline=15.0, on_round=lambda _: Slow.over.set())
    assert [line["clients"] for line in result.metrics] == [2, 3]
    assert reports(result) == [("slow", "late")]


def _tolerant(site, endpoint):
    try:
        run_site(site, endpoint, 5.0, lambda _words: None)
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
        assert (
            httpx.post(
                f"http://127.0.0.1:{link.port}{path}", content=b"", headers=headers, timeout=PATIENCE
            ).status_code
            == 404
        )
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
        own = Endpoint(f"127.0.0.1:{link.port}", read_site_key(private), ca, registers=False)
        with Link(own) as good:
            assert [node.node_id for node in link.get_nodes()] == [good.node]
            assert identity(link.get_nodes()[0].public_key) == identity(keys["one"])
        assert not link.get_nodes()
        for registers in (False, True):
            stranger = Endpoint(own.address, read_site_key(other), ca, registers)
            with pytest.raises(httpx.HTTPStatusError), Link(stranger):
                pass
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"http://127.0.0.1:{link.port}/v1/fleet/pull-messages")
        assert public_pem(read_site_key(private).public_key()) == keys["one"]
    finally:
        link.close()


@pytest.fixture
def waiting(tmp_path):
    """An open link, a site's door to it, and the mail."""
    private, _ = make_site(tmp_path, "one")
    link = SuperLink("127.0.0.1", 0, None, [])
    yield (
        link,
        Endpoint(f"127.0.0.1:{link.port}", read_site_key(private), None, registers=True),
        Transport(link, 2**20),
    )
    link.close()


def pulled_in_time(site):
    """A message, or a failure; a request for one is held for some seconds only, a message is handed out once."""
    end = time.monotonic() + PATIENCE
    while (found := site.pull()) is None:
        assert time.monotonic() < end, "no message came"
    return found


@pytest.fixture
def held(waiting, monkeypatch):
    """Set once a site's request for messages has come and found none: it is held then."""
    link, asked = waiting[0], threading.Event()
    look = link._state.get_message_ins

    def looking(*given, **named):
        found = look(*given, **named)
        asked.set()
        return found

    monkeypatch.setattr(link._state, "get_message_ins", looking)
    return asked


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (torch.arange(40 * 2**20, dtype=torch.float32), "more than 25 objects"),
        (torch.zeros(40 * 2**20), "a request of 5,24"),
    ],
    ids=["in pieces that are all different", "in pieces that are all the same"],
)
def test_an_answer_of_160_mebibytes_is_refused_and_said_to_be_bad(waiting, values, problem):
    _, endpoint, transport = waiting
    answers = SimpleNamespace(answer=lambda kind, message: Payload({}, {"update": values}))
    with Link(endpoint) as site:
        transport.send({site.node: Payload({"a": 1})}, ROUND, 60.0)
        with pytest.raises(httpx.HTTPStatusError):
            site.once(answers)
        (reply,) = transport.replies()
    assert (reply.node, reply.payload, reply.lost) == (site.node, None, False)
    assert problem in reply.problem


def test_a_letter_is_lost_with_the_site_that_had_it(waiting):
    """A site that is started again at once is not waited for until the deadline."""
    _, endpoint, transport = waiting
    with Link(endpoint) as first:
        sent = transport.send({first.node: Payload({"a": 1})}, ROUND, 60.0)
        pulled_in_time(first)
        assert transport.replies() == []
        with Link(endpoint) as again:
            assert again.node == first.node
            (found,) = transport.replies()
    assert (found.message_id, found.node, found.lost) == (next(iter(sent)), first.node, True)


def test_a_letter_is_not_seen_before_all_of_it_is_there(waiting, monkeypatch):
    """A site that asks while a message is being written gets the whole message, however long that takes."""
    link, endpoint, transport = waiting
    store = link._state.store_object

    def slowly(*given):
        time.sleep(0.2)
        return store(*given)

    monkeypatch.setattr(link._state, "store_object", slowly)
    with Link(endpoint) as site:
        writing = threading.Thread(
            target=transport.send, args=({site.node: Payload({"a": 1})}, ROUND, 60.0), daemon=True
        )
        writing.start()
        pulled_in_time(site)
        writing.join(PATIENCE)


def test_no_letter_is_handed_to_a_connection_of_before_a_restart(waiting, held):
    """A site that waits for messages starts again: the next message reaches the new one."""
    _, endpoint, transport = waiting
    found = []
    with Link(endpoint) as before:
        asking = threading.Thread(target=lambda: found.append(before.pull()), daemon=True)
        asking.start()
        assert held.wait(PATIENCE)
        with Link(endpoint) as again:
            transport.send({again.node: Payload({"a": 1})}, ROUND, 60.0)
            asking.join(PATIENCE)  # whoever held on has had an answer
            pulled_in_time(again)
    assert found == [None]


def test_a_site_that_dies_while_it_waits_is_missed_at_once(waiting, held, tmp_path):
    link, endpoint, _ = waiting
    child = start(tmp_path, "join.log", ["join", endpoint.address, "--data", "digits", "--no-guarantee"])
    try:
        assert held.wait(PATIENCE), child.said
        assert link.get_nodes()
        child.signal(signal.SIGKILL)
        child.ended(time.monotonic() + PATIENCE)
        killed = link._state.clock
        while link.get_nodes():
            assert link._state.clock < killed + ALIVE / 2
            time.sleep(0.05)
    finally:
        child.away()


def test_a_site_that_refuses_the_terms_answers_so_and_ends(waiting, tmp_path):
    link, endpoint, transport = waiting

    def offer():
        while not (nodes := link.get_nodes()):
            time.sleep(0.05)
        transport.send({nodes[0].node_id: Payload({"terms": "[", "round": 0})}, TERMS, 60.0)

    threading.Thread(target=offer, daemon=True).start()
    site = Site(Owner("strict", tmp_path / "strict", reader("digits", part=0)))
    with pytest.raises(JoinError, match="does not take part in the run: malformed field 'terms'"):
        run_site(site, endpoint, 5.0, lambda _words: None)
    (answer,) = transport.replies()
    assert "malformed field 'terms'" in answer.payload.text("refused")


# ---------------------------------------------------------------- what the command line refuses


def test_nothing_is_open_to_the_world_by_mistake(tmp_path):
    from shoal.cli.join import _address
    from shoal.cli.serve import open_link

    with pytest.raises(ConfigError, match="--insecure"):
        open_link("0.0.0.0", 0, None, False, print)
    with pytest.raises(ConfigError, match="--insecure"):
        _address("example.org", None, False)
    assert _address("localhost", None, False) == "localhost:8000"
    assert _address("[::1]:99", None, False) == "[::1]:99"
    assert _address("example.org:99", tmp_path / "ca.pem", False) == "example.org:99"
    (tmp_path / "sites").mkdir()
    with pytest.raises(ConfigError, match="no site could join"):
        open_link("127.0.0.1", 0, tmp_path, False, print)


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
    with pytest.raises(ConfigError, match="not overwritten"):
        make_authority(tmp_path / "keys", ["10.0.0.1"], 30)
    with pytest.raises(ConfigError, match="not overwritten"):
        make_site(tmp_path, "north")
    for name in ("../up", "", "a b", "-x"):
        with pytest.raises(ConfigError, match="name has letters, digits"):
            make_site(tmp_path, name)
    private.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_site_key(private)
    public.chmod(0o600)
    with pytest.raises(ConfigError, match="is not a private key"):
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
