"""What the service says of itself, beside what we measured: over time, and per stage.

Input: `server_metrics.csv` as `ServerGauge`, the ledger, the windows. Output: one plain dict (`Analysis.server`).
Does not: judge; Little's law with the service's own count is in `little.py`.

1. A total that falls between two scrapes belongs to a service that was started anew: no difference is taken there.
2. Server and client TTFT of a stage are means over the same time: the first tokens between the last scrape
   before the window and the last scrape in it. Ours starts when the request was sent, as the service's can not
   start earlier.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.row_checks import Checked
from analysis.run_files import ServerGauge
from bench.records.stage import StageRow

if TYPE_CHECKING:
    from analysis.stage import StageResult

MAX_POINTS = 600


def server_view(
    server: ServerGauge | None, checked: Checked, rows: list[StageRow], results: list[StageResult]
) -> dict[str, Any]:
    """{"samples", "series", "stages"}; {} when the service was not scraped."""
    if server is None or not len(server.t_s):
        return {}
    return {
        "samples": len(server.t_s),
        "series": _series(server),
        "stages": [_stage(server, checked, row, r) for row, r in zip(rows, results, strict=True)],
    }


def _series(server: ServerGauge) -> dict[str, list[float | None]]:
    """At most MAX_POINTS samples; of each group the largest level, and the sum of the preemptions."""
    n = len(server.t_s)
    starts = np.unique(np.linspace(0, n, min(n, MAX_POINTS) + 1).astype(int)[:-1])
    fresh = _steps(server.preemptions_total)
    largest = {"running": server.running, "waiting": server.waiting, "kv_usage": server.kv_usage}
    out: dict[str, list[float | None]] = {"t_s": [round(float(t), 2) for t in server.t_s[starts]]}
    for name, values in largest.items():
        out[name] = [_number(v) for v in np.fmax.reduceat(values, starts)]
    known = np.isfinite(fresh)
    sums = np.add.reduceat(np.where(known, fresh, 0.0), starts)
    any_known = np.logical_or.reduceat(known, starts)
    out["preemptions"] = [float(v) if k else None for v, k in zip(sums, any_known, strict=True)]
    return out


def _steps(total: np.ndarray) -> np.ndarray:
    """Growth of a total since the sample before; NaN where it is unknown or the total fell."""
    steps = np.full(len(total), np.nan)
    steps[1:] = np.diff(total)
    return np.where(steps >= 0, steps, np.nan)


def _stage(server: ServerGauge, checked: Checked, row: StageRow, result: StageResult) -> dict[str, Any]:
    """Server and client numbers of one window."""
    inside = (server.t_s >= row.window_start_s) & (server.t_s < row.window_end_s)
    picked = np.flatnonzero(inside)
    out: dict[str, Any] = {"stage": row.stage, "repeat": row.repeat, "samples": len(picked)}
    if not len(picked):
        return out
    first, last = max(int(picked[0]) - 1, 0), int(picked[-1])
    count = _growth(server.ttft_count, first, last)
    total = _growth(server.ttft_sum_s, first, last)
    ledger = checked.ledger
    mine = (ledger["stage"] == row.stage) & (ledger["repeat"] == row.repeat)
    tokens, sent = ledger["first_token_s"][mine], ledger["sent_s"][mine]
    same_time = (tokens > server.t_s[first]) & (tokens <= server.t_s[last]) & np.isfinite(sent)
    ours = (tokens - sent)[same_time]
    queued, queue = _growth(server.queue_count, first, last), _growth(server.queue_sum_s, first, last)
    kv = server.kv_usage[picked]
    return out | {
        "running_mean": _mean(server.running[picked]),
        "waiting_mean": _mean(server.waiting[picked]),
        "kv_mean_ratio": _mean(kv),
        "kv_max_ratio": _number(np.nanmax(kv)) if np.isfinite(kv).any() else None,
        "preemptions": _growth(server.preemptions_total, first, last),
        "server_ttft_mean_s": total / count if count and total is not None else None,
        "server_ttft_n": None if count is None else int(count),
        "client_ttft_mean_s": float(ours.mean()) if len(ours) else None,
        "client_ttft_n": int(len(ours)),
        "server_queue_mean_s": queue / queued if queued and queue is not None else None,
        "in_flight_mean_client": result.public.little.in_flight_mean_integral,
    }


def _growth(total: np.ndarray, first: int, last: int) -> float | None:
    """Growth of a total from sample `first` to sample `last`; None where it is unknown or fell on the way."""
    part = total[first : last + 1]
    part = part[np.isfinite(part)]
    if len(part) < 2 or (np.diff(part) < 0).any():
        return None
    return float(part[-1] - part[0])


def _mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if np.isfinite(value) else None
