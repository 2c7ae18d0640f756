"""Counting the output events of a heap of chunked event stream without parsing them.

Input: bytes that begin at a chunk's size line; one output event to learn from.
Output: how many output events the heap begins with, the last of them, and where counting ended.
Does not: keep state of the stream (AnswerReader does), parse JSON, guess.

1. Chunk framing is followed exactly: only whole chunks that end with an event are counted.
2. What is counted: the needle, such as `"content":"` in this service's own spelling, without a closing quote at once.
   Inside a JSON string every quote has a backslash before it, so generated text cannot contain the needle.
3. A number is taken only when there is exactly one hit for every event, each has the quotes of the last one (which is
   parsed) and nothing that JSON strings have not, and no error, empty output, finish reason or second choice is hidden
   among them; otherwise nothing is counted, and the reader parses.
4. Quicker still, and exact without exception, are events that equal an event which was parsed, byte by byte, but for
   the text inside the quotes of their output (`alike`): they mean the same, so not even the last of them is parsed.
"""
from __future__ import annotations

import re
from operator import itemgetter

from bench.client.chat_state import CONTENT, REASONING
from bench.client.http1 import LINE_LENGTHS, SIZE_LINES, SIZES

# Chunks without output at the end of a heap: finish, usage, and some to spare.
TAIL_CHUNKS = 6
_KEYS = (
    (b'"content"', CONTENT),
    (b'"text"', CONTENT),
    (b'"reasoning_content"', REASONING),
    (b'"reasoning"', REASONING),
)
NOTHING: tuple[int, bytes, int] = (0, b"", 0)
# The end of an event and of the chunk it is in.
_CHUNK_END = b"\n\n\r\n"
# Bytes that plain text in a JSON string has none of: the end of the string, escapes, control characters.
_NOT_PLAIN = bytes(range(32)) + b'"\\'
# The inside of a JSON string as our JSON reader takes it; escaped surrogates are left to it.
_STRING = re.compile(rb'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})+')
# All bytes but those by which an event's form is known: quotes, escapes, control characters and so line ends.
_NO_MARKS = bytes(i for i in range(32, 256) if i not in b'"\\')
_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
# After so many heaps without one event like the template it is given up: its services vary more than the text.
MISSES_MAX = 4


class HeapCounter:
    """What the output events of one stream look like."""

    __slots__ = ("needle", "kind", "before", "_after", "_empty", "_end", "_finish", "_second", "_misses")

    def __init__(self) -> None:
        self.needle: bytes | None = None
        self.kind = CONTENT
        self._empty = b""
        self._finish = b""
        self._second = b""
        self.before = b""  # what an event line has before its text; empty = no template
        self._after = self._end = b""
        self._misses = 0

    def learn(self, event: bytes) -> None:
        """Choose the needle from an output event; none when the format is not that simple.

        event: the JSON, or the whole line `data: JSON` where it is known. It is the template too; where the spelling of
        the line is not known it is guessed, and a wrong guess fits no event.
        """
        self.needle = None
        self.before = b""
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
            self._second = b'"index": 1' if self.needle.endswith(b' "') else b'"index":1'
            self.adopt(event if event.startswith(b"data:") else b"data: " + event)

    def meet(self, line: bytes) -> None:
        """Take an output event that was parsed although there may be a template: it was not like it."""
        if self.needle is None:
            if self._misses < MISSES_MAX:
                self._misses += 1
                self.learn(line)
        elif self._misses < MISSES_MAX:
            self._misses += 1
            self.adopt(line)

    def is_alike(self, data: bytes) -> bool:
        """Return True when `data` is one whole chunk that is like the template."""
        size = SIZE_LINES.get(len(data) - 4)
        if size is None or not data.startswith(size):
            return False
        start = len(size)
        if not data.startswith(self.before, start) or not data.endswith(self._end):
            return False
        text = data[start + len(self.before) : -len(self._end)]
        if not text or (len(text.translate(None, _NOT_PLAIN)) != len(text) and _STRING.fullmatch(text) is None):
            return False
        self._misses = 0
        return True

    def adopt(self, line: bytes) -> None:
        """Take the line of an event that was parsed, and carried `kind`, as the template."""
        needle = self.needle
        assert needle is not None
        start = line.find(needle) + len(needle)
        end = line.find(b'"', start)
        one_line = b"\r" not in line and b"\n" not in line
        fits = start >= len(needle) and end >= 0 and self._misses < MISSES_MAX and one_line
        # An escaped quote is no end; the next event will do.
        self.before = line[:start] if fits and b"\\" not in line[start:end] else b""
        self._after = line[end:]
        self._end = self._after + _CHUNK_END

    def alike(self, data: bytes) -> tuple[int, int]:
        """Return (output events, where they end): the whole chunks at the start of `data` that are like the template.

        Each is one chunk: size line, event line, empty line. The heap is taken apart, its size lines are written anew
        from the lengths of the pieces, and all must be as it was; that compares everything at once, in C.
        """
        pieces = data.split(_CHUNK_END)
        sizes = list(map(SIZE_LINES.get, map(len, pieces)))
        if not pieces.pop() and sizes.pop() is None and sizes and None not in sizes:
            before, after = self.before, self._after
            n = len(sizes)
            cut = itemgetter(slice(len(sizes[0]) + len(before), -len(after)))  # type: ignore[arg-type]
            texts = list(map(cut, pieces))
            parts: list[bytes | None] = [None, before, None, after, _CHUNK_END] * n
            parts[0::5] = sizes
            parts[2::5] = texts
            text = b"".join(texts)
            if (
                b"".join(parts) == data  # type: ignore[arg-type]
                and all(texts)
                and (len(text.translate(None, _NOT_PLAIN)) == len(text) or all(map(_STRING.fullmatch, texts)))
            ):
                self._misses = 0
                return n, len(data)
        return self._alike_one_by_one(data.split(b"\n"))

    def _alike_one_by_one(self, parts: list[bytes]) -> tuple[int, int]:
        """The same for a heap that ends with something else."""
        before, after = self.before, self._after
        n = stop = 0
        least = len(before) + len(after)
        for i in range(0, len(parts) - 4, 4):
            line = parts[i + 1]
            if (
                LINE_LENGTHS.get(parts[i]) != len(line)
                or len(line) <= least
                or not line.startswith(before)
                or not line.endswith(after)
                or parts[i + 2]
                or parts[i + 3] != b"\r"
            ):
                break
            if _STRING.fullmatch(line, len(before), len(line) - len(after)) is None:
                break
            n += 1
            stop += len(parts[i]) + len(line) + 5
        self._misses = 0 if n else self._misses + 1
        if self._misses >= MISSES_MAX:
            self.before = b""
        return n, stop

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
        # Carriage returns: those of framing alone, else they end lines too.
        if data.count(b"\n", 0, stop) != 2 * (alike + events) or data.count(b"\r", 0, stop) != 2 * alike:
            return NOTHING
        last = data.rfind(b"\n", 0, stop - 4) + 1
        if not data.startswith(b"data:", last) or data.find(needle, last, stop) < 0:
            return NOTHING
        if not _same_marks(data[:stop], data[last : stop - 2], events):
            return NOTHING
        hidden = data.find(empty, 0, stop) >= 0 or data.find(b'"error"', 0, stop) >= 0
        if hidden or data.find(self._finish, 0, last) >= 0 or data.find(self._second, 0, stop) >= 0:
            return NOTHING
        return events, data[last + 5 : stop - 4], stop


def _same_marks(heap: bytes, event: bytes, events: int) -> bool:
    """Return whether the heap may be so many chunks of the same form as `event`, the last event, which will be parsed.

    It is not when an event is cut off, has more or fewer quotes (and so other fields) than that one, or what JSON
    strings must not have: a control character, an unknown escape.
    """
    if b"\\" in heap:
        heap, event = _ESCAPE.sub(b"", heap), _ESCAPE.sub(b"", event)
    marks, each = heap.translate(None, _NO_MARKS).replace(b"\r\n", b""), event.translate(None, _NO_MARKS)
    sound = each.lstrip(b'"') == b"\n\n" and len(each) % 2 == 0  # quotes in pairs and nothing else
    return sound and marks == each * events and heap.count(b"}\n\n") == events
