"""A scripted TCP server for the transport's tests: one thread per connection, plain blocking sockets.

    with FakeServer(answer) as server: ...   # answer(peer) is called for each request
`server.requests` holds (head, body) of every request in order of arrival.
"""
from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
FINISH = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def usage(tokens: int) -> bytes:
    """The usage event."""
    return b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":%d}}\n\n' % tokens


def whole(tokens: int = 3) -> bytes:
    """A complete good answer."""
    return HEAD + chunk(EVENT) * tokens + chunk(FINISH) + chunk(usage(tokens)) + chunk(DONE) + LAST


class Peer:
    """What a script sees: its socket, the request, which request of the server and of the connection it is."""

    def __init__(self, sock: socket.socket, head: bytes, body: bytes, number: int, turn: int, connection: int) -> None:
        self.sock, self.head, self.body = sock, head, body
        self.number, self.turn, self.connection = number, turn, connection

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def reset(self) -> None:
        """Close with a RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def wait_closed(self, limit_s: float = 5.0) -> bool:
        """True when the client closed its side in time."""
        self.sock.settimeout(limit_s)
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True
        except (TimeoutError, OSError):
            return False


class FakeServer:
    """Accepts, reads requests, calls the script; a script that returns keeps the connection open."""

    def __init__(self, script: Callable[[Peer], None], *, context: ssl.SSLContext | None = None,
                 family: socket.AddressFamily = socket.AF_INET, pause_s: float = 0.0) -> None:
        self._script, self._context, self._pause_s = script, context, pause_s
        host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        self._listener = socket.create_server((host, 0), family=family, backlog=2048)
        self.port = self._listener.getsockname()[1]
        self.authority = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self.url = f"{'https' if context else 'http'}://{self.authority}/v1"
        self.requests: list[tuple[bytes, bytes]] = []
        self.connections = 0
        self.handshake_errors = 0
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(sock, self.connections), daemon=True).start()

    def _serve(self, sock: socket.socket, connection: int) -> None:
        with self._lock:
            self._open.add(sock)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                plain, sock = sock, self._context.wrap_socket(sock, server_side=True)
                self._open.discard(plain)
                self._open.add(sock)
            time.sleep(self._pause_s)
            for turn in range(1000):
                request = read_request(sock)
                if request is None:
                    return
                with self._lock:
                    self.requests.append(request)
                    number = len(self.requests)
                self._script(Peer(sock, *request, number, turn, connection))
        except ssl.SSLError:
            self.handshake_errors += 1
        except (OSError, ValueError):
            return
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()


def read_request(sock: socket.socket) -> tuple[bytes, bytes] | None:
    """(head, body) of the next request, None at the end."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = sock.recv(65536)
        if not part:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    parts = [body]
    left = length - len(body)
    while left > 0:
        part = sock.recv(65536)
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return head, b"".join(parts)
