"""One worker's side of a run: sends each arrival of its stripe when it is due.

Input: stage messages of the master. Output: ledger rows in batches, a gauge
of streams in flight, and Locust events fired from the finished rows.
Does not: parse answers, judge them, or decide when a stage begins or ends.

1. Open loop: an arrival is sent when it is due, whatever the service does.
2. Every arrival of the stripe ends in exactly one row.
3. The gauge counts streams by itself (the transport's own begins and ends); it never looks at the rows.
4. The pacing loop never waits for an answer, a connection, or the master. It writes each request itself, on a kept
   connection; what would wait (a new connection, a full socket) goes on in a greenlet (`Transport.start`).
5. A worker sends an arrival only within `LEASE_S` of the last sign of it that its master says it has heard: the master
   gives to others, `LOST_S` (crew.py) after that same sign, what is due `TAKE_LEAD_S` later, and nothing may be sent
   twice, however long messages take either way. So LEASE_S < LOST_S + TAKE_LEAD_S.
6. Rows are kept on this worker's disk before they travel, and travel again until the master has them.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gevent
import numpy as np
from gevent.event import Event
from gevent.queue import Queue
from locust.env import Environment
from locust.runners import WorkerRunner

from bench.client.dialing import proxy_from_env
from bench.client.endpoint import parse_base_url
from bench.client.outcome import Outcome
from bench.client.request import line_body, request_body
from bench.client.stream import Stream
from bench.client.transport import Transport, TransportOptions
from bench.config import Config, api_key
from bench.records.lost import label, prompt_line, request_id
from bench.records.outbox import Outbox
from bench.records.packing import pack
from bench.records.request import RequestRow
from bench.workload.plan import Plan, Stage
from bench.workload.prompt_file import PromptFile, PromptText
from bench.workload.prompt_rows import PromptError, echoes
from bench.workload.prompts import PromptMaker
from bench.workload.schedule import Schedule, build_schedule
from locustfiles import messages, stats
from locustfiles.calm import calm
from locustfiles.clock import ClockOffset, clock_id, now_s
from locustfiles.pacing import HELD_S, YIELD_S, Breaks, Waiter
from locustfiles.shards import ShardKeeper

log = logging.getLogger("bench.generator")

GAUGE_INTERVAL_S = 0.1
# Rows of a second (of two, when there are many) travel together: a batch costs the master 0.3 ms whatever is in it.
SHIP_INTERVAL_S = 1.0
FEW_ROWS = 200
BATCH_ROWS = 1000
TRIPS, TRIP_GAP_S = 8, 0.05  # round trips before each stage
# A connection is opened this long before the arrival that finds none: twice a TLS handshake over 60 ms.
AHEAD_S = 0.25
# At low rates the process wakes this much earlier and stays awake: at most 2 % of a core. Send lag at 5 to 15 requests
# a second, median: 0.4 ms instead of 0.7.
SPIN_S, SPIN_EVERY_S = 0.001, 0.05
SPREE_S = 0.005  # so long may arrivals that are overdue be sent without a look at anything else
# So many requests are ready before they are due; the later ones are made while the next is this far away.
LOOKAHEAD, PREPARE_S = 4, 0.01
# Work that can wait goes on when no arrival is due within `HELD_S`; it waits so long for such a moment, not longer.
PATIENCE_S = 10 * HELD_S
GAUGE_SAMPLES = 5  # in one message
LEASE_S = 2.6
FAULT_PAUSE_S = 0.2  # of a closed-loop user whose request cannot be made
# A worker's answer counts as read in time when the loop was free again within this.
CPU_WINDOW_S = 1.0


@dataclass
class Job:
    """One stage as one worker runs it."""

    run_id: str
    plan: Plan
    stage: Stage
    stripe: int
    stripes: int
    t0_s: float  # the master's clock at the run's start
    loop: str
    settings: dict[str, Any]
    schedule: Schedule
    go: Event = field(default_factory=Event)
    start_s: float = 0.0
    offset_s: float = 0.0  # the master's clock minus ours
    bound_s: float | None = 0.0  # of its error; None: not known
    halted: Event = field(default_factory=Event)
    alarm: Waiter = field(default_factory=Waiter)
    abort: bool = False
    halt_code: str = "CL-STOP"
    turns: int = 0  # closed loop: arrivals begun so far
    begun_s: dict[int, float] = field(default_factory=dict)  # closed loop: arrival -> run time of its send
    opened: int = 0  # arrivals handed to the transport
    closed: int = 0  # arrivals that have their row
    paced: bool = False  # the pacing loop has ended
    next_due_s: float = math.inf  # this process's monotonic clock
    finished: list[tuple[int, Outcome | RequestRow]] = field(default_factory=list)
    todo: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # arrivals to send, ascending
    takes: int = 0  # parts of lost workers that were taken over
    lease_s: float = math.inf  # this process's monotonic clock; no arrival is sent after it
    ready: list[RequestRow] = field(default_factory=list)  # rows that wait for their batch
    shipped_s: float = 0.0
    outbox: Outbox = field(default_factory=Outbox)
    rows: int = 0
    fault: str = ""  # what made the stage's prompts doubtful
    done: Event = field(default_factory=Event)


class Generator:
    """The sender of one worker process; lives as long as the process."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.job: Job | None = None
        self.jobs: Queue = Queue()
        self.clock = ClockOffset()
        self._transport: Transport | None = None
        self._transport_key: Any = None
        self._prompts: PromptMaker | None = None
        self._prompts_key: Any = None
        self._own: PromptText | None = None  # the user's prompts
        self._helpers: list[gevent.Greenlet] = []
        self._closed: Job | None = None  # the stage whose turns closed-loop users take
        self._cpu = (time.process_time(), now_s())
        self._cpu_ratio: float | None = None
        self._memory_s = 0.0
        self._gauged = Event()
        self._samples: deque[tuple[Job, Transport, float, list[Any]]] = deque()  # of the gauge, not yet counted
        self._distributed = isinstance(environment.runner, WorkerRunner)
        self.shards = ShardKeeper(environment) if self._distributed else None

    # -- messages from the master ------------------------------------------------

    def listeners(self) -> dict[str, Callable[..., None]]:
        """Message name -> handler, for `runner.register_message`."""
        return {
            messages.STAGE: self.on_stage,
            messages.GO: self.on_go,
            messages.HALT: self.on_halt,
            messages.FLUSH: self.on_flush,
            messages.PONG: self.on_pong,
            messages.BEAT: self.on_beat,
            messages.TAKE: self.on_take,
            messages.ACK: self.on_ack,
        }

    def on_stage(self, environment: Environment, msg: Any, **_: Any) -> None:
        job = self.job
        if job is not None and (job.run_id, job.stage.index) != (msg.data["run_id"], msg.data["stage"]):
            self._abandon(job)  # this worker was lost for a while and the run went on without it
        self.jobs.put(dict(msg.data))

    def _abandon(self, job: Job) -> None:
        """Nobody waits for the rest of this stage: give up what is open, keep the rows on disk."""
        if not job.done.is_set():
            job.abort, job.halt_code = True, "CL-LOST"
            job.halted.set()
            job.alarm.wake()
            job.go.set()
            if self._transport is not None:
                self._transport.cancel_all("CL-DRAIN")
            job.done.set()

    def on_go(self, environment: Environment, msg: Any, **_: Any) -> None:
        job = self._current(msg.data)
        if job is not None and not job.go.is_set():
            job.start_s = msg.data["start_s"]
            self._renew(job, msg.data["heard_s"])
            if self.shards is not None:
                self.shards.begin(job)
            job.go.set()

    def _renew(self, job: Job, heard_s: float) -> None:
        """Sending is ours until `LEASE_S` after the master's clock showed `heard_s`, whenever we hear of it."""
        if not self._distributed:
            return
        # without a round trip there is no clock but ours, and the run is INVALID anyhow
        at_s = now_s() if job.bound_s is None else heard_s - job.offset_s - job.bound_s
        lease_s = at_s + LEASE_S
        job.lease_s = lease_s if math.isinf(job.lease_s) else max(job.lease_s, lease_s)

    def on_beat(self, environment: Environment, msg: Any, **_: Any) -> None:
        job = self._current(msg.data)
        if job is None:
            return
        if not msg.data["lost"]:
            lapsed = now_s() > job.lease_s
            self._renew(job, msg.data["heard_s"])
            if lapsed and now_s() <= job.lease_s:
                log.warning("stage %s: the master is back; sending goes on", job.stage.name)
        elif not job.halted.is_set():
            log.warning("stage %s: the master took this worker for lost; the rest is left to others", job.stage.name)
            job.halt_code = "CL-LOST"
            job.halted.set()
            job.alarm.wake()

    def on_take(self, environment: Environment, msg: Any, **_: Any) -> None:
        job = self._current(msg.data)
        if job is None or msg.data["number"] != job.takes + 1 or job.paced:
            return
        more = np.frombuffer(zlib.decompress(msg.data["arrivals"]), dtype="<i4").astype(np.int64)
        job.todo = np.union1d(job.todo, more)
        job.takes += 1
        log.info("stage %s: %d arrivals of a lost worker taken over", job.stage.name, len(more))
        job.alarm.nudge()

    def on_ack(self, environment: Environment, msg: Any, **_: Any) -> None:
        job = self._current(msg.data)
        if job is not None:
            job.outbox.ack(msg.data["seq"], now_s())

    def on_halt(self, environment: Environment, msg: Any, **_: Any) -> None:
        job = self._current(msg.data)
        if job is None:
            return
        job.abort = job.abort or bool(msg.data["abort"])
        job.halt_code = msg.data["code"]
        job.halted.set()
        job.alarm.wake()
        job.go.set()
        if job.abort and self._transport is not None:
            self._transport.cancel_all(job.halt_code)

    def on_flush(self, environment: Environment, msg: Any, **_: Any) -> None:
        runner = environment.runner
        send_stats = getattr(runner, "_send_stats", None)
        if send_stats is not None:  # a worker: bring its statistics to the master before the answer
            send_stats()
        self.job = None  # the run is over for this worker: no more gauge
        self._send_samples(now_s(), all_of_them=True)
        if self.shards is not None:
            self.shards.end(whole=bool(msg.data.get("whole")))
        self._send(messages.FLUSHED, {"run_id": msg.data["run_id"]})

    def on_pong(self, environment: Environment, msg: Any, **_: Any) -> None:
        received = now_s()
        if msg.data["clock_id"] and msg.data["clock_id"] == clock_id():
            self.clock.share()
        self.clock.add_trip(msg.data["sent_s"], msg.data["master_s"], received)

    def _current(self, data: dict[str, Any]) -> Job | None:
        job = self.job
        if job is None or job.run_id != data["run_id"] or job.stage.index != data["stage"]:
            return None
        return job

    def _send(self, kind: str, data: dict[str, Any]) -> None:
        self.environment.runner.send_message(kind, data)

    # -- the life of a worker ------------------------------------------------------

    def run(self) -> None:
        """Take stage after stage from the master; ends only with its greenlet."""
        self._start_helpers()
        calm()
        while True:
            data = self.jobs.get()
            try:
                job = self._prepare(data)
            except Exception as error:  # the master must hear of it, else it waits for nothing
                log.exception("stage %s cannot be prepared", data.get("stage"))
                why = {"error": _one_line(error), "prompts": isinstance(error, PromptError)}
                self._send(messages.READY, {**_address(data), "planned": 0, "hash": "", **why})
                continue
            # What is there now stays: later collections look at the stage's own objects only (they took 30 ms).
            gc.collect()
            gc.freeze()
            self._announce(job)
            job.go.wait()
            if job.done.is_set():  # abandoned before it began
                job.alarm.close()
                continue
            try:
                if job.loop == "closed":
                    self._hold_open(job)
                else:
                    self._pace(job)
            except Exception:  # a fault of ours: say so in the rows, go on with the next stage
                log.exception("stage %s: the pacing loop failed", job.stage.name)
                for arrival in job.todo.tolist():
                    self._refuse(job, arrival, "CL-BUG", kind="client")
                job.todo = job.todo[:0]
            self._look_at_own(job)
            job.paced = True
            job.done.wait()
            job.alarm.close()

    def _start_helpers(self) -> None:
        if not self._helpers:
            self._helpers = [gevent.spawn(self._gauge_loop), gevent.spawn(self._flush_loop)]

    def _prepare(self, data: dict[str, Any]) -> Job:
        plan = Plan.from_json(data["plan"])
        stage = plan.stages[data["stage"]]
        job = Job(
            run_id=data["run_id"],
            plan=plan,
            stage=stage,
            stripe=data["stripe"],
            stripes=data["stripes"],
            t0_s=data["t0_s"],
            loop=data["loop"],
            settings=data["settings"],
            schedule=build_schedule(plan, stage),
        )
        job.todo = job.schedule.stripe(job.stripe, job.stripes)
        if self.shards is not None:
            job.outbox = self.shards.outbox(data)
        self._open_transport(job.settings)
        self._open_prompts(plan)
        self._tie_clock(data["clock_id"])
        if self.job is not None and self.job.run_id != job.run_id:
            self._send_samples(now_s(), all_of_them=True)
        job.offset_s = self.clock.offset_s  # one for the whole stage: its times must not jump
        bound_s = self.clock.bound_after(job.stage.duration_s)
        job.bound_s = bound_s if math.isfinite(bound_s) else None
        self.job = job
        return job

    def _open_transport(self, settings: dict[str, Any]) -> None:
        key = repr(sorted(settings.items(), key=lambda item: item[0]))
        if self._transport is not None and key == self._transport_key:
            return
        if self._transport is not None:
            self._send_samples(now_s(), all_of_them=True)
            self._transport.close()
        endpoint = parse_base_url(settings["base_url"])
        asked = dict(settings["transport"])
        if settings["trust_env"] and not asked["proxy"]:
            asked["proxy"] = proxy_from_env(endpoint.scheme, endpoint.host)
        headers = tuple((name, value) for name, value in settings["extra_headers"])
        options = TransportOptions(**asked, extra_headers=headers)
        self._transport = Transport(endpoint, options, process_key(settings))
        self._transport_key = key

    def _open_prompts(self, plan: Plan) -> None:
        if plan.lines is not None:
            self._open_own(plan.lines)
            return
        if self._prompts is None or self._prompts_key != plan.prompts:
            self._prompts = PromptMaker(plan.prompts.tokens_per_word, plan.prompts.unique)
            self._prompts_key = plan.prompts

    def _open_own(self, lines: PromptFile) -> None:
        """The file of prompts on this machine: that it is the plan's is checked once, and again when it was touched."""
        path = os.environ.get("BENCH_PROMPTS_FILE", "")
        if self._own is not None and self._own.is_current(lines, path):
            self._own.file = lines
            return
        if self._own is not None:
            self._own.close()
            self._own = None
        try:
            self._own = PromptText(lines, path, pause=_let_others)  # the hash of a large file takes its time
        except PromptError as error:
            name = getattr(self.environment.runner, "client_id", "local")
            raise PromptError(f"worker {name}: {error}") from None

    def _look_at_own(self, job: Job) -> None:
        """At a stage's end: whether its prompts were read from the file that was compared with the plan's."""
        if job.plan.lines is not None and self._own is not None and self._own.changed:
            name = getattr(self.environment.runner, "client_id", "local")
            job.fault = (
                f"worker {name}: {self._own.path}: was written to while the stage ran (its size or time of change is "
                "another one), so nobody knows what was sent"
            )

    def _tie_clock(self, master_clock_id: str) -> None:
        self.clock = ClockOffset()
        if not self._distributed or (master_clock_id and master_clock_id == clock_id()):
            self.clock.share()
            return
        for _ in range(TRIPS):
            self._send(messages.PING, {"sent_s": now_s(), "clock_id": clock_id()})
            gevent.sleep(TRIP_GAP_S)

    def _announce(self, job: Job) -> None:
        planned = len(range(job.stripe, len(job.schedule.intended_s), job.stripes))
        self._send(
            messages.READY,
            {
                "run_id": job.run_id,
                "stage": job.stage.index,
                "stripe": job.stripe,
                "planned": planned,
                "hash": job.schedule.hash,
                "error": "",
                "offset_s": job.offset_s,
                "bound_s": job.bound_s,  # None: no round trip came back, so nothing is known
                "shared": self.clock.shared,
                "pid": os.getpid(),
            },
        )

    # -- sending --------------------------------------------------------------------

    def to_run_s(self, job: Job, monotonic_s: float) -> float:
        """Seconds from the run's start, on the master's clock."""
        return monotonic_s + job.offset_s - job.t0_s

    def _pace(self, job: Job) -> None:
        """Send each arrival of the stripe when it is due; see `Transport.start` for why that never waits."""
        transport = self._transport
        assert transport is not None
        start_s = job.t0_s + job.start_s - job.offset_s  # this process's monotonic clock
        end_s = start_s + job.stage.duration_s
        intended = job.schedule.intended_s
        limit = job.settings["max_in_flight"]
        ready: dict[int, Stream] = {}
        looked = -1
        spun_s = 0.0
        rested_s = now_s()
        lapsed_s = -math.inf  # what was due before this came due while the lease was over
        while True:
            if now_s() > job.lease_s:
                lapsed_s = now_s()  # now: once the hub runs, a message that waits may renew the lease
            if not len(job.todo):  # until its end the stage may bring arrivals of a lost worker
                job.next_due_s = math.inf
                job.alarm.until(end_s)
                if not len(job.todo) and (job.halted.is_set() or now_s() >= end_s):
                    return
                continue
            arrival = int(job.todo[0])
            job.next_due_s = due_s = start_s + float(intended[arrival])
            if arrival not in ready and due_s > lapsed_s and not job.halted.is_set():
                ready[arrival] = self._prepared(job, arrival)  # before it is due: no work between due and sent
            if now_s() < due_s:
                if arrival != looked:
                    job.alarm.until(due_s - AHEAD_S)
                    if now_s() >= due_s - AHEAD_S:
                        looked = arrival
                        transport.open_ahead(due_s)
                else:
                    self._prepare_more(job, ready)
                    job.alarm.until(due_s, SPIN_S if due_s - spun_s > SPIN_EVERY_S else 0.0)
                    spun_s = due_s
                rested_s = now_s()
                if rested_s < due_s and not job.halted.is_set():
                    continue  # look again: the list may have changed
                if rested_s > job.lease_s:
                    continue  # the process had been stopped
            elif now_s() - rested_s > SPREE_S:
                gevent.sleep(YIELD_S)  # far behind: answers and messages must be read all the same
                rested_s = now_s()
                continue
            job.todo = job.todo[1:]
            stream = ready.pop(arrival, None)
            if job.halted.is_set():
                self._refuse(job, arrival, job.halt_code if not job.abort else "CL-STOP")
            elif due_s <= lapsed_s or now_s() > job.lease_s:
                self._refuse(job, arrival, "CL-LOST")  # the master may have given it to another worker by now
            elif job.opened - job.closed >= limit:
                self._refuse(job, arrival, "CL-CAP")
            else:
                job.opened += 1
                assert stream is not None
                transport.start(stream)

    def _prepare_more(self, job: Job, ready: dict[int, Stream]) -> None:
        """Make the requests after the next one, as long as that is far away."""
        for arrival in job.todo[1:LOOKAHEAD].tolist():
            if arrival not in ready:
                if job.next_due_s - now_s() < PREPARE_S or job.halted.is_set():
                    return
                ready[arrival] = self._prepared(job, arrival)

    def _hold_open(self, job: Job) -> None:
        """Closed loop: let the users take turns for the length of the stage."""
        start_s = job.t0_s + job.start_s - job.offset_s
        gevent.sleep(max(0.0, start_s - now_s()))
        self._closed = job
        job.halted.wait(max(0.0, start_s + job.stage.duration_s - now_s()))
        self._closed = None

    def closed_turn(self) -> None:
        """One turn of a closed-loop user: send, and wait for the end of the answer."""
        job = self._closed
        if job is None or len(job.schedule) == 0:
            gevent.sleep(0.02)
            return
        arrival = job.stripe + job.stripes * job.turns
        job.turns += 1
        try:
            body = self._body(job, arrival)
        except Exception:  # a fault of ours: the arrival has its row all the same
            log.exception("stage %s: a request cannot be made", job.stage.name)
            job.begun_s[arrival] = self.to_run_s(job, now_s())
            self._refuse(job, arrival, "CL-BUG", kind="client")
            gevent.sleep(FAULT_PAUSE_S)
            return
        ended = Event()

        def on_done(outcome: Outcome) -> None:
            job.closed += 1
            job.finished.append((arrival, outcome))
            ended.set()

        job.begun_s[arrival] = self.to_run_s(job, now_s())
        job.opened += 1
        assert self._transport is not None
        self._transport.send(body, on_done=on_done, **self._asked(job, arrival))
        ended.wait()

    def _body(self, job: Job, arrival: int) -> bytes:
        schedule, ask = job.schedule, job.settings["request"]
        drawn = arrival % len(schedule)  # an open loop never goes round; a closed one may outlast the draws
        extra = ask["extra_body"]
        if job.settings["labels"]:  # the engine's own fields; other services may refuse what they do not know
            names = {
                "tenant": label(job.plan.tenants, int(schedule.tenant[drawn])),
                "request_class": label(job.plan.classes, int(schedule.request_class[drawn])),
            }
            extra = {**{key: name for key, name in names.items() if name}, **extra}
        if schedule.place is not None:
            return self._own_body(job, drawn, extra)
        assert self._prompts is not None
        shared = schedule.shared
        text = self._prompts.text(
            int(schedule.prompt_seed[drawn]) + arrival - drawn,
            int(schedule.input_tokens[drawn]),
            shared.names(drawn, arrival // len(schedule)).tolist() if shared is not None else (),
            shared.block_tokens if shared is not None else 0,
        )
        return request_body(
            ask["model"],
            text,
            int(schedule.max_tokens[drawn]),
            endpoint=ask["endpoint"],
            stream=True,
            ignore_eos=ask["ignore_eos"],
            extra_body=extra,
        )

    def _own_body(self, job: Job, drawn: int, extra: dict[str, Any]) -> bytes:
        """The request with the user's prompt; the line's own body fields go before those of the config."""
        schedule, ask, own = job.schedule, job.settings["request"], self._own
        assert own is not None and schedule.place is not None
        place = int(schedule.place[drawn])
        if job.settings["embedded"]:  # it has no tokenizer
            extra = {"input_tokens": int(schedule.input_tokens[drawn]), **extra}
        return line_body(
            ask["model"],
            own.value(place),
            int(schedule.max_tokens[drawn]),
            messages=bool(own.file.messages[place]),
            endpoint=ask["endpoint"],
            ignore_eos=ask["ignore_eos"],
            extra_body={**extra, **own.extra(place)},
        )

    def _prepared(self, job: Job, arrival: int) -> Stream:
        """The request of an arrival, ready to be sent."""
        assert self._transport is not None

        def on_done(outcome: Outcome) -> None:
            job.closed += 1
            job.finished.append((arrival, outcome))

        return self._transport.prepare(self._body(job, arrival), on_done=on_done, **self._asked(job, arrival))

    def _asked(self, job: Job, arrival: int) -> dict[str, Any]:
        """How the request of an arrival is sent and read."""
        pinned = int(job.schedule.max_tokens[arrival % len(job.schedule)]) if job.settings["pin_length"] else None
        return {
            "request_id": request_id(job.run_id, job.stage.index, arrival),
            "prompt_read": is_prompt_sample(arrival, job.settings["prompt_sample_ratio"]),
            "pinned_tokens": pinned,
        }

    def _refuse(self, job: Job, arrival: int, code: str, *, status: str = "unsent", kind: str = "unsent") -> None:
        """The arrival is not sent; it has its row all the same."""
        row = RequestRow(status=status, code=code, error_kind=kind, **self._address(job, arrival))
        job.finished.append((arrival, row))

    def _address(self, job: Job, arrival: int) -> dict[str, Any]:
        schedule, stage = job.schedule, job.stage
        drawn = arrival % len(schedule)
        if job.loop == "closed":
            intended = job.begun_s.pop(arrival) - job.start_s
        else:
            intended = float(schedule.intended_s[arrival])
        return {
            "stage": stage.index,
            "arrival": arrival,
            "worker": job.stripe,
            "repeat": stage.repeat,
            "offered_qps": stage.rate_at(intended) if job.loop == "open" else 0.0,
            "phase": "warmup" if intended < stage.warmup_s else "window",
            "tenant": label(job.plan.tenants, int(schedule.tenant[drawn])),
            "request_class": label(job.plan.classes, int(schedule.request_class[drawn])),
            "request_id": request_id(job.run_id, stage.index, arrival),
            "intended_s": job.start_s + intended,
            "input_tokens": int(schedule.input_tokens[drawn]),
            "prompt_line": prompt_line(job.plan, schedule, drawn),
            "max_tokens": int(schedule.max_tokens[drawn]),
        }

    # -- rows and gauge ---------------------------------------------------------------

    def _flush_loop(self) -> None:
        """Turn finished arrivals into rows, Locust events and batches, ten times a second, after the gauge."""
        while True:
            self._gauged.wait()
            self._gauged.clear()
            job = self.job
            if job is not None:
                try:
                    self._flush(job)
                except Exception:
                    log.exception("rows of stage %s could not be handed over", job.stage.index)

    def _flush(self, job: Job) -> None:
        breaks = Breaks(lambda: self._let_go(job))
        self._let_go(job)
        while job.finished:
            taken, job.finished = job.finished[:BATCH_ROWS], job.finished[BATCH_ROWS:]
            for arrival, end in taken:
                row = self._row(job, arrival, end)
                stats.fire(self.environment, job.stage.name, row)
                job.rows += 1
                job.ready.append(row)
                breaks()
        ended = job.paced and job.opened == job.closed and not job.finished
        wait_s = SHIP_INTERVAL_S if len(job.ready) < FEW_ROWS else 2 * SHIP_INTERVAL_S
        while len(job.ready) >= BATCH_ROWS or (job.ready and (ended or now_s() - job.shipped_s >= wait_s)):
            batch, job.ready = job.ready[:BATCH_ROWS], job.ready[BATCH_ROWS:]
            batch.sort(key=_arrival)
            job.outbox.add(pack(batch, breaks))
            job.shipped_s = now_s()
        self._ship(job)
        if ended and not job.ready and job.outbox.idle and not job.done.is_set():
            self._send(
                messages.DONE,
                {
                    "run_id": job.run_id,
                    "stage": job.stage.index,
                    "stripe": job.stripe,
                    "batches": job.outbox.added,
                    "rows": job.rows,
                    "fault": job.fault,
                },
            )
            job.done.set()

    def _let_go(self, job: Job) -> None:
        """Let what is due go first; wait for a moment in which nothing is. At high rates there is none: go on."""
        patience_s = now_s() + PATIENCE_S
        gevent.sleep(YIELD_S)
        while not job.paced and job.next_due_s - now_s() < HELD_S and now_s() < patience_s:
            gevent.sleep(max(YIELD_S, job.next_due_s - now_s() + YIELD_S))

    def _ship(self, job: Job) -> None:
        """Send the batches whose turn it is."""
        for seq, data in job.outbox.due(now_s()):
            self._send(
                messages.ROWS,
                {"run_id": job.run_id, "stage": job.stage.index, "stripe": job.stripe, "seq": seq, "data": data},
            )

    def _row(self, job: Job, arrival: int, end: Outcome | RequestRow) -> RequestRow:
        if isinstance(end, RequestRow):
            return end
        row = end.to_row(to_run_s=lambda at: self.to_run_s(job, at), **self._address(job, arrival))
        if row.detail and job.schedule.place is not None:
            self._withhold(job, row)
        return row

    def _withhold(self, job: Job, row: RequestRow) -> None:
        """A service's message may show the prompt that it refuses; the user's own stay out of the ledger."""
        assert job.schedule.place is not None
        place = int(job.schedule.place[row.arrival % len(job.schedule)])
        try:
            shows = self._own is None or echoes(row.detail, self._own.value(place))
        except ValueError:  # PromptError too: the file is not what it was
            shows = True
        if shows:
            row.detail = "withheld: the service's message holds a part of the prompt"

    def _gauge_loop(self) -> None:
        """Sample the streams in flight ten times a second on an absolute grid; send twice a second."""
        due = now_s()
        while True:
            due += GAUGE_INTERVAL_S
            gevent.sleep(max(0.0, due - now_s()))
            late = now_s() - due
            if late > 1.0:  # the process was stopped: do not fire the missed samples in a row
                due = now_s()
            self._gauged.set()
            job, transport = self.job, self._transport
            if job is None or transport is None:
                continue
            at = now_s()
            memory = _rss_bytes() if self._memory_is_due(at) else None
            sample = [self.to_run_s(job, at), job.stage.index, 0, max(0.0, late), self._cpu_now(at), memory]
            self._samples.append((job, transport, at, sample))
            self._send_samples(at)

    def _send_samples(self, at_s: float, *, all_of_them: bool = False) -> None:
        """Count the streams of the samples that are old enough, and send them.

        An answer that was complete may still wait in its socket for the next drain; once `settle_s` has passed, the
        transport knows when it ended, and so how many were in flight at the time of the sample. With `all_of_them`
        nothing is waited for: the run is over, or goes on with another transport.
        """
        samples = self._samples
        ready = 0
        while ready < len(samples) and (all_of_them or samples[ready][2] + samples[ready][1].settle_s <= at_s):
            ready += 1
        if not ready or (ready < GAUGE_SAMPLES and not all_of_them):
            return
        out = []
        for _ in range(ready):
            job, transport, taken_s, sample = samples.popleft()
            sample[2] = transport.in_flight_at(taken_s)
            out.append(sample)
        if self.shards is not None:
            self.shards.gauge(job, out)
        self._send(messages.GAUGE, {"run_id": job.run_id, "stripe": job.stripe, "samples": out, "takes": job.takes})

    def _memory_is_due(self, at: float) -> bool:
        if at - self._memory_s < CPU_WINDOW_S:
            return False
        self._memory_s = at
        return True

    def _cpu_now(self, at: float) -> float | None:
        """CPU seconds per second of this process over the last second, known once a second."""
        used, since = self._cpu
        if at - since >= CPU_WINDOW_S:
            now = time.process_time()
            self._cpu_ratio = (now - used) / (at - since)
            self._cpu = (now, at)
            return self._cpu_ratio
        return None


def process_key(settings: dict[str, Any]) -> str | None:
    """The API key of this process: from its own environment or key file, never from a message."""
    target = {"api_key_file": settings["api_key_file"]} if settings["api_key_file"] else {}
    return api_key(Config.model_validate({"base_url": settings["base_url"], "target": target,
                                          "engine": {"embedded": settings["embedded"]}}))  # fmt: skip


def is_prompt_sample(arrival: int, ratio: float) -> bool:
    """Whether this arrival is read promptly, by its number alone, so that a repeat reads the same ones.

    The golden-ratio sequence spreads the chosen numbers evenly at any ratio.
    """
    return (arrival * 0.6180339887498949) % 1.0 < ratio


def _address(data: dict[str, Any]) -> dict[str, Any]:
    return {"run_id": data["run_id"], "stage": data["stage"], "stripe": data["stripe"]}


def _arrival(row: RequestRow) -> int:
    return row.arrival


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:600]


def _let_others() -> None:
    gevent.sleep(0)


def _rss_bytes() -> int | None:
    try:
        with open("/proc/self/statm", encoding="ascii") as handle:
            return int(handle.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
