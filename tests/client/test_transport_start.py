"""Sending from the pacing loop: `start` never waits, whatever the service does, and every request has its outcome.

That nothing waits is seen by counting greenlet switches, not by a clock: a call that waits must switch to the hub.
"""
from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import greenlet
import pytest

from bench.client.endpoint import parse_base_url
from bench.client.kernel_time import stamps_supported
from bench.client.loop_lag import LoopLag
from bench.client.outcome import Outcome
from bench.client.transport import Transport, TransportOptions
from tests.client import fake_server as fake

QUICK: dict[str, Any] = {"connect_timeout_s": 5.0, "first_token_timeout_s": 5.0, "idle_timeout_s": 5.0,
                         "total_timeout_s": 10.0, "drain_interval_s": 0.02}


@contextlib.contextmanager
def transport(url: str, **options: Any) -> Iterator[Transport]:
    made = Transport(parse_base_url(url), TransportOptions(**{**QUICK, **options}))
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def no_switch() -> Iterator[None]:
    """Fails when the code inside gives way to another greenlet."""
    switches: list[Any] = []
    greenlet.settrace(lambda event, args: switches.append((event, args)))
    try:
        yield
    finally:
        greenlet.settrace(None)
    assert switches == []


def start(made: Transport, outcomes: list[Outcome], body: bytes = b"{}", name: str = "r") -> None:
    """Prepare and start one request, without giving way."""
    stream = made.prepare(body, request_id=name, on_done=outcomes.append)
    with no_switch():
        made.start(stream)


def until(condition: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + 8.0
    while not condition():
        assert time.monotonic() < limit_s, "waited in vain"
        gevent.sleep(0.005)


def wait_for(outcomes: list[Outcome], n: int) -> None:
    until(lambda: len(outcomes) >= n)
    gevent.sleep(0.005)
    assert len(outcomes) == n


def good(peer: Any) -> None:
    peer.send(fake.whole())


def test_a_waiting_call_would_be_seen() -> None:
    with pytest.raises(AssertionError), no_switch():
        gevent.sleep(0)


def test_a_kept_connection_is_written_at_once() -> None:
    outcomes: list[Outcome] = []
    with fake.FakeServer(good) as server, transport(server.url) as made:
        start(made, outcomes)  # nothing is kept yet: a greenlet opens
        wait_for(outcomes, 1)
        stream = made.prepare(b"{}", request_id="r2", on_done=outcomes.append)
        assert made.in_flight == 0 and made.counts.sent == 1  # prepared is not sent
        before_s = time.monotonic()
        with no_switch():
            made.start(stream)
        assert stream.send_at is not None and before_s <= stream.send_at <= time.monotonic()
        wait_for(outcomes, 2)
        assert [o.status for o in outcomes] == ["ok", "ok"]
        assert [o.connection for o in outcomes] == ["new", "reused"] and server.connections == 1


def test_a_full_socket_is_written_on_in_a_greenlet() -> None:
    outcomes: list[Outcome] = []
    with fake.FakeServer(good) as server, transport(server.url) as made:
        start(made, outcomes)
        wait_for(outcomes, 1)
        start(made, outcomes, b"x" * 20_000_000)  # more than any socket buffer takes
        assert len(outcomes) == 1 and made.in_flight == 1
        wait_for(outcomes, 2)
        assert (outcomes[1].status, outcomes[1].connection) == ("ok", "reused")
        assert len(server.requests[1][1]) == 20_000_000


def test_a_stop_before_the_rest_is_written() -> None:
    """The greenlet that would go on finds the stream ended: one outcome, no second try."""
    outcomes: list[Outcome] = []
    with fake.FakeServer(good) as server, transport(server.url) as made:
        start(made, outcomes)
        wait_for(outcomes, 1)
        start(made, outcomes, b"x" * 20_000_000)
        made.cancel_all("CL-DRAIN")
        wait_for(outcomes, 2)
        assert outcomes[1].code == "CL-DRAIN" and made.counts.retried == 0 and made.in_flight == 0


def test_a_dead_address_holds_nobody_up() -> None:
    """A full backlog drops connection attempts, as a firewall does: the limit ends them, counted from the start."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    address = listener.getsockname()
    held = []
    for _ in range(3):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(address)
        held.append(filler)
    outcomes: list[Outcome] = []
    with transport(f"http://127.0.0.1:{address[1]}/v1", connect_timeout_s=0.3) as made:
        for i in range(5):
            with no_switch():
                made.open_ahead(time.monotonic() + 0.1)
            start(made, outcomes, name=f"r{i}")
        began_s = time.monotonic()
        wait_for(outcomes, 5)
        assert {(o.code, o.send_at) for o in outcomes} == {("CH-TO-CONNECT", None)}
        assert all(o.done_at is not None and o.done_at - began_s > 0.2 for o in outcomes)
    for sock in (*held, listener):
        sock.close()


def test_a_refused_connection_is_told_by_the_request() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    outcomes: list[Outcome] = []
    with transport(f"http://127.0.0.1:{port}/v1") as made:
        made.open_ahead(time.monotonic() + 1.0)
        gevent.sleep(0.05)
        assert outcomes == [] and made.counts.opened == 0 and made.in_flight == 0
        start(made, outcomes)
        wait_for(outcomes, 1)
        assert outcomes[0].code == "CH-REFUSED"


def _wait_idle(made: Transport, n: int) -> None:
    until_s = time.monotonic() + 5.0
    while len(made.pool) < n:
        assert time.monotonic() < until_s
        gevent.sleep(0.005)


def test_a_connection_opened_ahead_is_new_and_says_what_it_cost() -> None:
    outcomes: list[Outcome] = []
    with fake.FakeServer(good) as server, transport(server.url) as made:
        due_s = time.monotonic() + 0.5
        made.open_ahead(due_s)
        _wait_idle(made, 1)
        made.open_ahead(due_s)  # one waits already
        gevent.sleep(0.02)
        start(made, outcomes)
        wait_for(outcomes, 1)
        (outcome,) = outcomes
        assert outcome.status == "ok" and outcome.connection == "new" and outcome.connect_s is not None
        assert server.connections == 1
        assert (made.counts.opened, made.counts.reused) == (1, 0)


def test_no_connection_is_opened_ahead_where_none_is_kept() -> None:
    with fake.FakeServer(good) as server, transport(server.url, idle_reuse_s=0.0) as made:
        made.open_ahead(time.monotonic() + 0.5)
        gevent.sleep(0.05)
        assert made.counts.opened == 0


def test_a_connection_opened_ahead_that_dies_under_the_request_is_replaced_once() -> None:
    def script(peer: Any) -> None:
        if peer.connection == 1:
            peer.reset()
        else:
            peer.send(fake.whole())

    outcomes: list[Outcome] = []
    with fake.FakeServer(script) as server, transport(server.url) as made:
        made.open_ahead(time.monotonic() + 0.5)
        _wait_idle(made, 1)
        start(made, outcomes)
        wait_for(outcomes, 1)
        assert outcomes[0].status == "ok" and "retried" in outcomes[0].flags


def test_a_callback_that_raises_does_not_reach_the_sender(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(outcome: Outcome) -> None:
        raise RuntimeError("mine")

    with transport("http://127.0.0.1:1/v1") as made:
        made.close()
        made.start(made.prepare(b"{}", request_id="r", on_done=fail))
        assert made.in_flight == 0
    assert "mine" in capsys.readouterr().err


@pytest.mark.parametrize("period_s", [0.0125, 0.05])
def test_four_beats_never_take_more_than_four_periods(period_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a drain in four slots visits every stream within its interval, unless the loop itself is late."""
    pauses_s: list[float] = []

    class Timer:
        ref = False

        def __init__(self, pause_s: float, ref: bool) -> None:
            pauses_s.append(pause_s)

        def start(self, *_: Any, **__: Any) -> None: ...
        def stop(self) -> None: ...
        def close(self) -> None: ...

    class Hub:
        class loop:
            timer = Timer

    beat = LoopLag(Hub(), period_s)
    for _ in range(2000):
        beat._tick()
    fours = [sum(pauses_s[i : i + 4]) for i in range(len(pauses_s) - 3)]
    assert max(fours) <= 4 * period_s
    assert sum(fours) / len(fours) > 0.9 * 4 * period_s  # and not much more often
    assert max(pauses_s) / min(pauses_s) > 1.2  # yet never in step with regular work


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'


@pytest.mark.parametrize("read", ["prompt", "lazy"])
@pytest.mark.skipif(not stamps_supported(), reason="no kernel stamps")
def test_answers_wait_for_their_first_output_apart(read: str) -> None:
    go_on, over = threading.Event(), threading.Event()

    def script(peer: Any) -> None:
        peer.send(fake.HEAD + fake.chunk(ROLE))
        go_on.wait(8)
        peer.send(fake.chunk(fake.EVENT))
        over.wait(8)
        peer.send(fake.whole()[len(fake.HEAD):])

    outcomes: list[Outcome] = []
    with fake.FakeServer(script) as server, transport(server.url, read=read) as made:
        firsts, others = made._firsts, made._gatherer
        assert firsts is not None and others is not None
        try:
            for _ in range(2):  # on a new connection, and on the same one again
                go_on.clear(), over.clear()
                stream = made.send(b"{}", request_id="r", on_done=outcomes.append)
                until(lambda stream=stream: stream.reader._headers_at is not None)
                assert (len(firsts._callbacks), len(others._callbacks)) == (1, 0)
                go_on.set()
                until(lambda: not firsts._callbacks)
                assert len(others._callbacks) == (1 if read == "prompt" else 0)
                over.set()
                wait_for(outcomes, 1)
                assert outcomes.pop().status == "ok"
        finally:
            go_on.set(), over.set()
    assert server.connections == 1
