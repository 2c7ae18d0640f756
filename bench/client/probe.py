"""One streamed request through the transport of the load test, and all that was seen of it.

Input: a checked config, the API key, a prompt, a length.
Output: {"row": ledger row, "events": timeline, "answer": texts}, free of secrets.
Does not: retry, judge, keep anything open.

1. The row is made by the same code as every row of a run, with the send as the intended time: `ttft_s` starts there.
2. Times of the timeline are seconds from the send; all events that came in one read carry that read's time.
"""
from __future__ import annotations

import secrets
import time
from dataclasses import asdict
from typing import Any

from bench.client.answer import AnswerOptions
from bench.client.dialing import proxy_from_env
from bench.client.endpoint import parse_base_url
from bench.client.outcome import CODES, DOCS_PAGE, Outcome
from bench.client.redact import redact
from bench.client.request import PATHS, request_body
from bench.client.transport import Transport, TransportOptions

TEXT_SHOWN = 4_000


def run_probe(
    config: Any, api_key: str | None, *, max_tokens: int, prompt: str, read: str = "prompt"
) -> dict[str, Any]:
    """Return what became of one request; raises ChannelError when the address or a header cannot be used at all.

    read: `lazy` reads as most streams of a run are read: then there is no timeline of events and no text.
    """
    target = config.target
    endpoint = parse_base_url(config.base_url)
    proxy = target.proxy
    if target.trust_env and not proxy:
        proxy = proxy_from_env(endpoint.scheme, endpoint.host)
    options = TransportOptions(
        read=read,
        connect_timeout_s=target.connect_timeout_sec,
        first_token_timeout_s=target.first_token_timeout_sec,
        idle_timeout_s=target.idle_timeout_sec,
        total_timeout_s=target.total_timeout_sec,
        proxy=proxy,
        ca_file=target.ca_file,
        tls_verify=target.tls_verify,
        extra_headers=tuple(target.extra_headers.items()),
        path=PATHS[target.endpoint],
        auth=target.auth,
    )
    body = request_body(config.model, prompt, max_tokens, endpoint=target.endpoint, ignore_eos=target.ignore_eos,
                        extra_body=target.extra_body)  # fmt: skip
    hidden = (api_key,) if api_key else ()
    seen = read == "prompt"  # a lazily read stream is counted, not looked at
    answer = AnswerOptions(keep_text=seen, timeline=seen, secrets=hidden)
    started = time.monotonic()
    request_id = f"probe-{secrets.token_hex(8)}"
    outcome = _send(Transport(endpoint, options, api_key), body, request_id, answer, prompt_read=seen)
    zero = outcome.send_at if outcome.send_at is not None else started
    row = outcome.to_row(stage=0, arrival=0, worker=0, repeat=0, offered_qps=0.0, phase="window", tenant="",
                         request_class="", request_id=request_id, intended_s=0.0, input_tokens=None,
                         max_tokens=max_tokens, to_run_s=lambda at: at - zero)  # fmt: skip
    return {
        "row": asdict(row),
        "events": _timeline(outcome, zero),
        "answer": _answer(outcome, hidden),
        "help": f"{DOCS_PAGE}#{CODES[outcome.code].anchor}" if outcome.code else "",
    }


def _send(transport: Transport, body: bytes, request_id: str, answer: AnswerOptions, *, prompt_read: bool) -> Outcome:
    try:
        return transport.ask(body, request_id=request_id, prompt_read=prompt_read, answer=answer)
    finally:
        transport.close()


def _timeline(outcome: Outcome, zero: float) -> list[dict[str, Any]]:
    """What came when, in seconds from the send; connection times first."""
    events: list[dict[str, Any]] = []
    for what, took_s in (("dns", outcome.dns_s), ("connect", outcome.connect_s), ("tls", outcome.tls_s)):
        if took_s is not None:
            events.append({"what": what, "took_s": round(took_s, 6)})
    if outcome.send_at is not None:
        events.append({"what": "send", "at_s": 0.0})
    for event in outcome.events or ():
        facts = {name: value for name, value in event.items() if name != "at" and value is not None}
        events.append({"what": facts.pop("what"), "at_s": round(event["at"] - zero, 6), **facts})
    if outcome.done_at is not None:
        events.append({"what": "end", "at_s": round(outcome.done_at - zero, 6), "status": outcome.status,
                       **({"code": outcome.code} if outcome.code else {})})  # fmt: skip
    return events


def _answer(outcome: Outcome, hidden: tuple[str, ...]) -> dict[str, Any]:
    """The texts of the answer and where output began, by number of the event."""
    calls = [
        {name: redact(text, hidden, TEXT_SHOWN) for name, text in call.items()} for call in outcome.tool_calls or ()
    ]
    return {
        "text": _shown(outcome.text, hidden),
        "reasoning_text": _shown(outcome.reasoning_text, hidden),
        "tool_calls": calls,
        "ttft_counts_at_chunk": outcome.ttft_chunk,
        "ttfo_counts_at_chunk": outcome.ttfo_chunk,
        "content_chunks": outcome.content_chunks,
        "server_timings": outcome.server_timings,
    }


def _shown(text: str | None, hidden: tuple[str, ...]) -> str:
    """A text of the model as it came (line ends and all), without the key; `json_text` makes it safe to print."""
    text = text or ""
    for secret in hidden:
        text = text.replace(secret, "[hidden]")
    return text if len(text) <= TEXT_SHOWN else text[:TEXT_SHOWN] + "..."
