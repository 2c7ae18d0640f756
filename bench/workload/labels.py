"""Names of the rows of a trace: who sent a request (tenant), and of which kind it is (class).

Input: a name per row, or "". Output: `Labels`, counted by first appearance or by the names that a config declares.
Does not: know configs, plans or files.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.workload.packed import pack, unpack
from bench.workload.trace_rows import TraceError

MAX_NAMES = 1000  # different tenants, or classes
KEY_FOUND = "holds the API key of the environment"
_SHOWN_KEY = 12  # characters of a key that no complaint may show
_MIN_KEY = 8  # characters; shorter keys are not searched for, as in a config


def refuse_key(text: str, what: str, keys: Iterable[str]) -> None:
    """Raise TraceError, without showing it, when a label that goes into the ledger holds one of the API keys."""
    if text and any(len(key) >= _MIN_KEY and key in text for key in keys):
        raise TraceError(f"{what} {KEY_FOUND}, and labels stand in the ledger; take it out")


def hide_key(text: str, keys: Iterable[str]) -> str:
    """A complaint about a file, or words without it when it shows the start of an API key."""
    if any(len(key) >= _MIN_KEY and key[:_SHOWN_KEY] in text for key in keys):
        return f"what is wrong there {KEY_FOUND}; take it out"
    return text


def fault_code(line: str) -> str:
    """Code of a complaint about a file that the config names."""
    return "CFG-010" if KEY_FOUND in line else "CFG-040"


@dataclass(frozen=True, eq=False)
class Labels:
    """A name for each row: `names[place[i]]`; "" where the row has none. `lines` says where each name stood first."""

    names: tuple[str, ...] = ()
    place: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    lines: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names)

    def shares(self) -> list[float]:
        """Share of the rows with each name."""
        return (np.bincount(self.place, minlength=len(self.names)) / len(self.place)).tolist()

    def take(self, keep: np.ndarray) -> Labels:
        """The labels of a mask, without names that no kept row has; none when that leaves only ""."""
        if not self:
            return self
        used, place = np.unique(self.place[keep], return_inverse=True)
        names = tuple(self.names[i] for i in used.tolist())
        return Labels(names, place, tuple(self.lines[i] for i in used.tolist())) if names != ("",) else Labels()

    def counted_in(self, known: Sequence[str], *, file: str, what: str, section: str) -> Labels:
        """The same labels by their place in `known`, with "" after it when rows of nobody are there.

        Raises ValueError (file, line, name, what is allowed) for any other name.
        """
        for name, line in zip(self.names, self.lines, strict=True):
            if name and name not in known:
                raise ValueError(
                    f"{file}:{line}: {what} is {name!r}, the config's {section} are {', '.join(known)}; declare it "
                    f"there, or declare no {section} to take the names of the file"
                )
        names = (*known, "") if "" in self.names and "" not in known else tuple(known)
        return Labels(names, np.array([names.index(name) for name in self.names], dtype=np.int64)[self.place])

    def to_dict(self) -> dict[str, Any] | None:
        """JSON-able form; None when empty."""
        return {"names": list(self.names), "place": pack(self.place)} if self else None

    @classmethod
    def from_dict(cls, data: dict[str, Any] | None) -> Labels:
        """The labels in a `to_dict` form."""
        return cls(tuple(data["names"]), unpack(data["place"])) if data else cls()


class Names:
    """Names of the rows as numbers, in order of first appearance."""

    def __init__(self, path: Path, what: str, keys: frozenset[str] = frozenset()) -> None:
        self._path, self._what, self._keys = path, what, keys
        self._place = array("q")
        self._lines: dict[str, int] = {}
        self._index: dict[str, int] = {}

    def add(self, name: str, line: int) -> None:
        """The name of the next row; "" = none."""
        index = self._index.get(name)
        if index is None:
            refuse_key(name, f"{self._path}:{line}: {self._what}", self._keys)
            index = self._index[name] = len(self._index)
            self._lines[name] = line
            if index >= MAX_NAMES:
                raise TraceError(f"{self._path}:{line}: more than {MAX_NAMES} different names of {self._what}")
        self._place.append(index)

    def labels(self) -> Labels:
        """All of them; empty when no row had a name."""
        if set(self._index) <= {""}:
            return Labels()
        return Labels(tuple(self._index), np.frombuffer(self._place, dtype=np.int64), tuple(self._lines.values()))
