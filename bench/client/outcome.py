"""What became of one arrival: the taxonomy of failures, and the step from an answer to its ledger row.

Input: HTTP status, fields and body of a refusal, an error object, or the name of a local failure.
Output: `Fault` (a stable code, its layer, kind and status), `Outcome`, and `RequestRow` by `Outcome.to_row`.
Does not: read sockets or parse streams; judge latencies.

1. Every code is a key of `CODES`; a ledger never holds a code that is not there.
2. The layers follow the order in which a fault is looked for: channel, script, scheduler; `client` is ourselves.
3. Latencies are computed in `Outcome.to_row` only. SLO latencies start at the intended time, `residence_s` at the send.
4. A refusal is classed by its body as well as by its status: gateways answer 400 for a wrong key or an unknown model.

Definitions: docs/metrics.md. What to do about a code: docs/troubleshooting.md.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import orjson

from bench.client.redact import redact
from bench.records.request import RequestRow


class Code(NamedTuple):
    """One line of the taxonomy."""

    layer: str
    error_kind: str
    status: str
    text: str
    anchor: str


CODES: dict[str, Code] = {
    # channel: the way to the service, the key, the model name
    "CH-DNS": Code("channel", "connection", "error", "the host name was not found", "name-not-found"),
    "CH-REFUSED": Code("channel", "connection", "error", "the connection was refused", "connection-refused"),
    "CH-UNREACHABLE": Code("channel", "connection", "error", "no route to the host", "connection-refused"),
    "CH-RESET": Code("channel", "connection", "error", "the connection was reset before an answer", "connection-reset"),
    "CH-CLOSED": Code("channel", "connection", "error", "the connection closed before an answer", "connection-reset"),
    "CH-CUT": Code("channel", "truncated", "truncated", "the connection broke inside the answer", "truncated-answer"),
    "CH-TLS": Code("channel", "connection", "error", "the TLS handshake failed", "tls"),
    "CH-TLS-CERT": Code("channel", "connection", "error", "the server's certificate was not accepted", "tls"),
    "CH-PROXY": Code("channel", "connection", "error", "the local proxy failed", "local-proxy-failed"),
    "CH-407": Code("channel", "bad_request", "error", "the proxy wants a login", "local-proxy-failed"),
    "CH-401": Code("channel", "auth", "error", "the key was not accepted (401)", "401-unauthorized"),
    "CH-403": Code("channel", "auth", "error", "the key may not do this (403)", "403-forbidden"),
    "CH-KEY": Code("channel", "auth", "error", "the key was not accepted, by the body of the refusal", "401-unauthorized"),
    "CH-OAUTH": Code("channel", "auth", "error", "the service wants an OAuth token, not an API key", "oauth"),
    "CH-404": Code("channel", "not_found", "error", "nothing is served at this address (404)", "path-not-found"),
    "CH-MODEL": Code("channel", "not_found", "error", "the service does not know the model", "model-not-found"),
    "CH-REDIRECT": Code("channel", "redirect", "error", "the service answered with a redirect", "redirect"),
    "CH-402": Code("channel", "bad_request", "error", "payment required (402)", "quota"),
    "CH-502": Code("channel", "server_error", "error", "a gateway got no valid answer (502)", "bad-gateway"),
    "CH-504": Code("channel", "server_error", "error", "a gateway gave up waiting (504)", "timeouts"),
    "CH-TO-CONNECT": Code("channel", "timeout", "timeout", "no connection in time", "timeouts"),
    "CH-TO-FIRST": Code("channel", "timeout", "timeout", "no output in time", "timeouts"),
    "CH-TO-IDLE": Code("channel", "timeout", "timeout", "the stream went silent", "timeouts"),
    "CH-TO-TOTAL": Code("channel", "timeout", "timeout", "the answer took longer than allowed", "timeouts"),
    "CH-URL": Code("channel", "bad_request", "error", "the base URL cannot be used", "base-url"),
    "CH-KEY-FORM": Code("channel", "auth", "error", "the key cannot be sent in a header", "401-unauthorized"),
    "CH-KEY-MISSING": Code("channel", "auth", "error", "no key in the environment", "401-unauthorized"),
    # script: what was sent, and what the bytes of the answer look like
    "SC-400": Code("script", "bad_request", "error", "the request was refused as wrong (4xx)", "bad-request"),
    "SC-CONTEXT": Code("script", "bad_request", "error", "prompt and output do not fit the context", "context-length"),
    "SC-PARAM": Code("script", "bad_request", "error", "a field of the request body is not known there", "unknown-field"),
    "SC-CHOICES": Code("script", "malformed", "error", "an answer without choices", "reading-choices"),
    "SC-ERROR-BODY": Code("script", "in_stream_error", "error", "status 200, but the body is an error", "reading-choices"),
    "SC-JSON": Code("script", "malformed", "error", "an event or a body is not JSON", "reading-choices"),
    "SC-SSE": Code("script", "malformed", "error", "the answer is not an event stream", "not-an-event-stream"),
    "SC-SIZE": Code("script", "malformed", "error", "an event or a body above the size limit", "not-an-event-stream"),
    "SC-HTTP": Code("script", "malformed", "error", "the answer breaks HTTP/1.1", "broken-http"),
    "SC-HEADERS": Code("script", "malformed", "error", "the header block is above the size limit", "broken-http"),
    "SC-ENCODING": Code("script", "malformed", "error", "the body's compression cannot be undone", "broken-http"),
    "SC-TRUNCATED": Code("script", "truncated", "truncated", "neither a finish reason nor [DONE]", "truncated-answer"),
    "SC-EMPTY": Code("script", "empty", "error", "a complete answer without any output", "empty-answer"),
    # scheduler: the service works and says no, or breaks under load
    "SV-429": Code("scheduler", "rate_limited", "rejected", "too many requests (429)", "rate-limited"),
    "SV-QUOTA": Code("scheduler", "rate_limited", "rejected", "the quota of the account is used up (429)", "quota"),
    "SV-503": Code("scheduler", "overloaded", "rejected", "the service is overloaded (503)", "overloaded"),
    "SV-529": Code("scheduler", "overloaded", "rejected", "the service is overloaded (529)", "overloaded"),
    "SV-500": Code("scheduler", "server_error", "error", "the service failed (5xx)", "server-error"),
    "SV-STREAM": Code("scheduler", "in_stream_error", "error", "an error inside a started stream", "error-in-stream"),
    "SV-STREAM-BUSY": Code("scheduler", "in_stream_error", "error", "a refusal for load inside a started stream",
                           "error-in-stream"),
    # client: ourselves
    "CL-CAP": Code("client", "unsent", "unsent", "the cap of streams in flight was reached", "unsent"),
    "CL-FD": Code("client", "unsent", "unsent", "no file descriptor was left", "unsent"),
    "CL-STOP": Code("client", "unsent", "unsent", "the run was stopped before the send", "unsent"),
    "CL-LATE": Code("client", "unsent", "unsent", "the stage was over before the send", "unsent"),
    "CL-LOST": Code("client", "unsent", "unsent", "the worker that owned the arrival was lost", "unsent"),
    "CL-DRAIN": Code("client", "timeout", "timeout", "still open at the drain limit", "drain-limit"),
    "CL-CANCEL": Code("client", "timeout", "timeout", "the run was stopped while the answer was open", "drain-limit"),
    "CL-BUG": Code("client", "client", "error", "a fault of this program", "client-fault"),
}

# Names a transport may use for a local failure -> code. A code itself is accepted everywhere too.
FAIL_KINDS: dict[str, str] = {
    "dns": "CH-DNS", "refused": "CH-REFUSED", "unreachable": "CH-UNREACHABLE", "reset": "CH-RESET",
    "closed": "CH-CLOSED", "tls": "CH-TLS", "tls_cert": "CH-TLS-CERT", "proxy": "CH-PROXY",
    "connect_timeout": "CH-TO-CONNECT", "first_token_timeout": "CH-TO-FIRST", "idle_timeout": "CH-TO-IDLE",
    "total_timeout": "CH-TO-TOTAL", "drain": "CL-DRAIN", "stop": "CL-STOP", "cap": "CL-CAP", "fd": "CL-FD",
    "late": "CL-LATE", "lost": "CL-LOST", "cancel": "CL-CANCEL", "bug": "CL-BUG",
}  # fmt: skip

DOCS_PAGE = "docs/troubleshooting.md"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an answer is not a success."""

    code: str
    detail: str = ""
    retry_after_s: float | None = None

    @property
    def layer(self) -> str:
        return CODES[self.code].layer

    @property
    def error_kind(self) -> str:
        return CODES[self.code].error_kind

    @property
    def status(self) -> str:
        return CODES[self.code].status

    @property
    def link(self) -> str:
        """The section of the troubleshooting page for this code."""
        return f"{DOCS_PAGE}#{CODES[self.code].anchor}"


def fault(kind: str, detail: str = "", secrets: Iterable[str] = ()) -> Fault:
    """Return the fault for a code or for a name of `FAIL_KINDS`; an unknown name is a bug and raises."""
    code = kind if kind in CODES else FAIL_KINDS[kind]
    return Fault(code, redact(detail, secrets))


# --- refusals: status, fields and body -------------------------------------------------------------------------

_MODEL_CODES = {"model_not_found", "invalid_model", "unknown_model", "modelnotfound", "model_not_available",
                "deploymentnotfound", "model_not_supported", "unsupported_model"}  # fmt: skip
_KEY_CODES = {"invalid_api_key", "invalid_key", "authentication_error", "invalid_authentication",
              "unauthorized", "missing_api_key", "expired_api_key", "invalid_token", "permission_denied_key"}  # fmt: skip
_QUOTA_CODES = {"insufficient_quota", "quota_exceeded", "insufficient_balance", "billing_hard_limit_reached",
                "insufficient_user_quota", "credit_balance_too_low"}  # fmt: skip
_CONTEXT_CODES = {"context_length_exceeded", "string_above_max_length", "prompt_too_long"}
_PARAM_CODES = {"unknown_parameter", "unsupported_parameter", "extra_forbidden", "unrecognized_parameter"}

_CONTEXT_TEXT = re.compile(
    r"context (?:length|window|size)|maximum (?:model )?(?:context|length)|prompt is too long|too many tokens|"
    r"max(?:imum)?_?(?:model_len|seq_len|tokens|completion_tokens).{0,60}(?:exceed|too large|at most|less than)|"
    r"(?:exceed|too large).{0,60}(?:context|max_model_len|n_ctx)",
    re.I,
)
_PARAM_TEXT = re.compile(
    r"extra inputs are not permitted|extra fields not permitted|unrecognized (?:request )?(?:argument|parameter|field)|"
    r"unknown (?:argument|parameter|field|name)|unexpected (?:keyword|field|property)|unsupported parameter|"
    r"additional properties are not allowed",
    re.I,
)
_MODEL_TEXT = re.compile(
    r"\bmodel\b.{0,120}?(?:not found|does ?n.t exist|does not exist|not exist|no such|unknown|not supported|"
    r"not available|unavailable|not served|not loaded|is invalid|not valid)|"
    r"(?:unknown|no such|invalid|unsupported|non-?existent|could not find|cannot find|not a valid)\s+model|"
    r"no (?:available )?channel for .{0,40}model|模型.{0,40}(?:不存在|无可用|未找到|不支持)",
    re.I | re.S,
)
_KEY_TEXT = re.compile(
    r"(?:invalid|incorrect|wrong|missing|expired|malformed|unknown|disabled|revoked|no|provide an?|without an?)\s+"
    r"(?:valid\s+)?(?:api[ _-]?keys?|access keys?|auth(?:entication|orization)?|credentials?|bearer)\b|"
    r"api[ _-]?keys?\b.{0,40}(?:invalid|incorrect|not valid|expired|disabled|missing|required|not found|revoked)|"
    r"authentication (?:failed|error|required)|\bunauthori[sz]ed\b|not authenticated|"
    r"无效的令牌|令牌.{0,10}(?:无效|过期|不可用)|密钥.{0,10}(?:无效|错误|过期)",
    re.I,
)
_OAUTH_TEXT = re.compile(r"\boauth|insufficient[_ ]scope|missing scopes?|access token|\bid[_ ]token\b|\bjwt\b", re.I)
_OAUTH_FIELD = re.compile(r"\berror\s*=|\bscope\s*=|authorization_uri|resource_metadata|oauth", re.I)
_QUOTA_TEXT = re.compile(r"exceeded your current quota|insufficient (?:quota|balance|credit)|额度(?:不足|已用)|余额不足", re.I)
_BUSY_TEXT = re.compile(
    r"overload|too many (?:requests|concurrent)|rate.?limit|queue (?:is )?full|capacity|busy|try again later|throttl",
    re.I,
)
# How much of a message is searched for words: the reason stands at its start, the rest is echo.
_MESSAGE_READ = 4_000
_TAGS = re.compile(r"<(?:script|style)\b[^<]{0,5000}</(?:script|style)>|<[^<>]{0,500}>")


def error_parts(body: bytes | Any) -> tuple[str, set[str]]:
    """Return the message of an error body and the set of its machine words (code, type, status), lower case.

    `body`: raw bytes (JSON, HTML or text) or an already decoded JSON value.
    """
    obj: Any = body
    if isinstance(body, (bytes, bytearray, memoryview)):
        try:
            obj = orjson.loads(body)
        except orjson.JSONDecodeError:
            text = bytes(body[:20_000]).decode("utf-8", "replace")
            return (_TAGS.sub(" ", text) if "<" in text else text), set()
    words: set[str] = set()
    message = _message_of(obj, words, 0)
    if not message and obj not in (None, {}, []):
        message = str(obj)[:2000]
    return message, words


def _message_of(obj: Any, words: set[str], depth: int) -> str:
    """Find the human sentence in the many shapes of an error object; collect its codes on the way."""
    if isinstance(obj, str):
        return obj
    if depth > 6:
        return ""
    if isinstance(obj, list):
        return "; ".join(filter(None, (_message_of(item, words, depth + 1) for item in obj[:5])))
    if not isinstance(obj, dict):
        return ""
    for key in ("code", "type", "status", "reason"):
        value = obj.get(key)
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            words.add(str(value).lower())
    for key in ("error", "message", "detail", "msg", "error_description", "errors", "error_msg", "title"):
        found = _message_of(obj.get(key), words, depth + 1)
        if found:
            return found
    return ""


def classify(
    http_status: int, headers: Mapping[str, str], body: bytes, *, secrets: Iterable[str] = ()
) -> Fault:
    """Return the fault of an answer whose status is not 200..299, by status, fields and body.

    `headers`: lower-case names. `body`: as much of it as was kept (64 KiB is plenty).
    """
    message, words = error_parts(body)
    message = message[:_MESSAGE_READ]
    detail = redact(message or f"HTTP {http_status}", secrets)
    wait = retry_after(headers)
    if 300 <= http_status < 400:
        return Fault("CH-REDIRECT", redact(f"to {_plain_url(headers.get('location', ''))}", secrets), wait)
    return Fault(_code_of(http_status, headers, message, words), detail, wait)


def _code_of(status: int, headers: Mapping[str, str], message: str, words: set[str]) -> str:
    if status in (429, 503, 529):
        if status == 429 and (words & _QUOTA_CODES or _QUOTA_TEXT.search(message)):
            return "SV-QUOTA"
        return f"SV-{status}"
    if status >= 500:
        return {502: "CH-502", 504: "CH-504"}.get(status, "SV-500")
    if status in (401, 403):
        challenge = headers.get("www-authenticate", "")
        if _OAUTH_FIELD.search(challenge) or _OAUTH_TEXT.search(message) or "insufficient_scope" in words:
            return "CH-OAUTH"
        if status == 403 and _model_words(message, words) and not _KEY_TEXT.search(message):
            return "CH-MODEL"
        return f"CH-{status}"
    if status in (402, 407):
        return f"CH-{status}"
    # Order: a context message also names the model, a model message may also name a parameter.
    if words & _CONTEXT_CODES or _CONTEXT_TEXT.search(message):
        return "SC-CONTEXT"
    if words & _KEY_CODES or _KEY_TEXT.search(message):
        return "CH-KEY"
    if words & _PARAM_CODES or _PARAM_TEXT.search(message):
        return "SC-PARAM"
    if _model_words(message, words):
        return "CH-MODEL"
    return "CH-404" if status == 404 else "SC-400"


def _model_words(message: str, words: set[str]) -> bool:
    return bool(words & _MODEL_CODES or _MODEL_TEXT.search(message))


def classify_error_object(error: Any, *, streamed: bool, secrets: Iterable[str] = ()) -> Fault:
    """Return the fault of an error object that came with status 200: as an event, or as the whole body."""
    message, words = error_parts(error)
    message = message[:_MESSAGE_READ]
    detail = redact(message or "an error object without a message", secrets)
    if not streamed:
        return Fault("SC-ERROR-BODY", detail)
    busy = words & {"429", "503", "529", "overloaded_error", "rate_limit_error", "rate_limit_exceeded"}
    return Fault("SV-STREAM-BUSY" if busy or _BUSY_TEXT.search(message) else "SV-STREAM", detail)


def _plain_url(text: str) -> str:
    """A location without its query: queries carry tokens and tracking."""
    return text.partition("?")[0].partition("#")[0] or "nowhere (no Location field)"


_SPAN = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s|us|µs|d)?")
_SPAN_S = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "m": 60.0, "h": 3600.0, "d": 86400.0}
_WAIT_FIELDS = ("retry-after-ms", "retry-after", "x-retry-after-ms", "x-retry-after", "x-ratelimit-retry-after",
                "x-ratelimit-reset-after", "ratelimit-reset", "x-ratelimit-reset-requests",
                "x-ratelimit-reset-tokens", "x-ratelimit-reset")  # fmt: skip
# A wait of more than a day is a date or a mistake, not advice to a load test.
WAIT_MAX_S = 86_400.0


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds the service asked to wait, from Retry-After or a gateway's own field; None when absent.

    Understood: seconds, milliseconds by field name, `1m30s`, an HTTP date or an epoch (both against the Date field).
    """
    names = [name for name in _WAIT_FIELDS if name in headers]
    names += [name for name in headers if name not in names and re.search(r"retry.{0,12}(after|in|ms)", name)]
    for name in names:
        wait = _wait_s(name, headers[name].strip(), headers.get("date", ""))
        if wait is not None and 0.0 <= wait <= WAIT_MAX_S:
            return wait
    return None


def _wait_s(name: str, text: str, date: str) -> float | None:
    if not text or len(text) > 64:
        return None
    if text[:1].isalpha():
        try:
            return (parsedate_to_datetime(text) - parsedate_to_datetime(date)).total_seconds()
        except (TypeError, ValueError, IndexError):
            return None
    pieces = _SPAN.findall(text.replace(" ", ""))
    if not pieces or "".join(number + unit for number, unit in pieces) != text.replace(" ", ""):
        return None
    wait = sum(float(number) * _SPAN_S[unit] for number, unit in pieces)
    if name.endswith("ms") and len(pieces) == 1 and not pieces[0][1]:
        return wait / 1000.0
    if wait > 1e9:
        try:
            wait -= parsedate_to_datetime(date).timestamp()
        except (TypeError, ValueError, IndexError):
            return None
    return wait


# --- one answer ------------------------------------------------------------------------------------------------


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
    server_timings: dict[str, float] | None = None
    events: list[dict[str, Any]] | None = None

    @classmethod
    def from_fault(cls, kind: str, *, detail: str = "", at: float | None = None, secrets: Iterable[str] = ()) -> Outcome:
        """Return the outcome of an arrival that got no answer at all: `kind` is a code or a name of FAIL_KINDS."""
        found = fault(kind, detail, secrets)
        return cls(status=found.status, code=found.code, error_kind=found.error_kind, done_at=at, detail=found.detail)

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
    ) -> RequestRow:
        """Return the ledger row; `to_run_s` maps this process's monotonic seconds to seconds of the run.

        ttft = first_token - intended; tpot = (last_token - first_token)/(output_tokens - 1); e2e = last_token -
        intended, for ok only; residence = done - sent. Source: docs/metrics.md.
        """
        sent_s = _mapped(to_run_s, self.send_at)
        first_s = _mapped(to_run_s, self.first_token_at)
        content_s = _mapped(to_run_s, self.first_content_at)
        last_s = _mapped(to_run_s, self.last_token_at)
        done_s = _mapped(to_run_s, self.done_at) if self.status != "unsent" else None
        tokens = self.output_tokens
        # One event with all tokens has no time between tokens: TPOT is unknown then, not zero.
        measurable = tokens is not None and tokens >= 2 and (self.chunks or 0) >= 2
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
            tpot_s=(last_s - first_s) / (tokens - 1) if measurable and first_s is not None and last_s is not None else None,
            e2e_s=last_s - intended_s if self.status == "ok" and last_s is not None else None,
            residence_s=None if sent_s is None or done_s is None else done_s - sent_s,
            itl_mean_s=self.itl_mean_s,
            itl_p99_s=self.itl_p99_s,
            itl_max_s=self.itl_max_s,
            itl_under_1ms_ratio=self.itl_under_1ms_ratio,
            input_tokens=input_tokens,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            max_tokens=max_tokens,
            output_tokens=tokens,
            output_tokens_source=self.output_tokens_source,
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
# Share of output events in the first read, or of gaps under 1 ms, from which the gaps are the network's, not the engine's.
BURST_SHARE = 0.9
# Held back: the header block and all output in the last 5 % of the time from send to last output, gaps under 3 ms.
HELD_SHARE = 0.05
HELD_GAP_S = 0.003


def is_burst(outcome: Outcome) -> bool:
    """Return True when the answer's output came in too few pieces for its gaps to say anything about the engine.

    Any of: (a) 90 % of the output events in the first read that held any; (b) 90 % of the gaps under 1 ms (for
    lazily read streams, where gaps are not kept: the mean gap under 1 ms); (c) held back and then sent in small
    pieces: header block and all output within the last 5 % of the wait, mean gap under 3 ms. From five output
    events on; a whole answer in one event that was not streamed is a burst too. Source: docs/metrics.md.
    """
    if "burst" in outcome.flags:
        return True
    chunks, first, last = outcome.chunks or 0, outcome.first_token_at, outcome.last_token_at
    if chunks < BURST_MIN_CHUNKS or first is None or last is None:
        return False
    if outcome.first_read_chunks is not None and outcome.first_read_chunks >= BURST_SHARE * chunks:
        return True
    mean_gap_s = (last - first) / (chunks - 1)
    if outcome.itl_under_1ms_ratio is not None:
        if outcome.itl_under_1ms_ratio >= BURST_SHARE:
            return True
    elif mean_gap_s < 0.001:
        return True
    if outcome.send_at is None or outcome.headers_at is None or mean_gap_s >= HELD_GAP_S:
        return False
    return last - outcome.headers_at < HELD_SHARE * (last - outcome.send_at)
