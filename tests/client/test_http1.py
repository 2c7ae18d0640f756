"""Response framing: tables, every way of cutting, and h11 as the independent oracle."""
from __future__ import annotations

import h11
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.client.errors import ProtocolError
from bench.client.http1 import MAX_HEAD_BYTES, MAX_LINE_BYTES, MAX_TRAILER_BYTES, ResponseParser

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def run(raw: bytes, cuts: list[int] | None = None, *, eof: bool = True) -> tuple[ResponseParser, bytes]:
    """Feed `raw` cut at the offsets `cuts` and return the parser and the body."""
    parser = ResponseParser()
    body = b""
    start = 0
    for end in [*(cuts or []), len(raw)]:
        body += parser.receive(raw[start:end])
        start = end
    if eof and not parser.complete:
        parser.eof()
    return parser, body


def every_way(raw: bytes) -> list[list[int]]:
    """Whole, byte by byte, and in two pieces at every place."""
    n = len(raw)
    return [[], list(range(1, n)), *([cut] for cut in range(1, n))]


CASES = {
    # name: (bytes, status, body, complete after eof, keep_alive)
    "length": (OK + b"Content-Length: 5\r\n\r\nhello", 200, b"hello", True, True),
    "length zero": (OK + b"Content-Length: 0\r\n\r\n", 200, b"", True, True),
    "length cut": (OK + b"Content-Length: 9\r\n\r\nhello", 200, b"hello", False, False),
    "equal lengths": (OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello", 200, b"hello", True, True),
    "bytes after the end": (OK + b"Content-Length: 5\r\n\r\nhelloHTTP", 200, b"hello", True, False),
    "chunked": (CHUNKED + b"5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n", 200, b"hello!", True, True),
    "chunk extensions": (CHUNKED + b'5;a=b;c="d e"\r\nhello\r\n0;last\r\n\r\n', 200, b"hello", True, True),
    "space after the size": (CHUNKED + b"5 \r\nhello\r\n00 \r\n\r\n", 200, b"hello", True, True),
    "leading zeros, upper case": (CHUNKED + b"000A\r\n0123456789\r\n0\r\n\r\n", 200, b"0123456789", True, True),
    "trailers": (CHUNKED + b"5\r\nhello\r\n0\r\nX-Sum: 1\r\nX-More: 2\r\n\r\n", 200, b"hello", True, True),
    "chunked cut before the last chunk": (CHUNKED + b"5\r\nhello\r\n", 200, b"hello", False, False),
    "chunked cut in a chunk": (CHUNKED + b"5\r\nhel", 200, b"hel", False, False),
    "close-delimited": (OK + b"\r\nhello", 200, b"hello", True, False),
    "http/1.0": (b"HTTP/1.0 200 OK\r\n\r\nhello", 200, b"hello", True, False),
    "http/1.0 kept": (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", True, True),
    "connection close": (OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", True, False),
    "interim answers": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK
                        + b"Content-Length: 2\r\n\r\nok", 200, b"ok", True, True),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True, True),
    "no reason phrase": (b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", True, True),
    "bare LF in the header block": (b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok", 200, b"ok", True, True),
    "blank lines before": (b"\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nok", 200, b"ok", True, True),
    "folded field": (OK + b"X-A: one\r\n  two\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", True, True),
    "chunked and length": (OK + b"Content-Length: 99\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 200, b"ok",
                           True, False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_cut_gives_the_same_answer(name: str) -> None:
    raw, status, body, complete, keep_alive = CASES[name]
    for cuts in every_way(raw):
        parser, got = run(raw, cuts)
        assert (parser.status, got, parser.complete, parser.keep_alive) == (status, body, complete, keep_alive), cuts


def test_fields_are_lower_case_and_joined() -> None:
    parser, _ = run(OK + b"X-A: one\r\n  two\r\nx-a:three \r\nContent-Length: 0\r\n\r\n")
    assert parser.headers["x-a"] == "one two, three"


BROKEN = {
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "http/2 preface answer": b"\x00\x00\x12\x04\x00\x00\x00\x00\x00",
    "tls alert": b"\x15\x03\x01\x00\x02\x02\x16",
    "http/0.9 page": b"<html>hello</html>",
    "http/2 status line": b"HTTP/2.0 200 OK\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "line without colon": OK + b"nonsense\r\n\r\n",
    "space before the colon": OK + b"X-A : 1\r\n\r\n",
    "NUL in a field": OK + b"X-A: \x00\r\n\r\n",
    "two lengths": OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "negative length": OK + b"Content-Length: -1\r\n\r\n",
    "length with sign": OK + b"Content-Length: +5\r\n\r\nhello",
    "unknown coding": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    "switching protocols": b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    "size is no number": CHUNKED + b"xyz\r\n",
    "size with underscore": CHUNKED + b"1_0\r\n",
    "size with 0x": CHUNKED + b"0x5\r\nhello\r\n",
    "empty size": CHUNKED + b"\r\nhello\r\n",
    "chunk too long": CHUNKED + b"5\r\nhello!\r\n0\r\n\r\n",
    "size too large": CHUNKED + b"ffffffffffffffffff\r\n",
    "endless size line": CHUNKED + b"5;" + b"a" * (MAX_LINE_BYTES + 10),
    "trailer bomb": CHUNKED + b"0\r\n" + b"X-A: 1\r\n" * (MAX_TRAILER_BYTES // 8 + 8),
    "header bomb": OK + b"X-A: 1\r\n" * (MAX_HEAD_BYTES // 8 + 8),
    "one endless field": OK + b"X-A: " + b"a" * (MAX_HEAD_BYTES + 8),
    "endless interim answers": b"HTTP/1.1 100 Continue\r\n\r\n" * 40,
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_answers_raise_protocol_error_in_bounded_memory(name: str) -> None:
    raw = BROKEN[name]
    for size in (len(raw), 1 if len(raw) < 3000 else 97):
        parser = ResponseParser()
        with pytest.raises(ProtocolError) as caught:
            for start in range(0, len(raw), size):
                parser.receive(raw[start : start + size])
                assert parser.head_bytes + len(parser.line) <= MAX_HEAD_BYTES + size + 4
        assert caught.value.code in ("SC-HTTP", "SC-HEADERS")


# --- h11 as the oracle ---

token = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12).filter(
    lambda name: name not in ("content-length", "transfer-encoding", "connection", "upgrade", "date")
)
value = st.text("abcXYZ 019;=/\"',.", max_size=20).map(str.strip)


@st.composite
def responses(draw: st.DrawFn) -> bytes:
    """A valid final answer with any framing, maybe after interim answers."""
    out = b"".join(
        b"HTTP/1.1 %d Hint\r\n\r\n" % draw(st.sampled_from([100, 102, 103])) for _ in range(draw(st.integers(0, 2)))
    )
    out += b"HTTP/1.%d %d %s\r\n" % (draw(st.integers(0, 1)), draw(st.sampled_from([200, 201, 404, 429, 503])), b"R")
    for name, text in draw(st.lists(st.tuples(token, value), max_size=4)):
        out += f"{name}: {text}\r\n".encode()
    if draw(st.booleans()):
        out += b"Connection: " + draw(st.sampled_from([b"close", b"keep-alive", b"Close"])) + b"\r\n"
    body = draw(st.binary(max_size=300))
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    if framing == "length":
        return out + b"Content-Length: %d\r\n\r\n" % len(body) + body
    if framing == "close":
        return out + b"\r\n" + body
    out += b"Transfer-Encoding: chunked\r\n\r\n"
    start = 0
    while start < len(body):
        size = draw(st.integers(1, 100))
        piece = body[start : start + size]
        out += b"%x%s\r\n%s\r\n" % (len(piece), draw(st.sampled_from([b"", b";x=1", b'; y="z"'])), piece)
        start += size
    trailers = draw(st.lists(st.tuples(token, value), max_size=2))
    return out + b"0\r\n" + b"".join(f"{name}: {text}\r\n".encode() for name, text in trailers) + b"\r\n"


def by_h11(raw: bytes, cuts: list[int]) -> tuple[int, bytes, bool]:
    """(status, body, complete) as h11 reads it."""
    conn = h11.Connection(h11.CLIENT)
    conn.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    conn.send(h11.EndOfMessage())
    status, body, complete = 0, b"", False
    start = 0
    for end in [*cuts, len(raw), None]:
        conn.receive_data(b"" if end is None else raw[start:end]) if end is None or end > start else None
        start = end or start
        while True:
            event = conn.next_event()
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return status, body, True
            elif event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
                break
    return status, body, complete


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(raw=responses(), data=st.data())
def test_same_as_h11_on_valid_answers(raw: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(raw) - 1, 1)), max_size=8)))
    parser, body = run(raw, cuts)
    assert (parser.status, body, parser.complete) == by_h11(raw, cuts)


@settings(max_examples=300, deadline=None)
@given(raw=responses(), data=st.data())
def test_damaged_answers_raise_only_protocol_error_and_never_give_more_than_came(raw: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(raw) - 1))
    damage = data.draw(st.binary(max_size=6))
    broken = raw[:at] + damage + raw[at + data.draw(st.integers(0, 6)) :]
    results = []
    for cuts in ([], list(range(1, len(broken)))):
        try:
            parser, body = run(broken, cuts)
            results.append((parser.status, body, parser.complete))
            assert len(body) <= len(broken)
        except ProtocolError as error:
            results.append(error.code)
    assert results[0] == results[1]
