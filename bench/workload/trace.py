"""Recorded arrivals: readers of public trace formats, and what a plan keeps of one.

Input: Azure LLM CSV (`TIMESTAMP,ContextTokens,GeneratedTokens`) or Mooncake JSONL (`timestamp` in ms,
`input_length`, `output_length`), plain or gzip.
Output: `Trace`: whole microseconds from the window's start, prompt and output tokens, all int64.
Does not: scale to a rate (`arrivals.trace_points` does), use prefix block ids, guess at damaged rows.

1. Rows keep the file's order, inside a tie too.
2. Every complaint names the file and the line.
3. A length of 0 becomes 1 (a request of no tokens cannot be sent) and is counted in `lifted`.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np

MICRO = 1_000_000
MAX_ROWS = 1_000_000
MAX_LINE = 1_000_000  # characters; a Mooncake row of 200k tokens holds 400 block ids
MAX_TOKENS = 10_000_000
MAX_SPAN_S = 366 * 86_400
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")


class TraceError(ValueError):
    """The trace file cannot be used; the message names file and line."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Arrivals of a recorded window: (n,) int64 arrays, times sorted and from 0."""

    name: str
    time_us: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    span_us: int  # length of the window; above the last time
    lifted: int = 0

    def __len__(self) -> int:
        return len(self.time_us)

    @property
    def rate_qps(self) -> float:
        """Mean arrivals per second of the window."""
        return len(self) / (self.span_us / MICRO)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form: arrays as base64 of zlib of little-endian int64."""
        return {
            "name": self.name,
            "span_us": self.span_us,
            "lifted": self.lifted,
            "time_us": _pack(np.diff(self.time_us, prepend=0)),
            "input_tokens": _pack(self.input_tokens),
            "output_tokens": _pack(self.output_tokens),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trace:
        """The trace in a `to_dict` form."""
        return cls(
            data["name"],
            np.cumsum(_unpack(data["time_us"])),
            _unpack(data["input_tokens"]),
            _unpack(data["output_tokens"]),
            data["span_us"],
            data["lifted"],
        )


def _pack(values: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(values.astype("<i8").tobytes(), 6)).decode("ascii")


def _unpack(text: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<i8").astype(np.int64)


@contextlib.contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(open(path, "rb"))
        gzipped = raw.read(2) == b"\x1f\x8b"  # by content: names lie
        raw.seek(0)
        binary = stack.enter_context(gzip.GzipFile(fileobj=raw)) if gzipped else raw
        yield stack.enter_context(io.TextIOWrapper(binary, encoding="utf-8-sig", newline=None))


def _lines(stream: TextIO, path: Path) -> Iterator[tuple[int, str]]:
    """(line number, text) of the non-empty lines; refuses endless lines and files."""
    number = 0
    while True:
        line = stream.readline(MAX_LINE + 1)
        if not line:
            return
        number += 1
        if len(line) > MAX_LINE:
            raise TraceError(f"{path}:{number}: line longer than {MAX_LINE} characters; this is no trace file")
        if number > MAX_ROWS + 1:
            raise TraceError(f"{path}:{number}: more than {MAX_ROWS} rows; cut the file to the window you need")
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


def _azure_micros(text: str, spot: str) -> int:
    """Microseconds since year 1 of `YYYY-MM-DD HH:MM:SS[.fffffff]` (no zone; 0 to 9 decimals)."""
    whole, dot, fraction = text.strip().partition(".")
    # A zone, as in the 2024 files, is the same on every row: it may be left out.
    fraction = fraction.split("+")[0]
    whole = whole.split("+")[0].strip()
    try:
        if len(whole) != 19 or (dot and not (fraction.isascii() and fraction.isdigit() and len(fraction) <= 9)):
            raise ValueError(text)
        moment = datetime.strptime(whole.replace("T", " "), "%Y-%m-%d %H:%M:%S")
    except ValueError:
        raise TraceError(f"{spot}: TIMESTAMP is {text[:40]!r}; it looks like 2023-11-16 18:15:46.6805900") from None
    seconds = (moment - datetime(1, 1, 1)).total_seconds()
    return int(seconds) * MICRO + int(fraction.ljust(9, "0")[:6] or 0 if dot else 0)


def _read_azure(lines: Iterator[tuple[int, str]], header: str, path: Path) -> Iterator[tuple[int, int, int, int]]:
    names = [name.strip() for name in header.split(",")]
    missing = [name for name in AZURE_COLUMNS if name not in names]
    if missing:
        raise TraceError(
            f"{path}:1: columns {', '.join(missing)} are missing (found {header[:80]!r}); "
            f"an Azure trace has {','.join(AZURE_COLUMNS)}, a Mooncake trace is one JSON object a line"
        )
    place = [names.index(name) for name in AZURE_COLUMNS]
    for number, line in lines:
        cells = line.split(",")
        spot = f"{path}:{number}"
        if len(cells) != len(names):
            raise TraceError(f"{spot}: {len(cells)} cells, the header has {len(names)}")
        yield (
            number,
            _azure_micros(cells[place[0]], spot),
            _count(cells[place[1]], "ContextTokens", spot),
            _count(cells[place[2]], "GeneratedTokens", spot),
        )


def _read_mooncake(
    first: tuple[int, str], lines: Iterator[tuple[int, str]], path: Path
) -> Iterator[tuple[int, int, int, int]]:
    def rows() -> Iterator[tuple[int, str]]:
        yield first
        yield from lines

    for number, line in rows():
        spot = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise TraceError(f"{spot}: not JSON ({error}); each line is one object") from None
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
        yield (
            number,
            round(stamp * 1000),
            _count(row["input_length"], "input_length", spot),
            _count(row["output_length"], "output_length", spot),
        )


def read_trace(
    path: Path,
    *,
    start_s: float = 0.0,
    end_s: float | None = None,
    spread_ties: bool = True,
    max_input_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> Trace:
    """The arrivals of a trace file in [start_s, end_s) of the trace, lengths cut to the caps.

    Raises TraceError (file and line in the message), also for a file that cannot be read.
    """
    try:
        with _open_text(path) as stream:
            lines = _lines(stream, path)
            first = next(lines, None)
            if first is None:
                raise TraceError(f"{path}: is empty; an Azure CSV or a Mooncake JSONL trace is needed")
            rows = (
                _read_mooncake(first, lines, path) if first[1].startswith("{") else _read_azure(lines, first[1], path)
            )
            data = _collect(rows, path)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        raise TraceError(f"{path}: cannot be read ({reason})") from None
    return _window(data, path, start_s, end_s, spread_ties, max_input_tokens, max_output_tokens)


def _collect(rows: Iterator[tuple[int, int, int, int]], path: Path) -> np.ndarray:
    """(n, 3) int64: time_us from the first row, input, output; refuses rows out of order."""
    out: list[tuple[int, int, int]] = []
    origin = previous = 0
    for number, time_us, input_tokens, output_tokens in rows:
        if not out:
            origin = previous = time_us
        if time_us < previous:
            raise TraceError(
                f"{path}:{number}: {(previous - time_us) / MICRO:g} s before the row above; sort the file by time first"
            )
        if time_us - origin > MAX_SPAN_S * MICRO:
            raise TraceError(f"{path}:{number}: more than a year after the first row; the stamp looks damaged")
        previous = time_us
        out.append((time_us - origin, input_tokens, output_tokens))
    if not out:
        raise TraceError(f"{path}: holds a header and no rows")
    return np.array(out, dtype=np.int64)


def spread(time_us: np.ndarray, last_gap_us: int) -> np.ndarray:
    """Equal stamps spread evenly over the gap to the next stamp; order and all other stamps stay.

    k rows at t with the next stamp at t' become t + j (t' - t)/k, j = 0..k-1. After the last stamp
    there is no t': `last_gap_us` takes its place.
    """
    starts = np.flatnonzero(np.diff(time_us, prepend=-1) > 0)
    sizes = np.diff(starts, append=len(time_us))
    gaps = np.diff(time_us[starts], append=time_us[-1] + last_gap_us)
    rank = np.arange(len(time_us)) - np.repeat(starts, sizes)
    return time_us + rank * np.repeat(gaps, sizes) // np.repeat(sizes, sizes)


def _window(
    data: np.ndarray,
    path: Path,
    start_s: float,
    end_s: float | None,
    spread_ties: bool,
    max_input: int | None,
    max_output: int | None,
) -> Trace:
    time_us = data[:, 0]
    stamps = np.unique(time_us)
    typical = int(np.median(np.diff(stamps))) if len(stamps) > 1 else MICRO
    if spread_ties:
        time_us = spread(time_us, max(typical, 1))
    # A window that nobody ends runs to the last row plus one typical gap, so that it tiles when repeated.
    natural_end = int(max(time_us[-1] + 1, stamps[-1] + max(typical, 1)))
    start = round(start_s * MICRO)
    end = min(round(end_s * MICRO), natural_end) if end_s is not None else natural_end
    keep = (time_us >= start) & (time_us < end)
    if end <= start or not keep.any():
        raise TraceError(
            f"{path}: no rows between trace_start_sec {start_s:g} and "
            f"{'the end' if end_s is None else f'trace_end_sec {end_s:g}'}; the trace runs to {natural_end / MICRO:g} s"
        )
    lengths = data[keep, 1:]
    lifted = int((lengths == 0).sum())
    lengths = np.maximum(lengths, 1)
    inputs = lengths[:, 0] if max_input is None else np.minimum(lengths[:, 0], max_input)
    outputs = lengths[:, 1] if max_output is None else np.minimum(lengths[:, 1], max_output)
    return Trace(path.name, time_us[keep] - start, inputs.copy(), outputs.copy(), end - start, lifted)


def digest(trace: Trace) -> str:
    """sha256 over the rows of a trace, the same on every machine."""
    total = hashlib.sha256()
    for column in (trace.time_us, trace.input_tokens, trace.output_tokens):
        total.update(column.astype("<i8").tobytes())
    return total.hexdigest()
