"""One request on its way: from the connection to the last byte of its answer.

Input: the request's bytes, an `AnswerReader`, and a connection from the transport.
Output: exactly one call of `on_done` with the `Outcome`.
Does not: parse (AnswerReader), keep connections (pool), or decide what a status means (outcome).

1. `on_done` is called exactly once, whatever happens.
2. `send_at` is taken just before the write of the request's last byte, on the connection that was used in the end.
3. Bytes are read in the hub's io callback until the first output, then, when lazy, by the transport's drain.
4. A request is sent again once, and only when a connection that had waited in the pool died before any byte of the
   answer.
5. Time limits are told apart: connect (lookup, TCP, proxy, TLS), first token (from the start of the write), idle
   (between two reads after the first output), total (from the call of `start` or `send`).
6. `start` never waits.
"""
from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import gevent

from bench.client.dialing import READ, WRITE, Gate, Stopped
from bench.client.kernel_time import ANCILLARY_BYTES, SO_TIMESTAMPNS, unpack_stamp
from bench.client.outcome import CODES, Outcome
from bench.client.sockets import READ_BYTES, Connection

if TYPE_CHECKING:
    from bench.client.transport import Transport

OPENING, WRITING, READING, DONE = range(4)
# A drained stream is read at most this often in one pass, so that one torrent cannot hold the loop.
READS_PER_DRAIN = 8
# Above this many bytes in one drain (about 600 events of 200 bytes a second) a stream is read promptly from then on: a
# socket that is left alone acknowledges late, and at 1,000 events a second that held the service's writes up.
LAZY_BYTES_PER_DRAIN = 24_000
# After [DONE] the end of the body is waited for this long; then the connection is closed and not kept.
END_GRACE_S = 1.0


class Stream:
    """One request and its answer; made by `Transport.send`."""

    __slots__ = (
        "_answer_reads", "_began", "_clock", "_connect_s", "_connection_kind", "_dns_s", "_drained_bytes", "_empty_ns",
        "_gate", "_heard_s", "_kept", "_lag_ns", "_lazy_wanted", "_opened_s", "_phase", "_reader_factory", "_request",
        "_retried", "_started_s", "_tls_s", "_transport", "_unsent", "_user_reads", "_write_s", "bucket", "connection",
        "lazy", "on_done", "outcome", "reader", "request_id", "send_at", "slot", "was_lazy",
    )  # fmt: skip

    def __init__(self, transport: Transport, request: bytes, reader_factory: Callable[[], Any], *, request_id: str,
                 prompt_read: bool, on_done: Callable[[Any], None]) -> None:
        self._transport = transport
        self._clock = transport.clock
        self._request = request
        self._reader_factory = reader_factory
        self._lazy_wanted = not prompt_read
        self._gate = Gate(transport.hub)
        self._phase = OPENING
        self._started_s = self._opened_s = self._write_s = self._heard_s = 0.0
        self._unsent = memoryview(b"")
        self._kept = False
        self._empty_ns = 0
        self._lag_ns = 0
        self._answer_reads = 0
        self._began = False  # to give output
        self._drained_bytes = 0
        self._user_reads = 0
        self._retried = False
        self.bucket = 0
        self.connection: Connection | None = None
        self._connection_kind: str | None = None
        self._dns_s: float | None = None
        self._connect_s: float | None = None
        self._tls_s: float | None = None
        self.lazy = False
        self.slot = 0
        self.was_lazy = False
        self.on_done = on_done
        self.outcome: Any = None
        self.reader = reader_factory()
        self.request_id = request_id
        self.send_at: float | None = None

    def begin(self, now_s: float) -> None:
        """The limits count from now."""
        self._started_s = self._opened_s = self._write_s = self._heard_s = now_s

    # Opening and writing: on the greenlet that called `start` or `send`, or one of their own (see `start`).

    def start(self) -> None:
        """Write the request now on a kept connection; never waits: what would wait goes on in a greenlet."""
        connection = self._transport.take()
        if connection is None:
            gevent.spawn(self.run)
            return
        try:
            self._use(connection)
            self._begin_writing(connection)
            if not self._push(connection):
                gevent.spawn(self._guard, self._write_rest)
        except Exception as error:
            self._bug(error)
            raise
        finally:
            if self._phase == DONE:
                self._drop_connection()

    def run(self, *, fresh: bool = False) -> None:
        """Open or take a connection and write the request; reading goes on in the hub."""
        self._guard(self._open_and_write, fresh)

    def _open_and_write(self, fresh: bool) -> None:
        self._gate.check()
        connection = self._transport.connect(self._gate, fresh=fresh)
        if self._phase == DONE:
            connection.close()
            return
        self._use(connection)
        self._begin_writing(connection)
        self._write_rest()

    def _guard(self, work: Callable[..., None], *arguments: Any) -> None:
        """Whatever ends the work ends the stream, with an outcome."""
        try:
            work(*arguments)
        except Stopped as stopped:
            self.fail(stopped.kind, stopped.detail)
        except Exception as error:
            self._bug(error)
            raise
        except BaseException:
            # The greenlet is being killed: a user stopped by Locust, or the process ends.
            self.fail("CL-STOP", "the sender was stopped while it opened the stream")
            raise
        finally:
            if self._phase == DONE:
                self._drop_connection()

    def _use(self, connection: Connection) -> None:
        self.connection = connection
        self._connection_kind = "reused" if connection.uses else "new"
        self._kept = connection.idle_since_s > 0.0
        if not connection.uses:
            self._dns_s, self._connect_s, self._tls_s = connection.dns_s, connection.connect_s, connection.tls_s
        connection.uses += 1

    def _begin_writing(self, connection: Connection) -> None:
        self._phase = WRITING
        self._write_s = time.monotonic()
        self._empty_ns = int(self._write_s * 1e9)
        self._unsent = memoryview(self._request if connection.tls is None else connection.tls.encrypt(self._request))

    def _push(self, connection: Connection) -> bool:
        """Write what the socket takes; False when it takes no more now, True when nothing is left to be written."""
        unsent = self._unsent
        while unsent:
            self.send_at = time.monotonic()
            try:
                unsent = unsent[connection.sock.send(unsent):]
            except BlockingIOError:
                self._unsent = unsent
                return False
            except OSError as error:
                # The service may have answered (413, 429) and closed without reading: the answer counts.
                if not self._answer_waits(connection):
                    self._broken(error)
                    return True
                connection.reusable = False
                break
        self._unsent = unsent
        self._phase = READING
        self.reader.send_at = self.send_at
        if self._answer_reads == 0:
            self._empty_ns = int((self.send_at or 0.0) * 1e9)
        if not self.lazy:
            connection.watcher.start(self._readable)
        return True

    def _write_rest(self) -> None:
        """Write the rest; an answer that comes before all of it is read on the way, and may end the writing."""
        connection = self.connection
        # A limit may have ended the stream before its greenlet ran.
        while connection is not None and self._phase == WRITING and not self._push(connection):
            self._gate.wait_fd(connection.fd, READ | WRITE)
            self._phase = READING
            self.read_once()
            if self._phase != READING:
                return
            self._phase = WRITING

    @staticmethod
    def _answer_waits(connection: Connection) -> bool:
        try:
            return bool(connection.sock.recv(1, 2))  # MSG_PEEK
        except OSError:
            return False

    # Reading: in the hub.

    def _readable(self) -> None:
        """The hub's io callback: one read, stamped, into the reader."""
        try:
            self.read_once()
        except Exception as error:
            self._bug(error)
            raise

    def _bug(self, error: Exception) -> None:
        """A fault of ours ends the stream, unless it came from the owner's callback; the hub prints it."""
        self.fail("bug", type(error).__name__)

    def read_once(self) -> bool:
        """Read what the socket holds, up to one buffer; True when there may be more.

        The hot path of the client: it runs once for each segment of a promptly read stream, and once for each stream
        and drain, so it is written out instead of being cut into small functions.
        """
        connection = self.connection
        if connection is None or self._phase != READING:
            return False
        try:
            data, ancillary, _, _ = connection.recvmsg(READ_BYTES, ANCILLARY_BYTES)
            more = len(data) == READ_BYTES
            if not data:
                connection.ended = True
            elif connection.tls is not None:
                data = connection.decrypt(data)
        except BlockingIOError:
            return False
        except OSError as error:
            self._broken(error)
            return False
        if ancillary and ancillary[0][1] == SO_TIMESTAMPNS:
            seconds, nanoseconds = unpack_stamp(ancillary[0][2])
            at_ns, now_ns = self._clock.arrival_ns(seconds * 1_000_000_000 + nanoseconds, self._empty_ns)
            if now_ns - at_ns > self._lag_ns and not self.lazy:
                self._lag_ns = now_ns - at_ns
        else:
            at_ns = now_ns = time.monotonic_ns()
            if data:
                self._user_reads += 1
        if not more:
            # What comes next came after the newest segment read now; "after this moment" would be wrong when the
            # process was held up between the read and its look at the clock.
            self._empty_ns = at_ns
        if data:
            self._answer_reads += 1
            self._drained_bytes += len(data)
            at = self._heard_s = at_ns * 1e-9
            reader = self.reader
            if reader.feed_lazy(data, at) if self.was_lazy else reader.feed(data, at):
                self._finish()
                return False
            if not self.was_lazy:
                if not self._began:
                    if reader.first_output:
                        self._begin_output(connection)
                elif reader.coalesced:
                    self._transport.refine()
                reader.coalesced = False
        if connection.ended:
            self._ended(at_ns * 1e-9 if data else now_ns * 1e-9)
            return False
        return more

    def _begin_output(self, connection: Connection) -> None:
        """The first output is read: what follows is left to the drain, or read promptly with the others'."""
        self._began = True
        # Without stamps so far a drained read would have no time worth its name: such a stream stays prompt.
        if self._lazy_wanted and not self._user_reads:
            self.lazy = self.was_lazy = True
            connection.watcher.stop()
            self._transport.start_lazy(self)
        else:
            self._transport.watch_on(connection, self._readable)

    def drain(self) -> None:
        """One turn of the transport's pass over all lazy streams."""
        self._drained_bytes = 0
        try:
            for _ in range(READS_PER_DRAIN):
                if not self.read_once():
                    break
        except Exception as error:
            self._bug(error)
            raise
        if self._phase == READING and self._drained_bytes > LAZY_BYTES_PER_DRAIN:
            self._stop_lazy()
            assert self.connection is not None
            self._transport.watch_on(self.connection, self._readable)

    def _stop_lazy(self) -> None:
        if self.lazy:
            self.lazy = False
            self._transport.stop_lazy(self)

    # Ends.

    def _ended(self, at: float) -> None:
        """The service closed its side."""
        if self._may_retry():
            self._retry()
            return
        self.reader.eof(at)
        self._finish()

    def _broken(self, error: OSError) -> None:
        """The connection failed under us."""
        if self._may_retry():
            self._retry()
            return
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        kind = "tls" if not isinstance(error.errno, int) or type(error).__module__ == "ssl" else "reset"
        self.fail(kind, name)

    def _may_retry(self) -> bool:
        return self._kept and self._answer_reads == 0 and not self._retried

    def _retry(self) -> None:
        """Send again, once, on a new connection: the kept one had died, nobody has read the request."""
        self._retried = True
        self._kept = False
        self._transport.counts.retried += 1
        self._drop_connection()
        self.reader = self._reader_factory()
        self._phase = OPENING
        self._opened_s = time.monotonic()
        self.send_at = None
        gevent.spawn(self.run, fresh=True)

    def check(self, now_s: float) -> float | None:
        """The next time to look at the limits (monotonic s), None when the stream is done or has just timed out."""
        if self._phase == DONE:
            return None
        kind, limit_s = self._limit()
        if now_s < limit_s:
            # No limit of the next phase can be reached before `look_s` is over, so none is noticed late.
            return min(limit_s, now_s + self._transport.look_s)
        if self._phase == READING:
            # Our own loop may have been late: what is in the socket by now counts.
            self.read_once()
            if self._phase == DONE:
                return None
            kind, limit_s = self._limit()
            if now_s < limit_s:
                return limit_s
        if kind == "ended":
            self.reader.eof(now_s)
            self._finish()
        else:
            self.fail(kind, "")
        return None

    def _limit(self) -> tuple[str, float]:
        """(kind, time) of the limit that is reached first if nothing more happens."""
        options = self._transport.options
        if self.reader.done_marker_at is not None:
            # The stream said [DONE], and only the end of its framing is missing: no reason to wait long.
            return "ended", self.reader.done_marker_at + END_GRACE_S
        total_s = self._started_s + options.total_timeout_s
        if self._phase == OPENING:
            kind, limit_s = "connect_timeout", self._opened_s + options.connect_timeout_s
        elif self._phase == WRITING or not self.reader.first_output:
            kind, limit_s = "first_token_timeout", self._write_s + options.first_token_timeout_s
        else:
            kind, limit_s = "idle_timeout", self._heard_s + options.idle_timeout_s
        return (kind, limit_s) if limit_s < total_s else ("total_timeout", total_s)

    def cancel(self, code: str, detail: str = "") -> None:
        """End the stream from our side and close its socket; `code` is a key of `outcome.CODES`."""
        self.fail(code, detail)

    def fail(self, kind: str, detail: str) -> None:
        """End the stream with a failure, a code or a name of `outcome.FAIL_KINDS`, unless it is done."""
        if self._phase == DONE:
            return
        if self.send_at is not None and kind in CODES and CODES[kind].status == "unsent":
            kind = "CL-CANCEL"
        self._gate.stop(Stopped(kind, detail))
        self.reader.fail(kind, time.monotonic(), detail)
        self._finish()

    def _drop_connection(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _finish(self) -> None:
        """Give the connection back, build the outcome, tell the owner; nothing may follow it."""
        self._phase = DONE
        self._stop_lazy()
        connection = self.connection
        # A socket that a greenlet waits for is closed by that greenlet: its number must not be reused before.
        if connection is not None and not self._gate.waiting:
            self.connection = None
            if self.reader.complete and self.reader.keep_alive and connection.reusable and not connection.ended:
                connection.watcher.stop()
                self._transport.pool.give(connection, time.monotonic())
            else:
                connection.close()
        try:
            self.outcome = self._outcome()
        finally:
            self._transport.forget(self)
        self.on_done(self.outcome)

    def _outcome(self) -> Outcome:
        """The reader's part and ours: connection, clock, lag."""
        outcome = self.reader.outcome()
        outcome.send_at = self.send_at
        outcome.connection = self._connection_kind
        outcome.dns_s, outcome.connect_s, outcome.tls_s = self._dns_s, self._connect_s, self._tls_s
        if self._answer_reads:
            outcome.clock = "kernel" if self._user_reads == 0 else "user"
            outcome.read_mode = "lazy" if self.was_lazy else "prompt"
            outcome.reader_lag_s = self._lag_ns * 1e-9 if self._user_reads == 0 else None
        if self._retried:
            outcome.flags.add("retried")
        return outcome
