"""The load of an old run, to be simulated again: its stages, and each planned arrival with its lengths.

Input: the rows of `stages.csv` and `requests.csv` of a run folder, as dicts of text; the plan behind them, when known.
Output: `Rerun`: a plan, a schedule per stage with the starts that prompts share, the output length where it was seen.
Does not: open files, or invent arrivals: a row that was never sent was still planned, and is simulated.

1. A row has no prompt. Which prompts begin alike comes from a schedule that is built again (`origin`), and only where
   its hash is the one that the stage was sent with.

An answer that ended well has the length it had; for the others max_tokens stands in (noted in `guessed`).
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from bench.workload.plan import Group, Plan, Stage
from bench.workload.prefix import SharedStarts
from bench.workload.schedule import Schedule, build_schedule


@dataclass(slots=True)
class Load:
    """One stage of the old run."""

    stage: Stage
    schedule: Schedule
    output_tokens: list[int]
    guessed: int  # arrivals whose output length was not seen


@dataclass(slots=True)
class Rerun:
    """The whole old run."""

    plan: Plan
    loads: list[Load]
    named: bool = False  # the old run replayed a trace with block ids, or sent a user's own prompts


@dataclass(frozen=True, eq=False)
class RowStarts(SharedStarts):
    """Shared starts by row: row i is arrival `arrivals[i]` of a schedule of `drawn`; a closed loop may go round."""

    arrivals: np.ndarray
    drawn: int

    def names(self, arrival: int, again: int = 0) -> np.ndarray:
        """(blocks,) uint64 of one row."""
        turn, place = divmod(int(self.arrivals[arrival]), self.drawn)
        return super().names(place, again + turn)


def rerun(
    plan: Plan, stage_rows: Iterable[dict[str, str]], request_rows: Iterable[dict[str, str]], *,
    origin: Plan | None = None, computed_only: bool = False,
) -> Rerun:
    """The old run's load; `plan` gives what the files do not say (laws, drain limit), `origin` what was sent.

    `computed_only`: prompts are as long as what the service computed of them (`cached_tokens` left out): the prefill
    work of that run for an engine without a cache, whose context then lacks the cached part.

    Raises ValueError (where, what, what to do) when columns are missing or a cell is no number.
    """
    stages: dict[int, tuple[Stage, float]] = {}
    sent: dict[int, Schedule] = {}
    lines = origin.lines if origin is not None else None
    named = lines is not None or (
        origin is not None and origin.trace is not None and origin.trace.prefixes is not None
    )
    try:
        for row in stage_rows:
            stage = _stage(row, plan)
            stages[stage.index] = (stage, float(row["start_s"]))
            again = _sent(origin, stage, row) if origin is not None and named else None
            if again is not None:
                sent[stage.index] = again
        by_stage: dict[int, list[dict[str, str]]] = {index: [] for index in stages}
        for row in request_rows:
            by_stage[int(row["stage"])].append(row)
        labels = {"tenant": sorted({r["tenant"] for rows in by_stage.values() for r in rows}),
                  "request_class": sorted({r["request_class"] for rows in by_stage.values() for r in rows})}
        loads = [_load(stage, start_s, by_stage[index], labels, sent.get(index), computed_only)
                 for index, (stage, start_s) in sorted(stages.items())]
    except KeyError as problem:
        raise ValueError(f"the old run lacks {problem.args[0]!r} (a column of stages.csv or requests.csv, or a stage "
                         "that rows name); give a folder written by this program") from None
    groups = {kind: () if names in ([], [""]) else tuple(Group(name, 1.0 / len(names)) for name in names)
             for kind, names in labels.items()}
    plan = replace(plan, stages=tuple(load.stage for load in loads), tenants=groups["tenant"],
                   classes=groups["request_class"], trace=None, lines=lines)
    return Rerun(plan, loads, named)


def _sent(origin: Plan, stage: Stage, row: dict[str, str]) -> Schedule | None:
    """The schedule that the stage was sent with; None when it cannot be built again.

    The stage of the plan first (ramps, profiles), then the stage that the row tells (another rate or length than the
    config's, or one that a search added).
    """
    told = replace(
        stage, duration_s=round(stage.duration_s, 6), warmup_s=round(stage.warmup_s, 6),
        burstiness=origin.stages[0].burstiness if origin.stages else 1.0,
    )
    for candidate in [one for one in origin.stages if one.index == stage.index] + [told]:
        try:
            schedule = build_schedule(origin, candidate)
        except ValueError:  # a process that draws nothing by itself, as of a closed loop
            continue
        if schedule.hash == row.get("schedule_hash"):
            return schedule
    return None


def _stage(row: dict[str, str], plan: Plan) -> Stage:
    start_s = float(row["start_s"])
    limit_s = plan.stages[0].drain_limit_s if plan.stages else 60.0
    return Stage(
        index=int(row["stage"]), repeat=int(row["repeat"]), name=row["name"], offered_qps=float(row["offered_qps"]),
        ramp_to_qps=None, process=row["process"], burstiness=1.0, duration_s=float(row["window_end_s"]) - start_s,
        warmup_s=float(row["window_start_s"]) - start_s, drain_limit_s=limit_s, seed=int(row["seed"]),
    )


def _load(stage: Stage, start_s: float, rows: list[dict[str, str]], labels: dict[str, list[str]],
          sent: Schedule | None, computed_only: bool) -> Load:
    rows = sorted(rows, key=lambda r: (float(r["intended_s"]), int(r["arrival"])))
    limits, outputs, guessed = [], [], 0
    for row in rows:
        seen = int(float(row["output_tokens"])) if row["status"] == "ok" and row["output_tokens"] else 0
        limit = int(float(row["max_tokens"])) if row["max_tokens"] else max(seen, 1)
        limits.append(limit)
        outputs.append(seen or limit)
        guessed += not seen
    inputs = [int(float(r["prompt_tokens"] or r["input_tokens"] or 1)) for r in rows]
    if computed_only:  # the last token of a prompt is always computed
        inputs = [max(1, n - int(float(r.get("cached_tokens") or 0))) for n, r in zip(inputs, rows, strict=True)]
    whole = np.int64
    seeds, shared, place = np.arange(len(rows), dtype=np.uint64), None, None
    arrivals = np.array([int(r["arrival"]) for r in rows], dtype=whole)
    if sent is not None and sent.place is not None and len(sent):
        place = sent.place[arrivals % len(sent)]
    elif sent is not None and sent.shared is not None and len(sent):
        seeds = sent.prompt_seed[arrivals % len(sent)]
        shared = RowStarts(sent.shared.prefixes, sent.shared.seed, arrivals, len(sent))
    schedule = Schedule(
        np.array([float(r["intended_s"]) - start_s for r in rows]), np.array(inputs, dtype=whole),
        np.array(limits, dtype=whole), seeds,
        np.array([labels["tenant"].index(r["tenant"]) for r in rows], dtype=whole),
        np.array([labels["request_class"].index(r["request_class"]) for r in rows], dtype=whole), "", shared, place,
    )
    return Load(stage, schedule, outputs, guessed)
