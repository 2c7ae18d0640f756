"""OpenAI `responses` and Anthropic `messages`: every cut, both ways of reading, faults, keys, over real sockets."""
from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.client.answer import AnswerOptions, AnswerReader
from bench.client.blocking import Channel, _head
from bench.client.dialects import MESSAGES_EVENTS
from bench.client.endpoint import parse_base_url
from bench.client.preflight import PreflightReport, run_preflight
from bench.client.request import PATHS
from bench.client.transport import TransportOptions, _fields
from bench.commands.probe import command
from bench.config import load_config
from tests.client import dialect_streams as made
from tests.client import fake_server as fake

Responses = made.Responses

KEY = "sk-test-0815-abcdefgh"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def _responses(*parts: str, texts: tuple[str, ...] = ("Hi", " there")) -> list[bytes]:
    """A `responses` stream: start, the named parts, the text, the end."""
    stream = Responses()
    events = stream.start()
    if "reasoning" in parts:
        events += stream.reasoning(0, "so", " so")
    if "tool" in parts:
        events += stream.tool(1, "look", '{"a"', ":1}")
    if texts:
        events += stream.text(2, *texts)
    return [*events, stream.end(7)]


# name -> (events, kinds of output in the order they come, what must be found)
GOOD: dict[str, tuple[list[bytes], dict[str, Any]]] = {
    # start, ping, block start, two deltas, block stop, message_delta, message_stop: the first delta is event 4
    "messages": (
        [made.messages_start(), made.PING, *made.messages_text(0, "Hi", " there"), *made.messages_end(7)],
        {"ttft_chunk": 4, "ttfo_chunk": 4, "chunks": 2, "content_chunks": 2, "finish_reason": "end_turn",
         "text": "Hi there", "reasoning_text": "", "tool_calls": []},
    ),
    # start, block start, 2 thoughts, signature, stop, block start, 2 texts: thought 3, text 8
    "messages thinking": (
        [made.messages_start(), *made.messages_thinking(0, "so", " so"), *made.messages_text(1, "Hi", " there"),
         *made.messages_end(7)],
        {"ttft_chunk": 3, "ttfo_chunk": 8, "chunks": 4, "content_chunks": 2, "finish_reason": "end_turn",
         "text": "Hi there", "reasoning_text": "so so", "tool_calls": []},
    ),
    # start, block start with the name (output), an empty part, two parts
    "messages tool": (
        [made.messages_start(), *made.messages_tool(0, "look", '{"a"', ":1}"), *made.messages_end(7, "tool_use")],
        {"ttft_chunk": 2, "ttfo_chunk": None, "chunks": 3, "content_chunks": 0, "finish_reason": "tool_use", "text": "",
         "reasoning_text": "", "tool_calls": [{"name": "look", "arguments": '{"a":1}'}]},
    ),
    "messages and [DONE]": (
        [made.messages_start(), *made.messages_text(0, "Hi", " there"), *made.messages_end(7), DONE],
        {"ttft_chunk": 3, "ttfo_chunk": 3, "chunks": 2, "content_chunks": 2, "finish_reason": "end_turn",
         "text": "Hi there", "reasoning_text": "", "tool_calls": []},
    ),
    # created, in_progress, item added, part added: the first delta is event 5
    "responses": (
        _responses(),
        {"ttft_chunk": 5, "ttfo_chunk": 5, "chunks": 2, "content_chunks": 2, "finish_reason": "completed",
         "text": "Hi there", "reasoning_text": "", "tool_calls": []},
    ),
    # 2 of start, item added, 2 thoughts (4, 5), done, item done (7), item added, part added, texts 10 and 11
    "responses reasoning": (
        _responses("reasoning"),
        {"ttft_chunk": 4, "ttfo_chunk": 10, "chunks": 4, "content_chunks": 2, "finish_reason": "completed",
         "text": "Hi there", "reasoning_text": "so so", "tool_calls": []},
    ),
    # 2 of start, item added with the name (output), two parts
    "responses tool": (
        _responses("tool", texts=()),
        {"ttft_chunk": 3, "ttfo_chunk": None, "chunks": 3, "content_chunks": 0, "finish_reason": "completed", "text": "",
         "reasoning_text": "", "tool_calls": [{"name": "look", "arguments": '{"a":1}'}]},
    ),
    "responses and [DONE]": (
        [*_responses(), DONE],
        {"ttft_chunk": 5, "ttfo_chunk": 5, "chunks": 2, "content_chunks": 2, "finish_reason": "completed",
         "text": "Hi there", "reasoning_text": "", "tool_calls": []},
    ),
}  # fmt: skip


def framed(*events: bytes, end: bytes = LAST) -> bytes:
    """An answer with one event in each chunk."""
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in events) + end


def cuts_of(n: int) -> list[list[int]]:
    generator = random.Random(3)
    return [[], list(range(1, n)), *(sorted(generator.sample(range(1, n), k)) for k in (1, 3, 10, 40))]


def read(raw: bytes, cuts: list[int], *, lazy: bool = False, pinned: int | None = None, gap_s: float = 0.01) -> Any:
    reader = AnswerReader(AnswerOptions(keep_text=not lazy), pinned_tokens=pinned)
    at, start = 100.0, 0
    for end in [*cuts, len(raw)]:
        at += gap_s
        (reader.feed_lazy if lazy and reader.first_output else reader.feed)(raw[start:end], at)
        start = end
    reader.eof(at)
    return reader.outcome()


@pytest.mark.parametrize("lazy", [False, True], ids=["prompt", "lazy"])
@pytest.mark.parametrize("name", GOOD)
def test_a_stream_means_the_same_however_it_is_cut(name: str, lazy: bool) -> None:
    events, expected = GOOD[name]
    for cuts in cuts_of(len(framed(*events))):
        outcome = read(framed(*events), cuts, lazy=lazy)
        texts = ("text", "reasoning_text", "tool_calls") if lazy else ()
        assert {key: getattr(outcome, key) for key in expected if key not in texts} == {
            key: value for key, value in expected.items() if key not in texts
        }, cuts
        assert (outcome.status, outcome.output_tokens, outcome.output_tokens_source) == ("ok", 7, "usage")
        assert outcome.prompt_tokens == 25
        assert not outcome.flags & {"no_done", "text_after_done", "tokens_estimated"}


@pytest.mark.parametrize("events", [made.messages_answer(40), made.responses_answer(40)], ids=["messages", "responses"])
@pytest.mark.parametrize("heap", [1, 3, 11, 50])
def test_lazy_counts_and_times_are_those_of_the_reads(events: list[bytes], heap: int) -> None:
    """Heaps of whole events: first output, last output and counts by hand."""
    chunks = [b"%x\r\n%s\r\n" % (len(e), e) for e in events]
    first = next(i for i, e in enumerate(events) if b" w0" in e)
    last = max(i for i, e in enumerate(events) if b'_delta","text":" w39' in e or b'"delta":" w39"' in e)
    reader = AnswerReader(pinned_tokens=60)
    reader.feed(HEAD + b"".join(chunks[: first + 1]), 10.0)
    assert reader.first_output
    at, seen_last = 10.0, 0.0
    for start in range(first + 1, len(chunks), heap):
        at += 1.0
        reader.feed_lazy(b"".join(chunks[start : start + heap]), at)
        if start <= last < start + heap:
            seen_last = at
    reader.feed_lazy(LAST, at + 1)
    outcome = reader.outcome()
    assert (outcome.status, outcome.chunks, outcome.output_tokens, outcome.content_chunks) == ("ok", 40, 60, 40)
    assert (outcome.first_token_at, outcome.last_token_at) == (10.0, seen_last)
    assert outcome.finish_reason in ("max_tokens", "max_output_tokens") and "short" not in outcome.flags


ERRORS: dict[str, tuple[list[bytes], str, str, str]] = {
    "messages overloaded": (
        [made.messages_start(), made.event({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}})],
        "error", "SV-STREAM-BUSY", "Overloaded"),
    "messages overloaded after tokens": (
        [made.messages_start(), *made.messages_text(0, "Hi", " t"),
         made.event({"type": "error", "error": {"type": "api_error", "message": "internal fault 7"}}), *made.messages_end(7)],
        "error", "SV-STREAM", "internal fault 7"),
    "messages cut": ([made.messages_start(), *made.messages_text(0, "Hi", " t")], "truncated", "SC-TRUNCATED", "2 events"),
    "messages empty": ([made.messages_start(), *made.messages_end(1)], "error", "SC-EMPTY", "no output"),
    "responses error": (
        [*Responses().start(), made.event({"type": "error", "code": "rate_limit_exceeded", "message": "Rate limit reached",
                                           "param": None, "sequence_number": 2})],
        "error", "SV-STREAM-BUSY", "Rate limit reached"),
    "responses failed": (
        [*Responses().start(), Responses().end(0, "failed", error={"code": "server_error", "message": "the model broke"})],
        "error", "SV-STREAM", "the model broke"),
    "responses failed in silence": ([*Responses().start(), Responses().end(0, "failed")], "error", "SV-STREAM", "failed"),
    "responses cancelled": (_responses()[:-1] + [Responses().end(2, "cancelled")], "error", "SV-STREAM", "cancelled"),
    # everything but the end: response.output_text.done is no end
    "responses cut": (_responses()[:-1], "truncated", "SC-TRUNCATED", "2 events"),
    "responses empty": ([*Responses().start(), Responses().end(1)], "error", "SC-EMPTY", "no output"),
}  # fmt: skip


@pytest.mark.parametrize("lazy", [False, True], ids=["prompt", "lazy"])
@pytest.mark.parametrize("name", ERRORS)
def test_faults_in_the_stream(name: str, lazy: bool) -> None:
    events, status, code, words = ERRORS[name]
    for cuts in cuts_of(len(framed(*events))):
        outcome = read(framed(*events), cuts, lazy=lazy)
        assert (outcome.status, outcome.code) == (status, code), (cuts, outcome.detail)
        assert words in outcome.detail


def test_tokens_of_a_cut_messages_stream_are_counted_not_taken_from_its_start() -> None:
    outcome = read(framed(made.messages_start(), *made.messages_text(0, "a", "b", "c")), [])
    assert (outcome.status, outcome.output_tokens, outcome.output_tokens_source) == ("truncated", 3, "chunks")


def test_a_messages_stream_without_its_last_event_has_ended_all_the_same() -> None:
    events = [made.messages_start(), *made.messages_text(0, "a", "b"), *made.messages_end(2)][:-1]
    outcome = read(framed(*events), [])
    assert outcome.status == "ok" and "no_done" in outcome.flags


def test_prompt_tokens_of_messages_hold_what_the_cache_took() -> None:
    start = made.messages_start(cache_read_input_tokens=900, cache_creation_input_tokens=70)
    outcome = read(framed(start, *made.messages_text(0, "a", "b"), *made.messages_end(2)), [])
    assert outcome.prompt_tokens == 25 + 900 + 70 and "cached" in outcome.flags
    # chat completions have the cached ones inside
    chat = b'data: {"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":2,"cache_read_input_tokens":90}}\n\n'
    token = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'
    assert read(framed(token, chat, DONE), []).prompt_tokens == 100


@pytest.mark.parametrize("kind", ["messages", "responses"])
def test_an_answer_that_was_not_streamed(kind: str) -> None:
    body = json.dumps(made.body_of(kind, "Hi there", 9)).encode()
    outcome = read(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body), [])
    assert (outcome.status, outcome.text, outcome.output_tokens, outcome.prompt_tokens) == ("ok", "Hi there", 9, 25)


def test_tools_thoughts_and_refusals_that_were_not_streamed() -> None:
    message = made.body_of("messages", "", 9)
    message["content"] = [{"type": "thinking", "thinking": "hm", "signature": "x"},
                          {"type": "tool_use", "id": "t", "name": "look", "input": {"a": 1}}]  # fmt: skip
    response = made.body_of("responses", "", 9)
    response["output"] = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "name": "look", "arguments": '{"a":1}', "call_id": "c"},
        {"type": "message", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    for body, text in ((message, ""), (response, "no")):
        raw = json.dumps(body).encode()
        outcome = read(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(raw), raw), [])
        assert (outcome.status, outcome.reasoning_text, outcome.text) == ("ok", "hm", text)
        assert outcome.tool_calls == [{"name": "look", "arguments": '{"a":1}'}]


# What the references of both services answer to a request that they refuse.
REFUSALS = [
    (401, {"type": "error", "error": {"type": "authentication_error", "message": "invalid x-api-key"}}, "CH-401"),
    (403, {"type": "error", "error": {"type": "permission_error", "message": "not permitted here"}}, "CH-403"),
    (404, {"type": "error", "error": {"type": "not_found_error", "message": "model: demo-7b"}}, "CH-MODEL"),
    (404, {"type": "error", "error": {"type": "not_found_error", "message": "Not Found"}}, "CH-404"),
    (400, {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 208310 tokens > 200000 maximum"}}, "SC-CONTEXT"),
    (400, {"type": "error", "error": {"type": "invalid_request_error", "message": "min_tokens: Extra inputs are not permitted"}}, "SC-PARAM"),
    (429, {"type": "error", "error": {"type": "rate_limit_error", "message": "slow down"}}, "SV-429"),
    (529, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, "SV-529"),
    (400, {"error": {"message": "Unknown parameter: 'min_tokens'.", "type": "invalid_request_error", "param": "min_tokens", "code": "unknown_parameter"}}, "SC-PARAM"),
    (400, {"error": {"message": "The requested model 'x' does not exist.", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}}, "CH-MODEL"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "body", "code"), REFUSALS)
def test_refusals(status: int, body: dict[str, Any], code: str) -> None:
    raw = json.dumps(body).encode()
    head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nRetry-After: 7\r\nContent-Length: %d\r\n\r\n"
    outcome = read(head % (status, len(raw)) + raw, [])
    assert (outcome.code, outcome.retry_after_s) == (code, 7.0)


# --- odd streams of any dialect ---

_TEXT = st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from(['\\"', '"text":"', '"delta":"x"', "\\n", "\u2028"])
_JSON = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | _TEXT, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.sampled_from(["type", "delta", "text", "thinking", "usage", "output_tokens", "message", "content", "response", "item", "error",
                     "status", "stop_reason", "content_block", "index", "output", "partial_json", "summary", "name", "choices"]),
    inner, max_size=4), max_leaves=8)  # fmt: skip


@st.composite
def odd_event(draw: st.DrawFn) -> bytes:
    """A token event, one that ends the answer, or one with fields of the wrong kind."""
    text = draw(_TEXT)
    kind = draw(st.integers(0, 9))
    if kind < 3:
        return made.event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})
    if kind < 6:
        return made.event({"type": "response.output_text.delta", "delta": text, "sequence_number": draw(st.integers(0, 99))})
    if kind == 6:
        return draw(st.sampled_from([made.PING, DONE, b": hold on\n\n", made.messages_start(), *made.messages_end(5),
                                     Responses().end(5), made.event({"type": "error", "error": {"message": "no"}})]))
    names = [*MESSAGES_EVENTS, "response.completed", "response.output_item.added", "response.output_text.delta", "response", "x"]
    obj = {"type": draw(st.sampled_from(names)), **draw(st.dictionaries(
        st.sampled_from(["delta", "usage", "message", "content", "response", "item", "content_block", "output", "index"]), _JSON, max_size=4))}  # fmt: skip
    return made.event(obj)


@settings(max_examples=300, deadline=None, print_blob=True)
@given(st.lists(odd_event(), max_size=25), st.data())
def test_both_ways_of_reading_agree_on_odd_streams(events: list[bytes], data: st.DataObject) -> None:
    plain = b"".join(events)
    ends = data.draw(st.lists(st.integers(0, len(plain)), max_size=8).map(sorted)) if data.draw(st.booleans()) else None
    if ends is None:
        raw = framed(*events)
    else:  # chunks that end anywhere, inside an event or between its lines
        raw = framed(*(plain[x:y] for x, y in zip([0, *ends], [*ends, len(plain)], strict=True) if y > x))
    cuts = data.draw(st.lists(st.integers(1, len(raw) - 1), max_size=12).map(sorted))
    found = []
    for lazy in (False, True):
        outcome = read(raw, cuts, lazy=lazy)
        # Chunks of one read share a time, so first output and its read agree too; gaps are of prompt reading only.
        found.append([getattr(outcome, key) for key in (
            "status", "code", "output_tokens", "output_tokens_source", "prompt_tokens", "chunks", "content_chunks", "finish_reason",
            "ttft_chunk", "ttfo_chunk", "first_token_at", "last_token_at", "done_at", "first_content_at")])  # fmt: skip
    assert found[0] == found[1]


# --- over sockets ---


@pytest.fixture(autouse=True)
def _no_dotenv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in ("BENCH_API_KEY", "BENCH_BASE_URL", "BENCH_MODEL", "TAOTOKEN_API_KEY", "TAOTOKEN_BASE_URL",
                 "TAOTOKEN_MODEL_ID"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    yield


def pieces_of(raw: bytes, split: str) -> list[bytes]:
    if split == "whole":
        return [raw]
    if split == "byte":
        return [raw[i : i + 1] for i in range(len(raw))]
    cuts = [0, *sorted(random.Random(11).sample(range(1, len(raw)), 12)), len(raw)]
    return [raw[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]


def probe(base_url: str, *arguments: str) -> tuple[int, dict[str, Any], str]:
    result = CliRunner().invoke(
        command, ["--base-url", base_url, "--model", "demo-7b", "--json", *arguments], env={"BENCH_API_KEY": KEY}
    )
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, json.loads(result.stdout), result.output


@pytest.mark.parametrize("mode", ["prompt", "lazy"])
@pytest.mark.parametrize("split", ["whole", "byte", "random"])
@pytest.mark.parametrize("endpoint", ["messages", "responses"])
def test_probe_over_a_socket(endpoint: str, split: str, mode: str) -> None:
    events = {"messages": made.messages_answer, "responses": made.responses_answer}[endpoint](20)

    def script(peer: Any) -> None:
        for piece in pieces_of(framed(*events), split):
            peer.send(piece)

    with fake.FakeServer(script) as server:
        code, document, output = probe(server.url, "--endpoint", endpoint, "--read", mode, "--max-tokens", "30")
        (head, body), fields = server.requests[0], {}
    for line in head.decode().split("\r\n")[1:]:
        name, _, value = line.partition(": ")
        fields[name.lower()] = value
    row = document["row"]
    assert (code, row["status"], row["chunks"], row["output_tokens"]) == (0, "ok", 20, 30)
    assert (row["output_tokens_source"], row["prompt_tokens"]) == ("usage", 25)
    assert head.split()[1] == f"/v1/{endpoint}".encode()
    asked = json.loads(body)
    assert asked["model"] == "demo-7b" and asked["stream"] is True
    assert not {"stream_options", "ignore_eos"} & set(asked)
    if endpoint == "messages":
        assert (fields["x-api-key"], fields["anthropic-version"]) == (KEY, "2023-06-01")
        assert "authorization" not in fields and asked["max_tokens"] == 30
    else:
        assert fields["authorization"] == f"Bearer {KEY}" and "x-api-key" not in fields
        assert asked["max_output_tokens"] == 30 and "max_tokens" not in asked
    assert KEY not in output and "abcdefgh" not in output


def test_the_key_of_messages_does_not_come_back_out() -> None:
    leak = json.dumps({"type": "error", "error": {"type": "authentication_error", "message": f"invalid x-api-key: {KEY}"}})

    def script(peer: Any) -> None:
        peer.send(b"HTTP/1.1 401 X\r\nContent-Length: %d\r\n\r\n%s" % (len(leak), leak.encode()))

    with fake.FakeServer(script) as server:
        code, document, output = probe(server.url, "--endpoint", "messages")
    assert (code, document["row"]["code"]) == (3, "CH-401")
    assert KEY not in output and "abcdefgh" not in output


def test_a_key_that_no_header_can_carry_and_another_version() -> None:
    endpoint = parse_base_url("http://127.0.0.1:1")
    options = TransportOptions(path="/messages", extra_headers=(("Anthropic-Version", "2024-01-01"),))
    fields = _fields(endpoint, options, KEY).decode()
    assert "Anthropic-Version: 2024-01-01\r\n" in fields and "2023" not in fields and f"x-api-key: {KEY}\r\n" in fields
    assert "x-api-key" not in _fields(endpoint, options, None).decode()


def script_of(endpoint: str, *, refuse: bool = False) -> Any:
    """A service of one dialect: models, one answer at once, streams with a pause between two events."""

    def script(peer: Any) -> None:
        target = peer.head.split()[1]
        fields = peer.head.lower()
        keyed = f"x-api-key: {KEY}" if endpoint == "messages" else f"authorization: bearer {KEY}"
        if refuse or keyed.encode() not in fields:
            raw, status = b'{"type":"error","error":{"type":"authentication_error","message":"no"}}', b"401 X"
        elif target == b"/v1/models":
            raw, status = b'{"data":[{"type":"model","id":"demo-7b"}],"has_more":false}', b"200 OK"
        elif target != f"/v1/{endpoint}".encode():
            raw, status = b'{"error":{"message":"Not Found"}}', b"404 X"
        elif not json.loads(peer.body)["stream"]:
            tokens = json.loads(peer.body).get("max_tokens") or json.loads(peer.body)["max_output_tokens"]
            raw, status = json.dumps(made.body_of(endpoint, "Hi", tokens)).encode(), b"200 OK"
        else:
            events = {"messages": made.messages_answer, "responses": made.responses_answer}[endpoint](12)
            peer.send(HEAD)
            for one in events:
                peer.send(b"%x\r\n%s\r\n" % (len(one), one))
                time.sleep(0.002)
            peer.send(LAST)
            return
        peer.send(b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (status, len(raw), raw))

    return script


def check(url: str, endpoint: str, key: str | None = KEY, *, auth: str = "auto") -> PreflightReport:
    overrides = {
        "base_url": url, "model": "demo-7b", "target.endpoint": endpoint, "target.auth": auth, "target.pin_length": False,
    }  # fmt: skip
    return run_preflight(load_config(None, env={}, overrides=overrides), key, env={}, idle_requests=2)


@pytest.mark.parametrize("endpoint", ["messages", "responses"])
def test_the_preflight_is_ready(endpoint: str) -> None:
    with fake.FakeServer(script_of(endpoint)) as server:
        report = check(server.url, endpoint)
        bodies = [json.loads(body) for _, body in server.requests if body]
    assert report.ok, report.sentence
    found = {c.name: (c.status, c.found) for c in report.checks}
    assert found["base URL"][1].endswith(f"/v1/{endpoint}") and found["models"][0] == "ok"
    assert found["stream"] == ("ok", "12 events with output, 18 tokens (usage)")
    assert [body["stream"] for body in bodies] == [False, True, True, True]
    # OpenAI takes no fewer than 16 in `responses`
    assert {body.get("max_tokens", body.get("max_output_tokens")) for body in bodies} == {8 if endpoint == "messages" else 16}
    assert len(report.ttft_idle_s) == 2 and report.tpot_idle_median_s is not None
    assert KEY not in json.dumps(report.to_dict())


SENT = {("messages", "auto"): "x-api-key", ("messages", "bearer"): "authorization", ("messages", "x-api-key"): "x-api-key",
        ("responses", "auto"): "authorization", ("responses", "bearer"): "authorization", ("responses", "x-api-key"): "x-api-key",
        ("chat", "auto"): "authorization", ("chat", "x-api-key"): "x-api-key"}  # fmt: skip


@pytest.mark.parametrize(("endpoint", "auth"), SENT)
def test_the_key_goes_where_the_config_says(endpoint: str, auth: str) -> None:
    """By the table above, in the run's transport and in the preflight's blocking one alike."""
    where, path = parse_base_url("http://127.0.0.1:1"), PATHS[endpoint]
    texts = [
        _fields(where, TransportOptions(path=path, auth=auth), KEY).decode(),
        _head(Channel(where, KEY, path=path, auth=auth), "POST", path, 2, False).decode(),
    ]
    value = {"authorization": f"Authorization: Bearer {KEY}", "x-api-key": f"x-api-key: {KEY}"}
    for text in texts:
        assert [name for name, line in value.items() if f"{line}\r\n" in text] == [SENT[endpoint, auth]]
        assert text.count(KEY) == 1 and ("anthropic-version" in text) is (endpoint == "messages")


def test_a_service_with_bearer_tokens_on_messages() -> None:
    """As vLLM with --api-key: 401 for x-api-key; `check` says what to set, and with that check and probe are served."""

    def script(peer: Any) -> None:
        peer.head = peer.head.replace(b"x-api-key: ", b"x-other: ").replace(b"Authorization: Bearer ", b"x-api-key: ")
        script_of("messages")(peer)

    with fake.FakeServer(script) as server:
        refused = check(server.url, "messages")
        assert refused.failed is not None and refused.failed.code == "CH-401"
        assert "set target.auth to bearer" in refused.failed.fix
        assert check(server.url, "messages", auth="bearer").ok
        assert probe(server.url, "--endpoint", "messages", "--auth", "bearer")[0] == 0
        code, document, output = probe(server.url, "--endpoint", "messages")
    assert (code, document["row"]["code"]) == (3, "CH-401") and KEY not in output + json.dumps(refused.to_dict())


def test_the_preflight_says_how_the_key_was_sent() -> None:
    with fake.FakeServer(script_of("messages", refuse=True)) as server:
        report = check(server.url, "messages")
        other = check(server.url, "messages", auth="bearer")
    assert other.failed is not None and "as a bearer token: set target.auth to auto" in other.failed.fix
    assert not report.ok and report.failed is not None and report.failed.code == "CH-401"
    assert "x-api-key" in report.failed.fix and KEY not in json.dumps(report.to_dict())
