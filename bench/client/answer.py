"""Reader of one streamed answer without I/O: bytes and their arrival times in, one `Outcome` out.

Input: the bytes of an HTTP answer in any pieces, each with the `time.monotonic()` at which it reached the host.
Output: `AnswerReader` (`first_output`, `complete`, `keep_alive`, `outcome()`).
Does not: read sockets or clocks, retry, compute latencies (`Outcome.to_row` does).

1. `feed` parses every event. All events that end in one read carry that read's time.
2. `feed_lazy` may be used once `first_output` is True. Chunk framing is followed exactly; output events are counted
   by a byte comparison or search where every event of the heap looks like the ones before, otherwise the heap is
   parsed. The last event of a heap is parsed unless it equals a parsed one but for its text, so usage, finish reason
   and last output are exact.
3. Memory is bounded: one unfinished event, 64 KiB of a refusal's body, a histogram of at most 1,100 bins.
4. Nothing is raised for bad bytes: they become the outcome's code. The first fault of an answer stands.

Definitions: docs/metrics.md.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bench.client.chat import ChatReader
from bench.client.chat_state import CONTENT
from bench.client.errors import ProtocolError
from bench.client.gaps import Gaps
from bench.client.heaps import HeapCounter
from bench.client.http1 import SIZE, SIZES, ResponseParser
from bench.client.judge import EVENTS, JSON_BODY, LENGTH_FINISH, PLAIN, REFUSAL, TEXT, UNKNOWN, judge, set_flags
from bench.client.outcome import LONG_GAP_S, Fault, Outcome, fault, retry_after
from bench.client.redact import redact
from bench.client.sse import MAX_EVENT_BYTES, EventStream
from bench.client.timeline import name_of, note
from bench.client.unpack import Unpacker, unpacker

# How much of a refusal's body is kept to class it.
ERROR_BODY_BYTES = 65_536

# Finish reasons that need no redaction (it costs as much as ten events).
_USUAL_FINISH = LENGTH_FINISH | {"stop", "tool_calls", "end_turn", "completed"}


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How to read an answer.

    keep_text: keep content, reasoning and tool calls (for `bench probe`). timeline: keep what came when.
    plain: any JSON or text is a success and is kept in `AnswerReader.body` (for `GET /v1/models`).
    secrets: texts that must not come out in `detail`.
    """

    pinned_tokens: int | None = None
    keep_text: bool = False
    timeline: bool = False
    plain: bool = False
    secrets: tuple[str, ...] = ()
    max_event_bytes: int = MAX_EVENT_BYTES


_DEFAULT = AnswerOptions()


class AnswerReader:
    """State of one answer; feed it until `complete`, or end it with `eof` or `fail`."""

    __slots__ = (
        "options", "pinned_tokens", "model", "send_at", "first_output", "complete", "coalesced", "body",
        "done_marker_at", "lazy", "_http", "_sse", "_chat", "_kind", "_plain_path", "_unpacker", "_fault",
        "_headers_at",
        "_first_at", "_content_at", "_last_at", "_done_at", "_at", "_bytes", "_reads", "_read_outputs",
        "_first_read_chunks", "_gaps", "_heaps", "_rest", "_last_output", "_events", "_protocol_broken",
    )  # fmt: skip

    def __init__(
        self, options: AnswerOptions | None = None, *, pinned_tokens: int | None = None, model: str = ""
    ) -> None:
        self.options = options = options or _DEFAULT
        self.pinned_tokens = pinned_tokens if pinned_tokens is not None else options.pinned_tokens
        self.model = model  # asked for; empty = not compared with what is served
        self.send_at: float | None = None  # may be set by the owner; only the burst rule uses it
        self.first_output = False
        self.complete = False
        self.coalesced = False  # a read held several outputs; its owner takes note and resets it
        self.body = b""  # a refusal, a JSON body, or the body of a plain answer
        self.done_marker_at: float | None = None  # the stream said that it is over, whether or not its framing did
        self.lazy = False
        self._http = ResponseParser()
        self._sse = EventStream(options.max_event_bytes)
        self._chat = ChatReader(keep_text=options.keep_text, secrets=options.secrets)
        self._kind = UNKNOWN
        self._plain_path = False  # between two chunks and two events of a chunked, uncompressed event stream
        self._unpacker: Unpacker | None = None
        self._fault: Fault | None = None
        self._protocol_broken = False
        self._headers_at: float | None = None
        self._first_at: float | None = None
        self._content_at: float | None = None
        self._last_at = 0.0
        self._done_at: float | None = None
        self._at = 0.0
        self._bytes = 0
        self._reads = 0
        self._read_outputs = 0
        self._first_read_chunks = 0
        self._gaps = Gaps()
        self._rest = b""
        self._heaps = HeapCounter()
        self._last_output = b""
        self._events: list[dict[str, Any]] = []

    # --- bytes in ---

    @property
    def keep_alive(self) -> bool:
        """May the connection carry another request."""
        return self._http.keep_alive and not self._protocol_broken

    @property
    def http_status(self) -> int | None:
        return self._http.status if self._http.has_head else None

    @property
    def headers(self) -> dict[str, str]:
        """Fields of the answer, lower-case names."""
        return self._http.headers

    @property
    def held_bytes(self) -> int:
        """Bytes kept for later: an unfinished event, chunk line, header block, or a body."""
        http = self._http
        return self._sse.held_bytes + len(self.body) + len(self._rest) + len(http.line) + http.head_bytes

    @property
    def served_model(self) -> str | None:
        """The model that the answer names, None when it names none; cut to a bounded length."""
        return self._chat.model

    def feed(self, data: bytes, at: float) -> bool:
        """Take one read of the socket that reached the host at `at`; return True when the answer is complete."""
        if self._plain_path and not self._rest:
            # One event, alone in one chunk, alone in one read: how most token streams arrive.
            heaps = self._heaps
            if heaps.before and heaps.is_alike(data):
                self._bytes += len(data)
                self._reads += 1
                self._chat.count_alike(1, heaps.kind)
                self._gaps.add(at - self._last_at)
                self._at = self._last_at = at
                return False
            end = data.find(b"\r\n", 0, 18)
            size = SIZES.get(data[:end])
            n = len(data)
            if (
                size
                and end + size + 4 == n
                and data.startswith(b"data: ", end + 2)
                and data.find(b"\n", end + 2) == n - 4
                and data.endswith(b"\n\n\r\n")
                and data.find(b"\r", end + 2) == n - 2
            ):
                self._bytes += n
                self._at = at
                found = self._chat.event(data[end + 8 : -4])
                if found:
                    self._reads += 1
                    # A second output, read promptly: the usual case, kept short.
                    if self._first_at is None or (found & CONTENT and self._content_at is None) or self.lazy:
                        self._read_outputs = 0
                        self._output(found, at)
                        self._last_output = data[end + 2 : -4]
                    else:
                        self._gaps.add(at - self._last_at)
                        self._last_at = at
                        self._learn(data[end + 2 : -4])
                elif self._chat.done:
                    self._heaps.before = b""
                    if self.done_marker_at is None:
                        self.done_marker_at = at
                return False
        return self._feed_all(data, at)

    def _learn(self, line: bytes) -> None:
        """The line of a token event that was parsed: the next ones may equal it but for their text."""
        chat = self._chat
        if chat.done or chat.several or self.options.keep_text:
            self._heaps.before = b""
        else:
            self._heaps.meet(line)

    def _feed_all(self, data: bytes, at: float) -> bool:
        """The general path: any framing, any cut, any body."""
        if self.complete:
            return True
        self._bytes += len(data)
        return self._parse(data, at)

    def _parse(self, data: bytes, at: float) -> bool:
        self._at = at
        self._read_outputs = 0
        self._heaps.before = b""  # what comes now may change what such an event means
        if self._rest:
            data = self._rest + data
            self._rest = b""
        http = self._http
        new_head, broken = not http.has_head, None
        try:
            body = http.receive(data)
        except ProtocolError as error:
            broken, body = error, error.before
        try:
            if new_head and http.has_head:
                self._take_head(at)
            if body:
                self._take_body(body, at)
        except ProtocolError as error:
            broken = error  # it lies before the other one
        if broken is not None:
            self._protocol_broken = True
            self._blame(Fault(broken.code, redact(broken.message, self.options.secrets)))
            self._end(self._end_time(at))
            return True
        if http.complete:
            self._end(at)
            return True
        self._plain_path = (
            self._kind == EVENTS
            and http.phase == SIZE
            and not http.line
            and self._unpacker is None
            and not self.options.timeline
            and self._sse.clean
        )
        return False

    def _take_head(self, at: float) -> None:
        http = self._http
        self._headers_at = at
        self._note("headers", status=http.status)
        self._unpacker = unpacker(http.headers.get("content-encoding", ""))
        if not 200 <= (http.status or 0) < 300:
            self._kind = REFUSAL
        elif self.options.plain:
            self._kind = PLAIN

    def _take_body(self, data: bytes, at: float) -> None:
        if self._unpacker is None:
            self._take_plain(data, at)
            return
        for plain in self._unpacker.feed(data, self._bytes):
            self._take_plain(plain, at)

    def _take_plain(self, data: bytes, at: float) -> None:
        """Body bytes as the service wrote them."""
        kind = self._kind
        if kind == UNKNOWN:
            start = data.lstrip(b" \t\r\n")
            if not start:
                return
            if start[:1] in (b"{", b"["):
                kind = self._kind = JSON_BODY
            elif start[:1] == b"<":
                kind = self._kind = TEXT
            else:
                kind = self._kind = EVENTS
        if kind == EVENTS:
            if not self._chat.chunks and len(self.body) < 200:
                self.body += data[:200]
            try:
                events = self._sse.feed(data)
            except ProtocolError as error:
                self._events_of(error.before or (), at)
                raise
            self._events_of(events, at)
        elif kind in (REFUSAL, TEXT):
            if len(self.body) < ERROR_BODY_BYTES:
                self.body += data[: ERROR_BODY_BYTES - len(self.body)]
        else:
            self._collect(data)

    def _events_of(self, events: Iterable[tuple[str, bytes]], at: float) -> None:
        for event_type, event in events:
            if event:  # without data it is none, and a flood of them must cost little
                self._event(event_type, event, at)

    def _collect(self, data: bytes) -> None:
        """A body that is needed whole; a bytearray, so that many small pieces cost linear time."""
        if not isinstance(self.body, bytearray):
            self.body = bytearray(self.body)  # type: ignore[assignment]
        self.body += data
        if len(self.body) > self.options.max_event_bytes:
            raise ProtocolError("SC-SIZE", f"the body is above {self.options.max_event_bytes} bytes")

    def _event(self, event_type: str, data: bytes, at: float) -> None:
        chat = self._chat
        was_done = chat.done
        found = chat.event(data, event_type)
        if found:
            self._reads += self._read_outputs == 0
            self._output(found, at)
            self._last_output = data if len(data) < 65_536 else b""
            self._heaps.needle = None  # learnt again from this event when the next heap comes
        if chat.done and not was_done:
            self.done_marker_at = at
        if self.options.timeline and data:
            self._note(name_of(found, data), event=chat.chunks if data.strip() != b"[DONE]" else None, bytes=len(data))

    def _output(self, found: int, at: float) -> None:
        """One event with output: stamps, gaps, the first read's share."""
        self._read_outputs += 1
        if self._first_at is None:
            self._first_at = at
            self.first_output = True
        elif not self.lazy:
            self._gaps.add(at - self._last_at)
        if self._read_outputs == 2:
            self.coalesced = True
        if found & CONTENT and self._content_at is None:
            self._content_at = at
        self._last_at = at
        if self._reads <= 1:
            self._first_read_chunks = self._read_outputs

    # --- lazy reading ---

    def feed_lazy(self, data: bytes, at: float) -> bool:
        """Take a heap of a stream that has shown its first output; return True when the answer is complete.

        `at`: arrival of the newest segment in the heap.
        """
        if self.complete:
            return True
        self.lazy = True
        self._bytes += len(data)
        heaps = self._heaps
        if heaps.needle is None and self._last_output and not self._chat.several:
            heaps.learn(self._last_output)
            self._last_output = b""
        chat = self._chat
        if heaps.needle is None or not self._plain_path or chat.done or chat.several:
            return self._parse(data, at)
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if heaps.before:
            return self._feed_alike(data, at)
        starts, end, unusual = heaps.walk(data)
        events, last, stop = heaps.count(data, starts, end)
        if events:
            self._at = at
            chat.count_alike(events - 1, heaps.kind)
            found = chat.event(last)
            self._reads += 1
            self._read_outputs = 0
            self._output(found or heaps.kind, at)
            if found == heaps.kind:
                heaps.adopt(b"data:" + last)
        if unusual or stop < end:
            # Finish, usage, [DONE] and the last chunk, or a heap that is not alike.
            return self._parse(data[stop:], at)
        self._rest = data[end:]
        return False

    def _feed_alike(self, data: bytes, at: float) -> bool:
        """A heap of a stream whose events are known but for their text."""
        events, stop = self._heaps.alike(data)
        if events:
            self._at = self._last_at = at
            self._reads += 1
            self._chat.count_alike(events, self._heaps.kind)
            if stop == len(data):
                return False
            data = data[stop:]
        starts, _, unusual = self._heaps.walk(data)
        if starts or unusual:
            return self._parse(data, at)
        self._rest = data
        return False

    # --- ends ---

    def eof(self, at: float) -> None:
        """The peer closed its side at `at`."""
        if self._flush(at):
            return
        http = self._http
        if not http.has_head:
            where = "inside the header block" if self._bytes else "without a byte of an answer"
            self._blame(Fault("CH-CLOSED", f"the connection closed {where}"))
        elif not http.eof() and self._kind in (JSON_BODY, PLAIN):
            self._blame(Fault("SC-TRUNCATED", "the connection closed inside the body"))
        self._end(self._end_time(at))

    def fail(self, kind: str, at: float, detail: str = "") -> None:
        """The answer ends here for a reason of ours or of the network: a code, or a name of `FAIL_KINDS`."""
        if self._flush(at):
            return
        found = fault(kind, detail, self.options.secrets)
        if self._http.has_head and found.error_kind == "connection":
            found = Fault("CH-CUT", found.detail)
        self._blame(found)
        self._end(self._end_time(at))

    def _flush(self, at: float) -> bool:
        if not self.complete and self._rest:
            self._parse(b"", at)
        return self.complete

    def _end_time(self, at: float) -> float:
        """When the answer was over: a stream that has said so is not made longer by how its connection ends."""
        if self.done_marker_at is not None:
            return self.done_marker_at
        return self._at if self._chat.terminated else at

    def _blame(self, found: Fault) -> None:
        if self._fault is None:
            self._fault = found

    def _end(self, at: float) -> None:
        self.complete = True
        self._plain_path = False
        self._done_at = at
        self._fault = self._judge(at)

    def _judge(self, at: float) -> Fault | None:
        """Return the fault of the finished answer, None for a success."""
        chat = self._chat
        success = 200 <= (self._http.status or 0) < 300
        if self._kind == JSON_BODY and self._fault is None and success:
            found = chat.body(bytes(self.body))
            if found:
                self._reads = 1
                self._output(found, at)
                self._note(name_of(found, b""), event=1, bytes=len(self.body))
        return judge(self._kind, chat, self._http, self.body, self._fault, self.options.secrets)

    # --- the result ---

    def outcome(self) -> Outcome:
        """Return what is known of the answer; the owner adds what only it knows (send time, connection, clock)."""
        chat, found, http = self._chat, self._fault, self._http
        started = self._first_at is not None
        tokens, source = None, None
        if chat.output_tokens:
            tokens, source = chat.output_tokens, "usage"
        elif chat.outputs:
            tokens, source = chat.outputs, "chunks"
        outcome = Outcome(
            http_status=self.http_status,
            finish_reason=self._finish_reason(),
            send_at=self.send_at,
            headers_at=self._headers_at,
            first_token_at=self._first_at,
            first_content_at=self._content_at,
            last_token_at=self._last_at if started else None,
            done_at=self._done_at,
            prompt_tokens=chat.prompt_tokens,
            cached_tokens=chat.cached_tokens,
            output_tokens=tokens,
            output_tokens_source=source,
            reasoning_tokens=chat.reasoning_tokens,
            chunks=chat.outputs,
            reads=self._reads,
            bytes_in=self._bytes,
            text="".join(chat.text) if self.options.keep_text else None,
            reasoning_text="".join(chat.reasoning) if self.options.keep_text else None,
            tool_calls=[chat.tool_calls[i] for i in sorted(chat.tool_calls)] if self.options.keep_text else None,
            ttft_chunk=chat.ttft_chunk,
            ttfo_chunk=chat.ttfo_chunk,
            content_chunks=chat.content_chunks,
            first_read_chunks=self._first_read_chunks,
            server_timings=chat.timings,
            events=self._events if self.options.timeline else None,
        )
        if found is not None:
            outcome.status, outcome.code, outcome.error_kind = found.status, found.code, found.error_kind
            outcome.detail = found.detail
        if http.has_head and found is not None:
            outcome.retry_after_s = retry_after(http.headers)
        gaps = self._gaps
        if gaps.count and not self.lazy:
            assert self._first_at is not None
            outcome.itl_mean_s = max(self._last_at - self._first_at, 0.0) / gaps.count
            outcome.itl_p99_s, outcome.itl_max_s = gaps.p99_s(), gaps.max_s
            outcome.itl_under_1ms_ratio = gaps.under_1ms_ratio
            outcome.itl_long_s = gaps.over_s(LONG_GAP_S)
        set_flags(outcome, self._kind, chat, first_read_chunks=self._first_read_chunks,
                  pinned_tokens=self.pinned_tokens, model=self.model)  # fmt: skip
        return outcome

    def _finish_reason(self) -> str | None:
        finish = self._chat.finish
        if not finish or finish in _USUAL_FINISH:
            return finish or None
        return redact(finish, self.options.secrets, 40)

    def outcome_fields(self) -> dict[str, Any]:
        """The same as `outcome`, by field name."""
        outcome = self.outcome()
        return {name: getattr(outcome, name) for name in Outcome.__slots__}

    def _note(self, what: str, **facts: Any) -> None:
        if self.options.timeline:
            note(self._events, self._at, what, **facts)
