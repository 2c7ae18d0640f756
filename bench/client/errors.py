"""The two exceptions of the client: a channel that does not work, and bytes that are not HTTP or SSE.

Input: none. Output: `ChannelError`, `ProtocolError`.
Does not: carry a traceback into a ledger row; a failed answer is data (`outcome.Outcome`), not an exception.
"""
from __future__ import annotations

from typing import Any


class ChannelError(Exception):
    """The service or the way to it is at fault; `code` is a key of `outcome.CODES`."""

    def __init__(self, code: str, message: str, fix: str = "") -> None:
        super().__init__(message if not fix else f"{message}; {fix}")
        self.code = code
        self.message = message
        self.fix = fix


class ProtocolError(Exception):
    """The server's bytes break HTTP/1.1, SSE or JSON; `code` is a key of `outcome.CODES`.

    `before`: what the same bytes gave before the fault (body bytes, or events), so that it does not depend on the cut.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.before: Any = None
