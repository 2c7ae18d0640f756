"""Merges what is left of runs into one run folder: a run whose master was lost, or the parts of one plan.

Input: run folders and shards. Output: a new run folder.
Does not: change its sources, or judge the run.

1. Every planned arrival of a stage that began has one row. What nobody kept is CL-LOST.
2. Of two rows for one arrival the one with an outcome stands; a refusal of a worker that was taken for lost gives way.
3. A stage that the master had closed keeps its row in stages.csv; the others are marked `recovered`, and `master_lost`
   when rows are missing.
4. Parts are merged when they are parts of one plan that met for one load. Their times become those of the first
   part's master; the bound of that is added to the bound of each worker's clock.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.commands.recovery_sources import RecoveryError, Source, read_sources, typed_rows
from bench.records.collect import Collector
from bench.records.ledger import PLAN, REQUESTS, RUN, write_run
from bench.records.lost import lost_rows, stage_not_run, unclosed_stage
from bench.records.packing import NANO, NULL, Batch
from bench.records.part import WHOLE, Part
from bench.records.server import SERVER_METRICS, ServerRow
from bench.records.stage import RunInfo, StageRow
from bench.workload.plan import Plan, Stage
from bench.workload.schedule import Schedule, build_schedule, plan_hash

# Columns that hold a moment of the run; the other ones in seconds are lengths of time.
MOMENTS = ("intended_s", "sent_s", "headers_s", "first_token_s", "first_content_s", "last_token_s", "done_s")


@dataclass
class Recovered:
    """What came of it."""

    run_dir: Path
    run_id: str
    shards: int
    parts: list[str] = field(default_factory=list)  # of a merge: `1/2: folder`
    kept: dict[str, int] = field(default_factory=dict)  # stage name -> rows that somebody kept
    lost: dict[str, int] = field(default_factory=dict)  # stage name -> arrivals that are CL-LOST now
    not_run: list[str] = field(default_factory=list)
    torn: int = 0
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people."""
        out = [f"run {self.run_id} from {self.shards} shards"]
        if self.parts:
            out = [f"run {self.run_id} from {len(self.parts)} parts and {self.shards} shards", *self.parts]
        for name, rows in self.kept.items():
            gone = f", {self.lost[name]} lost (CL-LOST)" if self.lost[name] else ""
            out.append(f"stage {name}: {rows} rows{gone}")
        if self.not_run:
            out.append(f"not run: {', '.join(self.not_run)}")
        if self.torn:
            out.append(f"{self.torn} shards end in the middle of a frame; all before that is used")
        return [*out, *self.notes, f"written: {self.run_dir}", f"next: bench analyse {self.run_dir}"]


def recover(paths: list[Path], output: Path) -> Recovered:
    """The run of a lost master at `output`. Raises RecoveryError, OSError when unwritable."""
    _refuse_full(output, "-o")
    sources, left_out = read_sources(paths)
    if not sources:
        raise RecoveryError("; ".join(left_out))
    if len(sources) != 1:
        ids = ", ".join(source.run_id for source in sources)
        raise RecoveryError(
            f"the sources are of {len(sources)} runs ({ids}); give those of one run, or merge the parts of one plan "
            "with --into"
        )
    (source,) = sources
    info = source.info
    info.files = {}  # of the folder that it comes from
    info.problems.append(f"put together by `bench recover` from {len(source.shards)} shards: the master was lost")
    result = _write(sources, source.plan(), info, output, source.part)
    result.notes += left_out
    return result


def merge(paths: list[Path], into: Path) -> Recovered:
    """The parts of one plan as one run at `into`. Raises RecoveryError, OSError when unwritable."""
    _refuse_full(into, "--into")
    sources, left_out = read_sources(paths)
    if not sources:
        raise RecoveryError("; ".join(left_out))
    plan = _fit(sources)
    for source in sources:
        source.moved = True
    result = _write(sources, plan, _merged_info(sources), into, WHOLE)
    result.parts = [f"part {source.part}: {source.place}" for source in sources]
    result.notes += left_out
    return result


def _refuse_full(output: Path, option: str) -> None:
    if (output / REQUESTS).exists():
        raise RecoveryError(f"{output}: holds a run already; give {option} another folder")


# -- whether parts fit ----------------------------------------------------------------------------


def _fit(sources: list[Source]) -> Plan:
    """The plan that all sources are parts of. Raises RecoveryError with the first that is not."""
    for source in sources:
        if not source.info.part:
            raise RecoveryError(
                f"{source.place}: run {source.run_id} is a whole run, not a part of one; --into merges runs that were "
                "started with --part, and a run of another seed or rate stays a run of its own"
            )
    first = sources[0]
    where = f"part {first.part} in {first.place}"
    for source in sources[1:]:
        here = f"part {source.part} in {source.place}"
        if source.part.of != first.part.of:
            raise RecoveryError(f"{here} and {where} are of plans in {source.part.of} and {first.part.of} parts")
        if source.part == first.part or any(source.part == s.part and s is not source for s in sources):
            runs = ", ".join(s.run_id for s in sources if s.part == source.part)
            raise RecoveryError(f"{here}: this part is there twice (runs {runs}); give one run")
        for name, what in (("schedule_hash", "schedule"), ("seed", "seed")):
            mine, theirs = getattr(source.info, name), getattr(first.info, name)
            if mine != theirs:
                raise RecoveryError(
                    f"{here} has {what} {str(mine)[:16]}, {where} has {str(theirs)[:16]}; they are of two plans"
                )
        if source.info.part["load"] != first.info.part["load"]:
            raise RecoveryError(
                f"{here} met for load {source.info.part['load']}, {where} for {first.info.part['load']}; "
                "give the parts of one load"
            )
    have_plan = [source for source in sources if source.has_plan]
    if not have_plan:
        raise RecoveryError(f"{where}: nobody has the plan; give a run folder with {PLAN}, or shards")
    plan = have_plan[0].plan()
    if plan_hash(plan) != first.info.schedule_hash:
        text = "its plan makes another schedule here than in the run; use the version that ran it"
        raise RecoveryError(f"{have_plan[0].place}: {text}")
    return plan


def _merged_info(sources: list[Source]) -> RunInfo:
    """`run.json` of the whole: what the parts say, once."""
    first = sources[0].info
    infos = [source.info for source in sources]
    info = dataclasses.replace(
        first,
        run_id=f"{first.part['load']}-merged",
        started_utc=min(i.started_utc for i in infos),
        workers=sum(i.workers for i in infos),
        interrupted=any(i.interrupted for i in infos),
        stopped_by=next((i.stopped_by for i in infos if i.stopped_by), ""),
        worker_info=[worker for source in sources for worker in _workers(source)],
        problems=[f"part {s.part}: {problem}" for s in sources for problem in s.info.problems],
        part={},
        files={},
    )
    for source in sources:
        if not source.whole:
            info.problems.append(f"part {source.part}: its master was lost; its rows are those that its workers kept")
    for absent in sorted(set(range(first.part["of"])) - {s.part.index for s in sources}):
        name = f"{absent + 1}/{first.part['of']}"
        info.problems.append(f"part {name} is not among the sources: its arrivals count as lost")
    return info


def _workers(source: Source) -> list[dict[str, Any]]:
    """The part's workers, each with the bound of both steps to the first part's clock."""
    stages = [stage for stage in source.starts()] or [0]
    bounds = [source.clock(stage)[1] for stage in stages]
    step_s = None if None in bounds else max(b for b in bounds if b is not None)
    shared = all(each["shared"] for each in source.info.part["stages"].values())
    out = []
    for worker in source.info.worker_info:
        own_s = worker.get("bound_s")
        out.append({
            **worker, "part": str(source.part), "shared": bool(worker.get("shared")) and shared,
            "bound_s": None if own_s is None or step_s is None else own_s + step_s,
        })  # fmt: skip
    return out


# -- writing ----------------------------------------------------------------------------------------


def _write(sources: list[Source], plan: Plan, info: RunInfo, output: Path, part: Part) -> Recovered:
    shards = [shard for source in sources for shard in source.shards]
    result = Recovered(output, info.run_id, len(shards), torn=sum(s.torn_bytes > 0 for s in shards))
    began = {stage for source in sources for stage in source.starts()}
    collector = Collector(output, info)
    if part != WHOLE:
        (output / PLAN).write_text(plan.to_json() + "\n", encoding="utf-8")
    for stage in plan.stages:
        if stage.index in began:
            _recover_stage(sources, plan, stage, collector, part, result)
        else:
            result.not_run.append(stage.name)
            marks = ["not_run", "master_lost"] if any(not s.whole for s in sources) else ["not_run"]
            collector.close_stage(stage_not_run(stage, marks=marks, loop=info.loop))
    for source in sources:
        for rows in source.gauges():
            for row in rows:
                row.t_s += source.clock(row.stage)[0]
            collector.add_gauge(rows)
    _server_rows(sources, collector)
    info.interrupted = info.interrupted or bool(result.not_run)
    info.finished_utc = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result.notes = [problem for problem in info.problems if "is not among the sources" in problem]
    moved = _transport(sources)
    collector.finish()
    if moved:
        info.transport = moved
        write_run(output / RUN, info)
    return result


def _recover_stage(
    sources: list[Source], plan: Plan, stage: Stage, collector: Collector, part: Part, result: Recovered
) -> None:
    schedule = build_schedule(plan, stage)
    record = collector.open_stage(stage.index, len(schedule), part)
    late: list[Batch] = []
    for source in sources:
        shift_s, _ = source.clock(stage.index)
        for batch in source.batches(stage.index):
            batch = _shifted(batch, shift_s)
            gave_up = batch.where("code", "CL-LOST")
            if gave_up.any():
                late.append(batch.take(gave_up))
                batch = batch.take(~gave_up)
            _take_new(collector, stage.index, batch)
    for batch in late:
        _take_new(collector, stage.index, batch)
    kept = record.rows
    missing = collector.missing(stage.index)
    if missing:
        owner, last_s = _owners(sources, stage.index, len(schedule))
        rows = lost_rows(
            plan, stage, schedule, missing, run_id=result.run_id, start_s=_start_s(sources, stage.index), owners=owner,
            last_s=last_s,
        )  # fmt: skip
        collector.add_rows(stage.index, rows)
    result.kept[stage.name], result.lost[stage.name] = kept, len(missing)
    collector.close_stage(_stage_row(sources, stage, schedule, record.rows, len(missing)))


def _shifted(batch: Batch, shift_s: float) -> Batch:
    """The batch with every moment moved; lengths of time stay."""
    if not shift_s:
        return batch
    step = round(shift_s * NANO)
    for name in MOMENTS:
        if name in batch.odd:
            batch.odd[name] = [None if v is None else v + shift_s for v in batch.odd[name]]
        else:
            values = batch.numbers[name]
            batch.numbers[name] = np.where(values == NULL, NULL, values + step)
    return batch


def _take_new(collector: Collector, stage: int, batch: Batch) -> None:
    """Rows of arrivals that have none yet: the master's ledger and the shards overlap."""
    record, arrivals = collector.stages[stage], batch.numbers["arrival"]
    inside = (arrivals >= 0) & (arrivals < record.planned)
    fresh = np.zeros(batch.n, dtype=bool)
    fresh[inside] = ~record.seen[arrivals[inside]]
    first = np.zeros(batch.n, dtype=bool)
    first[np.unique(arrivals, return_index=True)[1]] = True
    collector.take(stage, batch.take(fresh & first), None)


def _owners(sources: list[Source], stage: int, planned: int) -> tuple[np.ndarray, dict[int, float]]:
    """(worker of each arrival, run time of each worker's last gauge sample in the stage)."""
    owner = np.arange(planned)
    last_s: dict[int, float] = {}
    for source in sources:
        stripes, seen_s = source.owners(stage)
        mine = slice(source.part.index, None, source.part.of)
        owner[mine] = np.arange(planned)[mine] % stripes
        shift_s = source.clock(stage)[0]
        last_s |= {worker: at + shift_s for worker, at in seen_s.items()}
    absent = np.ones(planned, dtype=bool)
    for source in sources:
        absent[source.part.index :: source.part.of] = False
    owner[absent] %= sources[0].part.of  # of a part that nobody brought: its first worker
    return owner, last_s


def _start_s(sources: list[Source], stage: int) -> float:
    """Run time of the stage's start: the first source that knows it."""
    return next(starts[stage] + s.clock(stage)[0] for s in sources if stage in (starts := s.starts()))


def _stage_row(sources: list[Source], stage: Stage, schedule: Schedule, rows: int, missing: int) -> StageRow:
    """One row out of those of the parts, or made anew for masters that did not come to write it."""
    if not sources[0].moved and stage.index in sources[0].closed:
        return sources[0].closed[stage.index]
    start_s = _start_s(sources, stage.index)
    closed = [(s.closed[stage.index], s.clock(stage.index)[0]) for s in sources if stage.index in s.closed]
    marks = {mark for row, _ in closed for mark in row.marks.split(";") if mark}
    open_ = [s for s in sources if stage.index not in s.closed]
    if open_:
        marks |= {"recovered", *(["master_lost"] if missing else [])}
    if sources[0].moved and (open_ or len(sources) < sources[0].part.of):
        marks.add("part_lost")
    ends: Callable[[str], list[float | None]] = lambda name: [  # noqa: E731
        None if getattr(row, name) is None else getattr(row, name) + shift_s for row, shift_s in closed
    ]
    drained = ends("drained_s") + [_drained_s(s, stage, start_s, missing) for s in open_]
    row = unclosed_stage(
        stage, start_s=start_s, planned=rows, rows=rows, schedule_hash=schedule.hash, marks=sorted(marks),
        workers=sum(row.workers for row, _ in closed) + sum(_width(s, stage.index) for s in open_),
        drained_s=None if None in drained else max(d for d in drained if d is not None),
    )  # fmt: skip
    if closed:  # a part that was stopped early ends the stage for the whole: after it the load is not the plan's
        row.end_s = row.window_end_s = min(e for e in ends("end_s") if e is not None)
        row.window_start_s = min(row.window_start_s, row.end_s)
    return row


def _width(source: Source, stage: int) -> int:
    """Workers of a source in a stage that its master did not close."""
    return max(1, source.owners(stage)[0] // source.part.of)


def _drained_s(source: Source, stage: Stage, start_s: float, missing: int) -> float | None:
    """When the last of an unclosed stage was seen to end; None when not all of it did."""
    _, last_s = source.owners(stage.index)
    if missing or not last_s:
        return None
    return max(max(last_s.values()) + source.clock(stage.index)[0], start_s + stage.duration_s)


def _server_rows(sources: list[Source], collector: Collector) -> None:
    """The service's own metrics, of the first part that has them: all parts look at the same page."""
    for source in sources:
        path = source.folder / SERVER_METRICS if source.folder is not None else None
        if path is None or not path.exists():
            continue
        for row in typed_rows(path, ServerRow):
            row.t_s += source.clock(max(row.stage, 0))[0]
            collector.add_server(row)
        return


def _transport(sources: list[Source]) -> dict[str, int]:
    """What all parts say of their batches, added up."""
    out: dict[str, int] = {}
    for source in sources:
        for name, count in source.info.transport.items():
            out[name] = out.get(name, 0) + count
    return out
