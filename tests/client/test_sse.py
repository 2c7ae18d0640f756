"""The event-stream grammar: a table, every way of cutting, an independent reading of the standard as oracle."""
from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.client.errors import ProtocolError
from bench.client.sse import EventStream


def run(raw: bytes, cuts: list[int] | None = None, **options: int) -> list[tuple[str, bytes]]:
    """All events of `raw`, cut at the offsets `cuts`."""
    stream = EventStream(**options)
    events = []
    start = 0
    for end in [*(cuts or []), len(raw)]:
        events += stream.feed(raw[start:end])
        start = end
    return events


CASES = {
    # name: (stream with LF line ends, events)
    "one event": (b"data: a\n\n", [("message", b"a")]),
    "no space": (b"data:a\n\n", [("message", b"a")]),
    "only one space is dropped": (b"data:  a\n\n", [("message", b" a")]),
    "several lines": (b"data: a\ndata: b\ndata:\n\n", [("message", b"a\nb\n")]),
    "empty data": (b"data:\n\n", [("message", b"")]),
    "data without colon": (b"data\n\ndata\ndata\n\n", [("message", b""), ("message", b"\n")]),
    "comments": (b": ping\n\n:\n\ndata: a\n: mid\ndata: b\n\n", [("message", b"a\nb")]),
    "type": (b"event: error\ndata: a\n\ndata: b\n\n", [("error", b"a"), ("message", b"b")]),
    "type alone is no event": (b"event: x\n\ndata: a\n\n", [("message", b"a")]),
    "empty type": (b"event:\ndata: a\n\n", [("message", b"a")]),
    "id and retry": (b"id: 7\nretry: 100\ndata: a\n\n", [("message", b"a")]),
    "unknown fields": (b"foo: 1\ndatax: 2\n data: 3\ndata: a\n\n", [("message", b"a")]),
    "byte order mark": (b"\xef\xbb\xbfdata: a\n\n", [("message", b"a")]),
    "second byte order mark is text": (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", [("message", b"b")]),
    "unfinished event": (b"data: a\n\ndata: b\n", [("message", b"a")]),
    "blank lines": (b"\n\n\ndata: a\n\n\n\n", [("message", b"a")]),
    "colon in the data": (b"data: a:b: c\n\n", [("message", b"a:b: c")]),
    "not utf-8": (b"data: \xff\xfe\n\n", [("message", b"\xff\xfe")]),
    "unicode line ends are text": ("data: a\u2028b\u0085c\n\n".encode(), [("message", "a\u2028b\u0085c".encode())]),
}


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("name", CASES)
def test_grammar(name: str, line_end: bytes) -> None:
    raw, expected = CASES[name]
    expected = [(kind, data) for kind, data in expected]
    raw = raw.replace(b"\n", line_end)
    for cuts in ([], list(range(1, len(raw))), *([cut] for cut in range(1, len(raw)))):
        assert run(raw, cuts) == expected, cuts


def test_facts_beside_the_events() -> None:
    stream = EventStream()
    stream.feed(b": a\n:\nid: 7\nid: x\x00y\nretry: 250\nretry: soon\ndata: a\n\n")
    assert (stream.comments, stream.last_id, stream.retry_ms) == (2, "7", 250)


def test_clean_only_between_events() -> None:
    stream = EventStream()
    seen = []
    for piece in (b"data: a\n\n", b"data: b", b"\n", b"\n", b"event: x\n", b"\n", b": c\r"):
        stream.feed(piece)
        seen.append(stream.clean)
    #              a ended, in a line, in b, b ended, in x, x ended, after CR an LF may follow
    assert seen == [True, False, False, True, False, True, False]


def oracle(raw: bytes) -> list[tuple[str, bytes]]:
    """The standard, read over the whole text at once; latin-1 keeps bytes as they are."""
    text = raw.removeprefix(b"\xef\xbb\xbf").decode("latin-1")
    events: list[tuple[str, bytes]] = []
    kind, data = "", ""
    for line in re.findall(r"([^\r\n]*)(?:\r\n|\r|\n)", text):
        if line == "":
            if data:
                events.append((kind or "message", data[:-1].encode("latin-1")))
            kind, data = "", ""
        elif not line.startswith(":"):
            name, value = re.fullmatch(r"([^:]*)(?:: ?(.*))?", line, re.S).groups()  # type: ignore[union-attr]
            if name == "data":
                data += (value or "") + "\n"
            elif name == "event":
                kind = (value or "").encode("latin-1").decode("utf-8", "replace")
    return events


pieces = st.sampled_from([b"data", b"data:", b"data: ", b"event: e", b"id: 1", b":", b" ", b"\n", b"\n\n", b"\r", b"\r\n",
                          b"x", b"\xef\xbb\xbf", b"\xff", b"{}", b"retry: 3"])  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(raw=st.lists(pieces, max_size=40).map(b"".join), data=st.data())
def test_same_as_the_standard_read_whole(raw: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(raw) - 1, 1)), max_size=10)))
    assert run(raw, cuts) == oracle(raw)


@settings(max_examples=200, deadline=None)
@given(raw=st.lists(st.one_of(pieces, st.binary(max_size=30)), max_size=60).map(b"".join))
def test_memory_is_bounded_and_only_protocol_error_comes_out(raw: bytes) -> None:
    stream = EventStream(max_event_bytes=40)
    try:
        for i in range(0, len(raw), 3):
            stream.feed(raw[i : i + 3])
            assert stream.held_bytes <= 40
    except ProtocolError as error:
        assert error.code == "SC-SIZE"


@pytest.mark.parametrize("unit", [b"data: aaaaaaaa\n", b"a", b"data\n"])
def test_an_endless_event_ends_at_the_limit(unit: bytes) -> None:
    stream = EventStream(max_event_bytes=10_000)
    with pytest.raises(ProtocolError, match="above 10000 bytes"):
        for _ in range(20_000):
            stream.feed(unit * 2)


def test_a_large_event_in_small_pieces_takes_linear_time() -> None:
    def cost_s(size: int) -> float:
        piece = b"a" * 16
        stream = EventStream()
        started = time.process_time()
        stream.feed(b"data: ")
        for _ in range(size // 16):
            stream.feed(piece)
        assert stream.feed(b"\n\n") == [("message", b"a" * size)]
        return time.process_time() - started

    small = min(cost_s(200_000) for _ in range(3))
    # 8 times the bytes; quadratic work would take 64 times as long.
    assert cost_s(1_600_000) < 24 * small + 0.05
