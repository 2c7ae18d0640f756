"""Opening connections: name lookup, TCP connect, proxy tunnel, TLS handshake.

Input: the endpoint and the options; a `Gate` of the greenlet that waits.
Output: an open `Connection` with the time of each step apart.
Does not: reuse connections (pool), send requests, or retry.

1. Every wait can be ended by the hub (time limit, cancellation), and then the socket is closed.
2. No step is hidden in another: dns_s, connect_s and tls_s are measured one by one; a lookup answered from the
   cache, or an address instead of a name, has no dns_s.
"""
from __future__ import annotations

import base64
import errno
import ipaddress
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment

import gevent
import gevent.socket
from gevent.hub import Waiter

from bench.client.sockets import (
    EXHAUSTED_ERRNOS,
    READ_BYTES,
    Address,
    Connection,
    TlsPipe,
    new_socket,
)

READ, WRITE = 1, 2
# A proxy's answer to CONNECT is a header block; more is not a proxy.
PROXY_ANSWER_BYTES = 16384


class Stopped(Exception):
    """A stream that cannot go on: `kind` says why in one word, `detail` in one line."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


class Gate:
    """The one wait of a greenlet that opens a stream; the hub may end it at any time."""

    __slots__ = ("_hub", "_stopped", "_waiter")

    def __init__(self, hub: Any) -> None:
        self._hub = hub
        self._waiter: Waiter | None = None
        self._stopped: Stopped | None = None

    @property
    def waiting(self) -> bool:
        """A greenlet waits here now."""
        return self._waiter is not None

    def check(self) -> None:
        """Raise Stopped when the hub has ended the opening."""
        if self._stopped is not None:
            raise self._stopped

    def wait_fd(self, fd: int, events: int) -> None:
        """Return when the descriptor is ready; raises Stopped."""
        watcher = self._hub.loop.io(fd, events)
        try:
            self._wait(lambda wake: watcher.start(wake, None))
        finally:
            watcher.stop()
            watcher.close()

    def wait_greenlet(self, greenlet: gevent.Greenlet) -> None:
        """Return when the greenlet has ended; raises Stopped."""
        if greenlet.ready():
            return
        link: Any = None

        def start(wake: Any) -> None:
            nonlocal link
            link = wake
            greenlet.rawlink(wake)

        try:
            self._wait(start)
        finally:
            greenlet.unlink(link)

    def _wait(self, start: Any) -> None:
        if self._stopped is not None:
            raise self._stopped
        waiter = self._waiter = Waiter(self._hub)
        try:
            start(waiter.switch)
            waiter.get()
        finally:
            self._waiter = None

    def stop(self, stopped: Stopped) -> None:
        """End the wait, now or when it comes."""
        if self._stopped is None:
            self._stopped = stopped
            if self._waiter is not None:
                self._hub.loop.run_callback(self._throw, self._waiter)

    def _throw(self, waiter: Waiter) -> None:
        if waiter is self._waiter:
            waiter.throw(self._stopped)


def proxy_from_env(scheme: str, host: str) -> str | None:
    """The proxy that the environment asks for this service, None when there is none or NO_PROXY names the host."""
    if proxy_bypass_environment(host):
        return None
    proxies = getproxies_environment()
    return proxies.get(scheme) or proxies.get("all")


class Proxy:
    """An HTTP proxy: where it is and how to log in."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError("proxy must be http://HOST:PORT")
        self.host = parts.hostname
        self.port = parts.port or 80
        self.authorization = b""
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self.authorization = b"Proxy-Authorization: Basic " + base64.b64encode(login.encode()) + b"\r\n"


class Dialer:
    """Opens connections to one service."""

    def __init__(self, hub: Any, host: str, port: int, *, context: ssl.SSLContext | None, proxy: Proxy | None,
                 receive_buffer_bytes: int | None, dns_cache_s: float, watch: Callable[[int], Any]) -> None:
        self._hub = hub
        self._host, self._port = host, port
        self._context = context
        self._proxy = proxy
        self._receive_buffer_bytes = receive_buffer_bytes
        self._dns_cache_s = dns_cache_s
        self._watch = watch
        self._addresses: list[Address] = []
        self._addresses_until_s = 0.0
        self._lookup: gevent.Greenlet | None = None

    def open(self, gate: Gate) -> Connection:
        """A new connection, ready for a request; raises Stopped."""
        addresses, dns_s = self._resolve(gate)
        started_s = time.monotonic()
        connection = self._connect_any(gate, addresses)
        connection.dns_s = dns_s
        connection.connect_s = time.monotonic() - started_s
        try:
            if self._proxy is not None:
                connection.via_proxy = True
                if self._context is not None:
                    self._tunnel(gate, connection)
            if self._context is not None:
                started_s = time.monotonic()
                self._handshake(gate, connection)
                connection.tls_s = time.monotonic() - started_s
        except BaseException:
            connection.close()
            raise
        return connection

    def _resolve(self, gate: Gate) -> tuple[list[Address], float | None]:
        """(addresses, seconds of the lookup or None when nobody had to be asked)."""
        host, port = (self._proxy.host, self._proxy.port) if self._proxy else (self._host, self._port)
        started_s = time.monotonic()
        if self._addresses and started_s < self._addresses_until_s:
            return self._addresses, None
        literal = _literal(host, port)
        if literal is not None:
            self._addresses, self._addresses_until_s = [literal], float("inf")
            return self._addresses, None
        # All streams that wait for the name share one lookup.
        if self._lookup is None or self._lookup.ready():
            self._lookup = gevent.spawn(_getaddrinfo, host, port)
        lookup = self._lookup
        gate.wait_greenlet(lookup)
        found = lookup.value
        if not isinstance(found, list):
            raise Stopped("dns", f"no address for {host}: {found}")
        self._addresses, self._addresses_until_s = found, time.monotonic() + self._dns_cache_s
        return found, time.monotonic() - started_s

    def _connect_any(self, gate: Gate, addresses: list[Address]) -> Connection:
        """A TCP connection to the first address that answers; that one is tried first from then on."""
        last: Stopped | None = None
        for address in list(addresses):
            try:
                connection = self._connect(gate, address)
            except _Unreachable as error:
                last = error.stopped
                continue
            if addresses[0] is not address:
                addresses.remove(address)
                addresses.insert(0, address)
            return connection
        raise last if last is not None else Stopped("dns", "the lookup gave no address")

    def _connect(self, gate: Gate, address: Address) -> Connection:
        try:
            sock, kernel = new_socket(address, receive_buffer_bytes=self._receive_buffer_bytes)
        except OSError as error:
            raise _open_error(error.errno or 0, self._proxy) from None
        try:
            code = sock.connect_ex(address.sockaddr)
            if code in (errno.EINPROGRESS, errno.EWOULDBLOCK):
                gate.wait_fd(sock.fileno(), WRITE)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code != 0:
                raise _open_error(code, self._proxy)
        except BaseException:
            sock.close()
            raise
        connection = Connection(sock, kernel=kernel)
        watcher = self._watch(connection.fd)
        connection.watcher = watcher

        def close_watcher() -> None:
            watcher.stop()
            watcher.close()

        connection.close_watcher = close_watcher
        return connection

    def _tunnel(self, gate: Gate, connection: Connection) -> None:
        """Ask the proxy for a tunnel to the service."""
        assert self._proxy is not None
        authority = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        head = f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n".encode()
        request = head + self._proxy.authorization + b"\r\n"
        answer = b""
        try:
            send_all(gate, connection, request)
            while b"\r\n\r\n" not in answer:
                data = _receive_some(gate, connection)
                answer += data
                if not data or len(answer) > PROXY_ANSWER_BYTES:
                    raise Stopped("proxy", "the proxy closed before it answered CONNECT")
        except OSError as error:
            raise Stopped("proxy", f"the proxy broke off: {_name(error)}") from None
        status = answer.split(b"\r\n", 1)[0].split(b" ")
        if len(status) < 2 or not status[0].startswith(b"HTTP/1.") or status[1] != b"200":
            said = status[1].decode("ascii", "replace") if len(status) > 1 else "no status"
            raise Stopped("CH-407" if said == "407" else "proxy", f"the proxy refused the tunnel: {said[:20]}")

    def _handshake(self, gate: Gate, connection: Connection) -> None:
        assert self._context is not None
        try:
            tls = TlsPipe(self._context, self._host)
            received: bytes | None = b""
            while True:
                try:
                    complete = tls.handshake(received)
                finally:
                    send_all(gate, connection, tls.pending_output())
                if complete:
                    break
                received = _receive_some(gate, connection) or None
        except ssl.SSLCertVerificationError as error:
            raise Stopped("tls_cert", f"certificate not accepted: {error.verify_message}") from None
        except ssl.SSLError as error:
            raise Stopped("tls", f"handshake failed: {error.reason or type(error).__name__}") from None
        except OSError as error:
            raise Stopped("tls", f"handshake broken off: {_name(error)}") from None
        except ValueError as error:
            raise Stopped("tls", f"handshake impossible: {error}") from None
        connection.tls = tls


def send_all(gate: Gate, connection: Connection, data: bytes) -> None:
    """Write all bytes as they are; raises OSError, Stopped."""
    view = memoryview(data)
    while view:
        try:
            view = view[connection.sock.send(view):]
        except BlockingIOError:
            gate.wait_fd(connection.fd, WRITE)


def _receive_some(gate: Gate, connection: Connection) -> bytes:
    """The next bytes of the socket, b"" at its end; raises OSError, Stopped."""
    while True:
        try:
            return connection.sock.recv(READ_BYTES)
        except BlockingIOError:
            gate.wait_fd(connection.fd, READ)


class _Unreachable(Exception):
    """One address did not work; another may."""

    def __init__(self, stopped: Stopped) -> None:
        super().__init__(stopped)
        self.stopped = stopped


def _open_error(code: int, proxy: Proxy | None) -> Exception:
    name = errno.errorcode.get(code, str(code))
    text = f"{name}: {os.strerror(code)}"
    if code in EXHAUSTED_ERRNOS:
        return Stopped("fd", text)
    if proxy is not None:
        return _Unreachable(Stopped("proxy", f"no connection to the proxy: {text}"))
    kinds = {errno.ECONNREFUSED: "refused", errno.ECONNRESET: "reset", errno.ETIMEDOUT: "connect_timeout"}
    return _Unreachable(Stopped(kinds.get(code, "unreachable"), text))


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, type(error).__name__)


def _literal(host: str, port: int) -> Address | None:
    """The address when the host is one, not a name."""
    try:
        version = ipaddress.ip_address(host.partition("%")[0]).version
    except ValueError:
        return None
    if version == 4:
        return Address(socket.AF_INET, (host, port))
    if "%" in host:
        return None
    return Address(socket.AF_INET6, (host, port, 0, 0))


def _getaddrinfo(host: str, port: int) -> list[Address] | str:
    """Addresses in the system's order, or what the lookup said."""
    try:
        found = gevent.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return str(getattr(error, "strerror", None) or error)[:120]
    return [Address(family, sockaddr) for family, _, _, _, sockaddr in found]
