"""The two dialects that are no chat completions: OpenAI `responses` and Anthropic `messages`.

Input: one decoded event, or a whole answer that was not streamed, and the state it belongs to.
Output: the kinds of output in it; the state takes texts, usage, finish reason and faults.
Does not: tell the dialects apart (`chat.py` does, by the event itself), raise.

1. An answer of `responses` is over with `response.completed`, `.incomplete`, `.failed` or `.cancelled`, one of
   `messages` with `message_stop`.
2. The `type` inside the JSON counts; `event:` lines say the same once more.
3. `message_start` has a usage of one output token or none: it is no count of the answer. Its input tokens are.
"""
from __future__ import annotations

from typing import Any

from bench.client.chat_state import CHOICES_MAX, NOTHING, ChatState
from bench.client.outcome import classify_error_object

_RESPONSE_ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
MESSAGES_EVENTS = {"message", "message_start", "message_delta", "message_stop", "content_block_start",
                    "content_block_delta", "content_block_stop", "ping"}  # fmt: skip


# --- OpenAI `responses` ---


def responses_event(state: ChatState, event_type: str, obj: dict[str, Any]) -> int:
    """Take one event of a stream; return the kinds of output in it."""
    state.saw_choices = True
    delta = obj.get("delta")
    if event_type.endswith(".delta") and isinstance(delta, str) and delta:
        if "reasoning" in event_type:
            return state.take_thought(delta)
        if "_call" in event_type:
            return state.take_tool({"arguments": delta}, obj.get("output_index", 0), None)
        return state.take_content(delta)
    item = obj.get("item")
    if event_type == "response.output_item.added" and isinstance(item, dict) and _is_call(item):
        return state.take_tool({"name": item.get("name")}, obj.get("output_index", 0), None)
    response = obj.get("response")
    if isinstance(response, dict) and event_type in _RESPONSE_ENDS:
        _response_end(state, response)
    return NOTHING


def responses_body(state: ChatState, obj: dict[str, Any]) -> int:
    """Take an answer that was not streamed; return the kinds of output in it."""
    state.saw_choices = True
    found = NOTHING
    output = obj.get("output")
    for index, item in enumerate(output[:CHOICES_MAX] if isinstance(output, list) else ()):
        if not isinstance(item, dict):
            continue
        if _is_call(item):
            found |= state.take_tool(item, index, None)
            continue
        thought = item.get("type") == "reasoning"
        for part in (*_list(item.get("summary")), *_list(item.get("content"))):
            if isinstance(part, dict):
                text = part.get("text") or part.get("refusal")
                if isinstance(text, str) and text:
                    found |= state.take_thought(text) if thought else state.take_content(text)
    _response_end(state, obj)
    return found


def _response_end(state: ChatState, response: dict[str, Any]) -> None:
    status, error = response.get("status"), response.get("error")
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    words = [word for word in (reason, status) if isinstance(word, str) and word]
    state.finish = words[0][:40] if words else "completed"
    state.done = True
    usage = response.get("usage")
    if isinstance(usage, dict):
        state.take_usage(usage)
    if error or status in ("failed", "cancelled"):
        what = error or f"the response is {status}"
        state.fault = state.fault or classify_error_object(what, streamed=True, secrets=state.secrets)


def _is_call(item: dict[str, Any]) -> bool:
    """`function_call`, `custom_tool_call`, `mcp_call` and the like; not `function_call_output`."""
    return isinstance(kind := item.get("type"), str) and kind.endswith("_call")


# --- Anthropic `messages` ---


def messages_event(state: ChatState, event_type: str, obj: dict[str, Any]) -> int:
    """Take one event of a stream, or a whole `message`; return the kinds of output in it."""
    state.saw_choices = True
    if event_type == "content_block_delta":
        delta = obj.get("delta")
        if not isinstance(delta, dict):
            return NOTHING
        arguments = delta.get("partial_json")
        if isinstance(arguments, str) and arguments:
            return state.take_tool({"arguments": arguments}, obj.get("index", 0), None)
        return state.take_part(delta)
    if event_type == "content_block_start":
        return _block(state, obj.get("content_block"), obj.get("index", 0), whole=False)
    if event_type == "message":
        return _message(state, obj, whole=True)
    if event_type == "message_start":
        return _message(state, obj.get("message"), whole=False)
    if event_type == "message_delta":
        _stop_reason(state, obj.get("delta"))
    elif event_type == "message_stop":
        state.done = True
    return NOTHING


def _message(state: ChatState, message: Any, *, whole: bool) -> int:
    if not isinstance(message, dict):
        return NOTHING
    found = NOTHING
    for index, block in enumerate(_list(message.get("content"))[:CHOICES_MAX]):
        found |= _block(state, block, index, whole=whole)
    usage = message.get("usage")
    if isinstance(usage, dict) and not whole:
        state.take_usage({key: value for key, value in usage.items() if key != "output_tokens"})
    _stop_reason(state, message)
    return found


def _block(state: ChatState, block: Any, index: Any, *, whole: bool) -> int:
    """A content block: of a tool call the start of a stream has the name alone, its arguments follow."""
    if not isinstance(block, dict):
        return NOTHING
    kind = block.get("type")
    if isinstance(kind, str) and kind.endswith("tool_use"):
        return state.take_tool(block if whole else {"name": block.get("name")}, index, None)
    return state.take_part(block)


def _stop_reason(state: ChatState, holder: Any) -> None:
    reason = holder.get("stop_reason") if isinstance(holder, dict) else None
    if isinstance(reason, str) and reason:
        state.finish = reason[:40]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
