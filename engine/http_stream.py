"""One accepted request while the engine works on it: turns the core's tokens into bytes on its connection.

Input: `tokens(count, finish_reason)` from the step sink. Output: writes on the connection; the request's record.
Does not: schedule or validate.

1. All bytes of one step for one connection go out in one write.
2. The order of chunks is vLLM's: the header block when the request is accepted; the role-only chunk together with
   the first token (vLLM waits for the first output before it sends the role, so that an early failure can still be
   the first event); one chunk per token (or per `stream_interval` tokens, the first token always at once); the last
   token's chunk carries the finish reason; then usage when asked for; then `[DONE]`.
3. `first_token_s` and `last_token_s` are read just before the write of the bytes that carry them.
"""
from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from engine.faults import Fault
from engine.http_api import (
    DONE_FRAME,
    WORD_MASK,
    WORDS,
    Call,
    Frames,
    error_body,
    frame,
    usage_body,
    whole_answer,
)
from engine.http_server import LAST_CHUNK, Connection
from engine.metrics import ITL_BUCKETS

_now = time.monotonic


class Stream:
    """The answer of one request."""

    __slots__ = (
        "connection", "call", "request_id", "answer_id", "created", "model", "frames", "interval", "max_tokens",
        "received_s", "queued_s", "scheduled_s", "first_token_s", "last_token_s", "output_tokens", "sent", "chunks",
        "fault", "armed", "steady", "stalls", "broken", "opened", "closed", "held", "pending", "on_release", "driver",
        "metrics", "replica",
        "decision_start_s", "core_request", "report_cached", "cached_tokens", "header_lines", "_write", "_itl",
        "_prefix", "_suffix", "_offset",
    )

    def __init__(self, connection: Connection, call: Call, *, request_id: str, answer_id: str, created: int,
                 model: bytes, interval: int, max_tokens: int, received_s: float, fault: Fault | None,
                 report_cached: bool) -> None:
        self.connection, self.call = connection, call
        self.request_id, self.answer_id, self.created, self.model = request_id, answer_id, created, model
        self.frames = Frames(call, answer_id, created, model)
        self._prefix, self._suffix, self._offset = self.frames.prefix, self.frames.suffix, self.frames.offset
        self.interval, self.max_tokens = interval, max_tokens
        self.received_s = received_s
        self.queued_s: float | None = None
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.output_tokens = self.sent = self.chunks = 0
        self.fault = fault
        self.armed = fault is not None and fault.kind in ("stall", "cut", "malformed", "error_event")
        self.steady = False  # from the second token on: one chunk per token and no fault to come
        self.stalls = self.broken = self.opened = self.closed = False
        self.held: list[bytes] | None = None
        self.pending: str | None = None  # finish reason of an answer that a fault holds back
        self.on_release: Callable[[Stream, str], None] = lambda stream, reason: None
        self.report_cached = report_cached
        self.cached_tokens: int | None = None
        self.core_request: Any = None
        self.header_lines = f"x-request-id: {request_id}\r\n"
        self._write: Callable[[bytes], Any] = connection.write

    def attach(self, driver: Any, metrics: Any, replica: int) -> None:
        """Say which replica serves the request."""
        self.driver, self.metrics, self.replica = driver, metrics, replica
        self._itl = metrics.itl
        self.decision_start_s = driver.decision_total_s

    def open(self) -> None:
        """The request is accepted: send the header block of a streamed answer."""
        fault = self.fault
        if fault is not None and fault.kind == "slow_first_byte":
            self.armed = False
            self._hold(fault.delay_s)
        elif self.call.stream:
            self.connection.open_stream(extra=self.header_lines)
            self.opened = True

    # --- tokens ------------------------------------------------------------------------------------------------

    def tokens(self, count: int, finish_reason: str | None) -> None:
        """`count` new tokens of this step, and the finish reason when they are the last."""
        start = self.output_tokens
        end = self.output_tokens = start + count
        if self.steady and finish_reason is None and count == 1:  # the common case, written out for speed
            self.sent = end
            self.chunks += 1
            data = self._prefix + WORDS[(self._offset + 7 * start) & WORD_MASK] + self._suffix
            now_s = _now()
            gap_s = now_s - self.last_token_s  # type: ignore[operator]
            self.last_token_s = now_s
            self._write(data)
            itl = self._itl
            itl.counts[bisect_left(ITL_BUCKETS, gap_s)] += 1
            itl.sum += gap_s
            return
        if not self.call.stream:
            self._stamp(_now())
            return
        if start == 0:
            data = self.frames.role + self.frames.tokens(0, end, finish_reason)
        elif finish_reason is not None:
            data = self.frames.tokens(self.sent, end, finish_reason)
        elif end - self.sent < self.interval:
            self._stamp(_now())
            return
        else:
            data = self.frames.tokens(self.sent, end, None)
        self.sent = end
        self.chunks += 1
        if finish_reason is not None:
            data += self._ending()
        if self.armed:
            data = self._play(data, finish_reason is not None)
        self._stamp(_now())
        self._write(data)
        self.steady = self.interval == 1 and not self.armed
        if self.stalls:
            self.stalls = False
            assert self.fault is not None
            self._hold(self.fault.duration_s)

    def _stamp(self, now_s: float) -> None:
        last_s = self.last_token_s
        if last_s is None:
            self.first_token_s = now_s
            self.metrics.first_token(self.call.prompt_tokens, now_s - self.received_s)
        else:
            self._itl.observe(now_s - last_s)
        self.last_token_s = now_s

    def _usage(self) -> bytes:
        if self.report_cached:
            self.cached_tokens = self.core_request.cached_tokens
        return usage_body(self.call.prompt_tokens, self.output_tokens, self.cached_tokens)

    def _ending(self) -> bytes:
        usage = self.frames.usage(self._usage()) if self.call.include_usage else b""
        done = b"" if self.fault is not None and self.fault.kind == "no_done" else DONE_FRAME
        return usage + done + LAST_CHUNK

    def finish(self, finish_reason: str) -> None:
        """All tokens are made and nothing is held: end the answer."""
        if self.call.stream:
            self.connection.finish()
        else:
            body = whole_answer(self.call, self.answer_id, self.created, self.model,
                                self.frames.text(0, self.output_tokens), finish_reason, self._usage())
            self.connection.respond(200, body, extra=self.header_lines)

    def fail(self, status: int, message: str) -> None:
        """The engine gives the request up after it was accepted: an error answer, or an error event in the stream."""
        body = error_body(message, "service_unavailable_error", None, status)
        self.held = None
        if self.opened:
            self.connection.write(frame(body) + DONE_FRAME + LAST_CHUNK)
            self.connection.finish()
        else:
            self.connection.respond(status, body, extra=self.header_lines)

    # --- faults ------------------------------------------------------------------------------------------------

    def _play(self, data: bytes, last: bool) -> bytes:
        """The bytes to write for this step when a fault is due; `broken` says that the answer ends with them."""
        fault = self.fault
        assert fault is not None
        if self.output_tokens < fault.after_tokens:
            return data
        self.armed = False
        if fault.kind == "stall" and not last:
            self.stalls = True
        elif fault.kind == "malformed":
            return frame(b'{"id":"broken","choices":[{"index":0,"delta":{"content":"') + data
        elif fault.kind == "error_event":
            self.broken = True
            return data + frame(error_body("injected failure", "InternalServerError", None, 500)) + LAST_CHUNK
        elif fault.kind == "cut":
            self.broken = True
            return data[:-20]  # inside a chunk, so that no reader can take it for an end
        return data

    def end_broken(self) -> None:
        """The fault's last bytes are written: end the connection, or the answer after an error event."""
        assert self.fault is not None
        if self.fault.kind == "cut":
            self.connection.cut(reset=self.fault.reset)
        else:
            self.connection.finish()

    def _hold(self, duration_s: float | None) -> None:
        """Keep all bytes back for a while (None: for ever)."""
        if self.closed:
            return
        self.held = []
        self._write = self.held.append
        if duration_s is not None:
            asyncio.get_running_loop().call_later(duration_s, self._release)

    def _release(self) -> None:
        """The delay is over: write what was held, and end the answer when it is complete."""
        held, self.held = self.held, None
        self._write = self.connection.write
        if held is None or self.closed:
            return
        now_s = _now()
        if self.call.stream and not self.opened:
            self.connection.open_stream(extra=self.header_lines)
            self.opened = True
            if held:
                self.first_token_s = now_s
        if held:
            self.last_token_s = now_s
            self._write(b"".join(held))
        if self.pending is not None:
            self.on_release(self, self.pending)

    # --- the end -----------------------------------------------------------------------------------------------

    def record(self, outcome: str, reason: str, http_status: int, done_s: float, preemptions: int) -> dict[str, Any]:
        """The request's record for `/debug/requests`."""
        return {
            "request_id": self.request_id, "received_s": self.received_s, "queued_s": self.queued_s,
            "scheduled_s": self.scheduled_s, "first_token_s": self.first_token_s, "last_token_s": self.last_token_s,
            "done_s": done_s, "prompt_tokens": self.call.prompt_tokens, "cached_tokens": self.cached_tokens,
            "max_tokens": self.max_tokens, "output_tokens": self.output_tokens, "chunks": self.chunks,
            "preemptions": preemptions, "outcome": outcome, "reason": reason, "http_status": http_status,
            "decision_s": self.driver.decision_total_s - self.decision_start_s, "replica": self.replica,
            "tenant": self.call.tenant, "request_class": self.call.request_class,
            "fault": None if self.fault is None else self.fault.kind,
        }
