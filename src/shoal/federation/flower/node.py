"""A site's end of Flower's Fleet API: one long-lived connection that pulls messages and pushes the answers.

It replaces `flower-supernode`, without starting a process for every message, and runs no code that it receives. It
retries a lost link, since the coordinator may be restarting.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.errors import ShoalError
from shoal.federation.flower.internals import (
    FleetHttpClient,
    Message,
    Node,
    ProtobufCall,
    ProtobufRequestContext,
    fleet_pb2,
    flower_interceptors,
    get_all_nested_objects,
    get_object_tree,
    heartbeat_pb2,
    inflate_object_from_contents,
    iterate_object_tree,
    message_from_proto,
    message_pb2,
    message_to_proto,
    no_object_id_recompute,
    remove_content_from_message,
)
from shoal.federation.flower.signing import GREETING, NO_TLS, coordinator_identity, sign
from shoal.federation.key_files import public_pem
from shoal.federation.messages import InvalidMessage, Payload, pack, unpack
from shoal.federation.site import Site

BEAT = 2.0  # seconds between heartbeats
INTERVAL = 10.0  # seconds: the interval declared to Flower, its minimum
SOON = 0.05  # seconds to wait for the rest of a message
FIRST_WAIT, LONGEST_WAIT = 0.2, 2.0  # seconds between retries
IDLE = 0.5  # seconds between requests where a link does not hold them
MOST_BYTES = 2**31
MOST_WAIT = 600.0  # seconds for a part of a message


class JoinError(ShoalError):
    """The link is unreachable or rejects this site, or the site refuses the terms."""


@dataclass(frozen=True)
class Endpoint:
    """The link's address and this site's credentials.

    Attributes:
        address: HOST:PORT of the link.
        key: The site's private key.
        ca: The authority's certificate (PEM); None without TLS.
        registers: Whether the site registers its own key, where the link accepts any site.
        flower: Whether the link is Flower's own SuperLink, for which a site signs timestamps only.
    """

    address: str
    key: ec.EllipticCurvePrivateKey
    ca: bytes | None
    registers: bool
    flower: bool = False


def run_site(site: Site, endpoint: Endpoint, patience: float, log: Callable[[str], None]) -> str:
    """Answer messages until the run is over, and return why it ended.

    Args:
        site: What answers the messages.
        endpoint: The link.
        patience: Seconds to retry an unreachable link, from the first failure on.
        log: Called with one line for each event.

    Raises:
        JoinError: The link is unreachable or rejects this site, or the site refuses the terms.
    """
    failing, connected = None, False  # failing: when the present series of failures began
    while site.ended is None:
        try:
            with Link(endpoint) as link:
                log(f"connected to {endpoint.address} as node {link.node}")
                connected = True
                while site.ended is None:
                    link.once(site)
                    failing = None
                    if site.refused is not None:
                        raise JoinError(f"this site does not take part in the run: {site.refused}")
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            _refuse_permanent(error, endpoint, connected)
            if not connected and failing is None:
                log(f"{endpoint.address} does not answer; retrying for {patience:g} s")
            failing = time.monotonic() if failing is None else failing
            since = time.monotonic() - failing
            if since > patience:
                raise JoinError(f"{endpoint.address} unreachable for {patience:g} s: {_reason(error)}") from None
            time.sleep(retry_wait(since))
    return site.ended


def retry_wait(since: float) -> float:
    """Return the seconds until the next retry, where the link has failed for so long: a twentieth of that.

    A coordinator that is only starting is found soon after it listens.
    """
    return min(max(FIRST_WAIT, since / 20), LONGEST_WAIT)


def _refuse_permanent(error: Exception, endpoint: Endpoint, connected: bool) -> None:
    """Raise a JoinError for errors that a retry cannot fix."""
    reason = _reason(error)
    if "certificate has expired" in reason:
        if connected:  # it may be renewed any moment
            return
        raise JoinError(
            f"the certificate of {endpoint.address} has expired: its operator must run `shoal keys renew`"
        ) from None
    if "CERTIFICATE_VERIFY_FAILED" in reason or "certificate verify failed" in reason:
        raise JoinError(
            f"{endpoint.address} presented a certificate that --ca did not sign, or one for another address: {reason}"
        ) from None
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError) and not connected and endpoint.ca is None:
        raise JoinError(f"{endpoint.address} does not use plain HTTP; if it uses TLS, give --ca") from None
    if isinstance(error, httpx.ConnectError) and "WRONG_VERSION_NUMBER" in reason:
        raise JoinError(f"{endpoint.address} does not use TLS; on loopback or with --insecure, omit --ca") from None
    if isinstance(error, httpx.HTTPStatusError) and not connected and error.response.status_code < 500:
        if error.request.url.path == GREETING:
            reason = "it is no `shoal serve`; if it is Flower's own SuperLink, give --flower-superlink"
        elif endpoint.flower and error.response.status_code == 401:
            theirs, ours = error.response.headers.get("date"), format_datetime(datetime.now(UTC), usegmt=True)
            reason += (
                f". Is its key registered (`flwr supernode register`)? Are the clocks right? It is {theirs} there "
                f"and {ours} here; Flower accepts at most 5 s ahead"
            )
        raise JoinError(f"{endpoint.address} rejected this site: {reason}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        with suppress(ValueError, KeyError, TypeError):
            return str(json.loads(error.response.text)["detail"])[:500]
    return str(error) or type(error).__name__


class SignedRequests:
    """Signs the requests of a client for the coordinator that it is connected to.

    Before the first it asks for the link's number. Every connection must have the coordinator's public key that the
    first one had, so that nobody in between can pass on what was signed for another.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self._link = ""
        self.coordinator = ""

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Sign a request."""
        request = context.request
        if not self._link:
            self._greet(context, call_next)
        signed = sign(self._key, self.coordinator, self._link, request.method, request.url.path, request.content)
        request.headers.update(signed)
        request.extensions["trace"] = self._check_certificate
        return call_next(context)

    def _greet(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> None:
        asked = context.request
        request = httpx.Request("GET", asked.url.copy_with(path=GREETING), extensions=dict(asked.extensions))
        response = call_next(replace(context, request=request))
        response.raise_for_status()
        self.coordinator = _peer_identity(response.extensions["network_stream"])
        try:
            self._link = str(response.json()["link"])
        except (ValueError, KeyError, TypeError):
            raise httpx.RemoteProtocolError("malformed greeting", request=request) from None

    def _check_certificate(self, event: str, facts: dict[str, Any]) -> None:
        """Called by httpx as it works: refuse a new connection to another coordinator."""
        if event.endswith("start_tls.complete") and _peer_identity(facts["return_value"]) != self.coordinator:
            facts["return_value"].close()
            raise httpx.ConnectError("the coordinator's key has changed")


def _peer_identity(stream: Any) -> str:
    tls = stream.get_extra_info("ssl_object")
    return NO_TLS if tls is None else coordinator_identity(tls.getpeercert(True))


class Link:
    """One connection to the link; a thread sends heartbeats while the site trains."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._public = public_pem(endpoint.key.public_key())
        self._signed = SignedRequests(endpoint.key)
        interceptors = flower_interceptors(endpoint.key) if endpoint.flower else [self._signed]
        self._client = FleetHttpClient.from_server_address(
            endpoint.address, endpoint.ca is None, endpoint.ca, interceptors
        )
        self._stop = threading.Event()
        self.node = 0

    @property
    def coordinator(self) -> str:
        """The SHA-256 of the coordinator's public key; empty for Flower's own SuperLink."""
        return self._signed.coordinator

    def __enter__(self) -> Link:
        try:
            if self._endpoint.registers:
                with suppress(httpx.HTTPStatusError):  # already registered
                    self._client.RegisterNode(fleet_pb2.RegisterNodeFleetRequest(public_key=self._public))
            asked = fleet_pb2.ActivateNodeRequest(public_key=self._public, heartbeat_interval=INTERVAL)
            self.node = self._client.ActivateNode(asked).node_id
        except BaseException:
            self._client.close()
            raise
        self._heartbeats = threading.Thread(target=self._beat, daemon=True)
        self._heartbeats.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        with suppress(httpx.HTTPError):
            self._client.DeactivateNode(fleet_pb2.DeactivateNodeRequest(node_id=self.node))
        self._heartbeats.join(BEAT)
        self._client.close()

    def once(self, site: Site) -> None:
        """Request a message, and answer it if there is one."""
        if (message := self.pull()) is not None:
            try:
                payload = unpack(message.content, MOST_BYTES)
                answer = site.answer(message.metadata.message_type, payload)
            except InvalidMessage as problem:
                answer = Payload({"refused": str(problem)})
            except Exception as problem:  # no message may stop the site
                answer = Payload({"refused": f"malformed message: {type(problem).__name__}"})
            self._send(_reply(answer, message))

    def pull(self) -> Message | None:
        """Return the next message, or None where there is none yet."""
        asked = time.monotonic()
        found = self._client.PullMessages(fleet_pb2.PullMessagesRequest(node=self._node))
        if found.messages_list:
            return self._received(message_from_proto(found.messages_list[0]), found.message_object_trees[0])
        if time.monotonic() - asked < IDLE:
            time.sleep(IDLE)  # this link does not hold requests
        return None

    @property
    def _node(self) -> Node:
        return Node(node_id=self.node)

    def _received(self, plain: Message, tree: message_pb2.ObjectTree) -> Message | None:
        run, name = plain.metadata.run_id, plain.metadata.message_id
        contents = {}
        for each in iterate_object_tree(tree):
            asked = message_pb2.PullObjectRequest(node=self._node, run_id=run, object_id=each.object_id)
            until = time.monotonic() + MOST_WAIT
            while not (found := self._client.PullObject(asked)).object_available:
                if not found.object_found or time.monotonic() > until:
                    return None  # cancelled by its sender
                time.sleep(SOON)  # the sender is still uploading
            contents[each.object_id] = found.object_content
        confirmed = message_pb2.ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=name)
        self._client.ConfirmMessageReceived(confirmed)
        try:
            message = inflate_object_from_contents(name, contents)
        except Exception:  # treated as cancelled
            return None
        if not isinstance(message, Message):
            return None
        message.metadata.__dict__["_message_id"] = name
        return message

    def _send(self, answer: Message) -> None:
        with no_object_id_recompute():
            answer.metadata.__dict__["_message_id"] = answer.object_id
            objects = get_all_nested_objects(answer)
            pushed = self._client.PushMessages(
                fleet_pb2.PushMessagesRequest(
                    node=self._node,
                    messages_list=[message_to_proto(remove_content_from_message(answer))],
                    message_object_trees=[get_object_tree(answer)],
                    clientapp_runtime_list=[0.0],  # the training time stays private
                )
            )
            for name in pushed.objects_to_push:
                self._client.PushObject(
                    message_pb2.PushObjectRequest(
                        node=self._node,
                        run_id=answer.metadata.run_id,
                        object_id=name,
                        object_content=objects[name].deflate(),
                        session_id=pushed.session_id,
                    )
                )

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            with suppress(httpx.HTTPError):
                self._client.SendNodeHeartbeat(
                    heartbeat_pb2.SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=INTERVAL)
                )


def _reply(answer: Payload, message: Message) -> Message:
    """An answer that is dated like its message, whatever this machine's clock says: it expires when that does."""
    made = Message(pack(answer), reply_to=message)
    made.metadata.created_at, made.metadata.ttl = message.metadata.created_at, message.metadata.ttl
    return made
