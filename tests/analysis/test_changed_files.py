"""A file of a run folder that was changed after the run ended is named and makes the run INVALID."""
from __future__ import annotations

import csv
import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from analysis.analyse import analyse_run, write_analysis
from bench.commands.compare import command as compare_command
from bench.records.analysis import Analysis
from bench.records.digests import FILES, changes, file_digests
from bench.records.ledger import read_run
from bench.records.ledger import write_run as write_run_json
from tests.analysis.synthetic import Service, StageSpec, default_config, list_digests, write_run

QUICK = Service(mu=4.4)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run that lists its files."""
    folder = write_run(tmp_path / "r", [StageSpec(q, 20, 4) for q in (10, 20)], QUICK)
    return list_digests(folder)


def judged(folder: Path) -> Analysis:
    return analyse_run(folder, models=False)


def told(found: Analysis) -> list[str]:
    return [r.text for r in found.verdict.reasons if r.text.startswith("LED-025")]


def one_byte(path: Path) -> None:
    """Another last digit: as many bytes as before."""
    data = bytearray(path.read_bytes())
    place = max(i for i, byte in enumerate(data) if 48 <= byte < 57)
    data[place] += 1
    path.write_bytes(data)


def one_line(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def unpack_other(path: Path) -> None:
    """Packed, and another content in the pack."""
    one_byte(path)
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


def test_digests_are_those_of_the_bytes(run: Path) -> None:
    listed = json.loads((run / "run.json").read_text())["files"]
    own = listed.pop("run.json")
    assert set(listed) == set(FILES) - {"server_metrics.csv"}
    for name, each in listed.items():
        data = (run / name).read_bytes()
        assert each == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert changes(run, listed) == []
    said = {k: v for k, v in json.loads((run / "run.json").read_text()).items() if k != "files"}
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    assert own == {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def test_the_unchanged_run_passes_also_packed(run: Path) -> None:
    assert judged(run).verdict.status == "PASS"
    plain = run / "requests.csv"
    (run / "requests.csv.gz").write_bytes(gzip.compress(plain.read_bytes(), 1))
    plain.unlink()
    assert (judged(run).verdict.status, told(judged(run))) == ("PASS", [])


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        ("requests.csv", one_byte, "its SHA-256 is"),
        ("requests.csv", unpack_other, "its SHA-256 is"),
        ("stages.csv", one_byte, "its SHA-256 is"),
        ("stages.csv", one_line, "bytes, run.json lists"),
        ("stages.csv", Path.unlink, "it is missing"),
        ("inflight.csv", one_byte, "its SHA-256 is"),
        ("inflight.csv", Path.unlink, "it is missing"),
        ("locust_stats.csv", one_byte, "its SHA-256 is"),
        ("locust_stats.csv", Path.unlink, "it is missing"),
        ("server_metrics.csv", lambda path: path.write_text("t_s,running,waiting\n1,1,0\n"), "does not list it"),
    ],
)
def test_a_changed_file_is_named(run: Path, name: str, change: Callable[[Path], object], what: str) -> None:
    change(run / name)
    found = judged(run)
    (said,) = told(found)
    assert f"{name} was changed after the run ended" in said and what in said
    assert (found.verdict.status, found.verdict.exit_code) == ("INVALID", 4)
    assert found.capacity.knee_low_qps is None and "LED-025" in found.verdict.sentence


def test_the_claim_of_a_higher_rate(run: Path) -> None:
    """One file: 20 requests/s become 24, and words that would switch the checks of rate and gaps off."""

    def claim() -> None:
        with (run / "stages.csv").open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        rows[1].update(offered_qps="24", loop="closed", process="trace")
        with (run / "stages.csv").open("w", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0])
            writer.writeheader()
            writer.writerows(rows)

    claim()
    found = judged(run)
    assert told(found) and any(r.text.startswith("LED-026") for r in found.verdict.reasons)
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(info | {"files": {}}))
    found = judged(run)  # of an older version: the words alone
    assert found.verdict.status == "INVALID" and not told(found)


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    """Another content of run.json, its list of digests as it is."""
    info = json.loads((folder / "run.json").read_text())
    change(info)
    (folder / "run.json").write_text(json.dumps(info))


def test_an_edit_of_run_json_that_turns_fail_into_pass(tmp_path: Path) -> None:
    """A deadline of 5 ms is missed; 5 s in its place would be met."""
    config = default_config()
    config["slo"]["ttft_deadline_ms"] = 5
    folder = list_digests(write_run(tmp_path / "r", [StageSpec(q, 20, 4) for q in (10, 20)], QUICK, config=config))
    assert (judged(folder).verdict.status, told(judged(folder))) == ("FAIL", [])
    edit(folder, lambda info: info["config"]["slo"].update(ttft_deadline_ms=5000))
    found = judged(folder)
    (said,) = told(found)
    assert "run.json was changed after the run ended: the SHA-256 of its content is" in said
    assert (found.verdict.status, found.verdict.exit_code) == ("INVALID", 4)
    edit(folder, lambda info: info["files"].pop("run.json"))  # it is no signature
    assert (judged(folder).verdict.status, told(judged(folder))) == ("PASS", [])


@pytest.mark.parametrize(
    "change",
    [
        lambda info: info["target"].update(calibration={"ceiling_qps": 1000.0}),
        lambda info: info["config"]["loadgen"].update(target_qps=10),
        lambda info: info["config"].update(gates=[]) or info["config"].pop("engine"),
        lambda info: info.update(simulated=True),
        lambda info: info.update(note="a key that no run has"),
        lambda info: info["files"].update({"run.json": "ab"}),
        lambda info: info["files"].update({"run.json": None}),
    ],
)
def test_every_part_of_run_json_counts(run: Path, change: Callable[[dict], object]) -> None:
    edit(run, change)
    (said,) = told(judged(run))
    assert said.startswith("LED-025") and "run.json was changed" in said


def test_the_same_content_in_another_layout_is_no_change(run: Path) -> None:
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(dict(reversed(info.items())), indent=7))
    assert not told(judged(run))


def test_what_our_own_code_writes_again_is_listed_anew(run: Path) -> None:
    """Texts beyond ASCII, keys that are numbers, tuples: the digest is of what a reader gets."""
    info = read_run(run / "run.json")
    info.problems, info.part = ["Ärger \u96ea"], {"stages": {0: {"pair": (1, 2.5)}}}
    write_run_json(run / "run.json", info)
    assert changes(run, json.loads((run / "run.json").read_text())["files"]) == []
    info.files = {}
    write_run_json(run / "run.json", info)  # not ended yet: nothing is listed
    assert json.loads((run / "run.json").read_text())["files"] == {}


@pytest.mark.parametrize("files", [{}, None, [], "x"])
def test_a_folder_that_lists_nothing_is_judged_as_before(run: Path, files: object) -> None:
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(info | {"files": files}))
    (run / "stages.csv").unlink()
    assert not told(judged(run))


@pytest.mark.parametrize("entry", [None, {}, "ab" * 32, {"bytes": "x", "sha256": 3}])
def test_a_digest_that_is_none_is_a_change(run: Path, entry: object) -> None:
    info = json.loads((run / "run.json").read_text())
    info["files"]["stages.csv"] = entry
    (run / "run.json").write_text(json.dumps(info))
    (said,) = told(judged(run))
    assert "stages.csv" in said


def test_compare_does_not_take_the_verdict_from_before_the_change(run: Path, tmp_path: Path) -> None:
    other = list_digests(write_run(tmp_path / "n", [StageSpec(q, 20, 4) for q in (10, 20)], QUICK))
    for folder in (run, other):
        write_analysis(folder, models=False)
    assert CliRunner().invoke(compare_command, [str(run), str(other)]).exit_code == 0
    one_byte(other / "requests.csv")
    done = CliRunner().invoke(compare_command, [str(run), str(other)])
    assert done.exit_code == 4 and "requests.csv was changed after the run ended" in done.output


def test_our_own_commands_change_none(run: Path) -> None:
    write_analysis(run)
    before = file_digests(run)
    from bench.commands.report import command as report_command

    assert CliRunner().invoke(report_command, [str(run)]).exit_code == 0
    assert file_digests(run) == before and judged(run).verdict.status == "PASS"
