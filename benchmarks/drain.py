"""A closed-loop client that costs little: keeps N streams open and counts their chunks without parsing them.

Input: address, request bytes, concurrency, seconds. Output: `Drained`: chunks, answers, seconds, own CPU seconds.
Does not: measure latency; it only loads a server, from the same thread as the benchmark.
"""
from __future__ import annotations

import contextlib
import select
import socket
import time
from dataclasses import dataclass

END = b"\r\n0\r\n\r\n"  # of a chunked answer; a header block may end in 0 CRLF CRLF too


@dataclass(frozen=True)
class Drained:
    """What arrived."""

    chunks: int
    answers: int
    seconds: float
    cpu_s: float


def drain(host: str, port: int, request: bytes, streams: int, seconds: float, mark: bytes = b"data: {") -> Drained:
    """Keep `streams` requests open for `seconds`, counting `mark` in what comes back."""
    poller = select.epoll()
    sockets: dict[int, socket.socket] = {}
    buffer = bytearray(262_144)
    view = memoryview(buffer)
    chunks = answers = 0
    cpu_s = time.process_time()
    start_s = time.monotonic()
    try:
        for _ in range(streams):
            connection = socket.create_connection((host, port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(request)
            connection.setblocking(False)
            sockets[connection.fileno()] = connection
            poller.register(connection, select.EPOLLIN)
        until_s = start_s + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            for descriptor, _ in poller.poll(left_s):
                connection = sockets[descriptor]
                with contextlib.suppress(BlockingIOError):
                    size = connection.recv_into(buffer)
                    if size == 0:
                        raise ConnectionError("the server closed a stream of the benchmark")
                    chunks += buffer.count(mark, 0, size)
                    if view[max(0, size - len(END)): size] == END:
                        answers += 1
                        connection.sendall(request)
    finally:
        for connection in sockets.values():
            connection.close()
        poller.close()
    return Drained(chunks, answers, time.monotonic() - start_s, time.process_time() - cpu_s)
