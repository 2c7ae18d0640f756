"""The user's own prompts: an index of a JSONL file, part of a plan, and the text of one line when it is needed.

Input: a file of one request a line (`prompt_rows.py`), plain or gzip. Output: `PromptFile`: per line its lengths,
labels and the place of its text; `PromptText`: the text itself, read from the file.
Does not: hold the text of all lines, or choose which arrival gets which line (`schedule.py` does).

1. The text does not travel with a plan: each process that makes requests opens the file and compares its SHA-256,
   that of the unpacked bytes, with the plan's. An index of 50,000 lines takes some 0.5 MB in a plan.
2. A gzip file is unpacked into a temporary file of the system, once per process: it cannot be read from the middle.
3. Memory is bounded whatever the file is: lines, rows and bytes have limits, a device or a pipe is refused.
4. The first `MAX_PROBLEMS` lines that are wrong are named in one error, one line of it each.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import stat
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np

from bench.workload.labels import Labels, Names, hide_key
from bench.workload.packed import pack, unpack
from bench.workload.prompt_rows import PromptError, PromptRow, estimate_tokens, prompt_text, read_row
from bench.workload.trace_rows import TraceError

MAX_LINE = 16 << 20  # bytes
MAX_BYTES = 4 << 30  # of the file, unpacked
MAX_ROWS = 1_000_000
MAX_BLANK = MAX_ROWS  # blank lines
MAX_PROBLEMS = 10
_NO_FILE = "is not a regular file; name a JSONL file of prompts, plain or .gz"
BOM = b"\xef\xbb\xbf"
_CHUNK = 4 << 20
_BUFFER = 256 << 10
# Columns of the index, all int64: `differences` says which are packed as such.
_COLUMNS = ("line", "start", "size", "extra_start", "extra_size", "messages", "input_tokens", "estimated", "max_tokens",
            "same")  # fmt: skip
_DIFFERENCES = ("line", "start", "same")


@dataclass(frozen=True, eq=False)
class PromptFile:
    """The index of a file: (n,) int64 arrays, one place per request."""

    path: str
    sha256: str  # of the unpacked bytes
    order: str  # shuffled, file
    line: np.ndarray  # number in the file, from 1
    start: np.ndarray  # first byte of the prompt's JSON, unpacked
    size: np.ndarray  # bytes of it
    extra_start: np.ndarray
    extra_size: np.ndarray  # 0: the line has no extra_body
    messages: np.ndarray  # 1: a list of messages, 0: one text
    input_tokens: np.ndarray
    estimated: np.ndarray  # 1: input_tokens is an estimate from the text
    max_tokens: np.ndarray  # 0: the line does not say
    same: np.ndarray  # place of the first request with this prompt
    tenants: Labels = field(default_factory=Labels)
    classes: Labels = field(default_factory=Labels)

    def __len__(self) -> int:
        return len(self.line)

    @property
    def different(self) -> int:
        """How many of the prompts differ."""
        return len(np.unique(self.same))

    @property
    def estimates(self) -> int:
        """Lines whose input tokens are an estimate."""
        return int(self.estimated.sum())

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        columns = {
            name: pack(np.diff(getattr(self, name), prepend=0) if name in _DIFFERENCES else getattr(self, name))
            for name in _COLUMNS
        }
        labels = {"tenants": self.tenants.to_dict(), "classes": self.classes.to_dict()}
        return {"path": self.path, "sha256": self.sha256, "order": self.order, **columns, **labels}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PromptFile:
        """The index in a `to_dict` form."""
        columns = {
            name: np.cumsum(unpack(data[name])) if name in _DIFFERENCES else unpack(data[name]) for name in _COLUMNS
        }
        return cls(
            data["path"], data["sha256"], data["order"], **columns,
            tenants=Labels.from_dict(data["tenants"]), classes=Labels.from_dict(data["classes"]),
        )  # fmt: skip


def read_prompts(
    path: Path,
    *,
    order: str = "shuffled",
    endpoint: str = "chat",
    text_only: bool = False,
    keys: frozenset[str] = frozenset(),
) -> PromptFile:
    """The index of a file. Raises PromptError with file and line, OSError when the file cannot be read.

    `keys`: API keys, which no label may hold.
    """
    with _regular(path) as raw:
        seen = os.fstat(raw.fileno())
    # A command reads its config's plan more than once; 100 MB take a second or two.
    return _read(path, (seen.st_mtime_ns, seen.st_size, seen.st_ino), order, endpoint, text_only, keys)


@lru_cache(maxsize=2)
def _read(
    path: Path, _stamp: tuple[int, ...], order: str, endpoint: str, text_only: bool, keys: frozenset[str]
) -> PromptFile:
    index = _Index(path, keys)
    digest = hashlib.sha256()
    with _unpacked(path) as stream, _named_faults(path):
        try:
            for number, at, raw in _lines(stream, path, digest.update):
                index.take(number, at, raw, endpoint, text_only)
        except PromptError as error:  # ends the reading, after what was found before
            index.refuse(str(error))
        index.refuse()
    if not len(index):
        raise PromptError(f"{path}: holds no prompts; one request a line, such as {{\"prompt\": \"...\"}}")
    return index.file(digest.hexdigest(), order)


class _Index:
    """Columns while a file is read, and what is wrong with its lines."""

    def __init__(self, path: Path, keys: frozenset[str]) -> None:
        self._path, self._keys = path, keys
        self._columns = {name: array("q") for name in _COLUMNS}
        self._first: dict[bytes, int] = {}  # prompt -> its first place
        self._ids: dict[str, int] = {}  # id -> its line
        self._tenants, self._classes = Names(path, "tenant"), Names(path, "request_class")
        self._problems: list[str] = []

    def __len__(self) -> int:
        return len(self._columns["line"])

    def take(self, number: int, at: int, raw: bytes, endpoint: str, text_only: bool) -> None:
        """One more line; what is wrong with it is kept for the end."""
        try:
            self._add(number, at, read_row(raw, endpoint=endpoint, text_only=text_only, keys=self._keys))
        except PromptError as error:
            self._problems.append(f"{self._path}:{number}: {hide_key(str(error), self._keys)}")
        if len(self._problems) >= MAX_PROBLEMS:
            raise PromptError(f"{self._path}: reading stopped here; there may be more")

    def _add(self, number: int, at: int, row: PromptRow) -> None:
        if row.id:
            before = self._ids.setdefault(row.id, number)
            if before != number:
                raise PromptError(f"has the id of line {before}; each id stands once")
        place = len(self)
        if place >= MAX_ROWS:
            raise PromptError(f"is one more than {MAX_ROWS} requests; take a sample of the file")
        values = {
            "line": number, "start": at + row.span[0], "size": row.span[1],
            "extra_start": at + row.extra[0] if row.extra[1] else 0, "extra_size": row.extra[1],
            "messages": int(row.messages),
            "input_tokens": row.input_tokens or estimate_tokens(row.text_bytes),
            "estimated": int(row.input_tokens is None), "max_tokens": row.max_tokens or 0,
            "same": self._first.setdefault(row.content, place),
        }  # fmt: skip
        for name, value in values.items():
            self._columns[name].append(value)
        self._tenants.add(row.tenant, number)
        self._classes.add(row.request_class, number)

    def refuse(self, *last: str) -> None:
        """Raise PromptError when anything was wrong."""
        if self._problems or last:
            raise PromptError("\n".join([*self._problems, *last]))

    def file(self, sha256: str, order: str) -> PromptFile:
        columns = {name: np.frombuffer(values, dtype=np.int64) for name, values in self._columns.items()}
        return PromptFile(
            str(self._path), sha256, order, **columns, tenants=self._tenants.labels(), classes=self._classes.labels()
        )


def _regular(path: Path) -> IO[bytes]:
    """A file, opened without buffer. Raises PromptError for a device, a folder or a pipe, which is not waited for."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    if path.is_dir():
        raise PromptError(f"{path}: {_NO_FILE}")
    raw = open(path, "rb", buffering=0, opener=opener)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
        raw.close()
        raise PromptError(f"{path}: {_NO_FILE}")
    return raw


@contextlib.contextmanager
def _unpacked(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked when its content says gzip: names lie."""
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(_regular(path))
        gzipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        plain = stack.enter_context(gzip.GzipFile(fileobj=raw)) if gzipped else raw
        yield stack.enter_context(io.BufferedReader(plain, _BUFFER))  # type: ignore[arg-type]


@contextlib.contextmanager
def _named_faults(path: Path) -> Iterator[None]:
    """A damaged gzip file and too many names, as PromptError."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise PromptError(f"{path}: cannot be unpacked ({error}); pack it again") from None
    except TraceError as error:  # of Names
        raise PromptError(f"{error}; take a sample of the file") from None


def _lines(stream: IO[bytes], path: Path, note: Callable[[bytes], Any]) -> Iterator[tuple[int, int, bytes]]:
    """(line number, first byte, content without line break) of the lines that are not blank; `note` gets every byte."""
    number = at = blank = 0
    while raw := stream.readline(MAX_LINE + 1):
        number += 1
        if len(raw) > MAX_LINE:
            raise PromptError(f"{path}:{number}: is longer than {MAX_LINE >> 20} MB; one request stands in a line")
        note(raw)
        skipped = 0
        if number == 1:
            if raw.startswith(BOM):
                skipped = len(BOM)
            elif raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise PromptError(f"{path}: is UTF-16; save it as UTF-8")
            elif raw.lstrip().startswith(b"["):
                raise PromptError(
                    f"{path}:1: begins a JSON list; one object a line is needed (docs/config.md, own prompts, has a "
                    "script for ShareGPT's file)"
                )
        content = raw[skipped:].rstrip(b"\r\n")
        if content and not content.isspace():
            yield number, at + skipped, content
        else:
            blank += 1
            if blank > MAX_BLANK:
                raise PromptError(f"{path}:{number}: more than {MAX_BLANK} blank lines; take them out")
        at += len(raw)
        if at > MAX_BYTES:
            raise PromptError(f"{path}:{number}: more than {MAX_BYTES >> 30} GB; take a sample of the file")


class PromptText:
    """The text of the lines of a file that is what a plan says: opened and compared once, then read line by line.

    It is read from the descriptor whose bytes were compared: another file at the same path is never seen. What was
    written into the same file since then is (`changed`).
    """

    def __init__(self, file: PromptFile, path: str = "", *, pause: Callable[[], Any] = lambda: None) -> None:
        """`path` instead of the plan's; `pause` is called between pieces of some MB. Raises PromptError."""
        self.file = file
        self.path = Path(path or file.path)
        self._pause = pause
        self._stream: IO[bytes] | None = None
        self._stamp: tuple[int, ...] = ()
        try:
            self._open()
        except OSError as error:
            raise PromptError(
                f"{self.path}: cannot be read ({error.strerror or error}), and the plan's prompts (SHA-256 "
                f"{file.sha256}) stand in it; copy the file there"
            ) from None

    def _open(self) -> None:
        raw = _regular(self.path)  # stays open
        gzipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        self._stamp = _stamp(raw)  # before the bytes are read: what is written meanwhile shows
        if gzipped:
            with raw, _named_faults(self.path):
                self._stream = tempfile.TemporaryFile()  # noqa: SIM115 - stays open
                found = self._hash(gzip.GzipFile(fileobj=raw), self._stream.write)  # type: ignore[arg-type]
                self._stream.flush()
                self._stamp = _stamp(self._stream)  # nobody else has this file
        else:
            self._stream = raw
            found = self._hash(raw)
        if found != self.file.sha256:
            self.close()
            raise PromptError(
                f"{self.path}: has SHA-256 {found} (unpacked), the plan's prompts have {self.file.sha256}; put the "
                "same file there"
            )

    def _hash(self, stream: IO[bytes], keep: Callable[[bytes], Any] = lambda _: None) -> str:
        digest, total = hashlib.sha256(), 0
        while piece := stream.read(_CHUNK):
            digest.update(piece)
            keep(piece)
            total += len(piece)
            if total > MAX_BYTES:
                break
            self._pause()
        return digest.hexdigest()

    def is_current(self, file: PromptFile, path: str = "") -> bool:
        """Whether this is the text of `file`, of the same path, and nothing was written into it since."""
        return (self.file.sha256, self.path) == (file.sha256, Path(path or file.path)) and not self.changed

    @property
    def changed(self) -> bool:
        """Whether somebody wrote into the open file since it was compared: what was read since may be anything."""
        return self._stream is None or _stamp(self._stream) != self._stamp

    def value(self, place: int) -> bytes:
        """The JSON of a prompt or of its messages, as it stands in the file."""
        return self._bytes(int(self.file.start[place]), int(self.file.size[place]))

    def extra(self, place: int) -> dict[str, Any]:
        """The line's own body fields."""
        size = int(self.file.extra_size[place])
        return json.loads(self._bytes(int(self.file.extra_start[place]), size)) if size else {}

    def text(self, place: int) -> str:
        """All text of a prompt."""
        return prompt_text(json.loads(self.value(place)))[0]

    def _bytes(self, start: int, size: int) -> bytes:
        assert self._stream is not None
        self._stream.seek(start)
        found = self._stream.read(size)
        if len(found) != size:
            raise PromptError(f"{self.path}: became shorter while it was in use")
        return found

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _stamp(stream: IO[bytes]) -> tuple[int, int]:
    found = os.fstat(stream.fileno())
    return found.st_mtime_ns, found.st_size


_open: list[PromptText] = []


def open_text(file: PromptFile) -> PromptText:
    """The text of a file, opened once for the stages of a simulation. Raises PromptError."""
    if not (_open and _open[0].is_current(file)):
        while _open:
            _open.pop().close()
        _open.append(PromptText(file))
    return _open[0]
