"""The load itself: the plan arrives whole, on any number of workers, and Locust's CSV agrees."""

from __future__ import annotations

import csv
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from bench.config import load_config
from bench.workload.plan import build_plan
from bench.workload.schedule import build_schedule

from .conftest import Ran, own_port


def planned(config_file: Path) -> dict[tuple[int, int], tuple[float, int, int]]:
    """(stage, arrival) -> (time in the stage, input, max tokens), straight from the workload package."""
    plan = build_plan(load_config(config_file, env={}).config, "sweep")
    out: dict[tuple[int, int], tuple[float, int, int]] = {}
    for stage in plan.stages:
        s = build_schedule(plan, stage)
        for i in range(len(s)):
            out[stage.index, i] = (float(s.intended_s[i]), int(s.input_tokens[i]), int(s.max_tokens[i]))
    return out


def check_ledger_is_plan(ran: Ran, config_file: Path) -> None:
    """Every planned arrival has exactly one row, with its planned time and lengths."""
    start = {row["stage"]: float(row["start_s"]) for row in ran.rows("stages.csv")}
    want = planned(config_file)
    rows = ran.rows()
    assert sorted((int(r["stage"]), int(r["arrival"])) for r in rows) == sorted(want)
    for row in rows:
        at, tokens_in, tokens_out = want[int(row["stage"]), int(row["arrival"])]
        assert float(row["intended_s"]) - start[row["stage"]] == pytest.approx(at, abs=1e-6)
        assert (int(row["input_tokens"]), int(row["max_tokens"])) == (tokens_in, tokens_out)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_ledger_is_the_plan_on_any_number_of_workers(run_locust: Any, config_file: Path, processes: int) -> None:
    spread = ("--processes", str(processes), *own_port()) if processes > 1 else ()
    ran = run_locust(*spread)
    assert ran.code == 0, ran.err[-2000:]
    check_ledger_is_plan(ran, config_file)
    rows = ran.rows()
    assert {row["status"] for row in rows} == {"ok"}
    assert {int(row["worker"]) for row in rows} == set(range(processes))
    assert all(int(row["arrival"]) % processes == int(row["worker"]) for row in rows)
    assert ran.run()["problems"] == []


def test_rows_say_what_the_engine_did(run_locust: Any, engine: Any) -> None:
    """Second path: the engine's own record of the same requests."""
    ran = run_locust("--qps-stages", "20")
    with urllib.request.urlopen(engine.base_url + "/debug/requests", timeout=10) as answer:
        truth = {r["request_id"]: r for r in map(json.loads, answer.read().decode().splitlines())}
    rows = ran.rows()
    assert len(rows) > 30
    for row in rows:
        said = truth[row["request_id"]]
        assert int(row["output_tokens"]) == said["output_tokens"] == int(row["max_tokens"])
        assert int(row["prompt_tokens"]) == said["prompt_tokens"] == int(row["input_tokens"])
        # the client can only see the last token after the engine has begun to write it
        assert float(row["residence_s"]) >= said["last_token_s"] - said["received_s"] - 1e-3
    errors = sorted(
        abs(
            float(r["first_token_s"])
            - float(r["sent_s"])
            - truth[r["request_id"]]["first_token_s"]
            + truth[r["request_id"]]["received_s"]
        )
        for r in rows
    )
    assert errors[len(errors) // 2] < 0.02  # 0.15 ms on a quiet machine


def test_locusts_csv_agrees_to_the_last_request(run_locust: Any) -> None:
    ran = run_locust("--csv", "by_hand")
    rows = ran.rows()
    for path in (ran.run_dir / "locust_stats.csv", ran.run_dir.parent / "by_hand_stats.csv"):
        with path.open(encoding="utf-8", newline="") as handle:
            stats = {(r["Type"], r["Name"]): r for r in csv.DictReader(handle)}
        for stage in ran.rows("stages.csv"):
            mine = [row for row in rows if row["stage"] == stage["stage"]]
            entry = stats["POST", stage["name"]]
            assert int(entry["Request Count"]) == len(mine) and int(entry["Failure Count"]) == 0
            mean_ms = 1000 * sum(float(row["e2e_s"]) for row in mine) / len(mine)
            assert float(entry["Average Response Time"]) == pytest.approx(mean_ms, rel=1e-6)
            ttft = stats["TTFT", stage["name"]]
            assert int(ttft["Request Count"]) == len(mine)
            assert float(ttft["Max Response Time"]) == pytest.approx(
                1000 * max(float(r["ttft_s"]) for r in mine), rel=1e-6
            )
            assert ("TPOT", stage["name"]) in stats
        assert int(stats["", "Aggregated"]["Request Count"]) == len(rows)  # once each, not three times


def test_the_gauge_sees_what_is_in_flight(run_locust: Any) -> None:
    """10 Hz samples against a count from the rows at the same moments: two paths to one number."""
    ran = run_locust("--qps-stages", "30")
    rows = [(float(r["sent_s"]), float(r["done_s"])) for r in ran.rows()]
    samples = [(float(r["t_s"]), int(r["in_flight"])) for r in ran.rows("inflight.csv")]
    assert len(samples) >= 25  # 3 s of arrivals at 10 a second, and the drain
    difference = [count - sum(sent <= at < done for sent, done in rows) for at, count in samples]
    assert abs(sum(difference)) / len(difference) < 0.5


def test_a_service_that_refuses_all_still_gives_whole_rows(run_locust: Any) -> None:
    ran = run_locust("--qps-stages", "20", url="http://127.0.0.1:9")  # the discard port: nobody listens
    rows = ran.rows()
    assert rows and {row["status"] for row in rows} == {"error"} and {row["code"] for row in rows} == {"CH-REFUSED"}
    assert all(row["ttft_s"] == "" and row["e2e_s"] == "" for row in rows)
    failures = ran.rows("locust_failures.csv")
    assert [f["Error"] for f in failures] == ["ArrivalFailed('CH-REFUSED')"] and int(failures[0]["Occurrences"]) == len(
        rows
    )


def test_a_config_typo_stops_plain_locust_with_code_2(run_locust: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"slo": {"ttft_deadline": 800}}', encoding="utf-8")
    ran = run_locust("--bench-config", str(bad))
    assert ran.code == 2
    assert "ttft_deadline_ms" in ran.err  # the nearest known key is named
    assert not ran.run_dir.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_url": "https://your-gateway.example/v1", "engine": {"embedded": False}}, "CFG-012"),
        ({"base_url": ""}, "base_url is empty"),
    ],
)
def test_plain_locust_sends_nothing_to_a_placeholder(
    run_locust: Any, config_file: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    config = json.loads(config_file.read_text(encoding="utf-8")) | change
    path = tmp_path / "nowhere.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    ran = run_locust("--bench-config", str(path), url="")
    assert ran.code == 2 and words in ran.err and "Traceback" not in ran.err and not ran.run_dir.exists(), ran.err


def test_a_base_url_of_the_environment_that_is_not_used_is_named(run_locust: Any, monkeypatch: Any, tmp_path: Path) -> None:
    import tests.load.conftest as shared

    plain = shared.clean_environment
    monkeypatch.setattr(shared, "clean_environment", lambda **kw: plain(**kw, BENCH_BASE_URL="http://127.0.0.1:9/v1"))
    ran = run_locust(url="")
    assert ran.code == 2 and not ran.run_dir.exists()
    assert "engine.embedded is true, so BENCH_BASE_URL is not used." in ran.err
    assert "--host, or set engine.embedded to false to test your service" in ran.err


def test_a_closed_loop_keeps_its_concurrency(run_locust: Any) -> None:
    ran = run_locust("-u", "4", "-r", "4", "--stage-duration", "3", files="closed_loop.py", shape=None)
    rows = ran.rows()
    assert ran.code == 0, ran.err[-2000:]
    assert ran.run()["loop"] == "closed" and ran.rows("stages.csv")[0]["name"] == "00 chat c4"
    assert sorted(int(r["arrival"]) for r in rows) == list(range(len(rows)))
    spans = sorted((float(r["sent_s"]), float(r["done_s"])) for r in rows)
    assert max(sum(a <= at < b for a, b in spans) for at, _ in spans) <= 4
    assert len(rows) > 40  # four users, answers of some 20 ms


def test_a_limit_stops_a_running_load_in_order(run_locust: Any, config_file: Path, tmp_path: Path) -> None:
    """Plain Locust does not ask before it starts; the conductor stops what passes a ceiling."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["limits"] = {"max_requests": 20}
    path = tmp_path / "limited.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    ran = run_locust("--bench-config", str(path), "--stage-duration", "8")  # 80 arrivals are planned
    first, second = ran.rows("stages.csv")
    rows = ran.rows()
    assert ran.code == 4 and any("limits.max_requests is 20" in p for p in ran.run()["problems"])
    assert first["marks"] == "limit" and "not_run" in second["marks"] and len(rows) == int(first["planned"])
    sent = [row for row in rows if row["status"] != "unsent"]
    assert 20 < len(sent) <= 40  # looked at five times a second, at 10 arrivals a second; a busy machine looks later
    assert {row["code"] for row in rows if row["status"] == "unsent"} == {"CL-STOP"}
