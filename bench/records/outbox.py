"""Numbered batches on their way to the master: kept until they are acknowledged, sent again when they are not.

Usage, on a worker:

    outbox = Outbox(keep=shard_rows, read=shard.read)     # or Outbox() without a disk
    outbox.add(pack(rows))
    for seq, data in outbox.due(now_s): send(seq, data)
    outbox.ack(seq)                                        # the master has all batches up to seq

Input: packed batches, acknowledgements, the time. Output: what is to be sent now.
Does not: send, wait, or read a clock.

1. At most `window` batches are on their way: a master that is behind slows the transport, never the load.
2. With a disk, memory holds `window` batches at most; the others are read back from the shard when their turn comes.
3. When nothing was acknowledged for `resend_s`, all from the first open one on are sent again: the master takes them
   in order only, so a lost message costs time, never a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

WINDOW = 16
RESEND_S = 2.0


class Outbox:
    """The batches of one stripe in one stage; sequence numbers start at 1."""

    def __init__(
        self,
        *,
        keep: Callable[[int, bytes], Any] | None = None,
        read: Callable[[Any], bytes] | None = None,
        window: int = WINDOW,
        resend_s: float = RESEND_S,
    ) -> None:
        self._keep, self._read = keep, read
        self.window, self.resend_s = window, resend_s
        self.added = self.sent = self.acked = 0
        self.resent = 0
        self._data: dict[int, bytes] = {}
        self._places: dict[int, Any] = {}
        self._moved_s: float | None = None  # last time that something was sent or acknowledged

    @property
    def idle(self) -> bool:
        """Everything has been acknowledged."""
        return self.acked == self.added

    @property
    def held_bytes(self) -> int:
        """Bytes of batches in memory."""
        return sum(map(len, self._data.values()))

    def add(self, data: bytes) -> int:
        """Take the next batch; returns its number."""
        self.added += 1
        place = self._keep(self.added, data) if self._keep is not None else None
        if place is not None:
            self._places[self.added] = place
        if place is None or self.added <= self.acked + self.window:
            self._data[self.added] = data
        return self.added

    def due(self, now_s: float) -> list[tuple[int, bytes]]:
        """Batches to send now, in order."""
        stuck = self._moved_s is not None and now_s - self._moved_s >= self.resend_s
        if stuck and self.acked < self.sent:
            self.resent += self.sent - self.acked
            self.sent = self.acked
        out = []
        while self.sent < min(self.added, self.acked + self.window):
            self.sent += 1
            if self.sent not in self._data:
                assert self._read is not None
                self._data[self.sent] = self._read(self._places[self.sent])
            out.append((self.sent, self._data[self.sent]))
        if out:
            self._moved_s = now_s
        return out

    def ack(self, seq: int, now_s: float | None = None) -> None:
        """The master has all batches up to `seq`; an old or too high number changes nothing."""
        if not self.acked < seq <= self.added:
            return
        for number in range(self.acked + 1, seq + 1):
            self._data.pop(number, None)
            self._places.pop(number, None)
        self.acked = seq
        self.sent = max(self.sent, seq)
        if now_s is not None:
            self._moved_s = now_s
