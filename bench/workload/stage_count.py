"""Counts of one stage as its rows come, in bounded memory: attainment, latencies, and the `abort` gates that it misses.

Input: the stage of the plan, the SLO, rows. Output: `Stage` numbers; the gates that a finished stage missed, in words.
Does not: judge (`analysis/` does, from the files), keep a row, or read a clock. Used while a run is measured (the
live view) and while one is simulated.

1. Attainment so far is over every arrival of the window that was due by now. An open one is neither hit nor miss,
   so attainment is a pair: (met / due, (met + open) / due). The pair closes as answers end.
   What was planned after a stop was never due: it is counted apart (`after_stop`), as the analysis leaves it out.
2. Latencies go into bins 2 % wide; a percentile is the upper edge of its bin, so it is at most 2 % too high.
   An arrival that failed counts as infinite.
3. A gate is looked at when its stage has ended and all its rows are there, with exact counts, no bins.
4. An answer of a few tokens has no TPOT and meets that clause; one of many whose TPOT was not measured does not.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from bench.records.clauses import lag_limit_s, tpot_unmeasured
from bench.records.packing import Batch
from bench.workload.plan import Plan
from bench.workload.plan import Stage as PlannedStage

BIN_RATIO = 1.02
LOWEST_S = 1e-5  # 10 µs: nothing that crosses a network is shorter
_LOG_RATIO = math.log(BIN_RATIO)
# Fewest values for which a percentile is more than its own maximum; the same numbers as in the analysis.
MIN_SAMPLES = {"p50": 6, "p90": 36, "p95": 72, "p99": 368}
SHARES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99, "max": 1.0}
LATENCIES = {
    "ttft": "ttft_s", "ttfo": "ttfo_s", "tpot": "tpot_s", "e2e": "e2e_s", "residence": "residence_s",
    "send_lag": "send_lag_s", "itl_p99": "itl_p99_s",
}  # fmt: skip
FAILED_IS_INFINITE = ("ttft", "ttfo", "tpot", "e2e")
Z_95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
SAME_RATE = 1e-6


class Seen(NamedTuple):
    """The columns of a ledger row that are looked at here."""

    status: str
    phase: str
    request_class: str
    intended_s: float
    sent_s: float | None
    done_s: float | None
    send_lag_s: float | None
    ttft_s: float | None
    ttfo_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    residence_s: float | None
    itl_p99_s: float | None
    code: str
    flags: str
    output_tokens: int | None
    reasoning_tokens: int | None
    max_tokens: int | None
    chunks: int | None


_seen = attrgetter(*Seen._fields)
# What decides whether an answer without a TPOT is a short one.
LENGTHS = ("flags", "output_tokens", "reasoning_tokens", "max_tokens", "chunks")
_lengths = attrgetter(*LENGTHS)


def seen(rows: Any) -> Iterable[Seen]:
    """The looked-at columns of `RequestRow`s, or of a batch that gives its columns by name."""
    if hasattr(rows, "column"):
        return map(Seen._make, zip(*(rows.column(name) for name in Seen._fields), strict=True))
    return (Seen._make(_seen(row)) for row in rows)


def wilson_low(share: float, n: int) -> float:
    """Lower end of the 95 % Wilson interval of a share of n; the upper end is 1 - wilson_low(1 - share, n).

    (p + z²/2n - z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), as the analysis has it for independent arrivals.
    """
    z2 = Z_95 * Z_95 / n
    return (share + z2 / 2 - math.sqrt(z2 * share * (1 - share) + z2 * z2 / 4)) / (1 + z2)


class Histogram:
    """Counts of positive seconds in bins 2 % wide, and of values that never ended."""

    __slots__ = ("bins", "n", "infinite")

    def __init__(self) -> None:
        self.bins: dict[int, int] = {}
        self.n = 0
        self.infinite = 0

    def add(self, seconds: float) -> None:
        """Count one value; inf = never finished."""
        self.n += 1
        if seconds == math.inf:
            self.infinite += 1
            return
        index = math.ceil(math.log(max(seconds, LOWEST_S) / LOWEST_S) / _LOG_RATIO)
        self.bins[index] = self.bins.get(index, 0) + 1

    def add_all(self, seconds: np.ndarray) -> None:
        """Count many values."""
        self.n += len(seconds)
        finite = seconds[np.isfinite(seconds)]
        self.infinite += len(seconds) - len(finite)
        bins = np.ceil(np.log(np.maximum(finite, LOWEST_S) / LOWEST_S) / _LOG_RATIO).astype(np.int64)
        for index, count in zip(*(part.tolist() for part in np.unique(bins, return_counts=True)), strict=True):
            self.bins[index] = self.bins.get(index, 0) + count

    def percentile(self, share: float) -> float | None:
        """Nearest rank in seconds, at most 2 % too high; None of nothing, inf when that rank never finished."""
        if not self.n:
            return None
        rank = max(1, math.ceil(round(share * self.n, 9)))
        if rank > self.n - self.infinite:
            return math.inf
        seen = 0
        for index in sorted(self.bins):
            seen += self.bins[index]
            if seen >= rank:
                return LOWEST_S * BIN_RATIO**index
        return math.inf


@dataclass(frozen=True)
class Slo:
    """Deadlines of an arrival by its class ("" = all others) and the share that must meet them."""

    ttft_s: float
    tpot_s: float
    e2e_s: float
    target: float
    classes: dict[str, tuple[float, float]] = field(default_factory=dict)

    def deadlines(self, request_class: str) -> tuple[float, float]:
        """(TTFT, TPOT) deadline in seconds."""
        return self.classes.get(request_class) or (self.ttft_s, self.tpot_s)


class GateCount:
    """One `abort` gate on one stage: exact counts of what its comparison needs."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.metric, self.statistic = spec["metric"], spec["statistic"]
        self.operator = spec["operator"]
        self.latency = self.metric in LATENCIES
        self.limit = spec["value"] / 1000 if self.latency else spec["value"]
        self.n = self.inside = 0
        self.sum_s = 0.0

    @property
    def words(self) -> str:
        """`ttft p95 <= 800 at all`, as in the config."""
        what = self.metric if self.statistic == "value" else f"{self.metric} {self.statistic}"
        at = self.spec["at"]
        return f"{what} {self.operator} {self.spec['value']:g} at {at if isinstance(at, str) else format(at, 'g')}"

    def add(self, row: Seen) -> None:
        """Count one row of the window."""
        if not self.latency:
            return
        value: float | None = getattr(row, LATENCIES[self.metric])
        if row.status != "ok" and self.metric in FAILED_IS_INFINITE:
            value = math.inf
        if value is None:
            return
        self.n += 1
        self.sum_s += value
        strict = self.operator in ("<", ">=")  # "P < L" and "P >= L" both ask how many lie below L
        self.inside += value < self.limit if strict else value <= self.limit

    def missed(self, stage: Stage) -> str:
        """Why the ended stage misses the gate, as a sentence; empty when it does not, or cannot tell."""
        if self.latency and self.statistic in SHARES:
            return self._percentile_missed(stage)
        value = (self.sum_s / self.n if self.n else None) if self.latency else stage.number(self.metric)
        if value is None or compare(value, self.operator, self.limit):
            return ""
        return self._sentence(stage, f"{value * 1000:.4g} ms" if self.latency else f"{value:.4g}")

    def _percentile_missed(self, stage: Stage) -> str:
        if self.n < MIN_SAMPLES.get(self.statistic, 1):
            return ""
        share = SHARES[self.statistic]
        rank = max(1, math.ceil(round(share * self.n, 9)))
        below = self.inside >= rank  # the percentile lies at or under the limit (under it when strict)
        if below == (self.operator in ("<=", "<")):
            return ""
        return self._sentence(stage, f"{self.inside} of {self.n} within the limit, {rank} are needed")

    def _sentence(self, stage: Stage, found: str) -> str:
        return f"gate {self.words} was missed in {stage.plan.name}: {found}"


def compare(value: float, operator: str, limit: float) -> bool:
    """Whether `value operator limit` holds."""
    if operator == "<=":
        return value <= limit
    if operator == "<":
        return value < limit
    return value >= limit if operator == ">=" else value > limit


def applies(gate: dict[str, Any], stage: PlannedStage, plan: Plan, target_qps: float | None) -> bool:
    """Whether a gate speaks about this stage: by `at`, which is target, max, all, run or a rate."""
    at = gate["at"]
    if at in ("all", "run"):
        return True
    rates = {"target": target_qps, "max": max(s.offered_qps for s in plan.stages)}
    rate = rates[at] if at in rates else float(at)
    return rate is not None and abs(stage.offered_qps - rate) <= SAME_RATE * max(rate, 1.0)


class Stage:
    """Counts of one stage so far. Times are seconds from the run's start."""

    def __init__(self, plan: PlannedStage, slo: Slo, gates: list[GateCount], *, loop: str) -> None:
        self.plan, self.slo, self.gates, self.loop = plan, slo, gates, loop
        self.state = "preparing"  # preparing, sending, draining, ended
        self.start_s: float | None = None
        self.marks: list[str] = []
        self._due_s: Sequence[float] = ()  # intended times of the window, ascending, from the stage's start
        self.planned = 0  # of the window
        self.rows = self.met = self.met_ttft = self.met_tpot = self.met_e2e = self.ok = 0
        self.done_in_window = 0
        self.all_rows = self.all_sent = 0  # warm-up too
        self.statuses: dict[str, int] = {}
        self.ttft, self.tpot, self.e2e, self.send_lag = Histogram(), Histogram(), Histogram(), Histogram()
        self.unmeasured = 0  # answers of many tokens without a TPOT
        self.lag_limit_s = lag_limit_s(slo.ttft_s)
        self.in_time = 0  # sends of the window within that limit
        self.in_flight_max = 0
        self.ended_s: float | None = None
        self.halted_s = math.inf  # run time of a stop
        self.after_stop = 0  # rows of arrivals that were planned after it
        self.cancelled = 0  # rows of the window whose open answer a stop ended: nobody knows how they would have ended

    def plan_arrivals(self, intended_s: Sequence[float]) -> None:
        """The schedule's intended times, ascending, from the stage's start."""
        self._due_s = intended_s[bisect_left(intended_s, self.plan.warmup_s) :]
        self.planned = len(self._due_s)

    def begin(self, start_s: float) -> None:
        """Arrivals are due from now on."""
        self.start_s, self.state = start_s, "sending"

    def halt(self, now_s: float) -> None:
        """Stopped: no arrival is due from now on."""
        self.halted_s = now_s
        if self.start_s is not None and self.loop == "open":
            self._due_s = self._due_s[: bisect_left(self._due_s, now_s - self.start_s)]
            self.planned = len(self._due_s)

    def add(self, row: Seen) -> None:
        """Count one row."""
        if row.intended_s >= self.halted_s and row.sent_s is None:
            self.after_stop += 1
            return
        self.all_rows += 1
        self.all_sent += row.sent_s is not None
        ok = row.status == "ok"
        if ok and row.done_s is not None and self.start_s is not None:
            self.done_in_window += self.plan.warmup_s <= row.done_s - self.start_s < self.plan.duration_s
        if row.phase != "window":
            return
        if row.send_lag_s is not None:
            self.send_lag.add(row.send_lag_s)
            self.in_time += row.send_lag_s <= self.lag_limit_s
        self.rows += 1
        self.cancelled += row.code == "CL-CANCEL"
        self.ok += ok
        self.statuses[row.status] = self.statuses.get(row.status, 0) + 1
        ttft_limit, tpot_limit = self.slo.deadlines(row.request_class)
        met_ttft = ok and row.ttft_s is not None and row.ttft_s <= ttft_limit
        unmeasured = ok and row.tpot_s is None and tpot_unmeasured(*_lengths(row))
        timed = ok and row.ttft_s is not None and not unmeasured
        met_tpot = timed and (row.tpot_s is None or row.tpot_s <= tpot_limit)
        self.unmeasured += unmeasured
        self.met_ttft += met_ttft
        self.met_tpot += met_tpot
        self.met += met_ttft and met_tpot
        self.met_e2e += ok and row.e2e_s is not None and row.e2e_s <= self.slo.e2e_s
        self.ttft.add(row.ttft_s if ok and row.ttft_s is not None else math.inf)
        self.e2e.add(row.e2e_s if ok and row.e2e_s is not None else math.inf)
        if not ok:
            self.tpot.add(math.inf)
        elif row.tpot_s is not None:
            self.tpot.add(row.tpot_s)
        for gate in self.gates:
            gate.add(row)

    def add_batch(self, batch: Batch) -> None:
        """Count all rows of a batch as `add` would, in a twentieth of the time; gates want them one by one."""
        if self.halted_s < math.inf:
            for row in seen(batch):
                self.add(row)
            return
        ok, window = batch.where("status", "ok"), batch.where("phase", "window")
        done_s, send_lag_s = batch.seconds("done_s"), batch.seconds("send_lag_s")
        self.all_rows += batch.n
        self.all_sent += int((~np.isnan(batch.seconds("sent_s"))).sum())
        if self.start_s is not None:
            at = done_s - self.start_s  # NaN compares false
            self.done_in_window += int((ok & (at >= self.plan.warmup_s) & (at < self.plan.duration_s)).sum())
        send_lag_s = send_lag_s[window & ~np.isnan(send_lag_s)]
        self.send_lag.add_all(send_lag_s)
        self.in_time += int((send_lag_s <= self.lag_limit_s).sum())
        self.rows += int(window.sum())
        self.cancelled += int((batch.where("code", "CL-CANCEL") & window).sum())
        self.ok += int((ok & window).sum())
        words, index = batch.words["status"]
        for word, count in zip(words, np.bincount(index[window], minlength=len(words)).tolist(), strict=True):
            if count:
                self.statuses[str(word)] = self.statuses.get(str(word), 0) + count
        ttft, tpot, e2e = (batch.seconds(name)[window] for name in ("ttft_s", "tpot_s", "e2e_s"))
        good = ok[window]
        classes, index = batch.words["request_class"]
        limits = np.array([self.slo.deadlines(str(name)) for name in classes] or [(0.0, 0.0)])[index[window]]
        met_ttft = good & (ttft <= limits[:, 0])
        unmeasured = _unmeasured(batch, window, good & np.isnan(tpot))
        met_tpot = good & ~np.isnan(ttft) & ((np.isnan(tpot) & ~unmeasured) | (tpot <= limits[:, 1]))
        self.unmeasured += int(unmeasured.sum())
        self.met_ttft += int(met_ttft.sum())
        self.met_tpot += int(met_tpot.sum())
        self.met += int((met_ttft & met_tpot).sum())
        self.met_e2e += int((good & (e2e <= self.slo.e2e_s)).sum())
        self.ttft.add_all(np.where(good & ~np.isnan(ttft), ttft, np.inf))
        self.e2e.add_all(np.where(good & ~np.isnan(e2e), e2e, np.inf))
        self.tpot.add_all(np.where(good, tpot, np.inf)[~(good & np.isnan(tpot))])

    def end(self, now_s: float, marks: Iterable[str]) -> list[str]:
        """No row follows; sentences of the gates that are missed. A stage that was cut short decides nothing."""
        self.state, self.ended_s, self.marks = "ended", now_s, sorted(marks)
        self._due_s = ()
        cut = {"interrupted", "limit", "worker_lost", "write_failed"} & set(self.marks)
        return [] if cut else [text for text in (gate.missed(self) for gate in self.gates) if text]

    def due(self, now_s: float) -> int:
        """Arrivals of the window that were due by now, or have their row already (a stop gives rows early)."""
        if self.state == "ended":
            return max(self.planned, self.rows) if self.loop == "open" else self.rows
        if self.loop != "open" or self.start_s is None:
            return self.rows
        return max(self.rows, bisect_right(self._due_s, now_s - self.start_s))

    def attainment(self, now_s: float) -> tuple[float, float] | None:
        """(low, high) share of all arrivals due so far that meet the SLO; None before the first."""
        due = self.due(now_s)
        return (self.met / due, (self.met + due - self.rows + self.cancelled) / due) if due else None

    def spent_s(self, now_s: float) -> float:
        """Seconds of its arrivals that are over."""
        if self.state == "ended":
            return self.plan.duration_s
        return min(max(now_s - self.start_s, 0.0), self.plan.duration_s) if self.start_s is not None else 0.0

    def verdict(self, now_s: float) -> str:
        """How it stands: `holds`, `misses`, `open`, `warm-up`, `too few arrivals`; ended: `held`, `missed`, `not run`.

        As in the report, a side is taken when the Wilson interval of the share lies on it; `not measured` is an ended
        stage with cancelled answers. `too few arrivals`: not even hits alone could decide for the SLO.
        """
        pair = self.attainment(now_s)
        if pair is None:
            return "not run" if self.state == "ended" else "warm-up"
        ended = self.state == "ended"
        if ended and self.cancelled:
            return "not measured"
        due, target = self.due(now_s), self.slo.target
        if wilson_low(pair[0], due) >= target:
            return "held" if ended else "holds"
        if 1 - wilson_low(1 - pair[1], due) < target:
            return "missed" if ended else "misses"
        return "too few arrivals" if wilson_low(1.0, due) < target else "open"

    def late(self) -> bool:
        """Whether our own sender is too late for the stage to count, by the p99 of its sends.

        While it sends, of a hundred sends or more: one of fewer would decide alone.
        """
        n = self.send_lag.n
        return (n >= 100 or (self.state == "ended" and n > 0)) and self.in_time < math.ceil(round(0.99 * n, 9))

    def number(self, metric: str) -> float | None:
        """A count metric of the ended stage, over all its planned arrivals."""
        n, window_s = self.due(0.0), self.plan.window_s
        if not n:
            return None
        shares = {
            "attainment": self.met, "attainment_ttft": self.met_ttft, "attainment_tpot": self.met_tpot,
            "error_ratio": n - self.ok,
        }  # fmt: skip
        if metric in shares:
            return shares[metric] / n
        if metric == "goodput_qps":
            return self.met / window_s
        return self.done_in_window / window_s if metric == "completed_qps" else None

    def arrived_qps(self, now_s: float, in_flight: int) -> float | None:
        """Requests sent per second of the stage so far."""
        if self.start_s is None:
            return None
        spent = min(now_s - self.start_s, self.plan.duration_s)
        open_now = 0 if self.state == "ended" else in_flight
        return (self.all_sent + open_now) / spent if spent > 0.2 else None


def _unmeasured(batch: Batch, window: np.ndarray, without: np.ndarray) -> np.ndarray:
    """(rows of the window,) bool: those among `without` (ok, no TPOT) that are not known to be short."""
    found = np.zeros(len(without), dtype=bool)
    if without.any():
        rows = batch.take(window).take(without)
        cells = zip(*(rows.column(name) for name in LENGTHS), strict=True)
        found[without] = [tpot_unmeasured(*each) for each in cells]
    return found


def stage_settings(config: Any) -> dict[str, Any]:
    """What counting needs of the config: deadlines in seconds, and the gates that may end the run."""
    slo = config.slo
    ttft_ms, tpot_ms = slo.ttft_deadline_ms, slo.tpot_deadline_ms
    classes = {
        c.name: ((c.ttft_deadline_ms or ttft_ms) / 1000, (c.tpot_deadline_ms or tpot_ms) / 1000) for c in config.classes
    }
    return {
        "model": config.model,
        "target_qps": config.loadgen.target_qps,
        "slo": {
            "ttft_s": ttft_ms / 1000,
            "tpot_s": tpot_ms / 1000,
            "e2e_s": slo.p95_target_ms / 1000,
            "target": slo.attainment_target,
            "classes": classes,
        },
        "gates": [gate.model_dump() for gate in config.gates if gate.abort],
    }
