"""Names of the rows of a trace: who sent a request (tenant), and of which kind it is (class).

Input: a name per row, or "". Output: `Labels`, counted by first appearance or by the names that a config declares.
Does not: know configs, plans or files.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.workload.packed import pack, unpack
from bench.workload.trace_rows import TraceError

MAX_NAMES = 1000  # different tenants, or classes


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

    def __init__(self, path: Path, what: str) -> None:
        self._path, self._what = path, what
        self._place = array("q")
        self._lines: dict[str, int] = {}
        self._index: dict[str, int] = {}

    def add(self, name: str, line: int) -> None:
        """The name of the next row; "" = none."""
        index = self._index.get(name)
        if index is None:
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
