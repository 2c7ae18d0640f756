"""The rows of planned arrivals of which nobody has told an outcome, and of stages that nobody closed.

Input: the plan's own arrays, who owned an arrival, when that one was last heard. Output: `RequestRow`s, a `StageRow`.
Does not: find out which arrivals or stages these are.

Plan, stage and schedule are those of `bench.workload`; only their fields are used here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bench.records.request import RequestRow
from bench.records.stage import StageRow


def label(groups: Any, index: int) -> str:
    """The name of a tenant or class; empty when the plan has none."""
    return groups[index].name if groups else ""


def prompt_line(plan: Any, schedule: Any, arrival: int) -> int | None:
    """The line of the user's file of prompts that an arrival sends; None when prompts are made."""
    place = getattr(schedule, "place", None)
    return None if place is None else int(plan.lines.line[place[arrival]])


def request_id(run_id: str, stage: int, arrival: int) -> str:
    """The `x-request-id` of one arrival."""
    return f"{run_id}-{stage}-{arrival}"


def lost_row(
    plan: Any, stage: Any, schedule: Any, arrival: int, *, run_id: str, start_s: float, worker: int,
    last_s: Mapping[int, float],
) -> RequestRow:  # fmt: skip
    """The row of an arrival that its worker took along; `last_s`: run time of each worker's last sign of life.

    What was due before that was sent, as far as anyone knows: an `error`, its answer is unknown. The rest is `unsent`.
    """
    intended_s = float(schedule.intended_s[arrival])
    sent = start_s + intended_s < last_s.get(worker, -math.inf)
    return RequestRow(
        stage=stage.index,
        arrival=arrival,
        worker=worker,
        repeat=stage.repeat,
        offered_qps=stage.rate_at(intended_s),
        phase="warmup" if intended_s < stage.warmup_s else "window",
        tenant=label(plan.tenants, int(schedule.tenant[arrival])),
        request_class=label(plan.classes, int(schedule.request_class[arrival])),
        request_id=request_id(run_id, stage.index, arrival),
        status="error" if sent else "unsent",
        code="CL-LOST",
        error_kind="lost" if sent else "unsent",
        intended_s=start_s + intended_s,
        input_tokens=int(schedule.input_tokens[arrival]),
        prompt_line=prompt_line(plan, schedule, arrival),
        max_tokens=int(schedule.max_tokens[arrival]),
        detail=f"sent by worker {worker}, which was lost before it told the outcome" if sent else "",
    )


def lost_rows(
    plan: Any, stage: Any, schedule: Any, arrivals: Iterable[int], *, run_id: str, start_s: float,
    owners: np.ndarray | int, last_s: Mapping[int, float],
) -> list[RequestRow]:  # fmt: skip
    """The rows of these arrivals; `owners`: the worker of each arrival of the stage, or how many stripes it has."""
    return [
        lost_row(
            plan, stage, schedule, i, run_id=run_id, start_s=start_s, last_s=last_s,
            worker=i % owners if isinstance(owners, int) else int(owners[i]),
        )
        for i in arrivals
    ]  # fmt: skip


def unclosed_stage(
    stage: Any, *, start_s: float, planned: int, rows: int, workers: int, schedule_hash: str, marks: Iterable[str],
    drained_s: float | None = None, loop: str = "open",
) -> StageRow:  # fmt: skip
    """The row of a stage that began, and whose master did not come to write it."""
    end_s = start_s + stage.duration_s
    return StageRow(
        stage=stage.index,
        repeat=stage.repeat,
        name=stage.name,
        offered_qps=stage.offered_qps,
        process=stage.process,
        loop=loop,
        seed=stage.seed,
        planned=planned,
        start_s=start_s,
        window_start_s=start_s + stage.warmup_s,
        window_end_s=end_s,
        end_s=end_s,
        drained_s=drained_s,
        workers=workers,
        rows=rows,
        schedule_hash=schedule_hash,
        marks=";".join(marks),
    )


def stage_not_run(stage: Any, *, marks: Iterable[str], loop: str = "open", workers: int = 0) -> StageRow:
    """The row of a stage that never began."""
    return StageRow(
        stage.index, stage.repeat, stage.name, stage.offered_qps, stage.process, loop, stage.seed, 0, 0.0, 0.0, 0.0,
        0.0, None, workers, 0, "", ";".join(marks),
    )  # fmt: skip
