"""A small, fast HTTP/1.1 server: bytes of one connection in, requests out, answers and streams written back.

Input: an `Application` whose `handle(connection, request)` is called once for each request.
Output: `Connection` with `respond` (whole answer) and `open_stream`, `write`, `end_stream` (chunked answer).
Does not: know models, tokens, or schedulers.

1. One request of a connection is answered before the next is read (pipelined bytes wait).
2. A client that goes away while its request is open is reported exactly once, by `Request.on_disconnect`.
3. Buffers are bounded: header block 32 KiB, body 16 MiB, unsent answer bytes 32 MiB.

Source of the framing rules: RFC 9112.
"""
from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Callable
from typing import Protocol

MAX_HEADER_BYTES = 32 * 1024
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_UNSENT_BYTES = 32 * 1024 * 1024
# A request whose bytes stop coming for this long is answered with 408.
REQUEST_TIMEOUT_S = 30.0

REASONS = {
    200: "OK", 204: "No Content", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found",
    405: "Method Not Allowed", 408: "Request Timeout", 413: "Content Too Large", 429: "Too Many Requests",
    431: "Request Header Fields Too Large", 500: "Internal Server Error", 501: "Not Implemented",
    502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout",
}
LAST_CHUNK = b"0\r\n\r\n"


class Application(Protocol):
    """What the server needs from the code behind it."""

    def handle(self, connection: Connection, request: Request) -> None:
        """Answer `request` now, or keep `connection` and answer later."""

    def bad_request(self, status: int, message: str) -> bytes:
        """The JSON body for a request that could not be read."""


class Request:
    """One HTTP request: method, path, query text, headers (lower-case names) and body."""

    __slots__ = ("method", "path", "query", "headers", "body", "received_s", "on_disconnect")

    def __init__(self, method: str, target: str, headers: dict[str, str], received_s: float) -> None:
        self.method = method
        self.path, _, self.query = target.partition("?")
        self.headers = headers
        self.body = b""
        self.received_s = received_s
        self.on_disconnect: Callable[[], None] | None = None


class BadRequest(Exception):
    """The bytes are not a request that this server takes; carries the status to answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def parse_head(block: bytes, received_s: float) -> Request:
    """The request described by a header block (without its last empty line); raises `BadRequest`."""
    lines = block.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or not parts[1].startswith("/"):
        raise BadRequest(400, f"not an HTTP/1.1 request line: {lines[0][:80]!r}")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise BadRequest(400, f"not a header line: {line[:80]!r}")
        key = name.lower()
        if key == "content-length" and headers.get(key, value.strip()) != value.strip():
            raise BadRequest(400, "two different Content-Length headers")
        headers[key] = value.strip()
    if parts[2] == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return Request(parts[0], parts[1], headers, received_s)


class Connection(asyncio.Protocol):
    """One client connection."""

    __slots__ = ("_server", "_transport", "_buffer", "_searched", "_request", "_need", "_busy", "_close", "_lost",
                 "_chunked_body", "_current", "active_s", "write", "__weakref__")

    def __init__(self, server: Server) -> None:
        self._server = server
        self._buffer = b""
        self._searched = 0
        self._request: Request | None = None
        self._need = 0
        self._busy = False
        self._close = False
        self._lost = False
        self._chunked_body: ChunkedBody | None = None
        self._current: Request | None = None
        self.active_s = time.monotonic()

    # --- asyncio callbacks -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.write = transport.write  # type: ignore[attr-defined]
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._server.connections.discard(self)
        self._report_disconnect()

    def eof_received(self) -> bool:
        # A client that half-closes with its request open has gone away (as uvicorn sees it): drop what is unsent.
        if self._busy:
            self._transport.abort()
        return False

    def data_received(self, data: bytes) -> None:
        self.active_s = time.monotonic()
        self._buffer = self._buffer + data if self._buffer else data
        if self._busy:
            if len(self._buffer) > MAX_BODY_BYTES:
                self._transport.abort()
            return
        self._advance()

    # --- reading -----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Take as many requests from the buffer as can be answered now."""
        try:
            while not self._busy and not self._lost:
                if self._request is None and not (self._buffer and self._read_head()):
                    return
                if not self._read_body():
                    return
                request, self._request = self._request, None
                assert request is not None
                self._busy = True
                self._close = self._close or request.headers.get("connection", "").lower() == "close"
                self._current = request
                self._server.app.handle(self, request)
        except BadRequest as problem:
            self._close = True
            self._busy = True
            self.respond(problem.status, self._server.app.bad_request(problem.status, str(problem)))
        except Exception:  # a bug: say so on both sides, keep serving the others
            traceback.print_exc(file=sys.stderr)
            self._close = True
            if not self._lost:
                self.respond(500, self._server.app.bad_request(500, "the engine failed; its log has the traceback"))

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n", max(0, self._searched - 3))
        if end < 0:
            self._searched = len(self._buffer)
            if len(self._buffer) > MAX_HEADER_BYTES:
                raise BadRequest(431, f"the header block is longer than {MAX_HEADER_BYTES} bytes")
            return False
        if end > MAX_HEADER_BYTES:
            raise BadRequest(431, f"the header block is longer than {MAX_HEADER_BYTES} bytes")
        request = parse_head(self._buffer[:end], self.active_s)
        self._buffer = self._buffer[end + 4:]
        self._searched = 0
        self._request = request
        coding = request.headers.get("transfer-encoding")
        length = request.headers.get("content-length", "0")
        self._chunked_body = None
        if coding is not None:
            if coding.lower() != "chunked" or "content-length" in request.headers:
                raise BadRequest(501 if coding.lower() != "chunked" else 400, f"Transfer-Encoding {coding!r}")
            self._chunked_body = ChunkedBody()
        elif not (length.isascii() and length.isdigit()):
            raise BadRequest(400, f"Content-Length is {length[:20]!r}, not a number")
        else:
            self._need = int(length)
            if self._need > MAX_BODY_BYTES:
                raise BadRequest(413, f"the body has {self._need} bytes; at most {MAX_BODY_BYTES} are taken")
        if request.headers.get("expect", "").lower() == "100-continue" and not self._buffer:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _read_body(self) -> bool:
        request = self._request
        assert request is not None
        if self._chunked_body is not None:
            rest = self._chunked_body.feed(self._buffer)
            self._buffer = b"" if rest is None else rest
            if rest is None:
                return False
            request.body = b"".join(self._chunked_body.parts)
        elif len(self._buffer) < self._need:
            return False
        else:
            request.body, self._buffer = self._buffer[: self._need], self._buffer[self._need:]
        # The request counts as received when its last byte is here.
        request.received_s = self.active_s
        return True

    # --- writing -----------------------------------------------------------------------------------------------

    def respond(self, status: int, body: bytes, content_type: str = "application/json", extra: str = "") -> None:
        """Write a whole answer; `extra` holds further header lines, each ending in CRLF."""
        closing = "Connection: close\r\n" if self._close else ""
        head = (f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}\r\nContent-Type: {content_type}\r\n"
                f"Content-Length: {len(body)}\r\n{extra}{closing}\r\n")
        self.write(head.encode("latin-1") + body)
        self.finish()

    def open_stream(self, content_type: str = "text/event-stream; charset=utf-8", extra: str = "") -> None:
        """Write the header block of a chunked answer."""
        closing = "Connection: close\r\n" if self._close else ""
        self.write(f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nCache-Control: no-cache\r\n"
                   f"Transfer-Encoding: chunked\r\n{extra}{closing}\r\n".encode("latin-1"))

    def finish(self) -> None:
        """The answer is written: close, or go on with what the client sent meanwhile."""
        self._busy = False
        self._current = None
        self.active_s = time.monotonic()
        if self._close:
            self._transport.close()
        elif self._buffer:
            asyncio.get_running_loop().call_soon(self._advance)

    def unsent_bytes(self) -> int:
        """Bytes written but not yet taken by the client's side of the connection."""
        return self._transport.get_write_buffer_size()

    def cut(self, *, reset: bool = False) -> None:
        """End the connection in the middle of an answer: after the written bytes, or at once with a reset."""
        self._current = None
        self._transport.abort() if reset else self._transport.close()

    @property
    def lost(self) -> bool:
        """True when the connection is gone."""
        return self._lost or self._transport.is_closing()

    def _report_disconnect(self) -> None:
        request, self._current = self._current, None
        if request is not None and request.on_disconnect is not None:
            request.on_disconnect()

    def expire(self, now_s: float, keep_alive_s: float) -> None:
        """Close when idle for too long; answer 408 when a request stopped in the middle."""
        idle_s = now_s - self.active_s
        if self._busy:
            if self.unsent_bytes() > MAX_UNSENT_BYTES:
                self._transport.abort()
        elif self._buffer or self._request is not None:
            if idle_s > REQUEST_TIMEOUT_S:
                self._close = True
                self.respond(408, self._server.app.bad_request(408, "the request stopped in the middle"))
        elif idle_s > keep_alive_s:
            self._transport.close()


class ChunkedBody:
    """Reads a request body in chunks; `feed` returns the bytes after it, or None while it goes on."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._buffer = b""
        self._size = 0

    def feed(self, data: bytes) -> bytes | None:
        self._buffer += data
        while True:
            line_end = self._buffer.find(b"\r\n")
            if line_end < 0:
                if len(self._buffer) > 1024:
                    raise BadRequest(400, "a chunk size line is too long")
                return None
            try:
                size = int(self._buffer[:line_end].split(b";")[0], 16)
            except ValueError:
                raise BadRequest(400, "a chunk size is not a hexadecimal number") from None
            self._size += size
            if size < 0 or self._size > MAX_BODY_BYTES:
                raise BadRequest(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
            if len(self._buffer) < line_end + 2 + size + 2:
                self._size -= size
                return None
            if size == 0:
                return self._buffer[line_end + 4:]
            self.parts.append(self._buffer[line_end + 2: line_end + 2 + size])
            self._buffer = self._buffer[line_end + 4 + size:]


class Server:
    """The listening socket and its open connections."""

    def __init__(self, app: Application, *, keep_alive_s: float = 5.0) -> None:
        self.app = app
        self.keep_alive_s = keep_alive_s
        self.connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port number (the one chosen by the system when `port` is 0)."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: Connection(self), host, port, backlog=2048)
        self._sweep = loop.call_later(1.0, self._expire)
        return int(self._listener.sockets[0].getsockname()[1])

    def _expire(self) -> None:
        now_s = time.monotonic()
        for connection in list(self.connections):
            connection.expire(now_s, self.keep_alive_s)
        self._sweep = asyncio.get_running_loop().call_later(1.0, self._expire)

    def stop(self) -> None:
        """Stop listening and close every connection."""
        if self._sweep is not None:
            self._sweep.cancel()
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.cut()
