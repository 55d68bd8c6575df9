"""Flower's Fleet API as a small ASGI app: its own handlers and its own authentication, without the web framework.

A request for messages is held until there is one, and dropped when its sender has disconnected or restarted: no
message is handed to a dead connection. A request that is larger than an update, or does not declare its length, is
refused before any of it is read.
"""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from flwr.proto import fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, run_pb2
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.error import FlowerError
from flwr.supercore.error.catalog import API_ERROR_MAP
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.superlink.routers.fleet.node_auth import authenticate_node
from flwr.superlink.servicer.fleet import fleet_handlers as handlers
from google.protobuf.message import DecodeError, Message
from starlette.exceptions import HTTPException

from shoal.federation.flower.link_state import LinkState
from shoal.federation.flower.transport import INVALID

HOLD = 8.0  # seconds for which a request for messages is held
TICK = 0.25  # seconds between ticks of the clock
SMALL = 2**20  # bytes that a request may have besides an update

Handler = Callable[..., Message]
ROUTES: dict[str, tuple[type[Message], Handler]] = {
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


class HttpApi:
    """Serves the API; with `closed`, only to nodes with known keys."""

    def __init__(self, state: LinkState, closed: bool) -> None:
        self._state, self._closed = state, closed
        self._ticking: asyncio.Task[None] | None = None
        self._app = SimpleNamespace(state=SimpleNamespace(linkstate_factory=SimpleNamespace(state=lambda: state)))

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Handle one HTTP request (ASGI)."""
        if scope["type"] != "http":
            return
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        received = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        status, kind, body = await self._answered(scope, received, receive)
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        if status in (411, 413):
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _tick(self) -> None:
        """Advance the clock that times out nodes; a pause of this process counts as one tick."""
        while not self._state.closing:
            await asyncio.sleep(TICK)
            self._state.clock += TICK

    async def _answered(self, scope: dict[str, Any], headers: dict[str, str], receive: Any) -> tuple[int, str, bytes]:
        """Status, media type and body."""
        length = headers.get("content-length", "")
        if "transfer-encoding" in headers or not length.isdigit():
            return _problem(411, "a Content-Length is required")
        if int(length) > self._state.most_in_one_request + SMALL:
            self._blame(headers, f"{INVALID}it sent a request of {int(length):,} bytes")
            return _problem(413, "too large")
        found = ROUTES.get(scope["path"].removeprefix("/v1/fleet/"))
        if found is None or not scope["path"].startswith("/v1/fleet/") or scope["method"] != "POST":
            return _problem(404, "this server has only the Fleet API")
        kind, handler = found
        try:
            request = kind.FromString(await _body(receive))
            seen = SimpleNamespace(headers=headers, app=self._app, state=SimpleNamespace(protobuf_request=request))
            authenticate_node(seen)  # type: ignore[arg-type]
            if handler is handlers.pull_messages:
                answer = await self._held(request, receive)
            else:
                answer = self._handled(request, handler)
            return 200, PROTOBUF_MEDIA_TYPE, answer.SerializeToString()
        except DecodeError:
            return _problem(400, "malformed protobuf message")
        except HTTPException as error:
            return _problem(error.status_code, str(error.detail))
        except FlowerError as error:
            known = API_ERROR_MAP[error.code]
            return (
                known.http_status_code,
                "application/json",
                json.dumps(error.to_json(known.public_message)).encode(),
            )
        except Exception:  # no request may stop the coordinator
            return _problem(500, "internal error")

    def _blame(self, headers: dict[str, str], why: str) -> None:
        """Record a bad answer of the node that signed these headers, if any did."""
        with suppress(HTTPException, ValueError, KeyError):
            key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
            claimed = SimpleNamespace(protobuf_request=fleet_pb2.ActivateNodeRequest(public_key=key))
            authenticate_node(SimpleNamespace(headers=headers, app=self._app, state=claimed))  # type: ignore[arg-type]
            node = self._state.get_node_id_by_public_key(key)
            if node is not None:
                self._state.lose(node, why)

    def _handled(self, request: Message, handler: Handler) -> Message:
        state = self._state
        with state.lock:
            if handler is handlers.register_node:
                return handler(request=request, state=state, enable_supernode_auth=self._closed)
            if handler in (handlers.pull_messages, handlers.confirm_message_received):
                return handler(request=request, state=state, store=state.object_store)
            return handler(request=request, state=state)

    async def _held(self, request: Any, receive: Any) -> Message:
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


def _problem(status: int, detail: str) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps({"detail": detail}).encode()
