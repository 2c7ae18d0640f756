"""What the events of one answer have said so far, in whatever dialect: counts, kinds of output, usage, the fault.

Input: pieces of decoded events. Output: the fields of `ChatState`; each `take_*` returns the kind of output it took.
Does not: decode events or know a dialect (`chat.py` and `dialects.py` do).

1. Memory is bounded: counters, the last values, and texts only when they are asked for.
2. Usage is cumulative: the last value stands.
"""
from __future__ import annotations

from typing import Any

import orjson

from bench.client.codes import Fault
from bench.client.redact import redact

NOTHING, CONTENT, REASONING, TOOL = 0, 1, 2, 4
# Texts are kept for `bench probe` only; more than this of one answer is not shown.
TEXT_MAX = 1_000_000
# More choices than this in one request is a broken server, not `n`.
CHOICES_MAX = 128
# `messages` says thinking; some engines have the field beside the other counts.
_REASONING_KEYS = ("reasoning_tokens", "thinking_tokens")
# Longer names are compared by their beginning.
MODEL_MAX = 200


class ChatState:
    """What is known of one answer."""

    __slots__ = (
        "chunks", "outputs", "content_chunks", "ttft_chunk", "ttfo_chunk", "finish", "done", "marked", "after_done",
        "fault", "prompt_tokens", "cached_tokens", "output_tokens", "timings", "saw_choices", "several", "odd", "text",
        "reasoning", "tool_calls", "model", "reasoning_tokens", "thought", "_beside", "_open", "_keep",
        "_kept", "secrets",
    )  # fmt: skip

    def __init__(self, *, keep_text: bool = False, secrets: tuple[str, ...] = ()) -> None:
        self.chunks = 0  # events with data, without [DONE]
        self.outputs = 0  # of these, events that carried output
        self.content_chunks = 0  # of these, events that carried answer content
        self.ttft_chunk: int | None = None
        self.ttfo_chunk: int | None = None
        self.finish: str | None = None
        self.done = False
        self.marked = False  # [DONE] has come
        self.after_done = False
        self.fault: Fault | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.reasoning_tokens: int | None = None
        self.thought = False  # reasoning was streamed
        self._beside = False  # the service counts reasoning beside its output tokens, not among them
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
        self.secrets = secrets

    @property
    def terminated(self) -> bool:
        """The stream has said that it is over: [DONE] (or its like), or a finish reason for every choice."""
        return self.done or (self.finish is not None and not self._open)

    @property
    def hidden_reasoning(self) -> bool:
        """Reasoning is among the output tokens and was not streamed.

        An event holds a token at least: with more events than tokens that are no reasoning, it was streamed as content.
        """
        reasoning, output = self.reasoning_tokens, self.output_tokens
        if not reasoning or not output or self.thought or self._beside:
            return False
        return self.outputs <= output - reasoning

    # --- what an event brings ---

    def take_model(self, obj: dict[str, Any]) -> None:
        """Keep the first model that an event names: at the top, or in the `response` or `message` it begins."""
        for holder in (obj, obj.get("response"), obj.get("message")):
            name = holder.get("model") if isinstance(holder, dict) else None
            if self.model is None and isinstance(name, str) and name:
                self.model = name[:MODEL_MAX]

    def mark(self, found: int) -> None:
        """The event that was counted last carried output: is it the first?"""
        if self.ttft_chunk is None:
            self.ttft_chunk = self.chunks
        if found & CONTENT and self.ttfo_chunk is None:
            self.ttfo_chunk = self.chunks

    def blame(self, code: str, detail: str) -> None:
        """The answer failed; its first fault stands."""
        if self.fault is None:
            self.fault = Fault(code, redact(detail, self.secrets))

    def take_part(self, part: dict[str, Any]) -> int:
        """A piece of content that says what it is: text or thinking."""
        text = part.get("text")
        if isinstance(text, str) and text:
            return self.take_content(text)
        thinking = part.get("thinking")
        if isinstance(thinking, list):
            texts = (piece.get("text") for piece in thinking if isinstance(piece, dict))
            thinking = "".join(text for text in texts if isinstance(text, str))
        return self.take_thought(thinking) if isinstance(thinking, str) and thinking else NOTHING

    def take_content(self, text: str) -> int:
        """Text of the answer."""
        if self._keep and self._room(text):
            self.text.append(text)
        return CONTENT

    def take_thought(self, text: str) -> int:
        """Text of the reasoning before it."""
        self.thought = True
        if self._keep and self._room(text):
            self.reasoning.append(text)
        return REASONING

    def take_tool(self, function: Any, index: Any, call_id: Any) -> int:
        """A piece of a tool call."""
        name = function.get("name") if isinstance(function, dict) else None
        arguments = (function.get("arguments") or function.get("input")) if isinstance(function, dict) else None
        if isinstance(arguments, (dict, list)):
            arguments = orjson.dumps(arguments).decode()
        name = name if isinstance(name, str) else ""
        arguments = arguments if isinstance(arguments, str) else ""
        if not (name or arguments or call_id):
            return NOTHING
        if self._keep and type(index) is int and len(self.tool_calls) < CHOICES_MAX and self._room(arguments):
            call = self.tool_calls.setdefault(index, {"name": "", "arguments": ""})
            call["name"] += name
            call["arguments"] += arguments
        return TOOL

    def _room(self, text: str) -> bool:
        self._kept += len(text)
        return self._kept <= TEXT_MAX

    # --- usage ---

    def take_usage(self, usage: dict[str, Any]) -> None:
        """Keep the last usage: OpenAI, `responses` and `messages` spell it differently."""
        output = count(usage.get("completion_tokens"), usage.get("output_tokens"))
        if output is not None:
            self.output_tokens = output
        prompt = count(usage.get("prompt_tokens"), usage.get("input_tokens"))
        if prompt is not None:
            if "prompt_tokens" not in usage:
                # `messages` counts what its cache took and kept apart; the other dialects have it inside.
                for key in ("cache_read_input_tokens", "cache_creation_input_tokens"):
                    prompt += count(usage.get(key)) or 0
            self.prompt_tokens = prompt
        for key in ("prompt_tokens_details", "input_tokens_details"):
            details = usage.get(key)
            if isinstance(details, dict):
                self.cached_tokens = count(details.get("cached_tokens"), self.cached_tokens)
        self.cached_tokens = count(
            usage.get("cache_read_input_tokens"), usage.get("prompt_cache_hit_tokens"), self.cached_tokens
        )
        self._take_reasoning(usage)

    def _take_reasoning(self, usage: dict[str, Any]) -> None:
        """The tokens of reasoning: a part of the output tokens unless the total says that they come on top."""
        details = usage.get("completion_tokens_details"), usage.get("output_tokens_details")
        said = [part.get(key) for part in details if isinstance(part, dict) for key in _REASONING_KEYS]
        reasoning = count(*said, usage.get("reasoning_tokens"))
        if reasoning is None:
            return
        self.reasoning_tokens = reasoning
        total = count(usage.get("total_tokens"))
        apart = (self.prompt_tokens or 0) + (self.output_tokens or 0) + reasoning
        self._beside = bool(reasoning) and total == apart

    def take_timings(self, timings: dict[str, Any]) -> None:
        """The service's own clock (llama.cpp style), kept as a cross-check for `bench probe` and `bench check`."""
        kept = {
            key: float(value)
            for key, value in list(timings.items())[:32]
            if type(value) in (int, float) and len(key) <= 40
        }
        self.timings = kept or None
        self.cached_tokens = count(self.cached_tokens, timings.get("cache_n"))


def count(*values: Any) -> int | None:
    """Return the first value that is a token count."""
    for value in values:
        if type(value) is int and 0 <= value < 1 << 40:
            return value
    return None
