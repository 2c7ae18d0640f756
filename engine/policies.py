"""Order of the waiting queue and choice of the preemption victim.

Input: Views (engine/request.py): everything a real scheduler knows, never the true output length.
Output: which request is next, and which running one gives way.
Does not: admit, allocate or emit; the core does.

1. `peek` names the request that `pop` would give at the same moment; both depend on (queue, now) only.
2. Ties go to the earlier arrival, then to the earlier submission: no order depends on a hash seed.
3. `stable_until(now)` is a moment before which the head cannot change by the passing of time alone.
4. A preempted request goes back ahead of the requests it would have preceded by its key.
Sources: Orca OSDI'22 and vLLM (fcfs, priority); EDF; FastServe NSDI'26 (mlfq); VTC OSDI'24 (fair). slack_aware is
least laxity with a rule for requests that can no longer make it, as in docs/engine.md.
"""
from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from control.preemption import Candidate, VictimRule, choose_victim
from engine.request import View
from engine.settings import EngineConfig


class FifoPolicy:
    """First come, first served; the victim is the last that started."""

    name = "fcfs"
    ordered = False  # True: a new arrival may become the head
    preemptive = False

    def __init__(self) -> None:
        self._queue: deque[View] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[View]:
        return iter(self._queue)

    def push(self, view: View, now_s: float) -> None:
        """Enter a new request."""
        self._queue.append(view)

    def push_back(self, view: View, now_s: float) -> None:
        """Enter a preempted request again: it goes first."""
        self._queue.appendleft(view)

    def peek(self, now_s: float) -> View | None:
        """The next request, or None."""
        return self._queue[0] if self._queue else None

    def pop(self, now_s: float) -> View:
        """Take the next request out."""
        return self._queue.popleft()

    def remove(self, view: View) -> None:
        """Take a request out wherever it stands."""
        self._queue.remove(view)

    def withdraw(self, view: View) -> None:
        """Take out a preempted request that will enter again: nothing of it may stay behind."""
        self.remove(view)

    def stable_until(self, now_s: float) -> float:
        """A moment before which the head stays the same if nothing is entered."""
        return math.inf

    def victim(self, running: Sequence[View], now_s: float) -> int:
        """Index in `running` of the sequence that gives way."""
        return len(running) - 1

    def served(self, view: View, prompt_tokens: int, output_tokens: int) -> None:
        """Told when tokens were computed for a request."""

    def take_hopeless(self) -> list[View]:
        """Requests that the policy gave up; they have left the queue."""
        return []


class KeyPolicy(FifoPolicy):
    """Smallest key first; the victim has the largest key. Keys do not change while waiting."""

    ordered = True

    def __init__(self, name: str, key: Callable[[View], float]) -> None:
        self.name = name
        self._key = key
        self._heap: list[tuple[float, float, int, View]] = []
        self._gone: set[str] = set()
        self._entered = 0

    def __len__(self) -> int:
        return len(self._heap) - len(self._gone)

    def __iter__(self) -> Iterator[View]:
        return (item[3] for item in sorted(self._heap, key=lambda i: i[:3]) if item[3].request_id not in self._gone)

    def push(self, view: View, now_s: float) -> None:
        self._entered += 1
        heapq.heappush(self._heap, (self._key(view), view.arrival_s, self._entered, view))

    def push_back(self, view: View, now_s: float) -> None:
        self._entered += 1
        heapq.heappush(self._heap, (self._key(view), view.arrival_s, -self._entered, view))

    def peek(self, now_s: float) -> View | None:
        heap = self._heap
        while heap and self._gone and heap[0][3].request_id in self._gone:
            self._gone.discard(heapq.heappop(heap)[3].request_id)
        return heap[0][3] if heap else None

    def pop(self, now_s: float) -> View:
        self.peek(now_s)
        return heapq.heappop(self._heap)[3]

    def remove(self, view: View) -> None:
        self._gone.add(view.request_id)
        if len(self._gone) * 2 > len(self._heap):
            self._heap = [item for item in self._heap if item[3].request_id not in self._gone]
            heapq.heapify(self._heap)
            self._gone.clear()

    def withdraw(self, view: View) -> None:
        self._heap = [item for item in self._heap if item[3] is not view]
        heapq.heapify(self._heap)

    def victim(self, running: Sequence[View], now_s: float) -> int:
        keys = [(self._key(view), view.arrival_s, i) for i, view in enumerate(running)]
        return max(keys)[2]


class SlackPolicy(KeyPolicy):
    """Least laxity first; a request whose first token can no longer be in time goes to the back, or is shed.

    Laxity = deadline - now - own prefill time. `now` is common to all, so the order is by the latest moment at
    which prefill must start. A request that already gave its first token has no TTFT to lose and goes first.
    """

    def __init__(self, prefill_tps: float, hopeless: str, rule: VictimRule) -> None:
        super().__init__("slack_aware", self._latest_start)
        self._prefill_tps = prefill_tps
        self._hopeless = hopeless
        self._rule = rule
        self._late: deque[View] = deque()
        self._shed: list[View] = []

    def _latest_start(self, view: View) -> float:
        if view.first_token_s is not None:
            return -math.inf
        return view.arrival_s + view.ttft_deadline_s - view.prompt_tokens / self._prefill_tps

    def __len__(self) -> int:
        return len(self._heap) - len(self._gone) + len(self._late)

    def __iter__(self) -> Iterator[View]:
        yield from super().__iter__()
        yield from self._late

    def push(self, view: View, now_s: float) -> None:
        self.peek(now_s)  # who is late by now goes back before a new one that is late at once, however steps fall
        super().push(view, now_s)

    def peek(self, now_s: float) -> View | None:
        head = super().peek(now_s)
        if self._hopeless != "keep":
            while head is not None and -math.inf < self._heap[0][0] < now_s:
                heapq.heappop(self._heap)
                if self._hopeless == "shed":
                    self._shed.append(head)
                else:
                    self._late.append(head)
                head = super().peek(now_s)
        if head is None and self._late:
            return self._late[0]
        return head

    def pop(self, now_s: float) -> View:
        view = self.peek(now_s)
        if self._late and view is self._late[0]:
            return self._late.popleft()
        return heapq.heappop(self._heap)[3]

    def remove(self, view: View) -> None:
        try:
            self._late.remove(view)
        except ValueError:
            super().remove(view)

    def withdraw(self, view: View) -> None:
        if view in self._late:
            self._late.remove(view)
        else:
            super().withdraw(view)

    def stable_until(self, now_s: float) -> float:
        if self._hopeless == "keep" or not self._heap:
            return math.inf
        first = self._heap[0][0]
        return first if first > -math.inf else math.inf

    def take_hopeless(self) -> list[View]:
        shed, self._shed = self._shed, []
        return shed

    def victim(self, running: Sequence[View], now_s: float) -> int:
        return choose_victim([
            Candidate(v.prompt_tokens + v.generated, v.generated, v.max_tokens, v.blocks, v.preemptions, v.arrival_s,
                      _slack_s(v, now_s))
            for v in running
        ], now_s, self._rule)


def _slack_s(view: View, now_s: float) -> float:
    """Seconds until the request's next deadline; large when it has none."""
    if view.first_token_s is None:
        return view.arrival_s + view.ttft_deadline_s - now_s
    return view.first_token_s + view.generated * view.tpot_deadline_s - now_s


class MlfqPolicy(FifoPolicy):
    """Skip-join multi-level feedback: join by prompt length, sink by generated tokens, rise after starving.

    Level i has a quantum of 64 x 2^i generated tokens. A running sequence that used its quantum sinks one level, and
    gives its place to a waiting one of a better level, at most once per level: preemptions are bounded by LEVELS.
    """

    name = "mlfq"
    ordered = True
    preemptive = True
    LEVELS = 5
    QUANTUM = 64
    STARVE_S = 10.0

    def __init__(self) -> None:
        self._levels: list[deque[tuple[float, View]]] = [deque() for _ in range(self.LEVELS)]

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    def __iter__(self) -> Iterator[View]:
        return (view for level in self._levels for _, view in level)

    def push(self, view: View, now_s: float) -> None:
        # A prompt costs like prompt/32 decode steps; a long one joins the level whose quantum covers that.
        level = 0
        while level < self.LEVELS - 1 and view.prompt_tokens / 32 > self.quantum(level):
            level += 1
        view.level = level
        self._levels[level].append((now_s, view))

    def push_back(self, view: View, now_s: float) -> None:
        self._levels[view.level].appendleft((now_s, view))

    def quantum(self, level: int) -> int:
        """Generated tokens that a request may have in a level."""
        return self.QUANTUM << level

    def _head(self, now_s: float) -> deque[tuple[float, View]] | None:
        for level in self._levels[1:]:
            if level and now_s - level[0][0] > self.STARVE_S:
                return level
        return next((level for level in self._levels if level), None)

    def peek(self, now_s: float) -> View | None:
        level = self._head(now_s)
        return level[0][1] if level else None

    def pop(self, now_s: float) -> View:
        level = self._head(now_s)
        assert level is not None
        return level.popleft()[1]

    def remove(self, view: View) -> None:
        for level in self._levels:
            for item in level:
                if item[1] is view:
                    level.remove(item)
                    return
        raise ValueError(view.request_id)

    def stable_until(self, now_s: float) -> float:
        moments = [level[0][0] + self.STARVE_S for level in self._levels[1:] if level]
        return min((m for m in moments if m >= now_s), default=math.inf)

    def victim(self, running: Sequence[View], now_s: float) -> int:
        return max((view.level, view.arrival_s, i) for i, view in enumerate(running))[2]

    def sink(self, view: View) -> bool:
        """Lower a running request that used its quantum; True when it may be asked to give way."""
        if view.generated - view.level_start < self.quantum(view.level) or view.level == self.LEVELS - 1:
            return False
        view.level += 1
        view.level_start = view.generated
        return True


class FairPolicy(FifoPolicy):
    """Virtual token counters: the tenant that was served least, per weight, goes first; FCFS within a tenant.

    Service = prompt tokens + 2 x output tokens, divided by the tenant's weight (VTC's weights). A tenant that comes
    back after being idle starts from the least counter of the busy ones, so it cannot save up.
    """

    name = "fair"
    ordered = True
    OUTPUT_WEIGHT = 2.0

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights
        self._queues: dict[str, deque[View]] = {}
        self._served: dict[str, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[View]:
        return (view for name in sorted(self._queues) for view in self._queues[name])

    def push(self, view: View, now_s: float) -> None:
        queue = self._queues.setdefault(view.tenant, deque())
        if not queue:
            busy = [self._served[name] for name, other in self._queues.items() if other]
            self._served[view.tenant] = max(self._served.get(view.tenant, 0.0), min(busy, default=0.0))
        queue.append(view)

    def push_back(self, view: View, now_s: float) -> None:
        self._queues.setdefault(view.tenant, deque()).appendleft(view)

    def _tenant(self) -> str | None:
        waiting = [(self._served.get(name, 0.0), name) for name, queue in self._queues.items() if queue]
        return min(waiting)[1] if waiting else None

    def peek(self, now_s: float) -> View | None:
        name = self._tenant()
        return None if name is None else self._queues[name][0]

    def pop(self, now_s: float) -> View:
        name = self._tenant()
        assert name is not None
        return self._queues[name].popleft()

    def remove(self, view: View) -> None:
        self._queues[view.tenant].remove(view)

    def stable_until(self, now_s: float) -> float:
        return now_s  # every emitted token moves a counter

    def served(self, view: View, prompt_tokens: int, output_tokens: int) -> None:
        amount = prompt_tokens + self.OUTPUT_WEIGHT * output_tokens
        weight = self._weights.get(view.tenant, 1.0)
        self._served[view.tenant] = self._served.get(view.tenant, 0.0) + amount / weight


def make_policy(config: EngineConfig) -> FifoPolicy:
    """The waiting queue of the configured policy."""
    name = config.policy
    if name == "priority":
        return KeyPolicy(name, lambda view: float(view.priority))
    if name == "sjf":
        return KeyPolicy(name, lambda view: float(view.predicted_tokens - view.generated))
    if name == "edf":
        return KeyPolicy(name, lambda view: view.arrival_s + view.ttft_deadline_s)
    if name == "slack_aware":
        profile = config.profile
        rule = VictimRule(
            prefill_s=1.0 / profile.prefill_tps * config.time_scale, attention_s=profile.attention_s,
            kv_bytes_per_token=profile.kv_bytes_per_token, link_bytes_per_s=profile.pcie_gb_s * 1e9,
            transfer_fixed_s=profile.transfer_fixed_s, swap_allowed=config.preemption_mode != "recompute",
            age_tau_s=min(config.default_class.ttft_deadline_s, 60.0),
        )
        return SlackPolicy(profile.prefill_tps / config.time_scale, config.hopeless, rule)
    if name == "mlfq":
        return MlfqPolicy()
    if name == "fair":
        return FairPolicy({tenant: spec.weight for tenant, spec in config.tenants.items()})
    return FifoPolicy()
