"""Ties a worker's monotonic clock to the master's.

Input: round trips of a message (worker's send and receive times, master's
time in between). Output: the offset to add to this process's monotonic clock,
and a bound on its error. Does not: send messages.

1. Processes of one boot and one time namespace share the clock: offset 0, bound 0.
2. Otherwise the round trip with the shortest time decides (NTP's rule): the
   error is at most half of that trip.
3. Clocks drift apart: an offset is measured anew before each stage, holds for all
   of it, and its bound grows with the stage's length.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

# Two crystals of 50 parts per million each, in opposite directions.
DRIFT = 100e-6


def clock_id() -> str:
    """What two processes must share for their monotonic clocks to be one: boot and time namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/time")
    except OSError:
        return ""
    return f"{boot}/{space}"


@dataclass
class ClockOffset:
    """master_monotonic = worker_monotonic + offset_s, within bound_s."""

    offset_s: float = 0.0
    bound_s: float = float("inf")
    shared: bool = False
    trips: int = 0

    def share(self) -> None:
        """Both processes read the same clock."""
        self.offset_s, self.bound_s, self.shared = 0.0, 0.0, True

    def add_trip(self, sent_s: float, master_s: float, received_s: float) -> None:
        """One round trip: worker's clock at send and receipt, master's in between."""
        self.trips += 1
        if self.shared:
            return
        bound = (received_s - sent_s) / 2
        if 0 <= bound < self.bound_s:
            self.bound_s = bound
            self.offset_s = master_s - (sent_s + received_s) / 2

    def bound_after(self, seconds: float) -> float:
        """The bound of the error after so many seconds of drift."""
        return self.bound_s if self.shared else self.bound_s + DRIFT * seconds


def now_s() -> float:
    """This process's monotonic clock, seconds."""
    return time.monotonic()
