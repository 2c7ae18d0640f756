"""`/debug/rollout`: the stage of a rollout in this engine, put in force, shown, observed.

Input: HTTP requests. Output: JSON; observations as JSON lines.
Does not: choose replicas or compare (engine/live.py), or judge (`bench rollout --live` does).

GET  /debug/rollout          who uses which rules, and how far the stage is
POST /debug/rollout          the table of `active.json`; the same again changes nothing
DELETE /debug/rollout        the old rules for everybody
GET  /debug/rollout/samples  observations from cursor `after` on; `x-next-cursor`, `x-lost`, `x-epoch`: a cursor holds
                             for one epoch, which ends with the stage and with the process
"""
from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson

from engine.http_api import ApiError
from engine.http_server import Connection, Request
from engine.live import Live, LiveError, Table

TICK_S = 0.1  # a twin is never further behind, so that no arrival has much to catch up with


class RolloutRoutes:
    """The handlers, and the timer that keeps a twin up to date while there is one."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self._armed = False
        self.routes: dict[str, dict[str, Callable[[Connection, Request], None]]] = {
            "/debug/rollout": {"GET": self._show, "POST": self._set, "DELETE": self._clear},
        }

    def apply(self, table: Table) -> None:
        """Put a table in force. Raises LiveError."""
        self.live.apply(table)
        self._arm()

    def page(self, after: int, limit: int | None) -> tuple[list[Any], str]:
        """Rows of observations and the header lines that go with them."""
        self.live.tick()
        rows, following, lost = self.live.book.page(after, limit)
        return rows, f"x-next-cursor: {following}\r\nx-lost: {lost}\r\nx-epoch: {self.live.epoch}\r\n"

    def _arm(self) -> None:
        if self.live.watching and not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._armed = False
        self.live.tick()
        self._arm()

    def _show(self, connection: Connection, request: Request) -> None:
        connection.respond(200, orjson.dumps(self.live.state()))

    def _set(self, connection: Connection, request: Request) -> None:
        try:
            self.apply(Table.read(orjson.loads(request.body)))
        except LiveError as problem:
            raise ApiError(problem.status, str(problem)) from None
        except orjson.JSONDecodeError as problem:
            raise ApiError(400, f"the body is not JSON: {problem}") from None
        self._show(connection, request)

    def _clear(self, connection: Connection, request: Request) -> None:
        self.live.clear()
        self._show(connection, request)


def encode(rows: list[Any]) -> bytes:
    """Rows as JSON lines."""
    return b"".join([orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows])
