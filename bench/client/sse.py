"""Incremental reader of a server-sent event stream: body bytes in, events out.

Input: body bytes in any pieces. Output: `EventStream.feed` -> list of (event type, data bytes).
Does not: decode the data, know about chat or `[DONE]`, reconnect.

1. The events do not depend on how the bytes were cut; lines end in LF, CR or CRLF, mixed.
2. At most `max_event_bytes` are held (one unfinished event), however long the stream.
3. Work is linear in the bytes received.
4. Nothing but `ProtocolError` is raised; it has the events that ended before the fault in the same piece.
   Bytes that are no UTF-8 pass: the data stays bytes.
5. An event that is not ended by a blank line is not an event (the stream was cut inside it).

Source: HTML standard, section 9.2.6 "Interpreting an event stream".
"""
from __future__ import annotations

from bench.client.errors import ProtocolError

# A stream of tokens has events of 200 bytes; a whole tool call or image in one event has megabytes.
MAX_EVENT_BYTES = 16 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"
_NAME_MAX = 256
MESSAGE = "message"


class EventStream:
    """State of one stream. `comments`, `last_id` and `retry_ms` are what the stream said besides its events."""

    __slots__ = ("comments", "last_id", "retry_ms", "max_event_bytes", "_tail", "_data", "_has_data", "_type", "_first",
                 "_after_cr")  # fmt: skip

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.comments = 0
        self.last_id = ""
        self.retry_ms: int | None = None
        self.max_event_bytes = max_event_bytes
        self._tail = bytearray()  # a line that has not ended
        self._data = bytearray()  # data lines of an event that has not ended, each with its LF
        self._has_data = False
        self._type = ""
        self._first = True
        self._after_cr = False

    @property
    def clean(self) -> bool:
        """Between two events: nothing is held, so the next byte starts a line of a new event."""
        return not (self._tail or self._has_data or self._type or self._first or self._after_cr)

    @property
    def held_bytes(self) -> int:
        return len(self._tail) + len(self._data)

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """Return the events that end in `data`, in order; an event with an empty data field has b""."""
        if not data:
            return []
        if self._after_cr:
            # The LF of a CRLF that was cut in two does not end another line.
            self._after_cr = False
            if data[0] == 10:
                data = data[1:]
        if b"\r" in data:
            self._after_cr = data[-1] == 13
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if b"\n" not in data:
            self._tail += data
            self._check_size()
            return []
        lines = data.split(b"\n")
        if self._tail:
            self._tail += lines[0]
            lines[0] = bytes(self._tail)
            self._tail.clear()
        last = lines.pop()
        if self._first:
            self._first = False
            if lines[0].startswith(_BOM):
                lines[0] = lines[0][3:]
        events: list[tuple[str, bytes]] = []
        try:
            self._take_lines(lines, events)
            self._tail += last
            self._check_size()
        except ProtocolError as error:
            error.before = events
            raise
        return events

    def _take_lines(self, lines: list[bytes], events: list[tuple[str, bytes]]) -> None:
        for line in lines:
            if line.startswith(b"data: "):
                self._add(line[6:])
            elif line:
                self._field(line)
            else:
                if self._has_data:
                    del self._data[-1:]
                    events.append((self._type or MESSAGE, bytes(self._data)))
                    self._data.clear()
                    self._has_data = False
                self._type = ""

    def _add(self, value: bytes) -> None:
        self._has_data = True
        self._data += value
        self._data += b"\n"
        if len(self._data) > self.max_event_bytes:
            self._check_size()

    def _check_size(self) -> None:
        if len(self._tail) + len(self._data) > self.max_event_bytes:
            raise ProtocolError("SC-SIZE", f"one event is above {self.max_event_bytes} bytes")

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if name == b"data":
            self._add(value)
        elif not name:
            self.comments += 1
        elif name == b"event":
            self._type = value[:_NAME_MAX].decode("utf-8", "replace")
        elif name == b"id":
            if b"\x00" not in value:
                self.last_id = value[:_NAME_MAX].decode("utf-8", "replace")
        elif name == b"retry" and value.isdigit() and len(value) < 12:
            self.retry_ms = int(value)
