"""A site's end of Flower's Fleet API: one long-lived connection that pulls messages and pushes the answers.

It replaces `flower-supernode`, without starting a process for every message, and runs no code that it receives. It
retries a lost link, since the coordinator may be restarting.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}  # read when flwr is imported

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from shoal.errors import ShoalError
from shoal.federation.messages import InvalidMessage, Payload, pack, unpack
from shoal.federation.site import Site

BEAT = 2.0  # seconds between heartbeats
INTERVAL = 10.0  # seconds: the interval declared to Flower, its minimum
SOON = 0.05  # seconds to wait for the rest of a message
FIRST_WAIT = 0.2  # seconds until the first retry
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
    """

    address: str
    key: ec.EllipticCurvePrivateKey
    ca: bytes | None
    registers: bool


def run_site(site: Site, endpoint: Endpoint, patience: float, log: Callable[[str], None]) -> str:
    """Answer messages until the run is over, and return why it ended.

    Args:
        site: What answers the messages.
        endpoint: The link.
        patience: Seconds to retry an unreachable link.
        log: Called with one line for each event.

    Raises:
        JoinError: The link is unreachable or rejects this site, or the site refuses the terms.
    """
    last, wait, connected = time.monotonic(), FIRST_WAIT, False
    while site.ended is None:
        try:
            with Link(endpoint) as link:
                log(f"connected to {endpoint.address} as node {link.node}")
                connected, wait = True, FIRST_WAIT
                while site.ended is None:
                    link.once(site)
                    last = time.monotonic()
                    if site.refused is not None:
                        raise JoinError(f"this site does not take part in the run: {site.refused}")
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            _refuse_permanent(error, endpoint, connected)
            if not connected and wait == FIRST_WAIT:
                log(f"{endpoint.address} does not answer; retrying for {patience:g} s")
            if time.monotonic() - last > patience:
                raise JoinError(f"{endpoint.address} unreachable for {patience:g} s: {_reason(error)}") from None
            time.sleep(wait)
            wait = min(2 * wait, 2.0)
    return site.ended


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
        raise JoinError(
            f"{endpoint.address} rejected this site: {reason}. Does the coordinator have its key (sites/*.pub)?"
        ) from None


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        with suppress(Exception):
            if (flower := FlowerError.from_json(error.response.text)) is not None:
                return str(flower.message)
    return str(error) or type(error).__name__


class Link:
    """One connection to the link; a thread sends heartbeats while the site trains."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        public = endpoint.key.public_key()
        self._public = public_key_to_bytes(public)
        interceptors: list[ProtobufClientInterceptor] = [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(endpoint.key, public),
        ]
        self._client = FleetHttpClient.from_server_address(
            endpoint.address, endpoint.ca is None, endpoint.ca, interceptors
        )
        self._stop = threading.Event()
        self.node = 0

    def __enter__(self) -> Link:
        try:
            if self._endpoint.registers:
                with suppress(httpx.HTTPStatusError):  # already registered
                    self._client.RegisterNode(RegisterNodeFleetRequest(public_key=self._public))
            asked = ActivateNodeRequest(public_key=self._public, heartbeat_interval=INTERVAL)
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
            self._client.DeactivateNode(DeactivateNodeRequest(node_id=self.node))
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
            self._send(Message(pack(answer), reply_to=message))

    def pull(self) -> Message | None:
        """Return the next message, or None where there is none yet."""
        asked = time.monotonic()
        found = self._client.PullMessages(PullMessagesRequest(node=self._node))
        if found.messages_list:
            return self._received(message_from_proto(found.messages_list[0]), found.message_object_trees[0])
        if time.monotonic() - asked < IDLE:
            time.sleep(IDLE)  # this link does not hold requests
        return None

    @property
    def _node(self) -> Node:
        return Node(node_id=self.node)

    def _received(self, plain: Message, tree: ObjectTree) -> Message | None:
        run, name = plain.metadata.run_id, plain.metadata.message_id
        contents = {}
        for each in iterate_object_tree(tree):
            asked = PullObjectRequest(node=self._node, run_id=run, object_id=each.object_id)
            until = time.monotonic() + MOST_WAIT
            while not (found := self._client.PullObject(asked)).object_available:
                if not found.object_found or time.monotonic() > until:
                    return None  # cancelled by its sender
                time.sleep(SOON)  # the sender is still uploading
            contents[each.object_id] = found.object_content
        confirmed = ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=name)
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
                PushMessagesRequest(
                    node=self._node,
                    messages_list=[message_to_proto(remove_content_from_message(answer))],
                    message_object_trees=[get_object_tree(answer)],
                    clientapp_runtime_list=[0.0],  # the training time stays private
                )
            )
            for name in pushed.objects_to_push:
                self._client.PushObject(
                    PushObjectRequest(
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
                self._client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=INTERVAL))
