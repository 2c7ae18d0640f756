"""The workers of a run as the master knows them: who has which stripe, who is silent, who takes over.

Input: messages of the workers, the list of those that Locust has connected.
Output: one `Stripe` for each, their rows in the collector; arrivals of lost workers given to the others.
Does not: walk the plan (`conductor.py` does) or decide when a stage begins and ends (`stage_run.py` does).

A worker that is silent for `LOST_S` is lost for the stage: what it has not sent by then goes to the others, and
rows it may still bring for these do not count. No arrival has two rows, whoever wakes up when.
"""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gevent.event import Event
from locust.env import Environment

from bench.records.collect import Collector
from bench.records.packing import unpack
from bench.records.stage import InflightRow
from bench.workload.plan import Stage
from locustfiles import messages
from locustfiles.clock import clock_id, now_s
from locustfiles.live import Live
from locustfiles.observe import Observer

log = logging.getLogger("bench")

# A worker speaks twice a second. So much silence is four missed messages; Locust itself needs three to four seconds.
LOST_S = 2.3
# When nobody is heard the silence may be our own (Locust holds its listener for up to a second when a worker joins).
ALL_LOST_S = 3.5
BEAT_S = 0.5
SLEPT_S = 1.0  # five times the longest that we mean to stay away from looking
TAKE_LEAD_S = 0.4  # arrivals due sooner cannot reach another worker in time
FLUSH_S = 0.5  # rows wait no longer in memory


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
    prompts_differ: bool = False  # the error is that its file of prompts is not the plan's
    fault: str = ""  # why its part of the stage is doubtful, from its end
    hash: str = ""
    rows: int = 0
    heard_s: float = 0.0  # our clock at its last message
    sampled_s: float = 0.0  # run time of its last gauge sample
    takes: list[np.ndarray] = field(default_factory=list)  # arrivals of lost workers that it was given
    taken: int = 0  # how many of these it has confirmed
    told_s: float = 0.0  # our clock at the last send of one
    info: dict[str, Any] = field(default_factory=dict)


class Crew:
    """The workers, and what the messages from them say."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.live = Live()
        self.observer = Observer(self)
        self.collector: Collector | None = None
        self._stop = Event()
        self._stripes: dict[str, Stripe] = {}
        self._stage: Stage | None = None
        self._gone: set[str] = set()  # clients that were lost and not heard since
        self._flushed: set[str] = set()
        self._run_id = ""
        self._t0_s = 0.0
        self._names: dict[int, str] = {}
        self._intended_s: np.ndarray | None = None  # of the stage, from its start
        self._start_s = math.inf  # run time of the stage's start, once it is known
        self._beat_s = self._flush_s = 0.0
        self._looked_s = math.inf

    def worker_counts(self) -> dict[str, int]:
        """Workers by what they are to the stage that runs: connected, sending, lost."""
        stripes = self._stripes.values()
        return {
            "connected": len(self._clients()),
            "sending": sum(not (s.lost or s.done or s.error) for s in stripes),
            "lost": sum(s.lost for s in stripes),
        }

    @property
    def deserted(self) -> bool:
        """No worker is left: Locust ends its test then by itself."""
        return self.distributed and not self._clients()

    @property
    def distributed(self) -> bool:
        """Whether the workers are other processes."""
        return getattr(self.environment.runner, "clients", None) is not None

    def _clients(self) -> list[str]:
        """Ids of the workers there are now, in the order of their index."""
        runner = self.environment.runner
        clients = getattr(runner, "clients", None)
        if clients is None:
            return ["local"]
        there = [c.id for c in clients.ready + clients.spawning + clients.running]
        return sorted(there, key=runner.get_worker_index)

    def _send_all(self, kind: str, data: dict[str, Any]) -> None:
        for stripe in self._stripes.values():
            if not stripe.lost:
                self.environment.runner.send_message(kind, data, client_id=stripe.client_id)

    def _open_stripes(self) -> list[Stripe]:
        return [s for s in self._stripes.values() if not (s.done or s.lost or s.error)]

    def _stage_index(self) -> int:
        return self._stage.index if self._stage is not None else -1

    @property
    def run_time_s(self) -> float:
        """Seconds since the run began, on the master's clock; 0 before the first run."""
        return now_s() - self._t0_s if self._t0_s else 0.0

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
            stripe.prompts_differ = bool(msg.data.get("prompts"))
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
            stripe.fault = msg.data.get("fault", "")

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

    # -- loss of workers ------------------------------------------------------------------

    def _look_for_lost(self, marks: set[str]) -> None:
        """See who is gone, keep the others at work, write what has come in. Called many times a second."""
        there = set(self._clients())
        if self.distributed:
            self._forgive_own_sleep()
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

    def _forgive_own_sleep(self) -> None:
        """While this process stood still nobody could be heard: that time is no worker's silence."""
        now = now_s()
        slept_s, self._looked_s = now - self._looked_s, now
        if slept_s > SLEPT_S:
            for stripe in self._stripes.values():
                stripe.heard_s = min(now, stripe.heard_s + slept_s)

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
                data = {
                    "run_id": self._run_id,
                    "stage": self._stage_index(),
                    "lost": stripe.lost,
                    "heard_s": stripe.heard_s,
                }
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
