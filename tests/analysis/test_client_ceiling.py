"""The client against the null server: added time, the ceiling, the file, and what a run makes of it."""
from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from analysis.analyse import analyse_run
from analysis.client_ceiling import (
    Ceiling,
    ClientStage,
    added,
    added_by_client,
    by_rate,
    ceiling,
    client_stage,
    limits,
    refining_rates,
    told,
)
from bench.__main__ import main
from bench.commands.client_calibration import keep_calibration, mean_output_tokens
from bench.records.client_calibration import ClientCalibration, differences, read_calibration, write_calibration
from bench.records.ledger import read_run, write_run
from bench.records.sentences import render

sys.path.insert(0, str(Path(__file__).parent))
from synthetic import Faults, Service, StageSpec
from synthetic import write_run as write_folder

analyse = partial(analyse_run, models=False)
HOST = {"system": "Linux", "machine": "x86_64", "cpu": "a cpu", "cores": 2}


def rate(qps: float, *bound: str, cpu: float = 0.9) -> ClientStage:
    return ClientStage(qps, qps, 0.0, 100, 100, 0.001, 0.002, 0.001, cpu, 0.0003, 0.002, 0.0004, 0.003, 0.001, bound)


def made(ceiling_qps: float | None = 100.0, **over: object) -> ClientCalibration:
    base = ClientCalibration(
        made_utc="2026-01-01T00:00:00+00:00", tool_version="1", machine=HOST, workers=1, read="auto",
        output_tokens_mean=100.0, ceiling_qps=ceiling_qps, ceiling_kind="between", first_miss_qps=150.0,
        bound_by=["INV-LAG"], limits=limits(0.8), adds={"ttft_p50_s": 0.0003},
    )  # fmt: skip
    return replace(base, **over)  # type: ignore[arg-type]


def test_added_time_needs_no_common_clock() -> None:
    """Server's clock starts elsewhere: received 1000.0, first 1000.050, last 1000.250. Client: sent 5.0, first 5.053."""
    server = {"a": [1000.0, 1000.050, 1000.250, 21], "b": [1000.0, 0.0, 0.0, 21]}  # b never got its first token
    ttft, e2e, own = added(
        ["a", "b", "c"], np.array([5.0, 5.0, 5.0]), np.array([5.053, 5.06, 5.06]), np.array([5.254, 5.3, 5.3]), server
    )
    assert ttft == pytest.approx([0.003]) and e2e == pytest.approx([0.004]) and own == pytest.approx([0.050])
    assert not len(added(["a"], np.array([5.0]), np.array([np.nan]), np.array([5.2]), server)[0])


@pytest.mark.parametrize(
    ("stages", "found"),
    [
        ([], Ceiling("none", None, None, ())),
        ([rate(10), rate(20)], Ceiling("at_least", 20, None, ())),
        ([rate(10), rate(20), rate(40, "INV-LAG")], Ceiling("between", 20, 40, ("INV-LAG",), 0.9)),
        # a rate that held above one that did not counts for nothing
        ([rate(10), rate(20, "INV-CPU"), rate(40)], Ceiling("between", 10, 20, ("INV-CPU",), 0.9)),
        # measured again, and it held: the machine was busy the first time
        ([rate(10), rate(20, "INV-LAG"), rate(15), rate(20)], Ceiling("at_least", 20, None, ())),
        ([rate(10), rate(20), rate(20, "INV-LAG")], Ceiling("at_least", 20, None, ())),
        ([rate(10, "INV-RATE")], Ceiling("below", None, 10, ("INV-RATE",), 0.9)),
        # the null server's end is not the client's
        ([rate(10), rate(20, "server")], Ceiling("at_least", 10, 20, ("server",), 0.9)),
    ],
)
def test_the_ceiling_is_below_the_first_miss(stages: list[ClientStage], found: Ceiling) -> None:
    assert ceiling(stages) == found
    sentence = told(ceiling(stages), added_by_client(stages), 1)
    text = render(sentence["code"], sentence["params"])
    assert text and (found.qps is None or f"{found.qps:g}" in text)


def test_refining_rates_lie_between_and_end_with_the_miss() -> None:
    found = ceiling([rate(100), rate(200, "INV-LAG")])
    # even on a logarithm: 100 * 2^(1/4), 2^(1/2), 2^(3/4)
    assert refining_rates(found, 3) == [119, 141, 168, 200]
    assert refining_rates(found, 0) == [] and refining_rates(ceiling([rate(100)]), 3) == []
    assert refining_rates(ceiling([rate(100), rate(105, "INV-LAG")]), 3) == []  # near enough
    below = refining_rates(ceiling([rate(100, "INV-LAG")]), 2)
    assert below[-1] == 100 and all(0 < q <= 100 for q in below)


def test_an_idle_worker_that_was_late_blames_the_machine() -> None:
    slow = told(ceiling([rate(10), rate(20, "INV-LAG", cpu=0.3)]), {}, 2)
    assert "something else held the machine" in render(slow["code"], slow["params"])
    own = told(ceiling([rate(10), rate(20, "INV-LAG", cpu=0.9)]), {}, 2)
    assert "something else" not in render(own["code"], own["params"])


@pytest.mark.parametrize(
    ("faults", "late_s", "bound"),
    [
        (Faults(), 0.001, ()),
        (Faults(send_lag_s=0.02), 0.001, ("INV-LAG",)),
        (Faults(cpu_ratio=0.95, clock="user"), 0.001, ("INV-CPU",)),
        (Faults(send_lag_s=0.02), 0.050, ("server",)),  # the server was late: the client's lag says nothing
        (Faults(error=0.05), 0.001, ("server",)),
    ],
)
def test_one_stage_against_the_null_server(tmp_path: Path, faults: Faults, late_s: float, bound: tuple) -> None:
    found = analyse(write_folder(tmp_path / "r", [StageSpec(20, 30, 5)], Service(mu=4.4), faults=faults))
    own = np.full(200, 0.05 + late_s)
    s = client_stage(found.stages[0], np.full(200, 0.0004), np.full(200, 0.0005), own, 0.05)
    assert s.bound_by == bound and s.ok == (not bound)
    assert s.ttft_added_p99_s == 0.0004 and s.e2e_added_p50_s == 0.0005
    assert s.server_late_p99_s == pytest.approx(late_s)
    assert json.loads(json.dumps(s.as_dict()))["ok"] == s.ok
    assert by_rate([s]) == {20: s}


def test_the_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    write_calibration(path, made())
    assert read_calibration(path) == made()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("[]", "schema_version is 'list'"),
        ("{", "is not JSON"),
        ('{"schema_version": 9}', "schema_version is 9"),
        ('{"schema_version": 1}', "lacks made_utc"),
    ],
)
def test_a_damaged_file_says_what_to_do(tmp_path: Path, change: str, word: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(change)
    with pytest.raises(ValueError, match="bench calibrate-client") as said:
        read_calibration(path)
    assert word in str(said.value)


@pytest.mark.parametrize("value", [0, -5, "100", True])
def test_a_ceiling_is_a_positive_number(tmp_path: Path, value: object) -> None:
    path = tmp_path / "c.json"
    write_calibration(path, made())
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "ceiling_qps": value}))
    with pytest.raises(ValueError, match="ceiling_qps"):
        read_calibration(path)


def test_a_calibration_speaks_for_its_own_machine_alone() -> None:
    assert differences(made(), HOST, 1, "auto", 100.0) == []
    assert differences(made(), HOST, 1, "auto", 120.0) == []  # 1.25 times as long is near enough
    assert differences(made(), HOST, 1, "auto", None) == []
    others = differences(made(), {**HOST, "cores": 8}, 2, "lazy", 200.0)
    assert len(others) == 4 and "cores is 8 here and 2 there" in others[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = write_folder(tmp_path / "r", [StageSpec(10, 30, 5), StageSpec(20, 30, 5)], Service(mu=4.4), target_qps=20)
    info = read_run(path / "run.json")
    write_run(path / "run.json", replace(info, host=HOST, workers=1))
    return path


def test_a_stage_above_the_ceiling_is_invalid(folder: Path, tmp_path: Path) -> None:
    tokens = mean_output_tokens(folder)
    write_calibration(tmp_path / "c.json", made(15.0, output_tokens_mean=tokens))
    assert "ceiling 15" in keep_calibration(folder, tmp_path / "c.json")
    found = analyse(folder)
    assert [s.verdict == "INVALID" for s in found.stages] == [False, True]
    assert found.verdict.status == "INVALID" and found.verdict.exit_code == 4
    said = next(r for r in found.stages[1].reasons if r.reason_id == "INV-CEILING")
    assert (said.value, said.limit) == (20, 15.0) and "ceiling of 15" in said.text
    assert not any(r.reason_id == "WARN-CALIBRATION" for r in found.verdict.reasons)


def test_a_ceiling_above_the_rates_changes_nothing(folder: Path, tmp_path: Path) -> None:
    before = analyse(folder)
    write_calibration(tmp_path / "c.json", made(400.0))
    keep_calibration(folder, tmp_path / "c.json")
    after = analyse(folder)
    assert (before.verdict.status, before.verdict.sentence) == (after.verdict.status, after.verdict.sentence)
    assert after.run["target"]["calibration"]["adds"] == {"ttft_p50_s": 0.0003}


@pytest.mark.parametrize("why", ["none", "other machine"])
def test_a_run_without_one_says_so(folder: Path, tmp_path: Path, why: str) -> None:
    if why == "other machine":
        write_calibration(tmp_path / "c.json", made(15.0, machine={**HOST, "cpu": "another"}))
        assert "not used" in keep_calibration(folder, tmp_path / "c.json")
    found = analyse(folder)
    said = [r for r in found.verdict.reasons if r.reason_id == "WARN-CALIBRATION"]
    assert len(said) == 1 and said[0].severity == "info" and "bench calibrate-client" in said[0].next_step
    assert ("another" in said[0].text) == (why == "other machine")
    assert not any(r.reason_id == "INV-CEILING" for s in found.stages for r in s.reasons)


def test_nothing_is_said_where_there_is_no_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_RUNS", str(tmp_path / "nowhere"))
    monkeypatch.delenv("BENCH_CLIENT_CALIBRATION", raising=False)
    before = (folder / "run.json").read_bytes()
    assert keep_calibration(folder) == "" and (folder / "run.json").read_bytes() == before
    with pytest.raises(OSError):
        keep_calibration(folder, tmp_path / "missing.json")


@pytest.mark.parametrize("given", ["x", "0", "-3", ""])
def test_bad_rates_are_refused_before_anything_starts(tmp_path: Path, given: str) -> None:
    config = tmp_path / "c.json"
    config.write_text(json.dumps({"engine": {"embedded": True}}))
    done = CliRunner().invoke(main, ["calibrate-client", "-c", str(config), "--qps", given or ",", "-o",
                                     str(tmp_path / "o.json")])  # fmt: skip
    assert done.exit_code == 2 and "--qps" in done.output and not (tmp_path / "o.json").exists()


def test_the_real_client_is_measured(tmp_path: Path) -> None:
    """One short rate through Locust and the null server: both records meet, and the file is there."""
    config = tmp_path / "c.json"
    config.write_text(json.dumps({
        "engine": {"embedded": True}, "loadgen": {"output_len_dist": "fixed", "output_len_fixed": 20},
    }))  # fmt: skip
    done = CliRunner().invoke(main, ["calibrate-client", "-c", str(config), "--qps", "40", "--budget", "10", "--json",
                                     "-o", str(tmp_path / "o.json")])  # fmt: skip
    assert done.exit_code in (0, 4), done.output  # 4: this machine was too busy for 40/s
    found = read_calibration(tmp_path / "o.json")
    assert len(found.stages) == 1 and found.output_tokens_mean == 20 and found.workers == 1
    s = found.stages[0]
    assert s["requests"] > 60 and s["answered"] == s["requests"]  # 3 s at 40/s: 120, sd 11
    # the client cannot read a token before it was written; the network and the reader take some time
    assert 0 < s["ttft_added_p50_s"] < 0.5 and math.isfinite(s["e2e_added_p99_s"])
    assert found.machine["cores"] and (found.ceiling_qps in (40.0, None))
