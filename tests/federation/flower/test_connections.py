"""Connections that never show a key: few at a time, not for long, and rounds go on beside them."""

import asyncio
import os
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

import support
from shoal.errors import RunError
from shoal.federation.federated_run import serve
from shoal.federation.flower import connections
from shoal.federation.flower.connections import Connection, Connections, Events, Limits, _network
from shoal.federation.flower.http_api import HttpApi
from shoal.federation.flower.internals import Node, fleet_pb2
from shoal.federation.flower.link_state import LinkState
from shoal.federation.flower.node import Endpoint, run_site
from shoal.federation.flower.signing import NO_TLS, sign
from shoal.federation.flower.superlink import SuperLink, Tls
from shoal.federation.key_files import read_site_key, read_sites
from shoal.federation.key_making import make_authority, make_site
from shoal.federation.site import Owner, Site
from shoal.federation.site_records import reader
from support.federations import full_cohort

PATIENCE = 120.0  # seconds for all that a test waits for; a quiet machine needs a hundredth


@contextmanager
def few_files(more):
    """So many more files may be opened by this process than it has open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def attack(port, count):
    """Peers in a process of their own: their ends are not among our files."""
    words = [sys.executable, str(Path(support.__file__).parent / "idle_peers.py"), str(port), str(count)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def tls(tmp_path):
    make_authority(tmp_path / "keys", ["127.0.0.1"], 5)
    for number in range(4):
        _, public = make_site(tmp_path, f"site-{number}")
        public.rename(tmp_path / "keys" / "sites" / public.name)
    return Tls(tmp_path / "keys" / "server.pem", tmp_path / "keys" / "server.key")


@pytest.mark.slow
def test_rounds_go_on_under_more_connections_than_there_are_files(tmp_path, tls):
    """The attack that ended a coordinator: 200 peers, 120 files. Sites join and train while it lasts."""
    events, most = [], []
    limits = Limits(unknown=24, per_address=16, reserved=60, seconds=1.0)
    with few_files(120):
        link = SuperLink(
            "127.0.0.1", 0, tls, list(read_sites(tmp_path / "keys").values()), limits=limits,
            on_event=lambda kind, facts: events.append((kind, facts["reason"])),
        )  # fmt: skip
        try:
            with attack(link.port, 200):
                result = federated(tmp_path, link, lambda _: most.append(len(link._connections._unknown)))
        finally:
            link.close()
    assert [line["clients"] for line in result.metrics] == [4] * len(result.metrics)
    assert max(most) <= 16
    assert ("connection-refused", "more than 16 from this address show no key") in events


def federated(folder, link, on_round):
    """A run over this link, with sites in threads."""
    ca = (folder / "keys" / "ca.pem").read_bytes()
    for number in range(4):
        site = Site(Owner(f"site-{number}", folder / f"own-{number}", reader("digits", part=number)))
        endpoint = Endpoint(f"127.0.0.1:{link.port}", read_site_key(folder / f"site-{number}.key"), ca, False)
        threading.Thread(target=run_and_close, args=(site, endpoint), daemon=True).start()
    return serve(link, full_cohort(), runs=folder / "runs", no_guarantee=True, on_round=on_round)


def run_and_close(site, endpoint):
    try:
        run_site(site, endpoint, PATIENCE, lambda _words: None)
    finally:
        site.close()


def test_a_process_that_may_open_too_few_files_says_so():
    with few_files(70), pytest.raises(RunError, match="ulimit -n"):
        SuperLink("127.0.0.1", 0, None, [], limits=Limits(reserved=60))


# ---------------------------------------------------------------- time


@pytest.fixture
def impatient(tmp_path):
    """A link without TLS that waits for nobody, and a site's key."""
    private, _ = make_site(tmp_path, "site")
    link = SuperLink("127.0.0.1", 0, None, [], limits=Limits(seconds=0.1, bytes_per_second=1e9))
    yield link, read_site_key(private)
    link.close()


def answered(port, sent):
    """All that comes back before the other end closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as wire:
        wire.sendall(sent)
        found = b""
        while part := received(wire):
            found += part
        return found


def received(wire):
    try:
        return wire.recv(4096)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("sent", [b"", b"POST /v1/fleet/get-run HTT"], ids=["nothing", "half a line"])
def test_a_peer_that_sends_no_request_is_dropped(impatient, sent):
    link, _ = impatient
    assert answered(link.port, sent) == b""


def test_a_peer_that_does_not_shake_hands_is_dropped(tmp_path, tls):
    keys = list(read_sites(tmp_path / "keys").values())
    link = SuperLink("127.0.0.1", 0, tls, keys, limits=Limits(seconds=0.1))
    try:
        assert answered(link.port, b"") == b""
        assert answered(link.port, b"\x16\x03\x01") == b"", "the first bytes of a handshake"
        with socket.create_connection(("127.0.0.1", link.port), timeout=PATIENCE) as wire:
            context = ssl.create_default_context(cafile=tmp_path / "keys" / "ca.pem")
            with context.wrap_socket(wire, server_hostname="127.0.0.1") as silent:
                assert received(silent) == b""
    finally:
        link.close()


def test_a_signed_body_that_does_not_come_is_not_waited_for(impatient):
    link, key = impatient
    path = "/v1/fleet/get-run"
    signed = sign(key, NO_TLS, link._verifier.link, "POST", path, b"x" * 100)
    headers = "".join(f"{name}: {value}\r\n" for name, value in signed.items())
    found = answered(
        link.port, f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n{headers}\r\nxxx".encode()
    )
    assert found.startswith(b"HTTP/1.1 408")


def test_headers_without_end_are_cut_off(impatient):
    link, _ = impatient
    endless = b"POST /v1/fleet/get-run HTTP/1.1\r\nx: " + b"y" * 2**17
    assert answered(link.port, endless)[:12] in (b"HTTP/1.1 400", b""), "the rest may meet a closed connection"


# ---------------------------------------------------------------- who gives way


class Peers:
    """Connections without a network: what is dropped is noted."""

    def __init__(self, monkeypatch, **limits):
        monkeypatch.setattr(connections, "free_descriptors", lambda: 200)
        self.events = []
        self.held = Connections(Limits(reserved=100, **limits), Events(lambda *event: self.events.append(event)))

    def connect(self, address, port):
        made = Connection((address, port), _network(address), NO_TLS, time.monotonic())
        self.held._make_room(made)
        self.held._unknown[made.peer] = made
        return made

    @property
    def ports(self):
        return [connection.peer[1] for connection in self.held.all]


def test_the_oldest_of_an_address_gives_way(monkeypatch):
    peers = Peers(monkeypatch, per_address=2)
    for port in range(4):
        peers.connect("10.0.0.1", port)
    peers.connect("10.0.0.2", 9)
    assert peers.ports == [2, 3, 9]


def test_the_address_with_the_most_gives_way_where_there_are_too_many(monkeypatch):
    peers = Peers(monkeypatch, unknown=4, per_address=3)
    peers.connect("10.0.0.9", 0)
    for port in (1, 2, 3):
        peers.connect("10.0.0.1", port)
    peers.connect("10.0.0.2", 4)
    assert peers.ports == [0, 2, 3, 4]


def test_known_connections_never_give_way_to_unknown_ones(monkeypatch):
    peers = Peers(monkeypatch, per_address=2)
    assert peers.held.know(peers.connect("10.0.0.1", 0), b"key")
    for port in range(1, 9):
        peers.connect("10.0.0.1", port)
    assert peers.ports == [0, 7, 8]


def test_a_site_has_few_connections_of_which_the_oldest_gives_way(monkeypatch):
    peers = Peers(monkeypatch, per_key=2)
    for port in range(3):
        assert peers.held.know(peers.connect("10.0.0.1", port), b"key")
    assert peers.held.know(peers.connect("10.0.0.1", 3), b"another")
    assert peers.ports == [1, 2, 3]


def test_where_all_are_taken_a_new_site_is_refused_and_the_log_says_what_to_do(monkeypatch):
    peers = Peers(monkeypatch, unknown=98)  # of 100: half for the unknown
    known = [peers.held.know(peers.connect("10.0.0.1", port), b"key %d" % port) for port in range(51)]
    assert known == [True] * 50 + [False]
    ((kind, facts),) = peers.events
    assert (kind, "ulimit -n" in facts["reason"]) == ("connection-refused", True)


def test_addresses_of_one_ipv6_network_count_as_one():
    assert _network("2001:db8::1") == _network("2001:db8::ffff:1") != _network("2001:db8:0:1::1")
    assert _network("::ffff:10.0.0.1") == "10.0.0.1"
    assert _network("fe80::1%eth0") == "fe80::/64"


def test_a_flood_of_events_is_counted_not_passed_on(monkeypatch):
    now, passed = [0.0], []
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    events = Events(lambda kind, facts: passed.append((facts["address"], facts["times"])))
    for _ in range(1000):
        events.report("key-rejected", "10.0.0.1")
    events.report("key-rejected", "10.0.0.2")
    now[0] = connections.QUIET
    events.report("key-rejected", "10.0.0.1")
    assert passed == [("10.0.0.1", 1), ("10.0.0.2", 1), ("10.0.0.1", 1000)]
    for number in range(5000):
        events.report("key-rejected", f"host {number}")
    assert len(events._reported) <= connections.MANY


def test_a_site_that_disconnects_is_forgotten_under_the_lock():
    """The coordinator's thread goes through the nodes seen: where one vanished meanwhile, its run would end."""

    class Seen(dict):
        def pop(self, *given):
            unlocked.append(not state.lock._is_owned())
            return super().pop(*given)

    async def disconnected():
        return {"type": "http.disconnect"}

    state, unlocked = LinkState(), []
    state.last_seen = Seen({1: 0.0})
    request = fleet_pb2.PullMessagesRequest(node=Node(node_id=1))
    asyncio.run(HttpApi(state, True, None, None, None)._held(request, disconnected))
    assert (unlocked, state.last_seen) == ([False], {})
