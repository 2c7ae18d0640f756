"""The master's record of a run: takes batches of rows, notices what is lost or doubled, writes the run folder.

Usage, on the master or in a local run:

    collector = Collector(run_dir, info)
    collector.open_stage(stage=0, planned=500)
    collector.add_batch(stage=0, stripe=0, seq=1, batch=unpack(data))
    missing = collector.missing(stage=0)      # arrivals without a row
    collector.close_stage(stage_row)
    collector.finish()

Input: rows as they come. Output: requests.csv, stages.csv, inflight.csv,
run.json. Does not: know Locust, send messages, or compute statistics.

1. A planned arrival has one row in the ledger: a second one is counted and left out.
2. Batches of a stripe are numbered and taken in order only: one that comes twice is left out, one that is missing is
   asked for again, since `add_batch` answers with the last number it has.
3. An arrival that was given to another stripe belongs to that one: a row of its former owner is left out.
4. Rows are written when there are many, or when `flush` is called; a write that fails is remembered in `problems`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.records.csv_lines import CHUNK_ROWS, csv_lines
from bench.records.digests import file_digests
from bench.records.ledger import INFLIGHT, REQUESTS, RUN, STAGES, RowWriter, write_run
from bench.records.packing import Batch, batch_of, join
from bench.records.part import WHOLE, Part
from bench.records.request import FIELD_NAMES, RequestRow
from bench.records.server import SERVER_COLUMNS, SERVER_METRICS, ServerRow
from bench.records.stage import INFLIGHT_COLUMNS, STAGE_COLUMNS, InflightRow, RunInfo, StageRow


@dataclass
class StageRecord:
    """What has come in for one stage so far."""

    planned: int  # of the whole stage; arrival numbers lie below it
    seen: np.ndarray  # (planned,) bool
    part: Part = WHOLE  # the other arrivals are other masters'
    owner: np.ndarray | None = None  # (planned,) stripe of each arrival, once one was given away
    closed: bool = False
    rows: int = 0
    doubled: int = 0
    disowned: int = 0  # rows of a former owner
    late: int = 0  # rows after the stage was closed
    next_seq: dict[int, int] = field(default_factory=dict)
    input_tokens: int = 0
    output_tokens: int = 0
    sent: int = 0
    statuses: dict[str, int] = field(default_factory=dict)

    @property
    def expected(self) -> int:
        """Arrivals that need a row here."""
        return self.part.count(self.planned)


class Collector:
    """Writes one run folder. Raises OSError when the folder cannot be written at the start."""

    def __init__(self, run_dir: Path, info: RunInfo) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.info = info
        self.stages: dict[int, StageRecord] = {}
        self.problems: list[str] = info.problems
        self.failed = False  # a write failed: the ledger on disk is not whole
        # cpu_us: CPU of this process from packed batch to written line
        self.transport = {"batches": 0, "bytes": 0, "cpu_us": 0, "batches_twice": 0, "batches_early": 0}
        self._pending: list[Batch] = []
        self._pending_rows = 0
        self._server: RowWriter | None = None
        self._requests = RowWriter(run_dir / REQUESTS, FIELD_NAMES)
        self._stages = RowWriter(run_dir / STAGES, STAGE_COLUMNS)
        self._inflight = RowWriter(run_dir / INFLIGHT, INFLIGHT_COLUMNS)
        write_run(run_dir / RUN, info)

    def open_stage(self, stage: int, planned: int, part: Part = WHOLE) -> StageRecord:
        """Expect the arrivals of this stage that are of `part`; `planned` counts those of the whole stage."""
        record = self.stages[stage] = StageRecord(planned=planned, seen=np.zeros(planned, dtype=bool), part=part)
        return record

    def give(self, stage: int, arrivals: np.ndarray, stripe: int, stripes: int) -> None:
        """From now on only rows of `stripe` count for these arrivals; at first, i belongs to i modulo `stripes`."""
        record = self.stages[stage]
        if record.owner is None:
            record.owner = np.arange(record.planned) % stripes
        record.owner[arrivals] = stripe

    def owned(self, stage: int, stripe: int, stripes: int) -> np.ndarray:
        """Arrivals of this stripe that have no row yet, ascending."""
        record = self.stages[stage]
        owner = np.arange(record.planned) % stripes if record.owner is None else record.owner
        return np.flatnonzero((owner == stripe) & ~record.seen[: record.planned])

    def add_batch(self, stage: int, stripe: int, seq: int, batch: Batch) -> int:
        """Take one numbered batch of a stripe; returns the number up to which there is no gap."""
        record = self.stages[stage]
        expected = record.next_seq.get(stripe, 1)
        if seq < expected:
            self.transport["batches_twice"] += 1
            return expected - 1
        if seq > expected:
            self.transport["batches_early"] += 1
            return expected - 1
        record.next_seq[stripe] = seq + 1
        self.transport["batches"] += 1
        self.take(stage, batch, stripe)
        return seq

    def add_rows(self, stage: int, rows: Sequence[RequestRow]) -> None:
        """Take rows that did not travel; each arrival once."""
        self.take(stage, batch_of(rows), None)

    def take(self, stage: int, batch: Batch, stripe: int | None) -> None:
        """Take the rows of a batch that are the first of their arrival and come from its owner."""
        record = self.stages[stage]
        if record.closed:
            record.late += batch.n
            return
        arrivals = batch.numbers["arrival"]
        keep = (arrivals >= 0) & (arrivals < record.planned)
        if not keep.all():
            wrong = int(arrivals[~keep][0])
            self.problem(f"stage {stage}: a row for arrival {wrong}, planned are {record.planned}")
        foreign = keep & (arrivals % record.part.of != record.part.index)
        if foreign.any():
            wrong = int(arrivals[foreign][0])
            self.problem(f"stage {stage}: a row for arrival {wrong}, which is not of part {record.part}")
            keep &= ~foreign
        if stripe is not None and record.owner is not None:
            mine = np.zeros(batch.n, dtype=bool)
            mine[keep] = record.owner[arrivals[keep]] == stripe
            record.disowned += int((keep & ~mine).sum())
            keep &= mine
        again = np.zeros(batch.n, dtype=bool)
        again[keep] = record.seen[arrivals[keep]]
        _, first = np.unique(arrivals, return_index=True)
        if len(first) != batch.n:
            twice = np.ones(batch.n, dtype=bool)
            twice[first] = False
            again |= twice & keep
        if again.any():
            record.doubled += int(again.sum())
            self.problem(f"stage {stage}: arrival {int(arrivals[again][0])} has a second row; it was left out")
            keep &= ~again
        fresh = batch if keep.all() else batch.take(keep)
        if fresh.n:
            self._count(record, fresh)

    def _count(self, record: StageRecord, fresh: Batch) -> None:
        record.seen[fresh.numbers["arrival"]] = True
        record.rows += fresh.n
        words, index = fresh.words["status"]
        for word, count in zip(words, np.bincount(index, minlength=len(words)).tolist(), strict=True):
            if count:
                record.statuses[str(word)] = record.statuses.get(str(word), 0) + count
        sent = np.array([word != "unsent" for word in words])[index]
        record.sent += int(sent.sum())
        record.output_tokens += fresh.total("output_tokens", sent)
        record.input_tokens += fresh.total("prompt_tokens", sent)
        counted = np.array([bool(v) for v in fresh.column("prompt_tokens")]) if "prompt_tokens" in fresh.odd else (
            fresh.numbers["prompt_tokens"] > 0
        )
        record.input_tokens += fresh.total("input_tokens", sent & ~counted)
        self._pending.append(fresh)
        self._pending_rows += fresh.n
        if self._pending_rows >= CHUNK_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the rows that wait."""
        if not self._pending:
            return
        pending, self._pending, self._pending_rows = self._pending, [], 0
        if self.failed:
            return
        batch = join(pending)
        try:
            self._requests.append(csv_lines(batch), batch.n)
        except OSError as error:
            self._fail(self._requests, error)

    def extend_stage(self, stage: int, arrival: int) -> None:
        """A closed loop has no plan of its length: make room for one more arrival."""
        record = self.stages[stage]
        if arrival >= record.planned:
            more = np.zeros(max(arrival + 1, 2 * len(record.seen)), dtype=bool)
            more[: len(record.seen)] = record.seen
            record.seen = more
            record.planned = arrival + 1

    def add_gauge(self, rows: list[InflightRow]) -> None:
        """Take gauge samples of one worker."""
        self._write(self._inflight, rows)

    def add_server(self, row: ServerRow) -> None:
        """Take one look at the service's own metrics; the file is made with the first."""
        try:
            if self._server is None:
                self._server = RowWriter(self.run_dir / SERVER_METRICS, SERVER_COLUMNS)
        except OSError as error:
            self.problem(f"{SERVER_METRICS}: cannot be written: {error.strerror}")
            return
        self._write(self._server, [row])

    def missing(self, stage: int) -> list[int]:
        """Planned arrivals of the stage that have no row yet, ascending."""
        record = self.stages[stage]
        first, step = record.part.index, record.part.of
        return (np.flatnonzero(~record.seen[first : record.planned : step]) * step + first).tolist()

    def close_stage(self, row: StageRow) -> None:
        """Write the stage's own row; rows that come later are counted and left out."""
        self.flush()
        record = self.stages.get(row.stage)
        if record is not None:
            record.closed = True
        self._write(self._stages, [row])

    def problem(self, text: str) -> None:
        """Remember what went wrong while recording; at most 50, then a count."""
        if len(self.problems) < 50:
            self.problems.append(text)
        elif len(self.problems) == 50:
            self.problems.append("more problems followed; only the first 50 are listed")

    def totals(self) -> tuple[int, int, int]:
        """(arrivals sent, input tokens, output tokens) of the whole run so far."""
        records = self.stages.values()
        return (
            sum(r.sent for r in records),
            sum(r.input_tokens for r in records),
            sum(r.output_tokens for r in records),
        )

    def finish(self) -> None:
        """Close every file and write run.json for the last time, with the digests of all; Locust's table is whole."""
        self.flush()
        self.info.transport = {
            **self.transport,
            "rows_disowned": sum(r.disowned for r in self.stages.values()),
            "rows_late": sum(r.late for r in self.stages.values()),
        }
        writers = [self._requests, self._stages, self._inflight]
        for writer in writers + ([self._server] if self._server is not None else []):
            try:
                writer.close()
            except OSError as error:
                self._fail(writer, error)
        try:
            self.info.files = file_digests(self.run_dir)
        except OSError as error:
            self.problem(f"{error.filename}: cannot be read again for its digest: {error.strerror}")
        self.save_info()

    def save_info(self) -> None:
        """Write run.json as it is now."""
        try:
            write_run(self.run_dir / RUN, self.info)
        except OSError as error:
            self.failed = True
            self.problem(f"{self.run_dir / RUN}: cannot be written: {error.strerror}")

    def _write(self, writer: RowWriter, rows: list) -> None:  # type: ignore[type-arg]
        if self.failed or not rows:
            return
        try:
            writer.write(rows)
        except OSError as error:
            self._fail(writer, error)

    def _fail(self, writer: RowWriter, error: OSError) -> None:
        if not self.failed:
            self.failed = True
            self.problem(
                f"{writer.path.name}: cannot be written after {writer.rows} rows: {error.strerror or error}; "
                f"free space or choose another folder with --run-dir, then run again"
            )
