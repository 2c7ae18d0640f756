"""Kept connections that wait for their next request.

Input: connections whose last answer is complete and allows another request.
Output: one that is young enough and alive, newest first.
Does not: open connections.

1. A connection is idle in the pool or used by exactly one request, never both.
2. A kept connection is not reused after `idle_reuse_s`: common servers close at 5 s, and a request sent at that
   moment is lost.
3. An idle connection that is readable was closed, or holds bytes nobody asked for: it is never reused.
"""
from __future__ import annotations

from collections import deque

from bench.client.sockets import Connection


class IdlePool:
    """Idle connections to one service, newest at the right."""

    def __init__(self, idle_reuse_s: float, max_idle: int) -> None:
        self._idle: deque[Connection] = deque()
        self._idle_reuse_s = idle_reuse_s
        self._max_idle = max_idle
        self._closed = False
        self.found_dead = 0
        self.expired = 0

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, now_s: float) -> Connection | None:
        """The newest idle connection that may be used, None when there is none."""
        self.expire(now_s)
        while self._idle:
            connection = self._idle.pop()
            if connection.is_quiet():
                return connection
            self.found_dead += 1
            connection.close()
        return None

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return not self._closed and self._idle_reuse_s > 0.0 and self._max_idle > 0

    def has_for(self, at_s: float) -> bool:
        """Whether a connection that waits now will be young enough at `at_s`."""
        return bool(self._idle) and self._idle[-1].idle_since_s + self._idle_reuse_s > at_s

    def give(self, connection: Connection, now_s: float) -> None:
        """Keep a connection for the next request."""
        if not self.keeps:
            connection.close()
            return
        if len(self._idle) >= self._max_idle:
            self._idle.popleft().close()
        connection.idle_since_s = now_s
        self._idle.append(connection)

    def expire(self, now_s: float) -> None:
        """Close what has been idle for too long."""
        limit = now_s - self._idle_reuse_s
        while self._idle and self._idle[0].idle_since_s <= limit:
            self._idle.popleft().close()
            self.expired += 1

    def close(self) -> None:
        """Close all; what is given from now on is closed too."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
