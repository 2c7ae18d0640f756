"""The `abort` gates of a config in virtual time: looked at when a stage has ended, as in a measured run.

Input: the simulated stages and their rows. Output: the gate that ends the sweep, in words, and its mark on the stage.
Does not: compare (`bench/workload/stage_count.py` does, for both kinds of run) or write.
"""

from __future__ import annotations

from typing import Any

from bench.workload.stage_count import GateCount, Slo, Stage, applies, seen, stage_settings

MARK = "gate_abort"


class Gates:
    """The gates of one plan; without any, nothing is counted."""

    def __init__(self, plan: Any, config: Any) -> None:
        self._plan = plan
        settings = stage_settings(config)
        self._slo, self._target_qps, self._gates = Slo(**settings["slo"]), settings["target_qps"], settings["gates"]

    def begin(self, result: Any) -> Stage | None:
        """The counts of a stage; None where no gate speaks about it."""
        chosen = [GateCount(g) for g in self._gates if applies(g, result.stage, self._plan, self._target_qps)]
        if not chosen:
            return None
        count = Stage(result.stage, self._slo, chosen, loop="open")
        count.plan_arrivals(result.schedule.intended_s.tolist())
        count.begin(result.start_s)
        return count

    def add(self, count: Stage | None, rows: list[Any]) -> None:
        """Count rows of the stage."""
        if count is not None:
            for row in seen(rows):
                count.add(row)

    def missed(self, count: Stage | None, row: Any) -> str:
        """The first gate that the whole stage misses, as a sentence; then its row is marked. Empty when none is."""
        found = count.end(row.drained_s or row.end_s, filter(None, row.marks.split(";"))) if count is not None else []
        if not found:
            return ""
        row.marks = ";".join(sorted({*filter(None, row.marks.split(";")), MARK}))
        return found[0]
