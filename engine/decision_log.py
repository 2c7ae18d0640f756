"""The newest decisions of a running engine, as the lines of `decisions.ndjson`.

Input: entries of engine/journal.py. Output: pages of JSON lines by cursor.
Does not: write files, or interpret entries.

1. The cursor is the number of entries ever written: `page(after)` gives those from `after` on, and where to go on.
2. Memory is bounded in bytes; the oldest lines go first, and a page says how many it misses.
3. An entry is encoded when it is written (about 2 microseconds; docs/engine-http.md has the whole cost).
"""
from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any, TypeVar

import orjson

LIMIT_BYTES = 64 * 1024 * 1024  # about 190,000 decisions of 45,000 requests
Item = TypeVar("Item")


def page_of(kept: deque[Item], total: int, after: int, limit: int | None) -> tuple[list[Item], int, int]:
    """A page of the newest of `total` items: (items, cursor to go on with, items that were asked for and are gone)."""
    oldest = total - len(kept)
    start = min(max(after, oldest), total)
    end = total if limit is None else min(total, start + limit)
    return list(islice(kept, start - oldest, end - oldest)), end, max(0, start - after)


class DecisionLog:
    """A ring of encoded entries."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._lines: deque[bytes] = deque()
        self._limit = limit_bytes
        self._bytes = 0
        self.total = 0  # entries ever written; also the cursor of the next one

    def add(self, entry: dict[str, Any]) -> None:
        """Keep one entry. Infinite numbers become null, as in the file."""
        line = orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
        self._lines.append(line)
        self._bytes += len(line)
        self.total += 1
        while self._bytes > self._limit:
            self._bytes -= len(self._lines.popleft())

    def __len__(self) -> int:
        return len(self._lines)

    def page(self, after: int = 0, limit: int | None = None) -> tuple[list[bytes], int, int]:
        """(lines, cursor to go on with, entries that were asked for and are gone)."""
        return page_of(self._lines, self.total, after, limit)
