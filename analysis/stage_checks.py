"""`stages.csv` against the rows of the ledger: rates, windows and counts that contradict each other.

Input: the stage rows, the checked ledger, `run.json`. Output: `LedgerProblem`s that name stage, file and value.
Does not: say which of the two files is right, read a file, or look at latencies.

1. The sender writes both files from one plan, so they differ only when one was changed or damaged afterwards.
2. Each row carries the rate it was due at (`offered_qps`) and its side of the warm-up (`phase`): LED-022, LED-023.
3. A stage has as many rows as it says, numbered from 0 below `planned`: LED-024. Fewer rows than planned are LED-009.
4. Its words are ours, and those of run.json; a stage that was not run has no rows: LED-026.
5. What a stop leaves is no contradiction: rows due after the end of a stopped stage that were never sent, or that
   were sent before the workers heard of the stop.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from analysis.load import UNSENT
from analysis.row_checks import Checked
from bench.records.request import LedgerProblem
from bench.records.stage import LOOPS, MARKS, PROCESSES, StageRow

RATE_SLACK = 1e-5  # relative: the ledger's rates are held as float32
EDGE_SLACK_S = 1e-3  # times are written with nine decimals; edges of a merged run carry the bound of its clocks too
STOP_SLACK_S = 5.0  # a worker out of touch with the master goes on sending for 2.6 s at most
TURN_SLACK_S = 1.0  # a user of the closed loop takes its last turn before the busy loop hears of the stage's end
STOPS = {"interrupted", "limit", "gate_abort", "write_failed"}
# Loads whose rate changes within a stage, or whose rows carry a profile: the stage's rate is a start or a mean.
PROFILES = ("ramp", "spike", "replay")
NAMED = 5  # stages named in a message


def check_stages(rows: list[StageRow], checked: Checked, raw: dict[str, Any]) -> list[LedgerProblem]:
    """Every contradiction between `rows` (of stages.csv) and the ledger; `raw`: run.json, {} when it is missing."""
    rates, edges, counts, words = _Found(), _Found(), _Found(), _Found()
    slack_s, merged = _clock_slack(raw)
    ledger = checked.ledger
    seen: set[tuple[int, int]] = set()
    for row in rows:
        if (row.stage, row.repeat) in seen:
            counts.add(row, 0, "it stands in stages.csv twice")
            continue
        seen.add((row.stage, row.repeat))
        mine = np.flatnonzero((ledger["stage"] == row.stage) & (ledger["repeat"] == row.repeat))
        _counts(counts, row, ledger["arrival"][mine], checked)
        _words(words, row, len(mine), raw)
        if "not_run" in row.marks.split(";"):
            continue
        if row.loop == "open" and raw.get("shape") not in PROFILES:
            _rate(rates, row, ledger["offered_qps"][mine])
        _edges(edges, row, checked, mine, slack_s, merged)
    return [
        *rates.problem("LED-022", "stages.csv and the rows of requests.csv name different rates"),
        *edges.problem("LED-023", "the windows of stages.csv and the phases of requests.csv contradict each other"),
        *counts.problem("LED-024", "stages.csv counts other rows than requests.csv has"),
        *words.problem("LED-026", "words of stages.csv that no run writes, or that run.json or the rows contradict"),
    ]


class _Found:
    """What one check found: how many rows, and a sentence per stage."""

    def __init__(self) -> None:
        self.rows = 0
        self.texts: list[str] = []

    def add(self, row: StageRow, count: int, text: str) -> None:
        self.rows += count
        repeat = f" repeat {row.repeat}" if row.repeat else ""
        self.texts.append(f"stage {row.stage}{repeat}: {text}")

    def problem(self, problem_id: str, message: str) -> list[LedgerProblem]:
        if not self.texts:
            return []
        return [LedgerProblem(problem_id, message, self.rows, self.texts[:NAMED])]


def _clock_slack(raw: dict[str, Any]) -> tuple[float, bool]:
    """(seconds by which a row may lie beyond an edge, whether the run was merged from parts)."""
    workers = [w for w in raw.get("worker_info") or [] if isinstance(w, dict)]
    merged = any("part" in w for w in workers)
    bounds = [w.get("bound_s") for w in workers]
    known = [float(b) for b in bounds if isinstance(b, (int, float)) and not isinstance(b, bool)]
    return EDGE_SLACK_S + (2 * max(known, default=0.0) if merged else 0.0), merged


def _rate(found: _Found, row: StageRow, offered_qps: np.ndarray) -> None:
    known = offered_qps[np.isfinite(offered_qps)].astype(np.float64)
    if not len(known):
        return
    low, high = float(known.min()), float(known.max())
    if high - low > RATE_SLACK * max(high, 1e-9):
        return  # the rate varies within the stage: there is no one rate to compare
    if abs(row.offered_qps - high) > RATE_SLACK * max(high, row.offered_qps):
        text = f"offered_qps is {row.offered_qps:g} in stages.csv and {high:g} in its {len(known)} rows"
        found.add(row, len(known), text)


def _edges(found: _Found, row: StageRow, checked: Checked, mine: np.ndarray, slack_s: float, merged: bool) -> None:
    start, end = row.window_start_s, row.window_end_s
    if not row.start_s - slack_s <= start <= end + slack_s or end > row.end_s + slack_s:
        text = (
            f"start_s {row.start_s:g}, window_start_s {start:g}, window_end_s {end:g} and end_s {row.end_s:g} are not "
            "in order"
        )
        found.add(row, 0, text)
        return
    due = checked.ledger["intended_s"][mine]
    window, warmup = (checked.ledger.is_value("phase", name)[mine] for name in ("window", "warmup"))
    early = window & (due < start - slack_s)
    late = window & (due >= end + slack_s)
    inside = warmup & (due >= start + slack_s)
    after = np.zeros(len(due), dtype=bool)
    if STOPS & set(row.marks.split(";")):
        never = (checked.status[mine] == UNSENT) | (due < row.end_s + STOP_SLACK_S) | merged
        after = (due >= row.end_s - slack_s) & never
    elif row.loop == "closed":
        after = (due >= row.end_s - slack_s) & (due < row.end_s + TURN_SLACK_S)
    late &= ~after
    inside &= ~after
    for rows, what in (
        (early, f"of phase window are due before window_start_s {start:g}"),
        (late, f"of phase window are due after window_end_s {end:g}"),
        (inside, f"of phase warmup are due after window_start_s {start:g}"),
    ):
        if rows.any():
            at = due[rows]
            found.add(row, int(rows.sum()), f"{int(rows.sum())} rows {what} (at {at.min():g} to {at.max():g} s)")


def _words(found: _Found, row: StageRow, have: int, raw: dict[str, Any]) -> None:
    """`loop`, `process` and `marks` against the words there are, run.json and the number of rows."""
    marks = set(row.marks.split(";")) - {""}
    told_words = (("loop", {row.loop}, LOOPS), ("process", {row.process}, PROCESSES), ("marks", marks, MARKS))
    for name, told, known in told_words:
        if strange := sorted(told - set(known)):
            found.add(row, have, f"{name} is {', '.join(strange)[:60]}; it can be {', '.join(known)}")
    if "not_run" in marks and have:
        found.add(row, have, f"it is marked not_run and has {have} rows")
    if row.loop not in LOOPS or row.process not in PROCESSES:
        return
    loop, process = raw.get("loop"), _process(row, marks, raw)
    if loop == "closed" and marks & {"recovered", "master_lost"}:
        return  # such a stage is written anew from the plan
    if loop in LOOPS and row.loop != loop:
        found.add(row, have, f"loop is {row.loop} in stages.csv and {loop} in run.json")
    elif process in PROCESSES and row.process != process:
        found.add(row, have, f"process is {row.process} in stages.csv; run.json says {process}")


def _process(row: StageRow, marks: set[str], raw: dict[str, Any]) -> Any:
    """The law of the gaps that a stage of this run has; None when run.json does not tell."""
    if "not_run" in marks or raw.get("shape") == "rerun":  # named by the plan alone; taken from an older run's rows
        return None
    if row.loop == "closed":
        return "closed"
    if raw.get("shape") == "replay":
        return "trace"
    config = raw.get("config")
    loadgen = config.get("loadgen") if isinstance(config, dict) else None
    return loadgen.get("arrival_process") if isinstance(loadgen, dict) else None


def _counts(found: _Found, row: StageRow, arrival: np.ndarray, checked: Checked) -> None:
    have = len(arrival)
    doubled = int(np.count_nonzero(checked.doubled[:, 0] == row.stage)) if len(checked.doubled) else 0
    if have > row.planned:
        found.add(row, have - row.planned, f"planned is {row.planned}, requests.csv has {have} rows")
    elif row.loop == "open" and have and (beyond := int(np.count_nonzero(arrival >= row.planned))):
        text = f"planned is {row.planned}, and {beyond} rows have an arrival number of {row.planned} or more"
        found.add(row, beyond, text)
    lost = have < row.planned and row.rows == row.planned  # LED-009 says it
    if row.rows not in (have, have + doubled) and not lost:
        found.add(row, abs(row.rows - have), f"rows is {row.rows}, requests.csv has {have}")
