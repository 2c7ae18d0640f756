"""Counting the output events of a heap of chunked event stream without parsing them.

Input: bytes that begin at a chunk's size line; one output event to learn from.
Output: how many output events the heap begins with, the last of them, and where counting ended.
Does not: keep state of the stream (AnswerReader does), parse JSON, guess.

1. Chunk framing is followed exactly: only whole chunks that end with an event are counted.
2. What is counted: the needle, such as `"content":"` in this service's own spelling, without a closing quote at once.
   Inside a JSON string every quote has a backslash before it, so generated text cannot contain the needle.
3. A number is taken only when there is exactly one hit for every event and no error, empty output or finish reason is
   hidden among them; otherwise nothing is counted, and the reader parses.
"""
from __future__ import annotations

from bench.client.chat import CONTENT, REASONING
from bench.client.http1 import SIZES

# Chunks without output at the end of a heap: finish, usage, and some to spare.
TAIL_CHUNKS = 6
_KEYS = (
    (b'"content"', CONTENT),
    (b'"text"', CONTENT),
    (b'"reasoning_content"', REASONING),
    (b'"reasoning"', REASONING),
)
NOTHING: tuple[int, bytes, int] = (0, b"", 0)


class HeapCounter:
    """What the output events of one stream look like."""

    __slots__ = ("needle", "kind", "_empty", "_finish")

    def __init__(self) -> None:
        self.needle: bytes | None = None
        self.kind = CONTENT
        self._empty = b""
        self._finish = b""

    def learn(self, event: bytes) -> None:
        """Choose the needle from an output event; none when the format is not that simple."""
        self.needle = None
        found = [
            (key + colon, kind)
            for key, kind in _KEYS
            for colon in (b':"', b': "')
            if event.count(key + colon) == 1 and key + colon + b'"' not in event
        ]
        if len(found) == 1:
            self.needle, self.kind = found[0]
            self._empty = self.needle + b'"'
            self._finish = b'"finish_reason": "' if self.needle.endswith(b' "') else b'"finish_reason":"'

    def walk(self, data: bytes) -> tuple[list[int], int, bool]:
        """Return where the whole, usual chunks begin, where they end, and whether what follows is unusual.

        Not unusual is a chunk that has not come whole. Nothing is copied.
        """
        n = len(data)
        pos = 0
        starts: list[int] = []
        find, begins, size_of = data.find, data.startswith, SIZES.get
        while pos < n:
            end = find(b"\r\n", pos, pos + 18)
            size = size_of(data[pos:end]) if end > 0 else None
            if not size:
                return starts, pos, end > 0 or n - pos >= 18
            after = end + size + 4
            if after > n:
                # An event that has ended in a chunk that has not must not wait for the next heap and get its time.
                return starts, pos, find(b"\n", end + 2) >= 0 or find(b"\r", end + 2) >= 0
            if not begins(b"\n\n\r\n", after - 4):
                return starts, pos, True
            starts.append(pos)
            pos = after
        return starts, pos, False

    def count(self, data: bytes, starts: list[int], stop: int) -> tuple[int, bytes, int]:
        """Return (output events, data of the last one, where they end) of the chunks at `starts`, up to `stop`."""
        needle, empty = self.needle, self._empty
        assert needle is not None
        alike = len(starts)
        for _ in range(TAIL_CHUNKS):
            if not alike:
                return NOTHING
            begin = starts[alike - 1]
            if data.find(needle, begin, stop) >= 0 and data.find(empty, begin, stop) < 0:
                break
            alike -= 1
            stop = begin
        else:
            return NOTHING
        events = data.count(needle, 0, stop)
        # Line feeds: two of framing for each chunk, two for each event of one line. Any other line breaks the equation.
        if data.count(b"\n", 0, stop) != 2 * (alike + events):
            return NOTHING
        last = data.rfind(b"\n", 0, stop - 4) + 1
        if not data.startswith(b"data:", last) or data.find(needle, last, stop) < 0:
            return NOTHING
        hidden = data.find(empty, 0, stop) >= 0 or data.find(b'"error"', 0, stop) >= 0
        if hidden or data.find(self._finish, 0, last) >= 0:
            return NOTHING
        return events, data[last + 5 : stop - 4], stop
