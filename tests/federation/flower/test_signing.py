"""Every request between a site and the link is signed whole: no part of it can be changed, repeated or passed on."""

import shutil
import ssl
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import httpx
import pytest

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

import flwr.app.message.message as flower_message
from flwr.supercore.date import now

from shoal.errors import RunError
from shoal.federation.flower import node, signing
from shoal.federation.flower.internals import fleet_pb2, message_pb2
from shoal.federation.flower.node import Endpoint, JoinError, Link, retry_wait, run_site
from shoal.federation.flower.signing import KEPT, SKEW, Unauthorized, Verifier, coordinator_identity, sign
from shoal.federation.flower.superlink import SuperLink, Tls, identity
from shoal.federation.flower.transport import Transport
from shoal.federation.key_files import public_pem, read_site_key
from shoal.federation.key_making import make_authority, make_site
from shoal.federation.messages import Payload
from shoal.federation.site import Owner, Site
from shoal.federation.site_records import reader
from shoal.federation.terms import ROUND

PATH = "/v1/fleet/activate-node"
NOW = 1_790_000_000.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two coordinators of one authority, and the keys of two sites and of a stranger."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("one", "two"):
        make_authority(folder / name, ["127.0.0.1"], 5)
    for name in ("north", "south", "stranger"):
        make_site(folder, name)
    return folder


@pytest.fixture(scope="module")
def key(folder):
    return lambda name: read_site_key(folder / f"{name}.key")


def public(private):
    return public_pem(private.public_key())


# ---------------------------------------------------------------- what a signature covers


def checked(headers, keys=None, clock=NOW, method="POST", path=PATH, coordinator="A", link=None):
    verifier = Verifier(keys, lambda: clock)
    if link is not None:
        verifier.link = link
    return verifier.check(headers, coordinator, method, path)


def set_clock(monkeypatch, clock):
    """The clock of whoever signs; the link has its own."""
    monkeypatch.setattr(signing, "time", SimpleNamespace(time=clock))


@pytest.fixture
def at_now(monkeypatch):
    set_clock(monkeypatch, lambda: NOW)


def test_an_unchanged_request_is_accepted_once(key, at_now):
    verifier = Verifier(frozenset([public(key("north"))]), lambda: NOW)
    headers = sign(key("north"), "A", verifier.link, "POST", PATH, b"body")
    signed = verifier.check(headers, "A", "POST", PATH)
    assert (signed.key, signed.body) == (public(key("north")), headers["shoal-body"])
    with pytest.raises(Unauthorized, match="sent before"):
        verifier.check(headers, "A", "POST", PATH)
    verifier.check(sign(key("north"), "A", verifier.link, "POST", PATH, b"body"), "A", "POST", PATH)


@pytest.mark.parametrize(
    "changed",
    [
        {"path": "/v1/fleet/push-messages"},
        {"method": "PUT"},
        {"coordinator": "B"},
        {"link": "f" * 32},
        {"shoal-body": "0" * 64},
        {"shoal-nonce": "0" * 32},
        {"shoal-time": f"{NOW + 1:.3f}"},
        {"shoal-key": "south"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_forged_part_is_found(key, at_now, changed):
    request = {"path": PATH, "method": "POST", "coordinator": "A", "link": "0" * 32}
    headers = sign(key("north"), "A", "0" * 32, "POST", PATH, b"body")
    assert checked(headers, **request)
    other = sign(key("south"), "A", "0" * 32, "POST", PATH, b"body")
    for name, value in changed.items():
        if name in headers:
            headers[name] = other[name] if name == "shoal-key" else value
        else:
            request[name] = value
    with pytest.raises(Unauthorized, match="signature is not valid"):
        checked(headers, **request)


@pytest.mark.parametrize("name", ["shoal-key", "shoal-time", "shoal-nonce", "shoal-body", "shoal-signature"])
def test_a_missing_or_malformed_header_is_refused(key, at_now, name):
    headers = sign(key("north"), "A", "0" * 32, "POST", PATH, b"body")
    for value in ("", "é", "\n", "nan", "0" * 65, "-1"):
        with pytest.raises(Unauthorized):
            checked(headers | {name: value}, link="0" * 32)
    with pytest.raises(Unauthorized, match=f"it lacks {name}"):
        checked({other: value for other, value in headers.items() if other != name}, link="0" * 32)


def test_clocks_may_differ_by_five_minutes_and_no_more(key, at_now):
    headers = sign(key("north"), "A", "0" * 32, "POST", PATH, b"")
    for skew in (-SKEW, -7.0, 7.0, SKEW):
        assert checked(headers, clock=NOW + skew, link="0" * 32)
    for skew, words in ((SKEW + 1, "301 s behind"), (-SKEW - 1, "301 s ahead of")):
        with pytest.raises(Unauthorized, match=f"{words} the coordinator's: it was 2026-09-21 14:13:20 UTC at the"):
            checked(headers, clock=NOW + skew, link="0" * 32)


def test_a_nonce_is_remembered_for_as_long_as_its_time_is_accepted(key, monkeypatch):
    clock = [NOW]
    verifier = Verifier(None, lambda: clock[0])
    set_clock(monkeypatch, lambda: NOW + SKEW)  # a site that is ahead
    headers = sign(key("north"), "A", verifier.link, "POST", PATH, b"")
    verifier.check(headers, "A", "POST", PATH)
    clock[0] = NOW + 2 * SKEW
    with pytest.raises(Unauthorized, match="sent before"):
        verifier.check(headers, "A", "POST", PATH)
    clock[0] += 1
    with pytest.raises(Unauthorized, match="behind the coordinator's"):
        verifier.check(headers, "A", "POST", PATH)
    clock[0] = NOW + KEPT + 1
    set_clock(monkeypatch, lambda: clock[0])
    verifier.check(sign(key("north"), "A", verifier.link, "POST", PATH, b""), "A", "POST", PATH)
    assert sum(map(len, verifier._seen.values())) == 1, "an old nonce is forgotten"


@pytest.mark.parametrize("ahead", [1.0, KEPT + 1, 1e6])
def test_a_request_is_not_accepted_again_after_the_coordinators_clock_went_forth_and_back(key, monkeypatch, ahead):
    clock = [NOW]
    verifier = Verifier(None, lambda: clock[0])
    set_clock(monkeypatch, lambda: clock[0])

    def signed():
        return sign(key("north"), "A", verifier.link, "POST", PATH, b"")

    requests = [signed()]
    verifier.check(requests[0], "A", "POST", PATH)
    clock[0] += ahead
    requests.append(signed())
    verifier.check(requests[1], "A", "POST", PATH)  # forgets the first, where that is old by now
    for clock[0] in (NOW, NOW + ahead):
        for request in requests:
            with pytest.raises(Unauthorized):
                verifier.check(request, "A", "POST", PATH)
        verifier.check(signed(), "A", "POST", PATH)


# ---------------------------------------------------------------- over TLS, with the link


@pytest.fixture
def link(folder, key):
    events = []
    made = SuperLink(
        "127.0.0.1",
        0,
        Tls(folder / "one" / "server.pem", folder / "one" / "server.key"),
        [public(key("north")), public(key("south"))],
        on_event=lambda kind, facts: events.append((kind, facts)),
    )
    made.events = events
    yield made
    made.close()


def certificate(folder, name):
    return coordinator_identity(ssl.PEM_cert_to_DER_cert((folder / name / "server.pem").read_text()))


def sent(folder, link, headers, body, path=PATH):
    """What the link answers to a request with these headers."""
    with httpx.Client(verify=ssl.create_default_context(cafile=folder / "one" / "ca.pem")) as client:
        return client.post(f"https://127.0.0.1:{link.port}{path}", content=body, headers=headers, timeout=60.0)


def captured(folder, key, link, body, path=PATH, name="north"):
    return sign(key(name), certificate(folder, "one"), link._verifier.link, "POST", path, body)


def test_captured_headers_serve_for_nothing_else(folder, key, link):
    body = fleet_pb2.ActivateNodeRequest(public_key=public(key("north")), heartbeat_interval=10.0).SerializeToString()
    headers = captured(folder, key, link, body)
    assert sent(folder, link, headers, body).status_code == 200
    assert sent(folder, link, headers, body).json()["detail"] == "the request was sent before"
    headers = captured(folder, key, link, body)
    answer = sent(folder, link, headers, b"", "/v1/fleet/pull-messages")
    assert (answer.status_code, "signature is not valid" in answer.json()["detail"]) == (401, True)
    assert sent(folder, link, headers, body + b"\0").json()["detail"] == "its body is not the one that was signed"
    assert [kind for kind, _ in link.events] == ["authentication-failed"], "one event of one kind, for now"
    assert link.events[0][1] == {
        "address": "127.0.0.1",
        "reason": "the request was sent before",
        "path": PATH,
        "key": identity(public(key("north"))),
        "times": 1,
    }


def test_a_key_that_may_not_join_is_an_event(folder, key, link):
    body = fleet_pb2.ActivateNodeRequest(public_key=public(key("stranger"))).SerializeToString()
    answer = sent(folder, link, captured(folder, key, link, body, name="stranger"), body)
    assert answer.status_code == 401
    ((kind, facts),) = link.events
    assert (kind, facts["key"]) == ("key-rejected", identity(public(key("stranger"))))


def test_no_body_is_read_before_its_sender_is_known(folder, key, link, monkeypatch):
    """Nor is anything parsed: a stranger's request ends at its headers."""

    def unread(*_):
        raise AssertionError("a stranger's body was read")

    monkeypatch.setattr("shoal.federation.flower.http_api._body", unread)
    body = b"x" * 1000
    for headers in ({}, captured(folder, key, link, body, name="stranger"), captured(folder, key, link, body, "/")):
        assert sent(folder, link, headers, body).status_code == 401
    assert sent(folder, link, captured(folder, key, link, body), body).status_code == 500, "a site's body would be"


def test_a_site_speaks_for_itself_only(folder, key, link):
    """A valid signature of one site, for another's node, key or answer."""
    ca = (folder / "one" / "ca.pem").read_bytes()
    own, other = (Endpoint(f"127.0.0.1:{link.port}", key(name), ca, registers=False) for name in ("north", "south"))
    with Link(own) as north, Link(other) as south:
        answer = message_pb2.Message()
        answer.metadata.src_node_id = south.node
        for path, request in (
            ("activate-node", fleet_pb2.ActivateNodeRequest(public_key=public(key("south")))),
            ("pull-messages", fleet_pb2.PullMessagesRequest(node=south._node)),
            ("deactivate-node", fleet_pb2.DeactivateNodeRequest(node_id=south.node)),
            ("push-messages", fleet_pb2.PushMessagesRequest(node=north._node, messages_list=[answer])),
        ):
            body, path = request.SerializeToString(), f"/v1/fleet/{path}"
            refused = sent(folder, link, captured(folder, key, link, body, path), body, path)
            assert (refused.status_code, "for another" in refused.json()["detail"]) == (401, True)
        assert len(link.get_nodes()) == 2


def test_another_coordinator_of_the_same_address_cannot_pass_requests_on(folder, key, link):
    """A site notices on the next connection; what it signed for the other is refused by this one."""
    other = SuperLink(
        "127.0.0.1", 0, Tls(folder / "two" / "server.pem", folder / "two" / "server.key"), [public(key("north"))]
    )
    try:
        both = b"".join((folder / name / "ca.pem").read_bytes() for name in ("one", "two"))
        with Link(Endpoint(f"127.0.0.1:{other.port}", key("north"), both, registers=False)) as misled:
            assert misled.coordinator == certificate(folder, "two")
            misled._client._base_url = f"https://127.0.0.1:{link.port}"  # from here on another answers
            with pytest.raises(httpx.ConnectError, match="key has changed"):
                misled.pull()
            misled._client._base_url = f"https://127.0.0.1:{other.port}"
        body = fleet_pb2.ActivateNodeRequest(public_key=public(key("north"))).SerializeToString()
        headers = sign(key("north"), certificate(folder, "two"), link._verifier.link, "POST", PATH, body)
        assert sent(folder, link, headers, body).status_code == 401
    finally:
        other.close()


def test_a_request_does_not_outlive_the_coordinators_restart(folder, key, link):
    body = fleet_pb2.ActivateNodeRequest(public_key=public(key("north"))).SerializeToString()
    headers = captured(folder, key, link, body)
    tls = Tls(folder / "one" / "server.pem", folder / "one" / "server.key")
    again = SuperLink("127.0.0.1", 0, tls, [public(key("north"))])
    try:
        assert sent(folder, again, headers, body).status_code == 401
    finally:
        again.close()


def test_keys_come_and_go_while_the_link_runs(folder, key, link):
    ca = (folder / "one" / "ca.pem").read_bytes()
    own, late = (Endpoint(f"127.0.0.1:{link.port}", key(name), ca, registers=False) for name in ("north", "stranger"))
    transport = Transport(link, 2**20)
    with Link(own) as north:
        sent = transport.send({north.node: Payload({"a": 1})}, ROUND, 60.0)
        assert north.pull() is not None
        link.allow([public(key("south")), public(key("stranger"))])
        assert not link.get_nodes()
        (lost,) = transport.replies()
        assert (lost.message_id, lost.problem) == (next(iter(sent)), "the site's key may not join any more")
        with pytest.raises(httpx.HTTPError):
            north.pull()
        with Link(late) as new:
            assert [each.node_id for each in link.get_nodes()] == [new.node]
    with pytest.raises(httpx.HTTPStatusError), Link(own):
        pass
    link.allow([public(key("north"))])
    with Link(own) as back:
        assert back.node == north.node


def test_a_new_certificate_is_used_from_the_next_connection_on(folder, key, tmp_path):
    both = b"".join((folder / name / "ca.pem").read_bytes() for name in ("one", "two"))
    tls = Tls(tmp_path / "server.pem", tmp_path / "server.key")
    for name in ("server.pem", "server.key"):
        shutil.copy(folder / "one" / name, tmp_path)
    link = SuperLink("127.0.0.1", 0, tls, [public(key("north")), public(key("south"))])
    own = Endpoint(f"127.0.0.1:{link.port}", key("north"), both, registers=False)
    other = Endpoint(own.address, key("south"), both, registers=False)
    transport = Transport(link, 2**20)
    try:
        with Link(own) as before:
            shutil.copy(folder / "two" / "server.pem", tmp_path)
            with pytest.raises(RunError, match="cannot be used"):
                link.reload_certificate()  # its key is another's
            shutil.copy(folder / "two" / "server.key", tmp_path)
            link.reload_certificate()
            with Link(other) as after:
                assert before.coordinator == certificate(folder, "one")
                assert after.coordinator == certificate(folder, "two")
                transport.send(dict.fromkeys((before.node, after.node), Payload({"a": 1})), ROUND, 60.0)
                assert before.pull() is not None, "open connections go on"
                assert after.pull() is not None
    finally:
        link.close()


# ---------------------------------------------------------------- clocks


class Echo(Site):
    """A site that answers one message, and then ends."""

    def answer(self, kind, message):
        self.ended = "done"
        return Payload({"b": 2})


class Skewed(Echo):
    """A site whose clock is wrong by so many seconds; Flower dates its answer by it."""

    def __init__(self, owner, monkeypatch, seconds):
        super().__init__(owner)
        self._set = monkeypatch.setattr, seconds
        set_clock(monkeypatch, lambda: time.time() + seconds)

    def answer(self, kind, message):
        setattr_, seconds = self._set
        setattr_(flower_message, "now", lambda: now() + timedelta(seconds=seconds))
        return super().answer(kind, message)


def joined(site, folder, key, link):
    endpoint = Endpoint(f"127.0.0.1:{link.port}", key("north"), (folder / "one" / "ca.pem").read_bytes(), False)
    try:
        return run_site(site, endpoint, 5.0, lambda _words: None)
    finally:
        site.close()


@pytest.mark.parametrize("seconds", [-290, 290])
def test_a_site_whose_clock_is_wrong_by_almost_five_minutes_takes_part(
    folder, key, link, tmp_path, monkeypatch, seconds
):
    """Its answer counts too, although by its own clock the message has expired, or is still to be sent."""
    transport = Transport(link, 2**20)

    def coordinate():
        while not (nodes := link.get_nodes()):
            time.sleep(0.01)
        transport.send({nodes[0].node_id: Payload({"a": 1})}, ROUND, 60.0)

    threading.Thread(target=coordinate, daemon=True).start()
    site = Skewed(Owner("skewed", tmp_path, reader("digits", part=0)), monkeypatch, seconds)
    assert joined(site, folder, key, link) == "done"
    (answer,) = transport.replies()
    assert answer.payload is not None, answer.problem
    assert answer.payload.number("b") == 2


def test_beyond_that_both_clocks_are_named(folder, key, link, tmp_path, monkeypatch):
    site = Skewed(Owner("skewed", tmp_path, reader("digits", part=0)), monkeypatch, 3600)
    with pytest.raises(JoinError, match=r"3,600 s ahead of .* UTC at the site and .* UTC at the coordinator"):
        joined(site, folder, key, link)


# ---------------------------------------------------------------- patience


class Clock:
    """Time that passes only when somebody sleeps or works."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_patience_counts_from_the_first_failure_of_a_series(folder, key, tmp_path, monkeypatch):
    """A site that trained for longer than its patience has all of it left when the link fails."""
    clock, tries = Clock(), []
    monkeypatch.setattr(node, "time", clock)
    site = Echo(Owner("patient", tmp_path, reader("digits", part=0)))

    class Failing:
        """A link that works for two exchanges of an hour each, and then never again."""

        node = 1

        def __init__(self, _endpoint):
            tries.append(clock.now)

        def __enter__(self):
            if len(tries) > 1:
                raise httpx.ConnectError("refused")
            return self

        def __exit__(self, *_):
            pass

        def once(self, _site):
            clock.now += 3600
            if clock.now > 2 * 3600:
                raise httpx.ReadError("cut")

    monkeypatch.setattr(node, "Link", Failing)
    endpoint = Endpoint("127.0.0.1:1", key("north"), None, registers=False)
    with pytest.raises(JoinError, match="unreachable for 60 s: refused"):
        run_site(site, endpoint, 60.0, lambda _words: None)
    site.close()
    assert tries[1] == pytest.approx(3 * 3600, abs=1), "it tries again at once"
    assert 60 < clock.now - 3 * 3600 < 65


def test_retries_slow_down_with_the_time_that_the_link_has_failed():
    """A coordinator that starts is found soon; one that is away for long is not asked all the time."""
    assert [retry_wait(since) for since in (0.0, 3.0, 10.0, 40.0, 1e6)] == [0.2, 0.2, 0.5, 2.0, 2.0]
