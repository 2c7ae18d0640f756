"""The master's record of a run: takes batches of rows, notices what is lost or doubled, writes the run folder.

Usage, on the master or in a local run:

    collector = Collector(run_dir, info)
    collector.open_stage(stage=0, planned=500)
    collector.add_batch(stage=0, stripe=0, seq=1, rows=rows)
    missing = collector.missing(stage=0)      # arrivals without a row
    collector.close_stage(stage_row)
    collector.finish()

Input: rows as they come. Output: requests.csv, stages.csv, inflight.csv,
run.json. Does not: know Locust, send messages, or compute statistics.

1. A planned arrival has one row in the ledger: a second one is counted and left out.
2. Batches of a stripe are numbered: a gap or a repeat is noticed.
3. A write that fails is remembered in `problems`; rows stay counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from bench.records.ledger import INFLIGHT, REQUESTS, RUN, STAGES, RowWriter, write_run
from bench.records.request import FIELD_NAMES, RequestRow
from bench.records.stage import INFLIGHT_COLUMNS, STAGE_COLUMNS, InflightRow, RunInfo, StageRow


@dataclass
class StageRecord:
    """What has come in for one stage so far."""

    planned: int
    seen: bytearray
    rows: int = 0
    doubled: int = 0
    next_seq: dict[int, int] = field(default_factory=dict)
    input_tokens: int = 0
    output_tokens: int = 0
    sent: int = 0
    statuses: dict[str, int] = field(default_factory=dict)


class Collector:
    """Writes one run folder. Raises OSError when the folder cannot be written at the start."""

    def __init__(self, run_dir: Path, info: RunInfo) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.info = info
        self.stages: dict[int, StageRecord] = {}
        self.problems: list[str] = info.problems
        self.failed = False  # a write failed: the ledger on disk is not whole
        self._requests = RowWriter(run_dir / REQUESTS, FIELD_NAMES)
        self._stages = RowWriter(run_dir / STAGES, STAGE_COLUMNS)
        self._inflight = RowWriter(run_dir / INFLIGHT, INFLIGHT_COLUMNS)
        write_run(run_dir / RUN, info)

    def open_stage(self, stage: int, planned: int) -> StageRecord:
        """Expect `planned` arrivals of this stage."""
        record = self.stages[stage] = StageRecord(planned=planned, seen=bytearray(planned))
        return record

    def add_batch(self, stage: int, stripe: int, seq: int, rows: list[RequestRow]) -> None:
        """Take one numbered batch of a stripe."""
        record = self.stages[stage]
        expected = record.next_seq.get(stripe, 1)
        if seq < expected:
            self.problem(f"stage {stage} stripe {stripe}: batch {seq} came twice; its rows were left out")
            return
        if seq > expected:
            self.problem(f"stage {stage} stripe {stripe}: batches {expected} to {seq - 1} never came")
        record.next_seq[stripe] = seq + 1
        self.add_rows(stage, rows)

    def add_rows(self, stage: int, rows: Iterable[RequestRow]) -> None:
        """Take rows; each arrival once."""
        record = self.stages[stage]
        fresh: list[RequestRow] = []
        for row in rows:
            if not 0 <= row.arrival < record.planned:
                self.problem(f"stage {stage}: a row for arrival {row.arrival}, planned are {record.planned}")
            elif record.seen[row.arrival]:
                record.doubled += 1
                self.problem(f"stage {stage}: arrival {row.arrival} has a second row; it was left out")
            else:
                record.seen[row.arrival] = 1
                fresh.append(row)
        record.rows += len(fresh)
        for row in fresh:
            record.statuses[row.status] = record.statuses.get(row.status, 0) + 1
            if row.status != "unsent":
                record.sent += 1
                record.input_tokens += row.prompt_tokens or row.input_tokens or 0
                record.output_tokens += row.output_tokens or 0
        self._write(self._requests, fresh)

    def extend_stage(self, stage: int, arrival: int) -> None:
        """A closed loop has no plan of its length: make room for one more arrival."""
        record = self.stages[stage]
        if arrival >= record.planned:
            record.seen.extend(bytes(arrival + 1 - record.planned))
            record.planned = arrival + 1

    def add_gauge(self, rows: list[InflightRow]) -> None:
        """Take gauge samples of one worker."""
        self._write(self._inflight, rows)

    def missing(self, stage: int) -> list[int]:
        """Planned arrivals of the stage that have no row yet, ascending."""
        return [arrival for arrival, seen in enumerate(self.stages[stage].seen) if not seen]

    def close_stage(self, row: StageRow) -> None:
        """Write the stage's own row."""
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
        """Close every file and write run.json for the last time."""
        for writer in (self._requests, self._stages, self._inflight):
            try:
                writer.close()
            except OSError as error:
                self._fail(writer, error)
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
