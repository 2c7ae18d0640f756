"""The request of each dialect: path, body, the header fields of its key, and the model that it asks for.

Input: settings of one request. Output: bytes and fields.
Does not: send, or read an answer (`answer.py` does).
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from bench.client.chat_state import MODEL_MAX

# Also what is cut off a pasted base URL: a path comes before one that it ends with.
PATHS = {"chat": "/chat/completions", "completions": "/completions", "responses": "/responses", "messages": "/messages"}
# Only these dialects have a field (`ignore_eos`) that makes every answer as long as asked.
PINNING = ("chat", "completions")
# The version of `messages` whose events are read here; target.extra_headers may name another one.
ANTHROPIC_VERSION = "2023-06-01"
KEY_FIELDS = ("authorization", "x-api-key")
_MODEL_FIRST = b'{"model":"'


def key_field(path: str, auth: str = "auto") -> str:
    """Return the lower-case name of the header field that carries the key; `auth` as in `target.auth`.

    `auto`: as the dialect's own service wants it, `x-api-key` for `messages` and a bearer token for the others.
    """
    if auth == "auto":
        auth = "x-api-key" if path == PATHS["messages"] else "bearer"
    return "x-api-key" if auth == "x-api-key" else "authorization"


def dialect_fields(path: str, api_key: str | None, auth: str = "auto") -> dict[str, tuple[str, str]]:
    """Return the header fields that a path of `PATHS` wants, the key among them: lower-case name -> (name, value)."""
    fields = {"anthropic-version": ("anthropic-version", ANTHROPIC_VERSION)} if path == PATHS["messages"] else {}
    if api_key and key_field(path, auth) == "x-api-key":
        fields["x-api-key"] = ("x-api-key", api_key)
    elif api_key:
        fields["authorization"] = ("Authorization", f"Bearer {api_key}")
    return fields


def asked_model(body: bytes) -> str:
    """Return the model that a body of `request_body` asks for; empty when it names none in the first place."""
    if not body.startswith(_MODEL_FIRST):
        return ""
    end = body.find(b'"', len(_MODEL_FIRST))
    name = body[len(_MODEL_FIRST) : end]
    if end < 0 or b"\\" in name:  # an escaped character: rare, so parsed whole
        try:
            name = orjson.loads(body)["model"].encode()
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
    prompt: Any,
    max_tokens: int,
    *,
    messages: bool = False,
    endpoint: str = "chat",
    stream: bool = True,
    ignore_eos: bool = True,
    extra_body: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the JSON body of one request; `endpoint`: chat, completions, responses or messages.

    `prompt`: a text, or JSON of one (`orjson.Fragment`, taken as it is); with `messages` a list of messages.
    `extra_body` wins over everything else; a value of None there removes the field.
    """
    body: dict[str, Any] = {"model": model}
    if endpoint == "completions" and not messages:
        body["prompt"] = prompt
    elif endpoint == "responses":
        body["input"] = prompt
    elif endpoint in ("chat", "messages"):
        body["messages"] = prompt if messages else [{"role": "user", "content": prompt}]
    else:
        raise ValueError(
            f"endpoint is {endpoint!r}{' with messages' if messages else ''}; allowed are chat, "
            f"{'' if messages else 'completions, '}responses, messages"
        )
    body["max_output_tokens" if endpoint == "responses" else "max_tokens"] = max_tokens
    body["stream"] = stream
    if stream and endpoint in PINNING:
        body["stream_options"] = {"include_usage": True}
    if ignore_eos and endpoint in PINNING:
        body["ignore_eos"] = True
    for key, value in (extra_body or {}).items():
        if value is None:
            body.pop(key, None)
        else:
            body[key] = value
    return orjson.dumps(body)


def line_body(
    model: str,
    raw: bytes,
    max_tokens: int,
    *,
    messages: bool,
    endpoint: str = "chat",
    ignore_eos: bool = True,
    extra_body: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the body of a request with a prompt of the user: `raw` is its JSON, sent byte for byte.

    Only for the endpoint `messages` is a list that begins with messages of the system written anew, without them.
    """
    prompt: Any = orjson.Fragment(raw)
    extra = dict(extra_body or {})
    if messages and endpoint == "messages":
        system, rest = split_system(orjson.loads(raw))
        if system is not None:
            prompt = rest
            extra = {"system": system, **extra}
    return request_body(
        model, prompt, max_tokens, messages=messages, endpoint=endpoint, ignore_eos=ignore_eos, extra_body=extra
    )


def split_system(messages: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """Return (content of the leading messages of the system, the others); None without any.

    Texts are joined by an empty line; with a list of parts among them, all become one list of parts.
    """
    first = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    contents = [message["content"] for message in messages[:first]]
    if not contents:
        return None, messages
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents), messages[first:]
    parts = [[{"type": "text", "text": c}] if isinstance(c, str) else c for c in contents]
    return [part for some in parts for part in some], messages[first:]
