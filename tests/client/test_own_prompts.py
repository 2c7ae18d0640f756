"""Bodies with a prompt of the user: its JSON byte for byte, per dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.client.request import line_body, split_system

# As an author may write it: blanks, an escape, a number that no float holds, a key twice, not ASCII.
RAW = '[ {"role":"user","content":"\\u00e9 ☃","n":1.00000000000000000001, "k":1,"k":2} ]'.encode()


@pytest.mark.parametrize("endpoint", ["chat", "messages", "responses"])
def test_messages_are_sent_byte_for_byte(endpoint: str) -> None:
    body = line_body("m", RAW, 8, messages=True, endpoint=endpoint, extra_body={"top_p": 1})
    field = b"input" if endpoint == "responses" else b"messages"
    assert body.startswith(b'{"model":"m","' + field + b'":' + RAW + b",")
    rest = json.loads(body)
    del rest[field.decode()]
    expected: dict[str, Any] = {"model": "m", "stream": True, "top_p": 1}
    expected["max_output_tokens" if endpoint == "responses" else "max_tokens"] = 8
    if endpoint == "chat":
        expected |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
    assert rest == expected


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [
        ("chat", b'"messages":[{"role":"user","content":%s}]'),
        ("messages", b'"messages":[{"role":"user","content":%s}]'),
        ("completions", b'"prompt":%s'),
        ("responses", b'"input":%s'),
    ],
)
def test_a_text_is_sent_byte_for_byte(endpoint: str, place: bytes) -> None:
    raw = b'"caf\\u00e9 \\/ \xe2\x98\x83"'
    body = line_body("m", raw, 8, messages=False, endpoint=endpoint, ignore_eos=False)
    assert place % raw in body and json.loads(body)["stream"] is True


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


PART = {"type": "text", "text": "p", "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("messages", "system", "rest"),
    [
        ([said("system", "a"), said("user", "u")], "a", [said("user", "u")]),
        ([said("system", "a"), said("developer", "b"), said("user", "u")], "a\n\nb", [said("user", "u")]),
        ([said("system", [PART]), said("system", "b"), said("user", "u")], [PART, {"type": "text", "text": "b"}],
         [said("user", "u")]),
        ([said("user", "u"), said("assistant", "v"), said("user", "w")], None, None),
    ],
)  # fmt: skip
def test_the_system_goes_apart_for_messages(messages: list, system: Any, rest: list | None) -> None:
    assert split_system(messages) == (system, messages if rest is None else rest)
    body = json.loads(line_body("m", json.dumps(messages).encode(), 8, messages=True, endpoint="messages"))
    assert body.get("system") == system and body["messages"] == (messages if rest is None else rest)
    chat = json.loads(line_body("m", json.dumps(messages).encode(), 8, messages=True))
    assert chat["messages"] == messages and "system" not in chat


def test_messages_on_completions_are_a_fault_of_the_caller() -> None:
    with pytest.raises(ValueError, match="completions.* with messages; allowed are chat, responses, messages"):
        line_body("m", RAW, 8, messages=True, endpoint="completions")
