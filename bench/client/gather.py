"""Readiness of many sockets, gathered: at high rates one wake-up of the loop serves all that came in a moment.

Input: descriptors with a callback each. Output: the callbacks, called in the hub when their descriptor is readable.
Does not: read. Used only where the kernel stamps arrivals, so that reading up to `COARSE_S` later moves no time.

1. After a quiet time the first readable descriptor is served at once.
2. While they follow each other faster than that, they are served together, every `COARSE_S`, but every `FINE_S` for
   `HOLD_S` after a read that held more than one output (`refine`). So services that send a stream's tokens closer
   together than `COARSE_S` are read finely, and others lose the gap between two tokens once in `HOLD_S` at most.
   Where the outputs of a stream are known to be further apart (`saw_gap`), the turns are too, up to `WIDE_S`.
3. When the loop is awake for something else, what is readable is served then (`serve_early`) and the turn is put off.
4. A turn serves `AT_ONCE` descriptors, then the loop looks at its timers and other sockets, then the turn goes on: an
   arrival that is due, or the first output of another answer, does not wait for hundreds of reads.
5. A gatherer made with `fine=True` never turns wider: for descriptors whose next read must not hold two outputs.
Reason: a wake-up of a sleeping process costs 20-40 microseconds of CPU on a virtual machine, five times the read of
an event; gathering took a promptly read stream of 28,000 events per second from 15 to 9 microseconds an event. Network
cards and their drivers do the same (interrupt moderation).
"""
from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

from gevent.monkey import get_original

# Half of the smallest gap that the burst statistic tells apart (1 ms) would be 0.5 ms; two events of one stream that
# are gathered are under 1 ms apart, which is what the statistic says about them.
FINE_S = 0.001
# Longer saves little more (250 wake-ups a second are 1 % of a core) and would show in the turn-around of a user.
COARSE_S = 0.004
# At most half of a gap: two outputs of a stream must not fall into one turn, even when the turn is late.
WIDE_S, GAP_SHARE = 0.010, 0.5
# A smaller gap counts at once, a larger one slowly: after a hundred streams it has its full weight.
GAP_WEIGHT = 0.02
HOLD_S = 2.0
# About a millisecond of reads.
AT_ONCE = 32
LATE_STEPS = 1.5
READ = 1


class Watch:
    """One descriptor; `start` and `stop` as a gevent io watcher has them."""

    __slots__ = ("_fd", "_gatherer", "_home")

    def __init__(self, gatherer: Gatherer, fd: int) -> None:
        self._home = self._gatherer = gatherer
        self._fd = fd

    def start(self, callback: Callable[[], None]) -> None:
        """Call back while the descriptor is readable."""
        self._move(self._home, callback)

    def start_in(self, gatherer: Gatherer, callback: Callable[[], None]) -> None:
        """The same, served with the descriptors of another gatherer until the next `start`."""
        self._move(gatherer, callback)

    def _move(self, gatherer: Gatherer, callback: Callable[[], None]) -> None:
        if gatherer is not self._gatherer:
            self._gatherer.remove(self._fd)
            self._gatherer = gatherer
        gatherer.add(self._fd, callback)

    def stop(self) -> None:
        """Call back no more."""
        self._gatherer.remove(self._fd)

    def close(self) -> None:
        """Nothing is held."""


class Gatherer:
    """All watched descriptors of a transport in one epoll set, which the loop watches as one descriptor."""

    def __init__(self, hub: Any, *, fine: bool = False) -> None:
        # Locust's patching takes `epoll` out of `select`; ours never blocks, so the original is right.
        self._epoll = get_original("select", "epoll")()
        self._hub = hub
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._watcher = hub.loop.io(self._epoll.fileno(), READ)
        self._fine = hub.loop.timer(FINE_S, FINE_S)
        self._coarse = hub.loop.timer(COARSE_S, COARSE_S)
        self._coarse_s = COARSE_S
        self._gap_s = 0.0
        self._timer = self._fine
        self._step_s = FINE_S
        self._fine_until_s = math.inf if fine else time.monotonic() + HOLD_S
        # No time: the rest of a turn goes on after what else is due.
        self._more = hub.loop.timer(0.0)
        self._watching = False
        self._gathering = self._early = False
        self._last_s = self._served_s = 0.0
        self.punctual = False  # this turn; if not, several outputs in a read are our own doing

    def watch(self, fd: int) -> Watch:
        """A watch of the descriptor, not started."""
        return Watch(self, fd)

    def add(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back while the descriptor is readable."""
        if fd not in self._callbacks:
            self._epoll.register(fd, READ)
        self._callbacks[fd] = callback
        if not self._watching and not self._gathering:
            self._watching = True
            self._watcher.start(self._readable)

    def remove(self, fd: int) -> None:
        """Forget the descriptor; must be called before it is closed."""
        if self._callbacks.pop(fd, None) is None:
            return
        self._epoll.unregister(fd)
        if not self._callbacks:
            self._rest()

    def _rest(self) -> None:
        if self._watching:
            self._watching = False
            self._watcher.stop()
        if self._gathering:
            self._gathering = False
            self._timer.stop()
        self._more.stop()

    def refine(self) -> None:
        """Outputs of one stream were read together: look more often for a while."""
        self._fine_until_s = max(self._fine_until_s, time.monotonic() + HOLD_S)
        if self._timer is not self._fine:
            self._turn_to(self._fine, FINE_S)

    def saw_gap(self, gap_s: float) -> None:
        """The outputs of one answer came this far apart, in the mean."""
        known_s = self._gap_s
        self._gap_s = known_s = min(gap_s, known_s + GAP_WEIGHT * (gap_s - known_s))
        coarse_s = min(WIDE_S, max(COARSE_S, GAP_SHARE * known_s))
        if not -0.0005 < coarse_s - self._coarse_s < 0.0005:
            self._coarse_s = coarse_s
            old, self._coarse = self._coarse, self._hub.loop.timer(coarse_s, coarse_s)
            if self._timer is old:
                self._turn_to(self._coarse, coarse_s)
            old.close()

    def serve_early(self) -> None:
        """The loop is awake: serve what is readable before it sleeps, instead of in a turn of its own."""
        if self._gathering and not self._early:
            self._early = True
            self._hub.loop.run_callback(self._serve_now)

    def _serve_now(self) -> None:
        self._early = False
        if self._gathering and self._serve():
            self._last_s = time.monotonic()
            if self._gathering:
                self._timer.again(self._tick)  # from now on

    def _turn_to(self, timer: Any, step_s: float) -> None:
        self._timer.stop()
        self._timer, self._step_s = timer, step_s
        if self._gathering:
            timer.again(self._tick)

    def _readable(self) -> None:
        """Something came while we waited for it: serve it, and gather if it was soon after the last."""
        now_s = time.monotonic()
        soon = now_s - self._last_s < self._step_s
        self._last_s = now_s
        if self._serve() and soon and self._callbacks:
            self._watching = False
            self._watcher.stop()
            self._gathering = True
            self._timer.again(self._tick)

    def _tick(self) -> None:
        """Serve what was gathered; after an empty turn wait for the next one directly."""
        if self._serve():
            self._last_s = now_s = time.monotonic()
            if self._timer is self._fine and now_s > self._fine_until_s:
                self._turn_to(self._coarse, self._coarse_s)
        elif self._gathering:
            self._gathering = False
            self._timer.stop()
            self._watching = True
            self._watcher.start(self._readable)

    def _serve(self) -> int:
        """Begin a turn, unless the one before is still going on; returns how many descriptors it found."""
        if self._more.active:
            return AT_ONCE
        now_s = time.monotonic()
        self.punctual = self._gathering and now_s - self._served_s < LATE_STEPS * self._step_s
        self._served_s = now_s
        return self._serve_some()

    def _serve_some(self) -> int:
        """Call back for up to `AT_ONCE` readable descriptors; when there are more, go on after the loop's look."""
        # The kernel puts a descriptor that it has told of at the end of its list, so each has its turn.
        ready = self._epoll.poll(0, AT_ONCE)
        for fd, _ in ready:
            callback = self._callbacks.get(fd)
            if callback is not None:
                try:
                    callback()
                except Exception:
                    self._hub.handle_error(callback, *sys.exc_info())
        if len(ready) == AT_ONCE and self._callbacks:
            self._more.start(self._serve_some, update=True)
        return len(ready)

    def close(self) -> None:
        """Stop and free."""
        self._rest()
        self._callbacks.clear()
        self._watcher.close()
        for timer in (self._fine, self._coarse, self._more):
            timer.close()
        self._epoll.close()
