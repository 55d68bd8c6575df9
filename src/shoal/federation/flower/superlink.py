"""Flower's SuperLink inside the coordinator's own process: sites connect to it over Flower's Fleet API.

Stock Flower runs the link, the coordinator and the work on each message as separate processes, and polls every three
seconds. Here the coordinator reads the link's memory directly, and a site's request for messages is held until there
is one. Only the Fleet API is served: with Flower's Control API, anyone who can connect to the port could register a
node. Requests larger than an update are refused before they are read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}  # read when flwr is imported

import uvicorn
from flwr.app import Message
from flwr.app.error import Error
from flwr.app.message import make_message, remove_content_from_message
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from shoal.errors import RunError
from shoal.federation.flower.http_api import SMALL, HttpApi
from shoal.federation.flower.link_state import LinkState
from shoal.federation.flower.transport import INVALID

ALIVE = 12.0  # seconds of silence after which a site counts as disconnected


@dataclass(frozen=True)
class Tls:
    """The files of the coordinator's certificate and its private key, and the key's password."""

    certificate: Path
    key: Path
    password: str | None = field(default=None, repr=False)


class SuperLink:
    """A running link; the coordinator uses it as its grid."""

    def __init__(self, host: str, port: int, tls: Tls | None, keys: Sequence[bytes]) -> None:
        """Start the server; with `keys` (PEM) only these nodes may join, without any node may."""
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        self._state, self._tls = LinkState(), tls
        self._state.allow(keys)
        self._run = self._state.open_run()
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = self._run, 1, 1
        self._server = _server(HttpApi(self._state, closed=bool(keys)), host, port, tls)
        self._socket = _bound(host, port)
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RunError(f"the server on {host}:{port} did not start; see the messages above")
            time.sleep(0.01)

    def limit(self, most_bytes: int) -> None:
        """Set the most bytes that the vectors of a message may have."""
        self._state.most_bytes = most_bytes

    def allow(self, keys: list[bytes]) -> None:
        """Let only the nodes with these keys (PEM) join; others are disconnected at once."""
        self._state.allow(keys)

    def reload_certificate(self) -> None:
        """Use the certificate's files as they are now, for new connections.

        Raises:
            RunError: They cannot be used; the old certificate stays.
        """
        used = self._server.config.ssl
        if self._tls is not None and used is not None:
            for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), used):  # a failure must not spoil the one in use
                try:
                    context.load_cert_chain(self._tls.certificate, self._tls.key, self._tls.password)
                except (OSError, ssl.SSLError) as error:
                    raise RunError(f"the certificate {self._tls.certificate} cannot be used: {error}") from None

    def get_nodes(self) -> list[NodeInfo]:
        """The nodes seen within the last ALIVE seconds whose keys may join."""
        state = self._state
        with state.lock:
            seen = [node for node, when in state.last_seen.items() if state.clock - when < ALIVE]
            return [state.nodes[node] for node in seen if state.allowed(node)]

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
        self._server.should_exit = True
        self._thread.join(5)

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


def _server(app: HttpApi, host: str, port: int, tls: Tls | None) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="critical",
        access_log=False,
        ws="none",
        lifespan="off",
        timeout_keep_alive=75,
        ssl_certfile=None if tls is None else str(tls.certificate),
        ssl_keyfile=None if tls is None else str(tls.key),
        ssl_keyfile_password=None if tls is None else tls.password,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise RunError(f"the certificate {tls and tls.certificate} cannot be used: {error}") from None
    if config.ssl is not None:
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
    return uvicorn.Server(config)


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


def identity(public_key: bytes) -> str:
    """Return a node's identity: the hash of its public key, as in `transport`."""
    return hashlib.sha256(public_key).hexdigest()[:16]
