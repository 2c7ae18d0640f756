"""A worker's own copy of what it recorded, on its disk, so that a run survives the loss of its master.

Usage, on a worker:

    shard = ShardWriter(folder / "worker-1.shard", {"run": {...}, "plan": "..."})
    shard.stage({"stage": 0, "start_s": 1.2, "stripe": 1, "stripes": 2})
    place = shard.rows(stage=0, stripe=1, seq=1, data=pack(rows))
    shard.read(place)                     # the same bytes, to send them again

Input: packed batches as they are made. Output: one file, appended to; `read_shard` gives all that is whole in it.
Does not: decide what goes to the master, or merge (`recover.py`).

1. A frame is written in one piece with its length and checksum: of a torn file all whole frames are readable.
2. Frames go to the operating system at once, so a killed process loses none of them; only a machine does.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAGIC = b"BSH1"
_FRAME = struct.Struct("<4sBIIIII")  # magic, kind, stage, stripe, seq, length, crc32 of the data
HEAD, STAGE, ROWS, GAUGE = 1, 2, 3, 4


@dataclass(frozen=True)
class Place:
    """Where the data of a frame lies in its file."""

    offset: int
    length: int


class ShardWriter:
    """Appends frames to a new file. Raises OSError when it cannot be made or written."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._end = 0
        self._put(HEAD, 0, 0, 0, _json(head))

    def stage(self, said: dict[str, Any]) -> None:
        """A stage has begun: its number, start, stripe and number of stripes."""
        self._put(STAGE, said["stage"], said["stripe"], 0, _json(said))

    def rows(self, *, stage: int, stripe: int, seq: int, data: bytes) -> Place:
        """Keep one packed batch; returns where it lies."""
        return self._put(ROWS, stage, stripe, seq, data)

    def gauge(self, *, stage: int, stripe: int, samples: list[list[Any]]) -> None:
        """Keep samples of the gauge."""
        self._put(GAUGE, stage, stripe, 0, _json(samples))

    def read(self, place: Place) -> bytes:
        """The data of a frame."""
        return os.pread(self._fd, place.length, place.offset)

    def close(self, *, remove: bool = False) -> None:
        """Close the file; `remove`: the master has all of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if remove:
            self.path.unlink(missing_ok=True)

    def _put(self, kind: int, stage: int, stripe: int, seq: int, data: bytes) -> Place:
        frame = _FRAME.pack(MAGIC, kind, stage, stripe, seq, len(data), zlib.crc32(data)) + data
        written = os.write(self._fd, frame)
        if written != len(frame):
            os.ftruncate(self._fd, self._end)  # a full disk: leave whole frames only
            os.lseek(self._fd, self._end, os.SEEK_SET)
            raise OSError(28, "No space left on device", str(self.path))
        place = Place(self._end + _FRAME.size, len(data))
        self._end += len(frame)
        return place


@dataclass
class Shard:
    """All that is whole in one shard."""

    path: Path
    head: dict[str, Any]
    stages: list[dict[str, Any]] = field(default_factory=list)
    batches: list[tuple[int, int, int, bytes]] = field(default_factory=list)  # (stage, stripe, seq, packed rows)
    gauges: list[tuple[int, list[list[Any]]]] = field(default_factory=list)  # (stripe, samples)
    torn_bytes: int = 0  # at the end, of a frame that was not written to its end


def read_shard(path: Path) -> Shard:
    """The shard at `path`. Raises ValueError when it does not begin like one."""
    shard: Shard | None = None
    data = path.read_bytes()
    for kind, stage, stripe, seq, body in _frames(data):
        if shard is None:
            if kind != HEAD:
                break
            shard = Shard(path, json.loads(body))
        elif kind == STAGE:
            shard.stages.append(json.loads(body))
        elif kind == ROWS:
            shard.batches.append((stage, stripe, seq, body))
        elif kind == GAUGE:
            shard.gauges.append((stripe, json.loads(body)))
    if shard is None:
        raise ValueError(f"{path}: is no shard of a run; give the .shard files of the workers")
    shard.torn_bytes = len(data) - _whole(data)
    return shard


def _frames(data: bytes) -> Iterator[tuple[int, int, int, int, bytes]]:
    at = 0
    while at + _FRAME.size <= len(data):
        magic, kind, stage, stripe, seq, length, crc = _FRAME.unpack_from(data, at)
        body = data[at + _FRAME.size : at + _FRAME.size + length]
        if magic != MAGIC or len(body) < length or zlib.crc32(body) != crc:
            return
        yield kind, stage, stripe, seq, body
        at += _FRAME.size + length


def _whole(data: bytes) -> int:
    return sum(_FRAME.size + len(body) for *_, body in _frames(data))


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str).encode("utf-8", "replace")
