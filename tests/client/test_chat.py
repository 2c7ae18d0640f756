"""What the events of the four dialects mean, one table row each."""
from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.client.chat import ChatReader
from bench.client.chat_state import CONTENT, NOTHING, REASONING, TOOL
from bench.client.request import request_body


def chunk(delta: dict[str, Any], finish: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    """One chat-completions event."""
    return {"id": "c", "choices": [{"index": index, "delta": delta, "finish_reason": finish}], **more}


def read(*events: Any, keep_text: bool = True) -> tuple[ChatReader, list[int]]:
    """Feed events (dicts are encoded, bytes as they are, tuples are (type, data))."""
    reader = ChatReader(keep_text=keep_text)
    found = []
    for event in events:
        kind, event = event if isinstance(event, tuple) else ("message", event)
        found.append(reader.event(event if isinstance(event, bytes) else json.dumps(event).encode(), kind))
    return reader, found


ONE_EVENT = {
    # name: (event, kinds of output)
    "content": (chunk({"content": "a"}), CONTENT),
    "role only": (chunk({"role": "assistant"}), NOTHING),
    "role and empty content": (chunk({"role": "assistant", "content": ""}), NOTHING),
    "content null": (chunk({"content": None}), NOTHING),
    "role and content": (chunk({"role": "assistant", "content": "a"}), CONTENT),
    "reasoning_content": (chunk({"content": None, "reasoning_content": "a"}), REASONING),
    "reasoning": (chunk({"reasoning": "a"}), REASONING),
    "both reasoning fields": (chunk({"reasoning": "a", "reasoning_content": "a"}), REASONING),
    "reasoning and content": (chunk({"reasoning": "a", "content": "b"}), REASONING | CONTENT),
    "empty reasoning": (chunk({"reasoning_content": "", "content": ""}), NOTHING),
    "tool call name": (chunk({"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": ""}}]}), TOOL),
    "tool call arguments": (chunk({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}), TOOL),
    "empty tool calls": (chunk({"tool_calls": []}), NOTHING),
    "tool call without anything": (chunk({"tool_calls": [{"index": 0, "function": {"arguments": ""}}]}), NOTHING),
    "old function call": (chunk({"function_call": {"name": "f", "arguments": ""}}), TOOL),
    "refusal": (chunk({"refusal": "no"}), CONTENT),
    "content parts": (chunk({"content": [{"type": "text", "text": "a"}]}), CONTENT),
    "thinking parts": (chunk({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}]}), REASONING),
    "no choices left": ({"id": "c", "choices": [], "usage": {"completion_tokens": 3}}, NOTHING),
    "finish only": (chunk({}, "stop"), NOTHING),
    "finish with content": (chunk({"content": "a"}, "stop"), CONTENT),
    "delta null": ({"choices": [{"index": 0, "delta": None, "finish_reason": "stop"}]}, NOTHING),
    "text completion": ({"choices": [{"index": 0, "text": "a", "finish_reason": None}]}, CONTENT),
    "empty text completion": ({"choices": [{"index": 0, "text": "", "finish_reason": None}]}, NOTHING),
    "white space is output": (chunk({"content": " "}), CONTENT),
    "responses text": ({"type": "response.output_text.delta", "delta": "a", "output_index": 0}, CONTENT),
    "responses reasoning": ({"type": "response.reasoning_summary_text.delta", "delta": "a"}, REASONING),
    "responses arguments": ({"type": "response.function_call_arguments.delta", "delta": "{"}, TOOL),
    "responses created": ({"type": "response.created", "response": {"status": "in_progress"}}, NOTHING),
    "messages text": ({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}, CONTENT),
    "messages thinking": ({"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "a"}}, REASONING),
    "messages json": ({"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}}, TOOL),
    "messages signature": ({"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "a"}}, NOTHING),
    "messages tool": ({"type": "content_block_start", "content_block": {"type": "tool_use", "name": "f"}}, TOOL),
    "messages empty block": ({"type": "content_block_start", "content_block": {"type": "text", "text": ""}}, NOTHING),
    "messages ping": ({"type": "ping"}, NOTHING),
    "vendor event": ({"x_vendor": 1}, NOTHING),
}  # fmt: skip


@pytest.mark.parametrize("keep_text", [True, False])
@pytest.mark.parametrize("name", ONE_EVENT)
def test_kinds_of_output(name: str, keep_text: bool) -> None:
    event, expected = ONE_EVENT[name]
    reader, found = read(event, keep_text=keep_text)
    assert found == [expected]
    assert reader.fault is None
    assert reader.outputs == (expected != NOTHING)
    assert reader.content_chunks == bool(expected & CONTENT)
    assert reader.ttft_chunk == (1 if expected else None)


def test_usage_is_cumulative_and_the_last_value_stands() -> None:
    usage = [{"prompt_tokens": 6, "completion_tokens": n, "total_tokens": 6 + n} for n in (1, 2, 3)]
    events = [chunk({"content": "x"}, usage=None), *(chunk({"content": "x"}, usage=u) for u in usage)]
    reader, _ = read(*events, chunk({}, "length", usage=None))
    assert (reader.prompt_tokens, reader.output_tokens, reader.finish) == (6, 3, "length")


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        ({"completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 64}}, 64),
        ({"output_tokens": 1, "input_tokens_details": {"cached_tokens": 32}}, 32),
        ({"output_tokens": 1, "cache_read_input_tokens": 16}, 16),
        ({"completion_tokens": 1, "prompt_cache_hit_tokens": 8}, 8),
        ({"completion_tokens": 1, "prompt_tokens_details": None}, None),
        ({"completion_tokens": 1}, None),
    ],
)
def test_cached_prompt_tokens_in_every_spelling(usage: dict[str, Any], cached: int | None) -> None:
    assert read({"choices": [], "usage": usage})[0].cached_tokens == cached


@pytest.mark.parametrize(
    ("usage", "reasoning"),
    [
        ({"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 6}}, 6),
        ({"output_tokens": 9, "output_tokens_details": {"reasoning_tokens": 5}}, 5),
        ({"output_tokens": 9, "output_tokens_details": {"thinking_tokens": 4}}, 4),
        ({"completion_tokens": 9, "reasoning_tokens": 3}, 3),
        ({"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 0}}, 0),
        ({"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": -2}}, None),
        ({"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": "6"}}, None),
        ({"completion_tokens": 9, "completion_tokens_details": [6]}, None),
        ({"completion_tokens": 9, "completion_tokens_details": None}, None),
        ({"completion_tokens": 9}, None),
    ],
)
def test_reasoning_tokens_in_every_spelling(usage: dict[str, Any], reasoning: int | None) -> None:
    assert read({"choices": [], "usage": usage})[0].reasoning_tokens == reasoning


# Two outputs as content each time: (usage, kind of the first output, is reasoning hidden in it).
HIDDEN = {
    "a part, not streamed": ((12, 10, 6, 22), "content", True),
    "as many events as other tokens": ((12, 10, 8, 22), "content", True),  # 10 - 8 = 2 events
    "more events than other tokens": ((12, 10, 9, 22), "content", False),  # 10 - 9 = 1 < 2 events
    "streamed": ((12, 10, 6, 22), "reasoning_content", False),
    "on top of the output": ((12, 9, 386, 407), "content", False),  # 12 + 9 + 386 = 407
    "more than the output, no total": ((12, 9, 386, None), "content", False),
    "no total": ((12, 10, 6, None), "content", True),
    "none": ((12, 10, 0, 22), "content", False),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_when_reasoning_is_hidden(name: str) -> None:
    (prompt, output, reasoning, total), first, hidden = HIDDEN[name]
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": total,
             "completion_tokens_details": {"reasoning_tokens": reasoning}}  # fmt: skip
    reader, _ = read(chunk({first: "a"}), chunk({"content": "b"}), {"choices": [], "usage": usage})
    assert (reader.hidden_reasoning, reader.reasoning_tokens, reader.output_tokens) == (hidden, reasoning, output)


@pytest.mark.parametrize("wrong", [-1, True, "12", 1.5, None, 1 << 60])
def test_usage_that_is_no_count_is_not_taken(wrong: Any) -> None:
    assert read({"choices": [], "usage": {"completion_tokens": wrong}})[0].output_tokens is None


def test_server_timings_are_kept_and_tell_of_the_cache() -> None:
    reader, _ = read(chunk({}, "stop", timings={"cache_n": 5, "prompt_ms": 12.5, "predicted_n": 3, "note": "x"}))
    assert reader.timings == {"cache_n": 5.0, "prompt_ms": 12.5, "predicted_n": 3.0}
    assert reader.cached_tokens == 5


def test_messages_stream_from_start_to_stop() -> None:
    reader, found = read(
        {"type": "message_start", "message": {"content": [], "usage": {"input_tokens": 9, "output_tokens": 1}}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 7}},
        {"type": "message_stop"},
    )
    assert found == [NOTHING, CONTENT, NOTHING, NOTHING]
    assert (reader.prompt_tokens, reader.output_tokens, reader.finish, reader.done) == (9, 7, "max_tokens", True)


@pytest.mark.parametrize(
    ("kind", "response", "finish", "code"),
    [
        ("response.completed", {"status": "completed", "usage": {"input_tokens": 9, "output_tokens": 7}}, "completed", None),
        ("response.incomplete", {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"},
                                 "usage": {"output_tokens": 7}}, "max_output_tokens", None),
        ("response.failed", {"status": "failed", "error": {"message": "boom"}, "usage": {"output_tokens": 7}}, "failed",
         "SV-STREAM"),
    ],
)  # fmt: skip
def test_responses_stream_ends(kind: str, response: dict[str, Any], finish: str, code: str | None) -> None:
    reader, _ = read({"type": "response.output_text.delta", "delta": "a"}, (kind, {"type": kind, "response": response}))
    assert (reader.output_tokens, reader.finish, reader.done) == (7, finish, True)
    assert (reader.fault.code if reader.fault else None) == code


ERRORS = {
    # name: (event, code, part of the detail)
    "error object": ({"error": {"message": "lost its device", "code": 500}}, "SV-STREAM", "lost its device"),
    "error text": ({"error": "boom"}, "SV-STREAM", "boom"),
    "error beside choices": (chunk({"content": "x"}, error={"message": "boom"}), "SV-STREAM", "boom"),
    "object error": ({"object": "error", "message": "boom", "code": 400}, "SV-STREAM", "boom"),
    "messages error": ({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, "SV-STREAM-BUSY",
                       "Overloaded"),
    "rate limit inside": ({"error": {"message": "Too many requests", "code": 429}}, "SV-STREAM-BUSY", "Too many"),
    "queue full": ({"error": {"message": "request queue is full", "type": "x"}}, "SV-STREAM-BUSY", "queue"),
    "event type error": (("error", {"message": "boom"}), "SV-STREAM", "boom"),
    "event type error, text": (("error", b"plain words"), "SV-STREAM", "plain words"),
    "finish reason error": (chunk({}, "error"), "SV-STREAM", "finish_reason error"),
    "finish reason abort": (chunk({}, "abort"), "SV-STREAM", "abort"),
    "not JSON": (b"{oops", "SC-JSON", "not JSON"),
    "cut JSON": (b'{"choices":[{"index":0,"delta":{"content":"a', "SC-JSON", "not JSON"),
    "NaN": (b'{"choices":[],"usage":NaN}', "SC-JSON", "not JSON"),
    "a number": (b"12", "SC-JSON", "not an object"),
    "a list": (b"[]", "SC-JSON", "not an object"),
    "too deep": (b"[" * 5000, "SC-JSON", "not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_become_a_fault(name: str) -> None:
    event, code, part = ERRORS[name]
    reader, _ = read(event)
    assert reader.fault is not None
    assert reader.fault.code == code
    assert part in reader.fault.detail


def test_error_null_is_no_error() -> None:
    reader, found = read(chunk({"content": "a"}, error=None))
    assert (reader.fault, found) == (None, [CONTENT])


def test_bytes_that_are_no_utf8_are_replaced() -> None:
    reader, found = read(b'{"choices":[{"index":0,"delta":{"content":"a\xff"},"finish_reason":null}]}')
    assert (found, reader.text, reader.fault) == ([CONTENT], ["a\ufffd"], None)


def test_halves_of_a_surrogate_pair_are_output() -> None:
    """orjson refuses them, the JSON of browsers and Python has them; the backslash before the last is itself escaped."""
    reader = ChatReader(keep_text=True)
    for text in (rb"\ud83d", rb"\uDE00 x", rb"\ud83d\ude00", rb"\\ud83d"):
        assert reader.event(b'{"choices":[{"index":0,"delta":{"content":"%s"}}]}' % text) == CONTENT
    assert reader.fault is None and reader.outputs == 4
    assert "".join(reader.text) == "\ufffd\ufffd x\U0001f600\\ud83d"
    whole = ChatReader()
    assert whole.body(rb'{"choices":[{"message":{"content":"a \ud83d"},"finish_reason":"stop"}]}') == CONTENT
    assert whole.fault is None


def test_done_and_what_comes_after_it() -> None:
    reader, found = read(chunk({"content": "a"}), b"[DONE]", chunk({"content": "b"}))
    assert (reader.done, reader.after_done, found, reader.text) == (True, True, [CONTENT, NOTHING, NOTHING], ["a"])
    assert not read(chunk({"content": "a"}), b" [DONE] ")[0].after_done


def test_several_choices_end_when_each_has_a_finish_reason() -> None:
    reader, _ = read(chunk({"content": "a"}, index=0), chunk({"content": "b"}, index=1), chunk({}, "stop", index=1))
    # choice 0 was seen before the second choice; it has no finish reason yet
    reader.event(json.dumps(chunk({"content": "c"}, index=0)).encode())
    assert not reader.terminated
    reader.event(json.dumps(chunk({}, "stop", index=0)).encode())
    assert reader.terminated


def test_memory_of_counts_is_bounded() -> None:
    reader = ChatReader(keep_text=True)
    for i in range(2000):
        calls = [{"index": i, "function": {"name": "f", "arguments": "x" * 1000}}]
        reader.event(json.dumps(chunk({"content": "y" * 1000, "tool_calls": calls}, index=i)).encode())
    assert len(reader.tool_calls) <= 128
    assert sum(map(len, reader.text)) <= 1_000_000


BODIES = {
    "chat": ({"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
              "usage": {"completion_tokens": 2}}, CONTENT, None),
    "text": ({"choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}]}, CONTENT, None),
    "tool": ({"choices": [{"message": {"content": None, "tool_calls": [{"id": "x", "function": {"name": "f",
              "arguments": "{}"}}]}, "finish_reason": "tool_calls"}]}, TOOL, None),
    "responses": ({"object": "response", "status": "completed", "output": [{"type": "message", "content": [
              {"type": "output_text", "text": "hi"}]}], "usage": {"output_tokens": 2}}, CONTENT, None),
    "messages": ({"type": "message", "content": [{"type": "text", "text": "hi"}], "stop_reason": "end_turn",
              "usage": {"output_tokens": 2}}, CONTENT, None),
    "error": ({"error": {"message": "no channel"}}, NOTHING, "SC-ERROR-BODY"),
    "no choices": ({"detail": "hello"}, NOTHING, "SC-CHOICES"),
    "empty object": ({}, NOTHING, "SC-CHOICES"),
    "list": ([1], NOTHING, "SC-CHOICES"),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_answers_that_were_not_streamed(name: str) -> None:
    body, expected, code = BODIES[name]
    reader = ChatReader(keep_text=True)
    assert reader.body(json.dumps(body, indent=1).encode()) == expected
    assert (reader.fault.code if reader.fault else None) == code


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["choices", "delta", "content", "index", "finish_reason", "usage", "error", "type", "message",
                         "tool_calls", "function", "name", "arguments", "text", "response", "object", "timings", "code",
                         "completion_tokens", "prompt_tokens_details", "cached_tokens", "reasoning", "content_block"]),
        inner | st.sampled_from(["response.completed", "message_start", "content_block_delta", "error", "message"]),
        max_size=5),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(events=st.lists(st.one_of(json_values, st.binary(max_size=20)), max_size=6), keep_text=st.booleans())
def test_no_event_raises(events: list[Any], keep_text: bool) -> None:
    reader = ChatReader(keep_text=keep_text)
    for event in events:
        data = event if isinstance(event, bytes) else json.dumps(event).encode()
        assert reader.event(data) in range(8)
        ChatReader().body(data)
    assert reader.outputs <= reader.chunks
    assert reader.fault is None or len(reader.fault.detail) <= 200


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("chat", {"model": "m", "messages": [{"role": "user", "content": "p"}], "max_tokens": 8, "stream": True,
                  "stream_options": {"include_usage": True}, "ignore_eos": True}),
        ("completions", {"model": "m", "prompt": "p", "max_tokens": 8, "stream": True,
                         "stream_options": {"include_usage": True}, "ignore_eos": True}),
        ("responses", {"model": "m", "input": "p", "max_output_tokens": 8, "stream": True}),
        ("messages", {"model": "m", "messages": [{"role": "user", "content": "p"}], "max_tokens": 8, "stream": True}),
    ],
)  # fmt: skip
def test_request_body(endpoint: str, expected: dict[str, Any]) -> None:
    assert json.loads(request_body("m", "p", 8, endpoint=endpoint)) == expected


def test_request_body_extra_fields_win_and_none_removes() -> None:
    body = json.loads(request_body("m", "p", 8, extra_body={"temperature": 0, "ignore_eos": None, "max_tokens": 9}))
    assert body["temperature"] == 0 and body["max_tokens"] == 9 and "ignore_eos" not in body
    assert "stream_options" not in json.loads(request_body("m", "p", 8, stream=False, ignore_eos=False))
    with pytest.raises(ValueError, match="allowed are chat"):
        request_body("m", "p", 8, endpoint="embeddings")
