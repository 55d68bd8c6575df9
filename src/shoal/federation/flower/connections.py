"""The link's open connections: how many there may be, of whom, and for how long.

A connection is unknown until a request on it was signed by a site's key, and has a few seconds for that: a peer who
only connects, or is slow with the TLS handshake or the headers, is dropped. Unknown connections are few, in all and
from one address; where there are too many the oldest gives way, so that a site can always get in. File descriptors
are left over for the run's own files.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shoal.errors import RunError

OnEvent = Callable[[str, dict[str, Any]], None]
QUIET = 10.0  # seconds between events of one kind about one address
MANY = 1000  # events to remember
SWEEP = 0.25  # seconds between looks for connections whose time is up
FEWEST = 16  # connections without which there is no federation
BACKLOG = 512  # connections that wait to be accepted


@dataclass(frozen=True)
class Limits:
    """Limits on the link's connections and requests.

    Attributes:
        connections: Open connections in all; fewer where the process may not open so many files.
        unknown: Those on which no site's key was shown yet.
        per_address: Those of one address (of one /64 in IPv6) among the unknown.
        per_key: Those of one site.
        reserved: File descriptors left for the run's own files.
        seconds: Seconds for a connection to show a site's key, and for a body besides those for its bytes.
        bytes_per_second: The slowest that a body may arrive.
        idle: Seconds for which a known connection may make no request.
    """

    connections: int = 4096
    unknown: int = 128
    per_address: int = 32
    per_key: int = 8
    reserved: int = 128
    seconds: float = 10.0
    bytes_per_second: float = 16_384.0
    idle: float = 75.0

    def patience(self, length: int) -> float:
        """The seconds in which a body of this many bytes must arrive."""
        return self.seconds + length / self.bytes_per_second


@dataclass(eq=False)
class Connection:
    """An open connection; `key` is the site's, once it was shown, and `busy` the requests that are being answered."""

    peer: tuple[str, int]
    address: str
    coordinator: str
    since: float
    key: bytes = b""
    busy: int = 0
    transport: asyncio.Transport | None = None
    opening: asyncio.Task[None] | None = None

    def drop(self) -> None:
        """Close it without ado."""
        if self.transport is not None:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()


class Events:
    """Passes events on, at most one of a kind about one address in QUIET seconds: a flood must not fill the log."""

    def __init__(self, on_event: OnEvent) -> None:
        self.on_event = on_event
        self._reported: dict[tuple[str, str], list[float]] = {}  # when last, and how often since
        self._cleared = -QUIET

    def report(self, kind: str, address: str, **facts: Any) -> None:
        """Pass on an event; its fact `times` counts those since the last that was passed on."""
        about, now = (kind, address), time.monotonic()
        last, times = self._reported.get(about, (-QUIET, 0))
        if now - last < QUIET:
            self._reported[about] = [last, times + 1]
            return
        if len(self._reported) >= MANY and now - self._cleared >= QUIET:
            self._cleared = now
            self._reported = {known: when for known, when in self._reported.items() if now - when[0] < QUIET}
        if len(self._reported) < MANY:
            self._reported[about] = [now, 0]
            with suppress(Exception):  # no event may stop the coordinator
                self.on_event(kind, {"address": address, **facts, "times": int(times) + 1})


class Connections:
    """Accepts connections and drops those that the limits do not allow; used from the server's loop only."""

    def __init__(self, limits: Limits, events: Events) -> None:
        free = free_descriptors() - limits.reserved
        if free < FEWEST:
            raise RunError(
                f"too few files may be open for {FEWEST} connections: raise the limit with `ulimit -n 4096`"
            )
        self.limits, self._events = limits, events
        self._most = min(limits.connections, free)
        self._most_unknown = min(limits.unknown, self._most // 2)
        self._unknown: dict[tuple[str, int], Connection] = {}  # by peer, the oldest first
        self._known: dict[tuple[str, int], Connection] = {}

    def of(self, peer: tuple[str, int]) -> Connection | None:
        """The open connection of a peer."""
        return self._known.get(peer) or self._unknown.get(peer)

    @property
    def all(self) -> list[Connection]:
        """The open connections."""
        return [*self._known.values(), *self._unknown.values()]

    async def accept(
        self,
        listening: socket.socket,
        protocol: Callable[[Callable[[], None]], asyncio.Protocol],
        tls: Callable[[], tuple[ssl.SSLContext | None, str]],
    ) -> None:
        """Accept connections for ever.

        Args:
            listening: The socket.
            protocol: Makes a connection's protocol, which calls its argument when the connection is lost.
            tls: The TLS context for the next connection, and the coordinator's identity in it.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(listening)
            except OSError as error:  # aborted by the peer, or the system is short of something
                self._events.report("connection-refused", "", reason=str(error))
                await asyncio.sleep(SWEEP)
                continue
            context, identity = tls()
            connection = Connection(peer[:2], _network(peer[0]), identity, time.monotonic())
            self._make_room(connection)
            self._unknown[connection.peer] = connection
            connection.opening = loop.create_task(self._opened(connection, sock, context, protocol))

    async def _opened(
        self, connection: Connection, sock: socket.socket, context: ssl.SSLContext | None, protocol: Any
    ) -> None:
        """Shake hands, and pass the connection to its protocol."""
        loop = asyncio.get_running_loop()
        timeout = None if context is None else self.limits.seconds
        try:
            connection.transport, _ = await loop.connect_accepted_socket(
                lambda: protocol(lambda: self._forget(connection)), sock, ssl=context, ssl_handshake_timeout=timeout
            )
        except (Exception, asyncio.CancelledError):  # whatever a peer does, others are still accepted
            sock.close()
            self._forget(connection)

    def know(self, connection: Connection, key: bytes) -> bool:
        """Note that a site's key was shown on a connection; False where there is no room for it."""
        if connection.key != key:
            own = [each for each in self._known.values() if each.key == key]
            if len(own) >= self.limits.per_key:
                self._refuse(own[0], f"a site has more than {self.limits.per_key} connections")
            elif len(self._known) >= self._most - self._most_unknown:
                taken = f"all {len(self._known)} connections are taken; a higher `ulimit -n` allows more"
                self._refuse(connection, taken)
                return False
            self._forget(connection)
            connection.key = key
            self._known[connection.peer] = connection
        connection.since = time.monotonic()
        return True

    def drop_keys(self, keys: frozenset[bytes]) -> None:
        """Close the connections of these sites."""
        for connection in self.all:
            if connection.key in keys:
                connection.drop()

    async def sweep(self) -> None:
        """Drop the connections whose time is up, for ever."""
        while True:
            await asyncio.sleep(SWEEP)
            now = time.monotonic()
            for connection in self.all:
                if not connection.key and now - connection.since > self.limits.seconds:
                    self._refuse(connection, f"no key was shown within {self.limits.seconds:g} s")
                elif connection.key and not connection.busy and now - connection.since > self._idle(connection):
                    connection.drop()

    def _idle(self, connection: Connection) -> float:
        """The seconds without a request after which a known connection is dropped; it may read an answer slowly."""
        unread = 0 if connection.transport is None else connection.transport.get_write_buffer_size()
        return 2 * self.limits.idle + unread / self.limits.bytes_per_second

    def close(self) -> None:
        """Drop every connection on which nothing is being answered."""
        for connection in self.all:
            if not connection.busy:
                connection.drop()

    def _make_room(self, connection: Connection) -> None:
        """Where too many are unknown, drop the oldest of the same address, or of that which has the most."""
        counts = Counter(each.address for each in self._unknown.values())
        if counts[connection.address] >= self.limits.per_address:
            crowded, why = connection.address, f"more than {self.limits.per_address} from this address show no key"
        elif len(self._unknown) >= self._most_unknown:
            (crowded, _), *_ = counts.most_common(1)
            why = f"more than {self._most_unknown} show no key"
        else:
            return
        self._refuse(next(each for each in self._unknown.values() if each.address == crowded), why)

    def _refuse(self, connection: Connection, why: str) -> None:
        self._events.report("connection-refused", connection.address, reason=why)
        connection.drop()
        self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        for held in (self._unknown, self._known):
            if held.get(connection.peer) is connection:  # another may have the same peer by now
                del held[connection.peer]


def free_descriptors() -> int:
    """Return how many more files this process may open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2**20 if most == resource.RLIM_INFINITY else most
    return most - len(os.listdir("/dev/fd"))


def _network(host: str) -> str:
    """The address, or its /64 in IPv6, of which one peer may have all addresses."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4:
        return host
    mapped = address.ipv4_mapped
    return str(mapped) if mapped else str(ipaddress.ip_network((int(address), 64), strict=False))
