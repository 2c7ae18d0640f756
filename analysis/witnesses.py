"""Which independent records a run must have beside its ledger, and which of them are missing.

Input: `run.json`, and whether the files can be used. Output: names of missing files.
Does not: compare anything (`csv_check.py` and `little.py` do).

1. A run of `bench run`, or of Locust with the project's locustfiles, writes `locust_stats.csv` (the counts and
   latencies that Locust collected) and `inflight.csv` (a gauge that never sees a row). Each can contradict the ledger.
2. A simulated run has no Locust. A run that `bench recover` put together has no table of its own, and the gauge only
   where a worker kept it. Without run.json nobody knows what the folder should hold. None of them lacks anything here.
"""
from __future__ import annotations

from typing import Any

from bench.records.ledger import INFLIGHT, LOCUST_STATS


def missing_witnesses(raw: dict[str, Any], *, locust_stats: bool, gauge: bool) -> tuple[str, ...]:
    """Names of the witnesses that a run should have and has not. `raw`: run.json, {} when it is missing.

    `locust_stats`: the table is there; `gauge`: it has samples.
    """
    if not raw or raw.get("simulated") or _put_together(raw):
        return ()
    return tuple(name for name, there in ((LOCUST_STATS, locust_stats), (INFLIGHT, gauge)) if not there)


def _put_together(raw: dict[str, Any]) -> bool:
    """Whether `bench recover` wrote the folder: of a lost master, or of parts."""
    if any("put together by `bench recover`" in str(problem) for problem in raw.get("problems") or []):
        return True
    return any(isinstance(w, dict) and "part" in w for w in raw.get("worker_info") or [])
