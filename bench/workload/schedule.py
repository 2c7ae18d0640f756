"""The schedule of one stage: every arrival with its time, lengths, prompt, tenant and class.

Input: a plan and one of its stages.
Output: `Schedule`, arrays of one length; a hash over all of them.
Does not: know workers. Arrival i belongs to worker i modulo W, so `stripe(w, W)` is a plain slice.

1. A pure function of (plan, stage): every worker computes the whole stage and sends its stripe.
2. Each purpose has a random stream of its own (Philox, keyed by stage seed and purpose): another law of
   lengths does not move one arrival.
3. The hash is over fixed little-endian bytes, times as whole microseconds: equal on every machine. It covers which
   prompts begin alike, when a trace says so, and the SHA-256 of a file of prompts.
   It depends on numpy's samplers; `requirements.txt` pins numpy, a test holds golden hashes.
4. Prompts of a file are drawn without replacement, by one permutation of its lines per stage. When they are used up,
   the same permutation begins again: so two arrivals with one line lie as far apart as the file allows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from bench.workload import arrivals
from bench.workload.labels import Labels
from bench.workload.plan import Group, Plan, Stage
from bench.workload.prefix import SharedStarts
from bench.workload.prompt_file import PromptFile

# Purpose -> spawn key. Never renumber: it would change every schedule.
STREAMS = {"arrivals": 1, "input": 2, "output": 3, "prompts": 4, "tenants": 5, "classes": 6, "lines": 7}


def stream(stage: Stage, purpose: str) -> np.random.Generator:
    """The random generator of one purpose in one stage."""
    seed = np.random.SeedSequence(stage.seed, spawn_key=(STREAMS[purpose],))
    return np.random.Generator(np.random.Philox(seed))


@dataclass(frozen=True, eq=False)
class Schedule:
    """(n,) arrays, sorted by time; index = arrival number."""

    intended_s: np.ndarray  # float64 seconds from the stage's start, whole microseconds
    input_tokens: np.ndarray  # int64
    max_tokens: np.ndarray  # int64
    prompt_seed: np.ndarray  # uint64
    tenant: np.ndarray  # int64, index into plan.tenants (0 when there are none)
    request_class: np.ndarray  # int64, index into plan.classes (0 when there are none)
    hash: str
    shared: SharedStarts | None = None  # None: no two prompts begin alike by intent
    place: np.ndarray | None = None  # int64, of the arrival's prompt in plan.lines; None: prompts are made

    def __len__(self) -> int:
        return len(self.intended_s)

    def stripe(self, worker: int, workers: int) -> np.ndarray:
        """Arrival numbers that belong to one of `workers` workers."""
        return np.arange(worker, len(self), workers)


def build_schedule(plan: Plan, stage: Stage) -> Schedule:
    """All arrivals of a stage."""
    levels = stage.levels()
    limit = arrivals.integrated_rate(levels, stage.duration_s)
    points, rows = _points(plan, stage, limit)
    micros = arrivals.to_micros(arrivals.invert_rate(levels, points), stage.duration_s)
    n = len(micros)
    if plan.trace is not None:
        input_tokens, max_tokens = plan.trace.input_tokens[rows[:n]], plan.trace.output_tokens[rows[:n]]
    else:
        input_tokens = plan.lengths.input.draw(stream(stage, "input"), n)
        max_tokens = plan.lengths.output.draw(stream(stage, "output"), n)
    place = None
    if plan.lines is not None:
        place = _places(plan.lines, stage, n)
        input_tokens, given = plan.lines.input_tokens[place], plan.lines.max_tokens[place]
        max_tokens = np.where(given > 0, given, max_tokens)
    prompt_seed = stream(stage, "prompts").integers(0, 2**64, size=n, dtype=np.uint64)
    tenant, request_class = _labels(plan, stage, rows, place, n)
    shared = None
    if plan.trace is not None and plan.trace.prefixes is not None and plan.lines is None:
        shared = SharedStarts(plan.trace.prefixes, stage.seed)
    digest = hashlib.sha256()
    for column in (micros, input_tokens, max_tokens, tenant, request_class):
        digest.update(column.astype("<i8").tobytes())
    digest.update(prompt_seed.astype("<u8").tobytes())
    if shared is not None:
        digest.update(shared.digest_bytes(n))
    if place is not None and plan.lines is not None:
        digest.update(bytes.fromhex(plan.lines.sha256) + place.astype("<i8").tobytes())
    return Schedule(
        micros / arrivals.MICRO,
        input_tokens,
        max_tokens,
        prompt_seed,
        tenant,
        request_class,
        digest.hexdigest(),
        shared,
        place,
    )


def _places(lines: PromptFile, stage: Stage, n: int) -> np.ndarray:
    """Place of the prompt of each arrival."""
    count = len(lines)
    order = stream(stage, "lines").permutation(count) if lines.order == "shuffled" else np.arange(count)
    return order[np.arange(n) % count].astype(np.int64)


def _labels(
    plan: Plan, stage: Stage, rows: np.ndarray, place: np.ndarray | None, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """(tenant, class) of each arrival: what its prompt's line names, else the trace's row, else drawn by share."""
    out = []
    for groups, what in ((plan.tenants, "tenants"), (plan.classes, "classes")):
        labels, at = plan.trace and getattr(plan.trace, what), rows
        if plan.lines is not None and getattr(plan.lines, what):
            labels, at = getattr(plan.lines, what), place
        out.append(_groups(groups, labels, at, stream(stage, what), n))
    return out[0], out[1]


def _points(plan: Plan, stage: Stage, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Unit-rate points of the stage's process, and the trace row of each (empty without a trace)."""
    none = np.empty(0, dtype=np.int64)
    if stage.process == "constant":
        return arrivals.constant_points(limit), none
    if stage.process == "poisson":
        return arrivals.poisson_points(stream(stage, "arrivals"), limit), none
    if stage.process == "gamma":
        return arrivals.gamma_points(stream(stage, "arrivals"), limit, stage.burstiness), none
    if stage.process == "trace" and plan.trace is not None:
        return arrivals.trace_points(plan.trace.time_us / arrivals.MICRO, plan.trace.span_us / arrivals.MICRO, limit)
    raise ValueError(f"stage {stage.index}: process is {stage.process!r}; known: {', '.join(arrivals.PROCESSES)}")


def _groups(
    groups: tuple[Group, ...], labels: Labels | None, rows: np.ndarray, rng: np.random.Generator, n: int
) -> np.ndarray:
    """Index of a group for each arrival: the one that the trace's row names, else drawn by share."""
    if labels:
        return labels.place[rows[:n]]
    if len(groups) < 2:
        return np.zeros(n, dtype=np.int64)
    edges = np.cumsum([group.share for group in groups])
    place = np.searchsorted(edges, rng.random(n) * edges[-1], side="right")
    return np.minimum(place, len(groups) - 1).astype(np.int64)


def plan_hash(plan: Plan) -> str:
    """sha256 over the schedules of all stages, in order."""
    total = hashlib.sha256()
    for stage in plan.stages:
        total.update(build_schedule(plan, stage).hash.encode("ascii"))
    return total.hexdigest()
