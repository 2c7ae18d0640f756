"""The OpenAI request and answer formats as vLLM speaks them: bodies in, validated calls out; pre-encoded frames.

Input: the bytes of a request body. Output: `Call` or `ApiError`; bytes of answers, chunks and error objects.
Does not: open sockets, schedule, or read a clock.

Token counting: the engine has no tokenizer. One whitespace-separated word is one token, over the text of all
messages (or the prompt), and the chat template adds nothing. `bench.workload.prompts` writes prompts by the same
rule, so the planned input length is the length counted here. A prompt given as a list of token ids counts its ids.
A body with `input_tokens` says itself how long its prompt is: the load generator's do when they hold prompts of a user.

Frames: a streamed token costs one concatenation. All words of the vocabulary have the same number of bytes, so
the HTTP chunk size of a one-token frame is constant for a request and everything around the word is encoded once.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from engine.lengths import text_digest

# 64 words of six bytes with the leading space that tokenizers put before a word.
_SYLLABLES = ("ba", "de", "fi", "go", "hu", "ka", "lo", "mi")
WORDS: tuple[bytes, ...] = tuple(
    f" {first}{second}{'nrst'[(i + j) % 4]}".encode() for i, first in enumerate(_SYLLABLES)
    for j, second in enumerate(_SYLLABLES)
)
WORD_BYTES = len(WORDS[0])
WORD_MASK = len(WORDS) - 1

DONE_FRAME = b"e\r\ndata: [DONE]\n\n\r\n"


class ApiError(Exception):
    """A refusal with an OpenAI error object: HTTP status, message, type, offending parameter, code."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None,
                 code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code

    def body(self) -> bytes:
        """The JSON body of the answer."""
        return error_body(str(self), self.kind, self.param, self.code or self.status)


def error_body(message: str, kind: str, param: str | None, code: str | int | None) -> bytes:
    """An OpenAI error object as JSON."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


@dataclass(slots=True)
class Call:
    """One validated completion request."""

    chat: bool
    model: str
    prompt_tokens: int
    digest: bytes
    text: str
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    priority: int | None
    tenant: str | None
    request_class: str | None
    told: bool = False  # prompt_tokens is what the body says, not its words


def parse_call(body: bytes, *, chat: bool) -> Call:
    """The call in a JSON body; raises `ApiError` (400) with the parameter that is wrong."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as problem:
        raise ApiError(400, f"the body is not JSON: {problem}") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body is not a JSON object")
    model = data.get("model")
    if not isinstance(model, str):
        raise ApiError(400, "model is missing or not a string", param="model")
    if data.get("n", 1) not in (1, None):
        raise ApiError(400, f"n is {data['n']!r}; this engine makes one choice per request (n=1)", param="n")
    for name in ("logprobs", "best_of", "tools", "echo", "suffix"):
        if data.get(name) not in (None, False, 0, 1 if name == "best_of" else None, [], ""):
            raise ApiError(400, f"{name} is not supported by the embedded engine; leave it out", param=name)
    text, counted = _chat_text(data) if chat else _prompt_text(data)
    if counted == 0:
        raise ApiError(400, "the prompt has no words", param="messages" if chat else "prompt")
    told = _typed(data, "input_tokens", int, None)
    if told is not None and told < 1:
        raise ApiError(400, f"input_tokens must be at least 1, got {told}", param="input_tokens")
    ignore_eos = _typed(data, "ignore_eos", bool, False)
    max_tokens = _typed(data, "max_tokens", int, None)
    if chat and max_tokens is None:
        max_tokens = _typed(data, "max_completion_tokens", int, None)
    elif not chat and max_tokens is None:
        max_tokens = 16  # the default of the completions endpoint
    min_tokens = _typed(data, "min_tokens", int, 0)
    if max_tokens is not None and max_tokens < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {max_tokens}", param="max_tokens")
    if min_tokens < 0 or (max_tokens is not None and min_tokens > max_tokens):
        raise ApiError(400, f"min_tokens must be between 0 and max_tokens, got {min_tokens}", param="min_tokens")
    stream = _typed(data, "stream", bool, False)
    options = _typed(data, "stream_options", dict, None)
    if options is not None and not stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    include_usage = bool(options and options.get("include_usage"))
    tenant = _typed(data, "tenant", str, None) or _typed(data, "user", str, None)
    return Call(
        chat=chat, model=model, prompt_tokens=told or counted, text=text,
        digest=text_digest(text), max_tokens=max_tokens, min_tokens=min_tokens, ignore_eos=ignore_eos,
        stream=stream, include_usage=include_usage, priority=_typed(data, "priority", int, None), tenant=tenant,
        request_class=_typed(data, "request_class", str, None), told=told is not None)


def _typed(data: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ApiError(400, f"{name} must be of type {kind.__name__}, got {type(value).__name__}", param=name)
    return value


def _chat_text(data: dict[str, Any]) -> tuple[str, int]:
    """All message text and its number of words."""
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages is missing or empty", param="messages")
    parts: list[str] = []
    for position, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"messages[{position}] needs a role and a content", param="messages")
        if isinstance(content, str):
            parts.append(content)
        elif isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                    raise ApiError(400, f"messages[{position}] has a part that is not text", param="messages")
                parts.append(part["text"])
        else:
            raise ApiError(400, f"messages[{position}].content must be text", param="messages")
    text = parts[0] if len(parts) == 1 else "\n".join(parts)
    return text, len(text.split())


def _prompt_text(data: dict[str, Any]) -> tuple[str, int]:
    """The prompt of a text completion and its number of tokens."""
    prompt = data.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt):
        return " ".join(map(str, prompt)), len(prompt)
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise ApiError(400, "prompt must be one string or one list of token ids", param="prompt")
    return prompt, len(prompt.split())


def frame(payload: bytes) -> bytes:
    """One server-sent event as one HTTP chunk."""
    return b"%x\r\ndata: %b\n\n\r\n" % (len(payload) + 8, payload)


class Frames:
    """Pre-encoded parts of the streamed answer of one request; token i is word (offset + 7 i) modulo 64.

    The frame of one token in the middle of the answer is `prefix + WORDS[(offset + 7 i) & WORD_MASK] + suffix`.
    """

    __slots__ = ("chat", "role", "prefix", "suffix", "offset", "_head", "_tail")

    def __init__(self, call: Call, answer_id: str, created: int, model: bytes) -> None:
        self.chat = call.chat
        kind = b"chat.completion.chunk" if call.chat else b"text_completion"
        start = (b'{"id":"%b","object":"%b","created":%d,"model":%b,"choices":['
                 % (answer_id.encode(), kind, created, model))
        self._head = start
        if call.chat:
            prefix = start + b'{"index":0,"delta":{"content":"'
            suffix = b'"},"logprobs":null,"finish_reason":null}]}'
            self.role = frame(start + b'{"index":0,"delta":{"role":"assistant","content":""},'
                                      b'"logprobs":null,"finish_reason":null}]}')
        else:
            prefix = start + b'{"index":0,"text":"'
            suffix = b'","logprobs":null,"finish_reason":null}]}'
            self.role = b""
        self._tail = suffix
        self.prefix = b"%x\r\ndata: %b" % (len(prefix) + len(suffix) + WORD_BYTES + 8, prefix)
        self.suffix = suffix + b"\n\n\r\n"
        self.offset = call.digest[0]

    def text(self, start: int, end: int) -> bytes:
        """The words start..end-1, JSON-safe."""
        offset = self.offset
        words = b"".join([WORDS[(offset + 7 * position) & WORD_MASK] for position in range(start, end)])
        return words.lstrip() if start == 0 else words

    def tokens(self, start: int, end: int, finish_reason: str | None) -> bytes:
        """The frame of the tokens start..end-1; with `finish_reason` it is the last one (as vLLM sends it)."""
        tail = self._tail
        if finish_reason is not None:
            stop = b',"stop_reason":null}]}'
            tail = tail.replace(b'"finish_reason":null}]}', b'"finish_reason":"%b"' % finish_reason.encode() + stop)
        opening = b'{"index":0,"delta":{"content":"' if self.chat else b'{"index":0,"text":"'
        return frame(self._head + opening + self.text(start, end) + tail)

    def usage(self, usage: bytes) -> bytes:
        """The frame with empty choices and the usage object."""
        return frame(self._head + b'],"usage":' + usage + b"}")


def usage_body(prompt_tokens: int, output_tokens: int, cached_tokens: int | None) -> bytes:
    """The usage object as JSON; `cached_tokens` is None when the engine has no prefix cache."""
    details = b"" if cached_tokens is None else b',"prompt_tokens_details":{"cached_tokens":%d}' % cached_tokens
    return (b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d%b}'
            % (prompt_tokens, prompt_tokens + output_tokens, output_tokens, details))


def whole_answer(call: Call, answer_id: str, created: int, model: bytes, text: bytes, finish_reason: str,
                 usage: bytes) -> bytes:
    """The body of an answer that is not streamed."""
    if call.chat:
        choice = (b'{"index":0,"message":{"role":"assistant","content":"%b","tool_calls":[]},"logprobs":null,'
                  b'"finish_reason":"%b","stop_reason":null}' % (text, finish_reason.encode()))
    else:
        choice = (b'{"index":0,"text":"%b","logprobs":null,"finish_reason":"%b","stop_reason":null}'
                  % (text, finish_reason.encode()))
    return (b'{"id":"%b","object":"%b","created":%d,"model":%b,"choices":[%b],"usage":%b}'
            % (answer_id.encode(), b"chat.completion" if call.chat else b"text_completion", created, model, choice,
               usage))
