"""The taxonomy of failures: stable codes, their layer, kind, status, and section of the troubleshooting page.

Input: a code, or the name of a local failure. Output: `CODES`, `Fault`.
Does not: look at an answer (`refusals` does).

1. Every code in a ledger is a key of `CODES`; a code is never given to another meaning.
2. The layers are in the order in which a fault is looked for: channel, script, scheduler; `client` is ourselves.

Kinds and statuses: docs/metrics.md. What to do about a code: docs/troubleshooting.md.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from bench.client.redact import redact


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
    "CH-KEY": Code("channel", "auth", "error", "the key was not accepted, by the body", "401-unauthorized"),
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
    "SC-CONTEXT": Code("script", "bad_request", "error", "prompt and output exceed the context", "context-length"),
    "SC-PARAM": Code("script", "bad_request", "error", "a field of the request is not known there", "unknown-field"),
    "SC-CHOICES": Code("script", "malformed", "error", "an answer without choices", "reading-choices"),
    "SC-ERROR-BODY": Code("script", "in_stream_error", "error", "status 200 with an error as body", "reading-choices"),
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
    "SV-503": Code("scheduler", "overloaded", "rejected", "the service is overloaded or not ready (503)", "overloaded"),
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
