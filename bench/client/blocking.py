"""One request over one plain blocking socket, for the checks before a run.

Input: `Channel` (address, key, limits), method, path, body. Output: `Outcome` and the reader with fields and body.
Does not: keep connections, run many requests at once, follow redirects, use gevent.

1. Every ending is an outcome with a code; nothing but a bug raises.
2. A new connection for each request; its times are kept apart from the service's.
"""
from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.client.answer import AnswerOptions, AnswerReader
from bench.client.endpoint import Endpoint
from bench.client.errors import ProtocolError
from bench.client.http1 import ResponseParser
from bench.client.outcome import Outcome
from bench.client.request import KEY_FIELDS, PATHS, asked_model, dialect_fields
from bench.client.sockets import tls_context

if TYPE_CHECKING:
    from bench.client.dialing import Proxy

READ_BYTES = 65_536
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN, errno.EHOSTDOWN}
TLS_ALERT = b"\x15\x03"


@dataclass(frozen=True, slots=True)
class Channel:
    """How the service is reached; times in seconds. `proxy` is a URL, used only when it is given.

    path: of the requests that the service is for (`PATHS`); with `auth` (`target.auth`) it decides how the key is
    sent, on other paths too.
    """

    endpoint: Endpoint
    api_key: str | None = None
    extra_headers: tuple[tuple[str, str], ...] = ()
    proxy: str | None = None
    ca_file: str | None = None
    tls_verify: bool = True
    connect_timeout_s: float = 5.0
    first_token_timeout_s: float = 60.0
    idle_timeout_s: float = 30.0
    total_timeout_s: float = 120.0
    path: str = PATHS["chat"]
    auth: str = "auto"

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self.api_key,) if self.api_key else ()


class _Failed(Exception):
    """Opening failed: a code or a name of `FAIL_KINDS`, and the reason."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.detail = kind, detail


@dataclass(slots=True)
class _Times:
    dns_s: float | None = None
    connect_s: float | None = None
    tls_s: float | None = None


def exchange(
    channel: Channel, method: str, path: str, body: bytes = b"", options: AnswerOptions | None = None
) -> tuple[Outcome, AnswerReader]:
    """Send one request on a new connection and read its answer to the end."""
    reader = AnswerReader(options, model=asked_model(body))
    started = time.monotonic()
    times = _Times()
    sock: socket.socket | None = None
    try:
        sock, absolute = _open(channel, times)
        target = channel.endpoint.url(path) if absolute else channel.endpoint.target(path)
        request = _head(channel, method, target, len(body), absolute) + body
        sock.settimeout(channel.first_token_timeout_s)
        reader.send_at = time.monotonic()
        sock.sendall(request)
        _read(channel, sock, reader, started)
    except _Failed as failed:
        reader.fail(failed.kind, time.monotonic(), failed.detail)
    except TimeoutError:
        reader.fail("first_token_timeout", time.monotonic(), "the request could not be written")
    except OSError as error:
        _read_what_came(sock, reader)
        reader.fail(_kind_of(error), time.monotonic(), _reason(error))
    finally:
        if sock is not None:
            sock.close()
    outcome = reader.outcome()
    outcome.connection, outcome.clock, outcome.read_mode = "new", "user", "prompt"
    outcome.dns_s, outcome.connect_s, outcome.tls_s = times.dns_s, times.connect_s, times.tls_s
    return outcome, reader


def connect(channel: Channel) -> Outcome:
    """Open a connection and close it again; the outcome says how that went."""
    times = _Times()
    try:
        sock, _ = _open(channel, times)
        sock.close()
        outcome = Outcome()
    except _Failed as failed:
        outcome = Outcome.from_fault(failed.kind, detail=failed.detail, at=time.monotonic(), secrets=channel.secrets)
    outcome.dns_s, outcome.connect_s, outcome.tls_s = times.dns_s, times.connect_s, times.tls_s
    return outcome


def _read(channel: Channel, sock: socket.socket, reader: AnswerReader, started: float) -> None:
    """Read to the end of the answer or to the first limit."""
    assert reader.send_at is not None
    total_until = started + channel.total_timeout_s
    until, kind = reader.send_at + channel.first_token_timeout_s, "first_token_timeout"
    while True:
        now = time.monotonic()
        limit, name = min((until, kind), (total_until, "total_timeout"))
        if now >= limit:
            reader.fail(name, now, f"after {now - started:.1f} s")
            return
        sock.settimeout(limit - now)
        try:
            data = sock.recv(READ_BYTES)
        except TimeoutError:
            continue
        at = time.monotonic()
        if not data:
            reader.eof(at)
            return
        if reader.http_status is None and data.startswith(TLS_ALERT):
            raise _Failed("tls", "the port answers in TLS: write https:// in the base URL")
        if reader.feed(data, at):
            return
        if reader.first_output:
            until, kind = at + channel.idle_timeout_s, "idle_timeout"


def _read_what_came(sock: socket.socket | None, reader: AnswerReader) -> None:
    """A service may answer (413, 401) and close before it has read the request: that answer counts."""
    if sock is None or reader.send_at is None:
        return
    try:
        sock.settimeout(0.5)
        while data := sock.recv(READ_BYTES):
            if reader.feed(data, time.monotonic()):
                return
    except OSError:
        return


def _open(channel: Channel, times: _Times) -> tuple[socket.socket, bool]:
    """Return a connected socket and whether requests on it name the full URL (a proxy without a tunnel)."""
    endpoint = channel.endpoint
    proxy = _proxy(channel.proxy)
    host, port = (proxy.host, proxy.port) if proxy else (endpoint.host, endpoint.port)
    started = time.monotonic()
    until = started + channel.connect_timeout_s
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise _Failed("proxy" if proxy else "dns", f"{host}: {_reason(error)}") from None
    dns_s = time.monotonic() - started
    if not _is_address(host):
        times.dns_s = dns_s
    try:
        sock = _connect_any(addresses, until)
    except OSError as error:
        kind = "connect_timeout" if isinstance(error, TimeoutError) else _kind_of(error)
        where = f"{host} port {port}"
        raise _Failed("proxy" if proxy else kind, f"{'proxy ' if proxy else ''}{where}: {_reason(error)}") from None
    times.connect_s = time.monotonic() - started - dns_s
    try:
        if endpoint.scheme == "https":
            if proxy:
                _tunnel(sock, endpoint, proxy, until)
            sock = _wrap(channel, sock, times, until)
    except BaseException:
        sock.close()
        raise
    return sock, proxy is not None and endpoint.scheme == "http"


def _proxy(url: str | None) -> Proxy | None:
    if not url:
        return None
    from bench.client.dialing import Proxy

    try:
        return Proxy(url)
    except ValueError as error:
        raise _Failed("proxy", str(error)) from None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _connect_any(addresses: list[tuple], until: float) -> socket.socket:  # type: ignore[type-arg]
    """Try the addresses in order; raises the last error."""
    problem: OSError = TimeoutError("timed out")
    for family, kind, protocol, _, address in addresses:
        left = until - time.monotonic()
        if left <= 0:
            break
        sock = socket.socket(family, kind, protocol)
        sock.settimeout(left)
        try:
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except OSError as error:
            sock.close()
            problem = error
    raise problem


def _wrap(channel: Channel, sock: socket.socket, times: _Times, until: float) -> socket.socket:
    started = time.monotonic()
    try:
        context = tls_context(channel.ca_file, channel.tls_verify)
        sock.settimeout(max(until - started, 0.001))
        wrapped = context.wrap_socket(sock, server_hostname=channel.endpoint.host)
    except ssl.SSLCertVerificationError as error:
        raise _Failed("tls_cert", error.verify_message or "not verified") from None
    except TimeoutError:
        raise _Failed("connect_timeout", "the TLS handshake was not answered: is it http:// there?") from None
    except ssl.SSLError as error:
        plain = "WRONG_VERSION" in str(error) or "RECORD_LAYER" in str(error)
        hint = "; the port does not answer in TLS: write http:// in the base URL" if plain else ""
        raise _Failed("tls", f"{error.reason or 'handshake failed'}{hint}") from None
    except OSError as error:
        raise _Failed("tls", f"the handshake broke off: {_reason(error)}") from None
    times.tls_s = time.monotonic() - started
    return wrapped


def _tunnel(sock: socket.socket, endpoint: Endpoint, proxy: Proxy, until: float) -> None:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    authority = f"{host}:{endpoint.port}".encode("ascii")
    parser = ResponseParser()
    try:
        request = b"CONNECT %s HTTP/1.1\r\nHost: %s\r\n%s\r\n" % (authority, authority, proxy.authorization)
        sock.sendall(request)
        # One byte at a time: what follows the header block of a 200 belongs to TLS.
        while not parser.has_head:
            sock.settimeout(max(until - time.monotonic(), 0.001))
            data = sock.recv(1)
            if not data:
                raise _Failed("proxy", "the proxy closed the connection on CONNECT")
            parser.receive(data)
    except OSError as error:
        raise _Failed("proxy", f"no answer to CONNECT: {_reason(error)}") from None
    except ProtocolError as error:
        raise _Failed("proxy", f"the proxy does not speak HTTP: {error}") from None
    if parser.status == 407:
        raise _Failed("CH-407", "the proxy wants a login")
    if not 200 <= (parser.status or 0) < 300:
        raise _Failed("proxy", f"the proxy answered CONNECT with {parser.status}")


def _head(channel: Channel, method: str, target: str, length: int, absolute: bool) -> bytes:
    fields = {"host": ("Host", channel.endpoint.authority), "user-agent": ("User-Agent", "scheduler-bench"),
              "accept": ("Accept", "text/event-stream, application/json"),
              "accept-encoding": ("Accept-Encoding", "identity"), "connection": ("Connection", "close")}  # fmt: skip
    if method == "POST":
        fields["content-type"] = ("Content-Type", "application/json")
        fields["content-length"] = ("Content-Length", str(length))
    fields |= dialect_fields(channel.path, channel.api_key, channel.auth)
    for name, value in channel.extra_headers:
        fields[name.lower()] = (name, value)
    head = f"{method} {target} HTTP/1.1\r\n".encode("ascii")
    for name, value in fields.values():
        if any(char in "\r\n\0" for char in name + value) or not (name + value).isascii():
            code = "CH-KEY-FORM" if name.lower() in KEY_FIELDS else "CH-URL"
            raise _Failed(code, f"the field {name!r} cannot be sent: odd characters in it")
        head += f"{name}: {value}\r\n".encode("ascii")
    proxy = _proxy(channel.proxy) if absolute else None
    return head + (proxy.authorization if proxy else b"") + b"\r\n"


def _kind_of(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, (ConnectionResetError, BrokenPipeError, ConnectionAbortedError)):
        return "reset"
    if isinstance(error, ssl.SSLError):
        return "tls"
    return "unreachable" if error.errno in _UNREACHABLE else "reset"


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
