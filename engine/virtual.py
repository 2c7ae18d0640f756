"""The virtual driver: replicas, a router and a client's timeouts over one list of arrivals, without waiting.

Input: an `EngineConfig`, arrivals (times and lengths), timeouts. Output: `Outcomes`, one slot per arrival, in columns.
Does not: read schedules or write rows (engine/simulate.py does).

1. Arrivals inside a step are submitted at their own time and seen by the next plan, as in the HTTP driver.
2. Order at one moment: steps end, timeouts, arrivals, then the next step is planned.
3. `jump` changes speed only: outcomes with and without it agree to rounding.
4. Blind routers (round_robin, random) fix the split beforehand, so each replica runs by itself.
"""
from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.journal import Entry, Journal
from engine.request import ABORTED, Request
from engine.router import Router
from engine.scheduler import Core, Counters, Reject, StepPlan, StepResult
from engine.settings import EngineConfig
from engine.skipping import stretch

NEVER, OK, REFUSED, FIRST_TIMEOUT, TOTAL_TIMEOUT, CUT = range(6)  # values of Outcomes.kind
STAGE_STREAM = 0x53544147
NEAR_S = 5.0  # deadlines are only looked at when this near; a stretch of steps is seldom longer


@dataclass(frozen=True, slots=True)
class Patience:
    """When a client gives up, in seconds from the arrival; `cut_s` = end of all waiting, from the start."""

    first_token_s: float = math.inf
    total_s: float = math.inf
    cut_s: float = math.inf


@dataclass(slots=True)
class Outcomes:
    """What became of each arrival. Times in seconds from the start; NaN = did not happen."""

    kind: array = field(default_factory=lambda: array("B"))
    scheduled_s: array = field(default_factory=lambda: array("d"))
    first_s: array = field(default_factory=lambda: array("d"))
    last_s: array = field(default_factory=lambda: array("d"))
    done_s: array = field(default_factory=lambda: array("d"))
    output_tokens: array = field(default_factory=lambda: array("i"))
    cached_tokens: array = field(default_factory=lambda: array("i"))
    preemptions: array = field(default_factory=lambda: array("H"))
    replica: array = field(default_factory=lambda: array("H"))
    length_stop: array = field(default_factory=lambda: array("B"))  # 1: finish reason "length"
    refusals: dict[int, Reject] = field(default_factory=dict)
    up_s: array = field(default_factory=lambda: array("d"))  # the in-flight counter's own events
    down_s: array = field(default_factory=lambda: array("d"))
    counters: list[Counters] = field(default_factory=list)

    @classmethod
    def of_size(cls, n: int) -> Outcomes:
        """Empty outcomes of `n` arrivals."""
        out = cls()
        nan = array("d", [math.nan]) * n
        out.kind = array("B", bytes(n))
        out.scheduled_s, out.first_s, out.last_s, out.done_s = nan[:], nan[:], nan[:], nan[:]
        zero = array("i", [0]) * n
        out.output_tokens, out.cached_tokens = zero[:], zero[:]
        small = array("H", [0]) * n
        out.preemptions, out.replica = small[:], small[:]
        out.length_stop = array("B", bytes(n))
        return out

    def in_flight(self, at_s: np.ndarray) -> np.ndarray:
        """The counter's value at each of the given moments."""
        up, down = np.sort(np.array(self.up_s)), np.sort(np.array(self.down_s))
        return np.searchsorted(up, at_s, side="right") - np.searchsorted(down, at_s, side="right")


class Lane:
    """One replica on its own virtual clock."""

    def __init__(self, core: Core, out: Outcomes, patience: Patience, jump: bool) -> None:
        self.core = core
        self.out = out
        self.patience = patience
        self.jump = jump
        self.now_s = 0.0
        self._plan: StepPlan | None = None
        self._end_s = 0.0
        self._first: deque[tuple[float, Request]] = deque()
        self._total: deque[tuple[float, Request]] = deque()
        self._soon_s = math.inf  # no deadline lies before this
        self._watch: Callable[[Lane, StepResult], None] | None = None

    def watch(self, call: Callable[[Lane, StepResult], None]) -> None:
        """Have `call` told after each commit (tests)."""
        self._watch = call

    def submit(self, request: Request) -> None:
        """An arrival; `run_until(request.arrival_s)` was called before."""
        at_s, out = request.arrival_s, self.out
        out.up_s.append(at_s)
        answer = self.core.submit(request, at_s)
        if self._plan is None and at_s > self.now_s:
            self.now_s = at_s
        if isinstance(answer, Reject):
            out.refusals[request.index] = answer
            self._close(request, REFUSED)
            return
        patience = self.patience
        if patience.first_token_s < math.inf:
            self._first.append((at_s + patience.first_token_s, request))
        if patience.total_s < math.inf:
            self._total.append((at_s + patience.total_s, request))
        self._soon_s = min(self._soon_s, at_s + patience.first_token_s, at_s + patience.total_s)

    def run_until(self, arrival_s: float) -> None:
        """Do all that happens before the arrival at `arrival_s` (inf: to the end of all work)."""
        core = self.core
        while True:
            plan = self._plan
            if plan is None:
                now = self.now_s
                if now >= arrival_s:
                    return
                self._expire(now)
                plan = core.plan(now)
                if core.dropped:
                    self._close_dropped()
                if plan is None:
                    wake = min(core.wake_s(now), self._next_timeout())
                    if wake >= arrival_s:
                        return
                    self.now_s = wake
                    continue
                self._plan = plan
                if self.jump:
                    self._end_s = stretch(core, plan, now, arrival_s, min(self._next_timeout(), self.patience.cut_s))
                else:
                    self._end_s = now + core.duration(plan)
            end = self._end_s
            if self._soon_s < end:
                self._expire(min(math.nextafter(end, 0.0), arrival_s))
            if end > arrival_s:
                return
            result = core.commit(plan, end)
            self._plan = None
            self.now_s = end
            for request in result.finished:
                self._close(request, OK)
            for request in result.aborted:
                self._close_aborted(request)
            if self._watch is not None:
                self._watch(self, result)

    def cut(self, at_s: float) -> None:
        """Give up on everything still open at `at_s`."""
        for request in list(self.core.by_id.values()):
            request.user = (CUT, at_s)
            self._abort(request, at_s)
        if self._plan is not None:
            result = self.core.commit(self._plan, max(at_s, self.now_s))
            self._plan = None
            # The step in flight ends after the cut: what it would have finished is cut as well.
            for request in result.finished + result.aborted:
                self._close_aborted(request)

    def _next_timeout(self) -> float:
        """A moment before which no client gives up; exact when it is near."""
        if self._soon_s > self.now_s + NEAR_S:
            return self._soon_s
        return self._first_deadline()

    def _first_deadline(self) -> float:
        """The first deadline of a request that has not met it; forgets those that have."""
        first, total = self._first, self._total
        while first and (first[0][1].first_token_s is not None or first[0][1].done_s is not None):
            first.popleft()
        while total and total[0][1].done_s is not None:
            total.popleft()
        self._soon_s = min(first[0][0] if first else math.inf, total[0][0] if total else math.inf)
        return self._soon_s

    def _expire(self, until_s: float) -> None:
        """Let clients give up whose time is over by `until_s`."""
        if self._soon_s > until_s:
            return
        while self._first_deadline() <= until_s:
            first, total = self._first, self._total
            if first and (not total or first[0][0] <= total[0][0]):
                at_s, request = first.popleft()
                kind = FIRST_TIMEOUT
            else:
                at_s, request = total.popleft()
                kind = TOTAL_TIMEOUT
            if request.user is None:
                request.user = (kind, at_s)
                self._abort(request, at_s)

    def _abort(self, request: Request, at_s: float) -> None:
        self.core.abort(request.request_id, at_s)
        if request.state == ABORTED:
            self._close_aborted(request)

    def _close_aborted(self, request: Request) -> None:
        kind, at_s = request.user  # type: ignore[misc]
        request.done_s = at_s
        self._close(request, kind)

    def _close_dropped(self) -> None:
        for request in self.core.dropped:
            self.out.refusals[request.index] = Reject(request.reason or "", 503)
            self._close(request, REFUSED)
        self.core.dropped.clear()

    def _close(self, request: Request, kind: int) -> None:
        """Write down what became of a request; the request itself is let go."""
        out, i = self.out, request.index
        out.kind[i] = kind
        if request.scheduled_s is not None:
            out.scheduled_s[i] = request.scheduled_s
        if request.first_token_s is not None:
            out.first_s[i] = request.first_token_s
            out.last_s[i] = request.last_token_s
            out.output_tokens[i] = request.generated
            out.length_stop[i] = request.finish_reason == "length"
        out.done_s[i] = request.done_s
        out.cached_tokens[i] = request.cached_tokens
        out.preemptions[i] = min(request.preemptions, 65535)
        out.down_s.append(request.done_s)


def lane_seed(seed: int, replica: int) -> int:
    """Seed of a replica's noise; the HTTP driver uses the same for its replicas."""
    return int(np.random.SeedSequence([STAGE_STREAM, seed, replica]).generate_state(1, np.uint64)[0])


def drive(config: EngineConfig, arrivals_s: Sequence[float], make: Callable[[int], Request], *, seed: int,
          patience: Patience | None = None, jump: bool = True,
          watch: Callable[[Lane, StepResult], None] | None = None,
          journal: Callable[[Entry], None] | None = None) -> Outcomes:
    """What becomes of arrivals at the given times (sorted); `make(i)` gives the request of arrival i.

    `journal` gets every decision of every replica (engine/journal.py).

    Requests are made when they arrive and dropped when they end, so memory follows what is in flight.
    """
    patience = patience or Patience()
    out = Outcomes.of_size(len(arrivals_s))
    lanes = [Lane(Core(config, lane_seed(seed, r), grouped=jump), out, patience, jump) for r in range(config.replicas)]
    if watch is not None:
        for lane in lanes:
            lane.watch(watch)
    if journal is not None:
        for replica, lane in enumerate(lanes):
            lane.core.journal = Journal(journal, replica)
    router = Router(config, seed)
    if router.blind:
        split: list[list[int]] = [[] for _ in lanes]
        for i in range(len(arrivals_s)):
            r = router.choose(None, ())
            out.replica[i] = r
            split[r].append(i)
        for lane, indices in zip(lanes, split, strict=True):
            for i in indices:
                lane.run_until(arrivals_s[i])
                lane.submit(make(i))
    else:
        cores = [lane.core for lane in lanes]
        for i, at_s in enumerate(arrivals_s):
            for lane in lanes:
                lane.run_until(at_s)
            request = make(i)
            r = router.choose(request, cores)
            out.replica[i] = r
            lanes[r].submit(request)
    for lane in lanes:
        lane.run_until(patience.cut_s)
        lane.cut(patience.cut_s)
    out.counters = [lane.core.counters for lane in lanes]
    return out
