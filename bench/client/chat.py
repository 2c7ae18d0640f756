"""What the events of a streamed answer mean.

Input: the data field of one event (JSON bytes). Output: `ChatReader.event` -> which kinds of output it carried;
the reader keeps finish reason, usage and error.
Does not: frame bytes, read clocks, count time.

Four dialects are told apart by the event itself: chat completions, text completions, `responses`, `messages`.

1. Memory is bounded whatever comes: counters, the last values, and texts only when they are asked for.
2. An event carries output when a non-empty content, reasoning or tool call is in it; a role, an empty string,
   usage or a finish reason is no output.
3. Usage is cumulative: the last value stands.
4. Nothing is raised: what cannot be read becomes `fault`.
"""
from __future__ import annotations

import re
from typing import Any

import orjson

from bench.client.chat_state import CHOICES_MAX, CONTENT, NOTHING, ChatState
from bench.client.dialects import MESSAGES_EVENTS, messages_event, responses_body, responses_event
from bench.client.outcome import classify_error_object

DONE_MARK = b"[DONE]"
_loads = orjson.loads
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_FAILED_FINISH = {"error", "abort", "cancelled", "canceled"}


class ChatReader(ChatState):
    """State of one answer's events."""

    __slots__ = ()

    def event(self, data: bytes, kind: str = "message") -> int:
        """Take the data field of one event; return the kinds of output in it as bits (CONTENT, REASONING, TOOL)."""
        if len(data) == 6 and data == DONE_MARK:
            return self._not_json(data, kind)
        try:
            obj = _loads(data)
        except orjson.JSONDecodeError:
            return self._not_json(data, kind)
        if self.done:
            self.after_done = True
            return NOTHING
        self.chunks += 1
        try:
            # The usual token event: one choice, one non-empty content, nothing else to learn.
            (choice,) = obj["choices"]
            delta = choice["delta"]
            if (
                len(delta) == 1
                and choice["finish_reason"] is None
                and type(text := delta["content"]) is str
                and text
                and not self._keep
                and not self._open
                and not choice["index"]
                and obj.get("usage") is None
                and obj.get("error") is None
                and "timings" not in obj
            ):
                self.outputs += 1
                self.content_chunks += 1
                self.saw_choices = True
                if self.ttfo_chunk is None:
                    self.mark(CONTENT)
                    self.take_model(obj)
                return CONTENT
        except (KeyError, TypeError, ValueError):
            pass
        found = self._object(obj, data, kind)
        if found:
            self.outputs += 1
            if found & CONTENT:
                self.content_chunks += 1
            self.mark(found)
        return found

    def count_alike(self, events: int, kind: int) -> None:
        """Take `events` token events of one kind that were counted, not parsed."""
        self.chunks += events
        self.outputs += events
        if kind & CONTENT:
            self.content_chunks += events

    def body(self, data: bytes) -> int:
        """Take a whole JSON body (an answer that was not streamed); return the kinds of output in it."""
        try:
            obj = _loads(data)
        except orjson.JSONDecodeError:
            try:
                obj = _loads(_mended(bytes(data)))
            except orjson.JSONDecodeError:
                self.blame("SC-JSON", f"the body is not JSON: {_start(data)}")
                return NOTHING
        if not isinstance(obj, dict):
            self.blame("SC-CHOICES", f"the body is {_start(data)}, not an object with choices")
            return NOTHING
        if _error_of(obj) is not None:
            self.fault = self.fault or classify_error_object(obj, streamed=False, secrets=self.secrets)
            return NOTHING
        self.chunks += 1
        found = self._object(obj, data, "message")
        if found:
            self.outputs += 1
            self.content_chunks += bool(found & CONTENT)
            self.mark(found)
        elif not self.saw_choices:
            self.blame("SC-CHOICES", f"no choices in {_start(data)}")
        self.done = self.fault is None
        return found

    # --- one event, the general way ---

    def _not_json(self, data: bytes, kind: str) -> int:
        text = data.strip()
        if not text:
            return NOTHING  # an empty data field is no event
        if text == DONE_MARK:
            # After an event that ends the answer, as some gateways write it, the mark is no text too late.
            self.after_done = self.after_done or self.marked
            self.done = self.marked = True
            return NOTHING
        if self.done:
            self.after_done = True
            return NOTHING
        try:
            mended = _mended(text)
            _loads(mended)
        except orjson.JSONDecodeError:
            self.chunks += 1
            if kind == "error":
                self.fault = self.fault or classify_error_object(
                    text[:2000].decode("utf-8", "replace"), streamed=True, secrets=self.secrets
                )
            else:
                self.blame("SC-JSON", f"event {self.chunks} is not JSON: {_start(data)}")
            return NOTHING
        return self.event(mended, kind)

    def _object(self, obj: Any, data: bytes, kind: str) -> int:
        if not isinstance(obj, dict):
            self.blame("SC-JSON", f"event {self.chunks} is {_start(data)}, not an object")
            return NOTHING
        if kind == "error" or _error_of(obj) is not None:
            # An error ends the answer's claim to success; output in the same event still came.
            self.fault = self.fault or classify_error_object(obj, streamed=True, secrets=self.secrets)
        if self.model is None:
            self.take_model(obj)
        found = NOTHING
        choices = obj.get("choices")
        event_type = obj.get("type")
        if isinstance(choices, list):
            self.saw_choices = True
            for choice in choices[:CHOICES_MAX]:
                if isinstance(choice, dict):
                    found |= self._choice(choice, len(choices))
        elif isinstance(event_type, str) and event_type.startswith("response."):
            found = responses_event(self, event_type, obj)
        elif isinstance(event_type, str) and event_type in MESSAGES_EVENTS:
            found = messages_event(self, event_type, obj)
        elif obj.get("object") == "response":
            found = responses_body(self, obj)
        elif "usage" not in obj and not self.odd:
            self.odd = _start(data)
        usage = obj.get("usage")
        if isinstance(usage, dict):
            self.take_usage(usage)
        timings = obj.get("timings")
        if isinstance(timings, dict):
            self.take_timings(timings)
        return found

    def _choice(self, choice: dict[str, Any], how_many: int) -> int:
        index = choice.get("index")
        index = index if type(index) is int else 0
        if (how_many > 1 or index) and not self.several:
            self.several = True
            self._open = {0} if self.outputs and self.finish is None else set()
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            delta = choice.get("message")
        found = self._delta(delta) if isinstance(delta, dict) else NOTHING
        text = choice.get("text")
        if isinstance(text, str) and text:
            found |= self.take_content(text)
        finish = choice.get("finish_reason")
        if isinstance(finish, str) and finish:
            self.finish = finish[:40]
            if finish in _FAILED_FINISH and self.fault is None:
                self.fault = classify_error_object(f"finish_reason {finish}", streamed=True, secrets=self.secrets)
        if self._open is not None:
            if finish:
                self._open.discard(index)
            elif found and len(self._open) < CHOICES_MAX:
                self._open.add(index)
        return found

    def _delta(self, delta: dict[str, Any]) -> int:
        found = NOTHING
        content = delta.get("content")
        if content:
            if isinstance(content, str):
                found |= self.take_content(content)
            elif isinstance(content, list):  # content as parts, some of them thinking
                for part in content:
                    if isinstance(part, dict):
                        found |= self.take_part(part)
        for key in ("reasoning_content", "reasoning"):
            text = delta.get(key)
            if isinstance(text, str) and text:
                found |= self.take_thought(text)
                break  # servers that send both send the same text twice
        refusal = delta.get("refusal")
        if isinstance(refusal, str) and refusal:
            found |= self.take_content(refusal)
        calls = delta.get("tool_calls")
        if isinstance(calls, list):
            for place, call in enumerate(calls[:CHOICES_MAX]):
                if isinstance(call, dict):
                    function = call.get("function") or call.get("custom")
                    found |= self.take_tool(function, call.get("index", place), call.get("id"))
        function = delta.get("function_call")
        if isinstance(function, dict):
            found |= self.take_tool(function, 0, None)
        return found


def _error_of(obj: dict[str, Any]) -> Any:
    """Return the error in an event or body, None when there is none (`"error": null` is none)."""
    error = obj.get("error")
    if error:
        return error
    if obj.get("object") == "error" or obj.get("type") == "error":
        return obj
    return None


def _mended(data: bytes) -> bytes:
    """The JSON with U+FFFD for bytes that are no UTF-8 and for halves of surrogate pairs, which orjson refuses.

    Gateways that cut text by UTF-16 units send such halves, each in an event of its own.
    """
    return _SURROGATE.sub(rb"\\ufffd", data.decode("utf-8", "replace").encode())


def _start(data: bytes) -> str:
    return repr(bytes(data[:90]).strip()[:80].decode("utf-8", "replace"))
