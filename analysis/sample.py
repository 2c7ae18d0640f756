"""Single requests for the report's scatter plots: a bounded sample that keeps what is rare, and counts over all.

Input: the checked ledger and the windows of its stages. Output: one plain dict (`Analysis.points`).
Does not: draw, judge, or choose by chance (the same ledger gives the same sample).

1. At most LIMIT arrivals. Strata are (stage, outcome). Arrivals that missed the SLO get two thirds of the
   places when they need them; within the met and within the missed, small strata are kept whole and
   large ones share what is left equally.
2. Within a stratum the arrivals are ordered by latency and taken at equal steps, both ends included:
   the slowest and the fastest are always there.
3. `bins` are over ALL arrivals of the windows: equal counts by tokens; percentiles count what failed as
   endless.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.load import OK
from analysis.percentiles import nearest_rank
from analysis.row_checks import Checked
from bench.records.request import STATUSES

if TYPE_CHECKING:
    from analysis.stage import StageResult

LIMIT = 1500  # more dots hide each other in a picture of 500 px
MISSED_SHARE = 2 / 3
BINS = 8
OUTCOMES = ("met", "missed", *(s for s in STATUSES if s != "ok"))


def request_points(checked: Checked, results: list[StageResult], limit: int = LIMIT) -> dict[str, Any]:
    """The sample as columns, how many of how many it holds per outcome, and the bins; {} without arrivals."""
    stages = [r.public.stage for r in results]
    parts = [r.rows for r in results]
    rows = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    if not len(rows):
        return {}
    ledger = checked.ledger
    outcome = _outcomes(checked, results)
    stage = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
    values = {k: ledger[k][rows].astype(np.float64) for k in ("input_tokens", "output_tokens", "ttft_s", "e2e_s")}
    chosen = _choose(stage * len(OUTCOMES) + outcome, outcome, values["e2e_s"], limit)
    known = np.bincount(outcome, minlength=len(OUTCOMES))
    shown = np.bincount(outcome[chosen], minlength=len(OUTCOMES))
    return {
        "limit": limit,
        "arrivals": len(rows),
        "outcomes": {name: [int(shown[i]), int(known[i])] for i, name in enumerate(OUTCOMES) if known[i]},
        "stage": [stages[i] for i in stage[chosen]],
        "outcome": [OUTCOMES[i] for i in outcome[chosen]],
        **{name: [_short(v) for v in values[name][chosen]] for name in values},
        "bins": {
            "input_ttft": _bins(values["input_tokens"], values["ttft_s"], outcome),
            "output_e2e": _bins(values["output_tokens"], values["e2e_s"], outcome),
        },
    }


def _outcomes(checked: Checked, results: list[StageResult]) -> np.ndarray:
    """Index into OUTCOMES of every arrival of the windows."""
    parts = []
    for result in results:
        status = checked.status[result.rows]
        # `window_scores` is at most 1 exactly where the joint SLO was met
        answered = np.where(result.window_scores <= 1.0, 0, 1)
        parts.append(np.where(status == OK, answered, status + 1))
    return np.concatenate(parts)


def _choose(stratum: np.ndarray, outcome: np.ndarray, order: np.ndarray, limit: int) -> np.ndarray:
    """Indices of the sample, ascending."""
    n = len(stratum)
    if n <= limit:
        return np.arange(n)
    missed = outcome > 0
    room = min(int(np.count_nonzero(missed)), int(limit * MISSED_SHARE))
    room = max(room, limit - int(np.count_nonzero(~missed)))
    chosen = []
    for group, places in ((missed, room), (~missed, limit - room)):
        per_stratum = np.bincount(stratum[group])  # np.unique would sort a million small numbers
        keys = np.flatnonzero(per_stratum)
        counts = per_stratum[keys]
        for key, quota in zip(keys, _fair(counts, places), strict=True):
            mine = np.flatnonzero(stratum == key)
            mine = mine[np.argsort(np.where(np.isfinite(order[mine]), order[mine], np.inf), kind="stable")]
            chosen.append(mine[np.unique(np.linspace(0, len(mine) - 1, quota).round().astype(int))])
    return np.sort(np.concatenate(chosen))


def _fair(counts: np.ndarray, places: int) -> list[int]:
    """Places per stratum: small ones whole, the others equal parts of what is left."""
    quotas = [0] * len(counts)
    left = places
    for rank, i in enumerate(np.argsort(counts, kind="stable")):
        quotas[i] = min(int(counts[i]), left // (len(counts) - rank))
        left -= quotas[i]
    return quotas


def _bins(tokens: np.ndarray, latency: np.ndarray, outcome: np.ndarray) -> list[dict[str, Any]]:
    """At most BINS groups of arrivals with as many tokens, about equally large; unknown token counts are left out."""
    usable = np.isfinite(tokens)
    if not usable.any():
        return []
    tokens, latency, outcome = tokens[usable], latency[usable], outcome[usable]
    latency = np.where((outcome <= 1) & np.isfinite(latency), latency, math.inf)
    edges = np.unique(np.quantile(tokens, np.linspace(0, 1, BINS + 1), method="inverted_cdf"))
    last = max(len(edges) - 2, 0)
    group = np.zeros(len(tokens), dtype=np.int8)  # a small type, which numpy sorts in one pass over the data
    for edge in edges[1 : last + 1]:
        group += tokens >= edge
    order = np.argsort(group, kind="stable")
    ends = np.cumsum(np.bincount(group, minlength=last + 1))
    found = []
    for mine in np.split(order, ends[:-1]):
        if not len(mine):
            continue
        values, asked = np.sort(latency[mine]), tokens[mine]
        found.append({
            "low": int(asked.min()), "high": int(asked.max()), "n": int(len(values)),
            "p50_s": nearest_rank(values, 0.50), "p95_s": nearest_rank(values, 0.95),
            "missed": int(np.count_nonzero(outcome[mine] > 0)),
        })  # fmt: skip
    return found


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if np.isfinite(value) else None
