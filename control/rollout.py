"""The rollout of a scheduling policy as a state machine: replay, shadow, gray, full; gates; rollback; journal.

Input: a `Rollout` (stages and gates), events of a journal, blocks of observations. Output: states, verdicts, actions.
Does not: run an engine, write files or wait; bench/commands/rollout.py does, engine/arms.py makes observations.

1. The journal is the state: `replay_events` of the same lines gives the same state, after a crash as well.
2. An action is written as an intent, done, and written as done. Actions can be done twice without harm, so a crash
   between the two is repaired by doing it again.
3. A stage passes when no gate failed by its last request; it fails with the first gate that does. Gates look after
   every block, with intervals that stay valid while one watches (control/sequential.py). The error of all gates of all
   stages together is at most `alpha`.
4. A gate that cannot see the loss it is there for within the requests of its stage is refused before the start.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from control.sequential import MIN_BLOCKS, Interval, MeanSequence, blocks_needed, share_var

STAGES = ("replay", "shadow", "gray", "full")
RUNNING, COMPLETED, ROLLED_BACK = "running", "completed", "rolled_back"
# A queue makes misses come in clusters: the sd of a block is about 1.5 times that of independent requests. Planning
# only; the gates themselves measure the sd.
CLUSTER_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class Metric:
    """What a gate looks at. sign +1: more is better; share: values are 0 or 1."""

    name: str
    sign: int
    share: bool
    title: str


METRICS = {
    m.name: m
    for m in (
        Metric("attainment", 1, True, "share of all arrivals that meet the SLO"),
        Metric("ttft_p95", 1, True, "share of all arrivals whose first token came within limit_ms"),
        Metric("rejections", -1, True, "share of arrivals that were refused"),
        Metric("preemptions", -1, False, "preemptions per arrival"),
        Metric("decision_us", -1, False, "decision time p99 per request, microseconds"),
    )
}
P95_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Gate:
    """One check. Relative gates compare with the policy in force; those with `limit` stand alone.

    attainment, rejections, preemptions: relative; a change for the worse of up to `margin` is accepted, and one of
    `detect` must be seen within a stage. ttft_p95: P95 <= limit (s). decision_us: p99 <= limit, measured once.
    """

    metric: str
    margin: float = 0.02
    detect: float = 0.10
    limit: float | None = None

    @property
    def absolute(self) -> bool:
        """Whether the new policy is judged alone."""
        return self.metric in ("ttft_p95", "decision_us")


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage: how many requests it may use, the share of tenants (gray), requests of each arm in a block."""

    name: str
    requests: int
    share: float = 1.0
    block: int = 25


@dataclass(frozen=True, slots=True)
class Rollout:
    """The plan."""

    name: str
    stages: tuple[StageSpec, ...]
    gates: tuple[Gate, ...]
    alpha: float = 0.05
    attainment_target: float = 0.99

    @property
    def gate_alpha(self) -> float:
        """Error of one gate in one stage: all together make `alpha` (Bonferroni)."""
        return self.alpha / max(1, len(self.stages) * sum(g.metric != "decision_us" for g in self.gates))

    def stage(self, name: str) -> StageSpec:
        """The stage of a name."""
        return next(s for s in self.stages if s.name == name)


# -- before the start ------------------------------------------------------------------------------------------------


def needed_requests(rollout: Rollout, stage: StageSpec, gate: Gate) -> int | None:
    """Requests (both arms) until the gate can see its loss, as planned; None when no number does."""
    # halfway between good and the loss to be seen; a share of 6 % or less has no smaller variance than that of 6 %
    p = max(0.06, min(0.5, (1.0 - (P95_SHARE if gate.absolute else rollout.attainment_target)) + gate.detect / 2))
    spread = (1.0 if gate.metric == "preemptions" else p * (1 - p)) / stage.block
    if not gate.absolute:
        spread *= 2.0  # the variances of both arms add
    effect = gate.detect if gate.absolute else gate.detect - gate.margin
    if effect <= 0:
        return None
    blocks = blocks_needed(CLUSTER_FACTOR * math.sqrt(spread), effect, rollout.gate_alpha)
    if blocks is None:
        return None
    if stage.name != "gray":  # every arrival is seen by both policies
        return blocks * stage.block
    small = min(stage.share, 1.0 - stage.share) if 0 < stage.share < 1 else 1.0
    return math.ceil(blocks * stage.block / small)


def problems(rollout: Rollout) -> list[str]:
    """Why the rollout must not start: gates that can never be judged, in words with the numbers."""
    found = []
    for stage in rollout.stages:
        for gate in rollout.gates:
            if gate.metric == "decision_us":
                continue
            need = needed_requests(rollout, stage, gate)
            if need is None:
                found.append(
                    f"stage {stage.name}: gate {gate.metric} can never be judged: detect {gate.detect:g} must "
                    f"lie above margin {gate.margin:g}"
                )
            elif need > stage.requests:
                found.append(
                    f"stage {stage.name}: gate {gate.metric} can never be judged: a loss of {gate.detect:g} "
                    f"needs about {need} requests to be seen, the stage has {stage.requests}; give it more "
                    "requests, a larger share, or raise detect"
                )
    return found


def bucket(tenant: str, salt: str) -> float:
    """Where a tenant stands in [0, 1): stable over restarts and machines."""
    digest = hashlib.blake2b(f"{salt}\0{tenant}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def gray_tenants(shares: Mapping[str, float], share: float, salt: str) -> list[str]:
    """The tenants that use the new policy: in the order of their hash, until together they make `share` of the load.

    A larger share keeps everybody that a smaller one had. At least one tenant, and never all.
    """
    order = sorted(shares, key=lambda name: bucket(name, salt))
    total, chosen, sum_ = sum(shares.values()), [], 0.0
    for name in order[:-1]:
        if chosen and sum_ + shares[name] / 2 > share * total:
            break
        chosen.append(name)
        sum_ += shares[name]
    return chosen


def gray_replicas(share: float, replicas: int) -> int:
    """How many of 2 or more replicas serve under the new policy in a gray stage: as the load, but each side has one."""
    return min(max(1, round(share * replicas)), replicas - 1)


# -- gates -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as the gates see it."""

    met: bool
    ttft_s: float | None
    refused: bool
    preemptions: int


def value_of(gate: Gate, sample: Sample) -> float:
    """The number that a gate averages."""
    if gate.metric == "attainment":
        return float(sample.met)
    if gate.metric == "ttft_p95":
        return float(sample.ttft_s is not None and sample.ttft_s <= (gate.limit or 0.0))
    if gate.metric == "rejections":
        return float(sample.refused)
    return float(sample.preemptions)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a gate says now: status pending, failed or clear (good enough with certainty)."""

    metric: str
    status: str
    interval: Interval
    bound: float
    requests: int
    text: str


class GateWatch:
    """One gate during one stage."""

    def __init__(self, gate: Gate, alpha: float) -> None:
        self.gate = gate
        self.metric = METRICS[gate.metric]
        self.sequence = MeanSequence(alpha)
        self.requests = 0
        self._good = 0.0
        self._total = 0

    def add(self, new: Sequence[Sample], old: Sequence[Sample]) -> None:
        """One block of both arms (old is empty for an absolute gate); sign so that more is better."""
        gate = self.gate
        values = [value_of(gate, s) for s in new]
        x = sum(values) / len(values)
        self._good += sum(values)
        self._total += len(values)
        if not gate.absolute:
            others = [value_of(gate, s) for s in old]
            x -= sum(others) / len(others)
            self._good += sum(others)
            self._total += len(others)
        self.requests += len(new) + len(old)
        self.sequence.add(self.metric.sign * x)

    def judge(self, block: int) -> Judgement:
        """The verdict after the blocks so far."""
        gate = self.gate
        floor = 0.0
        if self.metric.share and self._total:
            floor = share_var(round(self._good), self._total, block) * (1 if gate.absolute else 2)
        seen = self.sequence.interval(floor)
        bound = P95_SHARE if gate.absolute else -gate.margin
        status = "failed" if seen.high < bound else "clear" if seen.low > bound else "pending"
        return Judgement(gate.metric, status, seen, bound, self.requests, self._text(seen, bound, status))

    def _text(self, seen: Interval, bound: float, status: str) -> str:
        sign = self.metric.sign
        low, high = (seen.low, seen.high) if sign > 0 else (-seen.high, -seen.low)
        span = f"{sign * seen.mean:+z.4f} in {low:+z.4f}..{high:+z.4f}"
        if self.gate.absolute:
            return (
                f"{self.gate.metric}: {seen.mean:z.4f} of the arrivals within {self.gate.limit:g} s, interval "
                f"{seen.low:z.4f}..{seen.high:z.4f}, {'<' if status == 'failed' else 'against'} {bound:g}"
            )
        way = "down" if sign > 0 else "up"
        return f"{self.gate.metric}: new minus old {span}, accepted {way} to {sign * bound:+zg}"


class StageWatch:
    """All gates of one stage, fed block by block."""

    def __init__(self, rollout: Rollout, stage: StageSpec) -> None:
        self.stage = stage
        self.gates = [GateWatch(g, rollout.gate_alpha) for g in rollout.gates if g.metric != "decision_us"]
        self.requests = 0
        self.blocks = 0

    def add(self, new: Sequence[Sample], old: Sequence[Sample]) -> list[Judgement]:
        """The judgements after one more block."""
        self.requests += len(new) + (len(old) if self.stage.name == "gray" else 0)
        self.blocks += 1
        size = min(len(new), len(old))
        found = []
        for watch in self.gates:
            watch.add(new, () if watch.gate.absolute else old)
            found.append(watch.judge(size))
        return found


# -- state -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class State:
    """Where a rollout stands; `pending` is an intent whose action was not written as done."""

    status: str = RUNNING
    stage: str | None = None
    passed: list[str] = field(default_factory=list)
    pending: dict[str, Any] | None = None
    reason: str = ""
    active: dict[str, Any] | None = None


def replay_events(events: Iterable[Mapping[str, Any]]) -> State:
    """The state after the events of a journal. Raises ValueError on an event that cannot follow."""
    state = State()
    for number, event in enumerate(events, 1):
        kind = event.get("event")
        if kind == "started":
            if number != 1:
                raise ValueError(f"line {number}: a second start; one journal holds one rollout")
        elif number == 1:
            raise ValueError(f"line 1: is {kind!r}; a journal begins with 'started'")
        elif kind == "intent":
            state.pending = dict(event["action"])
        elif kind == "done":
            if state.pending is None:
                raise ValueError(f"line {number}: an action is done that was never meant")
            _apply(state, state.pending)
            state.pending = None
        elif kind == "passed":
            state.passed.append(event["stage"])
        elif kind not in ("judged", "note", "resumed"):
            raise ValueError(f"line {number}: unknown event {kind!r}")
    return state


def _apply(state: State, action: Mapping[str, Any]) -> None:
    state.active = dict(action["active"])
    if action["do"] == "enter":
        state.stage = action["stage"]
    elif action["do"] == "complete":
        state.status = COMPLETED
    else:
        state.status, state.reason = ROLLED_BACK, action.get("reason", "")


def next_stage(rollout: Rollout, state: State) -> StageSpec | None:
    """The first stage that has not passed; None when all have."""
    return next((s for s in rollout.stages if s.name not in state.passed), None)


def enter(rollout: Rollout, stage: StageSpec, tenants: Sequence[str]) -> dict[str, Any]:
    """The action that puts a stage in force: who uses which policy. Replay and shadow act on nobody."""
    share = {"replay": 0.0, "shadow": 0.0, "gray": stage.share, "full": 1.0}[stage.name]
    return {
        "do": "enter",
        "stage": stage.name,
        "active": {
            "rollout": rollout.name,
            "stage": stage.name,
            "new_policy_share": share,
            "new_policy_tenants": list(tenants) if stage.name == "gray" else ["*"] if stage.name == "full" else [],
        },
    }


def complete(rollout: Rollout) -> dict[str, Any]:
    """The action of a rollout that passed everything."""
    return {
        "do": "complete",
        "active": {"rollout": rollout.name, "stage": "complete", "new_policy_share": 1.0, "new_policy_tenants": ["*"]},
    }


def roll_back(rollout: Rollout, reason: str) -> dict[str, Any]:
    """The action that gives everybody the old policy again."""
    return {
        "do": "roll_back",
        "reason": reason,
        "active": {"rollout": rollout.name, "stage": "rolled_back", "new_policy_share": 0.0, "new_policy_tenants": []},
    }


__all__ = [
    "COMPLETED",
    "METRICS",
    "MIN_BLOCKS",
    "ROLLED_BACK",
    "RUNNING",
    "STAGES",
    "Gate",
    "GateWatch",
    "Judgement",
    "Rollout",
    "Sample",
    "StageSpec",
    "StageWatch",
    "State",
    "complete",
    "enter",
    "gray_replicas",
    "gray_tenants",
    "needed_requests",
    "next_stage",
    "problems",
    "replay_events",
    "roll_back",
    "value_of",
]
