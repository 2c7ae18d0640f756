"""The collector notices what is lost, doubled or cannot be written."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.records.collect import Collector
from bench.records.packing import Batch, pack, unpack
from bench.records.request import RequestRow
from bench.records.stage import RunInfo


def _row(arrival: int, status: str = "ok", **more: Any) -> RequestRow:
    return RequestRow(0, arrival, 0, 0, 5.0, "window", "", "", f"r-{arrival}", status, **more)


@pytest.fixture
def collector(tmp_path: Path) -> Collector:
    info = RunInfo(
        run_id="x", started_utc="", finished_utc=None, tool_version="0", versions={}, host={}, seed=1, schedule_hash="",
        command=[], config={}, config_origin={}, loop="open", shape="sweep", workers=2,
    )  # fmt: skip
    return Collector(tmp_path / "run", info)


def _batch(*rows: RequestRow) -> Batch:
    """The rows after their way to the master."""
    return unpack(pack(rows))


def _arrivals(collector: Collector) -> list[str]:
    collector.flush()
    with (collector.run_dir / "requests.csv").open(encoding="utf-8", newline="") as handle:
        return [line["arrival"] for line in csv.DictReader(handle)]


def test_each_arrival_has_one_row_whatever_comes(collector: Collector) -> None:
    collector.open_stage(0, planned=5)
    assert collector.add_batch(0, stripe=0, seq=1, batch=_batch(_row(0), _row(2))) == 1
    assert collector.add_batch(0, stripe=1, seq=1, batch=_batch(_row(1))) == 1
    assert collector.add_batch(0, stripe=0, seq=1, batch=_batch(_row(0), _row(2))) == 1  # the batch came twice
    # 2 is doubled, 4 comes twice in one batch, 9 was never planned
    assert collector.add_batch(0, stripe=0, seq=2, batch=_batch(_row(2), _row(4), _row(9), _row(4))) == 2
    assert collector.missing(0) == [3]
    assert _arrivals(collector) == ["0", "2", "1", "4"]
    assert collector.transport["batches_twice"] == 1 and collector.stages[0].doubled == 2
    text = " | ".join(collector.problems)
    assert "arrival 2 has a second row" in text and "arrival 9, planned are 5" in text


def test_a_gap_in_the_batches_is_asked_for_again(collector: Collector) -> None:
    collector.open_stage(0, planned=3)
    assert collector.add_batch(0, stripe=0, seq=1, batch=_batch(_row(0))) == 1
    assert collector.add_batch(0, stripe=0, seq=3, batch=_batch(_row(2))) == 1  # "I have up to 1"
    assert collector.transport["batches_early"] == 1 and collector.missing(0) == [1, 2]
    assert collector.add_batch(0, stripe=0, seq=2, batch=_batch(_row(1))) == 2
    assert collector.add_batch(0, stripe=0, seq=3, batch=_batch(_row(2))) == 3
    assert collector.missing(0) == [] and collector.problems == []


def test_an_arrival_that_was_given_away_counts_once_from_its_new_owner(collector: Collector) -> None:
    collector.open_stage(0, planned=6)
    assert collector.owned(0, 1, 2).tolist() == [1, 3, 5]
    collector.add_batch(0, stripe=1, seq=1, batch=_batch(_row(1)))
    collector.give(0, np.array([5]), 0, 2)
    assert (collector.owned(0, 0, 2).tolist(), collector.owned(0, 1, 2).tolist()) == ([0, 2, 4, 5], [3])
    # the former owner was only asleep: its row of 3 counts, that of 5 does not, whoever comes first
    collector.add_batch(0, stripe=1, seq=2, batch=_batch(_row(3), _row(5)))
    collector.add_batch(0, stripe=0, seq=1, batch=_batch(_row(0), _row(2), _row(4), _row(5)))
    assert collector.missing(0) == [] and collector.problems == [] and collector.stages[0].disowned == 1
    assert sorted(_arrivals(collector)) == ["0", "1", "2", "3", "4", "5"]


def test_totals_count_what_was_sent_by_the_services_own_count(collector: Collector) -> None:
    collector.open_stage(0, planned=3)
    collector.add_rows(
        0,
        [
            _row(0, prompt_tokens=110, input_tokens=100, output_tokens=20),
            _row(1, input_tokens=50),  # no usage: what was planned
            _row(2, "unsent", input_tokens=70),
        ],
    )
    assert collector.totals() == (2, 160, 20)
    assert collector.stages[0].statuses == {"ok": 2, "unsent": 1}


def test_a_full_disk_is_said_once_and_stops_the_writing(collector: Collector) -> None:
    class Full:
        """A file on a full disk."""

        rows = 3
        path = collector.run_dir / "requests.csv"

        def append(self, lines: bytes, rows: int) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    collector.open_stage(0, planned=2)
    collector._requests = Full()  # type: ignore[assignment]
    collector.add_rows(0, [_row(0)])
    collector.flush()
    collector.add_rows(0, [_row(1)])
    collector.finish()
    assert collector.failed
    assert collector.problems == [
        "requests.csv: cannot be written after 3 rows: No space left on device; "
        "free space or choose another folder with --run-dir, then run again"
    ]
    assert json.loads((collector.run_dir / "run.json").read_text())["problems"] == collector.problems


def test_problems_stay_bounded(collector: Collector) -> None:
    for i in range(200):
        collector.problem(f"problem {i}")
    assert len(collector.problems) == 51 and "only the first 50" in collector.problems[-1]


def test_a_closed_loop_grows_as_it_goes(collector: Collector) -> None:
    collector.open_stage(0, planned=0)
    for arrival in (0, 2, 1):
        collector.extend_stage(0, arrival)
        collector.add_rows(0, [_row(arrival)])
    assert collector.stages[0].planned == 3 and collector.missing(0) == [] and collector.problems == []
