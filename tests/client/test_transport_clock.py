"""Kernel stamps become monotonic time, and steps of the wall clock do no harm."""
from __future__ import annotations

import random
import socket
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.client.kernel_time import (
    SO_TIMESTAMPNS,
    STEP_NS,
    KernelClock,
    StampKeeper,
    ask_for_stamps,
    stamp_ns,
    stamps_supported,
)
from bench.client.loop_lag import LagHistogram

SECOND = 1_000_000_000
MS = 1_000_000


class FakeClocks:
    """Monotonic and wall clock that tests move by hand."""

    def __init__(self) -> None:
        self.mono = 1_000 * SECOND
        self.offset = 1_700_000_000 * SECOND

    def wait(self, ns: int) -> None:
        self.mono += ns

    def real(self) -> int:
        return self.mono + self.offset

    def clock(self) -> KernelClock:
        return KernelClock(lambda: self.mono, self.real)


def test_stamp_is_converted_exactly() -> None:
    clocks = FakeClocks()
    clock = clocks.clock()
    sent = clocks.mono
    clocks.wait(30 * MS)
    stamp, arrived = clocks.real(), clocks.mono
    clocks.wait(50 * MS)  # we are late by 50 ms
    assert clock.arrival_ns(stamp, sent) == (arrived, arrived + 50 * MS)
    assert clock.steps == 0


@pytest.mark.parametrize("step_ms", [-3_600_000, -5_000, -20, -5, 5, 20, 5_000, 3_600_000])
def test_a_step_between_arrival_and_read_does_no_harm(step_ms: int) -> None:
    clocks = FakeClocks()
    clock = clocks.clock()
    sent = clocks.mono
    clocks.wait(30 * MS)
    stamp, arrived = clocks.real(), clocks.mono
    clocks.offset += step_ms * MS
    clocks.wait(1 * MS)
    at, _ = clock.arrival_ns(stamp, sent)
    # Steps are larger than the wait of 1 ms, so only the offset from before the step gives a possible time.
    assert at == arrived
    assert clock.steps == 1


@pytest.mark.parametrize("step_ms", [-3_600_000, -20, -5, 5, 20, 3_600_000])
def test_stamps_from_after_a_step_are_exact(step_ms: int) -> None:
    clocks = FakeClocks()
    clock = clocks.clock()
    clocks.offset += step_ms * MS
    for _ in range(3):
        sent = clocks.mono
        clocks.wait(30 * MS)
        stamp, arrived = clocks.real(), clocks.mono
        clocks.wait(MS // 2)
        assert clock.arrival_ns(stamp, sent)[0] == arrived


def test_slewing_is_followed() -> None:
    clocks = FakeClocks()
    clock = clocks.clock()
    for _ in range(100):
        clocks.offset += 50_000  # 500 ppm for 0.1 s
        sent = clocks.mono
        clocks.wait(100 * MS)
        at, now = clock.arrival_ns(clocks.real() - 10 * MS, sent)
        assert at == now - 10 * MS
    assert clock.steps == 0


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_result_leaves_the_possible_interval(seed: int) -> None:
    rng = random.Random(seed)
    clocks = FakeClocks()
    clock = clocks.clock()
    for _ in range(30):
        low = clocks.mono
        clocks.wait(rng.randrange(0, 200 * MS))
        stamp, arrived = clocks.real(), clocks.mono
        stepped = rng.random() < 0.2
        if stepped:
            clocks.offset += rng.randrange(-10 * SECOND, 10 * SECOND)
        clocks.wait(rng.randrange(0, 100 * MS))
        at, now = clock.arrival_ns(stamp, low)
        assert now == clocks.mono
        assert low <= at <= now
        if clock.steps == 0:
            assert abs(at - arrived) <= STEP_NS  # a smaller step is not told from the clocks' drift


def test_stamp_is_found_among_other_ancillary_data() -> None:
    data = struct.pack("=qq", 12, 34)
    assert stamp_ns([(0, 8, b"1234"), (socket.SOL_SOCKET, SO_TIMESTAMPNS, data)]) == 12 * SECOND + 34
    assert stamp_ns([]) is None
    assert stamp_ns([(socket.SOL_SOCKET, SO_TIMESTAMPNS, b"short")]) is None


@pytest.mark.skipif(not stamps_supported(), reason="no kernel receive stamps on this system")
def test_late_reader_sees_the_arrival() -> None:
    keeper = StampKeeper()
    assert keeper.working
    listener = socket.create_server(("127.0.0.1", 0))
    reader = socket.socket()
    assert ask_for_stamps(reader)
    reader.connect(listener.getsockname())
    writer, _ = listener.accept()
    clock = KernelClock()
    errors_s = []
    for _ in range(5):
        low = time.monotonic_ns()
        writer.sendall(b"x")
        sent = time.monotonic_ns()
        time.sleep(0.03)
        _, ancillary, _, _ = reader.recvmsg(100, 64)
        stamp = stamp_ns(ancillary)
        assert stamp is not None
        at, now = clock.arrival_ns(stamp, low)
        assert now - at > 25 * MS
        errors_s.append(abs(at - sent) * 1e-9)
    for sock in (reader, writer, listener):
        sock.close()
    keeper.close()
    assert sorted(errors_s)[2] < 0.002  # measured 0.00001; the median of five forgives two preemptions


def test_lag_histogram_gives_upper_edges() -> None:
    lags = LagHistogram()
    assert lags.percentile_s(0.5) is None
    for lag_ms in range(1, 101):
        lags.add(lag_ms / 1e3)
    # Nearest rank: p50 = 50 ms, p99 = 99 ms; bins are 10 % wide and give their upper edge.
    assert 0.050 <= (lags.percentile_s(0.5) or 0.0) <= 0.055
    assert 0.099 <= (lags.percentile_s(0.99) or 0.0) <= 0.100
    assert lags.max_s == 0.1
    lags.reset()
    assert lags.n == 0 and lags.max_s == 0.0
