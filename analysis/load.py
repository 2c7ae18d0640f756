"""The columns of `requests.csv` as arrays, read fast and whatever its state.

Input: the ledger's path. Output: `Ledger` (one numpy array per column) with named
`LedgerProblem`s (LED-0xx). Does not: judge a row (`row_checks.py` does) or compute a
statistic; only a ledger that cannot be read at all raises `LedgerError`.

1. Rows keep the order of the file; `line` is the row's line number in it.
2. Absent is NaN (floats) or -1 (codes), never 0.
3. `requests.csv` is read in blocks cut at line ends (a ledger row never holds a
   line break), so memory stays near that of the arrays.
"""
from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd

from bench.records.ledger import find_requests
from bench.records.request import FIELD_NAMES, STATUSES, LedgerProblem

BLOCK_BYTES = 4 << 20  # a block and its cells stay near the cache; larger ones cost a third more CPU
READ_THREADS = 2

REQUIRED = ("stage", "status", "intended_s")
INT_COLUMNS = ("stage", "arrival", "worker", "repeat")
FLOAT_COLUMNS = (
    "offered_qps", "intended_s", "sent_s", "first_token_s", "last_token_s", "done_s", "send_lag_s", "ttft_s",
    "tpot_s", "e2e_s", "residence_s", "input_tokens", "prompt_tokens", "cached_tokens", "max_tokens", "output_tokens",
    "chunks", "reasoning_tokens", "connect_s", "ttfo_s", "itl_p99_s", "prompt_line",
)  # fmt: skip
CATEGORY_COLUMNS = ("phase", "request_class", "status", "code", "connection", "clock", "flags", "finish_reason")
# Kept as float32: counts and diagnostics that need no nanoseconds.
SMALL_FLOATS = (
    "offered_qps", "input_tokens", "prompt_tokens", "cached_tokens", "max_tokens", "output_tokens", "chunks",
    "reasoning_tokens", "connect_s", "itl_p99_s", "prompt_line",
)  # fmt: skip
# Columns that are empty when prompts are made: a folder of a version that made them all lacks nothing.
MADE_PROMPTS = ("prompt_line",)

# Beyond these a cell is damage, not a measurement: it counts as absent (LED-021). Times: ten years. Whole numbers: what
# the key of an arrival has room for (`row_checks`). Counts and rates: what a float32 holds exactly enough.
MAX_TIME_S = 10 * 366 * 86_400.0
MAX_WHOLE = {"stage": 2.0**15 - 1, "repeat": 2.0**12 - 1, "arrival": 2.0**36 - 1, "worker": 2.0**31 - 1}
MAX_OTHER = 1e12

OK, REJECTED, ERROR, TIMEOUT, TRUNCATED, UNSENT = range(len(STATUSES))


class LedgerError(Exception):
    """A run folder that cannot be analysed; the text says what to do."""


@dataclass
class Ledger:
    """The columns of `requests.csv`; every array has one entry per row."""

    rows: int
    columns: dict[str, np.ndarray]  # ints and floats by name
    codes: dict[str, np.ndarray]  # category columns: index into `names[column]`, -1 = empty
    names: dict[str, list[str]]
    line: np.ndarray  # line number in the file, header = 0
    path: Path | None = None
    problems: list[LedgerProblem] = field(default_factory=list)
    places: list[tuple[int, np.ndarray, _Block]] = field(default_factory=list)  # first line, line ends, block

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def is_value(self, column: str, value: str) -> np.ndarray:
        """Rows whose category column equals `value`."""
        names = self.names[column]
        if value not in names:
            return np.zeros(self.rows, dtype=bool)
        return self.codes[column] == names.index(value)

    def has_flag(self, flag: str) -> np.ndarray:
        """Rows that carry `flag`."""
        hits = [i for i, text in enumerate(self.names["flags"]) if flag in text.split(";")]
        return np.isin(self.codes["flags"], hits) if hits else np.zeros(self.rows, dtype=bool)

    def take(self, keep: np.ndarray) -> Ledger:
        """The rows selected by a mask or an index array; problems stay."""
        return Ledger(
            rows=int(np.count_nonzero(keep)) if keep.dtype == bool else len(keep),
            columns={k: v[keep] for k, v in self.columns.items()},
            codes={k: v[keep] for k, v in self.codes.items()},
            names=self.names,
            line=self.line[keep],
            path=self.path,
            problems=self.problems,
            places=self.places,
        )


def requests_path(run_dir: Path) -> Path:
    """The ledger of a run folder, plain or gzip. Raises LedgerError when there is none."""
    found = find_requests(run_dir)
    if found is not None:
        return found
    raise LedgerError(
        f"{run_dir}: there is no requests.csv in this folder; a run folder holds run.json, requests.csv and "
        "stages.csv. Give the folder that `bench run` printed"
    )


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # type: ignore[return-value]


@dataclass(frozen=True)
class _Block:
    """A run of whole lines: where it is in the plain file, or its bytes when the file is compressed."""

    start: int
    end: int
    data: bytes | None = None

    def read(self, path: Path) -> bytes:
        if self.data is not None:
            return self.data
        with path.open("rb") as stream:
            stream.seek(self.start)
            return stream.read(self.end - self.start)

    def cut(self, stream: BinaryIO, start: int, end: int) -> bytes:
        """Bytes from `start` to `end` of this block; `stream` is the open plain file."""
        if self.data is not None:
            return self.data[start:end]
        stream.seek(self.start + start)
        return stream.read(end - start)


def _plain_blocks(path: Path, start: int) -> tuple[list[_Block], bytes]:
    """Blocks of a plain file from byte `start` on, and what follows the last line end."""
    size = path.stat().st_size
    cuts = [start]
    with path.open("rb") as stream:
        while cuts[-1] + BLOCK_BYTES < size:
            stream.seek(cuts[-1] + BLOCK_BYTES)
            stream.readline()
            cuts.append(stream.tell())
        stream.seek(max(cuts[-1], size - BLOCK_BYTES))
        tail = stream.read()
    end = size - (len(tail) - tail.rfind(b"\n") - 1)
    cuts = [c for c in cuts if c < end] + [end]
    blocks = [_Block(a, b) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    return blocks, tail[tail.rfind(b"\n") + 1 :] if end < size else b""


def _packed_blocks(stream: BinaryIO) -> Iterator[_Block | bytes]:
    """Blocks of a compressed file one by one; a rest without a line end comes last, as bytes."""
    rest = b""
    while chunk := stream.read(BLOCK_BYTES):
        cut = chunk.rfind(b"\n")
        if cut < 0:
            rest += chunk
            continue
        yield _Block(0, 0, rest + chunk[: cut + 1])
        rest = chunk[cut + 1 :]
    if rest.strip():
        yield rest


def read_ledger(path: Path) -> Ledger:
    """The ledger at `path`. Raises LedgerError when it is empty, unreadable or of an unknown schema."""
    try:
        with _open(path) as stream:
            return _read(stream, path)
    except (OSError, EOFError, zlib.error) as exc:
        raise LedgerError(f"{path}: cannot be read: {exc}; check the file and its rights") from exc


def _header(stream: BinaryIO, path: Path) -> list[str]:
    first = stream.readline().decode("utf-8", "replace").lstrip("\ufeff")
    header = next(csv.reader([first]), [])
    if not header:
        raise LedgerError(f"{path}: the file is empty (LED-020); the run recorded nothing, look at log.txt")
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        raise LedgerError(
            f"{path}: the columns {', '.join(missing)} are missing (LED-001); this file was not written by this "
            f"tool or by an incompatible version. Needed are {', '.join(REQUIRED)}, see docs/ledger.md"
        )
    return header


def _read(stream: BinaryIO, path: Path) -> Ledger:
    header = _header(stream, path)
    problems: list[LedgerProblem] = []
    absent = [c for c in FIELD_NAMES if c not in header and c not in MADE_PROMPTS]
    if absent:
        text = f"requests.csv has no column {', '.join(absent)}; what depends on them is left out or derived"
        problems.append(LedgerProblem("LED-002", text, 0, absent[:5]))
    parts: list[_Part] = []
    rest = b""
    blocks: Iterable[_Block | bytes]
    if path.suffix == ".gz":
        blocks = _packed_blocks(stream)
    else:
        blocks, rest = _plain_blocks(path, stream.tell())
    with ThreadPoolExecutor(READ_THREADS) as pool:
        waiting: list[Future[_Part]] = []
        for block in blocks:
            if isinstance(block, bytes):
                rest = block
                break
            waiting.append(pool.submit(_parse, block, path, header))
            if len(waiting) > READ_THREADS:  # bound what is held in memory
                parts.append(waiting.pop(0).result())
        parts.extend(w.result() for w in waiting)
    if rest.strip():
        text = "the last line of requests.csv has no end: the writer was stopped; the line is left out"
        problems.append(LedgerProblem("LED-003", text, 1, [rest[:60].decode("utf-8", "replace")]))
    if not parts or not sum(p.rows for p in parts):
        raise LedgerError(f"{path}: there is a header and no row (LED-020); the run recorded nothing, look at log.txt")
    return _join(parts, path, problems)


@dataclass
class _Part:
    """One parsed block."""

    rows: int
    columns: dict[str, np.ndarray]
    codes: dict[str, np.ndarray]
    names: dict[str, list[str]]
    line: np.ndarray  # from the block's start
    ends: np.ndarray  # byte offsets of the line ends within the block
    place: _Block
    malformed: int
    unreadable: dict[str, int]
    absurd: dict[str, tuple[int, int]]  # column -> cells that no run can hold, line of the first in the block


def _parse(place: _Block, path: Path, header: list[str]) -> _Part:
    """One block as arrays; the fast way first, then cell by cell when something is not a number."""
    block = place.read(path)
    ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10).astype(np.int32)
    numeric = [c for c in (*INT_COLUMNS, *FLOAT_COLUMNS) if c in header]
    text = [c for c in CATEGORY_COLUMNS if c in header]
    lines = len(ends)
    options: dict[str, Any] = dict(
        header=None, names=header, usecols=[*numeric, *text], engine="c", na_values=[""], keep_default_na=False,
        skip_blank_lines=False, low_memory=False, index_col=False,
    )  # fmt: skip
    types: dict[str, Any] = {c: np.float64 for c in numeric} | {c: "category" for c in text}
    unreadable: dict[str, int] = {}
    line = np.arange(lines, dtype=np.int64)
    malformed = 0
    try:
        frame = pd.read_csv(io.BytesIO(block), dtype=types, **options)
        if len(frame) != lines:
            raise ValueError("a quoted cell holds a line break")
    except (ValueError, UnicodeDecodeError):  # includes pandas' ParserError
        frame, line, malformed, unreadable = _parse_slowly(block, header, numeric, text)
    columns, absurd = {}, {}
    for column in numeric:
        values = frame[column].to_numpy(dtype=np.float64, copy=True)
        limit = MAX_WHOLE.get(column, MAX_TIME_S if column.endswith("_s") else MAX_OTHER)
        beyond = np.abs(values) > limit  # NaN is not
        if beyond.any():
            absurd[column] = (int(beyond.sum()), int(line[np.argmax(beyond)]))
            values[beyond] = np.nan
        columns[column] = _kept(column, values)
    codes, names = {}, {}
    for column in text:
        cat = frame[column].cat
        codes[column] = cat.codes.to_numpy().astype(np.int32)
        names[column] = [str(v) for v in cat.categories]
    kept = _Block(place.start, place.end)  # its bytes are not needed any more
    return _Part(len(frame), columns, codes, names, line, ends, kept, malformed, unreadable, absurd)


def _kept(column: str, values: np.ndarray) -> np.ndarray:
    """A column as the ledger keeps it, made per block while its cells are in the cache; absent whole numbers: -1."""
    if column in INT_COLUMNS:
        absent = np.isnan(values)
        if absent.any():
            values = np.where(absent, -1, values)
        return values.astype(np.int64 if column == "arrival" else np.int32)
    return values.astype(np.float32) if column in SMALL_FLOATS else values


def _parse_slowly(
    block: bytes, header: list[str], numeric: list[str], text: list[str]
) -> tuple[pd.DataFrame, np.ndarray, int, dict[str, int]]:
    """The same for a damaged block: lines of the wrong width are left out, cells that are no number are NaN."""
    rows, lines = [], []
    malformed = 0
    for number, raw in enumerate(block.decode("utf-8", "replace").split("\n")[:-1]):
        try:
            cells = next(csv.reader([raw.rstrip("\r")]), [])
        except csv.Error:
            cells = []
        if len(cells) != len(header):
            malformed += 1
            continue
        rows.append(cells)
        lines.append(number)
    frame = pd.DataFrame(rows, columns=header, dtype=object)
    unreadable = {}
    for column in numeric:
        cells = frame[column].astype(str).str.strip()
        values = pd.to_numeric(cells, errors="coerce")
        bad = int((values.isna() & (cells != "")).sum())
        if bad:
            unreadable[column] = bad
        frame[column] = values.astype(np.float64)
    for column in text:
        frame[column] = frame[column].replace("", None).astype("category")
    return frame, np.asarray(lines, dtype=np.int64), malformed, unreadable


def _join(parts: list[_Part], path: Path, problems: list[LedgerProblem]) -> Ledger:
    rows = sum(p.rows for p in parts)
    malformed = sum(p.malformed for p in parts)
    if malformed:
        text = f"{malformed} lines of requests.csv do not have as many cells as the header; they are left out"
        problems.append(LedgerProblem("LED-004", text, malformed))
    unreadable: dict[str, int] = {}
    for part in parts:
        for column, count in part.unreadable.items():
            unreadable[column] = unreadable.get(column, 0) + count
    for column, count in unreadable.items():
        text = f"{count} cells of column {column} are not numbers; they count as absent"
        problems.append(LedgerProblem("LED-005", text, count))
    first = np.cumsum([1] + [len(p.ends) for p in parts])
    problems.extend(_absurd(parts, first))
    columns: dict[str, np.ndarray] = {}
    for column in (*INT_COLUMNS, *FLOAT_COLUMNS):
        if column in parts[0].columns:
            columns[column] = np.concatenate([p.columns.pop(column) for p in parts])
        else:
            columns[column] = _kept(column, np.full(rows, 0.0 if column in ("worker", "repeat") else np.nan))
    codes, names = {}, {}
    for column in CATEGORY_COLUMNS:
        codes[column], names[column] = _merge_categories(parts, column, rows)
    line = np.concatenate([p.line + start for p, start in zip(parts, first[:-1], strict=True)])
    places = [(int(start), p.ends, p.place) for p, start in zip(parts, first[:-1], strict=True)]
    return Ledger(rows, columns, codes, names, line, path, problems, places)


def _absurd(parts: list[_Part], first: np.ndarray) -> Iterator[LedgerProblem]:
    """LED-021 for each column with cells that no run can hold."""
    counts: dict[str, int] = {}
    spots: dict[str, int] = {}
    for part, start in zip(parts, first[:-1], strict=True):
        for column, (count, line) in part.absurd.items():
            counts[column] = counts.get(column, 0) + count
            spots.setdefault(column, int(start) + line)
    for column, count in counts.items():
        beyond = "beyond ten years" if column.endswith("_s") else f"beyond {MAX_WHOLE.get(column, MAX_OTHER):.0f}"
        text = f"{count} cells of column {column} are {beyond}; they count as absent"
        yield LedgerProblem("LED-021", text, count, [f"line {spots[column] + 1}"])


def _merge_categories(parts: list[_Part], column: str, rows: int) -> tuple[np.ndarray, list[str]]:
    if column not in parts[0].codes:
        return np.full(rows, -1, dtype=np.int16), []
    merged: dict[str, int] = {}
    out = []
    for part in parts:
        lookup = np.array([merged.setdefault(v, len(merged)) for v in part.names[column]] + [-1], dtype=np.int32)
        out.append(lookup[part.codes.pop(column)])
    joined = np.concatenate(out)
    return (joined.astype(np.int16) if len(merged) < 32000 else joined), list(merged)


def read_lines(ledger: Ledger, rows: list[int]) -> dict[int, dict[str, str]]:
    """All columns of a few rows (indices into the ledger), as text; empty when the file is not at hand."""
    found: dict[int, dict[str, str]] = {}
    if ledger.path is None or not rows:
        return found
    wanted = {int(ledger.line[r]): r for r in rows}
    try:
        with _open(ledger.path) as stream:
            header = _header(stream, ledger.path)
            packed = _packed_blocks(stream) if ledger.path.suffix == ".gz" else None
            for first, ends, place in ledger.places:
                block = next(packed) if packed is not None else place
                mine = sorted(n for n in wanted if first <= n < first + len(ends))
                if not mine or isinstance(block, bytes):
                    continue
                for number in mine:
                    k = number - first
                    start = int(ends[k - 1]) + 1 if k else 0
                    text = block.cut(stream, start, int(ends[k])).decode("utf-8", "replace").rstrip("\r")
                    found[wanted[number]] = dict(zip(header, next(csv.reader([text]), []), strict=False))
    except (OSError, StopIteration, IndexError):
        return found  # samples only: the file changed under us, the figures do not need it
    return found
