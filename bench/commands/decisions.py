"""The decision log of a run folder, `decisions.ndjson`: one JSON object a line, as engine/journal.py makes them.

Input: entries, or a path. Output: lines; entries of one request. Does not: interpret them.
"""
from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DECISIONS = "decisions.ndjson"


@contextmanager
def writer(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that appends one entry; the file is closed at the end."""
    with path.open("w", encoding="utf-8") as handle:

        def write(entry: dict[str, Any]) -> None:
            handle.write(json.dumps(_plain(entry), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")

        yield write


def of_request(path: Path, request_id: str) -> list[dict[str, Any]]:
    """The entries of one request, in the order in which they were made."""
    mark = json.dumps(request_id)
    found = []
    with path.open(encoding="utf-8") as handle:
        for line in handle:
            if mark in line:
                entry = json.loads(line)
                if entry.get("request_id") == request_id:
                    found.append(entry)
    return found


def _plain(value: Any) -> Any:
    """JSON knows no infinity: absent is None."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
