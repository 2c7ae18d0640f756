"""How the server reads requests: any cut, any order, bounded, and refusing what is not HTTP."""
from __future__ import annotations

import json
import time

import pytest

from engine.http_server import MAX_HEADER_BYTES, BadRequest, ChunkedBody, parse_head

MODEL = "test-model"
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "a b"}], "max_tokens": 2,
                   "ignore_eos": True}).encode()


@pytest.fixture(scope="module")
def engine(serve):
    return serve()


def request(body: bytes = BODY, *lines: str) -> bytes:
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def test_byte_by_byte(engine):
    wire = engine.wire()
    for byte in request():
        wire.socket.sendall(bytes([byte]))
    assert wire.read().json["usage"]["completion_tokens"] == 2


def test_pipelined_requests_are_answered_in_order(engine):
    wire = engine.wire()
    wire.socket.sendall(request() + b"GET /health HTTP/1.1\r\n\r\n" + request() + b"GET /nothing HTTP/1.1\r\n\r\n")
    assert [wire.read().status for _ in range(4)] == [200, 200, 200, 404]


def test_keep_alive_reuses_the_connection(engine):
    wire = engine.wire()
    for _ in range(5):
        wire.send("POST", "/v1/chat/completions", engine.chat_body(3, 2))
        assert wire.read().done


def test_connection_close_is_obeyed(engine):
    for lines in (["Connection: close"],):
        wire = engine.wire()
        wire.socket.sendall(request(BODY, *lines))
        answer = wire.read()
        assert answer.headers["connection"] == "close" and wire.socket.recv(10) == b""


def test_http_1_0_closes(engine):
    wire = engine.wire()
    wire.socket.sendall(b"GET /health HTTP/1.0\r\n\r\n")
    assert wire.read().status == 200 and wire.socket.recv(10) == b""


def test_chunked_request_body_and_expect(engine):
    wire = engine.wire()
    wire.socket.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"
                        b"Expect: 100-continue\r\n\r\n")
    assert wire.socket.recv(100).startswith(b"HTTP/1.1 100 ")
    wire.socket.sendall(b"5\r\n" + BODY[:5] + b"\r\n" + b"%x;note=1\r\n" % (len(BODY) - 5) + BODY[5:]
                        + b"\r\n0\r\n\r\n" + b"GET /health HTTP/1.1\r\n\r\n")
    assert wire.read().json["usage"]["prompt_tokens"] == 2
    assert wire.read().status == 200


@pytest.mark.parametrize(("data", "status"), [
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # TLS hello on a plain port
    (b"GET /health\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nno colon here\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    (b"POST /x HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
    (b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    (b"POST /x HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
    (b"GET /health HTTP/1.1\r\nX: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n", 431),
    (b"GET /" + b"a" * (MAX_HEADER_BYTES + 10), 431),
])
def test_what_is_not_http_gets_an_error_and_a_close(engine, data, status):
    wire = engine.wire()
    wire.socket.sendall(data)
    answer = wire.read()
    assert answer.status == status and answer.json["error"]["message"]
    assert answer.headers["connection"] == "close"


def test_ids_that_would_break_the_answer_are_not_used(engine):
    answer = engine.chat(2, 2, headers={"x-request-id": 'a"b\\c'})
    assert answer.done and 'a"b' not in json.dumps(answer.events)


def test_idle_connections_close_after_the_limit(serve, tmp_path):
    """The keep-alive limit is 5 s by default (vLLM's); here the object is asked at two moments."""
    from engine.http_server import Connection, Server

    class Transport:
        closed = False

        def write(self, data: bytes) -> None:
            pass

        def close(self) -> None:
            self.closed = True

    server = Server(app=None, keep_alive_s=5.0)  # type: ignore[arg-type]
    connection, transport = Connection(server), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    now_s = time.monotonic()
    connection.expire(now_s + 4.0, 5.0)
    assert not transport.closed
    connection.expire(now_s + 6.0, 5.0)
    assert transport.closed


def test_a_client_that_half_closes_has_left(engine):
    wire = engine.wire()
    wire.send("POST", "/v1/chat/completions", engine.chat_body(5, 1500), {"x-request-id": "half"})
    engine.wait_for(lambda s: s["running"] == 1)
    wire.socket.shutdown(1)
    engine.wait_for(lambda s: s["running"] == 0, limit_s=2.0)
    assert engine.truth()["half"]["outcome"] == "aborted"


def test_parse_head_fields():
    got = parse_head(b"GET /a/b?c=1 HTTP/1.1\r\nX-Thing:  v 1 \r\nHOST: h", 1.5)
    assert (got.method, got.path, got.query, got.received_s) == ("GET", "/a/b", "c=1", 1.5)
    assert got.headers == {"x-thing": "v 1", "host": "h"}
    with pytest.raises(BadRequest):
        parse_head(b"GET /a HTTP/1.1\r\nspace : x", 0.0)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_chunked_body_whatever_the_cuts(size):
    data = b"3\r\nabc\r\n0a\r\n0123456789\r\n0\r\n\r\nREST"
    body, rest = ChunkedBody(), None
    for start in range(0, len(data), size):
        if rest is None:
            rest = body.feed(data[start: start + size])
        else:
            rest += data[start: start + size]
    assert b"".join(body.parts) == b"abc0123456789" and rest == b"REST"
