"""The newest decisions of a running engine, as the lines of `decisions.ndjson`.

Input: entries of engine/journal.py. Output: pages of JSON lines by cursor.
Does not: write files, or interpret entries.

1. The cursor is the number of entries ever written: `page(after)` gives those from `after` on, and where to go on.
2. Memory is bounded in bytes; the oldest lines go first, and a page says how many it misses.
3. An entry is encoded when it is written (about 2 microseconds; docs/engine-http.md has the whole cost).
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import orjson

LIMIT_BYTES = 64 * 1024 * 1024  # about 190,000 decisions of 45,000 requests


class DecisionLog:
    """A ring of encoded entries."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._lines: deque[bytes] = deque()
        self._limit = limit_bytes
        self._bytes = 0
        self.total = 0  # entries ever written; also the cursor of the next one
        self.listener: Callable[[dict[str, Any]], None] | None = None  # told each entry, too

    def add(self, entry: dict[str, Any]) -> None:
        """Keep one entry. Infinite numbers become null, as in the file."""
        line = orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
        self._lines.append(line)
        self._bytes += len(line)
        self.total += 1
        while self._bytes > self._limit:
            self._bytes -= len(self._lines.popleft())
        if self.listener is not None:
            self.listener(entry)

    def __len__(self) -> int:
        return len(self._lines)

    def page(self, after: int = 0, limit: int | None = None) -> tuple[list[bytes], int, int]:
        """(lines, cursor to go on with, entries that were asked for and are gone)."""
        oldest = self.total - len(self._lines)
        start = min(max(after, oldest), self.total)
        end = self.total if limit is None else min(self.total, start + limit)
        return list(islice(self._lines, start - oldest, end - oldest)), end, max(0, start - after)
