"""The gevent transport: sends requests and reads streams of answers for one worker process.

Input: an endpoint, `TransportOptions`, an API key; per request a body and a callback.
Output: one `Outcome` per request through `on_done`; `TransportStats`.
Does not: decide when to send, build bodies, follow redirects, or judge.

1. `start` never waits; `send` blocks its greenlet only while it connects and writes; answers are read in callbacks of
   the hub.
2. Lazy reading: after its first output a stream is left alone and drained every `drain_interval_s`, together with
   the others of its slot. The time of a drained read is the kernel's stamp of its newest segment, so the end of an
   answer is exact; what came before in the same read has no time of its own, and its last output may be older than
   the stamp by at most the drain interval (in practice by the gap between the last token and the answer's end).
3. One timer, the beat, drains, looks at the time limits and measures the loop's lag; there is no timer per stream.
4. Made and used in one process and thread, after any fork.
Wire-level reasons: docs/metrics.md.
"""
from __future__ import annotations

import ssl
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import gevent
from gevent.event import AsyncResult

from bench.client.answer import AnswerOptions, AnswerReader
from bench.client.dialing import READ, Dialer, Gate, Proxy, Stopped
from bench.client.endpoint import Endpoint
from bench.client.errors import ChannelError
from bench.client.gather import Gatherer
from bench.client.kernel_time import KernelClock, StampKeeper
from bench.client.loop_lag import LoopLag
from bench.client.outcome import Outcome
from bench.client.pool import IdlePool
from bench.client.request import KEY_FIELDS, PATHS, asked_model, dialect_fields
from bench.client.sockets import Connection, tls_context
from bench.client.stream import Stream

# How exact the time limits are.
TICK_S = 0.05
# Longest time between two looks at the limits of one stream.
LOOK_S = 2.0
# A drain interval has this many slots, one for each beat. A wake-up costs more than the drain of a stream (30
# microseconds when its callback does nothing, five times that with cold caches), so there are few.
DRAIN_SLOTS = 4
# After so many streams (about a millisecond) the drain lets the loop look at its timers and sockets.
DRAIN_AT_ONCE = 32
# The beat without lazy reading.
BEAT_S = 0.05
# How far back `in_flight_at` can look, beyond the time an answer may wait for its drain.
HISTORY_S = 2.0
# A connection is opened ahead at most once in this time after one could not be opened.
AHEAD_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Settings of the transport; times in seconds."""

    read: str = "auto"
    drain_interval_s: float = 0.2
    connect_timeout_s: float = 10.0
    first_token_timeout_s: float = 60.0
    idle_timeout_s: float = 30.0
    total_timeout_s: float = 600.0
    idle_reuse_s: float = 4.0
    max_idle: int = 20_000
    dns_cache_s: float = 30.0
    receive_buffer_bytes: int | None = 262_144
    proxy: str | None = None
    ca_file: str | None = None
    tls_verify: bool = True
    extra_headers: tuple[tuple[str, str], ...] = ()
    path: str = PATHS["chat"]
    auth: str = "auto"  # see `request.key_field`
    answer: AnswerOptions | None = None


@dataclass(slots=True)
class Counts:
    """What the transport has done since it was made."""

    sent: int = 0
    done: int = 0
    opened: int = 0
    reused: int = 0
    retried: int = 0
    drains: int = 0


@dataclass(frozen=True, slots=True)
class TransportStats:
    """Counters since the start; loop lag and drain time since the last reset."""

    in_flight: int
    lazy_streams: int
    idle_connections: int
    sent: int
    done: int
    opened: int
    reused: int
    retried: int
    found_dead: int
    clock_steps: int
    read_mode: str
    clock: str
    drains: int
    drain_max_s: float
    loop_lag_p50_s: float | None
    loop_lag_p99_s: float | None
    loop_lag_max_s: float

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


class Transport:
    """Connections to one service and the streams on them."""

    def __init__(self, endpoint: Endpoint, options: TransportOptions | None = None, api_key: str | None = None) -> None:
        self.hub = gevent.get_hub()
        self.endpoint = endpoint
        self.options = options = options or TransportOptions()
        proxy, context = _proxy(options.proxy), _context(endpoint, options)
        self._keeper = StampKeeper()
        self.kernel_stamps = self._keeper.working
        # Answers wait for their first output apart from those that go on: what is read late with its successor has no
        # time of its own, and the first output is the one whose time counts.
        self._firsts = Gatherer(self.hub, fine=True) if self.kernel_stamps else None
        self._gatherer = Gatherer(self.hub) if self.kernel_stamps else None
        self._dialer = Dialer(
            self.hub, endpoint.host, endpoint.port, context=context, proxy=proxy, watch=self._watch_fd,
            receive_buffer_bytes=options.receive_buffer_bytes, dns_cache_s=options.dns_cache_s)
        self._absolute = proxy is not None and endpoint.scheme == "http"
        self._fields = _fields(endpoint, options, api_key)
        if self._absolute and proxy is not None:
            self._fields += proxy.authorization
        self.counts = Counts()
        self.clock = KernelClock()
        self.pool = IdlePool(options.idle_reuse_s, options.max_idle)
        self.lazy_reading = options.read != "prompt" and self.kernel_stamps
        # The limits of a stream are looked at this often, besides when one is due.
        self.look_s = min(LOOK_S, options.connect_timeout_s, options.first_token_timeout_s, options.idle_timeout_s,
                          options.total_timeout_s)
        self._streams: dict[Stream, None] = {}
        self._starts_s: deque[float] = deque()
        self._ends_s: deque[float] = deque()
        self._buckets: dict[int, set[Stream]] = {}
        self._tick_at = int(time.monotonic() / TICK_S)
        self._slots: list[dict[Stream, None]] = [{} for _ in range(DRAIN_SLOTS)]
        self._slot = self._next_slot = self._lazy = 0
        self._undrained: list[Stream] = []
        self._drain_max_s = 0.0
        self._slot_s = options.drain_interval_s / DRAIN_SLOTS
        self.lag = LoopLag(self.hub, min(self._slot_s, BEAT_S) if self.lazy_reading else BEAT_S, self._beat)
        # No time: the rest of a drain goes on after what else is due.
        self._rest_timer = self.hub.loop.timer(0.0)
        self._ahead = False
        self._ahead_from_s = 0.0
        self._closed = False
        self._secrets = (api_key,) if api_key else ()
        self._answer = self._with_secrets(options.answer or AnswerOptions())

    @property
    def in_flight(self) -> int:
        """Streams between the call of `send` and their `on_done`; a lazy one counts until it is drained, so for half
        a drain interval too long on average."""
        return len(self._streams)

    @property
    def settle_s(self) -> float:
        """After this time an answer that was complete has been drained, unless our loop is later than that itself."""
        return self.options.drain_interval_s + self._slot_s if self.lazy_reading else self._slot_s

    def in_flight_at(self, at_s: float) -> int:
        """Streams that had been given to `send` and whose answer had not ended at `at_s` (monotonic, past).

        By the arrival of the answer's end, so exact without draining anything, once `settle_s` has passed since then;
        asked for earlier, answers that wait in their sockets count. Looks back `HISTORY_S + settle_s`.
        """
        began_since = 0
        for start_s in reversed(self._starts_s):
            if start_s <= at_s:
                break
            began_since += 1
        ended_since = sum(1 for end_s in self._ends_s if end_s > at_s)
        return len(self._streams) - began_since + ended_since

    def prepare(self, body: bytes, *, request_id: str, prompt_read: bool = False, pinned_tokens: int | None = None,
                on_done: Callable[[Outcome], None], method: str = "POST", path: str | None = None,
                answer: AnswerOptions | None = None) -> Stream:
        """A request ready for `start`; nothing is sent or counted yet.

        on_done: called exactly once after `start`, in the hub or in a greenlet; must be cheap and must not block.
        prompt_read: read this answer promptly to its end (the sampled share), whatever `options.read` says.
        """
        request = self.request(body, request_id=request_id, method=method, path=path)
        how = self._answer if answer is None else self._with_secrets(answer)
        model = asked_model(body)

        def reader() -> AnswerReader:
            return AnswerReader(how, pinned_tokens=pinned_tokens, model=model)

        return Stream(self, request, reader, request_id=request_id, on_done=on_done,
                      prompt_read=prompt_read or not self.lazy_reading)

    def start(self, stream: Stream) -> None:
        """Send a prepared request. Returns at once: what would wait goes on in a greenlet."""
        if self._admit(stream):
            self._guarded(stream.start)
            self._serve_early()

    def send(self, body: bytes, **request: Any) -> Stream:
        """Send one request from this greenlet (arguments of `prepare`); returns when it is written or has failed."""
        stream = self.prepare(body, **request)
        if self._admit(stream):
            stream.run()
        return stream

    def _admit(self, stream: Stream) -> bool:
        """The stream is in flight from now on; False when it has failed at once."""
        now_s = time.monotonic()
        stream.begin(now_s)
        self._streams[stream] = None
        self.counts.sent += 1
        _remember(self._starts_s, now_s, now_s - HISTORY_S - self.settle_s)
        if self._closed:
            self._guarded(stream.fail, "CL-STOP", "the transport is closed")
            return False
        self._watch(stream, now_s)
        return True

    def ask(self, body: bytes, *, request_id: str, **more: Any) -> Outcome:
        """Send one request, like `send`, and wait for its outcome on this greenlet."""
        done: AsyncResult = AsyncResult()
        self.send(body, request_id=request_id, on_done=done.set, **more)
        return done.get()

    def request(self, body: bytes, *, request_id: str, method: str = "POST", path: str | None = None) -> bytes:
        """The bytes of one request."""
        path = self.options.path if path is None else path
        target = self.endpoint.url(path) if self._absolute else self.endpoint.target(path)
        return b"".join((f"{method} {target} HTTP/1.1\r\n".encode("ascii"), self._fields,
                         f"x-request-id: {request_id}\r\nContent-Length: {len(body)}\r\n\r\n".encode("ascii"), body))

    def cancel_all(self, code: str) -> None:
        """End every stream with this code and close its socket."""
        for stream in list(self._streams):
            self._guarded(stream.cancel, code)

    def prewarm(self, n: int, timeout_s: float | None = None) -> int:
        """Open up to n connections into the pool; returns how many opened. They age like all kept ones."""
        limit_s = self.options.connect_timeout_s if timeout_s is None else timeout_s
        opened = 0

        def one() -> None:
            nonlocal opened
            if self._open_idle(limit_s, uses=1):
                opened += 1

        gevent.joinall([gevent.spawn(one) for _ in range(n)])
        return opened

    def open_ahead(self, due_s: float) -> None:
        """Have a connection at hand for a request that is due at `due_s`; returns at once.

        Opens one into the pool when none waits there, one at a time. A connection that cannot be opened is no event:
        the request tries again when it is due, and tells.
        """
        now_s = time.monotonic()
        if not self._ahead and now_s >= self._ahead_from_s and self.pool.keeps and not self.pool.has_for(due_s):
            self._ahead = True
            gevent.spawn(self._open_one_ahead)

    def _open_one_ahead(self) -> None:
        try:
            if not self._open_idle(self.options.connect_timeout_s, uses=0):
                self._ahead_from_s = time.monotonic() + AHEAD_PAUSE_S
        finally:
            self._ahead = False

    def _open_idle(self, limit_s: float, *, uses: int) -> bool:
        """Open a connection into the pool, from a greenlet; whether that went well."""
        gate = Gate(self.hub)
        timer = gevent.spawn_later(limit_s, gate.stop, Stopped("connect_timeout"))
        try:
            connection = self._dialer.open(gate)
        except Stopped:
            return False
        finally:
            timer.kill(block=False)
        self.counts.opened += 1
        connection.uses = uses
        self.pool.give(connection, time.monotonic())
        return True

    def stats(self, *, reset: bool = False) -> TransportStats:
        """What has happened; `reset` starts loop lag and drain time anew (once per stage)."""
        counts, lag = self.counts, self.lag.histogram
        stats = TransportStats(
            in_flight=len(self._streams), lazy_streams=self._lazy, idle_connections=len(self.pool),
            sent=counts.sent, done=counts.done, opened=counts.opened, reused=counts.reused, retried=counts.retried,
            found_dead=self.pool.found_dead, clock_steps=self.clock.steps,
            read_mode="lazy" if self.lazy_reading else "prompt", clock="kernel" if self.kernel_stamps else "user",
            drains=counts.drains, drain_max_s=self._drain_max_s, loop_lag_p50_s=lag.percentile_s(0.5),
            loop_lag_p99_s=lag.percentile_s(0.99), loop_lag_max_s=lag.max_s)
        if reset:
            lag.reset()
            self._drain_max_s = 0.0
        return stats

    def close(self) -> None:
        """End what is open (`CL-STOP` or `CL-CANCEL`), close the idle connections, stop the timers."""
        if self._closed:
            return
        self._closed = True
        self.cancel_all("CL-STOP")
        self.pool.close()
        self.lag.close()
        self._keeper.close()
        for gatherer in filter(None, (self._firsts, self._gatherer)):
            gatherer.close()
        self._rest_timer.stop()
        self._rest_timer.close()

    def _with_secrets(self, answer: AnswerOptions) -> AnswerOptions:
        return replace(answer, secrets=(*answer.secrets, *self._secrets)) if self._secrets else answer

    # For the streams.

    def take(self) -> Connection | None:
        """A connection that waits in the pool, None when there is none."""
        connection = self.pool.take(time.monotonic())
        if connection is not None and connection.uses:
            self.counts.reused += 1
        return connection

    def connect(self, gate: Gate, *, fresh: bool) -> Connection:
        """A kept connection, or a new one; raises Stopped."""
        connection = None if fresh else self.take()
        if connection is not None:
            return connection
        connection = self._dialer.open(gate)
        self.counts.opened += 1
        return connection

    def _watch_fd(self, fd: int) -> Any:
        """A watcher of a connection: gathered where stamps give the time, at once elsewhere."""
        return self.hub.loop.io(fd, READ) if self._firsts is None else self._firsts.watch(fd)

    def watch_on(self, connection: Connection, callback: Callable[[], None]) -> None:
        """Read a promptly read answer on, after its first output."""
        if self._gatherer is None:
            connection.watcher.start(callback)
        else:
            connection.watcher.start_in(self._gatherer, callback)

    def _serve_early(self) -> None:
        for gatherer in (self._firsts, self._gatherer):
            if gatherer is not None:
                gatherer.serve_early()

    def refine(self) -> None:
        """A promptly read stream had several outputs in one read."""
        if self._gatherer is not None and self._gatherer.punctual:
            self._gatherer.refine()

    def forget(self, stream: Stream) -> None:
        """The stream is done; its outcome says when its answer ended."""
        self.counts.done += 1
        now_s = time.monotonic()
        end_s = None if stream.outcome is None else stream.outcome.done_at
        _remember(self._ends_s, now_s if end_s is None else end_s, now_s - HISTORY_S - self.settle_s)
        if self._gatherer is not None and stream.outcome is not None:
            chunks, first_s, last_s = stream.outcome.chunks, stream.outcome.first_token_at, stream.outcome.last_token_at
            if chunks and chunks > 1 and first_s is not None and last_s is not None:
                self._gatherer.saw_gap((last_s - first_s) / (chunks - 1))
        self._streams.pop(stream, None)
        bucket = self._buckets.get(stream.bucket)
        if bucket is not None:
            bucket.discard(stream)
        if not self._streams:
            self._buckets.clear()

    def _beat(self) -> None:
        """About twenty times a second: all that has to be done again and again."""
        now_s = time.monotonic()
        self.pool.expire(now_s)
        if self._streams:
            self._check_limits(now_s)
        if self._lazy:
            self._drain()
        self._serve_early()

    # Time limits: streams wait in buckets of one tick; a bucket that is due is looked at once.

    def _watch(self, stream: Stream, now_s: float) -> None:
        if not self._buckets:
            self._tick_at = int(now_s / TICK_S)
        self._put(stream, stream.check(now_s))

    def _put(self, stream: Stream, look_s: float | None) -> None:
        if look_s is None:
            return
        stream.bucket = max(int(look_s / TICK_S) + 1, self._tick_at + 1)
        self._buckets.setdefault(stream.bucket, set()).add(stream)

    def _check_limits(self, now_s: float) -> None:
        now_tick = int(now_s / TICK_S)
        while self._tick_at < now_tick:
            self._tick_at += 1
            for stream in self._buckets.pop(self._tick_at, ()):
                self._guarded(self._look, stream, now_s)

    def _look(self, stream: Stream, now_s: float) -> None:
        self._put(stream, stream.check(now_s))

    # Draining: lazy streams are spread over the slots of one interval, so no pass over all of them holds the loop.

    def start_lazy(self, stream: Stream) -> None:
        """Leave the stream to the drain from now on."""
        self._lazy += 1
        stream.slot = self._next_slot
        self._next_slot = (self._next_slot + 1) % DRAIN_SLOTS
        self._slots[stream.slot][stream] = None
        if self._lazy == 1:
            self.lag.hold(True)

    def stop_lazy(self, stream: Stream) -> None:
        """The drain leaves the stream alone from now on."""
        self._lazy -= 1
        del self._slots[stream.slot][stream]
        if self._lazy == 0:
            self.lag.hold(False)

    def _drain(self) -> None:
        """Read the lazy streams of the next slot."""
        self._slot = (self._slot + 1) % DRAIN_SLOTS
        self._undrained += self._slots[self._slot]
        self.counts.drains += 1
        self._drain_some()

    def _drain_some(self) -> None:
        started_s = time.monotonic()
        streams, self._undrained = self._undrained[:DRAIN_AT_ONCE], self._undrained[DRAIN_AT_ONCE:]
        for stream in streams:
            if stream.lazy:
                try:
                    stream.drain()
                except Exception:
                    self.hub.handle_error(stream, *sys.exc_info())
        self._drain_max_s = max(self._drain_max_s, time.monotonic() - started_s)
        if self._undrained and not self._closed:
            self._rest_timer.start(self._drain_some, update=True)

    def _guarded(self, call: Callable[..., Any], *arguments: Any) -> None:
        """A fault in one stream (its callback) must not keep the others waiting."""
        try:
            call(*arguments)
        except Exception:
            self.hub.handle_error(call, *sys.exc_info())


def _remember(times_s: deque[float], at_s: float, oldest_s: float) -> None:
    """Append a time, forget the oldest ones."""
    times_s.append(at_s)
    while times_s[0] < oldest_s and len(times_s) > 1:
        times_s.popleft()


def _proxy(url: str | None) -> Proxy | None:
    if not url:
        return None
    try:
        return Proxy(url)
    except ValueError as error:
        raise ChannelError("CH-PROXY", str(error), "set target.proxy to http://HOST:PORT") from None


def _context(endpoint: Endpoint, options: TransportOptions) -> ssl.SSLContext | None:
    if endpoint.scheme != "https":
        return None
    try:
        return tls_context(options.ca_file, options.tls_verify)
    except (OSError, ssl.SSLError) as error:
        raise ChannelError("CH-TLS", f"target.ca_file cannot be used: {error}", "give a PEM file") from None


def _fields(endpoint: Endpoint, options: TransportOptions, api_key: str | None) -> bytes:
    """Header fields that are the same for every request."""
    fields = {"host": ("Host", endpoint.authority), "user-agent": ("User-Agent", "scheduler-bench"),
              "accept": ("Accept", "text/event-stream, application/json"),
              "accept-encoding": ("Accept-Encoding", "identity"),
              "content-type": ("Content-Type", "application/json")}
    fields |= dialect_fields(options.path, api_key, options.auth)
    for name, value in options.extra_headers:
        fields[name.lower()] = (name, value)
    lines = []
    for name, value in fields.values():
        if any(c in "\r\n\0" for c in name + value) or not name or ":" in name or not value.isascii():
            code = "CH-KEY-FORM" if name.lower() in KEY_FIELDS else "CH-URL"
            raise ChannelError(code, f"the header {name!r} cannot be sent", "remove line breaks and non-ASCII text")
        lines.append(f"{name}: {value}\r\n".encode("ascii"))
    return b"".join(lines)
