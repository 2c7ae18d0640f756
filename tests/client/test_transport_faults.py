"""Servers that misbehave: each request ends in exactly one outcome, with the right status, in bounded memory."""
from __future__ import annotations

import contextlib
import gzip
import os
import random
import resource
import socket
import threading
import time
import zlib
from typing import Any

import gevent
import pytest

from bench.client.outcome import CODES, Outcome
from bench.records.request import FLAGS, STATUSES
from tests.client import fake_server as fake
from tests.client import test_transport as base

ask, transport, wait_for, FakeServer = base.ask, base.transport, base.wait_for, fake.FakeServer
EVENT, HEAD, chunk, whole = fake.EVENT, fake.HEAD, fake.chunk, fake.whole


def _close(peer: Any) -> None:
    with contextlib.suppress(OSError):
        peer.sock.shutdown(socket.SHUT_RDWR)


def _killed_mid_stream(peer: Any) -> None:
    peer.send(HEAD + chunk(EVENT) * 3)
    time.sleep(0.03)
    peer.reset()


def _closed_mid_chunk(peer: Any) -> None:
    peer.send(HEAD + chunk(EVENT) * 3 + chunk(EVENT)[:40])
    _close(peer)


def _half_closed_before_answer(peer: Any) -> None:
    peer.sock.shutdown(socket.SHUT_WR)
    peer.wait_closed()


def _half_closed_mid_stream(peer: Any) -> None:
    peer.send(HEAD + chunk(EVENT))
    peer.sock.shutdown(socket.SHUT_WR)
    peer.wait_closed()


def _huge_event(peer: Any) -> None:
    peer.send(HEAD)
    event = EVENT.replace(b" word", b"w" * 10_000_000)
    peer.send(chunk(event) + chunk(fake.FINISH) + chunk(fake.DONE) + fake.LAST)


def _header_bomb(peer: Any) -> None:
    peer.send(b"HTTP/1.1 200 OK\r\n")
    for i in range(20_000):
        peer.send(b"X-%d: %s\r\n" % (i, b"y" * 200))


def _header_without_end(peer: Any) -> None:
    peer.send(b"HTTP/1.1 200 OK\r\nX: ")
    for _ in range(500):
        peer.send(b"y" * 10_000)


def _gzip_bomb(peer: Any) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = b"\0" * 1_000_000
    data = packer.compress(b"data: ") + b"".join(packer.compress(zeros) for _ in range(300)) + packer.flush()
    peer.send(HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n") + chunk(data) + fake.LAST)


def _gzip_stream(peer: Any) -> None:
    body = gzip.compress(EVENT * 3 + fake.FINISH + fake.DONE)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n"
    peer.send(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)


def _not_http(peer: Any) -> None:
    peer.send(b"SSH-2.0-OpenSSH_9.6\r\n")
    _close(peer)


def _bad_utf8(peer: Any) -> None:
    event = chunk(EVENT.replace(b" word", b"\xff\xfe\xc3"))
    peer.send(HEAD + event * 2 + chunk(fake.FINISH) + chunk(fake.DONE) + fake.LAST)


def _redirect(peer: Any) -> None:
    peer.send(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n")


def _too_many(peer: Any) -> None:
    peer.send(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\n{}")


CASES: list[tuple[str, Any, set[str | None]]] = [
    ("killed mid stream", _killed_mid_stream, {"CH-CUT", "SC-TRUNCATED"}),
    ("closed mid chunk", _closed_mid_chunk, {"CH-CUT", "SC-TRUNCATED"}),
    ("half closed before the answer", _half_closed_before_answer, {"CH-CLOSED"}),
    ("half closed mid stream", _half_closed_mid_stream, {"CH-CUT", "SC-TRUNCATED"}),
    ("10 MB event", _huge_event, {None, "SC-SIZE"}),
    ("header bomb", _header_bomb, {"SC-HEADERS"}),
    ("header without end", _header_without_end, {"SC-HEADERS"}),
    ("gzip bomb", _gzip_bomb, {"SC-ENCODING", "SC-SIZE"}),
    ("gzip stream", _gzip_stream, {None}),
    ("not http", _not_http, {"SC-HTTP"}),
    ("invalid utf-8", _bad_utf8, {None}),
    ("redirect", _redirect, {"CH-REDIRECT"}),
    ("too many requests", _too_many, {"SV-429"}),
]


@pytest.mark.parametrize("read", ["prompt", "lazy"])
@pytest.mark.parametrize(("script", "codes"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_one_outcome_with_the_right_code(script: Any, codes: set[str | None], read: str) -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with FakeServer(script) as server, transport(server.url, read=read) as made:
        (outcome,) = ask(made)
        assert outcome.code in codes, outcome
        assert outcome.status == ("ok" if outcome.code is None else CODES[outcome.code].status)
        assert len(server.requests) == 1
        if outcome.code == "SV-429":
            assert outcome.retry_after_s == 7.0
    # The largest case holds one event of 10 MB a few times over; a bomb of 300 MB must not show.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 150_000


@pytest.mark.parametrize("read", ["prompt", "lazy"])
def test_an_endless_torrent_ends_at_the_total_limit(read: str) -> None:
    def script(peer: Any) -> None:
        peer.send(HEAD)
        block = chunk(EVENT) * 100
        with contextlib.suppress(OSError):
            while True:
                peer.send(block)

    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with FakeServer(script) as server, transport(server.url, read=read, total_timeout_s=0.5) as made:
        (outcome,) = ask(made)
        assert outcome.code == "CH-TO-TOTAL" and outcome.chunks > 100
        assert made.stats().loop_lag_max_s < 1.0  # the torrent did not hold the loop
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 100_000


def test_a_fast_stream_is_not_held_up_by_lazy_reading() -> None:
    """5,000 events per second fill a socket within a drain interval: such a stream is read promptly."""
    sent_at: list[float] = []

    def script(peer: Any) -> None:
        peer.send(HEAD)
        for _ in range(60):
            peer.send(chunk(EVENT) * 50)
            time.sleep(0.01)
        peer.send(chunk(fake.FINISH) + chunk(fake.DONE) + fake.LAST)
        sent_at.append(time.monotonic())

    with FakeServer(script) as server, transport(server.url, read="lazy", drain_interval_s=0.2) as made:
        (outcome,) = ask(made)
        assert outcome.status == "ok" and outcome.chunks == 3000 and outcome.read_mode in ("lazy", "prompt")
        assert abs(outcome.done_at - sent_at[0]) < 0.1


# A server that does anything, at random: nobody is answered twice or not at all.

def _random_script(rng: random.Random, lock: threading.Lock) -> Any:
    cases = [case[1] for case in CASES if case[0] not in ("10 MB event", "gzip bomb", "header without end")]

    def cut(peer: Any, size: int, end: str) -> None:
        peer.send(whole(5)[:size])
        if end == "reset":
            peer.reset()
        elif end == "close":
            _close(peer)
        else:
            peer.wait_closed(3.0)

    def garbage(peer: Any, data: bytes, size: int) -> None:
        peer.send(whole(5)[:size] + data)
        _close(peer)

    def dribble(peer: Any, step: int) -> None:
        data = whole(4)
        for at in range(0, len(data), step):
            peer.send(data[at:at + step])
            time.sleep(0.001)

    def script(peer: Any) -> None:
        with lock:
            kind = rng.randrange(8)
            size, step = rng.randrange(0, len(whole(5)) + 1), rng.randrange(5, 400)
            end, case = rng.choice(["reset", "close", "stall"]), rng.choice(cases)
            data = rng.randbytes(rng.randrange(1, 300))
        if kind < 3:
            peer.send(whole(3))
        elif kind == 3:
            cut(peer, size, end)
        elif kind == 4:
            garbage(peer, data, size)
        elif kind == 5:
            dribble(peer, step)
        else:
            case(peer)

    return script


@pytest.mark.parametrize("seed", range(3))
def test_exactly_one_outcome_whatever_the_server_does(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(seed)
    script = _random_script(random.Random(seed + 100), threading.Lock())
    n = 150
    answers: dict[str, list[Outcome]] = {str(i): [] for i in range(n)}
    files_before = _open_files()
    with FakeServer(script) as server, transport(
            server.url, first_token_timeout_s=0.3, idle_timeout_s=0.3, total_timeout_s=0.8) as made:
        streams = []

        def send(name: str, prompt: bool) -> None:
            streams.append(made.send(b"{}" * rng.randrange(1, 100), request_id=name, prompt_read=prompt,
                                     on_done=answers[name].append))

        for name in answers:
            gevent.spawn(send, name, rng.random() < 0.3)
            gevent.sleep(rng.choice([0.0, 0.0, 0.002, 0.01]))
            if rng.random() < 0.05 and streams:
                rng.choice(streams).cancel("CL-CANCEL")
        wait_for(lambda: made.in_flight == 0)
        gevent.sleep(0.1)
        assert {len(got) for got in answers.values()} == {1}, f"seed {seed}"
        stats = made.stats()
        assert stats.sent == stats.done == n
        assert not made._buckets or all(not bucket for bucket in made._buckets.values())
    for (outcome,) in answers.values():
        assert outcome.status in STATUSES and outcome.flags <= set(FLAGS)
        assert (outcome.code is None) == (outcome.status == "ok"), outcome
        assert outcome.code is None or CODES[outcome.code].status == outcome.status
        assert outcome.code != "CL-BUG"
    assert sum(got[0].status == "ok" for got in answers.values()) > n / 4  # the good answers got through
    assert "Traceback" not in capsys.readouterr().err
    wait_for(lambda: _open_files() <= files_before + 10, 5.0)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
