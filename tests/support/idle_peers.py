"""Peers that hold connections to a coordinator and never show a key: `python idle_peers.py PORT COUNT`.

A quarter of them only connects, a quarter shakes hands (TLS) and falls silent, a quarter sends headers byte by byte,
a quarter sends the body of an unsigned request so. Whoever is dropped connects again. When all have been connected, a
line is printed; they go on until they are killed. It uses nothing but the standard library.
"""

from __future__ import annotations

import select
import socket
import ssl
import sys
import time
from contextlib import suppress

HEADERS = b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n"
KINDS = ("idle", "tls", "headers", "body")
PAUSE = 0.05  # seconds between one connection and the next, once all have been connected


def connected(port: int, kind: str) -> socket.socket:
    """A connection of that kind."""
    made = socket.create_connection(("127.0.0.1", port), timeout=5.0)
    if kind == "idle":
        return made
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    made = context.wrap_socket(made)
    if kind != "tls":
        made.sendall(HEADERS[:20] if kind == "headers" else HEADERS + b"\r\n")
    return made


def alive(peer: socket.socket, kind: str) -> bool:
    """Whether the other end still holds it, after one more byte where it sends any."""
    with suppress(OSError):
        if kind in ("headers", "body"):
            peer.send(b"x")
        return not select.select([peer], [], [], 0)[0] or bool(peer.recv(4096))
    return False


def main(port: int, count: int) -> None:
    peers: list[socket.socket | None] = [None] * count
    ready = False
    while True:
        for number, peer in enumerate(peers):
            kind = KINDS[number % len(KINDS)]
            if peer is not None and alive(peer, kind):
                continue
            if peer is not None:
                peer.close()
            peers[number] = None
            with suppress(OSError):
                peers[number] = connected(port, kind)
            if ready:
                time.sleep(PAUSE)
        if not ready:
            ready = True
            print("ready", flush=True)
        time.sleep(PAUSE)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
