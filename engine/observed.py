"""What each arrival met under one policy or two, as soon as it is certain, in the order of arrival.

Input: live requests, and their copies in a twin. Output: rows (dicts) by cursor.
Does not: judge (control/rollout.py) or serve.

1. A row is written when both sides are certain, and never before the rows of earlier arrivals.
2. Certain before its end is a miss: refused, no first token by its deadline, or more time since the first token than
   max_tokens gaps allow. So a policy under which nothing ends is seen, too.
3. Both sides are measured by the scheduler's own clock: arrival, end of the step with the first and the last token.
"""
from __future__ import annotations

import math
from collections import deque
from typing import Any

from engine.decision_log import page_of
from engine.request import ABORTED, FINISHED, REJECTED, Request

KEPT = 100_000  # rows


def sample(request: Request, now_s: float, horizon_s: float = 0.0) -> dict[str, Any] | None:
    """What the request met, or None while that is open; a late first token is worth knowing up to `horizon_s`."""
    at_s, first_s, limit_s = request.arrival_s, request.first_token_s, _limit(request.ttft_deadline_s)
    gap_s, state = _limit(request.tpot_deadline_s), request.state
    ttft_s = None if first_s is None else first_s - at_s
    met = False
    if state == FINISHED:
        assert ttft_s is not None and request.last_token_s is not None and first_s is not None
        tpot_s = (request.last_token_s - first_s) / (request.generated - 1) if request.generated > 1 else 0.0
        met = ttft_s <= limit_s and tpot_s <= gap_s
    elif state not in (REJECTED, ABORTED):
        hopeless = now_s - at_s > max(limit_s, horizon_s) if ttft_s is None else (
            ttft_s > limit_s or now_s - first_s > gap_s * max(1, request.max_tokens - 1))  # type: ignore[operator]
        if not hopeless:
            return None
    return {"met": met, "ttft_s": ttft_s, "refused": state == REJECTED, "preemptions": request.preemptions}


def _limit(deadline_s: float | None) -> float:
    return math.inf if deadline_s is None else deadline_s


class Book:
    """Open arrivals, and the rows of the certain ones."""

    def __init__(self, horizon_s: float = 0.0) -> None:
        self.horizon_s = horizon_s
        self.total = 0  # rows ever written; also the cursor of the next one
        self._open: deque[tuple[str, Request, Request | None]] = deque()
        self._rows: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def add(self, arm: str, live: Request, twin: Request | None = None) -> None:
        """An arrival: `arm` is the policy that serves it, new or old; `twin` its copy under the other one."""
        self._open.append((arm, live, twin))

    def settle(self, now_s: float) -> None:
        """Write the rows that are certain at `now_s`."""
        while self._open:
            arm, live, twin = self._open[0]
            served = sample(live, now_s, self.horizon_s)
            other = None if twin is None else sample(twin, now_s, self.horizon_s)
            if served is None or (twin is not None and other is None):
                return
            self._open.popleft()
            old = "old" if arm == "new" else "new"
            self._rows.append({"request_id": live.request_id, "tenant": live.tenant, "at_s": live.arrival_s, "arm": arm,
                               arm: served, old: other})
            self.total += 1

    def page(self, after: int, limit: int | None = None) -> tuple[list[dict[str, Any]], int, int]:
        """(rows, cursor to go on with, rows that were asked for and are gone)."""
        return page_of(self._rows, self.total, after, limit)

    @property
    def open(self) -> int:
        """Arrivals that are not certain yet."""
        return len(self._open)
