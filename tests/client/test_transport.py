"""The transport against scripted servers on loopback: connections, reuse, limits, cancellation."""
from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import gevent
import pytest

from bench.client.endpoint import parse_base_url
from bench.client.errors import ChannelError
from bench.client.kernel_time import stamps_supported
from bench.client.outcome import Outcome
from bench.client.transport import Transport, TransportOptions
from tests.client import fake_server as fake
from tests.client.fake_server import FakeServer

QUICK: dict[str, Any] = {"connect_timeout_s": 5.0, "first_token_timeout_s": 5.0, "idle_timeout_s": 5.0,
                         "total_timeout_s": 10.0, "drain_interval_s": 0.02}


@contextlib.contextmanager
def transport(url: str, key: str | None = None, **options: Any):
    """A transport that is closed at the end and must have nothing left in flight."""
    made = Transport(parse_base_url(url), TransportOptions(**{**QUICK, **options}), key)
    try:
        yield made
        assert made.in_flight == 0
        assert made.stats().lazy_streams == 0
    finally:
        made.close()


def wait_for(condition: Callable[[], bool], limit_s: float = 8.0) -> None:
    """Let the hub run until the condition holds."""
    until_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until_s, "waited in vain"
        gevent.sleep(0.005)


def ask(made: Transport, n: int = 1, body: bytes = b"{}", **kwargs: Any) -> list[Outcome]:
    """n requests one after the other; each must be answered exactly once."""
    outcomes: list[Outcome] = []
    for i in range(n):
        made.send(body, request_id=f"r{i}", on_done=outcomes.append, **kwargs)
        wait_for(lambda i=i: len(outcomes) > i)
    gevent.sleep(0.005)
    assert len(outcomes) == n
    return outcomes


def good(peer: Any) -> None:
    peer.send(fake.whole())


def test_a_good_answer_and_what_was_sent() -> None:
    with FakeServer(good) as server, transport(server.url, key="sk-abc", extra_headers=(("X-Team", "a b"),)) as made:
        (outcome,) = ask(made, body=b'{"a": 1}', pinned_tokens=3)
        head, body = server.requests[0]
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /v1/chat/completions HTTP/1.1"
    assert f"Host: 127.0.0.1:{server.port}".encode() in lines
    assert b"Authorization: Bearer sk-abc" in lines and b"x-request-id: r0" in lines
    assert b"Accept-Encoding: identity" in lines and b"X-Team: a b" in lines
    assert body == b'{"a": 1}'
    assert (outcome.status, outcome.code, outcome.http_status, outcome.output_tokens) == ("ok", None, 200, 3)
    assert outcome.connection == "new" and outcome.connect_s is not None and outcome.connect_s > 0.0
    assert outcome.dns_s is None and outcome.tls_s is None  # an address is no name, http is no TLS
    assert outcome.send_at < outcome.first_token_at <= outcome.last_token_at <= outcome.done_at
    assert outcome.clock == ("kernel" if stamps_supported() else "user")
    assert outcome.reader_lag_s is None or 0.0 <= outcome.reader_lag_s < 1.0


def test_a_connection_is_kept_and_used_again() -> None:
    with FakeServer(good) as server, transport(server.url) as made:
        outcomes = ask(made, n=3)
        assert [o.connection for o in outcomes] == ["new", "reused", "reused"]
        assert [o.connect_s is None for o in outcomes] == [False, True, True]
        assert server.connections == 1
        stats = made.stats()
        assert (stats.opened, stats.reused, stats.retried, stats.sent, stats.done) == (1, 2, 0, 3, 3)


def test_connect_time_is_not_service_time() -> None:
    with FakeServer(good) as server, transport(server.url) as made:
        called_at = time.monotonic()
        (outcome,) = ask(made)
    assert outcome.send_at >= called_at + outcome.connect_s


@pytest.mark.parametrize("answer", [
    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\n\r\n" + fake.EVENT + fake.FINISH
    + fake.DONE,
    b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + fake.EVENT + fake.FINISH + fake.DONE,
])
@pytest.mark.parametrize("read", ["prompt", "lazy"])
def test_answers_that_end_by_closing(answer: bytes, read: str) -> None:
    def script(peer: Any) -> None:
        peer.send(answer)
        peer.sock.shutdown(socket.SHUT_RDWR)

    with FakeServer(script) as server, transport(server.url, read=read) as made:
        outcomes = ask(made, n=2)
        assert [(o.status, o.connection) for o in outcomes] == [("ok", "new"), ("ok", "new")]
        assert made.stats().idle_connections == 0


def test_connection_close_is_honoured() -> None:
    answer = fake.whole().replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    with FakeServer(lambda peer: peer.send(answer)) as server, transport(server.url) as made:
        assert [o.connection for o in ask(made, n=2)] == ["new", "new"]


def test_an_idle_connection_is_too_old_after_its_limit() -> None:
    with FakeServer(good) as server, transport(server.url, idle_reuse_s=0.05) as made:
        ask(made)
        gevent.sleep(0.1)
        (outcome,) = ask(made)
        assert outcome.connection == "new" and server.connections == 2


def test_a_kept_connection_that_was_closed_is_not_used() -> None:
    def script(peer: Any) -> None:
        peer.send(fake.whole())
        peer.sock.shutdown(socket.SHUT_RDWR)

    with FakeServer(script) as server, transport(server.url) as made:
        ask(made)
        gevent.sleep(0.05)
        (outcome,) = ask(made)
        assert outcome.connection == "new" and "retried" not in outcome.flags
        assert made.stats().found_dead == 1 and len(server.requests) == 2


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_kept_connection_that_dies_under_the_request_is_tried_once_more(how: str) -> None:
    def script(peer: Any) -> None:
        if peer.turn == 1:  # the second request on this connection
            peer.reset() if how == "reset" else peer.sock.shutdown(socket.SHUT_RDWR)
        else:
            peer.send(fake.whole())

    with FakeServer(script) as server, transport(server.url) as made:
        first, second = ask(made, n=2)
        assert first.status == second.status == "ok"
        assert second.connection == "new" and second.flags >= {"retried"} and "retried" not in first.flags
        assert len(server.requests) == 3 and made.stats().retried == 1
        assert second.send_at < second.first_token_at


def test_no_second_try_once_a_byte_of_the_answer_came() -> None:
    def script(peer: Any) -> None:
        if peer.turn == 1:
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Ty")
            peer.sock.shutdown(socket.SHUT_RDWR)
        else:
            peer.send(fake.whole())

    with FakeServer(script) as server, transport(server.url) as made:
        _, second = ask(made, n=2)
        assert second.status in ("error", "truncated") and second.connection == "reused"
        assert len(server.requests) == 2 and made.stats().retried == 0


@pytest.mark.parametrize("how", ["close", "reset"])
def test_no_second_try_on_a_new_connection(how: str) -> None:
    def script(peer: Any) -> None:
        peer.reset() if how == "reset" else peer.sock.shutdown(socket.SHUT_RDWR)

    with FakeServer(script) as server, transport(server.url) as made:
        (outcome,) = ask(made)
        assert outcome.code == {"close": "CH-CLOSED", "reset": "CH-RESET"}[how]
        assert len(server.requests) == 1


def test_names_and_ipv6() -> None:
    with FakeServer(good) as server, transport(f"http://localhost:{server.port}/v1") as made:
        first, = ask(made)
        assert first.status == "ok" and first.dns_s is not None and first.dns_s > 0.0
    with FakeServer(good, family=socket.AF_INET6) as server, transport(server.url) as made:
        (outcome,) = ask(made)
        assert outcome.status == "ok"
        assert f"Host: [::1]:{server.port}".encode() in server.requests[0][0].split(b"\r\n")


def test_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("gevent.socket.getaddrinfo", fail)
    with transport("http://no-such-host.invalid/v1") as made:
        (outcome,) = ask(made)
        assert (outcome.status, outcome.code) == ("error", "CH-DNS")


def test_the_next_address_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(good) as server:
        closed = socket.create_server(("127.0.0.1", 0))
        dead_port = closed.getsockname()[1]
        closed.close()
        monkeypatch.setattr("gevent.socket.getaddrinfo", lambda *a, **k: [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", dead_port)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", server.port))])
        with transport(f"http://service.test:{server.port}/v1", idle_reuse_s=0.0) as made:
            assert [o.status for o in ask(made, n=2)] == ["ok", "ok"]


# Limits: kind of stall -> code.

def _stall_before_answer(peer: Any) -> None:
    peer.wait_closed()


def _stall_after_headers(peer: Any) -> None:
    peer.send(fake.HEAD + fake.chunk(b": keep-alive\n\n"))
    peer.wait_closed()


def _stall_after_output(peer: Any) -> None:
    peer.send(fake.HEAD + fake.chunk(fake.EVENT))
    peer.wait_closed()


def _trickle(peer: Any) -> None:
    peer.send(fake.HEAD + fake.chunk(fake.EVENT))
    with contextlib.suppress(OSError):
        for byte in fake.chunk(fake.EVENT * 50):
            peer.send(bytes([byte]))
            time.sleep(0.01)


@pytest.mark.parametrize("read", ["prompt", "lazy"])
@pytest.mark.parametrize(("script", "limit", "code"), [
    (_stall_before_answer, "first_token_timeout_s", "CH-TO-FIRST"),
    (_stall_after_headers, "first_token_timeout_s", "CH-TO-FIRST"),
    (_stall_after_output, "idle_timeout_s", "CH-TO-IDLE"),
    (_stall_after_output, "total_timeout_s", "CH-TO-TOTAL"),
    (_trickle, "total_timeout_s", "CH-TO-TOTAL"),
])
def test_limits_are_told_apart(script: Any, limit: str, code: str, read: str) -> None:
    with FakeServer(script) as server, transport(server.url, read=read, **{limit: 0.2}) as made:
        started_s = time.monotonic()
        (outcome,) = ask(made)
        assert (outcome.status, outcome.code) == ("timeout", code)
        assert 0.2 <= outcome.done_at - started_s < 2.5


def test_connect_limit_covers_a_silent_tls_peer() -> None:
    listener = socket.create_server(("127.0.0.1", 0))  # accepts in the kernel, never says a word
    with transport(f"https://127.0.0.1:{listener.getsockname()[1]}/v1", connect_timeout_s=0.2) as made:
        (outcome,) = ask(made)
        assert (outcome.status, outcome.code) == ("timeout", "CH-TO-CONNECT")
        assert outcome.send_at is None and outcome.connection is None
    listener.close()


def test_a_blocked_loop_makes_no_timeout() -> None:
    """Bytes that came in time count, however late we are to read them."""
    def script(peer: Any) -> None:
        time.sleep(0.1)
        peer.send(fake.whole())

    with FakeServer(script) as server, transport(server.url, first_token_timeout_s=0.3) as made:
        outcomes: list[Outcome] = []
        made.send(b"{}", request_id="r", on_done=outcomes.append)
        until_s = time.monotonic() + 0.6
        while time.monotonic() < until_s:  # the hub cannot run
            sum(range(1000))
        wait_for(lambda: bool(outcomes))
        assert outcomes[0].status == "ok"
        if stamps_supported():
            assert outcomes[0].first_token_at - outcomes[0].send_at < 0.45
            assert outcomes[0].reader_lag_s > 0.1


def test_done_without_the_end_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.client.stream.END_GRACE_S", 0.1)
    def script(peer: Any) -> None:
        peer.send(fake.whole()[: -len(fake.LAST)])
        peer.wait_closed()

    with FakeServer(script) as server, transport(server.url, total_timeout_s=0.6) as made:
        (outcome,) = ask(made)
        assert outcome.status == "ok" and made.stats().idle_connections == 0


# Cancellation.

@pytest.mark.parametrize("read", ["prompt", "lazy"])
def test_cancel_closes_the_socket(read: str) -> None:
    closed = threading.Event()

    def script(peer: Any) -> None:
        peer.send(fake.HEAD + fake.chunk(fake.EVENT))
        if peer.wait_closed():
            closed.set()

    with FakeServer(script) as server, transport(server.url, read=read) as made:
        outcomes: list[Outcome] = []
        streams = [made.send(b"{}", request_id=str(i), on_done=outcomes.append) for i in range(5)]
        wait_for(lambda: all(s.reader.first_output for s in streams))
        streams[0].cancel("CL-CANCEL")
        assert [o.code for o in outcomes] == ["CL-CANCEL"] and made.in_flight == 4
        streams[0].cancel("CL-CANCEL")
        made.cancel_all("CL-DRAIN")
        assert [o.code for o in outcomes[1:]] == ["CL-DRAIN"] * 4
        assert all(o.status == "timeout" and o.first_token_at is not None for o in outcomes)
        wait_for(closed.is_set)


def test_cancel_and_kill_while_connecting() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with transport(f"https://127.0.0.1:{listener.getsockname()[1]}/v1") as made:
        outcomes: list[Outcome] = []
        senders = [gevent.spawn(made.send, b"{}", request_id=str(i), on_done=outcomes.append) for i in range(3)]
        gevent.sleep(0.05)
        assert made.in_flight == 3
        senders[0].kill()
        assert [(o.status, o.code) for o in outcomes] == [("unsent", "CL-STOP")]
        made.cancel_all("CL-DRAIN")
        gevent.joinall(senders, timeout=2.0)
        assert [o.code for o in outcomes[1:]] == ["CL-DRAIN", "CL-DRAIN"]
    listener.close()


def test_a_stop_after_the_send_is_a_cancel() -> None:
    with FakeServer(_stall_before_answer) as server:
        made = Transport(parse_base_url(server.url), TransportOptions(**QUICK))
        outcomes: list[Outcome] = []
        made.send(b"{}", request_id="r", on_done=outcomes.append)
        made.close()
        assert [(o.status, o.code) for o in outcomes] == [("timeout", "CL-CANCEL")]
        made.send(b"{}", request_id="r", on_done=outcomes.append)
        assert [(o.status, o.code) for o in outcomes[1:]] == [("unsent", "CL-STOP")]


def test_a_callback_that_raises_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(_stall_after_output) as server, transport(server.url) as made:
        outcomes: list[Outcome] = []

        def on_done(outcome: Outcome) -> None:
            outcomes.append(outcome)
            if len(outcomes) == 1:
                raise RuntimeError("a bug of the owner")

        for i in range(3):
            made.send(b"{}", request_id=str(i), on_done=on_done)
        made.cancel_all("CL-DRAIN")
        assert len(outcomes) == 3
    assert "a bug of the owner" in capsys.readouterr().err


# Our own resources.

def test_refused_connections() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with transport(f"http://127.0.0.1:{port}/v1") as made:
        outcomes: list[Outcome] = []
        for i in range(2000):
            made.send(b"{}", request_id=str(i), on_done=outcomes.append)
        assert len(outcomes) == 2000
        assert {(o.status, o.code) for o in outcomes} == {("error", "CH-REFUSED")}
        if before:
            assert len(os.listdir("/proc/self/fd")) <= before + 5


def test_no_descriptors_left_is_unsent() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with FakeServer(good) as server, transport(server.url) as made:
        assert ask(made)[0].status == "ok"
        made.pool.expire(time.monotonic() + 60.0)
        gevent.sleep(0.02)
        probe = os.dup(0)
        os.close(probe)
        resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
        try:
            outcomes: list[Outcome] = []
            made.send(b"{}", request_id="r", on_done=outcomes.append)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [(o.status, o.code) for o in outcomes] == [("unsent", "CL-FD")]
        assert ask(made)[0].status == "ok"


def test_an_answer_before_the_request_was_read() -> None:
    """413 and close while we still write: the answer counts, not the broken pipe."""
    refusal = b"HTTP/1.1 413 Payload Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"

    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = listener.accept()
        sock.recv(1000)
        sock.sendall(refusal)
        time.sleep(0.3)
        sock.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with transport(f"http://127.0.0.1:{listener.getsockname()[1]}/v1") as made:
        (outcome,) = ask(made, body=b"x" * 30_000_000)
        assert outcome.http_status == 413 and outcome.status == "error"
    thread.join(2.0)
    listener.close()


def test_a_request_that_nobody_reads() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with transport(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", first_token_timeout_s=0.2) as made:
        outcomes: list[Outcome] = []
        sender = gevent.spawn(made.send, b"x" * 30_000_000, request_id="r", on_done=outcomes.append)
        wait_for(lambda: bool(outcomes))
        sender.join(1.0)
        assert sender.ready() and sender.successful()
        assert [(o.status, o.code) for o in outcomes] == [("timeout", "CH-TO-FIRST")]
    listener.close()


def test_an_answer_that_streams_while_we_write() -> None:
    """A service may answer before it has read everything, and read on."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = listener.accept()
        sock.recv(1000)
        sock.sendall(fake.HEAD + fake.chunk(fake.EVENT))
        time.sleep(0.1)
        left = 12_000_000 - 1000  # at least so much is left, whatever the header block took
        while left > 0:
            left -= len(sock.recv(1_000_000))
        sock.sendall(fake.chunk(fake.FINISH) + fake.chunk(fake.DONE) + fake.LAST)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with transport(f"http://127.0.0.1:{listener.getsockname()[1]}/v1") as made:
        (outcome,) = ask(made, body=b"x" * 12_000_000)
        assert outcome.status == "ok" and outcome.first_token_at < outcome.send_at
    thread.join(2.0)
    listener.close()


def test_prewarm_and_stats() -> None:
    with FakeServer(good) as server, transport(server.url) as made:
        assert made.prewarm(4) == 4
        assert made.stats().idle_connections == 4
        assert ask(made)[0].connection == "reused"
        gevent.sleep(0.1)
        stats = made.stats(reset=True)
        assert stats.loop_lag_p99_s is not None and stats.loop_lag_max_s >= stats.loop_lag_p50_s
        assert made.stats().loop_lag_p99_s is None
        assert stats.to_json()["opened"] == 4


@pytest.mark.parametrize("header", [("X-A", "b\r\nX-C: d"), ("X:A", "b"), ("", "b")])
def test_headers_that_cannot_be_sent(header: tuple[str, str]) -> None:
    with pytest.raises(ChannelError):
        Transport(parse_base_url("http://127.0.0.1:1/v1"), TransportOptions(extra_headers=(header,)))


def test_a_key_that_cannot_be_sent_is_not_told() -> None:
    with pytest.raises(ChannelError) as caught:
        Transport(parse_base_url("http://127.0.0.1:1/v1"), TransportOptions(), "sk-secret\n")
    assert caught.value.code == "CH-KEY-FORM" and "sk-secret" not in str(caught.value)
