"""When bytes reached this host: kernel receive stamps, as monotonic seconds.

Input: the ancillary data of `recvmsg` on a socket with `SO_TIMESTAMPNS`.
Output: the arrival on the monotonic clock and the age of the bytes when we read them.
Does not: read a socket.

1. A stamp is CLOCK_REALTIME; it is converted with the offset between the two clocks read at that moment.
2. A converted time lies between `not_before` (our last look at the empty socket) and now, whatever the
   wall clock does: a step of it moves no result by more than that interval.
3. On a read of several segments the stamp is that of the newest one. The oldest byte of such a read is older
   by at most the time since the socket was last seen empty.
Source: socket(7), `SO_TIMESTAMP`; tcp_recv_timestamp() keeps the stamp of the last segment copied.
"""
from __future__ import annotations

import _socket
import socket
import struct
import sys
import time
from collections.abc import Callable

# asm-generic/socket.h; Python has no name for it. Other systems have other numbers, so Linux only.
SO_TIMESTAMPNS = 35
# One cmsg header (16 bytes) and two int64, with room to spare.
ANCILLARY_BYTES = 64
# The offset between the clocks moves by at most 500 ppm when time is slewed; a jump above this is a step, or we
# were descheduled between the two clock reads (then reading again tells).
STEP_NS = 200_000
# How long after a step bytes may still wait in a socket with a stamp from before it.
STEP_MEMORY_NS = 30_000_000_000

# Tries, one millisecond apart, until the first stamp must have come; one or two are usual.
STAMP_TRIES = 50

_TWO_INT64 = struct.Struct("=qq")
unpack_stamp = _TWO_INT64.unpack


def ask_for_stamps(sock: socket.socket) -> bool:
    """True when the kernel will stamp what this socket receives."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


class StampKeeper:
    """Keeps the kernel stamping: a loopback pair that asked for stamps and stays open.

    The kernel stamps nothing while no socket asks for it, and starts a moment after the first one does; without this
    the first answers of a process would have no stamps. `working` says whether one really came.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self.working = False
        try:
            self.working = self._try()
        except OSError:
            self.working = False

    def _try(self) -> bool:
        listener = self._new()
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        reader = self._new()
        if not ask_for_stamps(reader):
            return False
        reader.connect(listener.getsockname())
        fd, _ = listener._accept()
        writer = _socket.socket(fileno=fd)
        self._sockets.append(writer)
        for _ in range(STAMP_TRIES):
            writer.send(b"x")
            _, ancillary, _, _ = reader.recvmsg(1, ANCILLARY_BYTES)
            if stamp_ns(ancillary) is not None:
                return True
            time.sleep(0.001)
        return False

    def _new(self) -> socket.socket:
        sock = _socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.settimeout(0.5)
        self._sockets.append(sock)
        return sock

    def close(self) -> None:
        """Stop keeping."""
        for sock in self._sockets:
            sock.close()


def stamps_supported() -> bool:
    """True when this system stamps what its TCP sockets receive (tried on loopback)."""
    keeper = StampKeeper()
    keeper.close()
    return keeper.working


def stamp_ns(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """The receive stamp in CLOCK_REALTIME nanoseconds, None when there is none."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(data) >= 16:
            seconds, nanoseconds = unpack_stamp(data[:16])
            return seconds * 1_000_000_000 + nanoseconds
    return None


class KernelClock:
    """Turns receive stamps into monotonic time; one for all sockets of a process."""

    __slots__ = ("_offset_ns", "_old_offset_ns", "_monotonic_ns", "_realtime_ns", "_stepped_ns", "steps")

    def __init__(self, monotonic_ns: Callable[[], int] = time.monotonic_ns,
                 realtime_ns: Callable[[], int] = time.time_ns) -> None:
        self._monotonic_ns = monotonic_ns
        self._realtime_ns = realtime_ns
        self._offset_ns = self._measure()
        self._old_offset_ns = self._offset_ns
        self._stepped_ns = -STEP_MEMORY_NS
        self.steps = 0

    def arrival_ns(self, stamp: int, not_before_ns: int) -> tuple[int, int]:
        """(arrival, now) in monotonic nanoseconds for a receive stamp in CLOCK_REALTIME nanoseconds.

        not_before_ns: the bytes cannot have come before it (request sent, socket last seen empty).
        """
        now = self._monotonic_ns()
        offset = self._realtime_ns() - now
        if not -STEP_NS < offset - self._offset_ns < STEP_NS:
            offset, now = self._stepped(offset)
        self._offset_ns = offset
        at = stamp - offset
        if now - self._stepped_ns < STEP_MEMORY_NS and not_before_ns < self._stepped_ns:
            at = self._nearest(stamp, not_before_ns, now)
        if at > now:
            return now, now
        if at < not_before_ns:
            return not_before_ns, now
        return at, now

    def _stepped(self, offset: int) -> tuple[int, int]:
        """The offset read again with care; a jump that stays is remembered as a step."""
        offset = self._measure()
        now = self._monotonic_ns()
        if not -STEP_NS < offset - self._offset_ns < STEP_NS:
            self._old_offset_ns = self._offset_ns
            self._stepped_ns = now
            self.steps += 1
        return offset, now

    def _nearest(self, stamp: int, not_before: int, now: int) -> int:
        """The possible arrival nearest to now, for a stamp that may be from before or after the last step."""
        possible = [at for at in (stamp - self._offset_ns, stamp - self._old_offset_ns) if not_before <= at <= now]
        return max(possible, default=now)

    def _measure(self) -> int:
        """Offset realtime - monotonic in nanoseconds, from the tightest of three looks."""
        best_gap, best = 1 << 62, 0
        for _ in range(3):
            before = self._monotonic_ns()
            real = self._realtime_ns()
            after = self._monotonic_ns()
            if after - before < best_gap:
                best_gap, best = after - before, real - (before + after) // 2
        return best
