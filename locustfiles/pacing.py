"""Waits until a moment of the monotonic clock, more exactly than the loop's own timers; and breaks for long work.

Input: a due time. Output: the greenlet goes on at that time, or earlier when woken.
Does not: decide what is due (the generator does).

The loop's timers are rounded up to whole milliseconds (epoll's resolution): half
a millisecond late in the mean. A timerfd is a file the kernel makes readable at
the very time: measured 0.1 ms late in the median against 1.1 ms. Where there is
none (not Linux) the loop's timer is used.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import gevent
from gevent.event import Event

# Work that can wait holds the loop no longer than this (pieces of it may be longer).
HELD_S = 0.001
YIELD_S = 0.0005  # a break; not 0: the loop would go on with us for 5 ms before it looks at its timers again
CLOCK_MONOTONIC = 1
TFD_TIMER_ABSTIME = 1
READ = 1


class _Spec(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]


class _TimerSpec(ctypes.Structure):
    _fields_ = [("interval", _Spec), ("value", _Spec)]


def _make_timer() -> tuple[int, Any] | None:
    """(descriptor, function that sets it), or None where the kernel has no timerfd."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        create, settime = libc.timerfd_create, libc.timerfd_settime
    except (OSError, AttributeError):
        return None
    fd = create(CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    return None if fd < 0 else (fd, settime)


class Breaks:
    """Called between the pieces of long work: rests when the loop has been held for `HELD_S` since the last rest."""

    def __init__(self, rest: Callable[[], None]) -> None:
        self._rest = rest
        self._since_s = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._since_s >= HELD_S:
            self._rest()
            self._since_s = time.monotonic()


class Waiter:
    """One greenlet's alarm clock; made on the greenlet's own hub, closed by `close`."""

    def __init__(self, *, precise: bool = True) -> None:
        self._event = Event()
        self._fd = -1
        timer = _make_timer() if precise else None
        if timer is not None:
            self._fd, self._settime = timer
            self._io = gevent.get_hub().loop.io(self._fd, READ)
        self._woken = self._nudged = False

    @property
    def precise(self) -> bool:
        """Whether the kernel's timer is used."""
        return self._fd >= 0

    def until(self, due_s: float, spin_s: float = 0.0) -> None:
        """Return at `due_s` of `time.monotonic()`, or when `wake` or `nudge` is called; at once when it is past.

        spin_s: the last part of the wait, done awake; the process is there in time, with its caches warm.
        """
        sleep_until_s = due_s - spin_s
        while not (self._woken or self._nudged) and time.monotonic() < sleep_until_s:
            if self._fd < 0:
                self._event.wait(sleep_until_s - time.monotonic())
                continue
            self._set(sleep_until_s)
            gevent.get_hub().wait(self._io)
            try:
                os.read(self._fd, 8)
            except BlockingIOError:
                continue  # set anew between the event and the read
        if spin_s and not (self._woken or self._nudged):
            while time.monotonic() < due_s:
                pass
        self._nudged = False
        if not self._woken:
            self._event.clear()

    def nudge(self) -> None:
        """Let the `until` that waits return now, so that its caller can look again; later calls wait as ever."""
        self._nudged = True
        self._event.set()
        if self._fd >= 0:
            self._set(time.monotonic())

    def wake(self) -> None:
        """Let `until` return now, and every later call at once."""
        self._woken = True
        self._event.set()
        if self._fd >= 0:
            self._set(time.monotonic())

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            self._io.close()
            os.close(self._fd)
            self._fd = -1

    def _set(self, at_s: float) -> None:
        # never 0, which would disarm the timer; a time in the past fires at once
        total_ns = max(1, int(at_s * 1e9))
        value = _TimerSpec(_Spec(0, 0), _Spec(total_ns // 1_000_000_000, total_ns % 1_000_000_000))
        self._settime(self._fd, TFD_TIMER_ABSTIME, ctypes.byref(value), None)
