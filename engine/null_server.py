"""A server that streams known tokens at known times and costs as little as Python can.

    python -m engine.null_server --port 0 --ttft-ms 50 --gap-ms 10

Input: POST with a JSON body; `max_tokens` is read from it. Output: an event stream, one write per event.
It prints `READY http://127.0.0.1:PORT`. `GET /records` gives {request id: [received_s, first_s, last_s, tokens]} and
`GET /counts` gives {"bucket_s": 0.1, "events": {bucket: events written}}, all on CLOCK_MONOTONIC; `DELETE /records`
forgets them.
Does not: compute anything, check a key, or survive hostile clients. It is what the client itself is measured
against: `bench calibrate-client`, and the client's tests and benchmarks.

1. Token k of a stream is due at received + ttft + k * gap, whatever happened to the tokens before it.
2. first_s and last_s are taken just before the write of the first and of the last token.
3. The finish reason, usage and [DONE] go out in a write of their own after the last token, as services do.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import socket
import sys
import time
from collections import deque

EVENT = ('data: {"id":"chatcmpl-0000000000000000","object":"chat.completion.chunk","created":1700000000,'
         '"model":"null","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,'
         '"finish_reason":null}]}\n\n')
FIRST = EVENT.replace('{"content":" word"}', '{"role":"assistant","content":""}')
HEAD = (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n")
MAX_TOKENS = re.compile(rb'"max_tokens":\s*(\d+)')
LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.I)
REQUEST_ID = re.compile(rb"\r\nx-request-id:\s*([^\r]*)", re.I)
BUCKET_S = 0.1
RECEIVE_BYTES = 262144


def chunk(text: str) -> bytes:
    """One HTTP chunk."""
    data = text.encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def tail(tokens: int) -> bytes:
    """What follows the last token: finish reason, usage, [DONE], end of the body."""
    finish = EVENT.replace('{"content":" word"}', "{}").replace('"finish_reason":null', '"finish_reason":"length"')
    usage = ('data: {"id":"chatcmpl-0000000000000000","object":"chat.completion.chunk","created":1700000000,'
             f'"model":"null","choices":[],"usage":{{"prompt_tokens":10,"completion_tokens":{tokens},'
             f'"total_tokens":{tokens + 10}}}}}\n\n')
    return chunk(finish + usage + "data: [DONE]\n\n") + b"0\r\n\r\n"


class Peer:
    """One connection and the stream on it."""

    __slots__ = ("left", "outgoing", "received", "record", "sock", "tokens")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = b""
        self.outgoing = b""
        self.left = 0
        self.tokens = 0
        self.record: list[float] = []


class NullServer:
    """One epoll loop; streams wait in queues that are sorted because all gaps are equal."""

    def __init__(self, host: str, port: int, ttft_s: float, gap_s: float, preface: bool) -> None:
        self._listener = socket.create_server((host, port), backlog=4096)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._ttft_s, self._gap_s = ttft_s, gap_s
        self._head = HEAD + (chunk(FIRST) if preface else b"")
        self._event = chunk(EVENT)
        self._tails: dict[int, bytes] = {}
        self._poll = select.epoll()
        self._poll.register(self._listener.fileno(), select.EPOLLIN)
        self._peers: dict[int, Peer] = {}
        self._first: deque[tuple[float, Peer]] = deque()
        self._next: deque[tuple[float, Peer]] = deque()
        self._records: dict[str, list[float]] = {}
        self._buckets: dict[int, int] = {}
        self.running = True

    def run(self, parent_pid: int | None) -> None:
        """Serve until told to stop, or until the parent is gone."""
        look_at = 0.0
        while self.running:
            now = time.monotonic()
            if parent_pid is not None and now > look_at:
                look_at = now + 1.0
                if not _alive(parent_pid):
                    return
            self._write_due(now)
            due = min(self._first[0][0] if self._first else now + 0.5, self._next[0][0] if self._next else now + 0.5)
            # epoll_wait counts in whole milliseconds and would send bunches; select waits for microseconds.
            wait_s = due - time.monotonic()
            if wait_s > 0.0 and not select.select([self._poll], [], [], wait_s)[0]:
                continue
            for fd, mask in self._poll.poll(0.0, 256):
                if fd == self._listener.fileno():
                    self._accept()
                else:
                    self._ready(fd, mask)

    def _write_due(self, now: float) -> None:
        first, following, gap_s, event = self._first, self._next, self._gap_s, self._event
        written = 0
        while first and first[0][0] <= now:
            due, peer = first.popleft()
            peer.record[1] = time.monotonic()
            written += 1
            self._token(peer, due, event)
        while following and following[0][0] <= now:
            due, peer = following.popleft()
            if peer.left > 1 and not peer.outgoing:
                # The common case, kept short.
                try:
                    sent = peer.sock.send(event)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    self._drop(peer)
                    continue
                if sent != len(event):
                    self._later(peer, event[sent:])
                peer.left -= 1
                following.append((due + gap_s, peer))
            else:
                self._token(peer, due, event)
            written += 1
        if written:
            bucket = int(now / BUCKET_S)
            self._buckets[bucket] = self._buckets.get(bucket, 0) + written

    def _token(self, peer: Peer, due: float, event: bytes) -> None:
        """Write one token with all care; after the last one the tail."""
        if peer.left == 1:
            peer.record[2] = time.monotonic()
        peer.left -= 1
        self._send(peer, event)
        if peer.left > 0:
            self._next.append((due + self._gap_s, peer))
            return
        if peer.tokens not in self._tails:
            self._tails[peer.tokens] = tail(peer.tokens)
        self._send(peer, self._tails[peer.tokens])

    def _send(self, peer: Peer, data: bytes) -> None:
        if peer.outgoing:
            peer.outgoing += data
            return
        try:
            sent = peer.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(peer)
            return
        if sent != len(data):
            self._later(peer, data[sent:])

    def _later(self, peer: Peer, data: bytes) -> None:
        peer.outgoing = data
        self._poll.modify(peer.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _drop(self, peer: Peer) -> None:
        fd = peer.sock.fileno()
        if fd >= 0:
            self._peers.pop(fd, None)
            self._poll.unregister(fd)
            peer.sock.close()
        peer.left = 0

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[sock.fileno()] = Peer(sock)
            self._poll.register(sock.fileno(), select.EPOLLIN)

    def _ready(self, fd: int, mask: int) -> None:
        peer = self._peers.get(fd)
        if peer is None:
            return
        if mask & select.EPOLLOUT and peer.outgoing:
            data, peer.outgoing = peer.outgoing, b""
            self._poll.modify(fd, select.EPOLLIN)
            self._send(peer, data)
        if mask & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            try:
                data = peer.sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._drop(peer)
                return
            peer.received += data
            self._requests(peer)

    def _requests(self, peer: Peer) -> None:
        end = peer.received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = peer.received[: end + 2]
        found = LENGTH.search(head)
        length = int(found[1]) if found else 0
        if len(peer.received) < end + 4 + length:
            return
        body = peer.received[end + 4: end + 4 + length]
        peer.received = peer.received[end + 4 + length:]
        if head.startswith(b"POST "):
            self._start(peer, head, body)
        else:
            self._answer(peer, head)

    def _start(self, peer: Peer, head: bytes, body: bytes) -> None:
        received = time.monotonic()
        tokens, request_id = MAX_TOKENS.search(body), REQUEST_ID.search(head)
        peer.tokens = peer.left = max(1, int(tokens[1])) if tokens else 16
        peer.record = [received, 0.0, 0.0, peer.tokens]
        self._records[request_id[1].decode("latin-1") if request_id else ""] = peer.record
        self._send(peer, self._head)
        self._first.append((received + self._ttft_s, peer))

    def _answer(self, peer: Peer, head: bytes) -> None:
        if head.startswith(b"GET /counts"):
            said = json.dumps({"bucket_s": BUCKET_S, "events": self._buckets})
        else:
            said = json.dumps(self._records)
            if head.startswith(b"DELETE "):
                self._records = {}
                self._buckets = {}
        data = said.encode()
        self._send(peer, b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                   % (len(data), data))

    def write_records(self, path: str) -> None:
        """Write the records to a file."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self._records, file)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="an SSE server with known send times")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--gap-ms", type=float, default=10.0)
    parser.add_argument("--no-preface", action="store_true", help="no role-only event with the header block")
    parser.add_argument("--records", default=None, help="write the records to this file at the end")
    parser.add_argument("--parent-pid", type=int, default=None, help="end when this process is gone")
    args = parser.parse_args(argv)
    server = NullServer(args.host, args.port, args.ttft_ms / 1e3, args.gap_ms / 1e3, not args.no_preface)

    def stop(*_: object) -> None:
        server.running = False

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    print(f"READY http://{args.host}:{server.port}", flush=True)
    server.run(args.parent_pid)
    if args.records:
        server.write_records(args.records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
