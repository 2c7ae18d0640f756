"""One stage of a run, from the schedule on every worker to its row in `stages.csv`.

Input: the plan, the stage, the settings, the workers. Output: the stage's rows and its record in the collector.
Does not: choose the stages or end the run (`conductor.py` does), watch the workers (`crew.py` does).

1. A stage starts on all workers at one moment of the master's clock, after all have its schedule.
2. A stage ends when its time is over and nothing is in flight, or when the drain limit has passed.
3. Every planned arrival of a started stage has one row, also when a worker was lost or the run was stopped.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from typing import Any

import gevent
from gevent.event import Event
from locust.env import Environment

from bench.records.lost import lost_rows
from bench.records.packing import batch_of
from bench.records.stage import StageRow, drain_time_s
from bench.workload.plan import Plan, Stage
from bench.workload.schedule import Schedule, build_schedule
from locustfiles import messages, stats
from locustfiles.clock import clock_id, now_s
from locustfiles.crew import LOST_S, Crew, Stripe

log = logging.getLogger("bench")

READY_LIMIT_S = 20.0  # a schedule of a million arrivals takes about 2 s to make
RESEND_S = 1.0
LEAD_LOCAL_S = 0.2
LEAD_S = 1.0  # longer than any message takes, so that no worker hears of a start in its past
ABORT_LIMIT_S = 10.0
POLL_S = 0.02
TELL_S = 1.0



class StageRun(Crew):
    """Prepares, starts, drains and records one stage after the other."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._finished = Event()
        self._finished.set()
        self.interrupted = False
        self._abort = False
        self._stop_mark = ""
        self._told_s = 0.0
        self._halted_s = math.inf  # run time at which the stage was stopped
        self._plan_text = ""
        self._lossy: set[int] = set()  # stages that lost a worker
        self._meeting: Any = None  # with the masters of the other parts

    @property
    def finished(self) -> bool:
        """Nothing is running: no run was begun, or the last one has its whole folder."""
        return self._finished.is_set()

    def interrupt(self, mark: str = "interrupted") -> None:
        """Stop arrivals now, drain, write the folder; a second call gives up on what is in flight."""
        if self.finished:
            return
        if self._stop.is_set():
            self._abort = True
        self._stop_mark = self._stop_mark or mark
        self.interrupted = self.interrupted or mark == "interrupted"
        self._stop.set()

    def _run_stage(self, plan: Plan, stage: Stage, settings: dict[str, Any], loop: str) -> None:
        assert self.collector is not None
        schedule = build_schedule(plan, stage)
        planned = len(schedule.intended_s)
        self.collector.open_stage(stage.index, 0 if loop == "closed" else planned, self._part)
        self.live.open_stage(stage, schedule.intended_s[self._part.index :: self._part.of])
        marks: set[str] = set()
        if self._meeting is not None:
            self._meeting.measure(stage.index, stage.duration_s)
            self.collector.save_info()  # with the offset: whoever loses us needs it
        self._prepare(plan, stage, settings, loop, marks)
        for stripe in self._stripes.values():
            if stripe.error:
                self.collector.problem(f"stage {stage.index} stripe {stripe.index}: {stripe.error}")
                marks.add("not_prepared")
                if stripe.prompts_differ:
                    marks.add("prompts_differ")
            elif stripe.hash != schedule.hash and not stripe.lost:
                self.collector.problem(
                    f"stage {stage.index} stripe {stripe.index}: its schedule differs from the master's; "
                    f"run the same version everywhere"
                )
                marks.add("schedule_differs")
        start_s = self._agree_on_start(stage, marks)
        for stripe in self._stripes.values():
            stripe.heard_s = now_s()
        self._looked_s = now_s()
        self._start_s = start_s
        self._intended_s = schedule.intended_s if loop == "open" else None
        go = {"run_id": self._run_id, "stage": stage.index, "start_s": start_s, "heard_s": now_s()}
        self._send_all(messages.GO, go)
        self.live.begin_stage(start_s)
        log.info("stage %s: %d arrivals, %.0f s from t=%.1f s", stage.name, planned, stage.duration_s, start_s)
        say(
            "stage",
            number=stage.index + 1,
            of=len(plan.stages),
            name=stage.name,
            planned=self._part.count(planned),
            duration_s=stage.duration_s,
        )
        self._halted_s = math.inf
        self._wait_sending(stage, start_s, settings, marks)
        self.live.drain_stage()
        say("drain", number=stage.index + 1, in_flight=None)
        drained_s = self._drain(stage, marks)
        self._fill_lost(plan, stage, schedule, start_s, loop)
        for stripe in self._stripes.values():
            if stripe.fault:
                self.collector.problem(f"stage {stage.index} stripe {stripe.index}: {stripe.fault}")
                marks.add("prompts_changed")
        self._heed_gates(self.live.end_stage(self.run_time_s, marks), marks)
        self._record_stage(stage, start_s, drained_s, marks, schedule, loop)

    def _agree_on_start(self, stage: Stage, marks: set[str]) -> float:
        """Run time at which the stage begins here, and with every other part of the plan."""
        lead_s = LEAD_LOCAL_S if "local" in self._stripes else LEAD_S
        if self._meeting is None:
            return now_s() - self._t0_s + lead_s
        # the slowest part may still drain its last stage, abort it, and make its schedule
        limit_s = stage.drain_limit_s + ABORT_LIMIT_S + READY_LIMIT_S
        at_s, all_there = self._meeting.begin(stage.index, LEAD_S, limit_s)
        if at_s is None and not self._stop.is_set():
            self.collector.problem("the master of the first part was lost: no stage begins without it")  # type: ignore[union-attr]
            self.interrupt("part_lost")
        if not all_there:
            marks.add("part_lost")
        return (now_s() + lead_s if at_s is None else at_s) - self._t0_s

    def _prepare(self, plan: Plan, stage: Stage, settings: dict[str, Any], loop: str, marks: set[str]) -> None:
        """Give each worker its stripe and wait until all have it; a silent one is left out."""
        now = now_s()
        # Locust itself notices the loss of a worker seconds later than we do.
        self._gone = {s.client_id for s in self._stripes.values() if s.lost and now - s.heard_s > LOST_S}
        clients = [client for client in self._clients() if client not in self._gone] or self._clients()
        self._stage = stage
        self._stripes = {
            client: Stripe(client, self._part.stripe(index), heard_s=now) for index, client in enumerate(clients)
        }
        self._start_s = math.inf
        text = self._plan_text
        limit = now_s() + READY_LIMIT_S
        resend = 0.0
        while not all(s.ready or s.lost for s in self._stripes.values()) and now_s() < limit and not self._abort:
            if now_s() >= resend:
                resend = now_s() + RESEND_S if resend else now_s() + 3 * RESEND_S
                for stripe in self._stripes.values():
                    if not stripe.ready:
                        self._send_stage(stripe, text, stage, settings, loop)
            gevent.sleep(POLL_S)
            self._look_for_lost(marks)
        for stripe in self._stripes.values():
            if not stripe.ready and not stripe.lost:
                stripe.lost = True
                marks.add("worker_lost")
                self.collector.problem(f"stage {stage.index}: worker {stripe.index} never took its stripe")  # type: ignore[union-attr]

    def _send_stage(self, stripe: Stripe, plan_text: str, stage: Stage, settings: dict[str, Any], loop: str) -> None:
        data = {
            "run_id": self._run_id,
            "plan": plan_text,
            "stage": stage.index,
            "stripe": stripe.index,
            "stripes": self._part.stripes(len(self._stripes)),
            "settings": settings["worker"],
            "t0_s": self._t0_s,
            "clock_id": clock_id(),
            "loop": loop,
            "run": self._for_shards() if self.distributed else {},
        }
        self.environment.runner.send_message(messages.STAGE, data, client_id=stripe.client_id)

    def _for_shards(self) -> dict[str, Any]:
        """`run.json` as it is now, for the workers' own records: with it a run can be put together without us."""
        assert self.collector is not None
        return json.loads(json.dumps(dataclasses.asdict(self.collector.info), default=str))

    def _wait_sending(self, stage: Stage, start_s: float, settings: dict[str, Any], marks: set[str]) -> None:
        end_s = start_s + stage.duration_s
        while now_s() - self._t0_s < end_s and not self._stop.is_set():
            self._stop.wait(min(0.2, max(0.0, end_s - (now_s() - self._t0_s))))
            self._look_for_lost(marks)
            self._check_limits(settings)
            self._tell()
            if all(s.lost or s.error for s in self._stripes.values()):
                break
        if self._stop.is_set():
            marks.add(self._stop_mark)
            self._halted_s = now_s() - self._t0_s
            self.live.halt_stage(self._halted_s)
            self._halt(stage, abort=self._abort, code="CL-STOP")

    def _halt(self, stage: Stage, *, abort: bool, code: str) -> None:
        self._send_all(messages.HALT, {"run_id": self._run_id, "stage": stage.index, "abort": abort, "code": code})

    def _drain(self, stage: Stage, marks: set[str]) -> float | None:
        """Run time at which nothing was in flight any more; None when the limit passed first."""
        limit = now_s() + stage.drain_limit_s
        stopped = self._stop.is_set()
        while self._open_stripes() and now_s() < limit and not self._abort:
            gevent.sleep(POLL_S)
            self._look_for_lost(marks)
            self._tell()
            if self._stop.is_set() and not stopped:  # stopped while draining: nothing more to refuse
                stopped = True
                marks.add(self._stop_mark)
                self._halt(stage, abort=False, code="CL-STOP")
        if not self._open_stripes():
            return now_s() - self._t0_s
        marks.add(self._stop_mark if self._abort else "drain_limit")
        self._halt(stage, abort=True, code="CL-STOP" if self._abort else "CL-DRAIN")
        limit = now_s() + ABORT_LIMIT_S
        while self._open_stripes() and now_s() < limit:
            gevent.sleep(POLL_S)
            self._look_for_lost(marks)
        for stripe in self._open_stripes():
            stripe.lost = True
            marks.add("worker_lost")
        return None

    def _heed_gates(self, missed: list[str], marks: set[str]) -> None:
        """An abort gate was missed: no further stage, the run ends in order."""
        if missed and not self._stop.is_set():
            assert self.collector is not None
            marks.add("gate_abort")
            self.live.stopped_by = self.collector.info.stopped_by = missed[0]
            log.warning("stopped in order: %s", missed[0])
            self.interrupt("gate_abort")

    def _tell(self) -> None:
        """Once a second, what the run looks like now."""
        self.live.tick(self.run_time_s)
        if self.run_time_s - self._told_s >= TELL_S:
            self._told_s = self.run_time_s
            say("live", **self.live.progress(self._told_s))

    def _fill_lost(self, plan: Plan, stage: Stage, schedule: Schedule, start_s: float, loop: str) -> None:
        """Rows for arrivals whose worker took them along: nobody leaves the denominator."""
        assert self.collector is not None
        missing = self.collector.missing(stage.index) if loop == "open" else []
        owner = self.collector.stages[stage.index].owner
        rows = lost_rows(
            plan,
            stage,
            schedule,
            missing,
            run_id=self._run_id,
            start_s=start_s,
            owners=self._part.stripes(max(1, len(self._stripes))) if owner is None else owner,
            last_s={s.index: s.sampled_s for s in self._stripes.values()},
        )
        if rows:
            text = f"stage {stage.index}: {len(rows)} arrivals have no row from a worker (code CL-LOST)"
            self.collector.problem(text)
            self.collector.add_rows(stage.index, rows)
            self.observer.add(self._run_id, stage.name, batch_of(rows))
            self.live.add_rows(stage.index, rows)
            for row in rows:
                stats.fire(self.environment, stage.name, row)

    def _record_stage(
        self, stage: Stage, start_s: float, drained_s: float | None, marks: set[str], schedule: Schedule, loop: str
    ) -> None:
        assert self.collector is not None
        record = self.collector.stages[stage.index]
        if "worker_lost" in marks:
            self._lossy.add(stage.index)
        self._start_s = math.inf
        # what was planned after a stop was never due: the stage, and its window, end there
        end_s = max(start_s, min(start_s + stage.duration_s, self._halted_s))
        self.collector.close_stage(
            StageRow(
                stage=stage.index,
                repeat=stage.repeat,
                name=stage.name,
                # a closed loop offers what it got through
                offered_qps=stage.offered_qps if loop == "open" else record.rows / stage.duration_s,
                process=stage.process if loop == "open" else "closed",
                loop=loop,
                seed=stage.seed,
                planned=record.expected if loop == "open" else record.rows,
                start_s=start_s,
                window_start_s=min(start_s + stage.warmup_s, end_s),
                window_end_s=end_s,
                end_s=end_s,
                drained_s=drained_s,
                workers=len(self._stripes),
                rows=record.rows,
                schedule_hash=schedule.hash if loop == "open" else "",
                marks=";".join(sorted(marks)),
            )
        )
        self.collector.info.worker_info = [
            {"worker": s.index, "client_id": s.client_id, "lost": s.lost, **s.info} for s in self._stripes.values()
        ]
        took = drain_time_s(drained_s or now_s() - self._t0_s, end_s)
        log.info("stage %s: %d rows, drained in %.1f s%s", stage.name, record.rows, took, _shown(marks))
        say(
            "staged",
            number=stage.index + 1,
            name=stage.name,
            rows=record.rows,
            statuses=self._statuses(record.statuses),
            drain_s=took,
            marks=sorted(marks),
            attainment=self.live.progress(self.run_time_s)["attainment"],
        )

    def _statuses(self, counted: dict[str, int]) -> dict[str, int]:
        """Rows by status for the console; what was planned after a stop is no failure and stands apart."""
        after = self.live.stages[-1].after_stop
        shown = {**counted, "unsent": counted.get("unsent", 0) - after, "not due any more (stopped)": after}
        return {status: n for status, n in shown.items() if n > 0}

    def _not_run(self, stage: Stage, loop: str) -> None:
        assert self.collector is not None
        now = now_s() - self._t0_s
        self.collector.close_stage(
            StageRow(
                stage.index,
                stage.repeat,
                stage.name,
                stage.offered_qps,
                stage.process,
                loop,
                stage.seed,
                0,
                now,
                now,
                now,
                now,
                None,
                0,
                0,
                "",
                f"not_run;{self._stop_mark}",
            )
        )


def say(event: str, **data: Any) -> None:
    """Tell `bench run`, when it is the parent, how far the run is: one line of JSON on standard output."""
    if os.environ.get("BENCH_PROGRESS") == "1":
        try:
            print("@bench " + json.dumps({"event": event, **data}), flush=True)
        except OSError:  # the parent is gone; `Wiring` ends the run in order
            os.environ.pop("BENCH_PROGRESS", None)


def _shown(marks: set[str]) -> str:
    return f" [{', '.join(sorted(marks))}]" if marks else ""
