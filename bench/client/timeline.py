"""What came when in one answer, for `bench probe`: one entry for the header block, for each event, for the body.

Input: arrival times and events. Output: a list of plain dicts. Does not: keep text, grow without bound.
"""
from __future__ import annotations

from typing import Any

from bench.client.chat_state import CONTENT, REASONING, TOOL

TIMELINE_MAX = 20_000
_NAMED_BY = ((b'"error":{', "error"), (b'"usage":{', "usage"), (b'"finish_reason":"', "finish"), (b'"role"', "role"))
_KIND_NAMES = {CONTENT: "content", REASONING: "reasoning", TOOL: "tool_call"}


def note(events: list[dict[str, Any]], at: float, what: str, **facts: Any) -> None:
    """Add one entry, unless there are too many."""
    if len(events) < TIMELINE_MAX:
        events.append({"at": at, "what": what, **facts})


def name_of(found: int, data: bytes) -> str:
    """What to call an event: by the output in it, else by what stands in it."""
    for bit, name in _KIND_NAMES.items():
        if found & bit:
            return name
    text = data.strip()
    if text == b"[DONE]":
        return "done"
    compact = text.replace(b": ", b":")
    for needle, name in _NAMED_BY:
        if needle in compact:
            return name
    return "other"
