"""/health, /metrics and the live page, on an address of their own.

They are read-only and have no password: whoever reaches the address can see which sites take part. At most
`MOST_CONNECTIONS` are open at a time, so that the coordinator keeps its file descriptors.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shoal.errors import ConfigError, RunError
from shoal.extras import optional
from shoal.federation.operations.live_page import SCRIPT, body, page
from shoal.federation.operations.monitor import Monitor

MOST_CONNECTIONS = 16
PATIENCE = 5.0  # seconds for a request
STUCK = 600.0  # seconds without a sign of the coordinator after which it is not healthy
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
HTML = "text/html; charset=utf-8"
Answer = tuple[int, str, bytes]


class OperationsServer:
    """Answers in threads of its own until it is closed."""

    def __init__(self, address: str, monitor: Monitor) -> None:
        """Listen on HOST:PORT, or on loopback where only a port is given.

        Raises:
            ConfigError: The address is malformed, or `prometheus-client` is missing.
            RunError: Nobody can listen there.
        """
        optional("prometheus_client", "--metrics")
        self.host, port = split(address)
        try:
            self._server = _Server(self.host, port, monitor)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise RunError(f"cannot listen on {address}: {why}; choose another address for --metrics") from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def split(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT, [IPv6]:PORT or PORT."""
    host, colon, port = address.rpartition(":")
    if not port.isdecimal() or (colon and not host):
        raise ConfigError(f"--metrics must be HOST:PORT or PORT, got {address!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, monitor: Monitor) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.monitor, self.free = monitor, threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.loopback = _loopback(host)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that goes away is no event."""


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE
    server: _Server

    def do_GET(self) -> None:  # the name that http.server calls
        status, kind, content = self._answer()
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _answer(self) -> Answer:
        if self.server.loopback and not _loopback(_host(self.headers.get("Host", ""))):
            return 403, "text/plain", b"another web site may have sent you here\n"
        monitor = self.server.monitor
        match self.path.partition("?")[0]:
            case "/":
                return 200, HTML, page(monitor).encode()
            case "/live":
                return 200, HTML, body(monitor).encode()
            case "/live.js":
                return 200, "text/javascript; charset=utf-8", SCRIPT.read_bytes()
            case "/health":
                return health(monitor, time.time())
            case "/metrics":
                from prometheus_client import CONTENT_TYPE_LATEST as kind

                from shoal.federation.operations.metrics import metrics_text

                return 200, kind, metrics_text(monitor)
        return 404, "text/plain", b"there are /, /health and /metrics\n"

    def version_string(self) -> str:
        return "shoal"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def health(monitor: Monitor, now: float) -> Answer:
    """200 while the coordinator is at work, 503 before the run begins or where it seems stuck."""
    status, silent = monitor.status, max(0.0, now - monitor.seen)
    word = "starting" if status is None else "stuck" if silent > STUCK else "ok"
    facts: dict[str, Any] = {"status": word, "seconds_since_seen": round(silent, 1)}
    if status is not None:
        facts |= {"run": status.run, "rounds_done": status.done, "rounds": status.rounds, "doing": status.doing}
        facts["sites_connected"] = status.count("connected")
    return 200 if word == "ok" else 503, "application/json", json.dumps(facts).encode() + b"\n"


def _host(header: str) -> str:
    """The host in a `Host` header, without its port."""
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
