"""The CSV lines of a batch of ledger rows, made column by column for all rows at once.

Input: a `Batch`. Output: the very bytes that `ledger.RowWriter` would write for its rows, at a twentieth of the cost:
the master of many workers spends its time here.
Does not: open files.

Method: a cell is a few words of four characters, looked up in tables (four digits a look-up); unused places are
NUL and are deleted from the whole text at the end.

1. Equal to `csv.writer` with `ledger.cell` for every batch; `tests/records/test_csv_lines.py` compares the bytes.
2. A NUL inside a text is dropped: no CSV reader could keep it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable

import numpy as np

from bench.records.ledger import cell
from bench.records.packing import NANO, NULL, Batch
from bench.records.request import FIELD_NAMES

# Rows made at once: their text (about 0.5 kB each) stays in the processor's cache.
CHUNK_ROWS = 2048


def _table(text: Callable[[int], str], n: int) -> np.ndarray:
    """(n,) uint32: text(i) of at most four characters as one number; shorter ones end in NUL."""
    joined = b"".join(text(i).encode().ljust(4, b"\0") for i in range(n))
    return np.frombuffer(joined, dtype=np.uint32)


# Whole numbers: without leading zeros below 10,000; the same with them from 10,000; then one empty cell.
_PLAIN = np.concatenate([_table(str, 10_000), _table(lambda i: f"{i:04d}", 10_000), _table(lambda i: "", 1)])
_PADDED, _EMPTY = 10_000, 20_000
# Nine decimals as .ddd dddd dd: each without trailing zeros, then as it is (when more digits follow), then empty.
_A = np.concatenate([
    _table(lambda i: f".{i:03d}".rstrip("0").rstrip("."), 1000), _table(lambda i: f".{i:03d}", 1000),
    _table(lambda i: "", 1),
])  # fmt: skip
_B = np.concatenate([
    _table(lambda i: f"{i:04d}".rstrip("0"), 10_000), _table(lambda i: f"{i:04d}", 10_000), _table(lambda i: "", 1),
])  # fmt: skip
_C = _table(lambda i: f"{i:02d}".rstrip("0"), 100)
_COMMA = np.frombuffer(b",\0\0\0", dtype=np.uint32)[0]
_MINUS = np.frombuffer(b"-\0\0\0", dtype=np.uint32)[0]
_NEWLINE = np.frombuffer(b"\n\0\0\0", dtype=np.uint32)[0]

# Columns that are mostly equal to another one: the cells of that one are used again.
_TWIN = {"first_content_s": "first_token_s", "ttfo_s": "ttft_s", "prompt_tokens": "input_tokens",
         "output_tokens": "max_tokens", "chunks": "output_tokens"}  # fmt: skip


def csv_lines(batch: Batch) -> bytes:
    """The lines of the batch, each with its newline, without the header."""
    parts = []
    for start in range(0, batch.n, CHUNK_ROWS):
        parts.append(_chunk(batch, slice(start, min(batch.n, start + CHUNK_ROWS))))
    return b"".join(parts)


def _chunk(batch: Batch, rows: slice) -> bytes:
    n = rows.stop - rows.start
    pieces: list[np.ndarray | np.uint32] = []  # (n,) uint32 each, or one for all rows
    made: dict[str, tuple[np.ndarray, list[np.ndarray | np.uint32]]] = {}
    for place, name in enumerate(FIELD_NAMES):
        if place:
            pieces.append(_COMMA)
        if name in batch.odd:
            pieces += _words([_quoted(cell(v)) for v in batch.odd[name][rows]], np.arange(n))
        elif name in batch.words:
            words, index = batch.words[name]
            pieces += _words([_quoted("" if w is None else w) for w in words], index[rows])
        elif name == "request_id":
            pieces += _words([_quoted(batch.id_prefix or "")], np.zeros(n, dtype=np.int64))
            pieces += _number(batch.numbers["arrival"][rows], 1)
        else:
            values = batch.numbers[name][rows]
            like = made.get(_TWIN.get(name, ""))
            if like is not None and np.array_equal(like[0], values):
                cells = like[1]
            else:
                cells = _number(values, NANO if _is_float(name) else 1)
            made[name] = (values, cells)
            pieces += cells
    pieces.append(_NEWLINE)
    text = np.empty((n, len(pieces)), dtype=np.uint32)
    for place, piece in enumerate(pieces):
        text[:, place] = piece
    return text.tobytes().translate(None, b"\0")


def _is_float(name: str) -> bool:
    return name.endswith(("_s", "_qps", "_ratio"))


def _quoted(text: str | int) -> bytes:
    """A cell as csv.writer would write it among others."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(["", text])
    return out.getvalue()[1:-1].replace("\0", "").encode("utf-8", "replace")


def _words(words: list[bytes], index: np.ndarray) -> list[np.ndarray | np.uint32]:
    """The pieces of a text column."""
    width = -(-max((len(w) for w in words), default=0) // 4)
    if not width:
        return []
    table = np.frombuffer(b"".join(w.ljust(4 * width, b"\0") for w in words), dtype=np.uint32).reshape(-1, width)
    if len(words) == 1:
        return list(table[0])
    return [table[:, place][index] for place in range(width)]


def _number(values: np.ndarray, scale: int) -> list[np.ndarray | np.uint32]:
    """The pieces of a column of whole numbers, or of numbers in units of 1e-9."""
    if not len(values):
        return []
    low, high = int(values.min()), int(values.max())
    if low == high:  # one value in all rows
        only = "" if low == NULL else cell(low / NANO if scale == NANO else low)
        return _words([str(only).encode()], np.zeros(len(values), dtype=np.int64))
    absent = values == NULL if low == NULL else None
    pieces: list[np.ndarray | np.uint32] = []
    if absent is not None:
        values = np.where(absent, 0, values)
        low = int(values.min())
    if low < 0:
        # a value of less than nothing at nine decimals has no sign, as "-0" would be written by nobody
        pieces.append(np.where(values < 0, _MINUS, np.uint32(0)))
        values = np.abs(values)
        high = int(values.max())
    if scale == 1:
        return pieces + _whole(values, high, absent)
    whole = values // NANO
    rest = values - whole * NANO
    pieces += _whole(whole, high // NANO, absent)
    a = rest // 1_000_000
    rest -= a * 1_000_000
    b = rest // 100
    c = rest - b * 100
    more = c > 0
    a += np.where(rest > 0, 1000, 0)
    b += np.where(more, 10_000, 0)
    if absent is not None:
        a[absent] = 2000
        b[absent] = 0  # "0000" without its trailing zeros is nothing
    return [*pieces, _A[a], _B[b], _C[c]]


def _whole(values: np.ndarray, high: int, absent: np.ndarray | None) -> list[np.ndarray | np.uint32]:
    """Four digits a piece, no leading zeros, nothing where `absent`."""
    groups = []  # lowest first
    while True:
        upper = values // 10_000 if high >= 10_000 else None
        digits = values if upper is None else values - upper * 10_000
        index = digits if upper is None else np.where(upper > 0, digits + _PADDED, digits)
        if groups:  # a higher group: nothing there is no digit at all
            index = np.where(values > 0, index, _EMPTY)
        elif absent is not None:
            index = np.where(absent, _EMPTY, index)
        groups.append(_PLAIN[index])
        if upper is None:
            return groups[::-1]
        values, high = upper, high // 10_000
