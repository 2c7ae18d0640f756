"""One planned arrival = one row of `requests.csv`.

Input: what the sender and the stream reader know about one arrival.
Output: `RequestRow`, its CSV columns, and the units of each column.
Does not: filter, judge, or compute a statistic over rows.

1. Every planned arrival has exactly one row, whatever happened to it.
2. Times are float seconds from the run's start on the master's clock.
3. Absent is None (an empty cell), never 0.
4. Latencies for the SLO start at `intended_s`; `residence_s` starts at `sent_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

STATUSES = ("ok", "rejected", "error", "timeout", "truncated", "unsent")
PHASES = ("warmup", "window")
# Finish reasons of an answer that came to the asked length.
LENGTH_FINISH = frozenset({"length", "max_tokens", "max_output_tokens"})
# An answer of so many tokens has a TPOT worth its name; that it came in one event is then no chance.
MANY_TOKENS = 8

# Flags a row may carry (`flags` is a ";"-joined, sorted list of these).
FLAGS = {
    "burst": "output came in too few reads for its gaps to say anything about the engine",
    "cached": "the service reported cached prompt tokens",
    "first_read_bound": "the first read held several output events: TTFT is an upper bound",
    "hidden_reasoning": "reasoning is among the output tokens and was not streamed: TPOT is over the other tokens",
    "no_done": "the stream had a finish reason but no [DONE]",
    "other_model": "the answer names another model than the one asked for",
    "retried": "sent again on a new connection: a kept one had died before any byte of the answer",
    "short": "fewer output tokens than the pinned length",
    "text_after_done": "bytes came after [DONE]",
    "tokens_estimated": "no usage in the answer: output tokens are counted events",
}


@dataclass(slots=True)
class RequestRow:
    """The ledger row of one arrival; the field order is the column order."""

    stage: int
    arrival: int
    worker: int
    repeat: int
    offered_qps: float
    phase: str
    tenant: str
    request_class: str
    request_id: str
    status: str
    code: str | None = None
    error_kind: str | None = None
    http_status: int | None = None
    finish_reason: str | None = None
    retry_after_s: float | None = None
    intended_s: float = 0.0
    sent_s: float | None = None
    headers_s: float | None = None
    first_token_s: float | None = None
    first_content_s: float | None = None
    last_token_s: float | None = None
    done_s: float | None = None
    send_lag_s: float | None = None
    ttft_s: float | None = None
    ttfo_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    residence_s: float | None = None
    itl_mean_s: float | None = None
    itl_p99_s: float | None = None
    itl_max_s: float | None = None
    itl_under_1ms_ratio: float | None = None
    input_tokens: int | None = None
    prompt_line: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    max_tokens: int | None = None
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
    flags: str = ""
    detail: str = ""


# name -> (unit, one-line meaning); `docs/ledger.md` is written from this table.
COLUMNS: dict[str, tuple[str, str]] = {
    "stage": ("", "stage number, from 0"),
    "arrival": ("", "number of the planned arrival within its stage, from 0"),
    "worker": ("", "index of the worker that sent it: arrival modulo workers, another one after a loss"),
    "repeat": ("", "which repetition of the same offered rate, from 0"),
    "offered_qps": ("1/s", "asked rate of the stage at this arrival"),
    "phase": ("", "`warmup` or `window`, by the intended time"),
    "tenant": ("", "tenant label, empty when there are no tenants"),
    "request_class": ("", "class label, empty when there are no classes"),
    "request_id": ("", "the `x-request-id` that was sent"),
    "status": ("", "one of " + ", ".join(STATUSES)),
    "code": ("", "stable code of the outcome, such as `CH-401`; empty for ok"),
    "error_kind": ("", "kind of the failure, such as `auth` or `truncated`; empty for ok"),
    "http_status": ("", "status code of the answer"),
    "finish_reason": ("", "last finish reason in the answer"),
    "retry_after_s": ("s", "what the service asked to wait"),
    "intended_s": ("s", "planned send time"),
    "sent_s": ("s", "just before the write of the request's last byte"),
    "headers_s": ("s", "the answer's header block was complete; never a TTFT"),
    "first_token_s": ("s", "first event with output: content, reasoning or tool call"),
    "first_content_s": ("s", "first event with answer content (differs for thinking models)"),
    "last_token_s": ("s", "last event with output"),
    "done_s": ("s", "end of the answer, or of our waiting for it"),
    "send_lag_s": ("s", "sent - intended: lateness of our own sender"),
    "ttft_s": ("s", "first_token - intended"),
    "ttfo_s": ("s", "first_content - intended"),
    "tpot_s": ("s", "(last_token - first_token)/(n - 1), n = output_tokens less hidden reasoning; empty when n < 2"),
    "e2e_s": ("s", "last_token - intended; only for status ok"),
    "residence_s": ("s", "done - sent: time in the service, W of Little's law"),
    "itl_mean_s": ("s", "mean gap between output events; only for promptly read streams"),
    "itl_p99_s": ("s", "p99 gap between output events (histogram, 2 % bins)"),
    "itl_max_s": ("s", "largest gap between output events"),
    "itl_under_1ms_ratio": ("1", "share of gaps under 1 ms: near 1 means burst delivery"),
    "input_tokens": ("tokens", "prompt length asked by the plan"),
    "prompt_line": ("", "line of `loadgen.prompts_file` that was sent, from 1; empty when prompts are made"),
    "prompt_tokens": ("tokens", "prompt length counted by the service"),
    "cached_tokens": ("tokens", "part of the prompt that the service took from its cache"),
    "max_tokens": ("tokens", "output limit sent with the request"),
    "output_tokens": ("tokens", "length of the answer"),
    "output_tokens_source": ("", "`usage` or `chunks` (an estimate)"),
    "reasoning_tokens": ("tokens", "reasoning as counted by the service; flag `hidden_reasoning`: it was not streamed"),
    "chunks": ("", "events that carried output"),
    "reads": ("", "socket reads that carried output"),
    "bytes_in": ("bytes", "bytes of the answer as received"),
    "connection": ("", "`new` or `reused`"),
    "dns_s": ("s", "name lookup, new connections only"),
    "connect_s": ("s", "TCP connect, new connections only"),
    "tls_s": ("s", "TLS handshake, new connections only"),
    "clock": ("", "`kernel` or `user`: who stamped first and last output"),
    "read_mode": ("", "`prompt` or `lazy`"),
    "reader_lag_s": ("s", "worst gap between kernel stamp and our reader at the stamped reads"),
    "flags": ("", "semicolon list of " + ", ".join(sorted(FLAGS))),
    "detail": ("", "one redacted line about the failure, at most 200 characters"),
}

FIELD_NAMES: tuple[str, ...] = tuple(f.name for f in fields(RequestRow))


@dataclass(slots=True)
class LedgerProblem:
    """One thing wrong with a ledger file: where, what, and how many rows."""

    problem_id: str
    message: str
    rows: int = 0
    examples: list[str] = field(default_factory=list)
