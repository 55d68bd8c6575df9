"""Messages to sites and their answers, over any Flower grid: Flower's own, that of `shoal serve`, or a test's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shoal.federation.messages import InvalidMessage, Payload, pack, unpack

if TYPE_CHECKING:
    from flwr.app import Message

INVALID = "invalid: "  # the prefix of errors that are the site's fault


class Node(Protocol):
    """The part of Flower's NodeInfo that is used."""

    node_id: int
    public_key: bytes


class Grid(Protocol):
    """The part of Flower's Grid that is used."""

    def get_nodes(self) -> Iterable[Node]:
        """The connected nodes."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and return their ids."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The answers to these messages that have arrived."""


@dataclass(frozen=True)
class Reply:
    """The answer to a message, or the reason why there is none."""

    message_id: str
    node: int
    payload: Payload | None
    problem: str | None = None
    lost: bool = False
    size: int = 0


class Transport:
    """Sends messages, and keeps track of those that are not answered yet."""

    def __init__(self, grid: Grid, most_bytes: int) -> None:
        self._grid, self._most_bytes = grid, most_bytes
        if (limit := getattr(grid, "limit", None)) is not None:
            limit(most_bytes)
        self._open: dict[str, int] = {}

    def connected(self) -> dict[int, str]:
        """The connected nodes, each with its identity: the hash of its public key."""
        return {node.node_id: _identity(node) for node in self._grid.get_nodes()}

    def send(self, payloads: dict[int, Payload], kind: str, ttl: float) -> dict[str, int]:
        """Send a message, valid for `ttl` seconds, to each node; return the nodes by message id."""
        from flwr.app import Message

        nodes = list(payloads)
        packed: dict[int, object] = {}
        messages = [Message(pack(payloads[node], packed), node, kind, ttl=ttl) for node in nodes]
        ids = list(self._grid.push_messages(messages)) if messages else []
        sent = {message_id: node for message_id, node in zip(ids, nodes, strict=False) if message_id}
        self._open |= sent
        return sent

    def replies(self) -> list[Reply]:
        """The answers that have arrived since the last call, except those to cancelled messages."""
        if not self._open:
            return []
        found = []
        for message in self._grid.pull_messages(list(self._open)):
            message_id = message.metadata.reply_to_message_id
            node = self._open.pop(message_id, None)  # the sender of an error is the SuperLink, not the node
            if node is not None:
                found.append(self._read(message_id, node, message))
        return found

    def allow(self, keys: list[bytes]) -> bool:
        """Replace the public keys (PEM) of the sites that may join; False where the grid does not decide who may."""
        allow = getattr(self._grid, "allow", None)
        if allow is not None:
            allow(keys)
        return allow is not None

    def cancel(self, message_ids: Iterable[str]) -> None:
        """Discard any answer to these messages."""
        ids = [message_id for message_id in message_ids if self._open.pop(message_id, None) is not None]
        forget = getattr(self._grid, "forget", None)
        if forget is not None and ids:
            forget(ids)

    def _read(self, message_id: str, node: int, message: Message) -> Reply:
        if message.has_error():
            reason = str(message.error.reason)[:200]
            return Reply(message_id, node, None, reason.removeprefix(INVALID), lost=not reason.startswith(INVALID))
        try:
            payload = unpack(message.content, self._most_bytes)
        except InvalidMessage as problem:
            return Reply(message_id, node, None, str(problem))
        size = sum(vector.numel() * 4 for vector in payload.vectors.values())
        return Reply(message_id, node, payload, size=size)


def key_identity(public_key: bytes) -> str:
    """Return a node's identity: the hash of its public key (PEM)."""
    return hashlib.sha256(public_key).hexdigest()[:16] if public_key else ""


def _identity(node: Node) -> str:
    return key_identity(getattr(node, "public_key", b"")) or f"node {node.node_id}"
