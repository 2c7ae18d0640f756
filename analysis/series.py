"""Curves and tables for the report: in-flight, heatmap, worst rows, clients.

Input: arrays of the whole run. Output: plain lists of bounded size.
Does not: judge, or thin by chance (thinning keeps the largest value of each bin).
"""
from __future__ import annotations

import math
from typing import Any

import numpy as np

from analysis.load import OK, read_lines
from analysis.percentiles import nearest_rank
from analysis.row_checks import Checked
from analysis.run_files import Gauge

MAX_POINTS = 1200
HEAT_TIMES = 80
HEAT_LATENCIES = 48
WORST = 20


def total_in_flight(gauge: Gauge, step_s: float) -> tuple[np.ndarray, np.ndarray]:
    """Sum over workers on a regular grid (last value held), and the grid in seconds."""
    start, end = float(gauge.t_s.min()), float(gauge.t_s.max())
    grid = np.arange(start, end + step_s, step_s)
    total = np.zeros(len(grid))
    for worker in np.unique(gauge.worker):
        mine = gauge.worker == worker
        at = np.searchsorted(gauge.t_s[mine], grid, side="right") - 1
        values = gauge.in_flight[mine]
        total += np.where(at >= 0, values[np.clip(at, 0, None)], 0)
    return total, grid


def in_flight_series(gauge: Gauge | None) -> list[list[float]]:
    """At most 1,200 points [t_s, in_flight]; each is the largest value of its bin."""
    if gauge is None or not len(gauge):
        return []
    span = float(gauge.t_s.max() - gauge.t_s.min())
    total, grid = total_in_flight(gauge, max(0.1, span / 20000))
    if len(grid) <= MAX_POINTS:
        return [[round(float(t), 3), float(v)] for t, v in zip(grid, total, strict=True)]
    edges = np.linspace(0, len(grid), MAX_POINTS + 1).astype(int)[:-1]
    peak = np.maximum.reduceat(total, edges)
    return [[round(float(grid[e]), 3), float(v)] for e, v in zip(edges, peak, strict=True)]


def heatmap(intended_s: np.ndarray, e2e_s: np.ndarray, ok: np.ndarray) -> dict[str, Any]:
    """Counts by arrival time and latency (log bins); `failed` counts those that have no latency."""
    if not len(intended_s):
        return {}
    t_edges = np.linspace(float(intended_s.min()), float(intended_s.max()) + 1e-9, HEAT_TIMES + 1)
    usable = ok & np.isfinite(e2e_s) & (e2e_s > 0)
    column = np.clip(((intended_s - t_edges[0]) / (t_edges[1] - t_edges[0])).astype(int), 0, HEAT_TIMES - 1)
    result: dict[str, Any] = {
        "t_s": t_edges.round(3).tolist(),
        "failed": np.bincount(column[~ok], minlength=HEAT_TIMES).tolist(),
        "e2e_s": [],
        "counts": [],
    }
    if usable.any():
        values = np.log10(e2e_s[usable])
        low, high = math.floor(values.min() * 10) / 10, math.ceil(values.max() * 10 + 1e-9) / 10
        high = max(high, low + 0.1)
        row = np.clip(((values - low) / (high - low) * HEAT_LATENCIES).astype(int), 0, HEAT_LATENCIES - 1)
        counts = np.bincount(column[usable] * HEAT_LATENCIES + row, minlength=HEAT_TIMES * HEAT_LATENCIES)
        result["counts"] = counts.reshape(HEAT_TIMES, HEAT_LATENCIES).tolist()
        result["e2e_s"] = [float(f"{v:.4g}") for v in 10 ** np.linspace(low, high, HEAT_LATENCIES + 1)]
    return result


def worst_rows(checked: Checked, window: np.ndarray) -> list[dict[str, Any]]:
    """The slowest answered arrivals of all windows, at most 20, with their ids, slowest first."""
    ledger = checked.ledger
    e2e = np.where(window & (checked.status == OK), ledger["e2e_s"], np.nan)
    known = np.flatnonzero(np.isfinite(e2e))
    if not len(known):
        return []
    top = known[np.argsort(e2e[known])[::-1][:WORST]]
    text = read_lines(ledger, [int(i) for i in top])
    rows = []
    for i in top:
        full = text.get(int(i), {})
        row: dict[str, Any] = {k: int(ledger[k][i]) for k in ("stage", "repeat", "arrival", "worker")}
        row["request_id"] = full.get("request_id", "")
        row["status"], row["flags"] = full.get("status", "ok"), full.get("flags", "")
        for name in ("intended_s", "send_lag_s", "ttft_s", "tpot_s", "e2e_s"):
            row[name] = _number(ledger[name][i])
        for name in ("input_tokens", "output_tokens"):
            value = _number(ledger[name][i])
            row[name] = None if value is None else int(value)
        rows.append(row)
    return rows


def clients(checked: Checked, gauge: Gauge | None, info: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per worker: what it sent, how late, and its own state."""
    ledger = checked.ledger
    known = {int(w) for w in np.unique(ledger["worker"])} | (
        {int(w) for w in np.unique(gauge.worker)} if gauge is not None else set()
    )
    found = []
    for worker in sorted(w for w in known if w >= 0):
        rows = ledger["worker"] == worker
        lag = np.sort(ledger["send_lag_s"][rows & np.isfinite(ledger["send_lag_s"])])
        sent = int(len(lag))
        new = int(np.count_nonzero(rows & ledger.is_value("connection", "new")))
        entry: dict[str, Any] = {
            "worker": worker,
            "planned": int(rows.sum()),
            "sent": sent,
            "connections_new": new,
            "send_lag_p50_s": nearest_rank(lag, 0.50) if sent else None,
            "send_lag_p99_s": nearest_rank(lag, 0.99) if sent else None,
            "send_lag_max_s": float(lag[-1]) if sent else None,
        }
        entry |= _worker_state(gauge, worker)
        entry |= {k: v for k, v in (info[worker] if worker < len(info) else {}).items() if k not in entry}
        found.append(entry)
    return found


def _worker_state(gauge: Gauge | None, worker: int) -> dict[str, Any]:
    empty = {"loop_lag_p99_s": None, "cpu_mean_ratio": None, "cpu_max_ratio": None, "rss_max_bytes": None}
    if gauge is None:
        return empty
    mine = gauge.worker == worker
    lag = np.sort(gauge.loop_lag_s[mine & np.isfinite(gauge.loop_lag_s)])
    cpu = gauge.cpu_ratio[mine & np.isfinite(gauge.cpu_ratio)]
    rss = gauge.rss_bytes[mine & np.isfinite(gauge.rss_bytes)]
    return {
        "loop_lag_p99_s": nearest_rank(lag, 0.99) if len(lag) else None,
        "cpu_mean_ratio": float(cpu.mean()) if len(cpu) else None,
        "cpu_max_ratio": float(cpu.max()) if len(cpu) else None,
        "rss_max_bytes": int(rss.max()) if len(rss) else None,
    }


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
