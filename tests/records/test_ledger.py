"""Run files are written whole, read back, and named when they are damaged."""

from __future__ import annotations

import csv
import gzip
import json
import math
from pathlib import Path

import pytest

from bench.records import ledger
from bench.records.request import FIELD_NAMES, RequestRow
from bench.records.stage import RunInfo


def _row(arrival: int, **more: object) -> RequestRow:
    return RequestRow(0, arrival, 0, 0, 5.0, "window", "", "", f"r-{arrival}", "ok", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (None, ""),
        (0.0, "0"),
        (1.5, "1.5"),
        (0.000000001, "0.000000001"),  # a nanosecond is kept
        (0.1 + 0.2, "0.3"),  # 0.30000000000000004 at nine decimals
        (math.inf, "inf"),
        (3, 3),
        ("a,b", "a,b"),
    ],
)
def test_cells(value: object, cell: object) -> None:
    assert ledger.cell(value) == cell


def test_requests_are_read_back_by_an_independent_reader(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    rows = [_row(0, ttft_s=0.25, detail='a "quoted", line'), _row(1, output_tokens=7)]
    assert ledger.write_requests(path, rows) == 2
    with path.open(encoding="utf-8", newline="") as handle:
        found = list(csv.DictReader(handle))
    assert tuple(found[0]) == FIELD_NAMES
    assert found[0]["ttft_s"] == "0.25" and found[0]["detail"] == 'a "quoted", line' and found[0]["output_tokens"] == ""
    assert found[1]["output_tokens"] == "7" and found[1]["ttft_s"] == ""


def test_a_killed_writer_leaves_whole_lines(tmp_path: Path) -> None:
    writer = ledger.RowWriter(tmp_path / "requests.csv", FIELD_NAMES)
    writer.write([_row(0), _row(1)])
    text = (tmp_path / "requests.csv").read_text(encoding="utf-8")  # not closed: what a kill leaves
    assert text.count("\n") == 3 and text.endswith("\n")
    writer.close()


def _info() -> RunInfo:
    return RunInfo(
        run_id="x", started_utc="2026-01-01T00:00:00+00:00", finished_utc=None, tool_version="0", versions={}, host={},
        seed=1, schedule_hash="h", command=["bench"], config={}, config_origin={}, loop="open", shape="sweep", workers=1,
    )  # fmt: skip


def test_run_json_comes_back_and_ignores_newer_keys(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    ledger.write_run(path, _info())
    data = json.loads(path.read_text(encoding="utf-8"))
    data["key_of_a_newer_version"] = 1
    path.write_text(json.dumps(data), encoding="utf-8")
    assert ledger.read_run(path) == _info()


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON at line 1"), ("{}", "lacks run_id")])
def test_a_damaged_run_json_says_where(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        ledger.read_run(tmp_path / "run.json")


def test_the_ledger_of_a_folder_is_found_plain_or_packed_and_is_in_the_way_of_another(tmp_path: Path) -> None:
    from bench.commands.job_options import JobError, JobOptions
    from bench.commands.prepare import make_run_dir

    assert ledger.find_requests(tmp_path) is None
    (tmp_path / "requests.csv").mkdir()  # no file
    assert ledger.find_requests(tmp_path) is None
    packed = tmp_path / "requests.csv.gz"
    packed.write_bytes(gzip.compress(b"a,b\r\n1,\"2\n3\"\n"))
    assert ledger.find_requests(tmp_path) == packed
    with ledger.open_rows(packed) as handle:
        assert list(csv.DictReader(handle)) == [{"a": "1", "b": "2\n3"}]
    with pytest.raises(JobError, match="holds a run already"):
        make_run_dir(JobOptions(config=Path("x.json"), run_dir=tmp_path))
    (tmp_path / "requests.csv").rmdir()
    (tmp_path / "requests.csv").write_text("a,b\n4,5\n", encoding="utf-8")
    found = ledger.find_requests(tmp_path)
    assert found == tmp_path / "requests.csv"  # the plain one goes first
    with ledger.open_rows(found) as handle:
        assert list(csv.DictReader(handle)) == [{"a": "4", "b": "5"}]
