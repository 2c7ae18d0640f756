"""What is left of a run, or of one part of it: its master's folder, its workers' shards, the plan.

Input: run folders, folders of shards, single shards. Output: one `Source` for each run that they are of.
Does not: change them, or decide which of two rows stands.

1. A torn last line or frame is left out; all before it is used.
2. Times are as the run's own master told them; `shift_s` brings them to the run time of the first part's master.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bench.records.digests import changes
from bench.records.ledger import INFLIGHT, PLAN, REQUESTS, RUN, STAGES, read_run
from bench.records.packing import COUNTS, FLOATS, Batch, batch_of, unpack
from bench.records.part import WHOLE, Part, part_of
from bench.records.request import FIELD_NAMES, RequestRow
from bench.records.server import ServerRow
from bench.records.shard import Shard, read_shard
from bench.records.stage import InflightRow, RunInfo, StageRow
from bench.workload.plan import Plan

ROWS_AT_ONCE = 5000
DRIFT = 100e-6  # of two clocks against each other, as in locustfiles/clock.py
_Row = TypeVar("_Row", InflightRow, ServerRow, StageRow)
_ALWAYS = ("phase", "tenant", "request_class", "request_id", "status", "flags", "detail")


class RecoveryError(Exception):
    """The sources do not fit together."""


class _NoRunError(ValueError):
    """A whole shard of something else."""


@dataclass
class Source:
    """All that is left of one run."""

    run_id: str
    shards: list[Shard] = field(default_factory=list)
    folder: Path | None = None
    moved: bool = False  # its times are wanted on the clock of the first part's master
    info: RunInfo = field(init=False)
    closed: dict[int, StageRow] = field(init=False)  # stages that the master had finished

    def __post_init__(self) -> None:
        if self.folder is not None:
            self.info = read_run(self.folder / RUN)
        else:
            self.info = _info(self.shards[0].head["run"])
        self.info.problems = list(self.info.problems)
        self.closed = self._closed_stages()

    @property
    def place(self) -> str:
        """A path to name it by."""
        return str(self.folder if self.folder is not None else self.shards[0].path.parent)

    @property
    def part(self) -> Part:
        """Which arrivals are its own."""
        return part_of(self.info.part)

    @property
    def whole(self) -> bool:
        """The master closed the folder itself, and is missing nothing."""
        return self.folder is not None and self.info.finished_utc is not None

    @property
    def has_plan(self) -> bool:
        """Somebody kept the plan: a worker, or the master of a part."""
        return bool(self.shards) or (self.folder is not None and (self.folder / PLAN).exists())

    def plan(self) -> Plan:
        """The plan. Raises RecoveryError when nobody has it."""
        if not self.has_plan:
            raise RecoveryError(
                f"{self.place}: no shards: the plan is in them; give the workers' shard folder (--shard-dir) as well"
            )
        if self.shards:
            return Plan.from_json(self.shards[0].head["plan"])
        assert self.folder is not None
        return Plan.from_json((self.folder / PLAN).read_text(encoding="utf-8"))

    def starts(self) -> dict[int, float]:
        """Stage -> run time of its start, for all that began."""
        starts = {said["stage"]: said["start_s"] for s in self.shards for said in s.stages}
        for stage, row in self.closed.items():
            if row.rows or row.planned:
                starts.setdefault(stage, row.start_s)
        return starts

    def clock(self, stage: int) -> tuple[float, float | None]:
        """(seconds to add to a time of this stage, bound of that): the first part's run time minus ours."""
        said = self.info.part
        if not (said and self.moved):
            return 0.0, 0.0
        base_s = said["t0_s"] - said["lead_t0_s"]
        known = {int(number): each for number, each in said["stages"].items()}
        if not known:
            return base_s, None
        last = max((n for n in known if n <= stage), default=min(known))
        bound_s = known[last]["bound_s"]
        if bound_s is not None and last != stage and not known[last]["shared"]:
            starts = self.starts()
            bound_s += DRIFT * abs(starts.get(stage, 0.0) - starts.get(last, 0.0))
        return base_s + known[last]["offset_s"], bound_s

    # -- rows -----------------------------------------------------------------------------

    def batches(self, stage: int) -> Iterator[Batch]:
        """Rows of a stage: those that the master had written, then the workers' own."""
        for batch in self._ledger():
            mine = batch.numbers["stage"] == stage
            if mine.any():
                yield batch.take(mine)
        for shard in self.shards:
            for of, _, _, data in shard.batches:
                if of == stage:
                    yield unpack(data)

    def _ledger(self) -> Iterator[Batch]:
        path = self.folder / REQUESTS if self.folder is not None else None
        if path is None or not path.exists():
            return
        rows: list[RequestRow] = []
        for cells in _whole_lines(path):
            rows.append(RequestRow(*(_cell(name, cells[name]) for name in FIELD_NAMES)))
            if len(rows) == ROWS_AT_ONCE:
                yield batch_of(rows)
                rows = []
        if rows:
            yield batch_of(rows)

    def gauges(self) -> Iterator[list[InflightRow]]:
        """Samples of the gauge, each once."""
        seen: set[tuple[int, float]] = set()
        if self.folder is not None and (self.folder / INFLIGHT).exists():
            rows = list(typed_rows(self.folder / INFLIGHT, InflightRow))
            seen = {(row.worker, round(row.t_s, 6)) for row in rows}
            yield rows
        for shard in self.shards:
            for stripe, samples in shard.gauges:
                yield [InflightRow(s[0], stripe, *s[1:]) for s in samples if (stripe, round(s[0], 6)) not in seen]

    def owners(self, stage: int) -> tuple[int, dict[int, float]]:
        """(number of stripes, run time of each worker's last gauge sample in the stage)."""
        said = [said["stripes"] for s in self.shards for said in s.stages if said["stage"] == stage]
        known = self.part.stripes(max(1, self.info.workers)) if self.part != WHOLE else 1
        stripes = max(said or [known])
        last_s: dict[int, float] = {}
        for shard in self.shards:
            for stripe, samples in shard.gauges:
                for sample in samples:
                    if sample[1] == stage:
                        last_s[stripe] = max(last_s.get(stripe, sample[0]), sample[0])
        return stripes, last_s

    def _closed_stages(self) -> dict[int, StageRow]:
        if self.folder is None or not (self.folder / STAGES).exists():
            return {}
        rows = typed_rows(self.folder / STAGES, StageRow)
        return {row.stage: row for row in rows if "not_run" not in row.marks}


def read_sources(paths: list[Path]) -> tuple[list[Source], list[str]]:
    """(one source for each run that the paths hold something of, in the order of their parts; what was left out).

    A shard of a folder that does not begin like one is left out: its worker's disk was full. Raises RecoveryError,
    ValueError for such a shard that was given by its name.
    """
    # by run and part: on two machines the parts' folders may have one name, which is the run's id
    shards: dict[tuple[str, Part], list[Shard]] = {}
    folders: dict[tuple[str, Part], Path] = {}
    left_out: list[str] = []
    for path in paths:
        if path.is_file():
            _keep(shards, read_shard(path))
            continue
        found = sorted(path.rglob("*.shard"))
        for each in found:
            try:
                _keep(shards, read_shard(each))
            except _NoRunError as error:
                left_out.append(f"{error}; left out")
            except ValueError:
                left_out.append(f"{each}: {each.stat().st_size} bytes without a whole head; left out (a full disk?)")
        if (path / RUN).exists():
            info = read_run(path / RUN)
            if changed := changes(path, info.files):  # the folder that is made of it would list digests of the edit
                raise RecoveryError(f"{path}: {changed[0]}; give the folder as the run left it, or its shards alone")
            key = (info.run_id, part_of(info.part))
            if key in folders and folders[key].resolve() != path.resolve():
                raise RecoveryError(f"{path} and {folders[key]} are both folders of run {info.run_id}; give one")
            folders[key] = path
        elif not found:
            raise RecoveryError(f"{path}: holds neither run.json nor .shard files")
    keys = sorted({*shards, *folders}, key=lambda key: (key[1].index, key[0]))
    return [Source(key[0], shards.get(key, []), folders.get(key)) for key in keys], left_out


def _info(head: dict[str, Any]) -> RunInfo:
    """The run in a shard's head, without what a later version wrote beside it. Raises TypeError when a part lacks."""
    known = {f.name for f in dataclasses.fields(RunInfo)}
    return RunInfo(**{k: v for k, v in head.items() if k in known})


def _keep(shards: dict[tuple[str, Part], list[Shard]], shard: Shard) -> None:
    head = shard.head
    if not (isinstance(head, dict) and isinstance(head.get("run"), dict) and "plan" in head):
        raise _NoRunError(f"{shard.path}: names no run and no plan in its head; give the .shard files of the workers")
    run = head["run"]
    try:
        _info(run)
    except TypeError as error:
        lacking = str(error).partition(": ")[2] or str(error)
        raise _NoRunError(f"{shard.path}: its head has not all of a run ({lacking}); is it of this version?") from None
    mine = shards.setdefault((run.get("run_id", ""), part_of(run.get("part") or {})), [])
    if all(other.path.resolve() != shard.path.resolve() for other in mine):  # given twice, by file and by folder
        mine.append(shard)


def typed_rows(path: Path, row: type[_Row]) -> Iterator[_Row]:
    """The rows of a CSV file; a torn line is left out."""
    kinds = {f.name: f.type for f in dataclasses.fields(row)}
    for cells in _whole_lines(path):
        yield row(**{name: _typed(kind, cells[name]) for name, kind in kinds.items()})


def _whole_lines(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as handle:
        for cells in csv.DictReader(handle):
            if None not in cells and None not in cells.values():
                yield cells


def _typed(kind: Any, text: str) -> Any:
    """A cell as the type of its field."""
    if text == "" and "None" in str(kind):
        return None
    return int(text) if kind == "int" else float(text) if str(kind).startswith("float") else text


def _cell(name: str, text: str) -> Any:
    if name in FLOATS:
        return float(text) if text else None
    if name in COUNTS:
        return int(text) if text else None
    return text if text or name in _ALWAYS else None
