"""The digests that a run folder lists, checked by hand: another path than `bench/records/digests.py`."""
from __future__ import annotations

import hashlib
import json
from pathlib import Path

from bench.records.digests import FILES, changes


def check_listed(run_dir: Path) -> None:
    """run.json lists every file that is there, and itself, as they are."""
    run = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    listed = run.pop("files")
    there = {name for name in FILES if (run_dir / name).exists()}
    assert set(listed) == there | {"run.json"}, run_dir
    for name in there:
        data = (run_dir / name).read_bytes()
        assert listed[name] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}, name
    said = json.dumps(run, sort_keys=True, separators=(",", ":")).encode()
    assert listed["run.json"] == {"sha256": hashlib.sha256(said).hexdigest()}
    assert changes(run_dir, listed) == []
