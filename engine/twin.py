"""A virtual-time copy of a running engine under other rules: it sees every arrival, and nobody is served by it.

Input: live arrivals and departures, in order of their time. Output: the copies of the requests, with their times.
Does not: act on anything, or wait: it is brought up to a moment when somebody asks.

1. Same lengths, same arrival times, same router, same noise law as the live engine; its queues start empty.
2. A client that left the live engine leaves the twin at the same moment.
3. The state at any moment is that of a step-by-step run; stretches of steps are skipped up to that moment only.
Cost: about 0.1 ms of CPU per arrival and replica, in the process of the engine.
"""
from __future__ import annotations

import math
from collections.abc import Callable

from engine.journal import Entry, Journal
from engine.request import Request
from engine.router import Router
from engine.scheduler import Core, Reject
from engine.settings import EngineConfig
from engine.virtual import TOTAL_TIMEOUT, Lane, Outcomes, Patience, lane_seed


class TwinLane(Lane):
    """One replica whose future arrivals and departures nobody knows."""

    def __init__(self, core: Core) -> None:
        super().__init__(core, Outcomes(), Patience(), jump=True)
        self._until_s = math.inf

    def submit(self, request: Request) -> None:
        """An arrival at its own time; the lane was brought up to it."""
        answer = self.core.submit(request, request.arrival_s)
        if self._plan is None and request.arrival_s > self.now_s:
            self.now_s = request.arrival_s
        if isinstance(answer, Reject):
            request.done_s = request.arrival_s

    def run_until(self, arrival_s: float) -> None:
        """Do all that happens before a moment, and skip no step beyond it."""
        self._until_s = arrival_s
        super().run_until(arrival_s)

    def leave(self, request_id: str, now_s: float) -> None:
        """The client is gone; nothing when the request has ended here."""
        request = self.core.by_id.get(request_id)
        if request is not None and request.user is None:
            request.user = (TOTAL_TIMEOUT, now_s)
            self._abort(request, now_s)

    def _next_timeout(self) -> float:
        return self._until_s

    def _close_dropped(self) -> None:
        self.core.dropped.clear()

    def _close(self, request: Request, kind: int) -> None:
        """Nothing to write down: whoever gave the request looks at it."""


class Twin:
    """All replicas."""

    def __init__(self, config: EngineConfig, journal: Callable[[Entry], None] | None = None) -> None:
        self.config = config
        self.lanes = [TwinLane(Core(config, lane_seed(config.seed, r), grouped=True)) for r in range(config.replicas)]
        self._cores = [lane.core for lane in self.lanes]
        self._router = Router(config)
        if journal is not None:
            for replica, core in enumerate(self._cores):
                core.journal = Journal(journal, replica)

    def submit(self, live: Request) -> Request:
        """The copy of a live arrival."""
        request = Request(
            live.request_id, live.arrival_s, live.prompt_tokens, live.max_tokens, live.output_tokens,
            tenant=live.tenant, request_class=live.request_class, priority=live.priority,
            prefix_hashes=live.prefix_hashes, predicted_tokens=live.predicted_tokens)
        if not self._router.blind:
            self.advance(request.arrival_s)
        lane = self.lanes[self._router.choose(request, self._cores)]
        lane.run_until(request.arrival_s)
        lane.submit(request)
        return request

    def leave(self, request_id: str, now_s: float) -> None:
        """The client of a live request is gone."""
        for lane in self.lanes:
            if request_id in lane.core.by_id:
                lane.run_until(now_s)
                lane.leave(request_id, now_s)

    def advance(self, now_s: float) -> None:
        """Bring every replica up to a moment."""
        for lane in self.lanes:
            lane.run_until(now_s)

    @property
    def inside(self) -> int:
        """Requests in the twin."""
        return sum(len(core.by_id) for core in self._cores)
