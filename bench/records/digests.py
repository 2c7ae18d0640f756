"""Digests of the files of a finished run, and which of the files differ from them.

Input: a run folder; what its run.json lists under `files`. Output: name -> {bytes, sha256}; sentences.
Does not: judge a run, or sign it: who edits a file can list another digest.

1. A digest is of the content: a ledger that was packed with gzip later is the same file.
2. A folder that lists nothing (of an older version, of a run that was killed) has nothing to differ from.
3. run.json lists the digest of its own content but for `files` (`ledger.write_run` makes it); one that lists none has
   nothing to differ from.
4. hashlib and zlib give the interpreter free: `changes` may run beside the analysis in a thread.
"""
from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from bench.records.ledger import INFLIGHT, LOCUST_STATS, REQUESTS, RUN, STAGES, content_digest, find_requests
from bench.records.server import SERVER_METRICS

FILES = (REQUESTS, STAGES, INFLIGHT, SERVER_METRICS, LOCUST_STATS)
CHUNK = 1 << 20


def file_digests(run_dir: Path) -> dict[str, dict[str, Any]]:
    """`files` of run.json: name -> {bytes, sha256} of the files that are there. Raises OSError."""
    found = {name: _place(run_dir, name) for name in FILES}
    return {name: _digest(path) for name, path in found.items() if path is not None}


def changes(run_dir: Path, listed: Any) -> list[str]:
    """A sentence for each file that is not the one that `listed` (`files` of run.json) names; [] when it lists none."""
    if not isinstance(listed, dict) or not listed:
        return []
    found = [(name, _change(_place(run_dir, name), listed.get(name), name in listed)) for name in FILES]
    if RUN in listed:
        found.insert(0, (RUN, _own_change(run_dir / RUN, listed[RUN])))
    return [f"{name} was changed after the run ended: {what}" for name, what in found if what]


def _own_change(path: Path, told: Any) -> str:
    """What differs between run.json and the digest that it lists of itself; empty when nothing does."""
    told = told.get("sha256") if isinstance(told, dict) else told
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        here = content_digest(data) if isinstance(data, dict) else ""
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error})"
    if here == told:
        return ""
    return f"the SHA-256 of its content is {here[:16]}..., it lists {str(told)[:16]}..."


def _change(path: Path | None, told: Any, known: bool) -> str:
    """What differs; empty when nothing does."""
    if path is None:
        return "run.json lists it, and it is missing" if known else ""
    if not known:
        return "it is here, and run.json does not list it"
    told = told if isinstance(told, dict) else {}
    try:
        size = path.stat().st_size
        if path.suffix != ".gz" and size != told.get("bytes"):
            return f"{size} bytes, run.json lists {told.get('bytes')}"
        here = _digest(path)
    except (OSError, EOFError, zlib.error) as error:
        return f"it cannot be read ({error})"
    if here["bytes"] != told.get("bytes"):
        return f"{here['bytes']} bytes, run.json lists {told.get('bytes')}"
    if here["sha256"] != told.get("sha256"):
        return f"its SHA-256 is {here['sha256'][:16]}..., run.json lists {str(told.get('sha256'))[:16]}..."
    return ""


def _place(run_dir: Path, name: str) -> Path | None:
    if name == REQUESTS:
        return find_requests(run_dir)
    path = run_dir / name
    return path if path.is_file() else None


def _digest(path: Path) -> dict[str, Any]:
    with _open(path) as stream:
        total, size = hashlib.sha256(), 0
        while chunk := stream.read(CHUNK):
            total.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": total.hexdigest()}


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]
