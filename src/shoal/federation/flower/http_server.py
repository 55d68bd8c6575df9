"""Uvicorn's HTTP protocol behind our own accepting of connections, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from shoal.errors import RunError
from shoal.federation.flower.connections import BACKLOG, Connections
from shoal.federation.flower.signing import NO_TLS, coordinator_identity

GRACE = 2.0  # seconds for answers that are under way when the server stops
MOST_HEADERS = 2**14  # bytes of a request's headers


@dataclass(frozen=True)
class Tls:
    """The files of the coordinator's certificate and its private key, and the key's password, if it has one."""

    certificate: Path
    key: Path
    password: str | None = field(default=None, repr=False)

    def load(self) -> tuple[ssl.SSLContext, str]:
        """Return the TLS context, and the coordinator's identity in it."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            # An empty password, where there is none, fails; without one the terminal would be asked.
            context.load_cert_chain(self.certificate, self.key, self.password or "")
            own = ssl.PEM_cert_to_DER_cert(_first_certificate(self.certificate.read_text(encoding="ascii")))
        except (OSError, ValueError) as error:
            raise RunError(f"the certificate {self.certificate} cannot be used: {error}") from None
        return context, coordinator_identity(own)


def _first_certificate(pem: str) -> str:
    end = "-----END CERTIFICATE-----"
    return pem[pem.index("-----BEGIN CERTIFICATE-----") : pem.index(end) + len(end)]


class HttpServer:
    """Serves an ASGI app on a bound socket, until it is closed."""

    def __init__(self, app: Any, listening: socket.socket, connections: Connections, tls: Tls | None) -> None:
        self._listening, self._connections = listening, connections
        self._config = uvicorn.Config(
            app,
            http=H11Protocol,  # its headers are bounded
            ws="none",
            lifespan="off",
            log_level="critical",
            access_log=False,
            proxy_headers=False,  # or a peer could choose its address
            timeout_keep_alive=int(connections.limits.idle),
            h11_max_incomplete_event_size=MOST_HEADERS,
        )
        self._config.load()
        self._state = ServerState()
        self._files = tls
        self.reload_certificate()
        listening.listen(BACKLOG)
        listening.setblocking(False)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._started.wait()

    def reload_certificate(self) -> None:
        """Use the certificate's files as they are now, for new connections; open ones keep theirs."""
        self._tls = (None, NO_TLS) if self._files is None else self._files.load()

    def call(self, function: Callable[..., None], *given: Any) -> None:
        """Call a function in the server's loop, soon."""
        self._loop.call_soon_threadsafe(function, *given)

    def close(self) -> None:
        """Stop, after the answers that are under way."""
        self.call(self._stop.set)
        self._thread.join(2 * GRACE)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._config.get_loop_factory()) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connections = self._connections
        jobs = [
            asyncio.create_task(connections.accept(self._listening, self._protocol, lambda: self._tls)),
            asyncio.create_task(connections.sweep()),
        ]
        self._started.set()
        await self._stop.wait()
        for job in jobs:
            job.cancel()
        self._listening.close()
        until = self._loop.time() + GRACE
        while connections.all and self._loop.time() < until:
            connections.close()
            await asyncio.sleep(0.02)

    def _protocol(self, lost: Callable[[], None]) -> asyncio.Protocol:
        return _Protocol(self._config, self._state, lost)


class _Protocol(H11Protocol):
    """Uvicorn's protocol, which also says when its connection is lost."""

    def __init__(self, config: uvicorn.Config, state: ServerState, lost: Callable[[], None]) -> None:
        super().__init__(config, state, {})
        self._lost = lost

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lost()
