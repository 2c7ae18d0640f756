"""What a finished answer was: its fault, or none, and its flags.

Input: what its reader has gathered. Output: `Fault` or None; flags of the ledger.
Does not: read bytes or clocks, judge an SLO.

An answer that has said it is over ([DONE], its like, or a finish reason) is not spoilt by how its connection ends.
"""
from __future__ import annotations

from bench.client.chat_state import ChatState
from bench.client.http1 import ResponseParser
from bench.client.outcome import Fault, Outcome, classify, error_parts, is_burst
from bench.client.redact import redact
from bench.client.request import is_other_model
from bench.records.request import LENGTH_FINISH, MANY_TOKENS

# What the body turned out to be; UNKNOWN until its first byte that is no white space.
UNKNOWN, EVENTS, JSON_BODY, REFUSAL, PLAIN, TEXT = range(6)


def judge(
    kind: int, chat: ChatState, http: ResponseParser, body: bytes, fault: Fault | None, secrets: tuple[str, ...]
) -> Fault | None:
    """Return the fault of a finished answer, None for a success.

    kind: what the body was. fault: what went wrong on the channel, if anything did.
    """
    if kind == REFUSAL or (http.has_head and not 200 <= (http.status or 0) < 300):
        return classify(http.status or 0, http.headers, body, secrets=secrets)
    if chat.fault is not None:
        return chat.fault
    if fault is not None and not (kind == EVENTS and chat.terminated):
        return fault
    if kind == PLAIN:
        return None
    if http.status in (204, 205):  # by definition without a body
        return Fault("SC-EMPTY", f"status {http.status}: an answer without content")
    if kind == TEXT:
        return _page(body, secrets)
    if chat.terminated:
        if chat.outputs:
            return None
        hidden = chat.reasoning_tokens
        but = f", but {hidden} reasoning tokens that were not streamed" if hidden else ""
        return Fault("SC-EMPTY", f"the answer was complete and had no output{but}")
    if chat.chunks and not chat.saw_choices:
        return Fault("SC-CHOICES", redact(f"no choices in {chat.odd or 'the events'}", secrets))
    if kind == EVENTS and not chat.chunks and "event-stream" not in http.headers.get("content-type", ""):
        return Fault("SC-SSE", redact(b"not an event stream: " + body, secrets))
    how = f"after {chat.outputs} events with output" if chat.outputs else "before any output"
    return Fault("SC-TRUNCATED", f"the stream ended {how}, without a finish reason or [DONE]")


def _page(body: bytes, secrets: tuple[str, ...]) -> Fault:
    """A page of HTML or text with status 200 where an event stream was asked for."""
    message, _ = error_parts(bytes(body))
    return Fault("SC-SSE", redact(f"a page, not an event stream: {message}", secrets))


def set_flags(
    outcome: Outcome, kind: int, chat: ChatState, *, first_read_chunks: int, pinned_tokens: int | None, model: str
) -> None:
    """Add to an outcome the flags that its answer deserves. model: the one asked for, empty = not compared."""
    flags = outcome.flags
    if chat.cached_tokens:
        flags.add("cached")
    if first_read_chunks > 1:
        flags.add("first_read_bound")
    if chat.hidden_reasoning:
        flags.add("hidden_reasoning")
    if is_other_model(model, chat.model):
        flags.add("other_model")
    if chat.after_done:
        flags.add("text_after_done")
    if outcome.status == "ok" and kind != PLAIN:
        if not chat.done:
            flags.add("no_done")
        if outcome.output_tokens_source == "chunks":
            flags.add("tokens_estimated")
        tokens = outcome.output_tokens
        # Counted events may hold several tokens each: then only another end than the limit shows a short answer.
        # Whether there were too few of them to be tokens is judged over a stage (INV-EVENTS).
        counted = outcome.output_tokens_source == "chunks" and chat.finish in LENGTH_FINISH
        if pinned_tokens is not None and tokens is not None and tokens < pinned_tokens and not counted:
            flags.add("short")
        held = pinned_tokens if counted else outcome.streamed_tokens
        if kind == JSON_BODY or is_burst(outcome) or (outcome.chunks == 1 and (held or 0) >= MANY_TOKENS):
            flags.add("burst")
