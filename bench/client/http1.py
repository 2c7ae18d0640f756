"""Incremental framing of one HTTP/1.x response: bytes in, body bytes out.

Input: the bytes of one answer, in any pieces. Output: `ResponseParser` (status, fields, body bytes, completeness).
Does not: read sockets, decompress, follow redirects, or look into the body.

1. The result does not depend on how the bytes were cut.
2. Memory is bounded: at most `MAX_HEAD_BYTES` of a header block, `MAX_LINE_BYTES` of a chunk-size line and
   `MAX_TRAILER_BYTES` of trailers are held; body bytes are handed on and never kept.
3. Work is linear in the bytes received.
4. Nothing but `ProtocolError` is raised; it has the body bytes that came before the fault in the same piece.

Source: RFC 9112 sections 2-7. Why it is written here: docs/decisions/0003-own-response-framing.md (h11 is the
independent oracle in tests/client/test_http1.py).
"""
from __future__ import annotations

import re

from bench.client.errors import ProtocolError

# 64 KiB is four times what common servers send at most; a header bomb ends there.
MAX_HEAD_BYTES = 65_536
MAX_LINE_BYTES = 4_096
MAX_TRAILER_BYTES = 16_384
MAX_INTERIM = 16

# Phases. SIZE, DATA, END and TRAILER belong to chunked bodies.
HEAD, LENGTH, CLOSE, SIZE, DATA, END, TRAILER, COMPLETE = range(8)

_STATUS_LINE = re.compile(rb"HTTP/(\d)\.(\d) (\d{3})(?: [^\r\n]*)?$")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*(.*?)[ \t]*$", re.S)
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?$")
_START = b"HTTP/1."

# Chunk-size lines repeat endlessly, so their values are looked up; only validated lines get in, and not too many.
SIZES: dict[bytes, int] = {}
# The same for a chunk that is one event of one line: size line with its CR -> length of that line.
LINE_LENGTHS: dict[bytes, int] = {}
# And the size lines (with CRLF), as services spell them, by the length of size line and chunk together, without CRLFs.
SIZE_LINES: dict[int, bytes] = {}
_SIZES_MAX = 8_192
# Header blocks repeat too, at least within a second (`date`): block -> what it says, see `_parse_head`.
_HEADS: dict[bytes, tuple[int, dict[str, str], tuple[int, int], int, int, bool]] = {}
_HEADS_MAX, _HEADS_MAX_BYTES = 64, 2_048


def chunk_size(line: bytes) -> int:
    """Return the size in a chunk-size line (without its CRLF); the last chunk's is 0."""
    match = _SIZE_LINE.match(line)
    if match is None:
        raise ProtocolError("SC-HTTP", f"a chunk starts with {line[:40]!r}, not with its size")
    size = int(match.group(1), 16)
    if len(SIZES) < _SIZES_MAX and len(line) <= 16:
        SIZES[bytes(line)] = size
        LINE_LENGTHS[bytes(line) + b"\r"] = size - 2
        SIZE_LINES.setdefault(len(line) + size, bytes(line) + b"\r\n")
    return size


class ResponseParser:
    """State of one answer on a connection; use a new one for each request."""

    __slots__ = ("phase", "status", "headers", "version", "trailing", "interim", "line", "_head", "_scan", "_left",
                 "_trailer_bytes", "_reusable")  # fmt: skip

    def __init__(self) -> None:
        self.phase = HEAD
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.version = (1, 1)
        self.trailing = False
        self.interim = 0
        self.line = b""
        self._head = bytearray()
        self._scan = 0
        self._left = 0
        self._trailer_bytes = 0
        self._reusable = True

    @property
    def complete(self) -> bool:
        return self.phase == COMPLETE

    @property
    def has_head(self) -> bool:
        return self.phase != HEAD

    @property
    def head_bytes(self) -> int:
        """Bytes of an unfinished header block."""
        return len(self._head)

    @property
    def keep_alive(self) -> bool:
        """May the connection carry another request: complete, self-delimited, nothing left over, not refused."""
        return self.phase == COMPLETE and self._reusable and not self.trailing

    def receive(self, data: bytes) -> bytes:
        """Return the body bytes in `data` (b"" when there are none yet)."""
        phase = self.phase
        if phase == HEAD:
            data = self._receive_head(data)
            phase = self.phase
            if not data and phase != COMPLETE:
                return b""
        if phase == CLOSE:
            return data
        if phase == LENGTH:
            return self._receive_length(data)
        if phase == COMPLETE:
            self.trailing = self.trailing or bool(data)
            return b""
        return self._receive_chunked(data)

    def eof(self) -> bool:
        """Return True when the answer is complete now that the peer has closed."""
        if self.phase == CLOSE:
            self.phase = COMPLETE
        self._reusable = False
        return self.phase == COMPLETE

    # --- header block ---

    def _receive_head(self, data: bytes) -> bytes:
        head = self._head
        head += data
        while True:
            if self._scan == 0:
                while head[:1] in (b"\r", b"\n"):
                    del head[0]
            if bytes(head[:7]) != _START[: len(head)]:
                raise ProtocolError("SC-HTTP", f"the answer starts with {bytes(head[:24])!r}, not with HTTP/1")
            end, after = self._blank_line()
            if end < 0:
                if len(head) > MAX_HEAD_BYTES:
                    raise ProtocolError("SC-HEADERS", f"the header block is above {MAX_HEAD_BYTES} bytes")
                return b""
            if end > MAX_HEAD_BYTES:
                raise ProtocolError("SC-HEADERS", f"the header block is above {MAX_HEAD_BYTES} bytes")
            self._take_head(bytes(head[:end]))
            del head[:after]
            self._scan = 0
            if self.status is not None and self.status >= 200:
                rest = bytes(head)
                self._head = bytearray()
                return rest
            self.interim += 1
            if self.interim > MAX_INTERIM:
                raise ProtocolError("SC-HTTP", f"more than {MAX_INTERIM} interim (1xx) answers")

    def _blank_line(self) -> tuple[int, int]:
        """Find the end of the header block: (length of the block, start of the body), or (-1, -1)."""
        head = self._head
        at = self._scan
        while True:
            at = head.find(b"\n", at)
            if at < 0:
                # A blank line may be cut after its first bytes: look at the last two again.
                self._scan = max(self._scan, len(head) - 2, 0)
                return -1, -1
            if head[at + 1 : at + 2] == b"\n":
                return at, at + 2
            if head[at + 1 : at + 3] == b"\r\n":
                return at, at + 3
            if at + 2 >= len(head):
                self._scan = at
                return -1, -1
            at += 1

    def _take_head(self, block: bytes) -> None:
        known = _HEADS.get(block)
        if known is not None:
            self.status, headers, self.version, self.phase, self._left, self._reusable = known
            self.headers = headers.copy()
            return
        self._parse_head(block)
        if self.status is not None and self.status >= 200:
            self._choose_framing()
            if len(block) <= _HEADS_MAX_BYTES:
                if len(_HEADS) >= _HEADS_MAX:
                    _HEADS.clear()
                _HEADS[block] = (self.status, self.headers.copy(), self.version, self.phase, self._left, self._reusable)

    def _parse_head(self, block: bytes) -> None:
        lines = block.split(b"\n")
        match = _STATUS_LINE.match(lines[0].rstrip(b"\r"))
        if match is None or match.group(1) != b"1":
            raise ProtocolError("SC-HTTP", f"the status line is {lines[0][:60]!r}")
        self.version = (1, int(match.group(2)))
        status = int(match.group(3))
        if status < 100 or status == 101:
            raise ProtocolError("SC-HTTP", f"status {status} was not asked for")
        headers: dict[str, str] = {}
        name = ""
        for raw in lines[1:]:
            line = raw.rstrip(b"\r")
            if b"\x00" in line or b"\r" in line:
                raise ProtocolError("SC-HTTP", "a control character in a header field")
            if line[:1] in (b" ", b"\t") and name:  # obsolete line folding
                headers[name] += " " + line.strip().decode("latin-1")
                continue
            field = _FIELD.match(line)
            if field is None:
                raise ProtocolError("SC-HTTP", f"a header line is {line[:60]!r}")
            name = field.group(1).decode("ascii").lower()
            value = field.group(2).decode("latin-1")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        self.status = status
        self.headers = headers

    def _choose_framing(self) -> None:
        """RFC 9112 section 6.3: what ends the body, and whether the connection may be kept."""
        headers = self.headers
        options = {item.strip().lower() for item in headers.get("connection", "").split(",")}
        self._reusable = "keep-alive" in options if self.version < (1, 1) else "close" not in options
        if self.status in (204, 304):
            self.phase = COMPLETE
            return
        encoding = headers.get("transfer-encoding")
        if encoding is not None:
            if "content-length" in headers:
                self._reusable = False  # ambiguous framing: read it as chunked, then close
            codings = [item.strip().lower() for item in encoding.split(",") if item.strip()]
            if codings != ["chunked"]:
                raise ProtocolError("SC-HTTP", f"transfer-encoding {encoding[:40]!r} is not supported")
            self.phase = SIZE
            return
        length = headers.get("content-length")
        if length is None:
            self._reusable = False
            self.phase = CLOSE
            return
        values = {item.strip() for item in length.split(",")}
        text = values.pop()
        if values or not (text.isascii() and text.isdigit() and len(text) <= 15):
            raise ProtocolError("SC-HTTP", f"content-length is {length[:40]!r}")
        self._left = int(text)
        self.phase = LENGTH if self._left else COMPLETE

    # --- bodies ---

    def _receive_length(self, data: bytes) -> bytes:
        left = self._left
        if len(data) < left:
            self._left = left - len(data)
            return data
        self.trailing = len(data) > left
        self.phase = COMPLETE
        self._left = 0
        return data[:left]

    def _receive_chunked(self, data: bytes) -> bytes:
        if self.line:
            data = self.line + data
            self.line = b""
        parts: list[bytes] = []
        pos, size_of = 0, SIZES.get
        n = len(data)
        phase = self.phase
        try:
            while pos < n:
                if phase == SIZE:
                    end = data.find(b"\r\n", pos, pos + MAX_LINE_BYTES)
                    if end < 0:
                        self._keep_line(data[pos:])
                        break
                    line = data[pos:end]
                    left = size_of(line)
                    if left is None:
                        left = chunk_size(line)
                    self._left = left
                    pos = end + 2
                    phase = DATA if left else TRAILER
                elif phase == DATA:
                    take = data[pos : pos + self._left]
                    parts.append(take)
                    pos += len(take)
                    self._left -= len(take)
                    if self._left == 0:
                        phase = END
                elif phase == END:
                    if n - pos < 2:
                        if data[pos] != 13:
                            raise ProtocolError("SC-HTTP", "a chunk is longer than its size says")
                        self.line = data[pos:]
                        break
                    if data[pos] != 13 or data[pos + 1] != 10:
                        raise ProtocolError("SC-HTTP", "a chunk is longer than its size says")
                    pos += 2
                    phase = SIZE
                elif phase == TRAILER:
                    end = data.find(b"\r\n", pos, pos + MAX_LINE_BYTES)
                    if end < 0:
                        self._keep_line(data[pos:])
                        break
                    self._trailer_bytes += end + 2 - pos
                    if self._trailer_bytes > MAX_TRAILER_BYTES:
                        raise ProtocolError("SC-HEADERS", f"the trailers are above {MAX_TRAILER_BYTES} bytes")
                    if end == pos:
                        phase = COMPLETE
                    pos = end + 2
                else:
                    self.trailing = True
                    break
        except ProtocolError as error:
            error.before = b"".join(parts)
            raise
        self.phase = phase
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _keep_line(self, rest: bytes) -> None:
        if len(rest) >= MAX_LINE_BYTES:
            raise ProtocolError("SC-HTTP", f"a chunk-size or trailer line is above {MAX_LINE_BYTES} bytes")
        self.line = rest
