"""Flower's Fleet API as a small ASGI app: its own handlers, without the web framework, and our own authentication.

A request is checked in the order of what it costs: path, length, signature, then the body and its hash, and only then
is anything parsed. A request for messages is held until there is one, and dropped when its sender has disconnected or
restarted: no message is handed to a dead connection.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Protobuf

from shoal.federation.flower.connections import Connection, Connections, Events
from shoal.federation.flower.internals import fleet_pb2, heartbeat_pb2, message_pb2
from shoal.federation.flower.internals.link import (
    API_ERROR_MAP,
    PROTOBUF_MEDIA_TYPE,
    FlowerError,
    fab_pb2,
    run_pb2,
)
from shoal.federation.flower.internals.link import fleet_handlers as handlers
from shoal.federation.flower.link_state import LinkState
from shoal.federation.flower.signing import GREETING, Unauthorized, Verifier
from shoal.federation.flower.transport import INVALID, key_identity

HOLD = 8.0  # seconds for which a request for messages is held
TICK = 0.25  # seconds between ticks of the clock
SMALL = 2**20  # bytes that a request may have besides an update
FEW = 2**12  # bytes that a request may have whose sender is no node yet
PREFIX = "/v1/fleet/"

Handler = Callable[..., Protobuf]
ROUTES: dict[str, tuple[type[Protobuf], Handler]] = {
    "register-node": (fleet_pb2.RegisterNodeFleetRequest, handlers.register_node),
    "activate-node": (fleet_pb2.ActivateNodeRequest, handlers.activate_node),
    "deactivate-node": (fleet_pb2.DeactivateNodeRequest, handlers.deactivate_node),
    "send-node-heartbeat": (heartbeat_pb2.SendNodeHeartbeatRequest, handlers.send_node_heartbeat),
    "pull-messages": (fleet_pb2.PullMessagesRequest, handlers.pull_messages),
    "push-messages": (fleet_pb2.PushMessagesRequest, handlers.push_messages),
    "get-run": (run_pb2.GetRunRequest, handlers.get_run),
    "get-fab": (fab_pb2.GetFabRequest, handlers.get_fab),
    "push-object": (message_pb2.PushObjectRequest, handlers.push_object),
    "pull-object": (message_pb2.PullObjectRequest, handlers.pull_object),
    "confirm-message-received": (message_pb2.ConfirmMessageReceivedRequest, handlers.confirm_message_received),
}


Answer = tuple[int, str, bytes]  # status, media type and body


class Problem(Exception):
    """A request that is answered with an HTTP error; the rest of it is not read."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.answer: Answer = status, "application/json", json.dumps({"detail": detail}).encode()


class HttpApi:
    """Serves the API to nodes whose requests the verifier accepts; with `closed`, no node registers itself."""

    def __init__(
        self, state: LinkState, closed: bool, verifier: Verifier, connections: Connections, events: Events
    ) -> None:
        self._state, self._closed, self._verifier = state, closed, verifier
        self._connections, self._events = connections, events
        self._ticking: asyncio.Task[None] | None = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Handle one HTTP request (ASGI)."""
        connection = self._connections.of(scope["client"]) if scope["type"] == "http" else None
        if connection is None:  # it has been dropped
            return
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        connection.busy += 1
        try:
            status, kind, body = await self._answered(connection, scope, headers, receive)
            answered = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
            if status != 200:
                answered.append((b"connection", b"close"))
            await send({"type": "http.response.start", "status": status, "headers": answered})
            await send({"type": "http.response.body", "body": body})
        finally:
            connection.busy -= 1

    async def _tick(self) -> None:
        """Advance the clock that times out nodes; a pause of this process counts as one tick."""
        while not self._state.closing:
            await asyncio.sleep(TICK)
            self._state.clock += TICK

    async def _answered(
        self, connection: Connection, scope: dict[str, Any], headers: dict[str, str], receive: Any
    ) -> Answer:
        try:
            if (scope["method"], scope["path"]) == ("GET", GREETING):
                return 200, "application/json", json.dumps({"link": self._verifier.link}).encode()
            found = ROUTES.get(scope["path"].removeprefix(PREFIX))
            if found is None or not scope["path"].startswith(PREFIX) or scope["method"] != "POST":
                raise Problem(404, "this server has only the Fleet API")
            kind, handler = found
            key, body = await self._authenticated(connection, scope["path"], headers, receive)
            request = kind.FromString(body)
            self._authorize(request, key)
            if handler is handlers.pull_messages:
                answer = await self._held(request, receive)
            else:
                answer = self._handled(request, handler)
            return 200, PROTOBUF_MEDIA_TYPE, answer.SerializeToString()
        except DecodeError:
            return Problem(400, "malformed protobuf message").answer
        except Problem as problem:
            return problem.answer
        except Unauthorized as problem:
            facts = {"reason": str(problem), "path": scope["path"], "key": key_identity(problem.key)}
            self._events.report(problem.kind, connection.address, **facts)
            return Problem(401, str(problem)).answer
        except FlowerError as error:
            known = API_ERROR_MAP[error.code]
            return Problem(known.http_status_code, str(known.public_message)).answer
        except Exception:  # no request may stop the coordinator
            return Problem(500, "internal error").answer

    async def _authenticated(
        self, connection: Connection, path: str, headers: dict[str, str], receive: Any
    ) -> tuple[bytes, bytes]:
        """The public key that signed a request, and its body, of which nothing is read before that."""
        length = headers.get("content-length", "")
        if "transfer-encoding" in headers or not length.isdigit():
            raise Problem(411, "a Content-Length is required")
        too_large = int(length) > self._state.most_in_one_request + SMALL
        try:
            signed = self._verifier.check(headers, connection.coordinator, "POST", path)
        except Unauthorized:
            if too_large:
                raise Problem(413, "too large") from None
            raise
        node = self._state.get_node_id_by_public_key(signed.key)
        if too_large or (node is None and int(length) > FEW):
            if node is not None:
                self._state.lose(node, f"{INVALID}it sent a request of {int(length):,} bytes")
            raise Problem(413, "too large")
        if not self._connections.know(connection, signed.key):
            raise Problem(503, "all connections are taken")
        try:
            async with asyncio.timeout(self._connections.limits.patience(int(length))):
                body = await _body(receive)
        except TimeoutError:
            self._events.report("connection-refused", connection.address, reason="its request came too slowly")
            raise Problem(408, "the request came too slowly") from None
        if hashlib.sha256(body).hexdigest() != signed.body:
            raise Unauthorized("its body is not the one that was signed", key=signed.key)
        return signed.key, body

    def _authorize(self, request: Any, key: bytes) -> None:
        """Refuse a request on behalf of another key or node than that which signed it."""
        if isinstance(request, fleet_pb2.RegisterNodeFleetRequest | fleet_pb2.ActivateNodeRequest):
            if request.public_key != key:
                raise Unauthorized("it is for another key than the one that signed it", key=key)
            return
        node = request.node.node_id if hasattr(request, "node") else request.node_id
        senders = {each.metadata.src_node_id for each in getattr(request, "messages_list", ())}
        if self._state.get_node_id_by_public_key(key) != node or senders - {node}:
            raise Unauthorized("it is for another node than that of the key that signed it", key=key)

    def _handled(self, request: Protobuf, handler: Handler) -> Protobuf:
        state = self._state
        with state.lock:
            if handler is handlers.register_node:
                return handler(request=request, state=state, enable_supernode_auth=self._closed)
            if handler in (handlers.pull_messages, handlers.confirm_message_received):
                return handler(request=request, state=state, store=state.object_store)
            return handler(request=request, state=state)

    async def _held(self, request: Any, receive: Any) -> Protobuf:
        """The next message for a node, as soon as there is one, or none after HOLD seconds."""
        state, node, until = self._state, request.node.node_id, time.monotonic() + HOLD
        start = state.starts[node]
        closed = asyncio.ensure_future(_disconnected(receive))
        try:
            while state.starts[node] == start and not closed.done():
                news = state.news()
                answer: Any = self._handled(request, handlers.pull_messages)
                left = until - time.monotonic()
                if answer.messages_list or left <= 0 or state.closing:
                    return answer
                await asyncio.wait({news, closed}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            with state.lock:  # the coordinator's thread may be going through these
                if state.starts[node] == start:
                    state.last_seen.pop(node, None)
            return fleet_pb2.PullMessagesResponse()
        finally:
            closed.cancel()


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(receive: Any) -> bytes:
    parts = []
    while True:
        event = await receive()
        if event["type"] != "http.request":
            raise DecodeError("the sender disconnected")
        parts.append(event.get("body", b""))
        if not event.get("more_body"):
            return b"".join(parts)
