"""The rows of a trace file, one after another: Azure LLM CSV or Mooncake JSONL, plain or gzip.

Input: a path. Output: `Row`s in the file's order, checked one by one.
Does not: compare rows with each other (trace.py does).
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

MICRO = 1_000_000
MAX_ROWS = 1_000_000
MAX_LINE = 1_000_000  # characters; a Mooncake row of 200k tokens holds 400 block ids
MAX_TEXT = 2_000_000_000  # characters of a file, unpacked
MAX_TOKENS = 10_000_000
MAX_NAME = 100  # characters
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")


class TraceError(ValueError):
    """The trace file cannot be used; the message names file and line."""


class Row(NamedTuple):
    """One line of a trace file."""

    line: int
    time_us: int
    input_tokens: int
    output_tokens: int
    hash_ids: list[int] | None = None
    tenant: str = ""
    request_class: str = ""


def read_rows(path: Path, *, prefixes: bool = True) -> Iterator[Row]:
    """The rows of a file; `prefixes` False passes over block ids unread.

    Raises TraceError with file and line; OSError, EOFError, zlib.error when it cannot be read or unpacked.
    """
    with _open_text(path) as stream:
        lines = _lines(stream, path)
        first = next(lines, None)
        if first is None:
            raise TraceError(f"{path}: is empty; an Azure CSV or a Mooncake JSONL trace is needed")
        if first[1].startswith("{"):
            yield from _read_mooncake(first, lines, path, prefixes)
        else:
            yield from _read_azure(lines, first[1], path)


@contextlib.contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(open(path, "rb"))
        gzipped = raw.read(2) == b"\x1f\x8b"  # by content: names lie
        raw.seek(0)
        binary = stack.enter_context(gzip.GzipFile(fileobj=raw)) if gzipped else raw
        # Bytes that are no UTF-8 come through as marks, so that the line which holds them can be named.
        text = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline=None)
        yield stack.enter_context(text)


def _lines(stream: TextIO, path: Path) -> Iterator[tuple[int, str]]:
    """(line number, text) of the non-empty lines; refuses endless lines and files."""
    number = total = 0
    while True:
        line = stream.readline(MAX_LINE + 1)
        if not line:
            return
        number += 1
        if len(line) > MAX_LINE:
            raise TraceError(f"{path}:{number}: line longer than {MAX_LINE} characters; this is no trace file")
        if number > MAX_ROWS + 1:
            raise TraceError(f"{path}:{number}: more than {MAX_ROWS} rows; cut the file to the window you need")
        if not line.isascii():
            try:
                line.encode()
            except UnicodeEncodeError:
                raise TraceError(f"{path}:{number}: holds bytes that are no UTF-8; save the file as UTF-8") from None
        total += len(line)
        if total > MAX_TEXT:
            raise TraceError(f"{path}:{number}: more than {MAX_TEXT} characters; cut the file to the window you need")
        if line.strip():
            yield number, line.strip()


def _count(value: Any, what: str, spot: str) -> int:
    """A token count: whole, 0..MAX_TOKENS. Text must be plain digits."""
    if isinstance(value, str):
        text = value.strip()
        if text == "":
            raise TraceError(f"{spot}: {what} is missing; a whole number of tokens stands there")
        digits = text[1:] if text[:1] in "+-" else text
        if not (digits.isascii() and digits.isdigit()) or len(digits) > 18:
            raise TraceError(f"{spot}: {what} is {text[:40]!r}; a whole number of tokens stands there")
        value = int(text)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TraceError(f"{spot}: {what} is {str(value)[:40]!r}; a whole number of tokens stands there")
    if value < 0:
        raise TraceError(f"{spot}: {what} is {value}; it cannot be negative")
    if value > MAX_TOKENS:
        raise TraceError(f"{spot}: {what} is {value}; at most {MAX_TOKENS} tokens, the row looks damaged")
    return value


_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?\s*(?:Z|([+-])(\d\d):(\d\d))?", re.ASCII)


def _azure_micros(text: str, spot: str) -> int:
    """Microseconds since year 1 of `YYYY-MM-DD HH:MM:SS[.fffffff][+00:00]`; without a zone all rows are of one."""
    found = _STAMP.fullmatch(text.strip())
    try:
        if found is None:
            raise ValueError(text)
        day, clock, fraction, sign, hours, minutes = found.groups()
        moment = datetime.strptime(f"{day} {clock}", "%Y-%m-%d %H:%M:%S")
    except ValueError:
        raise TraceError(f"{spot}: TIMESTAMP is {text[:40]!r}; it looks like 2023-11-16 18:15:46.6805900") from None
    seconds = int((moment - datetime(1, 1, 1)).total_seconds())
    if sign:
        seconds -= int(sign + "60") * (60 * int(hours) + int(minutes))
    return seconds * MICRO + int((fraction or "0").ljust(9, "0")[:6])


def _cells(line: str) -> list[str]:
    """The cells of a line; quotes around whole cells are taken off."""
    cells = [cell.strip() for cell in line.split(",")]
    return [cell[1:-1] if len(cell) > 1 and cell[0] == cell[-1] == '"' else cell for cell in cells]


def _read_azure(lines: Iterator[tuple[int, str]], header: str, path: Path) -> Iterator[Row]:
    names = _cells(header)
    missing = [name for name in AZURE_COLUMNS if name not in names]
    if missing:
        raise TraceError(
            f"{path}:1: columns {', '.join(missing)} are missing (found {header[:80]!r}); "
            f"an Azure trace has {','.join(AZURE_COLUMNS)}, a Mooncake trace is one JSON object a line"
        )
    twice = [name for name in AZURE_COLUMNS if names.count(name) > 1]
    if twice:
        raise TraceError(f"{path}:1: column {', '.join(twice)} stands there twice; leave one of them")
    place = [names.index(name) for name in AZURE_COLUMNS]
    for number, line in lines:
        cells = _cells(line)
        spot = f"{path}:{number}"
        if len(cells) != len(names):
            raise TraceError(f"{spot}: {len(cells)} cells, the header has {len(names)}")
        yield Row(
            number,
            _azure_micros(cells[place[0]], spot),
            _count(cells[place[1]], "ContextTokens", spot),
            _count(cells[place[2]], "GeneratedTokens", spot),
        )


def _read_mooncake(
    first: tuple[int, str], lines: Iterator[tuple[int, str]], path: Path, prefixes: bool
) -> Iterator[Row]:
    def rows() -> Iterator[tuple[int, str]]:
        yield first
        yield from lines

    for number, line in rows():
        spot = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{spot}: not JSON ({str(error)[:120]}); each line is one object") from None
        if not isinstance(row, dict):
            raise TraceError(f"{spot}: not a JSON object; each line is one object")
        missing = [key for key in MOONCAKE_KEYS if row.get(key) is None]
        if missing:
            raise TraceError(f"{spot}: {', '.join(missing)} is missing; each line has {', '.join(MOONCAKE_KEYS)}")
        stamp = row["timestamp"]
        if isinstance(stamp, bool) or not isinstance(stamp, (int, float)) or not abs(stamp) < 1e15:
            raise TraceError(f"{spot}: timestamp is {str(stamp)[:40]!r}; milliseconds from the start stand there")
        if stamp < 0:
            raise TraceError(f"{spot}: timestamp is {stamp}; it cannot be negative")
        yield Row(
            number,
            round(stamp * 1000),
            _count(row["input_length"], "input_length", spot),
            _count(row["output_length"], "output_length", spot),
            _hash_ids(row.get("hash_ids"), spot) if prefixes else None,
            _name(row.get("tenant"), "tenant", spot),
            _name(row.get("request_class"), "request_class", spot),
        )


def _hash_ids(value: Any, spot: str) -> list[int] | None:
    """The block ids of a row: whole numbers that fit in 63 bits."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise TraceError(f"{spot}: hash_ids is {str(value)[:40]!r}; a list of block ids stands there, or nothing")
    for one in value:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < 1 << 63:
            raise TraceError(f"{spot}: hash_ids holds {str(one)[:40]!r}; whole numbers from 0 to 2^63 - 1 stand there")
    return value


def _name(value: Any, what: str, spot: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_NAME or not (value == "" or value.isprintable()):
        raise TraceError(
            f"{spot}: {what} is {str(value)[:40]!r}; a printable name of at most {MAX_NAME} characters stands there, "
            "or nothing"
        )
    return value
