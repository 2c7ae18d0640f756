"""Every recorded answer through the parser: whole, byte by byte, at random places, lazily, with CRLF in its body."""
from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import h11
import pytest

from bench.client.answer import AnswerOptions, AnswerReader
from bench.client.http1 import ResponseParser
from bench.client.outcome import Outcome

CASES = Path(__file__).resolve().parents[1] / "data" / "wire-cases"
NAMES = sorted(path.stem for path in CASES.glob("*.http"))
CHECKED_FLAGS = {"tokens_estimated", "no_done", "burst"}


def load(name: str) -> tuple[bytes, dict[str, Any]]:
    return (CASES / f"{name}.http").read_bytes(), json.loads((CASES / f"{name}.json").read_text("utf-8"))


def found_in(outcome: Outcome) -> dict[str, Any]:
    """The outcome in the words of the cases."""
    return {
        "outcome": "ok" if outcome.status == "ok" else "error",
        "error_kind": outcome.error_kind,
        "http_status": outcome.http_status,
        "ttft_counts_at_chunk": outcome.ttft_chunk,
        "ttfo_counts_at_chunk": outcome.ttfo_chunk,
        "content_chunks": outcome.content_chunks,
        "text": outcome.text,
        "reasoning_text": outcome.reasoning_text,
        "output_tokens": outcome.output_tokens,
        "output_tokens_source": outcome.output_tokens_source,
        "finish": outcome.finish_reason,
        "retry_after_s": outcome.retry_after_s,
        "tool_calls": outcome.tool_calls or None,
        "flags": sorted(outcome.flags & CHECKED_FLAGS),
    }


def expected_of(expect: dict[str, Any]) -> dict[str, Any]:
    return {
        **{key: expect.get(key) for key in found_in(Outcome())},
        "flags": sorted(expect.get("flags", [])),
    }


def read(raw: bytes, cuts: list[int], *, lazy: bool = False, gap_s: float = 0.01) -> AnswerReader:
    reader = AnswerReader(None if lazy else AnswerOptions(keep_text=True))
    at, start = 100.0, 0
    for end in [*cuts, len(raw)]:
        at += gap_s
        if lazy and reader.first_output:
            reader.feed_lazy(raw[start:end], at)
        else:
            reader.feed(raw[start:end], at)
        start = end
    reader.eof(at)
    return reader


def ways(raw: bytes) -> list[list[int]]:
    generator = random.Random(5)
    n = len(raw)
    return [[], list(range(1, n)), *(sorted(generator.sample(range(1, n), min(k, n - 1))) for k in (1, 2, 5, 20, 60))]


@pytest.mark.parametrize("name", NAMES)
def test_the_result_is_the_expected_one_however_it_is_cut(name: str) -> None:
    raw, case = load(name)
    expected = expected_of(case["expect"])
    for cuts in ways(raw):
        # In one piece, or in pieces microseconds apart, as from a proxy that held it all back.
        outcome = read(raw, cuts, gap_s=1e-6).outcome()
        assert found_in(outcome) == expected, cuts
        if part := case["expect"].get("error_text_contains"):
            assert part in outcome.detail


@pytest.mark.parametrize("name", NAMES)
def test_lazy_reading_agrees(name: str) -> None:
    raw, case = load(name)
    expected = expected_of(case["expect"])
    for cuts in ways(raw):
        found = found_in(read(raw, cuts, lazy=True, gap_s=1e-6).outcome())
        for key in ("text", "reasoning_text", "tool_calls"):
            found.pop(key)
        assert found == {key: expected[key] for key in found}, cuts


def with_line_ends(raw: bytes, line_end: bytes) -> bytes:
    """The same events with other line ends, framed again."""
    head, _, body = raw.partition(b"\r\n\r\n")
    if b"chunked" not in head.lower() or b"content-encoding" in head.lower():
        return raw
    parser = ResponseParser()
    plain = parser.receive(raw).replace(b"\r\n", b"\n").replace(b"\n", line_end)
    out = head + b"\r\n\r\n"
    for start in range(0, len(plain), 37):
        piece = plain[start : start + 37]
        out += b"%x\r\n%s\r\n" % (len(piece), piece)
    return out + (b"0\r\n\r\n" if parser.complete else b"")


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("name", NAMES)
def test_line_ends_make_no_difference(name: str, line_end: bytes) -> None:
    raw, case = load(name)
    raw = with_line_ends(raw, line_end)
    for cuts in ([], list(range(1, len(raw)))):
        assert found_in(read(raw, cuts, gap_s=1e-6).outcome()) == expected_of(case["expect"])


def self_delimited(name: str) -> bool:
    parser = ResponseParser()
    parser.receive(load(name)[0])
    return parser.complete


@pytest.mark.parametrize("name", [name for name in NAMES if self_delimited(name)])
def test_bytes_after_the_answer_cost_only_the_connection(name: str) -> None:
    raw, case = load(name)
    reader = read(raw + b"HTTP/1.1 200 OK\r\n", [])
    assert not reader.keep_alive
    assert found_in(reader.outcome())["outcome"] == case["expect"]["outcome"]


@pytest.mark.parametrize("name", NAMES)
def test_framing_agrees_with_h11(name: str) -> None:
    raw, _ = load(name)
    conn = h11.Connection(h11.CLIENT)
    conn.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    conn.send(h11.EndOfMessage())
    conn.receive_data(raw)
    body, complete = b"", False
    while not complete:
        event = conn.next_event()
        if isinstance(event, h11.Data):
            body += bytes(event.data)
        elif event is h11.NEED_DATA:
            try:
                conn.receive_data(b"")
                complete = isinstance(conn.next_event(), h11.EndOfMessage)
            except h11.RemoteProtocolError:
                pass
            break
        complete = isinstance(event, h11.EndOfMessage)
    parser = ResponseParser()
    assert parser.receive(raw) == body
    assert (parser.complete or parser.eof()) == complete


def test_the_cases_cover_what_they_claim() -> None:
    """A case that was lost, or a result that names no event, would make the others look complete."""
    assert len(NAMES) >= 31
    kinds = {load(name)[1]["expect"]["error_kind"] for name in NAMES}
    assert kinds >= {None, "auth", "rate_limited", "overloaded", "redirect", "in_stream_error", "truncated", "empty",
                     "malformed", "not_found"}  # fmt: skip
    for name in NAMES:
        raw, case = load(name)
        for pause in case["replay"].get("pauses", []):
            assert 0 <= pause["at"] <= len(raw)
        assert re.fullmatch(r"[a-z0-9_]+", case["name"]) and case["name"] == name
