"""The engine's own record of every request: what a client's measurement is compared with.

Input: one dict per ended request. Output: NDJSON rows of `/debug/requests`, newest kept in a bounded ring.
Does not: compute latencies.

All times are seconds of CLOCK_MONOTONIC (`time.monotonic()`), the clock that other processes of the machine share.
"""
from __future__ import annotations

from collections import deque
from typing import Any

import orjson

# name -> meaning; also the order of the keys.
FIELDS: dict[str, str] = {
    "request_id": "the client's x-request-id, or the one the engine made",
    "received_s": "the last byte of the request was read",
    "queued_s": "the scheduler took the request (None when it was refused)",
    "scheduled_s": "start of the first step that worked on it",
    "first_token_s": "just before the socket write of the first token's chunk",
    "last_token_s": "just before the socket write of the last token's chunk",
    "done_s": "after the write of the last byte, or when the request ended otherwise",
    "prompt_tokens": "words of the prompt",
    "cached_tokens": "prompt tokens found in the prefix cache",
    "max_tokens": "limit that the request asked for (or the default)",
    "output_tokens": "tokens made",
    "chunks": "events with output that were written",
    "preemptions": "how often its blocks were taken away",
    "outcome": "ok, rejected, aborted (the client left), failed (given up), or fault (ended on purpose)",
    "reason": "finish reason, reject reason, or kind of the fault",
    "http_status": "status code of the answer",
    "decision_s": "scheduler CPU time spent while the request was in the engine; part of its latency",
    "replica": "index of the replica that served it",
    "tenant": "tenant label or None",
    "request_class": "class label or None",
    "fault": "kind of the injected fault that was drawn for it, or None",
}


class TruthLog:
    """The newest `limit` records."""

    def __init__(self, limit: int = 50_000) -> None:
        self._rows: deque[tuple[Any, ...]] = deque(maxlen=limit)
        self.total = 0

    def add(self, record: dict[str, Any]) -> None:
        """Keep one record; it must have exactly the keys of FIELDS."""
        if len(record) != len(FIELDS):
            raise ValueError(f"a record has the keys {sorted(record)}, not {sorted(FIELDS)}")
        self._rows.append(tuple([record[name] for name in FIELDS]))
        self.total += 1

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, *, clear: bool) -> list[tuple[Any, ...]]:
        """All kept records, oldest first; with `clear` they are forgotten in the same moment."""
        rows = list(self._rows)
        if clear:
            self._rows.clear()
        return rows


def encode(rows: list[tuple[Any, ...]]) -> bytes:
    """Records as lines of JSON."""
    return b"".join([orjson.dumps(dict(zip(FIELDS, row, strict=True)), option=orjson.OPT_APPEND_NEWLINE)
                     for row in rows])
