"""One connection to the service: a raw non-blocking socket, with TLS in memory when asked.

Input: bytes to send; what the socket received.
Output: a connection whose owner reads bytes with their receive stamps, and plaintext.
Does not: wait, look names up, or know HTTP.

1. Ciphertext is read by `recvmsg` and decrypted through `ssl.MemoryBIO`, so TLS has receive stamps too.
2. The C socket class is used as it is: nothing here changes when Locust has patched the process.
"""
from __future__ import annotations

import _socket
import errno
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.client.kernel_time import ask_for_stamps

READ_BYTES = 65536
# Errors of this host, not of the service: no descriptors, no buffers, no local port left.
EXHAUSTED_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


@dataclass(frozen=True, slots=True)
class Address:
    """One result of a name lookup."""

    family: int
    sockaddr: tuple[Any, ...]


class TlsPipe:
    """TLS without a socket: ciphertext in, plaintext out, and the other way round."""

    __slots__ = ("_incoming", "_object", "_outgoing")

    def __init__(self, context: ssl.SSLContext, server_name: str) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)

    def handshake(self, ciphertext: bytes | None) -> bool:
        """True when the handshake is complete; raises ssl.SSLError. None = end of stream, b"" = start."""
        if ciphertext is None:
            self._incoming.write_eof()
        elif ciphertext:
            self._incoming.write(ciphertext)
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def encrypt(self, data: bytes) -> bytes:
        """Ciphertext of the data."""
        self._object.write(data)
        return self._outgoing.read()

    def decrypt(self, ciphertext: bytes) -> tuple[bytes, bool]:
        """(plaintext, end): end is True after the peer's close_notify; raises ssl.SSLError."""
        self._incoming.write(ciphertext)
        parts = []
        while True:
            try:
                part = self._object.read(READ_BYTES)
            except ssl.SSLWantReadError:
                return b"".join(parts), False
            except ssl.SSLZeroReturnError:
                return b"".join(parts), True
            if not part:
                return b"".join(parts), True
            parts.append(part)

    def pending_output(self) -> bytes:
        """Ciphertext that the protocol itself wants sent (handshake, key updates, alerts)."""
        return self._outgoing.read()


class Connection:
    """One open connection; its owner decides when to read."""

    __slots__ = ("close_watcher", "closed", "connect_s", "dns_s", "fd", "idle_since_s", "kernel", "recvmsg", "sock",
                 "ended", "reusable", "tls", "tls_s", "uses", "via_proxy", "watcher")

    def __init__(self, sock: socket.socket, *, kernel: bool) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.recvmsg = sock.recvmsg
        self.kernel = kernel
        self.tls: TlsPipe | None = None
        self.watcher: Any = None
        self.close_watcher: Callable[[], None] | None = None
        self.dns_s: float | None = None
        self.connect_s: float | None = None
        self.tls_s: float | None = None
        self.uses = 0
        self.idle_since_s = 0.0
        self.via_proxy = False
        self.closed = False
        self.ended = False
        self.reusable = True

    def decrypt(self, ciphertext: bytes) -> bytes:
        """Plaintext of received bytes (b"" when TLS needs more); sets `ended` after close_notify; raises OSError."""
        assert self.tls is not None
        data, self.ended = self.tls.decrypt(ciphertext)
        answer = self.tls.pending_output()
        if answer:
            # A key update or an alert; a socket that takes no fifty bytes while we only read is not worth a queue.
            try:
                sent = self.sock.send(answer)
            except BlockingIOError:
                sent = 0
            if sent != len(answer):
                raise ConnectionAbortedError(errno.ECONNABORTED, "the answer of TLS could not be sent")
        return data

    def is_quiet(self) -> bool:
        """True when nothing is readable: alive as far as anyone can tell without sending."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return not self.closed
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Close the socket; unread bytes make the kernel send a reset, so the service sees a cancellation."""
        if self.closed:
            return
        self.closed = True
        # A watcher must be gone before its descriptor: the number may be given to another socket at once.
        if self.close_watcher is not None:
            self.close_watcher()
            self.close_watcher = None
        self.watcher = None
        self.sock.close()


def new_socket(address: Address, *, receive_buffer_bytes: int | None) -> tuple[socket.socket, bool]:
    """(non-blocking TCP socket, whether the kernel stamps its bytes); raises OSError."""
    sock = _socket.socket(address.family, socket.SOCK_STREAM, 0)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        return sock, ask_for_stamps(sock)
    except OSError:
        sock.close()
        raise


def tls_context(ca_file: str | None, verify: bool) -> ssl.SSLContext:
    """A client context with the system's authorities, or only those of the file; raises OSError, ssl.SSLError."""
    context = ssl.create_default_context(cafile=ca_file)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context
