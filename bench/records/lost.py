"""The row of a planned arrival of which nobody has told an outcome.

Input: the plan's own arrays, who owned the arrival, when that one was last heard. Output: a `RequestRow`.
Does not: find out which arrivals these are.

Plan, stage and schedule are those of `bench.workload`; only their fields are used here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bench.records.request import RequestRow


def label(groups: Any, index: int) -> str:
    """The name of a tenant or class; empty when the plan has none."""
    return groups[index].name if groups else ""


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
        max_tokens=int(schedule.max_tokens[arrival]),
        detail=f"sent by worker {worker}, which was lost before it told the outcome" if sent else "",
    )
