"""Parts of a plan: their stripes cover every arrival once, whatever the number of workers of each part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.records.collect import Collector
from bench.records.lost import lost_rows, stage_not_run, unclosed_stage
from bench.records.part import WHOLE, Part, parse_part, part_of
from bench.records.request import RequestRow
from bench.records.stage import RunInfo
from bench.workload.plan import build_plan
from bench.workload.schedule import build_schedule


@pytest.mark.parametrize(("text", "part"), [("", WHOLE), ("1/2", Part(0, 2)), ("4/4", Part(3, 4)), (" 2/3 ", Part(1, 3))])
def test_a_part_as_people_write_it(text: str, part: Part) -> None:
    assert parse_part(text) == part
    assert part == WHOLE or str(part) == text.strip()


@pytest.mark.parametrize("text", ["0/2", "3/2", "1/1", "1", "/2", "1/2/3", "a/b", "-1/2", "1/1001", "1/99999"])
def test_what_is_no_part(text: str) -> None:
    with pytest.raises(ValueError, match="such as 1/4"):
        parse_part(text)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 200))
def test_stripes_of_all_parts_cover_each_arrival_once(workers: list[int], planned: int) -> None:
    seen: list[int] = []
    numbers: set[int] = set()
    for index, width in enumerate(workers):  # each part may have another number of workers
        part = Part(index, len(workers))
        mine = [range(part.stripe(w), planned, part.stripes(width)) for w in range(width)]
        assert sum(map(len, mine)) == part.count(planned)
        seen += [arrival for stripe in mine for arrival in stripe]
        names = {part.stripe(w) for w in range(width)}
        assert not names & numbers  # no two workers of the whole have one number
        numbers |= names
    assert sorted(seen) == list(range(planned))


def info(part: Part) -> RunInfo:
    out = RunInfo("x", "", None, "0", {}, {}, 1, "", [], {}, {}, "open", "sweep", 2)
    out.part = {"part": part.index + 1, "of": part.of} if part != WHOLE else {}
    return out


def row(arrival: int) -> RequestRow:
    return RequestRow(0, arrival, 0, 0, 5.0, "window", "", "", f"x-0-{arrival}", "ok")


def test_a_collector_wants_the_rows_of_its_part_alone(tmp_path: Path) -> None:
    part = Part(1, 3)
    assert part_of(info(part).part) == part
    collector = Collector(tmp_path / "run", info(part))
    record = collector.open_stage(0, planned=10, part=part)  # its own: 1, 4, 7
    assert record.expected == 3 and collector.missing(0) == [1, 4, 7]
    collector.add_rows(0, [row(4), row(5)])
    assert collector.missing(0) == [1, 7] and record.rows == 1
    assert collector.problems == ["stage 0: a row for arrival 5, which is not of part 2/3"]


def test_rows_and_stages_that_nobody_told(tmp_path: Path) -> None:
    from bench.config.schema import Config

    config = Config.model_validate({"loadgen": {"duration_sec": 10, "arrival_process": "constant"},
                                    "sweep": {"qps": [2], "warmup_sec": 2}})  # fmt: skip
    plan = build_plan(config)
    (stage,) = plan.stages
    schedule = build_schedule(plan, stage)
    due = schedule.intended_s
    common = {"run_id": "x", "start_s": 100.0, "last_s": {0: 104.0, 1: 103.0}}
    by_stripes = lost_rows(plan, stage, schedule, range(len(schedule)), owners=2, **common)
    by_owner = lost_rows(plan, stage, schedule, range(len(schedule)), owners=np.arange(len(schedule)) % 2, **common)
    assert by_stripes == by_owner
    for i, each in enumerate(by_stripes):
        assert (each.arrival, each.worker, each.code, each.intended_s) == (i, i % 2, "CL-LOST", 100.0 + due[i])
        heard = due[i] < (4.0, 3.0)[i % 2]  # before the last sign of its worker it was sent, as far as anyone knows
        assert each.status == ("error" if heard else "unsent") and each.phase == ("warmup" if due[i] < 2.0 else "window")
    made = unclosed_stage(stage, start_s=100.0, planned=20, rows=20, workers=2, schedule_hash="h", marks=["a", "b"])
    assert (made.window_start_s, made.window_end_s, made.end_s, made.drained_s, made.marks) == (102.0, 110.0, 110.0, None, "a;b")
    none = stage_not_run(stage, marks=["not_run"])
    assert (none.planned, none.rows, none.end_s, none.marks, none.schedule_hash) == (0, 0, 0.0, "not_run", "")
