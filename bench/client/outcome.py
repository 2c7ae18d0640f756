"""What became of one arrival, and the step from an answer to its ledger row.

Input: the fields that reader and transport fill in, in this process's monotonic seconds.
Output: `Outcome`, and `RequestRow` by `Outcome.to_row`.
Does not: read sockets, parse streams, judge latencies.

1. Latencies are computed in `Outcome.to_row` only. SLO latencies start at the intended time, `residence_s` at the send.
2. Absent is None, never 0.

Definitions: docs/metrics.md. The codes are in `codes`, the classing of refusals in `refusals`; both are offered here.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from bench.client.codes import CODES, DOCS_PAGE, FAIL_KINDS, Code, Fault, fault
from bench.client.refusals import classify, classify_error_object, error_parts, retry_after
from bench.records.request import RequestRow

__all__ = [
    "CODES", "DOCS_PAGE", "FAIL_KINDS", "Code", "Fault", "Outcome", "classify", "classify_error_object", "error_parts",
    "fault", "is_burst", "retry_after",
]  # fmt: skip


@dataclass(slots=True)
class Outcome:
    """Everything known about one answer; `_at` fields are seconds of this process's `time.monotonic()`."""

    status: str = "ok"
    code: str | None = None
    error_kind: str | None = None
    http_status: int | None = None
    finish_reason: str | None = None
    retry_after_s: float | None = None
    send_at: float | None = None
    headers_at: float | None = None
    first_token_at: float | None = None
    first_content_at: float | None = None
    last_token_at: float | None = None
    done_at: float | None = None
    itl_mean_s: float | None = None
    itl_p99_s: float | None = None
    itl_max_s: float | None = None
    itl_under_1ms_ratio: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    output_tokens_source: str | None = None
    reasoning_tokens: int | None = None
    chunks: int | None = None
    reads: int | None = None
    bytes_in: int | None = None
    connection: str | None = None
    dns_s: float | None = None
    connect_s: float | None = None
    tls_s: float | None = None
    clock: str | None = None
    read_mode: str | None = None
    reader_lag_s: float | None = None
    flags: set[str] = field(default_factory=set)
    detail: str = ""
    # Not in the ledger: for `bench probe`, `bench check` and tests.
    text: str | None = None
    reasoning_text: str | None = None
    tool_calls: list[dict[str, str]] | None = None
    ttft_chunk: int | None = None
    ttfo_chunk: int | None = None
    content_chunks: int | None = None
    first_read_chunks: int | None = None
    itl_long_s: float | None = None  # time in gaps above LONG_GAP_S
    server_timings: dict[str, float] | None = None
    events: list[dict[str, Any]] | None = None

    @classmethod
    def from_fault(
        cls, kind: str, *, detail: str = "", at: float | None = None, secrets: Iterable[str] = ()
    ) -> Outcome:
        """Return the outcome of an arrival that got no answer at all: `kind` is a code or a name of FAIL_KINDS."""
        found = fault(kind, detail, secrets)
        return cls(status=found.status, code=found.code, error_kind=found.error_kind, done_at=at, detail=found.detail)

    @property
    def streamed_tokens(self) -> int | None:
        """The tokens between whose first and last the stream's time lies: output without hidden reasoning."""
        if self.output_tokens is None or "hidden_reasoning" not in self.flags:
            return self.output_tokens
        return self.output_tokens - (self.reasoning_tokens or 0)

    def to_row(
        self,
        *,
        stage: int,
        arrival: int,
        worker: int,
        repeat: int,
        offered_qps: float,
        phase: str,
        tenant: str,
        request_class: str,
        request_id: str,
        intended_s: float,
        input_tokens: int | None,
        max_tokens: int | None,
        to_run_s: Callable[[float], float],
        prompt_line: int | None = None,
    ) -> RequestRow:
        """Return the ledger row; `to_run_s` maps this process's monotonic seconds to seconds of the run.

        ttft = first_token - intended; tpot = (last_token - first_token)/(streamed tokens - 1); e2e = last_token -
        intended, for ok only; residence = done - sent. Source: docs/metrics.md.
        """
        sent_s = _mapped(to_run_s, self.send_at)
        first_s = _mapped(to_run_s, self.first_token_at)
        content_s = _mapped(to_run_s, self.first_content_at)
        last_s = _mapped(to_run_s, self.last_token_at)
        done_s = _mapped(to_run_s, self.done_at) if self.status != "unsent" else None
        streamed = self.streamed_tokens
        # One event with all tokens has no time between tokens: TPOT is unknown then, not zero.
        tpot_s = None
        if streamed is not None and streamed >= 2 and (self.chunks or 0) >= 2 and first_s is not None:
            assert last_s is not None  # the two are set together
            tpot_s = (last_s - first_s) / (streamed - 1)
        return RequestRow(
            stage=stage,
            arrival=arrival,
            worker=worker,
            repeat=repeat,
            offered_qps=offered_qps,
            phase=phase,
            tenant=tenant,
            request_class=request_class,
            request_id=request_id,
            status=self.status,
            code=self.code,
            error_kind=self.error_kind,
            http_status=self.http_status,
            finish_reason=self.finish_reason,
            retry_after_s=self.retry_after_s,
            intended_s=intended_s,
            sent_s=sent_s,
            headers_s=_mapped(to_run_s, self.headers_at),
            first_token_s=first_s,
            first_content_s=content_s,
            last_token_s=last_s,
            done_s=done_s,
            send_lag_s=None if sent_s is None else sent_s - intended_s,
            ttft_s=None if first_s is None else first_s - intended_s,
            ttfo_s=None if content_s is None else content_s - intended_s,
            tpot_s=tpot_s,
            e2e_s=last_s - intended_s if self.status == "ok" and last_s is not None else None,
            residence_s=None if sent_s is None or done_s is None else done_s - sent_s,
            itl_mean_s=self.itl_mean_s,
            itl_p99_s=self.itl_p99_s,
            itl_max_s=self.itl_max_s,
            itl_under_1ms_ratio=self.itl_under_1ms_ratio,
            input_tokens=input_tokens,
            prompt_line=prompt_line,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            max_tokens=max_tokens,
            output_tokens=self.output_tokens,
            output_tokens_source=self.output_tokens_source,
            reasoning_tokens=self.reasoning_tokens,
            chunks=self.chunks,
            reads=self.reads,
            bytes_in=self.bytes_in,
            connection=self.connection,
            dns_s=self.dns_s,
            connect_s=self.connect_s,
            tls_s=self.tls_s,
            clock=self.clock,
            read_mode=self.read_mode,
            reader_lag_s=self.reader_lag_s,
            flags=";".join(sorted(self.flags | {"burst"} if is_burst(self) else self.flags)),
            detail=self.detail,
        )


def _mapped(to_run_s: Callable[[float], float], at: float | None) -> float | None:
    return None if at is None else to_run_s(at)


# Fewer output events than this say nothing about how they are delivered: three tokens in one segment are common.
BURST_MIN_CHUNKS = 5
# From this share of output events in the first read, or of gaps under 1 ms, the gaps are mostly not the engine's.
BURST_SHARE = 0.9
# They are still the engine's when it is a quick one. No engine sends 3,300 events a second to one stream (a held back
# answer comes as fast over 8 Mbit/s); a stream that is let go piece by piece spends its time in the pauses. Pauses up
# to 10 ms harm no number, and our own reads make such.
FASTEST_GAP_S = 0.0003
LONG_GAP_S = 0.010
LONG_SHARE = 0.5
# Held back: the header block and all output in the last 5 % of the time from send to last output, gaps under 3 ms.
HELD_SHARE = 0.05
HELD_GAP_S = 0.003


def is_burst(outcome: Outcome) -> bool:
    """Return True when the answer's output came in too few pieces for its gaps to say anything about the engine.

    Any of: (a) 90 % of the output events in the first read that held any; (b) the mean gap under 0.3 ms, or 90 % of the
    gaps under 1 ms with half of the time in gaps above 10 ms (gaps are not kept of lazily read streams); (c) held back
    and then sent in small pieces: header block and all output within the last 5 % of the wait, mean gap under 3 ms.
    From five output events on; an answer in one piece that was not streamed is a burst too. Source: docs/metrics.md.
    """
    if "burst" in outcome.flags:
        return True
    chunks, first, last = outcome.chunks or 0, outcome.first_token_at, outcome.last_token_at
    if chunks < BURST_MIN_CHUNKS or first is None or last is None:
        return False
    if outcome.first_read_chunks is not None and outcome.first_read_chunks >= BURST_SHARE * chunks:
        return True
    mean_gap_s = (last - first) / (chunks - 1)
    if mean_gap_s < FASTEST_GAP_S:
        return True
    short = outcome.itl_under_1ms_ratio
    if short is not None and short >= BURST_SHARE and (outcome.itl_long_s or 0.0) >= LONG_SHARE * (last - first):
        return True
    if outcome.send_at is None or outcome.headers_at is None or mean_gap_s >= HELD_GAP_S:
        return False
    return last - outcome.headers_at < HELD_SHARE * (last - outcome.send_at)
