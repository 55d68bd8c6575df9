"""Messages to sites and their answers, over any Flower grid: Flower's own, ours inside `shoal serve`, or a test's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shoal.federation.messages import InvalidMessage, Payload, pack, unpack

if TYPE_CHECKING:
    from flwr.app import Message

INVALID = "spoilt: "  # how an error begins that is the site's fault


class Node(Protocol):
    """What is known of a node: Flower's NodeInfo."""

    node_id: int
    public_key: bytes


class Grid(Protocol):
    """The part of Flower's Grid that is used."""

    def get_nodes(self) -> Iterable[Node]: ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


@dataclass(frozen=True)
class Reply:
    """An answer to a message of ours, or in its place why there is none."""

    message_id: str
    node: int
    payload: Payload | None
    problem: str | None = None
    lost: bool = False
    size: int = 0


class Transport:
    """What was sent and is not answered yet."""

    def __init__(self, grid: Grid, most_bytes: int) -> None:
        self._grid, self._most_bytes = grid, most_bytes
        if (limit := getattr(grid, "limit", None)) is not None:
            limit(most_bytes)
        self._open: dict[str, int] = {}

    def here(self) -> dict[int, str]:
        """The nodes that are connected, and who each is: the hash of its public key."""
        return {node.node_id: _identity(node) for node in self._grid.get_nodes()}

    def send(self, payloads: dict[int, Payload], kind: str, keep: float) -> dict[str, int]:
        """Send a message to each of these nodes; the messages' names. They are kept for so many seconds."""
        from flwr.app import Message

        nodes = list(payloads)
        packed: dict[int, object] = {}
        messages = [Message(pack(payloads[node], packed), node, kind, ttl=keep) for node in nodes]
        names = list(self._grid.push_messages(messages)) if messages else []
        sent = {name: node for name, node in zip(names, nodes, strict=False) if name}
        self._open |= sent
        return sent

    def replies(self) -> list[Reply]:
        """Answers that have come since; those to messages that were given up are not among them."""
        if not self._open:
            return []
        found = []
        for message in self._grid.pull_messages(list(self._open)):
            message_id = message.metadata.reply_to_message_id
            node = self._open.pop(
                message_id, None
            )  # an error is sent by the SuperLink: only the message tells whose it is
            if node is not None:
                found.append(self._read(message_id, node, message))
        return found

    def cancel(self, payloads: Iterable[str]) -> None:
        """Whatever comes to these is not wanted any more."""
        names = [name for name in payloads if self._open.pop(name, None) is not None]
        forget = getattr(self._grid, "forget", None)
        if forget is not None and names:
            forget(names)

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


def _identity(node: Node) -> str:
    key = getattr(node, "public_key", b"")
    return hashlib.sha256(key).hexdigest()[:16] if key else f"node {node.node_id}"
