"""Makes Locust's own statistics carry a streamed chat: finer buckets, honest totals, a final CSV.

Input: a Locust environment. Output: Locust's statistics and CSV files.
Does not: parse an answer or decide on an SLO.

1. Aggregated counts each arrival once: TTFT and TPOT go to their own rows only.
2. Buckets keep three significant digits (Locust's two are up to 5 % off).
3. The last CSV rows are written after the last event, not up to a second before.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import gevent
import locust.stats
from locust.env import Environment
from locust.stats import StatsCSV, StatsCSVFileWriter

from bench.records.request import RequestRow

E2E_TYPE = "POST"
TIMING_TYPES = ("TTFT", "TPOT")


class ArrivalFailed(Exception):
    """An arrival that did not end well; its text is the stable code and nothing else."""


def bucket_three_digits(response_time: float) -> float:
    """`response_time` (ms) rounded to three significant digits: at most 0.5 % off."""
    if response_time <= 0:
        return 0
    rounded = round(response_time, 2 - math.floor(math.log10(response_time)))
    return int(rounded) if rounded >= 100 else rounded


def install(environment: Environment) -> None:
    """Keep TTFT and TPOT events out of the Aggregated row of this environment."""
    stats = environment.stats
    log_request = stats.log_request

    def log(method: str, name: str, response_time: Any, content_length: int) -> None:
        if method in TIMING_TYPES:
            stats.entries[(name, method)].log(response_time, content_length)
        else:
            log_request(method, name, response_time, content_length)

    stats.log_request = log  # type: ignore[method-assign]


def install_buckets() -> None:
    """Use the finer buckets; on master and workers, before the first event."""
    locust.stats.bucket_response_time = bucket_three_digits  # type: ignore[assignment]


def fire(environment: Environment, name: str, row: RequestRow) -> None:
    """Fire the Locust events of one finished ledger row: E2E always, TTFT and TPOT when it is ok.

    Times are ms from the intended send time. An arrival that was never sent has
    no time; it counts as a failed request.
    """
    event = environment.events.request
    if row.status != "ok":
        waited = None if row.done_s is None else (row.done_s - row.intended_s) * 1000
        event.fire(
            request_type=E2E_TYPE,
            name=name,
            response_time=waited,
            response_length=row.output_tokens or 0,
            exception=ArrivalFailed(row.code or row.status),
            context={},
        )
        return
    times = ((E2E_TYPE, row.e2e_s, row.output_tokens or 0), ("TTFT", row.ttft_s, 0), ("TPOT", row.tpot_s, 0))
    for kind, seconds, length in times:
        if seconds is not None:
            event.fire(
                request_type=kind,
                name=name,
                response_time=seconds * 1000,
                response_length=length,
                exception=None,
                context={},
            )


def _decimals(writer: StatsCSV, entry: Any, use_current: bool) -> list[Any]:
    """Percentiles with their three digits; Locust would cut a TPOT of 7.44 ms to 7."""
    if not entry.num_requests:
        return list(writer.percentiles_na)
    current = use_current and entry.use_response_times_cache
    ask = entry.get_current_response_time_percentile if current else entry.get_response_time_percentile
    return [ask(p) or 0 for p in writer.percentiles_to_report]


class FinalCSV(StatsCSVFileWriter):
    """Locust's CSV files inside the run folder, with decimals and a last write."""

    def __init__(self, environment: Environment, prefix: Path) -> None:
        super().__init__(environment, locust.stats.PERCENTILES_TO_REPORT, str(prefix), full_history=True)
        self._greenlet = gevent.spawn(self.stats_writer)

    def _percentile_fields(self, stats_entry: Any, use_current: bool = False) -> list[Any]:
        return _decimals(self, stats_entry, use_current)

    def finish(self) -> None:
        """Stop the periodic writer and write every file one last time."""
        self._greenlet.kill()
        for handle, write in (
            (self.requests_csv_filehandle, self.requests_csv),
            (self.failures_csv_filehandle, self.failures_csv),
            (self.exceptions_csv_filehandle, self.exceptions_csv),
        ):
            handle.seek(0)
            handle.truncate()
            write(csv.writer(handle))
        self.close_files()


def write_final_stats(environment: Environment, prefix: str) -> None:
    """Rewrite `PREFIX_stats.csv` of a plain `locust --csv PREFIX` run: Locust itself leaves out the last second."""
    with open(prefix + "_stats.csv", "w", encoding="utf-8", newline="") as handle:
        StatsCSV(environment, locust.stats.PERCENTILES_TO_REPORT).requests_csv(csv.writer(handle))
