"""The reader of one answer: stamps, gap statistics, lazy reading against the full parse, ends, bounds."""
from __future__ import annotations

import gzip
import json
import math
import random
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.client.answer import AnswerOptions, AnswerReader
from bench.client.outcome import CODES, FAIL_KINDS, Outcome
from bench.client.request import asked_model, request_body
from tests.client import dialect_streams

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> bytes:
    """One chat-completions event, compact."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return b"data: " + json.dumps({"id": "c", "choices": choices, **more}, separators=(",", ":")).encode() + b"\n\n"


def framed(*parts: bytes) -> bytes:
    """Each part as one HTTP chunk."""
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


ROLE = event({"role": "assistant", "content": ""})
FINISH = event({}, "length")
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def usage(n: int) -> bytes:
    return event(None, usage={"prompt_tokens": 5, "completion_tokens": n, "total_tokens": n + 5})


def token(text: str = "x") -> bytes:
    return event({"content": text})


def read(*pieces: bytes | tuple[float, bytes], options: AnswerOptions | None = None, **more: Any) -> Outcome:
    """Feed pieces, one read each, 10 ms apart unless a time is given; then the peer closes."""
    reader = AnswerReader(options, **more)
    at = 0.0
    for piece in pieces:
        at, data = piece if isinstance(piece, tuple) else (at + 0.01, piece)
        reader.feed(data, at)
    reader.eof(at)
    return reader.outcome()


def test_stamps_of_a_usual_answer() -> None:
    outcome = read((1.0, HEAD), (1.5, framed(ROLE)), (2.0, framed(token())), (2.25, framed(token())), (3.0, framed(token())),
                   (3.1, framed(FINISH, usage(3), DONE) + END))  # fmt: skip
    assert outcome.status == "ok"
    assert (outcome.headers_at, outcome.first_token_at, outcome.first_content_at) == (1.0, 2.0, 2.0)
    assert (outcome.last_token_at, outcome.done_at) == (3.0, 3.1)
    assert (outcome.chunks, outcome.reads, outcome.output_tokens, outcome.prompt_tokens) == (3, 3, 3, 5)
    # gaps 0.25 and 0.75
    assert outcome.itl_mean_s == pytest.approx(0.5)
    assert outcome.itl_max_s == 0.75
    assert outcome.itl_p99_s == pytest.approx(0.75, rel=0.011)
    assert outcome.itl_under_1ms_ratio == 0.0
    assert outcome.flags == set()


def test_a_role_comment_or_usage_event_never_stops_ttft() -> None:
    outcome = read((1.0, HEAD + framed(ROLE, b": ping\n\n", b"data:\n\n", usage(0))), (2.0, framed(token(), FINISH) + END))
    assert outcome.first_token_at == 2.0
    assert outcome.ttft_chunk == 3  # role, usage, token: comments and empty data are not counted


def test_an_event_cut_by_a_pause_counts_when_it_is_complete() -> None:
    raw = HEAD + framed(token())
    outcome = read((1.0, raw[:-20]), (2.0, raw[-20:]), (3.0, framed(FINISH, DONE) + END))
    assert (outcome.headers_at, outcome.first_token_at) == (1.0, 2.0)


def test_ttfo_of_a_thinking_model() -> None:
    think = framed(event({"reasoning_content": "a", "content": None}))
    outcome = read((1.0, HEAD), (2.0, think), (3.0, think), (4.0, framed(token())), (5.0, framed(FINISH, DONE) + END))
    assert (outcome.first_token_at, outcome.first_content_at, outcome.ttft_chunk, outcome.ttfo_chunk) == (2.0, 4.0, 1, 3)


@pytest.mark.parametrize("law", ["exponential", "constant", "mixed"])
def test_gap_statistics_against_all_gaps(law: str) -> None:
    generator = random.Random(7)
    gaps = [{"exponential": generator.expovariate(100.0), "constant": 0.02,
             "mixed": generator.choice([0.0, 0.0004, 0.03])}[law] for _ in range(1500)]  # fmt: skip
    at = 1.0
    pieces: list[Any] = [(at, HEAD + framed(token()))]
    stamps = [at]
    for gap in gaps:
        at += gap
        stamps.append(at)
        pieces.append((at, framed(token())))
    outcome = read(*pieces, (at + 1, framed(FINISH, DONE) + END))
    true = sorted(b - a for a, b in zip(stamps, stamps[1:], strict=False))
    assert outcome.itl_mean_s == pytest.approx(sum(true) / len(true), rel=1e-9)
    assert outcome.itl_max_s == true[-1]
    # nearest rank: ceil(0.99 * 1500) = 1485, within half a 2 % bin
    assert outcome.itl_p99_s == pytest.approx(true[math.ceil(0.99 * len(true)) - 1], rel=0.0101)
    assert outcome.itl_under_1ms_ratio == pytest.approx(sum(gap < 0.001 for gap in true) / len(true))


def test_gap_memory_is_constant() -> None:
    reader = AnswerReader()
    reader.feed(HEAD + framed(token()), 0.0)
    generator = random.Random(1)
    at = 0.0
    piece = framed(token())
    tracemalloc.start()
    for _ in range(20_000):
        at += 10.0 ** generator.uniform(-7, 2)
        reader.feed(piece, at)
    grown_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert grown_bytes < 200_000  # at most about 1,000 bins of 2 %, not 20,000 gaps


# --- what must be ok, and with which flags ---

OK_CASES = {
    # name: (body parts, finish, tokens, source, flags)
    "usual": ([ROLE, token(), token(), FINISH, usage(2), DONE], "length", 2, "usage", set()),
    "no usage": ([ROLE, token(), token(), FINISH, DONE], "length", 2, "chunks", {"tokens_estimated"}),
    "no done": ([token(), token(), FINISH, usage(2)], "length", 2, "usage", {"no_done"}),
    "no finish, done": ([token(), token(), usage(2), DONE], None, 2, "usage", set()),
    "usage of nothing": ([token(), token(), FINISH, usage(0), DONE], "length", 2, "chunks", {"tokens_estimated"}),
    "several tokens": ([token("a b"), token("c d"), FINISH, usage(5), DONE], "length", 5, "usage", set()),
    "text after": ([token(), token(), FINISH, usage(2), DONE, token()], "length", 2, "usage", {"text_after_done"}),
    "cached": ([token(), token(), FINISH, event(None, usage={"completion_tokens": 2,
               "prompt_tokens_details": {"cached_tokens": 4}}), DONE], "length", 2, "usage", {"cached"}),
    "finish with the last token": ([token(), event({"content": "y"}, "stop"), usage(2), DONE], "stop", 2, "usage", set()),
}  # fmt: skip


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("name", OK_CASES)
def test_successes_and_their_flags(name: str, framing: str) -> None:
    parts, finish, tokens, source, flags = OK_CASES[name]
    if framing == "chunked":
        pieces = [HEAD, *(framed(part) for part in parts), END]
    else:
        length = b"Content-Length: %d\r\n" % sum(map(len, parts)) if framing == "length" else b""
        pieces = [b"HTTP/1.1 200 OK\r\n" + length + b"\r\n", *parts]
    outcome = read(*pieces)
    assert (outcome.status, outcome.code, outcome.detail) == ("ok", None, "")
    assert (outcome.finish_reason, outcome.output_tokens, outcome.output_tokens_source) == (finish, tokens, source)
    assert outcome.flags == flags


@pytest.mark.parametrize(
    ("parts", "short"),
    [
        ([token()] * 3 + [event({}, "stop"), usage(3), DONE], True),  # 3 of 8
        ([token()] * 3 + [event({}, "length"), usage(8), DONE], False),  # 8 of 8, several in an event
        ([token()] * 3 + [event({}, "stop"), DONE], True),  # counted, ended by stop
        ([token()] * 3 + [event({}, "length"), DONE], False),  # counted events may hold several tokens
    ],
)
def test_an_answer_shorter_than_the_pinned_length_is_flagged(parts: list[bytes], short: bool) -> None:
    assert ("short" in read(HEAD, *map(framed, parts), END, pinned_tokens=8).flags) is short


@pytest.mark.parametrize(
    ("parts", "pinned", "burst"),
    [
        ([token("a " * 300), event({}, "length"), DONE], 300, True),  # a gateway that does not stream, without usage
        ([token("a " * 300), event({}, "length"), usage(300), DONE], 300, True),
        ([token("a " * 300), event({}, "length"), usage(300), DONE], None, True),
        ([token(), token(), event({}, "length"), DONE], 300, False),  # two events: the stage tells
        ([token(), event({}, "stop"), DONE], 300, False),  # short, and said so
        ([token(), event({}, "length"), usage(7), DONE], 7, False),
        ([token(), event({}, "length"), DONE], 1, False),
    ],
)
def test_a_long_answer_in_one_event_was_not_streamed(parts: list[bytes], pinned: int | None, burst: bool) -> None:
    outcome = read(HEAD, *map(framed, parts), END, pinned_tokens=pinned)
    assert outcome.status == "ok" and ("burst" in outcome.flags) is burst


BURST_CASES = {
    # name: (times of headers and of each token, burst)
    "all in one read": (0.4, [0.4] * 6, True),
    "even": (0.1, [0.2, 0.21, 0.22, 0.23, 0.24, 0.25], False),
    "two groups": (0.1, [0.2, 0.2, 0.2, 0.3, 0.3, 0.3], False),  # 4 of 5 gaps under 1 ms: 0.8
    "one late": (0.1, [0.2, 0.2, 0.2, 0.2, 0.2, 0.3], False),  # 4 of 5
    "microseconds apart": (0.1, [0.2 + i * 1e-4 for i in range(6)], True),
    "a quick engine": (0.1, [0.2 + i * 9e-4 for i in range(6)], False),  # seen: llama.cpp, 1,100 tokens/s
    "a very quick engine": (0.1, [0.2 + i * 3.5e-4 for i in range(40)], False),
    "over 8 Mbit/s after a pause": (0.1, [0.2 + i * 2e-4 for i in range(40)], True),
    # 10 in a piece, 9 of 10 gaps short, all of the time in the pauses of 50 ms: mean gap 5 ms
    "let go by tens": (0.1, [0.2 + (i // 10) * 0.05 + (i % 10) * 2e-5 for i in range(60)], True),
    # the same in pauses of 9 ms: no harm
    "let go by tens, quickly": (0.1, [0.2 + (i // 10) * 0.009 + (i % 10) * 2e-5 for i in range(60)], False),
    # a quick engine that stood still once: 40 gaps of 0.9 ms are 36 ms, one of 30 ms is less than half
    "a quick engine with a pause": (0.1, [0.2 + i * 9e-4 + (0.03 if i > 20 else 0.0) for i in range(42)], False),
    "held back, then in small pieces": (0.395, [0.4 + i * 0.002 for i in range(6)], True),
    "fast engine, early headers": (0.01, [0.4 + i * 0.002 for i in range(6)], False),
}


@pytest.mark.parametrize("name", BURST_CASES)
def test_burst_rule(name: str) -> None:
    headers_at, times, burst = BURST_CASES[name]
    reader = AnswerReader()
    reader.send_at = 0.0
    reader.feed(HEAD, headers_at)
    heaps: dict[float, bytes] = {}
    for at in times:
        heaps[at] = heaps.get(at, b"") + framed(token())
    for at, data in heaps.items():
        reader.feed(data, at)
    reader.feed(framed(FINISH, usage(len(times)), DONE) + END, times[-1])
    outcome = reader.outcome()
    assert ("burst" in outcome.flags) is burst
    assert ("first_read_bound" in outcome.flags) is (times[0] == times[1])


def test_three_tokens_in_one_read_are_no_burst() -> None:
    assert read(HEAD, framed(token(), token(), token(), FINISH, usage(3), DONE) + END).flags == {"first_read_bound"}


def test_a_json_answer_to_a_streamed_request_is_ok_and_a_burst() -> None:
    body = json.dumps({"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 4}})
    outcome = read((1.0, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)), (2.0, body.encode()))
    assert (outcome.status, outcome.output_tokens, outcome.flags) == ("ok", 4, {"burst"})
    assert outcome.first_token_at == outcome.last_token_at == 2.0


# --- failures ---

FAILURES = {
    # name: (pieces, code)
    "cut after tokens": ([HEAD, framed(token(), token())], "SC-TRUNCATED"),
    "clean end without finish": ([HEAD, framed(token(), token()), END], "SC-TRUNCATED"),
    "nothing at all": ([HEAD, END], "SC-TRUNCATED"),
    "empty body": ([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"], "SC-TRUNCATED"),
    "done without output": ([HEAD, framed(ROLE, FINISH, DONE), END], "SC-EMPTY"),
    "only done": ([HEAD, framed(DONE), END], "SC-EMPTY"),
    "204": ([b"HTTP/1.1 204 No Content\r\n\r\n"], "SC-EMPTY"),
    "205 with a length": ([b"HTTP/1.1 205 Reset Content\r\nContent-Length: 0\r\n\r\n"], "SC-EMPTY"),
    "no bytes": ([], "CH-CLOSED"),
    "half a header block": ([HEAD[:30]], "CH-CLOSED"),
    "bad JSON": ([HEAD, framed(token(), b"data: {oops\n\n", FINISH, DONE), END], "SC-JSON"),
    "error, then done": ([HEAD, framed(token(), b'data: {"error":{"message":"boom"}}\n\n', DONE), END], "SV-STREAM"),
    "no choices": ([HEAD, framed(b'data: {"hello":1}\n\n'), END], "SC-CHOICES"),
    "html page": ([b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>hello"], "SC-SSE"),
    "plain text": ([b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n", b"hello there"], "SC-SSE"),
    "json cut": ([b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", b'{"choices":['], "SC-TRUNCATED"),
    "json broken": ([b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n", b'{"choices":['], "SC-JSON"),
    "json without choices": ([b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n", b'{"detail":"x"}'], "SC-CHOICES"),
    "broken chunk": ([HEAD, framed(token()), b"zz\r\n"], "SC-HTTP"),
    "header bomb": ([b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000], "SC-HEADERS"),
    "not HTTP": ([b"SSH-2.0-OpenSSH\r\n"], "SC-HTTP"),
    "unknown compression": ([b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\n\r\n", b"xx"], "SC-ENCODING"),
    "broken gzip": ([b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n", b"not gzip at all"], "SC-ENCODING"),
    "refused": ([b"HTTP/1.1 429 X\r\nRetry-After: 3\r\nContent-Length: 0\r\n\r\n"], "SV-429"),
    "refused, body cut": ([b"HTTP/1.1 401 X\r\nContent-Length: 99\r\n\r\nab"], "CH-401"),
    "redirect": ([b"HTTP/1.1 302 X\r\nLocation: https://a.b/login?x=1\r\nContent-Length: 0\r\n\r\n"], "CH-REDIRECT"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_have_their_code_however_they_are_cut(name: str) -> None:
    pieces, code = FAILURES[name]
    outcome = read(*pieces)
    assert (outcome.code, outcome.status, outcome.error_kind) == (code, CODES[code].status, CODES[code].error_kind)
    assert len(outcome.detail) <= 200
    raw = b"".join(pieces)
    if len(raw) < 5000:
        one_by_one = read(*(raw[i : i + 1] for i in range(len(raw))))
        assert one_by_one.code == code


@pytest.mark.parametrize("kind", sorted(FAIL_KINDS))
def test_every_local_failure_has_a_code_and_a_time(kind: str) -> None:
    reader = AnswerReader()
    reader.fail(kind, 5.0, "because of x")
    outcome = reader.outcome()
    assert reader.complete and not reader.keep_alive
    assert (outcome.code, outcome.done_at, outcome.detail) == (FAIL_KINDS[kind], 5.0, "because of x")


@pytest.mark.parametrize(
    ("kind", "code"),
    [("reset", "CH-CUT"), ("idle_timeout", "CH-TO-IDLE"), ("total_timeout", "CH-TO-TOTAL"), ("CL-DRAIN", "CL-DRAIN")],
)
def test_a_failure_inside_the_answer_keeps_what_came(kind: str, code: str) -> None:
    reader = AnswerReader()
    reader.feed(HEAD + framed(token(), token()), 1.0)
    reader.fail(kind, 9.0)
    outcome = reader.outcome()
    assert (outcome.code, outcome.first_token_at, outcome.output_tokens, outcome.done_at) == (code, 1.0, 2, 9.0)


@pytest.mark.parametrize("last", [DONE, FINISH], ids=["done", "finish"])
@pytest.mark.parametrize("end", ["reset", "idle_timeout", "CL-DRAIN", "eof", "garbage"])
def test_how_the_connection_ends_does_not_spoil_a_finished_answer(last: bytes, end: str) -> None:
    reader = AnswerReader()
    reader.feed(HEAD + framed(token(), token(), last), 1.0)
    if end == "eof":
        reader.eof(9.0)
    elif end == "garbage":
        reader.feed(b"zz\r\n", 1.0)
    else:
        reader.fail(end, 9.0)
    outcome = reader.outcome()
    assert (outcome.status, outcome.done_at, reader.keep_alive) == ("ok", 1.0, False)


def test_the_first_fault_stands() -> None:
    reader = AnswerReader()
    reader.feed(HEAD + framed(token(), b'data: {"error":{"message":"boom"}}\n\n'), 1.0)
    reader.fail("reset", 2.0)
    assert reader.outcome().code == "SV-STREAM"


def test_nothing_counts_after_the_end() -> None:
    reader = AnswerReader()
    assert reader.feed(HEAD + framed(token(), FINISH, DONE) + END, 1.0)
    assert reader.keep_alive
    assert reader.feed(b"more", 2.0) and reader.feed_lazy(b"more", 2.0)
    reader.eof(3.0)
    reader.fail("reset", 3.0)
    outcome = reader.outcome()
    assert (outcome.status, outcome.done_at, outcome.chunks) == ("ok", 1.0, 1)


def test_secrets_do_not_come_out() -> None:
    body = b'{"error":{"message":"wrong key my-secret-0815-key\\u001b[31m, you sent Bearer my-secret-0815-key"}}'
    options = AnswerOptions(secrets=("my-secret-0815-key",))
    outcome = read(b"HTTP/1.1 401 X\r\nContent-Length: %d\r\n\r\n" % len(body), body, options=options)
    assert "secret" not in outcome.detail and "0815" not in outcome.detail and "\x1b" not in outcome.detail


def test_plain_answers_are_kept() -> None:
    reader = AnswerReader(AnswerOptions(plain=True))
    assert reader.feed(b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"data":[]}', 1.0)
    assert (bytes(reader.body), reader.outcome().status, reader.outcome().flags) == (b'{"data":[]}', "ok", set())


# --- compression and size ---


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compressed_streams_are_read_event_by_event(coding: str) -> None:
    squeeze = zlib.compressobj(wbits=31 if coding == "gzip" else 15)
    head = HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: %s\r\n\r\n" % coding.encode())
    pieces = [head]
    for part in (ROLE, token(), token(), FINISH + usage(2) + DONE):
        pieces.append(framed(squeeze.compress(part) + squeeze.flush(zlib.Z_SYNC_FLUSH)))
    outcome = read(*pieces, framed(squeeze.flush()) + END)
    assert (outcome.status, outcome.output_tokens) == ("ok", 2)
    assert outcome.first_token_at == pytest.approx(0.03) and outcome.last_token_at == pytest.approx(0.04)


@pytest.mark.parametrize("behind", [b"", b"\0" * 40, b"\x1f\x8b", b"\x1f\x8c\x08more"])
def test_gzip_members_follow_one_another(behind: bytes) -> None:
    """What is behind the last one is left out; a member that has only begun takes nothing away."""
    parts = [ROLE + token(), token() * 2, b"", FINISH + usage(3) + DONE]
    body = b"".join(map(gzip.compress, parts)) + behind
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n"
    for size in (len(body), 7, 1):
        outcome = read(head, *(body[start : start + size] for start in range(0, len(body), size)))
        assert (outcome.status, outcome.chunks, outcome.output_tokens) == ("ok", 3, 3), size


def test_a_gzip_bomb_ends_early_in_bounded_memory() -> None:
    bomb = gzip.compress((b": " + b"a" * 60_000 + b"\n") * 2_000)  # 120 MB in about 120 kB
    head = HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    reader = AnswerReader()
    reader.feed(head, 0.0)
    tracemalloc.start()
    for start in range(0, len(bomb), 16_384):
        if reader.feed(framed(bomb[start : start + 16_384]), 1.0):
            break
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reader.outcome().code == "SC-ENCODING"
    assert peak_bytes < 4_000_000


def test_a_10_mb_event_is_an_event() -> None:
    text = "y" * 10_000_000
    raw = framed(event({"content": text}))
    reader = AnswerReader()
    reader.feed(HEAD, 0.0)
    for start in range(0, len(raw), 65_536):
        reader.feed(raw[start : start + 65_536], 1.0)
    assert reader.first_output
    assert reader.feed(framed(FINISH, DONE) + END, 2.0)
    assert (reader.outcome().status, reader.outcome().chunks) == ("ok", 1)


@pytest.mark.parametrize("kind", ["event", "json"])
def test_above_the_size_limit_the_answer_is_malformed(kind: str) -> None:
    reader = AnswerReader(AnswerOptions(max_event_bytes=100_000))
    reader.feed(HEAD, 0.0)
    piece = framed(b"data: {" if kind == "event" else b"{"), framed(b"x" * 1000)
    reader.feed(piece[0], 0.0)
    for _ in range(1000):
        if reader.feed(piece[1], 1.0):
            break
        assert reader.held_bytes < 102_000
    assert reader.outcome().code == "SC-SIZE"
    assert not reader.keep_alive


def test_an_endless_refusal_is_kept_in_part() -> None:
    reader = AnswerReader()
    reader.feed(b"HTTP/1.1 500 X\r\n\r\n", 0.0)
    for _ in range(100):
        reader.feed(b"a" * 10_000, 1.0)
    assert reader.held_bytes <= 65_536
    reader.eof(2.0)
    assert reader.outcome().code == "SV-500"


# --- lazy reading against the full parse ---


def facts(reader: AnswerReader) -> dict[str, Any]:
    """What must not depend on how the stream was read."""
    o = reader.outcome()
    return {"status": o.status, "code": o.code, "detail": o.detail, "finish": o.finish_reason, "chunks": o.chunks,
            "tokens": o.output_tokens, "source": o.output_tokens_source, "reasoning": o.reasoning_tokens, "content_chunks": o.content_chunks,
            "ttft": o.first_token_at, "ttfo": o.first_content_at, "ttft_chunk": o.ttft_chunk, "last": o.last_token_at,
            "done": o.done_at, "bytes": o.bytes_in, "flags": o.flags - {"burst"}, "keep": reader.keep_alive}  # fmt: skip


def both_ways(heaps: list[bytes]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same heaps at the same times, read fully and lazily."""
    full, lazy = AnswerReader(), AnswerReader()
    for number, heap in enumerate(filter(None, heaps)):
        at = 1.0 + number
        full.feed(heap, at)
        if lazy.first_output:
            lazy.feed_lazy(heap, at)
        else:
            lazy.feed(heap, at)
    for reader in (full, lazy):
        reader.eof(99.0)
    return facts(full), facts(lazy)


TRAPS = ['"content":"', 'x","content":"y', '\\"content\\":\\"', "\n\ndata: x", "data: ", "[DONE]", '"error"', "0\r\n\r\n",
         '"finish_reason":"stop"', "", " ", "\u2028", "排队", "a" * 300, '{"error":{}}', '"usage":{"completion_tokens":9}']  # fmt: skip


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """An answer of one of many styles, cut into heaps."""
    separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    prefix = draw(st.sampled_from([b"data: ", b"data: ", b"data:"]))
    line_end = draw(st.sampled_from([b"\n", b"\n", b"\n", b"\r\n"]))
    shape = draw(st.sampled_from(["chat", "chat", "text", "reasoning", "several"]))
    running = draw(st.booleans())

    def dump(value: dict[str, Any]) -> bytes:
        return prefix + json.dumps(value, separators=separators, ensure_ascii=draw(st.booleans())).encode() + line_end * 2

    texts = draw(st.lists(st.one_of(st.sampled_from(["a", " token"]), st.sampled_from(TRAPS)), min_size=1, max_size=40))
    switch = draw(st.integers(0, len(texts)))
    events = [dump({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})]
    for number, text in enumerate(texts):
        index = number % 2 if shape == "several" else 0
        if shape == "text":
            choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": None}
        elif shape == "reasoning" and number < switch:
            choice = {"index": 0, "delta": {"content": None, "reasoning_content": text}, "finish_reason": None}
        else:
            choice = {"index": index, "delta": {"content": text}, "finish_reason": None}
        if draw(st.integers(0, 60)) == 0:
            choice["finish_reason"] = "stop"
        body: dict[str, Any] = {"id": "c", "choices": [choice]}
        if running:
            body["usage"] = {"completion_tokens": number + 1}
        odd = draw(st.integers(0, 80))
        if odd == 0:
            body["error"] = {"message": "boom"}
        events.append(dump(body))
        if odd == 1:
            events.append(draw(st.sampled_from([b": ping\n\n", b"event: x\n", b"data: {oops\n\n", b"data:\n\n",
                                                b'data: {"error":{"message":"late"}}\n\n'])))  # fmt: skip
    end = draw(st.sampled_from(["full", "full", "no done", "nothing", "after"]))
    if end != "nothing":
        events.append(dump({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}))
        hidden = draw(st.sampled_from([None, 0, 1, 30]))
        counts = {"completion_tokens": len(texts) + (hidden or 0), "completion_tokens_details": {"reasoning_tokens": hidden}}
        events.append(dump({"choices": [], "usage": counts}))
    if end in ("full", "after"):
        events.append(b"data: [DONE]" + line_end * 2)
    if end == "after":
        events.append(dump({"choices": [{"index": 0, "delta": {"content": "late"}, "finish_reason": None}]}))
    raw = HEAD
    place = 0
    while place < len(events):
        take = draw(st.sampled_from([1, 1, 1, 1, 2, 3]))
        raw += framed(b"".join(events[place : place + take]))
        place += take
    raw += END if draw(st.integers(0, 4)) else b""
    borders = [0, *sorted(draw(st.sets(st.integers(1, len(raw) - 1), max_size=8))), len(raw)]
    return [raw[a:b] for a, b in zip(borders, borders[1:], strict=False)]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(heaps=streams())
def test_lazy_reading_gives_what_the_full_parse_gives(heaps: list[bytes]) -> None:
    full, lazy = both_ways(heaps)
    assert lazy == full


@pytest.mark.parametrize("size", [1, 7, 50, 211, 1000, 10_500, 65_536])
def test_lazy_heaps_of_any_size(size: int) -> None:
    raw = HEAD + framed(ROLE, *(token(f" t{i}") for i in range(400)), FINISH, usage(400), DONE) + END
    heaps = [raw[start : start + size] for start in range(0, len(raw), size)]
    full, lazy = both_ways(heaps)
    assert lazy == full
    assert (full["chunks"], full["tokens"], full["status"]) == (400, 400, "ok")


def test_the_search_is_used_where_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this test the search could be off for good and every other test would still pass."""
    import bench.client.chat as chat

    parsed = 0
    original = chat._loads

    def counting(data: bytes) -> Any:
        nonlocal parsed
        parsed += 1
        return original(data)

    monkeypatch.setattr(chat, "_loads", counting)
    reader = AnswerReader()
    reader.feed(HEAD + framed(ROLE, token()), 1.0)
    for heap in range(4):
        reader.feed_lazy(framed(*[token()] * 50), 2.0 + heap)
    assert reader.outcome().chunks == 201
    assert parsed <= 2 + 4  # role, first token, and the last event of each heap
    reader.feed_lazy(framed(*[token()] * 50, FINISH, usage(251), DONE) + END, 7.0)
    assert (reader.outcome().output_tokens, reader.outcome().chunks) == (251, 251)
    assert parsed <= 2 + 4 + 5


SECOND_CHOICE = token().replace(b'"index":0', b'"index":1')


@pytest.mark.parametrize(
    "heap",
    [
        framed(token() + FINISH, usage(4)),  # a token and the finish in one chunk: one hit, one chunk, two events
        framed(token(), token() + event({"role": "assistant"}), token()),
        framed(token(), b": ping\n\n", token(), token()),
        framed(token(), b"event: x\n" + token(), token()),
        framed(token(), event({"content": ""}), token()),
        framed(token(), event({"content": "x"}, error={"message": "boom"}), token()),
        framed(token(), event({"content": "x"}, "stop"), token()),
        framed(token(), event({"content": "x", "reasoning_content": "y"}), token()),
        framed(token(), event({"reasoning_content": "y"}), event({"reasoning_content": "y"})),
        framed(token()[:-1], b"\n" + token(), token()),
        framed(token(), token()[:40], token()[40:], token()),
        framed(token(), b"data: {oops\n\n", token()),
        framed(token(), b'data: {"error":{"message":"late"}}\n\n', token()),
        # lines that end in a carriage return hide an event, or give the last one a tail, and every count still fits
        framed(token(), token()[:-2] + b"\r\r: c\n\n"),
        framed(token(), token() + token() + b"data: oops\n\n", token()[:-2] + b"\r\r" + token() + token()),
        # a second choice that has begun and never ends, in a heap whose last event is of the first
        framed(token(), SECOND_CHOICE, token()),
        # no JSON: a control character, an unknown escape, an escape that takes the end of the string, a quote too many
        framed(token(), token("@").replace(b"@", b"\t"), token()),
        framed(token(), token("@").replace(b"@", b"\\x"), token()),
        framed(token(), token("@").replace(b"@", b"\\"), token()),
        framed(*[token("@").replace(b"@", b"\\")] * 3),
        framed(token(), token("@").replace(b"@", b'y"'), token()),
        framed(token(), token().replace(b"}\n\n", b"\n\n"), token()),
        # a usage that only one of them has
        framed(token(), event({"content": "x"}, usage={"completion_tokens": 7}), token()),
    ],
)
def test_heaps_that_are_not_alike_are_parsed(heap: bytes) -> None:
    # An escape in the first token leaves no template: what follows is counted by the search alone.
    for first in (token(), token('say "x"')):
        for end in (framed(FINISH, usage(9), DONE) + END, framed(FINISH), framed(DONE) + END, b""):
            for cut in (len(heap), len(heap) - 3, len(heap) // 2):
                full, lazy = both_ways([HEAD + framed(ROLE, first), heap[:cut], heap[cut:] + end])
                assert lazy == full


def long_token(text: str = "x", **more: Any) -> bytes:
    return event({"content": text}, created=1, **more)


@pytest.mark.parametrize(
    "odd",
    [
        long_token("y" * 500),
        long_token("排队"),
        long_token("line\nbreak"),
        long_token('a "quote"'),
        long_token("back\\slash"),
        long_token("\U0001f600"),
        long_token().replace(b'"x"', b'"\\ud83d"'),  # half a pair
        long_token(""),
        long_token().replace(b'"x"', b'"\x01"'),  # no JSON
        long_token().replace(b'"x"', b'"\\"'),  # the escape takes the end of the string
        long_token().replace(b'"x"', b'"\xff"'),
        long_token().replace(b'"x"', b'"x","role":"y"'),
        long_token().replace(b'"x"', b"null"),
        long_token().replace(b'"created":1', b'"created":2'),
        long_token().replace(b"data: ", b"data:"),
        long_token().replace(b"data: ", b"data : "),
        long_token().replace(b"\n\n", b"\n"),
        long_token().replace(b"\n\n", b"\n\n\n"),
        long_token().replace(b"\n\n", b"\r\n\r\n"),
        long_token().replace(b'{"content"', b'\r{"content"'),
        long_token() + long_token(),
        long_token("x", error={"message": "boom"}),
        b": ping\n\n",
        b"\n\n",
        b"x",
        b"",
    ],
)
def test_an_odd_event_among_events_that_are_alike(odd: bytes) -> None:
    alike = [framed(long_token(f" t{i}")) for i in range(6)]
    strange = framed(odd) if odd else b"0;x\r\n"
    for n in (1, 3):
        for end in (framed(FINISH, usage(9), DONE) + END, b""):
            heap = b"".join(alike[:n]) + strange + b"".join(alike[n:])
            for cut in (len(heap), len(heap) - 30, len(heap) // 2):
                # The first output alone in its read, and together with others: two ways to a template.
                for start in ([HEAD + framed(ROLE), alike[0]], [HEAD + framed(ROLE) + alike[0], alike[1] + alike[2]]):
                    full, lazy = both_ways([*start, heap[:cut], heap[cut:] + end])
                    assert lazy == full
                    full, lazy = both_ways([*start, heap.replace(b"\r\n", b";x=1\r\n", 1)[:cut], end])
                    assert lazy == full


@pytest.mark.parametrize("at_once", [1, 2])
def test_events_read_one_by_one_are_compared_or_parsed(at_once: int) -> None:
    """The comparison of single events against the general path, which a cut in the middle of a read leads to."""
    odd = [long_token("y" * 500), long_token('a "quote"'), long_token("line\nbreak"), long_token(""), event({"content": "z"}),
           long_token().replace(b'"created":1', b'"created":2'), long_token("x", error={"message": "boom"}), ROLE,
           long_token().replace(b'"x"', b'"\x01"'), FINISH, usage(3), DONE, long_token("late")]  # fmt: skip
    for strange in odd:
        events = [ROLE, *[long_token(f" t{i}") for i in range(5)], strange, *[long_token("b" * i) for i in range(1, 6)]]
        events += [FINISH, usage(9), DONE]
        quick, general = AnswerReader(), AnswerReader()
        for number in range(0, len(events), at_once):
            data = framed(*events[number : number + at_once])
            at = 1.0 + number * 0.01
            for reader, cut in ((quick, 0), (general, len(data) // 3)):
                for piece in filter(None, ((HEAD if number == 0 else b"") + data[:cut], data[cut:])):
                    reader.feed(piece, at)
        for reader in (quick, general):
            reader.feed(END, 9.0)
            reader.eof(9.0)
        assert facts(quick) == facts(general), strange
        a, b = quick.outcome(), general.outcome()
        assert (a.itl_mean_s, a.itl_p99_s, a.itl_max_s) == (b.itl_mean_s, b.itl_p99_s, b.itl_max_s), strange
        assert a.chunks is not None and a.chunks >= 10 or strange == DONE


def test_chunk_sizes_are_not_taken_on_trust() -> None:
    alike = framed(long_token())
    wrong = b"%x" % (len(long_token()) + 1) + alike[alike.index(b"\r") :]
    framed(b"x" * (len(long_token()) + 1))  # its size line is known by then
    full, lazy = both_ways([HEAD + framed(ROLE), framed(long_token("xy")), alike + wrong + alike, alike])
    assert lazy["code"] == full["code"] == "SC-HTTP"


def test_events_that_are_alike_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench.client.chat as chat

    reader = AnswerReader()
    reader.feed(HEAD + framed(ROLE), 1.0)
    reader.feed(framed(long_token()), 1.5)
    monkeypatch.setattr(chat, "_loads", None)
    for heap in range(3):
        reader.feed_lazy(framed(*(long_token(f" t{heap}{i}") for i in range(9))), 2.0 + heap)
    monkeypatch.undo()
    reader.feed_lazy(framed(*[long_token()] * 4, FINISH, usage(32), DONE) + END, 5.0)
    outcome = reader.outcome()
    # 1 read promptly + 3 heaps of 9 + 4; five reads carried output
    assert (outcome.chunks, outcome.output_tokens, outcome.reads, outcome.content_chunks) == (32, 32, 5, 32)
    assert (outcome.first_token_at, outcome.last_token_at, outcome.status) == (1.5, 5.0, "ok")


def test_a_template_that_never_fits_is_given_up() -> None:
    """Services with a counter in each event: the comparison must not cost them anything for long."""
    reader = AnswerReader()
    reader.feed(HEAD + framed(ROLE), 1.0)
    reader.feed(framed(long_token(n=-1)), 1.5)
    for heap in range(12):
        reader.feed_lazy(framed(*(long_token(n=heap * 10 + i) for i in range(10))), 2.0 + heap)
    assert reader.outcome().chunks == 121
    assert reader._heaps.needle is not None and not reader._heaps.before


def test_lazy_streams_have_no_gap_statistics() -> None:
    reader = AnswerReader()
    reader.feed(HEAD + framed(token()), 1.0)
    reader.feed_lazy(framed(token(), token()), 1.1)
    reader.feed_lazy(framed(FINISH, usage(3), DONE) + END, 1.2)
    outcome = reader.outcome()
    assert (outcome.itl_mean_s, outcome.itl_p99_s, outcome.itl_max_s, outcome.itl_under_1ms_ratio) == (None,) * 4
    assert (outcome.first_token_at, outcome.last_token_at, outcome.done_at) == (1.0, 1.1, 1.2)


# --- fuzz ---

fragments = st.one_of(
    st.binary(max_size=30),
    st.sampled_from([HEAD, b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 500 X\r\n\r\n", framed(token()), framed(ROLE), framed(FINISH),
                     framed(usage(3)), framed(DONE), END, token(), b"data: ", b"\n\n", b"5\r\n", b"\r\n", b"{", b"<",
                     b"Content-Encoding: gzip\r\n", b"Content-Length: 40\r\n", b"ffffff\r\n"]),
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(fragments, max_size=12), lazy=st.booleans(), end=st.sampled_from(["eof", "reset", "idle_timeout"]))
def test_no_bytes_raise_and_memory_stays_bounded(pieces: list[bytes], lazy: bool, end: str) -> None:
    reader = AnswerReader(AnswerOptions(max_event_bytes=4096))
    came = 0
    for number, piece in enumerate(pieces):
        came += len(piece)
        if lazy and reader.first_output:
            reader.feed_lazy(piece, number * 0.01)
        else:
            reader.feed(piece, number * 0.01)
        assert reader.held_bytes <= min(came, 80_000) + 208  # the first 200 bytes are kept for the message
    if end == "eof":
        reader.eof(9.0)
    else:
        reader.fail(end, 9.0)
    outcome = reader.outcome()
    assert reader.complete
    assert (outcome.status == "ok") == (outcome.code is None)
    assert outcome.code is None or outcome.code in CODES
    assert outcome.chunks is not None and outcome.chunks <= came


def named(text: str, model: str) -> bytes:
    return event({"content": text}, model=model)


@pytest.mark.parametrize(
    ("asked", "served", "other"),
    [
        ("gpt-4o", "gpt-4o", False),
        ("gpt-4o", "gpt-4o-2024-08-06", False),  # the served name is longer
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b-instruct", False),  # shorter, other case
        ("vendor/m-7b", "m-7b-2024", False),  # without the vendor the longer one
        ("/models/m-7b/", "m-7b", False),
        ("gpt-4o", "gpt-3.5-turbo", True),
        ("qwen2.5-72b", "qwen2.5-7b", True),
        ("gpt-4o", "", False),
        ("", "gpt-4o", False),
        ('a"b', "c", True),
        ("模型-大", "模型-小", True),
    ],
)
@pytest.mark.parametrize("first", ["token", "role", "reasoning", "body"])
def test_another_model_than_asked_is_flagged(asked: str, served: str, other: bool, first: str) -> None:
    more = {"model": served} if served else {}
    if first == "body":
        body = json.dumps({"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], **more}).encode()
        pieces = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), body]
    else:
        delta = {"token": {"content": "x"}, "role": {"role": "assistant"}, "reasoning": {"reasoning": "x"}}[first]
        pieces = [HEAD, framed(event(delta, **more)), *[framed(event({"content": "y"}, **more))] * 8, framed(FINISH, DONE) + END]
    model = asked_model(request_body(asked, "p", 9))
    assert model == asked
    outcome = read(*pieces, model=model)
    assert outcome.status == "ok" and ("other_model" in outcome.flags) is other


def test_the_model_named_in_the_dialects_events() -> None:
    start = b'data: {"type":"message_start","message":{"model":"other","content":[]}}\n\n'
    text = b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"x"}}\n\n'
    stop = b'data: {"type":"message_stop"}\n\n'
    assert "other_model" in read(HEAD, framed(start, text, stop) + END, model="mine").flags
    made = b'data: {"type":"response.created","response":{"model":"other"}}\n\n'
    delta = b'data: {"type":"response.output_text.delta","delta":"x"}\n\n'
    done = b'data: {"type":"response.completed","response":{"status":"completed","model":"mine"}}\n\n'
    assert "other_model" in read(HEAD, framed(made, delta, done) + END, model="mine").flags


@pytest.mark.parametrize("body", [b"", b"{}", b'{"prompt":"x","model":"m"}', b'{"model":7}', b'{"model":"m', b'{"model":"\\'])
def test_a_body_that_names_no_model_first(body: bytes) -> None:
    assert asked_model(body) == ""


# --- reasoning that is counted and not streamed ---


def _reasoned(dialect: str, shown: str) -> list[bytes]:
    """Six output events; usage says 46 tokens, 40 of them reasoning. shown: nothing, the reasoning, a summary."""
    if dialect == "chat":
        counts = {"prompt_tokens": 5, "completion_tokens": 46, "total_tokens": 51,
                  "completion_tokens_details": {"reasoning_tokens": 40}}  # fmt: skip
        first = event({"reasoning_content" if shown else "content": "t"})
        return [first, *[token()] * 5, FINISH, event(None, usage=counts), DONE]
    made = dialect_streams.Responses()
    counts = made.usage(46) | {"output_tokens_details": {"reasoning_tokens": 40}}
    thoughts = [made.event("response.reasoning_text.delta", output_index=0, delta="t")] if shown == "reasoning" else []
    thoughts += [made.event("response.reasoning_summary_text.delta", delta="t")] if shown == "summary" else []
    texts = [made.event("response.output_text.delta", output_index=1, delta=f" w{i}") for i in range(6 - len(thoughts))]
    response = made.response("completed", usage=counts)
    return [*thoughts, *texts, made.event("response.completed", response=response)]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "responses"])
@pytest.mark.parametrize(
    ("shown", "tpot_s"),
    [
        ("", 1.0),  # 5 s from first to last; 46 - 40 = 6 streamed tokens: 5 / (6 - 1)
        ("reasoning", 5.0 / 45),  # all 46 were streamed
        ("summary", 5.0 / 45),
    ],
)
def test_tpot_is_over_the_tokens_that_were_streamed(dialect: str, shown: str, tpot_s: float, lazy: bool) -> None:
    reader = AnswerReader()
    reader.feed(HEAD, 8.0)
    for number, part in enumerate(_reasoned(dialect, shown)):
        # Outputs at 10, 11, ... 15 s, read when each came or two at once; what is no output follows at 15 s.
        read_lazily = lazy and reader.first_output
        (reader.feed_lazy if read_lazily else reader.feed)(framed(part), 10.0 + min(number, 5))
    (reader.feed_lazy if lazy else reader.feed)(END, 15.0)
    outcome = reader.outcome()
    assert (outcome.output_tokens, outcome.output_tokens_source, outcome.reasoning_tokens) == (46, "usage", 40)
    assert ("hidden_reasoning" in outcome.flags) == (shown == "")
    row = outcome.to_row(stage=0, arrival=0, worker=0, repeat=0, offered_qps=1.0, phase="window", tenant="",
                         request_class="", request_id="r", intended_s=0.0, input_tokens=5, max_tokens=46,
                         to_run_s=lambda at: at)  # fmt: skip
    assert row.status == "ok" and row.chunks == 6 and row.output_tokens == 46 and row.reasoning_tokens == 40
    assert row.tpot_s == pytest.approx(tpot_s, rel=1e-12)


def test_an_answer_that_was_all_reasoning_says_so() -> None:
    counts = {"completion_tokens": 40, "completion_tokens_details": {"reasoning_tokens": 40}}
    outcome = read(HEAD + framed(ROLE, FINISH, event(None, usage=counts), DONE) + END)
    assert (outcome.code, outcome.reasoning_tokens) == ("SC-EMPTY", 40)
    assert "40 reasoning tokens that were not streamed" in outcome.detail
