"""What a run looks like while it runs, in bounded memory: for the console, the web page and `abort` gates.

Input: the plan, rows and gauge samples as they reach the master, the time.
Output: the stages' numbers (`bench/workload/stage_count.py`), one summary for people (`Live.summary`).
Does not: judge the run (`analysis/` does, from the files), keep a row, or read a clock.

Memory depends on the number of stages and bins, never on the number of requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.records.packing import Batch
from bench.workload.plan import Plan
from bench.workload.plan import Stage as PlannedStage
from bench.workload.stage_count import (
    MIN_SAMPLES,
    SAME_RATE,
    SHARES,
    GateCount,
    Histogram,
    Slo,
    Stage,
    applies,
    seen,
)

SERIES_POINTS = 600  # of the run over time; when full, every second one goes
GAUGE_STALE_S = 3.0


@dataclass
class _Gauge:
    at_s: float
    in_flight: int


class Live:
    """The run so far; made once per master and begun anew with each run."""

    def __init__(self) -> None:
        self.state = "ready"  # ready, preparing, sending, draining, finished
        self.problem = ""  # why the last start was refused
        self.run_id = self.run_dir = self.model = ""
        self.loop = "open"
        self.plan: Plan | None = None
        self.slo = Slo(0.0, 0.0, 0.0, 0.0)
        self.target_qps: float | None = None
        self.stages: list[Stage] = []
        self.stopped_by = ""
        self.series: list[list[float | None]] = []  # [t_s, offered_qps, sent_qps, done_qps, in_flight]
        self._step_s = self._last_s = 0.0
        self._counts = (0, 0, 0)
        self._gates: list[dict[str, Any]] = []
        self._gauges: dict[int, _Gauge] = {}

    # -- what the conductor tells ----------------------------------------------------------

    def refuse(self, text: str) -> None:
        """A start that was not possible, for the page: Locust itself shows it in its log only."""
        self.problem = text

    def open_run(self, plan: Plan, settings: dict[str, Any], *, run_id: str, run_dir: str, loop: str) -> None:
        """Forget the last run and expect this one. `settings`: see `Wiring.settings()["live"]`."""
        self.__init__()  # type: ignore[misc]
        self.run_id, self.run_dir, self.loop, self.plan = run_id, run_dir, loop, plan
        self.model, self.target_qps = settings["model"], settings["target_qps"]
        self.slo = Slo(**settings["slo"])
        self._gates = settings["gates"]
        self._step_s = 1.0

    def open_stage(self, plan: PlannedStage, intended_s: Sequence[float]) -> Stage:
        """A stage is being prepared."""
        assert self.plan is not None
        chosen = [GateCount(g) for g in self._gates if applies(g, plan, self.plan, self.target_qps)]
        stage = Stage(plan, self.slo, chosen, loop=self.loop)
        if self.loop == "open":
            stage.plan_arrivals(intended_s)
        self.stages.append(stage)
        self.state = "preparing"
        return stage

    def begin_stage(self, start_s: float) -> None:
        """The last opened stage sends."""
        self.stages[-1].begin(start_s)
        self.state = "sending"

    def halt_stage(self, now_s: float) -> None:
        """The stage was stopped at `now_s`."""
        self.stages[-1].halt(now_s)

    def drain_stage(self) -> None:
        """No more arrivals in this stage."""
        self.stages[-1].state = self.state = "draining"

    def end_stage(self, now_s: float, marks: Iterable[str]) -> list[str]:
        """All rows of the stage are there; sentences of the abort gates that it misses."""
        self._gauges.clear()
        return self.stages[-1].end(now_s, marks)

    def add_rows(self, stage_index: int, rows: Any) -> None:
        """Count rows (see `seen`) of the stage that runs; rows of another one come too late to be shown."""
        if not self.stages or self.stages[-1].plan.index != stage_index:
            return
        stage = self.stages[-1]
        if isinstance(rows, Batch) and not stage.gates:
            stage.add_batch(rows)
            return
        for row in seen(rows):
            stage.add(row)

    def add_gauge(self, worker: int, samples: list[list[Any]]) -> None:
        """Samples (t_s, stage, in_flight, ...) of one worker."""
        if samples:
            self._gauges[worker] = _Gauge(samples[-1][0], samples[-1][2])
            if self.stages:
                self.stages[-1].in_flight_max = max(self.stages[-1].in_flight_max, self.in_flight(samples[-1][0]))

    def finish(self) -> None:
        """The run has its whole folder."""
        self.state = "finished"
        self._gauges.clear()

    # -- what others ask ---------------------------------------------------------------------

    def in_flight(self, now_s: float) -> int:
        """Streams open on all workers, by their last samples."""
        return sum(g.in_flight for g in self._gauges.values() if now_s - g.at_s < GAUGE_STALE_S)

    def tick(self, now_s: float) -> bool:
        """Keep one point of the run over time, about once a second; True when it did."""
        if now_s - self._last_s < self._step_s or not self.stages:
            return False
        stage, in_flight = self.stages[-1], self.in_flight(now_s)
        sent, done = stage.all_sent + in_flight, stage.all_rows
        index, sent_before, done_before = self._counts
        spent = now_s - self._last_s
        if index == stage.plan.index and self._last_s > 0:
            sending = stage.state == "sending"
            at = now_s - (stage.start_s or now_s)
            offered = stage.plan.rate_at(min(max(at, 0.0), stage.plan.duration_s)) if sending else 0.0
            rates = [max(0.0, (sent - sent_before) / spent), max(0.0, (done - done_before) / spent)]
            self.series.append([now_s, offered, *rates, in_flight])
        self._counts, self._last_s = (stage.plan.index, sent, done), now_s
        if len(self.series) >= SERIES_POINTS:
            self.series = self.series[::2]
            self._step_s *= 2
        return True

    def verdict(self, now_s: float) -> str:
        """Why the last start was refused, else how the run stands, as a sentence."""
        return f"not started: {self.problem}" if self.problem else self.run_verdict(now_s)

    def run_verdict(self, now_s: float) -> str:
        """How the run stands against the SLO at the target rate, as a sentence. The analysis has the last word.

        After a refused start: how the run before it ended.
        """
        if not self.stages or self.plan is None:
            return "no run yet"
        if self.stopped_by:
            return f"stopped early: {self.stopped_by}"
        at = [s for s in self.stages if self._is_target(s)]
        words = {s.verdict(now_s) for s in at}
        late = [s for s in at if s.late()]
        where = f"{self.target_qps:g} requests/s" if self.target_qps is not None else "the target rate"
        if not at:
            return self._without_target(now_s, where)
        if late:
            lag_s, limit_s = late[0].send_lag.percentile(0.99) or 0.0, late[0].lag_limit_s
            return (
                f"invalid so far: our own sender is late at {where}, send lag p99 {lag_s * 1000:.3g} ms with a limit "
                f"of {limit_s * 1000:.3g} ms; use more workers or a quieter machine"
            )
        if words & {"missed", "misses"}:
            return f"fails so far: the SLO is missed at {where}"
        if words <= {"held", "holds"}:
            return f"passes so far: the SLO holds at {where}"
        few = ": too few arrivals so far" if "too few arrivals" in words else ""
        return f"open: the stage at {where} is not decided{few}"

    def _without_target(self, now_s: float, where: str) -> str:
        """The run's verdict while no stage at the target rate began: a rate above that held or one below that missed
        speaks for it, as in the analysis, unless its own stage is still to come."""
        sound = [(s.plan.offered_qps, s.verdict(now_s)) for s in self.stages if not s.late()]
        held, missed = ([rate for rate, word in sound if word == wanted] for wanted in ("held", "missed"))
        so_far = f"; held up to {max(held):g} requests/s so far" if held else ""
        assert self.plan is not None
        if any(self._is_target_rate(s.offered_qps) for s in self.plan.stages):
            return f"open: the stage at {where} has not begun{so_far}"
        if self.target_qps is not None and held and max(held) > self.target_qps:
            return f"passes so far: the SLO holds at {max(held):g} requests/s, above the target of {where}"
        if self.target_qps is not None and missed and min(missed) < self.target_qps:
            return f"fails so far: the SLO is missed at {min(missed):g} requests/s, below the target of {where}"
        return f"open: {where} is not among the stages that ran{so_far}"

    def _is_target(self, stage: Stage) -> bool:
        return self._is_target_rate(stage.plan.offered_qps)

    def _is_target_rate(self, offered_qps: float) -> bool:
        rate = self.target_qps
        return rate is not None and abs(offered_qps - rate) <= SAME_RATE * max(rate, 1.0)

    def progress(self, now_s: float) -> dict[str, Any]:
        """What the console shows once a second."""
        stage = self.stages[-1]
        pair = stage.attainment(now_s)
        return {
            "number": stage.plan.index + 1,
            "attainment": list(pair) if pair else None,
            "in_flight": self.in_flight(now_s),
            "verdict": stage.verdict(now_s),
        }

    def summary(self, now_s: float) -> dict[str, Any]:
        """The run as plain JSON data, stages in the order they ran; a latency without end is "inf"."""
        plan = self.plan
        return {
            "state": self.state,
            "run_id": self.run_id,
            "run_dir": self.run_dir,
            "model": self.model,
            "loop": self.loop,
            "now_s": round(now_s, 1),
            "verdict": self.verdict(now_s),
            "problem": self.problem,  # not empty: stages and run_id are those of the run before the refused start
            "run_verdict": self.run_verdict(now_s),
            "target_qps": self.target_qps,
            "slo": {"ttft_s": self.slo.ttft_s, "tpot_s": self.slo.tpot_s, "attainment": self.slo.target},
            "planned_stages": len(plan.stages) if plan else 0,
            "planned_s": sum(s.duration_s for s in plan.stages) if plan else 0.0,
            "spent_s": sum(s.spent_s(now_s) for s in self.stages),
            "seed": plan.run_seed if plan else None,
            "in_flight": self.in_flight(now_s),
            "stages": [self._stage_summary(s, now_s) for s in self.stages],
            "series": [[round(v, 3) if v is not None else None for v in point] for point in self.series],
        }

    def _stage_summary(self, stage: Stage, now_s: float) -> dict[str, Any]:
        live = stage is self.stages[-1] and stage.state != "ended"
        in_flight = self.in_flight(now_s) if live else 0
        pair = stage.attainment(now_s)
        return {
            "name": stage.plan.name,
            "state": stage.state,
            "offered_qps": stage.plan.offered_qps,
            "arrived_qps": stage.arrived_qps(now_s, in_flight),
            "left_s": max(0.0, stage.start_s + stage.plan.duration_s - now_s) if live and stage.start_s else None,
            "due": stage.due(now_s),
            "ended": stage.rows,
            "statuses": stage.statuses,
            "attainment": list(pair) if pair else None,
            "ttft_s": _percentiles(stage.ttft),
            "tpot_s": _percentiles(stage.tpot),
            "in_flight": in_flight,
            "in_flight_max": stage.in_flight_max,
            "tpot_unmeasured": stage.unmeasured,
            "send_lag_p99_s": _plain(stage.send_lag.percentile(0.99)),
            "send_lag_limit_s": stage.lag_limit_s,
            "sender_late": stage.late(),
            "verdict": stage.verdict(now_s),
            "marks": stage.marks,
        }


def _percentiles(histogram: Histogram) -> dict[str, Any]:
    """p50, p95 and p99 with the number of values; one that so few values cannot carry is None."""
    found = {
        name: _plain(histogram.percentile(SHARES[name])) if histogram.n >= MIN_SAMPLES[name] else None
        for name in ("p50", "p95", "p99")
    }
    return {"n": histogram.n, **found}


def _plain(value: float | None) -> float | str | None:
    if value is None:
        return None
    return "inf" if value == math.inf else round(value, 6)
