"""A Flower grid in this process: messages go to sites as calls, through the same packing, and are kept to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

from shoal.federation.messages import Payload, pack, unpack
from shoal.federation.site import Owner, Site
from shoal.federation.site_records import reader

Change = Callable[[str, Payload], Payload | None]


@dataclass
class Peer:
    node_id: int
    public_key: bytes


@dataclass
class Loopback:
    """Sites by node; `change` may tamper with a node's answer, or keep it back by None."""

    sites: dict[int, Site] = field(default_factory=dict)
    changes: dict[int, Change] = field(default_factory=dict)
    wire: list[tuple[str, int, str, Payload]] = field(default_factory=list)
    _answers: dict[str, Message] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def get_nodes(self) -> list[Peer]:
        return [Peer(node, f"key of {node}".encode()) for node in self.sites]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in messages:
            self._count += 1
            name, node, kind = f"message {self._count}", message.metadata.dst_node_id, message.metadata.message_type
            message.metadata.__dict__["_message_id"] = name
            payload = unpack(message.content, 2**30)
            self.wire.append(("to", node, kind, payload))
            answer: Payload | None = self.sites[node].answer(kind, payload)
            assert answer is not None
            self.wire.append(("from", node, kind, answer))
            if node in self.changes:
                answer = self.changes[node](kind, answer)
            if answer is not None:
                self._answers[name] = Message(pack(answer), reply_to=message)
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._answers.pop(name) for name in message_ids if name in self._answers]


def with_sites(folder: Path, count: int, data: str = "digits", **owner: Any) -> Loopback:
    """Sites that hold one client's part each of a known data set."""
    sites = {
        100 + number: Site(Owner(f"site-{number:02}", folder / f"site-{number}", reader(data, part=number), **owner))
        for number in range(count)
    }
    return Loopback(sites)
