"""Merges workers' shards and a master's unfinished folder into a run folder that can be analysed.

Input: run folders and shards of one run. Output: a new run folder.
Does not: change its sources, or judge the run.

1. Every planned arrival of a stage that began has one row. What nobody kept is CL-LOST.
2. Of two rows for one arrival the one with an outcome stands; a refusal of a worker that was taken for lost gives way.
3. A stage that the master had closed keeps its row in stages.csv; the others are marked `recovered`, and `master_lost`
   when rows are missing.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.records.collect import Collector
from bench.records.ledger import INFLIGHT, REQUESTS, RUN, STAGES, read_run
from bench.records.lost import lost_row
from bench.records.packing import COUNTS, FLOATS, Batch, batch_of, unpack
from bench.records.request import FIELD_NAMES, RequestRow
from bench.records.shard import Shard, read_shard
from bench.records.stage import InflightRow, RunInfo, StageRow
from bench.workload.plan import Plan, Stage
from bench.workload.schedule import Schedule, build_schedule

ROWS_AT_ONCE = 5000


class RecoveryError(Exception):
    """The sources do not make one run."""


@dataclass
class Recovered:
    """What came of it."""

    run_dir: Path
    run_id: str
    shards: int
    kept: dict[str, int] = field(default_factory=dict)  # stage name -> rows that somebody kept
    lost: dict[str, int] = field(default_factory=dict)  # stage name -> arrivals that are CL-LOST now
    not_run: list[str] = field(default_factory=list)
    torn: int = 0

    def lines(self) -> list[str]:
        """For people."""
        out = [f"run {self.run_id} from {self.shards} shards"]
        for name, rows in self.kept.items():
            gone = f", {self.lost[name]} lost (CL-LOST)" if self.lost[name] else ""
            out.append(f"stage {name}: {rows} rows{gone}")
        if self.not_run:
            out.append(f"not run: {', '.join(self.not_run)}")
        if self.torn:
            out.append(f"{self.torn} shards end in the middle of a frame; all before that is used")
        return [*out, f"written: {self.run_dir}", f"next: bench analyse {self.run_dir}"]


@dataclass
class _Sources:
    shards: list[Shard] = field(default_factory=list)
    folder: Path | None = None
    info: RunInfo | None = None


def recover(sources: list[Path], output: Path) -> Recovered:
    """A run folder at `output`. Raises RecoveryError when the sources do not make one run, OSError when unwritable."""
    if (output / REQUESTS).exists():
        raise RecoveryError(f"{output}: holds a run already; give -o another folder")
    found = _read_sources(sources)
    plan = _plan(found)
    info = _info(found)
    info.problems.append(f"put together by `bench recover` from {len(found.shards)} shards: the master was lost")
    result = Recovered(output, info.run_id, len(found.shards), torn=sum(s.torn_bytes > 0 for s in found.shards))
    starts, closed = _starts(found), _closed_stages(found)
    collector = Collector(output, info)
    for stage in plan.stages:
        if stage.index not in starts:
            result.not_run.append(stage.name)
            collector.close_stage(_not_run(stage, info))
            continue
        _recover_stage(found, plan, stage, starts[stage.index], closed.get(stage.index), collector, result)
    _recover_gauges(found, collector)
    info.interrupted = info.interrupted or bool(result.not_run)
    info.finished_utc = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    collector.finish()
    return result


# -- reading ------------------------------------------------------------------------------------


def _read_sources(sources: list[Path]) -> _Sources:
    out = _Sources()
    for source in sources:
        if source.is_file():
            out.shards.append(read_shard(source))
            continue
        shards = sorted(source.rglob("*.shard"))
        out.shards += [read_shard(path) for path in shards]
        if (source / RUN).exists():
            if out.folder is not None:
                raise RecoveryError(f"{source} and {out.folder} are both run folders; give one and its shards")
            out.folder, out.info = source, read_run(source / RUN)
        elif not shards:
            raise RecoveryError(f"{source}: holds neither run.json nor .shard files")
    ids = {s.head["run"].get("run_id", "") for s in out.shards} | ({out.info.run_id} if out.info else set())
    if len(ids) != 1:
        raise RecoveryError(f"the sources are of {len(ids)} runs ({', '.join(sorted(ids))}); give those of one run")
    return out


def _plan(found: _Sources) -> Plan:
    if not found.shards:
        raise RecoveryError("no shards: the plan is in them; give the workers' shard folder (--shard-dir) as well")
    return Plan.from_json(found.shards[0].head["plan"])


def _info(found: _Sources) -> RunInfo:
    info = found.info
    if info is None:
        known = {f.name for f in dataclasses.fields(RunInfo)}
        info = RunInfo(**{k: v for k, v in found.shards[0].head["run"].items() if k in known})
    info.problems = list(info.problems)
    return info


def _starts(found: _Sources) -> dict[int, float]:
    """Stage -> run time of its start, for all that began."""
    starts = {said["stage"]: said["start_s"] for s in found.shards for said in s.stages}
    for stage, row in _closed_stages(found).items():
        if row.rows or row.planned:
            starts.setdefault(stage, row.start_s)
    return starts


def _closed_stages(found: _Sources) -> dict[int, StageRow]:
    """Rows of the master's stages.csv: stages that it had finished."""
    if found.folder is None or not (found.folder / STAGES).exists():
        return {}
    kinds = {f.name: f.type for f in dataclasses.fields(StageRow)}
    out = {}
    with (found.folder / STAGES).open(encoding="utf-8", newline="") as handle:
        for cells in csv.DictReader(handle):
            if None in cells.values() or "not_run" in cells["marks"]:
                continue  # torn, or of a stage that never began
            row = StageRow(**{name: _typed(kind, cells[name]) for name, kind in kinds.items()})
            out[row.stage] = row
    return out


def _typed(kind: Any, text: str) -> Any:
    if text == "" and "None" in str(kind):
        return None
    return int(text) if kind == "int" else float(text) if str(kind).startswith("float") else text


def _ledger(found: _Sources) -> Iterator[Batch]:
    """Rows that the master had written, many at a time; a torn last line is left out."""
    path = found.folder / REQUESTS if found.folder is not None else None
    if path is None or not path.exists():
        return
    with path.open(encoding="utf-8", newline="") as handle:
        rows: list[RequestRow] = []
        for cells in csv.DictReader(handle):
            if None in cells.values() or None in cells:
                continue
            rows.append(RequestRow(*(_cell(name, cells[name]) for name in FIELD_NAMES)))
            if len(rows) == ROWS_AT_ONCE:
                yield batch_of(rows)
                rows = []
        if rows:
            yield batch_of(rows)


_ALWAYS = ("phase", "tenant", "request_class", "request_id", "status", "flags", "detail")


def _cell(name: str, text: str) -> Any:
    if name in FLOATS:
        return float(text) if text else None
    if name in COUNTS:
        return int(text) if text else None
    return text if text or name in _ALWAYS else None


# -- merging --------------------------------------------------------------------------------------


def _recover_stage(
    found: _Sources, plan: Plan, stage: Stage, start_s: float, closed: StageRow | None, collector: Collector,
    result: Recovered,
) -> None:  # fmt: skip
    schedule = build_schedule(plan, stage)
    record = collector.open_stage(stage.index, len(schedule))
    late: list[Batch] = []
    for batch in _batches(found, stage.index):
        gave_up = _is_lost(batch)
        if gave_up.any():
            late.append(batch.take(gave_up))
            batch = batch.take(~gave_up)
        _take_new(collector, stage.index, batch)
    for batch in late:
        _take_new(collector, stage.index, batch)
    kept = record.rows
    missing = collector.missing(stage.index)
    if missing:
        owners, last_s = _owners(found, stage.index)
        rows = [
            lost_row(plan, stage, schedule, i, run_id=result.run_id, start_s=start_s, worker=i % owners, last_s=last_s)
            for i in missing
        ]
        collector.add_rows(stage.index, rows)
    result.kept[stage.name], result.lost[stage.name] = kept, len(missing)
    collector.close_stage(closed or _stage_row(found, stage, schedule, start_s, record.rows, len(missing), result))


def _batches(found: _Sources, stage: int) -> Iterator[Batch]:
    for batch in _ledger(found):
        mine = batch.numbers["stage"] == stage
        if mine.any():
            yield batch.take(mine)
    for shard in found.shards:
        for of, _, _, data in shard.batches:
            if of == stage:
                yield unpack(data)


def _is_lost(batch: Batch) -> np.ndarray:
    words, index = batch.words["code"]
    return np.array([word == "CL-LOST" for word in words] or [False])[index]


def _take_new(collector: Collector, stage: int, batch: Batch) -> None:
    """Rows of arrivals that have none yet: the master's ledger and the shards overlap."""
    record, arrivals = collector.stages[stage], batch.numbers["arrival"]
    inside = (arrivals >= 0) & (arrivals < record.planned)
    fresh = np.zeros(batch.n, dtype=bool)
    fresh[inside] = ~record.seen[arrivals[inside]]
    first = np.zeros(batch.n, dtype=bool)
    first[np.unique(arrivals, return_index=True)[1]] = True
    collector.take(stage, batch.take(fresh & first), None)


def _owners(found: _Sources, stage: int) -> tuple[int, dict[int, float]]:
    """(number of stripes, run time of each worker's last gauge sample in the stage)."""
    stripes = max([said["stripes"] for s in found.shards for said in s.stages if said["stage"] == stage] or [1])
    last_s: dict[int, float] = {}
    for shard in found.shards:
        for stripe, samples in shard.gauges:
            for sample in samples:
                if sample[1] == stage:
                    last_s[stripe] = max(last_s.get(stripe, sample[0]), sample[0])
    return stripes, last_s


def _stage_row(
    found: _Sources, stage: Stage, schedule: Schedule, start_s: float, rows: int, missing: int, result: Recovered
) -> StageRow:
    stripes, last_s = _owners(found, stage.index)
    marks = ["recovered"] + (["master_lost"] if missing else [])
    return StageRow(
        stage=stage.index,
        repeat=stage.repeat,
        name=stage.name,
        offered_qps=stage.offered_qps,
        process=stage.process,
        loop="open",
        seed=stage.seed,
        planned=len(schedule),
        start_s=start_s,
        window_start_s=start_s + stage.warmup_s,
        window_end_s=start_s + stage.duration_s,
        end_s=start_s + stage.duration_s,
        drained_s=None if missing or not last_s else max(max(last_s.values()), start_s + stage.duration_s),
        workers=stripes,
        rows=rows,
        schedule_hash=schedule.hash,
        marks=";".join(sorted(marks)),
    )


def _not_run(stage: Stage, info: RunInfo) -> StageRow:
    return StageRow(
        stage.index, stage.repeat, stage.name, stage.offered_qps, stage.process, info.loop, stage.seed, 0, 0.0, 0.0,
        0.0, 0.0, None, 0, 0, "", "not_run;master_lost",
    )  # fmt: skip


def _recover_gauges(found: _Sources, collector: Collector) -> None:
    seen: set[tuple[int, float]] = set()
    if found.folder is not None and (found.folder / INFLIGHT).exists():
        with (found.folder / INFLIGHT).open(encoding="utf-8", newline="") as handle:
            kinds = {f.name: f.type for f in dataclasses.fields(InflightRow)}
            rows = [
                InflightRow(**{name: _typed(kind, cells[name]) for name, kind in kinds.items()})
                for cells in csv.DictReader(handle)
                if None not in cells.values()
            ]
        seen = {(row.worker, round(row.t_s, 6)) for row in rows}
        collector.add_gauge(rows)
    for shard in found.shards:
        for stripe, samples in shard.gauges:
            rows = [InflightRow(s[0], stripe, *s[1:]) for s in samples if (stripe, round(s[0], 6)) not in seen]
            collector.add_gauge(rows)
