"""What the events of a streamed answer mean, and the body that asks for one.

Input: the data field of one event (JSON bytes). Output: `ChatReader.event` -> which kinds of output it carried;
the reader keeps finish reason, usage and error. `request_body` -> JSON bytes.
Does not: frame bytes, read clocks, count time.

Four dialects are told apart by the event itself: chat completions, text completions, `responses`, `messages`.

1. Memory is bounded whatever comes: counters, the last values, and texts only when they are asked for.
2. An event carries output when a non-empty content, reasoning or tool call is in it; a role, an empty string,
   usage or a finish reason is no output.
3. Usage is cumulative: the last value stands.
4. Nothing is raised: what cannot be read becomes `fault`.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from bench.client.outcome import Fault, classify_error_object
from bench.client.redact import redact

NOTHING, CONTENT, REASONING, TOOL = 0, 1, 2, 4
DONE_MARK = b"[DONE]"
_MODEL_FIRST = b'{"model":"'
_loads = orjson.loads
# Texts are kept for `bench probe` only; more than this of one answer is not shown.
TEXT_MAX = 1_000_000
# More choices than this in one request is a broken server, not `n`.
_CHOICES_MAX = 128
# Longer names are compared by their beginning.
MODEL_MAX = 200
_FAILED_FINISH = {"error", "abort", "cancelled", "canceled"}


class ChatReader:
    """State of one answer's events."""

    __slots__ = (
        "chunks", "outputs", "content_chunks", "ttft_chunk", "ttfo_chunk", "finish", "done", "after_done", "fault",
        "prompt_tokens", "cached_tokens", "output_tokens", "timings", "saw_choices", "several", "odd", "text",
        "reasoning", "tool_calls", "model", "_open", "_keep", "_kept", "_secrets",
    )  # fmt: skip

    def __init__(self, *, keep_text: bool = False, secrets: tuple[str, ...] = ()) -> None:
        self.chunks = 0  # events with data, without [DONE]
        self.outputs = 0  # of these, events that carried output
        self.content_chunks = 0  # of these, events that carried answer content
        self.ttft_chunk: int | None = None
        self.ttfo_chunk: int | None = None
        self.finish: str | None = None
        self.done = False
        self.after_done = False
        self.fault: Fault | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.timings: dict[str, float] | None = None
        self.saw_choices = False
        self.several = False  # more than one choice was seen
        self.odd = ""  # the first event that none of the dialects explains
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.tool_calls: dict[int, dict[str, str]] = {}
        self.model: str | None = None  # the first model that the answer names
        self._open: set[int] | None = None  # choices without a finish reason, once there are several
        self._keep = keep_text
        self._kept = 0
        self._secrets = secrets

    @property
    def terminated(self) -> bool:
        """The stream has said that it is over: [DONE] (or its like), or a finish reason for every choice."""
        return self.done or (self.finish is not None and not self._open)

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
                    self._mark(CONTENT)
                    self._named(obj)
                return CONTENT
        except (KeyError, TypeError, ValueError):
            pass
        found = self._object(obj, data, kind)
        if found:
            self.outputs += 1
            if found & CONTENT:
                self.content_chunks += 1
            self._mark(found)
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
                obj = _loads(bytes(data).decode("utf-8", "replace"))
            except orjson.JSONDecodeError:
                self._blame("SC-JSON", f"the body is not JSON: {_start(data)}")
                return NOTHING
        if not isinstance(obj, dict):
            self._blame("SC-CHOICES", f"the body is {_start(data)}, not an object with choices")
            return NOTHING
        if _error_of(obj) is not None:
            self.fault = self.fault or classify_error_object(obj, streamed=False, secrets=self._secrets)
            return NOTHING
        self.chunks += 1
        found = self._object(obj, data, "message")
        if found:
            self.outputs += 1
            self.content_chunks += bool(found & CONTENT)
            self._mark(found)
        elif not self.saw_choices:
            self._blame("SC-CHOICES", f"no choices in {_start(data)}")
        self.done = self.fault is None
        return found

    # --- one event, the general way ---

    def _named(self, obj: dict[str, Any]) -> None:
        """Keep the first model that an event names: at the top, or in the `response` or `message` it begins."""
        for holder in (obj, obj.get("response"), obj.get("message")):
            name = holder.get("model") if isinstance(holder, dict) else None
            if self.model is None and isinstance(name, str) and name:
                self.model = name[:MODEL_MAX]

    def _mark(self, found: int) -> None:
        if self.ttft_chunk is None:
            self.ttft_chunk = self.chunks
        if found & CONTENT and self.ttfo_chunk is None:
            self.ttfo_chunk = self.chunks

    def _not_json(self, data: bytes, kind: str) -> int:
        text = data.strip()
        if not text:
            return NOTHING  # an empty data field is no event
        if text == DONE_MARK:
            self.after_done = self.after_done or self.done
            self.done = True
            return NOTHING
        if self.done:
            self.after_done = True
            return NOTHING
        try:
            repaired = text.decode("utf-8", "replace").encode()
            _loads(repaired)
        except orjson.JSONDecodeError:
            self.chunks += 1
            if kind == "error":
                self.fault = self.fault or classify_error_object(
                    text[:2000].decode("utf-8", "replace"), streamed=True, secrets=self._secrets
                )
            else:
                self._blame("SC-JSON", f"event {self.chunks} is not JSON: {_start(data)}")
            return NOTHING
        return self.event(repaired, kind)

    def _blame(self, code: str, detail: str) -> None:
        if self.fault is None:
            self.fault = Fault(code, redact(detail, self._secrets))

    def _object(self, obj: Any, data: bytes, kind: str) -> int:
        if not isinstance(obj, dict):
            self._blame("SC-JSON", f"event {self.chunks} is {_start(data)}, not an object")
            return NOTHING
        if kind == "error" or _error_of(obj) is not None:
            # An error ends the answer's claim to success; output in the same event still came.
            self.fault = self.fault or classify_error_object(obj, streamed=True, secrets=self._secrets)
        if self.model is None:
            self._named(obj)
        found = NOTHING
        choices = obj.get("choices")
        event_type = obj.get("type")
        if isinstance(choices, list):
            self.saw_choices = True
            for choice in choices[:_CHOICES_MAX]:
                if isinstance(choice, dict):
                    found |= self._choice(choice, len(choices))
        elif isinstance(event_type, str) and event_type.startswith("response."):
            found = self._responses_event(event_type, obj)
        elif isinstance(event_type, str) and event_type in _MESSAGES_EVENTS:
            found = self._messages_event(event_type, obj)
        elif obj.get("object") == "response":
            found = self._responses_body(obj)
        elif "usage" not in obj and not self.odd:
            self.odd = _start(data)
        usage = obj.get("usage")
        if isinstance(usage, dict):
            self._usage(usage)
        timings = obj.get("timings")
        if isinstance(timings, dict):
            self._server_timings(timings)
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
            found |= self._content(text)
        finish = choice.get("finish_reason")
        if isinstance(finish, str) and finish:
            self.finish = finish[:40]
            if finish in _FAILED_FINISH and self.fault is None:
                self.fault = classify_error_object(f"finish_reason {finish}", streamed=True, secrets=self._secrets)
        if self._open is not None:
            if finish:
                self._open.discard(index)
            elif found and len(self._open) < _CHOICES_MAX:
                self._open.add(index)
        return found

    def _delta(self, delta: dict[str, Any]) -> int:
        found = NOTHING
        content = delta.get("content")
        if content:
            if isinstance(content, str):
                found |= self._content(content)
            elif isinstance(content, list):  # content as parts, some of them thinking
                for part in content:
                    if isinstance(part, dict):
                        found |= self._part(part)
        for key in ("reasoning_content", "reasoning"):
            text = delta.get(key)
            if isinstance(text, str) and text:
                found |= self._think(text)
                break  # servers that send both send the same text twice
        refusal = delta.get("refusal")
        if isinstance(refusal, str) and refusal:
            found |= self._content(refusal)
        calls = delta.get("tool_calls")
        if isinstance(calls, list):
            for place, call in enumerate(calls[:_CHOICES_MAX]):
                if isinstance(call, dict):
                    function = call.get("function") or call.get("custom")
                    found |= self._tool(function, call.get("index", place), call.get("id"))
        function = delta.get("function_call")
        if isinstance(function, dict):
            found |= self._tool(function, 0, None)
        return found

    def _part(self, part: dict[str, Any]) -> int:
        text = part.get("text")
        if isinstance(text, str) and text:
            return self._content(text)
        thinking = part.get("thinking")
        if isinstance(thinking, list):
            texts = (piece.get("text") for piece in thinking if isinstance(piece, dict))
            thinking = "".join(text for text in texts if isinstance(text, str))
        return self._think(thinking) if isinstance(thinking, str) and thinking else NOTHING

    def _content(self, text: str) -> int:
        if self._keep and self._room(text):
            self.text.append(text)
        return CONTENT

    def _think(self, text: str) -> int:
        if self._keep and self._room(text):
            self.reasoning.append(text)
        return REASONING

    def _tool(self, function: Any, index: Any, call_id: Any) -> int:
        name = function.get("name") if isinstance(function, dict) else None
        arguments = (function.get("arguments") or function.get("input")) if isinstance(function, dict) else None
        if isinstance(arguments, (dict, list)):
            arguments = orjson.dumps(arguments).decode()
        name = name if isinstance(name, str) else ""
        arguments = arguments if isinstance(arguments, str) else ""
        if not (name or arguments or call_id):
            return NOTHING
        if self._keep and type(index) is int and len(self.tool_calls) < _CHOICES_MAX and self._room(arguments):
            call = self.tool_calls.setdefault(index, {"name": "", "arguments": ""})
            call["name"] += name
            call["arguments"] += arguments
        return TOOL

    def _room(self, text: str) -> bool:
        self._kept += len(text)
        return self._kept <= TEXT_MAX

    # --- usage ---

    def _usage(self, usage: dict[str, Any]) -> None:
        """Keep the last usage: OpenAI, `responses` and `messages` spell it differently."""
        output = _count(usage.get("completion_tokens"), usage.get("output_tokens"))
        if output is not None:
            self.output_tokens = output
        prompt = _count(usage.get("prompt_tokens"), usage.get("input_tokens"))
        if prompt is not None:
            self.prompt_tokens = prompt
        for key in ("prompt_tokens_details", "input_tokens_details"):
            details = usage.get(key)
            if isinstance(details, dict):
                self.cached_tokens = _count(details.get("cached_tokens"), self.cached_tokens)
        self.cached_tokens = _count(
            usage.get("cache_read_input_tokens"), usage.get("prompt_cache_hit_tokens"), self.cached_tokens
        )

    def _server_timings(self, timings: dict[str, Any]) -> None:
        """The service's own clock (llama.cpp style), kept as a cross-check for `bench probe` and `bench check`."""
        kept = {
            key: float(value)
            for key, value in list(timings.items())[:32]
            if type(value) in (int, float) and len(key) <= 40
        }
        self.timings = kept or None
        self.cached_tokens = _count(self.cached_tokens, timings.get("cache_n"))

    # --- `responses` ---

    def _responses_event(self, event_type: str, obj: dict[str, Any]) -> int:
        self.saw_choices = True
        delta = obj.get("delta")
        if event_type.endswith(".delta") and isinstance(delta, str) and delta:
            if "reasoning" in event_type:
                return self._think(delta)
            if "arguments" in event_type or "tool_call" in event_type:
                return self._tool({"arguments": delta}, obj.get("output_index", 0), None)
            return self._content(delta)
        item = obj.get("item")
        added = event_type == "response.output_item.added" and isinstance(item, dict)
        if added and item.get("type") == "function_call":
            return self._tool({"name": item.get("name")}, obj.get("output_index", 0), None)
        response = obj.get("response")
        if isinstance(response, dict) and event_type in _RESPONSE_ENDS:
            self._response_end(response)
        return NOTHING

    def _response_end(self, response: dict[str, Any]) -> None:
        status = response.get("status")
        details = response.get("incomplete_details")
        reason = details.get("reason") if isinstance(details, dict) else None
        self.finish = str(reason or status or "completed")[:40]
        self.done = True
        usage = response.get("usage")
        if isinstance(usage, dict):
            self._usage(usage)
        if status == "failed" or response.get("error"):
            error = response.get("error")
            self.fault = self.fault or classify_error_object(error, streamed=True, secrets=self._secrets)

    def _responses_body(self, obj: dict[str, Any]) -> int:
        """A `responses` answer that was not streamed."""
        self.saw_choices = True
        found = NOTHING
        output = obj.get("output")
        for item in output[:_CHOICES_MAX] if isinstance(output, list) else ():
            content = item.get("content") if isinstance(item, dict) else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict):
                    found |= self._part(part)
            if isinstance(item, dict) and item.get("type") == "function_call":
                found |= self._tool(item, 0, None)
        self._response_end(obj)
        return found

    # --- `messages` ---

    def _messages_event(self, event_type: str, obj: dict[str, Any]) -> int:
        self.saw_choices = True
        if event_type == "content_block_delta":
            delta = obj.get("delta")
            if not isinstance(delta, dict):
                return NOTHING
            json_part = delta.get("partial_json")
            if isinstance(json_part, str) and json_part:
                return self._tool({"arguments": json_part}, obj.get("index", 0), None)
            return self._part(delta)
        if event_type == "content_block_start":
            block = obj.get("content_block")
            if isinstance(block, dict) and block.get("type") == "tool_use":
                return self._tool({"name": block.get("name")}, obj.get("index", 0), None)
            return self._part(block) if isinstance(block, dict) else NOTHING
        if event_type == "message_start" or event_type == "message":
            message = obj if event_type == "message" else obj.get("message")
            if not isinstance(message, dict):
                return NOTHING
            found = NOTHING
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict):
                    found |= self._part(part)
            if isinstance(message.get("usage"), dict):
                self._usage(message["usage"])
            self._stop_reason(message)
            return found
        if event_type == "message_delta":
            delta = obj.get("delta")
            if isinstance(delta, dict):
                self._stop_reason(delta)
        elif event_type == "message_stop":
            self.done = True
        return NOTHING

    def _stop_reason(self, holder: dict[str, Any]) -> None:
        reason = holder.get("stop_reason")
        if isinstance(reason, str) and reason:
            self.finish = reason[:40]


_RESPONSE_ENDS = ("response.completed", "response.incomplete", "response.failed")
_MESSAGES_EVENTS = {"message", "message_start", "message_delta", "message_stop", "content_block_start",
                    "content_block_delta", "content_block_stop", "ping"}  # fmt: skip


def _error_of(obj: dict[str, Any]) -> Any:
    """Return the error in an event or body, None when there is none (`"error": null` is none)."""
    error = obj.get("error")
    if error:
        return error
    if obj.get("object") == "error" or obj.get("type") == "error":
        return obj
    return None


def _count(*values: Any) -> int | None:
    """Return the first value that is a token count."""
    for value in values:
        if type(value) is int and 0 <= value < 1 << 40:
            return value
    return None


def _start(data: bytes) -> str:
    return repr(bytes(data[:80]).decode("utf-8", "replace"))


def asked_model(body: bytes) -> str:
    """Return the model that a body of `request_body` asks for; empty when it names none in the first place."""
    if not body.startswith(_MODEL_FIRST):
        return ""
    end = body.find(b'"', len(_MODEL_FIRST))
    name = body[len(_MODEL_FIRST) : end]
    if end < 0 or b"\\" in name:  # an escaped character: rare, so parsed whole
        try:
            name = _loads(body)["model"].encode()
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return ""
    return name.decode("utf-8", "replace")[:MODEL_MAX]


def is_other_model(asked: str, served: str | None) -> bool:
    """Return True when the two names are of different models: neither is a longer or shorter form of the other.

    Case does not count. Nor does a folder or vendor before the last `/`: `vendor/m` is served as `m-2024-08`.
    """
    if not asked or not served:
        return False
    pairs = [(asked.casefold(), served.casefold())]
    pairs.append((pairs[0][0].rstrip("/").rpartition("/")[2], pairs[0][1].rstrip("/").rpartition("/")[2]))
    return not any(one in other or other in one for one, other in pairs)


def request_body(
    model: str,
    prompt: str,
    max_tokens: int,
    *,
    endpoint: str = "chat",
    stream: bool = True,
    ignore_eos: bool = True,
    extra_body: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the JSON body of one request; `endpoint`: chat, completions, responses or messages.

    `extra_body` wins over everything else; a value of None there removes the field.
    """
    body: dict[str, Any] = {"model": model}
    if endpoint == "completions":
        body["prompt"] = prompt
    elif endpoint == "responses":
        body["input"] = prompt
    elif endpoint in ("chat", "messages"):
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        raise ValueError(f"endpoint is {endpoint!r}; allowed are chat, completions, responses, messages")
    body["max_output_tokens" if endpoint == "responses" else "max_tokens"] = max_tokens
    body["stream"] = stream
    if stream and endpoint in ("chat", "completions"):
        body["stream_options"] = {"include_usage": True}
    if ignore_eos and endpoint in ("chat", "completions"):
        body["ignore_eos"] = True
    for key, value in (extra_body or {}).items():
        if value is None:
            body.pop(key, None)
        else:
            body[key] = value
    return orjson.dumps(body)
