"""A compressed body, unpacked in small steps so that a bomb is stopped long before it is unpacked.

Input: bytes of a body with `content-encoding` gzip or deflate. Output: the plain bytes, in pieces.
Does not: ask for compression (a service that compresses all the same is read).

A gzip body may have several members, one after the other; what follows the last one and is none is left out.

Memory is bounded: one step of output. What may come out in all is bounded by what came in.
"""
from __future__ import annotations

import zlib
from collections.abc import Iterator

from bench.client.errors import ProtocolError

# A compressed body may grow this much; text of a token stream compresses 20 times, a bomb a thousand times.
INFLATE_RATIO_MAX = 200
INFLATE_FREE_BYTES = 8 * 1024 * 1024
INFLATE_STEP_BYTES = 65_536
_MEMBER = b"\x1f\x8b\x08"


class Unpacker:
    """State of one compressed body."""

    __slots__ = ("_begun", "_inflate", "_over", "_plain_bytes", "_wbits")

    def __init__(self, encoding: str) -> None:
        # 47: gzip or zlib by its header
        self._wbits = 47 if encoding != "deflate" else 15
        self._inflate = zlib.decompressobj(wbits=self._wbits)
        self._begun = b""  # after a member: what may be the start of the next one
        self._over = False  # something else followed
        self._plain_bytes = 0

    def feed(self, data: bytes, answer_bytes: int) -> Iterator[bytes]:
        """Give the plain bytes of `data`; raises ProtocolError. `answer_bytes`: what has come of the answer so far."""
        while data := self._next_member(data) if self._inflate.eof else data:
            try:
                plain = self._inflate.decompress(data, INFLATE_STEP_BYTES)
            except zlib.error as error:
                raise ProtocolError("SC-ENCODING", f"the compressed body is broken: {error}") from None
            data = self._inflate.unused_data or self._inflate.unconsumed_tail
            self._plain_bytes += len(plain)
            if self._plain_bytes > INFLATE_FREE_BYTES + INFLATE_RATIO_MAX * answer_bytes:
                raise ProtocolError("SC-ENCODING", f"the body grows more than {INFLATE_RATIO_MAX} times when unpacked")
            if plain:
                yield plain

    def _next_member(self, data: bytes) -> bytes:
        """Return the bytes of the member that follows one; nothing when none does, or when it is not known yet."""
        if self._over:
            return b""
        data, self._begun = self._begun + data, b""
        if data.startswith(_MEMBER):
            self._inflate = zlib.decompressobj(wbits=self._wbits)
            return data
        if _MEMBER.startswith(data):
            self._begun = data
        else:
            self._over = True
        return b""


def unpacker(encoding: str) -> Unpacker | None:
    """Return the unpacker for a `content-encoding`, None for a plain body; raises ProtocolError for any other."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding in ("gzip", "x-gzip", "deflate"):
        return Unpacker(encoding)
    raise ProtocolError("SC-ENCODING", f"the answer is compressed with {encoding[:40]!r}: not asked for")
