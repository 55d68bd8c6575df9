"""The state of a link as Flower keeps it, in memory, which also knows who was heard of when, and wakes who waits."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import suppress

from flwr.app import Message
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, NOOP_FLWR_AID
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from shoal.federation.flower.transport import INVALID

OBJECTS = 24  # of one message, besides the pieces of its vectors


class LinkState(InMemoryLinkState):
    """`most_bytes`: the most that the vectors of a message may have. `heard`: when a node was, by `clock`, which
    counts the seconds in which this process was awake: whoever was paused himself must not take all others for dead.
    `starts`: how often a node has started. `lost`: messages to which no answer can come any more, and why.

    The server's thread and the coordinator's both work on it, each under `lock` for as long as it takes to leave
    everything whole: a message is never seen before all of its objects are there.
    """

    def __init__(self) -> None:
        super().__init__(NoOpFederationManager(simulation=False), ObjectStoreFactory().store())
        self.replies: dict[int, float] = {}
        self.clock = 0.0
        self.starts: Counter[int] = Counter()
        self.lost: dict[str, str] = {}
        self.most_bytes = 0
        self.closing = False
        self._news: asyncio.Future[None] | None = None

    @property
    def most_in_one_request(self) -> int:
        """Vectors travel in pieces."""
        return min(self.most_bytes, FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)

    def news(self) -> asyncio.Future[None]:
        """What is done when there may be messages; asked for from the server's loop only."""
        if self._news is None or self._news.done():
            self._news = asyncio.get_running_loop().create_future()
        return self._news

    def wake(self) -> None:
        """There may be messages: said from any thread."""
        news = self._news
        if news is not None:
            with suppress(RuntimeError):  # the server is closed
                news.get_loop().call_soon_threadsafe(_set, news)

    def get_message_ins(self, node_id: int, limit: int | None, *, run_id: int | None = None) -> list[Message]:
        """As Flower's, which checks every message of everybody for each request."""
        self.replies[node_id] = self.clock
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
        self.replies[node_id] = self.clock
        return super().acknowledge_node_heartbeat(node_id, heartbeat_interval)

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        """A site that crashed comes back at once, not only when it has been missed; what it had to answer is lost."""
        super().deactivate_node(node_id)
        self.lose(node_id, "the site has started anew, and lost the message")
        self.starts[node_id] += 1
        self.wake()
        self.replies[node_id] = self.clock
        return super().activate_node(node_id, heartbeat_interval)

    def lose(self, node_id: int, why: str) -> None:
        """No answer comes to what this node has; what was said of it first stands."""
        with self.lock:
            for name, message_id in self.message_ins_store.items():
                if message_id.metadata.dst_node_id == node_id and message_id.metadata.delivered_at:
                    self.lost.setdefault(name, why)

    def deactivate_node(self, node_id: int) -> bool:
        self.replies.pop(node_id, None)
        return super().deactivate_node(node_id)

    def store_message_and_object_tree(
        self, message: Message, object_tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        most = OBJECTS + math.ceil(self.most_bytes / FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)
        for count, _ in enumerate(iterate_object_tree(object_tree)):
            if count >= most:
                problem, message_id = f"it has more than {most} pieces", message.metadata.reply_to_message_id
                if message_id in self.message_ins_store:
                    self.lost[message_id] = f"{INVALID}{problem}"
                raise ValueError(problem)
        return super().store_message_and_object_tree(message, object_tree, session_id)

    def pushing(self, message_id: str) -> bool:
        """Are objects of this message still to come? A look at the session costs far less than one at the objects."""
        with self._lock_object_push_sessions:
            session = self._object_push_sessions.get(self._object_push_session_by_root.get(message_id, ""))
            return session is not None and bool(session.pending_object_ids)

    def open_run(self) -> int:
        """A run of Flower's, always running; its messages are the coordinator's messages."""
        run = self.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
        task = self.run_ids[run].run.primary_task_id
        assert task is not None
        self.claim_task(task)
        self.activate_task(task)
        self.task_token_store.clear()  # nobody sends this task's heartbeat: it must not expire
        return run


def _set(news: asyncio.Future[None]) -> None:
    if not news.done():
        news.set_result(None)
