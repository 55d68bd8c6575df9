"""Flower's SuperLink inside the coordinator's own process: sites connect to it over Flower's Fleet API.

Stock Flower runs the link, the coordinator and the work on each message as separate processes, and polls every three
seconds. Here the coordinator reads the link's memory directly, and a site's request for messages is held until there
is one. Only the Fleet API is served: with Flower's Control API, anyone who can connect to the port could register a
node. Requests larger than an update are refused before they are read.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable, Sequence

from shoal.errors import RunError
from shoal.federation.flower.connections import Connections, Events, Limits, OnEvent
from shoal.federation.flower.http_api import SMALL, HttpApi
from shoal.federation.flower.http_server import HttpServer
from shoal.federation.flower.http_server import Tls as Tls
from shoal.federation.flower.internals import (
    Message,
    get_all_nested_objects,
    get_object_tree,
    inflate_object_from_contents,
    iterate_object_tree,
    no_object_id_recompute,
    remove_content_from_message,
)
from shoal.federation.flower.internals.link import (
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    Error,
    NodeInfo,
    TaskIdentity,
    make_message,
)
from shoal.federation.flower.link_state import LinkState
from shoal.federation.flower.signing import Verifier
from shoal.federation.flower.transport import INVALID
from shoal.federation.flower.transport import key_identity as identity

__all__ = ["ALIVE", "Limits", "SuperLink", "Tls", "identity"]

ALIVE = 12.0  # seconds of silence after which a site counts as disconnected


class SuperLink:
    """A running link; the coordinator uses it as its grid."""

    def __init__(
        self,
        host: str,
        port: int,
        tls: Tls | None,
        keys: Sequence[bytes],
        *,
        limits: Limits | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        """Start the server.

        Args:
            host: The address to listen on.
            port: The port; 0 for a free one.
            tls: The coordinator's certificate; None for no TLS.
            keys: The public keys (PEM) of the nodes that may join; without any, every node may.
            limits: Limits on connections and requests.
            on_event: Called, in the server's thread, with the kind of an event and its facts: see `on_event`.
        """
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        self._state, self._closed = LinkState(), bool(keys)
        self._events = Events(on_event or (lambda _kind, _facts: None))
        self._verifier = Verifier(frozenset(keys) if keys else None)
        self._connections = Connections(limits or Limits(), self._events)
        self._run = self._state.open_run()
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = self._run, 1, 1
        self._create_nodes(keys)
        app = HttpApi(self._state, self._closed, self._verifier, self._connections, self._events)
        listening = _bound(host, port)
        self.port = listening.getsockname()[1]
        try:
            self._server = HttpServer(app, listening, self._connections, tls)
        except BaseException:
            listening.close()
            raise

    @property
    def on_event(self) -> OnEvent:
        """What is called, in the server's thread, with the kind of an event and its facts.

        The kinds are `key-rejected` (a key that may not join), `authentication-failed` (anything else that is wrong
        with a signature) and `connection-refused`. The facts are `address`, `reason` and `times`; the first two kinds
        also have `path` and `key`, the identity of the key that was claimed. Of one kind about one address, one event
        is passed on every ten seconds; `times` counts those since the last.
        """
        return self._events.on_event

    @on_event.setter
    def on_event(self, function: OnEvent) -> None:
        self._events.on_event = function

    def allow(self, keys: Sequence[bytes]) -> None:
        """Let only the nodes with these public keys (PEM) join; others are cut off."""
        if not self._closed:
            raise RunError("the link was opened without keys, so any site may join; restart it with --keys")
        revoked = (self._verifier.keys or frozenset()) - frozenset(keys)
        self._create_nodes(keys)
        self._verifier.keys = frozenset(keys)
        for key in revoked:
            node = self._state.get_node_id_by_public_key(key)
            if node is not None:
                self._state.exclude(node, "the site's key may not join any more")
        self._server.call(self._connections.drop_keys, revoked)

    def reload_certificate(self) -> None:
        """Use the certificate's files as they are now, for new connections; open ones keep theirs.

        Raises:
            RunError: They cannot be used; the old certificate stays.
        """
        self._server.reload_certificate()

    def _create_nodes(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if self._state.get_node_id_by_public_key(key) is None:
                self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0)

    def limit(self, most_bytes: int) -> None:
        """Set the most bytes that the vectors of a message may have."""
        self._state.most_bytes = most_bytes

    def get_nodes(self) -> list[NodeInfo]:
        """The nodes seen within the last ALIVE seconds whose keys may join."""
        state, keys = self._state, self._verifier.keys
        with state.lock:
            seen = [state.nodes[node] for node, when in state.last_seen.items() if state.clock - when < ALIVE]
        return [node for node in seen if keys is None or node.public_key in keys]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages, and return their ids."""
        names = []
        with no_object_id_recompute():
            for message in messages:
                name = message.metadata.__dict__["_message_id"] = message.object_id
                objects = get_all_nested_objects(message)
                plain, tree = remove_content_from_message(message), get_object_tree(message)
                with self._state.lock:
                    session = self._state.start_session(self._run)
                    _, missing = self._state.store_message_and_object_tree(plain, tree, session)
                    for each in missing:
                        self._state.store_object(self._run, session, each, objects[each].deflate())
                names.append(name)
        self._state.wake()
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The answers that have arrived completely; one that cannot be decoded becomes an error."""
        state, found = self._state, []
        for name in message_ids:
            with state.lock:
                answer, asked = state.message_ins_id_to_message_res_id.get(name), state.message_ins_store.get(name)
                message = self._whole(answer, name) if answer is not None else None
                if message is None and asked is not None and name in state.lost:
                    message = Message(Error(0, state.lost[name]), reply_to=asked)
                if message is not None:
                    found.append(message)
                    self.forget([name])
        return found

    def forget(self, names: Iterable[str]) -> None:
        """Delete messages and their answers; an answer that arrives later is rejected."""
        with self._state.lock:
            for name in names:
                answer = self._state.message_ins_id_to_message_res_id.get(name)
                self._state.delete_messages({name})
                self._state.lost.pop(name, None)
                for each in (name, answer):
                    if each is not None:
                        self._state.object_store.delete(each)

    def close(self) -> None:
        """Stop the server."""
        self._state.closing = True
        self._state.wake()
        self._server.close()

    def _whole(self, answer: str, name: str) -> Message | None:
        state = self._state
        if state.pushing(answer):
            return None
        try:
            names = [tree.object_id for tree in iterate_object_tree(state.object_store.get_object_tree(answer))]
            contents = {each: state.object_store.get(each) for each in names}
            if any(not content for content in contents.values()):
                return None  # not complete yet
            size = sum(len(content) for content in contents.values() if content)
            if size > state.most_bytes + SMALL:
                raise ValueError(f"{size:,} bytes")
            message = inflate_object_from_contents(answer, contents)  # type: ignore[arg-type]
            if not isinstance(message, Message) or message.metadata.reply_to_message_id != name:
                raise TypeError("it does not answer this message")
            return message
        except Exception as error:  # no answer may stop the coordinator
            asked = state.message_res_store[answer].metadata
            return make_message(asked, error=Error(0, f"{INVALID}it cannot be decoded: {error}"[:200]))


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except (OSError, OverflowError) as error:
        made.close()
        why = getattr(error, "strerror", None) or error
        raise RunError(f"cannot listen on {host}:{port}: {why}; choose another --port") from None
    return made
