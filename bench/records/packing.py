"""Packs ledger rows into bytes for the way from a worker to the master, and back.

Input: a list of `RequestRow`. Output: bytes, column by column, compressed.
Does not: travel, acknowledge or order batches; `collect.py` does.

1. `unpack(pack(rows)) == rows` for every row, including None and inf.
2. Columns that are the same in a whole batch cost a few bytes.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from array import array
from typing import Any

from bench.records.request import FIELD_NAMES, RequestRow

_VERSION = 1
_FLOATS = tuple(name for name in FIELD_NAMES if name.endswith(("_s", "_qps", "_ratio")))
_OTHERS = tuple(name for name in FIELD_NAMES if name not in _FLOATS)
# NaN with a payload of our own marks None: a real NaN never enters a row.
_NONE = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0B41))[0]


def pack(rows: list[RequestRow]) -> bytes:
    """The rows as bytes. Raises ValueError on a NaN, which no row may hold."""
    parts: list[bytes] = []
    for name in _FLOATS:
        column = array("d")
        for row in rows:
            value = getattr(row, name)
            if value is not None and math.isnan(value):
                raise ValueError(f"ledger row stage {row.stage} arrival {row.arrival}: {name} is NaN")
            column.append(_NONE if value is None else value)
        parts.append(_planes(column.tobytes()))
    columns = {name: _runs([getattr(row, name) for row in rows]) for name in _OTHERS}
    head = {"v": _VERSION, "n": len(rows), "columns": columns}
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    return zlib.compress(struct.pack("<I", len(text)) + text + b"".join(parts), 1)


def unpack(data: bytes) -> list[RequestRow]:
    """The rows in a batch. Raises ValueError when the bytes are not one."""
    try:
        raw = zlib.decompress(data)
        (size,) = struct.unpack_from("<I", raw)
        head = json.loads(raw[4 : 4 + size])
    except (zlib.error, struct.error, ValueError) as error:
        raise ValueError(f"a ledger batch of {len(data)} bytes cannot be read: {error}") from None
    if head.get("v") != _VERSION:
        raise ValueError(f"a ledger batch has format {head.get('v')!r}, this version reads {_VERSION}")
    n = head["n"]
    columns: dict[str, list[Any]] = {name: _unroll(runs, n) for name, runs in head["columns"].items()}
    at = 4 + size
    for name in _FLOATS:
        values = array("d")
        values.frombytes(_unplanes(raw[at : at + 8 * n]))
        columns[name] = [None if value != value else value for value in values]
        at += 8 * n
    return [RequestRow(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]


def _planes(data: bytes) -> bytes:
    """Bytes grouped by their place in the float, which zlib compresses far better."""
    return b"".join(data[i::8] for i in range(8))


def _unplanes(data: bytes) -> bytes:
    n = len(data) // 8
    out = bytearray(len(data))
    for i in range(8):
        out[i::8] = data[i * n : (i + 1) * n]
    return bytes(out)


def _runs(values: list[Any]) -> list[Any]:
    """One value for a constant column, else the list itself."""
    if values and all(value == values[0] and type(value) is type(values[0]) for value in values):
        return [values[0]]
    return values


def _unroll(values: list[Any], n: int) -> list[Any]:
    return values * n if len(values) == 1 and n != 1 else values
