"""Flower's in-memory link state, which also records when each node was last seen, and wakes waiting requests."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Collection
from contextlib import suppress

from flwr.app import Message
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from shoal.federation.flower.transport import INVALID

OBJECTS = 24  # objects of one message, besides the chunks of its vectors


class LinkState(InMemoryLinkState):
    """The state that the server's thread and the coordinator's share.

    Each changes it under `lock` until it is consistent: a message is never visible before all of its objects are.

    Attributes:
        most_bytes: The most bytes that the vectors of a message may have.
        clock: Seconds for which this process was awake, so that a pause of it does not time out every node.
        last_seen: When each node was last heard from, by `clock`.
        starts: How often each node has started.
        lost: Messages that can no longer be answered, and why.
    """

    def __init__(self) -> None:
        super().__init__(NoOpFederationManager(simulation=False), ObjectStoreFactory().store())
        self.last_seen: dict[int, float] = {}
        self.clock = 0.0
        self.starts: Counter[int] = Counter()
        self.lost: dict[str, str] = {}
        self.most_bytes = 0
        self.closing = False
        self._news: asyncio.Future[None] | None = None

    @property
    def most_in_one_request(self) -> int:
        """The most bytes of vectors in one request; vectors are sent in chunks."""
        return min(self.most_bytes, FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)

    def news(self) -> asyncio.Future[None]:
        """A future that is done when there may be messages; call it from the server's loop only."""
        if self._news is None or self._news.done():
            self._news = asyncio.get_running_loop().create_future()
        return self._news

    def wake(self) -> None:
        """Signal, from any thread, that there may be messages."""
        news = self._news
        if news is not None:
            with suppress(RuntimeError):  # the server is closed
                news.get_loop().call_soon_threadsafe(_set, news)

    def get_message_ins(self, node_id: int, limit: int | None, *, run_id: int | None = None) -> list[Message]:
        """Return a node's messages; unlike Flower's own, this does not check every node's messages each time."""
        self.last_seen[node_id] = self.clock
        current = now()
        with self.lock:
            found = [
                message
                for message in self.message_ins_store.values()
                if message.metadata.dst_node_id == node_id
                and message.metadata.delivered_at == ""
                and message.metadata.created_at + message.metadata.ttl > current.timestamp()
            ][:limit]
            for message in found:
                message.metadata.delivered_at = current.isoformat()
        return found

    def acknowledge_node_heartbeat(self, node_id: int, heartbeat_interval: float) -> bool:
        """Record a heartbeat."""
        self.last_seen[node_id] = self.clock
        return super().acknowledge_node_heartbeat(node_id, heartbeat_interval)

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        """Activate a node; one that crashed may return before its timeout, but its open messages are lost."""
        super().deactivate_node(node_id)
        self.lose(node_id, "the site restarted and lost the message")
        self.starts[node_id] += 1
        self.wake()
        self.last_seen[node_id] = self.clock
        return super().activate_node(node_id, heartbeat_interval)

    def lose(self, node_id: int, why: str) -> None:
        """Mark the messages delivered to a node as unanswerable; the first reason given stands."""
        with self.lock:
            for message_id, message in self.message_ins_store.items():
                if message.metadata.dst_node_id == node_id and message.metadata.delivered_at:
                    self.lost.setdefault(message_id, why)

    def allow(self, keys: Collection[bytes]) -> None:
        """Let only the nodes with these public keys (PEM) in; others are out at once, held requests included."""
        with self.lock:
            for key in set(self.node_public_key_to_node_id) - set(keys):
                node = self.node_public_key_to_node_id.pop(key)
                self.deactivate_node(node)
                self.starts[node] += 1  # ends a held request
                self.lose(node, "the site's key may not join any more")
            for key in set(keys) - set(self.node_public_key_to_node_id):
                self.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0)
        self.wake()

    def allowed(self, node_id: int) -> bool:
        """Whether the key of a node may still join."""
        return self.node_public_key_to_node_id.get(self.nodes[node_id].public_key) == node_id

    def deactivate_node(self, node_id: int) -> bool:
        """Deactivate a node."""
        self.last_seen.pop(node_id, None)
        return super().deactivate_node(node_id)

    def store_message_and_object_tree(
        self, message: Message, object_tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        """Store a message, unless it has too many objects."""
        most = OBJECTS + math.ceil(self.most_bytes / FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)
        for count, _ in enumerate(iterate_object_tree(object_tree)):
            if count >= most:
                problem, message_id = f"it has more than {most} objects", message.metadata.reply_to_message_id
                if message_id in self.message_ins_store:
                    self.lost[message_id] = f"{INVALID}{problem}"
                raise ValueError(problem)
        return super().store_message_and_object_tree(message, object_tree, session_id)

    def pushing(self, message_id: str) -> bool:
        """Whether objects of a message are missing, by its session, which is far cheaper than by its objects."""
        with self._lock_object_push_sessions:
            session = self._object_push_sessions.get(self._object_push_session_by_root.get(message_id, ""))
            return session is not None and bool(session.pending_object_ids)

    def open_run(self) -> int:
        """Create the Flower run, which never stops, that carries the coordinator's messages."""
        run = self.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
        task = self.run_ids[run].run.primary_task_id
        assert task is not None
        self.claim_task(task)
        self.activate_task(task)
        self.task_token_store.clear()  # this task has no heartbeat and must not expire
        return run


def _set(news: asyncio.Future[None]) -> None:
    if not news.done():
        news.set_result(None)
