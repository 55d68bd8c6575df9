"""Letters to sites and their answers, over any Flower grid: Flower's own, ours inside `shoal serve`, or a test's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shoal.federation.messages import Parcel, Spoilt, pack, unpack

if TYPE_CHECKING:
    from flwr.app import Message

SPOILT = "spoilt: "  # how an error begins that is the site's fault


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
class Arrived:
    """An answer to a letter of ours, or in its place why there is none."""

    letter: str
    node: int
    parcel: Parcel | None
    problem: str | None = None
    lost: bool = False
    size: int = 0


class Mail:
    """What was sent and is not answered yet."""

    def __init__(self, grid: Grid, most_bytes: int) -> None:
        self._grid, self._most_bytes = grid, most_bytes
        if (limit := getattr(grid, "limit", None)) is not None:
            limit(most_bytes)
        self._open: dict[str, int] = {}

    def here(self) -> dict[int, str]:
        """The nodes that are connected, and who each is: the hash of its public key."""
        return {node.node_id: _identity(node) for node in self._grid.get_nodes()}

    def send(self, letters: dict[int, Parcel], kind: str, keep: float) -> dict[str, int]:
        """Send a letter to each of these nodes; the letters' names. They are kept for so many seconds."""
        from flwr.app import Message

        nodes = list(letters)
        packed: dict[int, object] = {}
        messages = [Message(pack(letters[node], packed), node, kind, ttl=keep) for node in nodes]
        names = list(self._grid.push_messages(messages)) if messages else []
        sent = {name: node for name, node in zip(names, nodes, strict=False) if name}
        self._open |= sent
        return sent

    def arrived(self) -> list[Arrived]:
        """Answers that have come since; those to letters that were given up are not among them."""
        if not self._open:
            return []
        found = []
        for message in self._grid.pull_messages(list(self._open)):
            letter = message.metadata.reply_to_message_id
            node = self._open.pop(
                letter, None
            )  # an error is sent by the SuperLink: only the letter tells whose it is
            if node is not None:
                found.append(self._read(letter, node, message))
        return found

    def give_up(self, letters: Iterable[str]) -> None:
        """Whatever comes to these is not wanted any more."""
        names = [name for name in letters if self._open.pop(name, None) is not None]
        forget = getattr(self._grid, "forget", None)
        if forget is not None and names:
            forget(names)

    def _read(self, letter: str, node: int, message: Message) -> Arrived:
        if message.has_error():
            reason = str(message.error.reason)[:200]
            return Arrived(letter, node, None, reason.removeprefix(SPOILT), lost=not reason.startswith(SPOILT))
        try:
            parcel = unpack(message.content, self._most_bytes)
        except Spoilt as problem:
            return Arrived(letter, node, None, str(problem))
        size = sum(vector.numel() * 4 for vector in parcel.vectors.values())
        return Arrived(letter, node, parcel, size=size)


def _identity(node: Node) -> str:
    key = getattr(node, "public_key", b"")
    return hashlib.sha256(key).hexdigest()[:16] if key else f"node {node.node_id}"
