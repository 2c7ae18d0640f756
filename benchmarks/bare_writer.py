"""The floor for a token server: an asyncio process that writes one constant frame per connection and period.

    python -m benchmarks.bare_writer PERIOD_S FRAME_BYTES

Input: a period and a frame size. Output: `READY PORT` on standard output; after SIGTERM one JSON object with frames,
seconds and CPU seconds. It reads no request, has no scheduler, no JSON, no records; its timers are exact (the
engine's event loop), and it writes to every connection that has sent something.
Does not: end an answer; the client counts frames.
"""
from __future__ import annotations

import asyncio
import json
import signal
import sys
import time

from engine.http_loop import new_event_loop, tune_process


class Sink(asyncio.Protocol):
    """One connection that wants frames."""

    def __init__(self, writers: set) -> None:
        self._writers = writers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.write = transport.write  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._writers.add(self.write)

    def connection_lost(self, exc: Exception | None) -> None:
        self._writers.discard(self.write)


async def serve(period_s: float, frame: bytes) -> None:
    """Write until SIGTERM."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    writers: set = set()
    server = await loop.create_server(lambda: Sink(writers), "127.0.0.1", 0, backlog=1024)
    tune_process()
    print(f"READY {server.sockets[0].getsockname()[1]}", flush=True)
    frames, due_s = 0, loop.time()
    start_s, cpu_s = time.monotonic(), time.process_time()

    def step() -> None:
        nonlocal frames, due_s
        for write in writers:
            write(frame)
        frames += len(writers)
        due_s += period_s
        loop.call_at(due_s, step)

    step()
    await stop.wait()
    print(json.dumps({"frames": frames, "seconds": time.monotonic() - start_s,
                      "cpu_s": time.process_time() - cpu_s}), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve(float(sys.argv[1]), b"x" * int(sys.argv[2])))
