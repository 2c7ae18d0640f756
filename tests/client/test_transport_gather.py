"""Gathered readiness: nothing is lost, nothing comes after a stop, a quiet socket is served at once."""
from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator

import gevent
import pytest

from bench.client.gather import AT_ONCE, COARSE_S, FINE_S, HOLD_S, Gatherer


@pytest.fixture
def gatherer() -> Iterator[Gatherer]:
    made = Gatherer(gevent.get_hub())
    yield made
    made.close()


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    made = [socket.socketpair() for _ in range(20)]
    for _, reader in made:
        reader.setblocking(False)
    yield made
    for pair in made:
        for sock in pair:
            sock.close()


def test_every_byte_is_read_whatever_the_rate(gatherer: Gatherer, pairs: list) -> None:
    got: Counter[int] = Counter()
    for _, reader in pairs:
        fd = reader.fileno()
        gatherer.watch(fd).start(lambda reader=reader, fd=fd: got.update({fd: len(reader.recv(1000))}))
    for turn in range(60):
        for writer, _ in pairs[: 1 + turn % 20]:
            writer.send(b"x")
        gevent.sleep(0.0 if turn % 3 else 0.003)
    gevent.sleep(0.05)
    # Pair k is written to in the turns with turn % 20 >= k: 3 * (20 - k) of 60.
    assert [got[reader.fileno()] for _, reader in pairs] == [3 * (20 - k) for k in range(20)]


def test_a_quiet_socket_is_served_at_once(gatherer: Gatherer, pairs: list) -> None:
    writer, reader = pairs[0]
    waits_s = []
    at: list[float] = []
    gatherer.watch(reader.fileno()).start(lambda: (reader.recv(10), at.append(time.monotonic())))
    for _ in range(20):
        gevent.sleep(0.005)
        sent_s = time.monotonic()
        writer.send(b"x")
        gevent.sleep(0.003)
        waits_s.append(at[-1] - sent_s)
    assert sorted(waits_s)[10] < FINE_S


def test_no_call_after_stop_even_from_another_callback(gatherer: Gatherer, pairs: list) -> None:
    calls: list[int] = []
    watches = [gatherer.watch(reader.fileno()) for _, reader in pairs]

    def stop_all(k: int) -> None:
        calls.append(k)
        for watch in watches:
            watch.stop()

    for k, watch in enumerate(watches):
        watch.start(lambda k=k: stop_all(k))
    for writer, _ in pairs:
        writer.send(b"x")
    gevent.sleep(0.02)
    assert len(calls) == 1
    watches[3].start(lambda: (calls.append(3), watches[3].stop()))  # level-triggered: the byte is still there
    gevent.sleep(0.02)
    assert calls[1:] == [3]


def test_a_callback_that_raises_does_not_stop_the_others(gatherer: Gatherer, pairs: list,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    served = []

    def serve(reader: socket.socket, k: int) -> None:
        reader.recv(10)
        served.append(k)
        if k == 0:
            raise RuntimeError("a bug in a callback")

    for k, (_, reader) in enumerate(pairs):
        gatherer.watch(reader.fileno()).start(lambda reader=reader, k=k: serve(reader, k))
    for writer, _ in pairs:
        writer.send(b"x")
    gevent.sleep(0.02)
    assert sorted(served) == list(range(20))
    assert "a bug in a callback" in capsys.readouterr().err


def test_the_loop_may_end_when_nothing_is_watched(gatherer: Gatherer, pairs: list) -> None:
    watch = gatherer.watch(pairs[0][1].fileno())
    watch.start(lambda: None)
    watch.stop()
    watch.stop()
    assert not gatherer._watcher.active and not gatherer._timer.active


def serve_for(gatherer: Gatherer, pair: tuple[socket.socket, socket.socket], seconds: float) -> float:
    """Mean time between two services while bytes come without a pause."""
    writer, reader = pair
    served_s: list[float] = []
    watch = gatherer.watch(reader.fileno())
    watch.start(lambda: (reader.recv(1000), writer.send(b"x"), served_s.append(time.monotonic())))
    writer.send(b"x")
    gevent.sleep(seconds)
    watch.stop()
    reader.recv(1000)
    return seconds / len(served_s)


def test_coarse_only_while_no_read_holds_several_outputs(gatherer: Gatherer, pairs: list) -> None:
    # A loaded machine may serve later than asked, never much earlier.
    assert serve_for(gatherer, pairs[0], 0.1) < COARSE_S
    gatherer._fine_until_s = 0.0  # as if HOLD_S had passed
    assert serve_for(gatherer, pairs[0], 0.2) > 0.75 * COARSE_S
    gatherer.refine()
    assert serve_for(gatherer, pairs[0], 0.1) < COARSE_S
    assert gatherer._fine_until_s > time.monotonic() + 1.0


def test_refine_while_gathering_is_felt_at_once(gatherer: Gatherer, pairs: list) -> None:
    gatherer._fine_until_s = 0.0
    writer, reader = pairs[0]
    served = []

    def serve() -> None:
        reader.recv(1000)
        served.append(time.monotonic())
        writer.send(b"x")
        if len(served) == 10:
            gatherer.refine()

    gatherer.watch(reader.fileno()).start(serve)
    writer.send(b"x")
    gevent.sleep(0.15)
    assert gatherer._timer is gatherer._fine and gatherer._fine.active and not gatherer._coarse.active
    assert len(served) > 10
    gatherer.remove(reader.fileno())
    assert not gatherer._fine.active and not gatherer._watcher.active


def test_a_turn_over_many_lets_timers_go_between(gatherer: Gatherer) -> None:
    """Counted, not timed: a timer that is due at the first read of 300 comes before the second slice."""
    many = [socket.socketpair() for _ in range(300)]
    served: list[int] = []
    served_before: list[int] = []
    timer = gevent.get_hub().loop.timer(0.0)

    def serve(reader: socket.socket, k: int) -> None:
        reader.recv(10)
        if not served:
            timer.start(lambda: served_before.append(len(served)))
        served.append(k)

    try:
        for k, (writer, reader) in enumerate(many):
            gatherer.watch(reader.fileno()).start(lambda reader=reader, k=k: serve(reader, k))
            writer.send(b"x")
        gevent.sleep(0.05)
        assert sorted(served) == list(range(300))
        assert served_before and served_before[0] <= 2 * AT_ONCE
    finally:
        timer.close()
        for writer, reader in many:
            gatherer.remove(reader.fileno())
            writer.close()
            reader.close()


def test_a_turn_that_goes_on_ends_with_the_last_watch(gatherer: Gatherer, pairs: list) -> None:
    watches = [gatherer.watch(reader.fileno()) for _, reader in pairs]
    for watch, (writer, _) in zip(watches, pairs, strict=True):
        watch.start(lambda: None)  # never reads: the descriptor stays readable
        writer.send(b"x")
    gatherer._more.start(gatherer._serve_some)
    for watch in watches:
        watch.stop()
    assert not gatherer._more.active and not gatherer._watcher.active


def test_a_fine_one_never_turns_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = Gatherer(gevent.get_hub(), fine=True)
    try:
        pair = socket.socketpair()
        pair[1].setblocking(False)
        fine.refine()
        monkeypatch.setattr("bench.client.gather.time.monotonic", lambda: time.perf_counter() + 10 * HOLD_S)
        serve_for(fine, pair, 0.05)
        assert fine._timer is fine._fine
        for sock in pair:
            sock.close()
    finally:
        fine.close()


def test_a_watch_moves_to_another_gatherer_and_starts_at_home_again(gatherer: Gatherer, pairs: list) -> None:
    other = Gatherer(gevent.get_hub())
    try:
        writer, reader = pairs[0]
        got: list[bytes] = []
        watch = gatherer.watch(reader.fileno())
        for start, home in ((watch.start, gatherer), (lambda call: watch.start_in(other, call), other),
                            (watch.start, gatherer)):
            start(lambda: got.append(reader.recv(10)))
            assert [reader.fileno() in each._callbacks for each in (gatherer, other)] == [home is gatherer, home is other]
            writer.send(b"x")
            gevent.sleep(0.01)
            assert got.pop() == b"x" and not got
        watch.stop()
        assert not gatherer._callbacks and not other._callbacks
    finally:
        other.close()
