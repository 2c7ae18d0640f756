"""The master's side of a run: walks the plan stage by stage and leaves a whole run folder.

Input: a plan, the settings, the workers that Locust has connected.
Output: the run folder, an exit code for Locust.
Does not: send load, parse answers, judge an SLO (that is `analysis/`).

1. A stage starts on all workers at one moment of the master's clock, after all have its schedule.
2. A stage ends when its time is over and nothing is in flight, or when the drain limit has passed.
3. Every planned arrival of a started stage has one row, also when a worker was lost or the run was stopped.
4. Locust's statistics and the ledger are compared before the run folder is closed.
5. A worker that is silent for `LOST_S` is lost for the stage: what it has not sent by then goes to the others, and
   rows it may still bring for these do not count. No arrival has two rows, whoever wakes up when.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import math
import os
import platform
import secrets
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gevent
import numpy as np
from gevent.event import Event
from locust.env import Environment

from bench import __version__
from bench.config.limits import passed_limit
from bench.records.collect import Collector
from bench.records.ledger import PLAN
from bench.records.lost import lost_rows
from bench.records.packing import batch_of, unpack
from bench.records.part import WHOLE, parse_part
from bench.records.server import ServerRow
from bench.records.stage import InflightRow, RunInfo, StageRow
from bench.workload.plan import Plan, Stage
from bench.workload.schedule import Schedule, build_schedule, plan_hash
from locustfiles import messages, stats
from locustfiles.clock import clock_id, now_s
from locustfiles.live import Live
from locustfiles.meeting import MeetingError, open_meeting
from locustfiles.observe import Observer
from locustfiles.server_metrics import Scraper

log = logging.getLogger("bench")

NextStage = Callable[[Plan, Path], Stage | None]  # (plan so far, run folder) -> one more stage, or the end

READY_LIMIT_S = 20.0  # a schedule of a million arrivals takes about 2 s to make
RESEND_S = 1.0
LEAD_LOCAL_S = 0.2
LEAD_S = 1.0  # longer than any message takes, so that no worker hears of a start in its past
ABORT_LIMIT_S = 10.0
POLL_S = 0.02
# A worker speaks twice a second. Two seconds are four missed messages; Locust itself needs three to four seconds.
LOST_S = 2.0
# When nobody is heard the silence may be our own (Locust holds its listener for up to a second when a worker joins).
ALL_LOST_S = 3.5
BEAT_S = 0.5
TAKE_LEAD_S = 0.4  # arrivals due sooner cannot reach another worker in time
FLUSH_S = 0.5  # rows wait no longer in memory
TELL_S = 1.0


@dataclass
class Stripe:
    """One worker's part of a stage, as the master knows it."""

    client_id: str
    index: int
    planned: int = 0
    ready: bool = False
    done: bool = False
    lost: bool = False
    error: str = ""
    hash: str = ""
    rows: int = 0
    heard_s: float = 0.0  # our clock at its last message
    sampled_s: float = 0.0  # run time of its last gauge sample
    takes: list[np.ndarray] = field(default_factory=list)  # arrivals of lost workers that it was given
    taken: int = 0  # how many of these it has confirmed
    told_s: float = 0.0  # our clock at the last send of one
    info: dict[str, Any] = field(default_factory=dict)


class Conductor:
    """Runs one plan at a time on Locust's runner; made once per master or local process."""

    def __init__(self, environment: Environment, settings: Callable[[], dict[str, Any]]) -> None:
        self.environment = environment
        self._settings_of = settings
        self.live = Live()
        self.collector: Collector | None = None
        self._greenlet: gevent.Greenlet | None = None
        self._finished = Event()
        self._finished.set()
        self._stop = Event()
        self._abort = False
        self._stop_mark = ""
        self._stripes: dict[str, Stripe] = {}
        self._stage: Stage | None = None
        self._gone: set[str] = set()  # clients that were lost and not heard since
        self._flushed: set[str] = set()
        self._run_id = ""
        self._t0_s = self._told_s = 0.0
        self._halted_s = math.inf  # run time at which the stage was stopped
        self._names: dict[int, str] = {}
        self._intended_s: np.ndarray | None = None  # of the stage, from its start
        self._start_s = math.inf  # run time of the stage's start, once it is known
        self._beat_s = self._flush_s = 0.0
        self._plan_text = ""
        self._next_stage: NextStage | None = None
        self._lossy: set[int] = set()  # stages that lost a worker
        self._part = WHOLE
        self._meeting: Any = None  # with the masters of the other parts
        self._refused = False
        self.interrupted = False
        self.observer = Observer(self)
        self._scraper: Scraper | None = None

    # -- what others call -----------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Nothing is running: no run was begun, or the last one has its whole folder."""
        return self._finished.is_set()

    def begin(self, plan: Plan, *, shape: str, loop: str = "open", next_stage: NextStage | None = None) -> None:
        """Start a run in a greenlet of its own. Raises RuntimeError when one is running.

        `next_stage` is asked after the plan's last stage, when the run folder holds all rows so far: it answers one
        more stage, which joins the plan, or None for the end.
        """
        if not self.finished:
            raise RuntimeError("a run is in progress; stop it first")
        self._finished.clear()
        self._stop.clear()
        self._abort, self._stop_mark, self.interrupted = False, "", False
        self._next_stage = next_stage
        self._greenlet = gevent.spawn(self._run, plan, shape, loop)

    def interrupt(self, mark: str = "interrupted") -> None:
        """Stop arrivals now, drain, write the folder; a second call gives up on what is in flight."""
        if self.finished:
            return
        if self._stop.is_set():
            self._abort = True
        self._stop_mark = self._stop_mark or mark
        self.interrupted = self.interrupted or mark == "interrupted"
        self._stop.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """True once the run has its whole folder."""
        return self._finished.wait(timeout_s)

    # -- messages from workers ---------------------------------------------------------

    def listeners(self) -> dict[str, Callable[..., None]]:
        """Message name -> handler, for `runner.register_message`."""
        return {
            messages.READY: self.on_ready,
            messages.ROWS: self.on_rows,
            messages.DONE: self.on_done,
            messages.GAUGE: self.on_gauge,
            messages.FLUSHED: self.on_flushed,
            messages.PING: self.on_ping,
        }

    def on_ping(self, environment: Environment, msg: Any, **_: Any) -> None:
        self._hear(msg)
        data = {"sent_s": msg.data["sent_s"], "master_s": now_s(), "clock_id": clock_id()}
        self.environment.runner.send_message(messages.PONG, data, client_id=msg.node_id)

    def on_ready(self, environment: Environment, msg: Any, **_: Any) -> None:
        stripe = self._hear(msg)
        if stripe is not None and not stripe.ready:
            stripe.ready = True
            stripe.planned, stripe.hash, stripe.error = msg.data["planned"], msg.data["hash"], msg.data["error"]
            stripe.info = {k: msg.data.get(k) for k in ("offset_s", "bound_s", "shared", "pid")}

    def on_rows(self, environment: Environment, msg: Any, **_: Any) -> None:
        data = msg.data
        self._hear(msg)
        if data["run_id"] != self._run_id or self.collector is None or data["stage"] not in self.collector.stages:
            self._acknowledge(msg, data["seq"])  # of a run that is over: the worker need not keep it for us
            return
        cpu_s = time.thread_time()
        try:
            batch = unpack(data["data"])
        except ValueError as error:
            self.collector.problem(f"stage {data['stage']} stripe {data['stripe']}: {error}")
            return
        if self.collector.info.loop == "closed" and batch.n:
            self.collector.extend_stage(data["stage"], int(batch.numbers["arrival"].max()))
        before = self.collector.stages[data["stage"]].rows
        have = self.collector.add_batch(data["stage"], data["stripe"], data["seq"], batch)
        self.collector.transport["bytes"] += len(data["data"])
        self.collector.transport["cpu_us"] += round((time.thread_time() - cpu_s) * 1e6)
        self._acknowledge(msg, have)
        if have == data["seq"]:
            self.observer.add(self._run_id, self._names[data["stage"]], batch)
        if have == data["seq"] and self.collector.stages[data["stage"]].rows > before:
            self.live.add_rows(data["stage"], batch)
        stripe = self._stripe(msg)
        if stripe is not None:
            stripe.rows += batch.n

    def _acknowledge(self, msg: Any, seq: int) -> None:
        data = {key: msg.data[key] for key in ("run_id", "stage", "stripe")}
        self.environment.runner.send_message(messages.ACK, {**data, "seq": seq}, client_id=msg.node_id)

    def _hear(self, msg: Any) -> Stripe | None:
        """A sign of life; the sender's stripe when the message is about the stage that runs."""
        stripe = self._stripes.get(msg.node_id)
        if stripe is not None:
            stripe.heard_s = now_s()
        return self._stripe(msg) if "stage" in msg.data else None

    def on_done(self, environment: Environment, msg: Any, **_: Any) -> None:
        stripe = self._hear(msg)
        if stripe is not None:
            stripe.done = True

    def on_gauge(self, environment: Environment, msg: Any, **_: Any) -> None:
        self._hear(msg)
        if msg.data["run_id"] != self._run_id or self.collector is None:
            return
        worker = msg.data["stripe"]
        stripe = self._stripes.get(msg.node_id)
        if stripe is not None and msg.data["samples"] and msg.data["samples"][-1][1] == self._stage_index():
            stripe.sampled_s, stripe.taken = msg.data["samples"][-1][0], msg.data["takes"]
        self.live.add_gauge(worker, msg.data["samples"])
        self.collector.add_gauge(
            [
                InflightRow(at, worker, stage, in_flight, lag, cpu, rss)
                for at, stage, in_flight, lag, cpu, rss in msg.data["samples"]
            ]
        )

    def on_flushed(self, environment: Environment, msg: Any, **_: Any) -> None:
        if msg.data["run_id"] == self._run_id:
            self._flushed.add(msg.node_id)

    def _stripe(self, msg: Any) -> Stripe | None:
        data = msg.data
        if data["run_id"] != self._run_id or self._stage is None or data["stage"] != self._stage.index:
            return None
        return self._stripes.get(msg.node_id)

    def _stage_index(self) -> int:
        return self._stage.index if self._stage is not None else -1

    # -- the run --------------------------------------------------------------------------

    def _run(self, plan: Plan, shape: str, loop: str) -> None:
        csv_files = None
        try:
            settings = self._settings_of()
            self._open(plan, settings, shape, loop)
            assert self.collector is not None
            self._meet(plan, settings)
            csv_files = stats.FinalCSV(self.environment, self.collector.run_dir / "locust")
            if settings.get("metrics_url"):
                where = lambda: (self.run_time_s, self._stage_index())  # noqa: E731
                self._scraper = Scraper(settings["metrics_url"], where, self._scraped)
            self._walk(plan, settings, loop)
            self._flush_stats()
            self._reconcile(loop)
        except MeetingError as error:
            self._refused = True
            self.collector.problem(str(error))  # type: ignore[union-attr]
        except Exception as error:
            log.exception("the run stopped on an error of its own")
            if self.collector is not None:
                self.collector.problem(f"the run stopped on an error of its own: {type(error).__name__}: {error}")
        finally:
            try:
                self._close(csv_files)
            finally:
                self.live.finish()
                self._finished.set()

    def _open(self, plan: Plan, settings: dict[str, Any], shape: str, loop: str) -> None:
        started = datetime.datetime.now(datetime.UTC)
        self._run_id = os.environ.get("BENCH_RUN_ID") or f"{started:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
        run_dir = Path(settings["run_dir"] or Path(os.environ.get("BENCH_RUNS") or "runs") / self._run_id)
        os.environ.pop("BENCH_RUN_ID", None)  # a second run from the web page has a name of its own
        self._names = {stage.index: stage.name for stage in plan.stages}
        self._plan_text, self._lossy = plan.to_json(), set()
        self._part, self._meeting, self._refused = parse_part(settings["part"]), None, False
        info = RunInfo(
            run_id=self._run_id,
            started_utc=started.isoformat(timespec="seconds"),
            finished_utc=None,
            tool_version=__version__,
            versions=_versions(),
            host=_host(),
            seed=plan.run_seed,
            schedule_hash=plan_hash(plan) if loop == "open" else "",
            command=settings["command"] or sys.argv,
            config=settings["masked_config"],
            config_origin=settings["config_origin"],
            loop=loop,
            shape=shape,
            workers=len(self._clients()),
            target=settings["target_info"],
            preflight=settings["preflight"],
        )
        self.collector = Collector(run_dir, info)
        self.live.open_run(plan, settings["live"], run_id=self._run_id, run_dir=str(run_dir), loop=loop)
        self._t0_s, self._told_s = now_s(), 0.0
        log.info("run %s writes %s; schedule %s", self._run_id, run_dir, info.schedule_hash[:16] or "(closed loop)")

    def _meet(self, plan: Plan, settings: dict[str, Any]) -> None:
        """Come together with the masters of the other parts, when this one has a part. Raises MeetingError."""
        assert self.collector is not None
        if self._part == WHOLE:
            return
        self._meeting = open_meeting(
            self._part, settings["meet"], plan_hash=plan_hash(plan), load=self._run_id, t0_s=self._t0_s,
            stopped=self._stop.is_set,
        )  # fmt: skip
        self.collector.info.part = self._meeting.document()
        (self.collector.run_dir / PLAN).write_text(plan.to_json() + "\n", encoding="utf-8")

    def _walk(self, plan: Plan, settings: dict[str, Any], loop: str) -> None:
        assert self.collector is not None
        for so_far, stage in self._stages(plan, loop):
            if self._stop.is_set():
                self._not_run(stage, loop)
                continue
            self._run_stage(so_far, stage, settings, loop)
            if self.collector.failed:
                self.interrupt("write_failed")
            self._check_limits(settings)

    def _stages(self, plan: Plan, loop: str) -> Iterator[tuple[Plan, Stage]]:
        """The plan's stages, then those that `next_stage` adds to it; each with the plan that holds it."""
        assert self.collector is not None
        for stage in plan.stages:
            yield plan, stage
        while self._next_stage is not None and not self._stop.is_set():
            added = self._next_stage(plan, self.collector.run_dir)
            if added is None:
                return
            plan = dataclasses.replace(plan, stages=(*plan.stages, added))
            self._plan_text, self.live.plan = plan.to_json(), plan
            self._names[added.index] = added.name
            if loop == "open":
                self.collector.info.schedule_hash = plan_hash(plan)
            yield plan, added

    def _check_limits(self, settings: dict[str, Any]) -> None:
        assert self.collector is not None
        if self._stop.is_set():
            return
        sent, tokens_in, tokens_out = self.collector.totals()
        hit = passed_limit(settings["limits"], sent, tokens_in, tokens_out, now_s() - self._t0_s)
        if hit:
            self.collector.problem(f"stopped in order: {hit}")
            self.interrupt("limit")

    def worker_counts(self) -> dict[str, int]:
        """Workers by what they are to the stage that runs: connected, sending, lost."""
        stripes = self._stripes.values()
        return {
            "connected": len(self._clients()),
            "sending": sum(not (s.lost or s.done or s.error) for s in stripes),
            "lost": sum(s.lost for s in stripes),
        }

    def _scraped(self, row: ServerRow) -> None:
        if self.collector is not None:
            self.collector.add_server(row)

    def _clients(self) -> list[str]:
        """Ids of the workers there are now, in the order of their index."""
        runner = self.environment.runner
        clients = getattr(runner, "clients", None)
        if clients is None:
            return ["local"]
        there = [c.id for c in clients.ready + clients.spawning + clients.running]
        return sorted(there, key=runner.get_worker_index)

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
            elif stripe.hash != schedule.hash and not stripe.lost:
                self.collector.problem(
                    f"stage {stage.index} stripe {stripe.index}: its schedule differs from the master's; "
                    f"run the same version everywhere"
                )
                marks.add("schedule_differs")
        start_s = self._agree_on_start(stage, marks)
        for stripe in self._stripes.values():
            stripe.heard_s = now_s()
        self._start_s = start_s
        self._intended_s = schedule.intended_s if loop == "open" else None
        self._send_all(messages.GO, {"run_id": self._run_id, "stage": stage.index, "start_s": start_s})
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

    @property
    def run_time_s(self) -> float:
        """Seconds since the run began, on the master's clock; 0 before the first run."""
        return now_s() - self._t0_s if self._t0_s else 0.0

    def _tell(self) -> None:
        """Once a second, what the run looks like now."""
        self.live.tick(self.run_time_s)
        if self.run_time_s - self._told_s >= TELL_S:
            self._told_s = self.run_time_s
            say("live", **self.live.progress(self._told_s))

    def _heed_gates(self, missed: list[str], marks: set[str]) -> None:
        """An abort gate was missed: no further stage, the run ends in order."""
        if missed and not self._stop.is_set():
            assert self.collector is not None
            marks.add("gate_abort")
            self.live.stopped_by = self.collector.info.stopped_by = missed[0]
            log.warning("stopped in order: %s", missed[0])
            self.interrupt("gate_abort")

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

    @property
    def distributed(self) -> bool:
        """Whether the workers are other processes."""
        return getattr(self.environment.runner, "clients", None) is not None

    def _for_shards(self) -> dict[str, Any]:
        """`run.json` as it is now, for the workers' own records: with it a run can be put together without us."""
        assert self.collector is not None
        return json.loads(json.dumps(dataclasses.asdict(self.collector.info), default=str))

    def _send_all(self, kind: str, data: dict[str, Any]) -> None:
        for stripe in self._stripes.values():
            if not stripe.lost:
                self.environment.runner.send_message(kind, data, client_id=stripe.client_id)

    def _look_for_lost(self, marks: set[str]) -> None:
        """See who is gone, keep the others at work, write what has come in. Called many times a second."""
        there = set(self._clients())
        if self.distributed:
            self._beat(there)
            lost = [s for s in self._stripes.values() if not (s.lost or s.done) and self._is_lost(s, there)]
            for stripe in lost:
                stripe.lost = True
                marks.add("worker_lost")
                log.warning("worker %d was lost in stage %s", stripe.index, self._stage and self._stage.name)
            if lost:
                self._restripe(lost)
            self._repeat_takes()
        if there - set(self._stripes) - self._gone:
            marks.add("worker_joined")
        if now_s() - self._flush_s >= FLUSH_S and self.collector is not None:
            self._flush_s = now_s()
            cpu_s = time.thread_time()
            self.collector.flush()
            self.collector.transport["cpu_us"] += round((time.thread_time() - cpu_s) * 1e6)

    def _is_lost(self, stripe: Stripe, there: set[str]) -> bool:
        if stripe.client_id not in there:
            return True
        if math.isinf(self._start_s):
            return False  # while it makes its schedule a worker says nothing; `_prepare` has its own limit
        now = now_s()
        silent = now - stripe.heard_s
        others = [now - s.heard_s for s in self._stripes.values() if s is not stripe and not s.lost]
        return silent > ALL_LOST_S or (silent > LOST_S and any(quiet < 1.0 for quiet in others))

    def _beat(self, there: set[str]) -> None:
        """Tell every worker twice a second that we hear it, or that it is lost for this stage."""
        if now_s() - self._beat_s < BEAT_S:
            return
        self._beat_s = now_s()
        for stripe in self._stripes.values():
            if stripe.client_id in there:
                data = {"run_id": self._run_id, "stage": self._stage_index(), "lost": stripe.lost}
                self.environment.runner.send_message(messages.BEAT, data, client_id=stripe.client_id)

    def _restripe(self, lost: list[Stripe]) -> None:
        """Give what lost workers have not sent yet to the others, in turns."""
        assert self.collector is not None
        workers = [s for s in self._stripes.values() if not (s.lost or s.done or s.error)]
        if self._intended_s is None or math.isinf(self._start_s) or self._stop.is_set() or not workers:
            return
        stage, width = self._stage_index(), self._part.stripes(len(self._stripes))
        soonest = now_s() - self._t0_s - self._start_s + TAKE_LEAD_S
        left = np.concatenate([self.collector.owned(stage, s.index, width) for s in lost])
        left = np.sort(left[self._intended_s[left] >= soonest])
        for turn, worker in enumerate(workers):
            part = left[turn :: len(workers)]
            if len(part):
                self.collector.give(stage, part, worker.index, width)
                worker.takes.append(part)
                self._send_take(worker, len(worker.takes))
        log.warning("stage %d: %d arrivals that were not due go to %d workers", stage, len(left), len(workers))

    def _send_take(self, worker: Stripe, number: int) -> None:
        data = {
            "run_id": self._run_id,
            "stage": self._stage_index(),
            "number": number,
            "arrivals": zlib.compress(worker.takes[number - 1].astype("<i4").tobytes()),
        }
        worker.told_s = now_s()
        self.environment.runner.send_message(messages.TAKE, data, client_id=worker.client_id)

    def _repeat_takes(self) -> None:
        for worker in self._stripes.values():
            if worker.taken < len(worker.takes) and not worker.lost and now_s() - worker.told_s > 1.5:
                self._send_take(worker, worker.taken + 1)

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
            self._halt(stage, abort=self._abort, code="CL-STOP")

    def _halt(self, stage: Stage, *, abort: bool, code: str) -> None:
        self._send_all(messages.HALT, {"run_id": self._run_id, "stage": stage.index, "abort": abort, "code": code})

    def _open_stripes(self) -> list[Stripe]:
        return [s for s in self._stripes.values() if not (s.done or s.lost or s.error)]

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
        took = (drained_s or now_s() - self._t0_s) - end_s
        log.info("stage %s: %d rows, drained in %.1f s%s", stage.name, record.rows, took, _shown(marks))
        say(
            "staged",
            number=stage.index + 1,
            name=stage.name,
            rows=record.rows,
            statuses=dict(record.statuses),
            drain_s=took,
            marks=sorted(marks),
            attainment=self.live.progress(self.run_time_s)["attainment"],
        )

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

    # -- the end ------------------------------------------------------------------------------

    def _flush_stats(self) -> None:
        """Wait until each worker's last statistics have come: they follow the rows on the same channel."""
        self._flushed = set()
        asked = {s.client_id for s in self._stripes.values() if not s.lost}
        whole = self.collector is not None and not self.collector.failed
        self._send_all(messages.FLUSH, {"run_id": self._run_id, "whole": whole})
        limit = now_s() + 5.0
        while not asked <= self._flushed and now_s() < limit:
            gevent.sleep(POLL_S)
        for client in asked - self._flushed:
            self.collector.problem(f"worker {client}: its last statistics never came")  # type: ignore[union-attr]

    def _reconcile(self, loop: str) -> None:
        """Compare Locust's request counts with the ledger, row by row of `_stats.csv`."""
        assert self.collector is not None
        for index, record in self.collector.stages.items():
            entry = self.environment.stats.entries.get((self._names[index], stats.E2E_TYPE))
            counted = entry.num_requests if entry is not None else 0
            if index in self._lossy:
                continue  # statistics that a lost worker had not sent yet are gone; its rows need not be
            if counted != record.rows:
                self.collector.problem(
                    f"stage {index}: Locust counted {counted} requests, the ledger has {record.rows} rows"
                )

    def _close(self, csv_files: stats.FinalCSV | None) -> None:
        if self._scraper is not None:
            self._scraper.stop()
            self._scraper = None
        if self._meeting is not None:
            self._meeting.close()
        if csv_files is not None:
            try:
                csv_files.finish()
            except OSError as error:
                self.collector.problem(f"Locust's CSV files cannot be written: {error.strerror}")  # type: ignore[union-attr]
        if self.collector is None:
            self.environment.process_exit_code = 2
            return
        info = self.collector.info
        info.finished_utc = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        info.interrupted = self.interrupted
        self._run_id = ""  # what comes from a worker after this belongs to no run
        self.collector.finish()
        self.environment.process_exit_code = self._exit_code()
        for problem in info.problems:
            log.warning("%s", problem)
        log.info("run %s is complete: %s", info.run_id, self.collector.run_dir)

    def _exit_code(self) -> int:
        """2 the parts did not meet, 130 interrupted, 4 the record is not whole, else 0: the analysis judges the SLO."""
        assert self.collector is not None
        if self._refused:
            return 2
        if self.interrupted:
            return 130
        return 4 if self.collector.failed or self.collector.problems else 0


def say(event: str, **data: Any) -> None:
    """Tell `bench run`, when it is the parent, how far the run is: one line of JSON on standard output."""
    if os.environ.get("BENCH_PROGRESS") == "1":
        try:
            print("@bench " + json.dumps({"event": event, **data}), flush=True)
        except OSError:  # the parent is gone; `Wiring` ends the run in order
            os.environ.pop("BENCH_PROGRESS", None)


def _shown(marks: set[str]) -> str:
    return f" [{', '.join(sorted(marks))}]" if marks else ""


def _versions() -> dict[str, str]:
    names = ("locust", "gevent", "numpy", "pandas", "scipy", "pydantic")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _host() -> dict[str, Any]:
    """What the numbers were made on; holds no host name and no user name."""
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            model = next((line.split(":", 1)[1].strip() for line in handle if line.startswith("model name")), "")
    except OSError:
        pass
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "cpu": model,
        "cores": os.cpu_count(),
        "timer_s": time.get_clock_info("monotonic").resolution,
    }
