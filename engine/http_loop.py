"""An asyncio event loop whose timers are exact to about 0.1 ms, and the process settings that keep it so.

Input: nothing. Output: `new_event_loop()`, `tune_process()`.
Does not: know HTTP or the scheduler.

Why: asyncio rounds a timer's wait up to a whole millisecond, because `epoll_wait` counts in milliseconds. A step
clock of 8 ms would be late by 0.5 ms in the mean. `select()` counts in microseconds and can wait for the epoll
descriptor itself, so the wait costs one more system call and no spinning.
"""
from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import select
import selectors

if hasattr(selectors, "EpollSelector"):

    class PreciseSelector(selectors.EpollSelector):
        """An epoll selector that waits with microsecond resolution."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0:
                # select() cannot watch descriptors above 1023; this one is opened first, so it is small.
                select.select((self.fileno(),), (), (), timeout)
                timeout = 0
            return super().select(timeout)

else:  # kqueue and others wait exactly already
    PreciseSelector = selectors.DefaultSelector  # type: ignore[misc, assignment]


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A selector event loop with exact timers."""
    return asyncio.SelectorEventLoop(PreciseSelector())


def tune_process() -> None:
    """Raise the limit of open files and keep the garbage collector out of the step loop.

    Nothing on the token path makes reference cycles, so collections find nothing: the first generation is made
    large, and what exists at start is moved out of the collector's sight.
    """
    # A client that left is written to until the loop reports it, which asyncio warns of line by line; it is recorded
    # as aborted all the same.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
