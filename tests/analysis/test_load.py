"""Damaged run folders: every fault has a name, no fault has a traceback, no number is silent."""
from __future__ import annotations

import gzip
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from analysis import load
from analysis.analyse import analyse_run, write_analysis
from bench.records.analysis import read_analysis
from bench.records.request import FIELD_NAMES

sys.path.insert(0, str(Path(__file__).parent))
from synthetic import Faults, Service, StageSpec, write_run

analyse = partial(analyse_run, models=False)
QUICK = Service(mu=4.4)  # short answers: capacity far above the rates below
SPECS = [StageSpec(10, 20, 4), StageSpec(20, 20, 4)]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("healthy") / "run", SPECS, QUICK, seed=2, workers=2)


@pytest.fixture
def copy(healthy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(healthy, tmp_path / "run"))


def lines(folder: Path) -> list[str]:
    return (folder / "requests.csv").read_text().splitlines(keepends=True)


def put(folder: Path, content: list[str]) -> None:
    (folder / "requests.csv").write_text("".join(content))


def change(line: str, **cells: str) -> str:
    parts = line.rstrip("\n").split(",")
    for name, value in cells.items():
        parts[FIELD_NAMES.index(name)] = value
    return ",".join(parts) + "\n"


def ids(found) -> set[str]:
    return {p["problem_id"] for p in found.ledger["problems"]}


def invalid(found) -> set[str]:
    return {r.reason_id for r in found.verdict.reasons if r.severity == "invalid"}


def test_the_healthy_run_has_no_problem(healthy: Path) -> None:
    found = analyse(healthy)
    assert found.verdict.status == "PASS" and found.verdict.exit_code == 0
    assert found.ledger["problems"] == [] and found.csv_check["ok"] is True
    assert found.ledger["rows"] == found.ledger["planned"] == len(lines(healthy)) - 1


def test_columns_are_read_exactly(healthy: Path) -> None:
    """Against a plain reading with the csv module."""
    import csv

    ledger = load.read_ledger(healthy / "requests.csv")
    with (healthy / "requests.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert ledger.rows == len(rows)
    for name in ("intended_s", "ttft_s", "e2e_s", "done_s"):
        plain = np.array([float(r[name]) if r[name] else np.nan for r in rows])
        assert np.array_equal(ledger[name], plain, equal_nan=True)
    assert [ledger.names["status"][i] for i in ledger.codes["status"]] == [r["status"] for r in rows]
    assert ledger["arrival"].tolist() == [int(r["arrival"]) for r in rows]


@pytest.mark.parametrize("block", [900, 5000, 70_000])
def test_blocks_do_not_change_what_is_read(healthy: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    whole = load.read_ledger(healthy / "requests.csv")
    monkeypatch.setattr(load, "BLOCK_BYTES", block)
    parts = load.read_ledger(healthy / "requests.csv")
    assert np.array_equal(whole["e2e_s"], parts["e2e_s"], equal_nan=True) and np.array_equal(whole.line, parts.line)
    assert load.read_lines(parts, [0, 57, parts.rows - 1]) == load.read_lines(whole, [0, 57, parts.rows - 1])
    row = load.read_lines(parts, [57])[57]
    assert float(row["intended_s"]) == whole["intended_s"][57]


def test_gzip_reads_the_same(copy: Path) -> None:
    plain = analyse(copy)
    (copy / "requests.csv.gz").write_bytes(gzip.compress((copy / "requests.csv").read_bytes()))
    (copy / "requests.csv").unlink()
    packed = analyse(copy)
    assert packed.stages == plain.stages and packed.worst == plain.worst


def test_a_cut_gzip_is_named(copy: Path) -> None:
    data = gzip.compress((copy / "requests.csv").read_bytes())
    (copy / "requests.csv.gz").write_bytes(data[: len(data) // 2])
    (copy / "requests.csv").unlink()
    with pytest.raises(load.LedgerError, match="cannot be read"):
        analyse(copy)


def test_a_truncated_last_line(copy: Path) -> None:
    content = lines(copy)
    put(copy, [*content[:-1], content[-1][:40]])
    found = analyse(copy)
    assert {"LED-003", "LED-009"} <= ids(found) and "INV-ROWS" in invalid(found) and found.verdict.exit_code == 4


def test_missing_rows(copy: Path) -> None:
    content = lines(copy)
    put(copy, [content[0], *content[4:]])
    found = analyse(copy)
    assert ids(found) == {"LED-009"} and found.ledger["missing"] == 3
    assert {"INV-ROWS", "INV-CSV"} <= invalid(found)
    assert found.capacity.knee_kind == "none" and found.capacity.knee_qps is None


def test_doubled_rows_count_once(copy: Path) -> None:
    before = analyse(copy)
    content = lines(copy)
    put(copy, [*content, content[5], content[6]])
    found = analyse(copy)
    assert "LED-008" in ids(found) and "INV-ROWS" in invalid(found) and found.ledger["doubled"] == 2
    assert [s.counts for s in found.stages] == [s.counts for s in before.stages]


def test_unknown_status_is_a_miss(copy: Path) -> None:
    content = lines(copy)
    content[-1] = change(content[-1], status="fine")
    put(copy, content)
    found = analyse(copy)
    assert "LED-006" in ids(found) and "INV-LEDGER" in invalid(found)
    assert found.stages[-1].counts["error"] == 1


def test_lines_of_the_wrong_width_and_cells_that_are_no_numbers(copy: Path) -> None:
    content = lines(copy)
    content[7] = "1,2,3\n"
    content[8] = change(content[8], ttft_s="fast")
    content[9] = content[9].rstrip("\n") + ",extra\n"
    put(copy, content)
    found = analyse(copy)
    assert {"LED-004", "LED-005", "LED-009"} <= ids(found)
    assert found.ledger["rows"] == len(content) - 3


def test_bytes_that_are_no_text(copy: Path) -> None:
    data = bytearray((copy / "requests.csv").read_bytes())
    data[5000:5010] = b"\xff\xfe\x00\x80\x81\x82\x83\x84\x85\x86"
    (copy / "requests.csv").write_bytes(bytes(data))
    assert analyse(copy).verdict.status == "INVALID"


def test_times_that_run_backwards(copy: Path) -> None:
    content = lines(copy)
    content[-1] = change(content[-1], done_s="0.5")
    put(copy, content)
    found = analyse(copy)
    assert "LED-010" in ids(found)
    assert any(r.reason_id == "INV-CLOCK" for r in found.stages[1].reasons) and found.stages[1].verdict == "INVALID"


def test_a_latency_that_is_not_its_stamps(copy: Path) -> None:
    content = lines(copy)
    content[-1] = change(content[-1], ttft_s="0.001234")
    put(copy, content)
    assert "LED-011" in ids(analyse(copy))


def test_ok_without_a_first_token_is_a_miss(copy: Path) -> None:
    content = lines(copy)
    content[-1] = change(content[-1], first_token_s="", ttft_s="", tpot_s="")
    put(copy, content)
    found = analyse(copy)
    assert "LED-012" in ids(found)
    last = found.stages[-1]
    assert last.attainment_joint.value == pytest.approx(1 - 1 / last.planned)


def test_nan_and_infinity_are_absent(copy: Path) -> None:
    content = lines(copy)
    content[-1] = change(content[-1], e2e_s="nan", last_token_s="inf")
    put(copy, content)
    found = analyse(copy)
    assert found.stages[-1].latency["e2e_s"].n <= found.stages[-1].planned


def test_rows_of_an_unknown_stage(copy: Path) -> None:
    content = lines(copy)
    put(copy, [*content, change(content[-1], stage="9")])
    assert "LED-013" in ids(analyse(copy))


@pytest.mark.parametrize(
    ("name", "problem"), [("stages.csv", "LED-014"), ("inflight.csv", "LED-015"), ("run.json", "LED-019")]
)
@pytest.mark.parametrize("content", [None, b"", b"\x00\x01garbage", b"{}[", b"a,b\n1,2\n"])
def test_other_files_missing_or_damaged(copy: Path, name: str, problem: str, content: bytes | None) -> None:
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(content)
    if name == "run.json" and content == b"{}[":
        content = b""  # not JSON either
    found = analyse(copy)
    assert problem in ids(found)
    assert [s.planned for s in found.stages] and found.verdict.status in ("PASS", "INVALID", "FAIL")


def test_windows_rebuilt_from_rows_match_the_stage_table(copy: Path) -> None:
    before = analyse(copy)
    (copy / "stages.csv").unlink()
    after = analyse(copy)
    for a, b in zip(before.stages, after.stages, strict=True):
        assert a.planned == b.planned and a.attainment_joint == b.attainment_joint
        assert b.window_s == pytest.approx(a.window_s, rel=0.05)


def test_missing_columns(copy: Path) -> None:
    content = [",".join(line.rstrip("\n").split(",")[:17]) + "\n" for line in lines(copy)]
    put(copy, content)  # ends after sent_s
    found = analyse(copy)
    assert "LED-002" in ids(found)
    put(copy, ["status,phase\n", "ok,window\n"])
    with pytest.raises(load.LedgerError, match="LED-001"):
        analyse(copy)


@pytest.mark.parametrize("content", ["", "\n", ",".join(FIELD_NAMES) + "\n", ",".join(FIELD_NAMES)])
def test_an_empty_ledger(copy: Path, content: str) -> None:
    (copy / "requests.csv").write_text(content)
    with pytest.raises(load.LedgerError, match=r"LED-0(20|01)"):
        analyse(copy)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(load.LedgerError, match="no such folder"):
        analyse(tmp_path / "nothing")
    with pytest.raises(load.LedgerError, match=r"no requests\.csv"):
        analyse(tmp_path)


def test_an_unknown_schema_version(copy: Path) -> None:
    raw = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(raw | {"schema_version": 7}))
    with pytest.raises(load.LedgerError, match="schema_version is 7"):
        analyse(copy)


def test_a_gauge_that_stopped_is_a_warning(copy: Path) -> None:
    content = (copy / "inflight.csv").read_text().splitlines(keepends=True)
    kept = [x for x in content[1:] if not 8 < float(x.split(",")[0]) < 14]
    (copy / "inflight.csv").write_text("".join([content[0], *kept]))
    found = analyse(copy)
    assert any(r.reason_id == "WARN-GAUGE" for r in found.stages[0].reasons) and found.stages[0].little.ok is None


def test_mixed_seeds_of_repeats(tmp_path: Path) -> None:
    config = {"sweep": {"repeat_seed": "same"}, "loadgen": {"target_qps": 10}}
    folder = write_run(
        tmp_path / "r", [StageSpec(10, 15, 3, repeat=0), StageSpec(10, 15, 3, repeat=1)], QUICK, config=config
    )
    found = analyse(folder)
    assert "LED-018" in ids(found) and "INV-SEED" in invalid(found)


def test_written_document_reads_back(copy: Path) -> None:
    written = write_analysis(copy, models=False)
    assert read_analysis(copy / "analysis.json").stages == written.stages
    again = write_analysis(copy, models=False)
    assert again.verdict == written.verdict and again.capacity == written.capacity
    assert not list(copy.glob("*.part"))


def test_overrides_change_the_slo_only(copy: Path) -> None:
    found = analyse(copy, slo_ttft_ms=1.0, target_qps=10, attainment_target=0.9)
    assert found.slo["ttft_deadline_s"] == 0.001 and found.verdict.status == "FAIL" and found.target_qps == 10
    assert found.capacity.knee_kind == "below" and found.stages[0].binding_clause == "ttft"
    assert any(r.reason_id == "DIA-FLOOR" for r in found.diagnosis)


def test_injected_rejections_never_raise_attainment(tmp_path: Path) -> None:
    """The same arrivals, a tenth of them refused: every clause falls by that tenth, survivors do not."""
    specs = [StageSpec(20, 40, 5, seed=7)]
    clean = analyse(write_run(tmp_path / "a", specs, QUICK)).stages[0]
    refused = analyse(write_run(tmp_path / "b", specs, QUICK, faults=Faults(rejected=0.1))).stages[0]
    assert refused.planned == clean.planned
    share = refused.counts["rejected"] / refused.planned
    assert 0.05 < share < 0.15
    for clause in ("ttft", "tpot", "joint", "e2e"):
        before, after = getattr(clean, f"attainment_{clause}").value, getattr(refused, f"attainment_{clause}").value
        assert after <= before and after == pytest.approx(before - share, abs=0.01)
    assert refused.attainment_survivors >= 0.99 > refused.attainment_joint.value
    assert any(r.reason_id == "WARN-SURVIVORS" for r in refused.reasons)


@pytest.mark.parametrize(
    ("file", "column", "value", "problem"),
    [
        ("requests.csv", "ttft_s", "1e308", "LED-021"),  # x 1000 ms is beyond a float
        ("requests.csv", "intended_s", "1e17", "LED-021"),
        ("requests.csv", "done_s", "-1e308", "LED-021"),
        ("requests.csv", "done_s", "inf", "LED-021"),
        ("requests.csv", "stage", "99999999999999999999", "LED-021"),
        ("requests.csv", "worker", "1e300", "LED-021"),
        ("requests.csv", "output_tokens", "1e300", "LED-021"),
        ("stages.csv", "window_end_s", "1e17", "LED-014"),
        ("stages.csv", "stage", "inf", "LED-014"),
        ("stages.csv", "offered_qps", "nan", "LED-014"),
        ("inflight.csv", "worker", "nan", None),  # the sample is left out
    ],
)
@pytest.mark.filterwarnings("error")
def test_numbers_that_no_run_can_hold(copy: Path, file: str, column: str, value: str, problem: str | None) -> None:
    content = (copy / file).read_text().splitlines(keepends=True)
    cells = content[30 if file != "stages.csv" else 2].rstrip("\n").split(",")
    cells[content[0].rstrip("\n").split(",").index(column)] = value
    content[30 if file != "stages.csv" else 2] = ",".join(cells) + "\n"
    (copy / file).write_text("".join(content))
    found = analyse(copy)
    if problem is None:
        assert found.ledger["problems"] == []
        return
    assert problem in ids(found)
    if problem == "LED-021":
        (named,) = (p for p in found.ledger["problems"] if p["problem_id"] == "LED-021")
        assert named["rows"] == 1 and named["examples"] == ["line 31"] and column in named["message"]
        assert "INV-LEDGER" in invalid(found) and found.verdict.exit_code == 4


def test_ten_years_are_no_damage(copy: Path) -> None:
    content = lines(copy)
    ten_years = 10 * 366 * 86_400
    content[30], content[31] = change(content[30], residence_s=str(ten_years)), change(content[31], residence_s=str(ten_years + 1))
    put(copy, content)
    ledger = load.read_ledger(copy / "requests.csv")
    assert ledger["residence_s"][29] == ten_years and np.isnan(ledger["residence_s"][30])
    assert [p.problem_id for p in ledger.problems] == ["LED-021"] and ledger.problems[0].examples == ["line 32"]
