"""Little's law on one window, from sources that do not share code.

Input: sent and done times of the rows, samples of the sender's gauge and of the
service's own counters. Output: `Little`, with what each comparison can prove.
Does not: decide on stationarity (that is `stationarity.py`).

1. Identity: integral of N(t) over the window = sum of W over the window's arrivals
   + Rs - Re. It holds for any set of rows; it fails only when rows are missing or
   times are broken. Evidence of bookkeeping, not of steady state.
2. The gauge counts streams as they open and close and never sees a row; it is
   compared with N(t) of the rows at the very instants at which it was read, so that
   neither its sampling nor the window's edges blur the comparison.
3. L / (lambda W) - 1 = (Rs - Re)/(lambda W T): near 0 in steady state, and exactly
   -(1 - X/lambda) in overload. A 20 % line on it is blind below lambda = 1.25 X.

Source: docs/analysis.md "Little's law"; Kim & Whitt 2013.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.intervals import ratio_interval
from analysis.run_files import Gauge, ServerGauge
from bench.records.analysis import Little
from bench.records.sentences import render, said, text_of

IDENTITY_LIMIT = 1e-9  # relative; both sides are sums of the same doubles in another order
GAUGE_LIMIT = 0.02  # gauge against rows at the same instants: 2 %
GAUGE_SLACK = 0.2  # and this many requests, for stages with hardly anything in flight
GAUGE_OPEN_S = 0.005  # the gauge counts from the decision to send, rows from the last byte written
LEGACY_LIMIT = 0.20  # the reference's line, shown beside the others
MAX_GAUGE_GAP_S = 1.0  # ten missed samples: the gauge stood still
SUBWINDOWS = 10


@dataclass(frozen=True)
class Identity:
    """Both sides of the edge-corrected identity over [t0, t1); request-seconds."""

    integral: float  # integral of N(t), by sweeping over the events
    residence_sum: float  # sum of W over requests sent in the window
    edge_start: float  # Rs
    edge_end: float  # Re
    arrivals: int
    departures: int

    @property
    def residual(self) -> float:
        """(left - right) / the larger of both sides; 0 for an empty window."""
        right = self.residence_sum + self.edge_start - self.edge_end
        scale = max(abs(self.integral), abs(self.residence_sum), self.edge_start, self.edge_end)
        return (self.integral - right) / scale if scale > 0 else 0.0


def identity(sent_s: np.ndarray, done_s: np.ndarray, t0: float, t1: float) -> Identity:
    """The identity for requests with `sent_s <= done_s` (n,), window [t0, t1) in seconds."""
    inside = (sent_s >= t0) & (sent_s < t1)
    before = (sent_s < t0) & (done_s > t0)
    residence = float(np.sum(done_s[inside] - sent_s[inside]))
    edge_start = float(np.sum(np.minimum(done_s[before], t1) - t0))
    edge_end = float(np.sum(np.maximum(done_s[inside] - t1, 0.0)))
    return Identity(
        integral=_sweep_integral(sent_s, done_s, t0, t1),
        residence_sum=residence,
        edge_start=edge_start,
        edge_end=edge_end,
        arrivals=int(np.count_nonzero(inside)),
        departures=int(np.count_nonzero((done_s >= t0) & (done_s < t1))),
    )


def _sweep_integral(sent_s: np.ndarray, done_s: np.ndarray, t0: float, t1: float) -> float:
    """Integral of N(t): events in time order, N constant between them. Another path than summing W."""
    touching = (sent_s < t1) & (done_s > t0)
    start = np.sort(np.clip(sent_s[touching], t0, t1)) - t0
    end = np.sort(np.clip(done_s[touching], t0, t1)) - t0
    times = np.concatenate([start, end])
    steps = np.concatenate([np.ones(len(start)), -np.ones(len(end))])
    order = np.argsort(times, kind="stable")
    times, level = times[order], np.cumsum(steps[order])
    if not len(times):
        return 0.0
    return float(np.sum(level[:-1] * np.diff(times)) + level[-1] * (t1 - t0 - times[-1]))


def in_flight_at(t_s: np.ndarray, sent_s: np.ndarray, done_s: np.ndarray) -> np.ndarray:
    """N(t) of the rows at the instants `t_s`."""
    return np.searchsorted(np.sort(sent_s), t_s, side="right") - np.searchsorted(np.sort(done_s), t_s, side="right")


def time_mean(t_s: np.ndarray, values: np.ndarray, t0: float, t1: float) -> float | None:
    """Time average over [t0, t1] by the trapezoid rule, ends held; None without samples inside."""
    inside = (t_s >= t0) & (t_s <= t1)
    t, v = t_s[inside], values[inside]
    if len(t) == 0 or t1 <= t0:
        return None
    area = float(np.sum((v[1:] + v[:-1]) / 2 * np.diff(t)))
    area += float(v[0] * (t[0] - t0) + v[-1] * (t1 - t[-1]))
    return area / (t1 - t0)


@dataclass(frozen=True)
class GaugeReading:
    """What the sender's gauge says about one window."""

    mean: float | None  # L by the gauge
    bias: float | None  # mean of (gauge - rows) at the instants of the samples, requests
    samples: int
    largest_gap_s: float | None


def read_gauge_window(
    gauge: Gauge | None, sent_s: np.ndarray, done_s: np.ndarray, worker: np.ndarray, t0: float, t1: float
) -> GaugeReading:
    """The gauge over [t0, t1], and its bias against the rows of the same workers."""
    if gauge is None or len(gauge) == 0:
        return GaugeReading(None, None, 0, None)
    total, bias, samples, gap = 0.0, 0.0, 0, 0.0
    same_workers = set(np.unique(worker)) <= {int(w) for w in np.unique(gauge.worker)}
    for w in np.unique(gauge.worker):
        mine = gauge.worker == w
        t, v = gauge.t_s[mine], gauge.in_flight[mine]
        mean = time_mean(t, v, t0, t1)
        inside = (t >= t0) & (t <= t1)
        if mean is None:
            gap = math.inf
            continue
        total += mean
        samples += int(inside.sum())
        gap = max(gap, float(np.max(np.diff(np.concatenate([[t0], t[inside], [t1]])))))
        rows = worker == int(w)
        counted = in_flight_at(t[inside], sent_s[rows], done_s[rows])
        bias += float(np.mean(v[inside] - counted))
    if samples == 0:
        return GaugeReading(None, None, 0, None)
    return GaugeReading(total, bias if same_workers else None, samples, gap)


def server_mean(server: ServerGauge | None, t0: float, t1: float) -> float | None:
    """The service's own running + waiting, averaged over the window."""
    if server is None:
        return None
    both = server.running + server.waiting
    known = np.isfinite(both)
    return time_mean(server.t_s[known], both[known], t0, t1)


def outside(
    server: ServerGauge | None, sent_s: np.ndarray, done_s: np.ndarray, t0: float, t1: float
) -> tuple[float, float] | None:
    """(mean, standard error) of N(t) of the rows less the service's own count, requests; None without two samples.

    At the instants of its samples: a page that is read once a second misses most of what happens, so its time mean
    alone was up to 15 % off in windows of a minute (docs/evidence/outside-engine.md). Errors of samples one after the
    other are taken together in SUBWINDOWS batches where there are enough.
    """
    if server is None:
        return None
    both = server.running + server.waiting
    inside = np.isfinite(both) & (server.t_s >= t0) & (server.t_s <= t1)
    apart = in_flight_at(server.t_s[inside], sent_s, done_s) - both[inside]
    if len(apart) < 2:
        return None
    parts = np.array_split(apart, SUBWINDOWS) if len(apart) >= 2 * SUBWINDOWS else apart
    means = np.array([float(np.mean(part)) for part in parts])
    return float(apart.mean()), float(means.std(ddof=1) / math.sqrt(len(means)))


def little(
    *,
    sent_s: np.ndarray,
    done_s: np.ndarray,
    worker: np.ndarray,
    t0: float,
    t1: float,
    gauge: Gauge | None,
    server: ServerGauge | None,
) -> Little:
    """Little's law over [t0, t1) for every request that was sent, failed ones included.

    `sent_s`, `done_s`, `worker`: (n,) of all requests of the run that were sent, so that
    those already in flight at t0 are counted.
    """
    window_s = t1 - t0
    found = identity(sent_s, done_s, t0, t1)
    reading = read_gauge_window(gauge, sent_s, done_s, worker, t0, t1)
    l_server = server_mean(server, t0, t1)
    if found.arrivals == 0 or window_s <= 0:
        return Little(None, None, None, reading.mean, l_server, None, None, None, None,
                      gauge_samples=reading.samples, note=render("little.none", {}), code="little.none")  # fmt: skip
    arrival_qps = found.arrivals / window_s
    lambda_w = found.residence_sum / window_s
    l_integral = found.integral / window_s
    ok, note = _judge(found, reading, l_integral, lambda_w, arrival_qps)
    apart = outside(server, sent_s, done_s, t0, t1)
    return Little(
        arrival_qps=arrival_qps,
        residence_mean_s=found.residence_sum / found.arrivals,
        in_flight_mean_integral=l_integral,
        in_flight_mean_gauge=reading.mean,
        in_flight_mean_server=l_server,
        lambda_w=lambda_w,
        gap_ratio_gauge=_gap(reading.mean, lambda_w),
        gap_ratio_server=-apart[0] / lambda_w if apart and lambda_w > 0 else _gap(l_server, lambda_w),
        identity_residual=found.residual,
        edge_start_s=found.edge_start,
        edge_end_s=found.edge_end,
        gauge_samples=reading.samples,
        outside_s=apart[0] / arrival_qps if apart else None,
        outside_se_s=apart[1] / arrival_qps if apart else None,
        ok=ok,
        note=text_of(note),
        code=note["code"],
        params=note["params"],
    )


def _gap(measured: float | None, lambda_w: float) -> float | None:
    return (measured - lambda_w) / lambda_w if measured is not None and lambda_w > 0 else None


def _judge(
    found: Identity, reading: GaugeReading, l_integral: float, lambda_w: float, arrival_qps: float
) -> tuple[bool | None, dict[str, Any]]:
    """True/False/None (no independent count), and one sentence that names the source of L."""
    if abs(found.residual) > IDENTITY_LIMIT:
        return False, said("little.identity", residual=found.residual)
    edges = (found.edge_start - found.edge_end) / found.residence_sum if found.residence_sum > 0 else 0.0
    if reading.mean is None:
        return None, said("little.no_gauge", in_flight=l_integral, edges_ratio=edges)
    bias = reading.bias if reading.bias is not None else reading.mean - l_integral
    limit = max(GAUGE_LIMIT * l_integral, GAUGE_SLACK, GAUGE_OPEN_S * arrival_qps)
    stopped = reading.largest_gap_s is None or reading.largest_gap_s > MAX_GAUGE_GAP_S
    counted = said("little.gauge", gauge=reading.mean, lambda_w=lambda_w, edges_ratio=edges, bias=bias, limit=limit)
    if stopped:
        return None, said("little.stopped", gap_s=MAX_GAUGE_GAP_S, rest=counted)
    return abs(bias) <= limit, counted


def indirect_residence(
    sent_s: np.ndarray, done_s: np.ndarray, t0: float, t1: float, batches: int = SUBWINDOWS
) -> tuple[float, float, float] | None:
    """Mean residence by L/lambda over sub-windows with its 95 % interval, seconds; None when too short."""
    edges = np.linspace(t0, t1, batches + 1)
    parts = [identity(sent_s, done_s, a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    width = (t1 - t0) / batches
    lengths = np.array([p.integral / width for p in parts])
    rates = np.array([p.arrivals / width for p in parts])
    return ratio_interval(lengths, rates)
