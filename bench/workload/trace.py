"""Recorded arrivals: readers of public trace formats, and what a plan keeps of one.

Input: Azure LLM CSV (`TIMESTAMP,ContextTokens,GeneratedTokens`) or Mooncake JSONL (`timestamp` in ms,
`input_length`, `output_length`), plain or gzip.
Output: `Trace`: whole microseconds from the window's start, prompt and output tokens, all int64; from a Mooncake file
also which prompts begin alike (`hash_ids`), and tenant and class where rows name them (as `bench watch` writes).
Does not: scale to a rate (`arrivals.trace_points` does), guess at damaged rows, or know which names a config allows.

1. Rows keep the file's order, inside a tie too.
2. Every complaint names the file and the line.
3. A length of 0 becomes 1 (a request of no tokens cannot be sent) and is counted in `lifted`.
4. Memory is bounded whatever the file is: a device or a pipe is refused, endless lines and files while they are read.
"""

from __future__ import annotations

import hashlib
import json
import stat
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.workload.labels import KEY_FOUND, Labels, Names, hide_key
from bench.workload.packed import pack, unpack
from bench.workload.prefix import Prefixes, make_prefixes, take_rows
from bench.workload.trace_rows import MICRO, Row, TraceError, read_rows

MAX_SPAN_S = 366 * 86_400
MAX_BLOCKS = 20_000_000  # block ids of a file
BLOCK_TOKENS = (512, 16, 32, 64, 128, 256, 1024, 2048, 4096)  # Mooncake's first; others where only they fit all rows


@dataclass(frozen=True, eq=False)
class Trace:
    """Arrivals of a recorded window: (n,) int64 arrays, times sorted and from 0."""

    name: str
    time_us: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    span_us: int  # length of the window; above the last time
    lifted: int = 0
    prefixes: Prefixes | None = None  # None: the file has no block ids
    tenants: Labels = field(default_factory=Labels)  # empty: no row names one
    classes: Labels = field(default_factory=Labels)

    def __len__(self) -> int:
        return len(self.time_us)

    @property
    def rate_qps(self) -> float:
        """Mean arrivals per second of the window."""
        return len(self) / (self.span_us / MICRO)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "name": self.name,
            "span_us": self.span_us,
            "lifted": self.lifted,
            "time_us": pack(np.diff(self.time_us, prepend=0)),
            "input_tokens": pack(self.input_tokens),
            "output_tokens": pack(self.output_tokens),
            "prefixes": self.prefixes.to_dict() if self.prefixes is not None else None,
            "tenants": self.tenants.to_dict(),
            "classes": self.classes.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trace:
        """The trace in a `to_dict` form; older forms have no prefixes and labels."""
        prefixes = data.get("prefixes")
        return cls(
            data["name"],
            np.cumsum(unpack(data["time_us"])),
            unpack(data["input_tokens"]),
            unpack(data["output_tokens"]),
            data["span_us"],
            data["lifted"],
            Prefixes.from_dict(prefixes) if prefixes is not None else None,
            Labels.from_dict(data.get("tenants")),
            Labels.from_dict(data.get("classes")),
        )


def read_trace(
    path: Path,
    *,
    start_s: float = 0.0,
    end_s: float | None = None,
    spread_ties: bool = True,
    max_input_tokens: int | None = None,
    max_output_tokens: int | None = None,
    prefixes: bool = True,
    keys: frozenset[str] = frozenset(),
) -> Trace:
    """The arrivals of a trace file in [start_s, end_s) of the trace, lengths (and block ids) cut to the caps.

    Raises TraceError (file and line in the message), also for a file that cannot be read, and for a tenant or class
    that holds one of the API `keys`.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise TraceError(f"{path}: is not a regular file; write the trace to a file and name that")
        table = _collect(read_rows(path, prefixes=prefixes), path, keys)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        raise TraceError(f"{path}: cannot be read ({reason})") from None
    except TraceError as error:
        text = str(error)
        if hide_key(text, keys) != text and KEY_FOUND not in text:
            raise TraceError(f"{path}: {hide_key(text, keys)}") from None
        raise
    return _window(table, path, start_s, end_s, spread_ties, max_input_tokens, max_output_tokens)


@dataclass(frozen=True, eq=False)
class _Table:
    """All rows of a file: (n, 3) int64 of time_us from the first row, input, output; and what else they say."""

    data: np.ndarray
    prefixes: Prefixes | None
    tenants: Labels
    classes: Labels


def _collect(rows: Iterator[Row], path: Path, keys: frozenset[str]) -> _Table:
    """The table of a file; refuses rows out of order."""
    out = array("q")
    blocks = _Blocks(path)
    tenants, classes = Names(path, "tenant", keys), Names(path, "request_class", keys)
    origin = previous = 0
    for row in rows:
        time_us = row.time_us
        if not out:
            origin = previous = time_us
        if time_us < previous:
            raise TraceError(
                f"{path}:{row.line}: {(previous - time_us) / MICRO:g} s before the row above; sort the file by time "
                "first"
            )
        if time_us - origin > MAX_SPAN_S * MICRO:
            raise TraceError(f"{path}:{row.line}: more than a year after the first row; the stamp looks damaged")
        previous = time_us
        out.extend((time_us - origin, row.input_tokens, row.output_tokens))
        blocks.add(row)
        tenants.add(row.tenant, row.line)
        classes.add(row.request_class, row.line)
    if not out:
        raise TraceError(f"{path}: holds a header and no rows")
    data = np.frombuffer(out, dtype=np.int64).reshape(-1, 3)
    return _Table(data, blocks.prefixes(), tenants.labels(), classes.labels())


class _Blocks:
    """Block ids of the rows, and which block sizes fit all of them: a row has one id per block, the last one begun."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sizes = BLOCK_TOKENS
        self._counts, self._ids = array("q"), array("q")

    def add(self, row: Row) -> None:
        ids = row.hash_ids or []
        if ids:
            fitting = tuple(b for b in self._sizes if -(-row.input_tokens // b) == len(ids))
            if not fitting:
                b = self._sizes[0]
                raise TraceError(
                    f"{self._path}:{row.line}: hash_ids has {len(ids)} ids, input_length {row.input_tokens} has "
                    f"{-(-row.input_tokens // b)} blocks of {b} tokens; mend the row, or set loadgen.trace_prefixes to "
                    "false"
                )
            self._sizes = fitting
        self._counts.append(len(ids))
        self._ids.extend(ids)
        if len(self._ids) > MAX_BLOCKS:
            raise TraceError(
                f"{self._path}:{row.line}: more than {MAX_BLOCKS} block ids; cut the file to the window you need"
            )

    def prefixes(self) -> Prefixes | None:
        if not self._ids:
            return None
        return make_prefixes(
            self._sizes[0], np.frombuffer(self._counts, dtype=np.int64), np.frombuffer(self._ids, dtype=np.int64)
        )


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
    table: _Table,
    path: Path,
    start_s: float,
    end_s: float | None,
    spread_ties: bool,
    max_input: int | None,
    max_output: int | None,
) -> Trace:
    data = table.data
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
    prefixes = take_rows(table.prefixes, keep, inputs) if table.prefixes is not None else None
    return Trace(
        path.name,
        time_us[keep] - start,
        inputs.copy(),
        outputs.copy(),
        end - start,
        lifted,
        prefixes if prefixes is not None and len(prefixes.ids) else None,
        table.tenants.take(keep),
        table.classes.take(keep),
    )


def digest(trace: Trace) -> str:
    """sha256 over the rows of a trace, the same on every machine."""
    total = hashlib.sha256()
    columns = [trace.time_us, trace.input_tokens, trace.output_tokens]
    if trace.prefixes is not None:
        columns += [np.array([trace.prefixes.block_tokens]), trace.prefixes.starts, trace.prefixes.ids]
    for labels in (trace.tenants, trace.classes):
        if labels:
            columns.append(labels.place)
            total.update(json.dumps(labels.names).encode())
    for column in columns:
        total.update(column.astype("<i8").tobytes())
    return total.hexdigest()
