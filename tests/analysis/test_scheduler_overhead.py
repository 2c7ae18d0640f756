"""DIA-SCHED and DIA-BATCH: each speaks with its own data, with figures counted by hand, and is silent without them."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from analysis.run_files import ServerGauge, read_server_gauge
from analysis.scheduler_overhead import scheduler_overhead
from bench.records.analysis import Reason, StageAnalysis
from tests.analysis.synthetic import StageSpec, write_run
from tests.analysis.test_verdict import QUICK, analyse


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> StageAnalysis:
    found = analyse(write_run(tmp_path_factory.mktemp("s") / "r", [StageSpec(20, 30, 5)], QUICK))
    return found.stages[0]


def page(stage: StageAnalysis, **series: np.ndarray | float) -> ServerGauge:
    """One look a second over the window."""
    t = np.arange(stage.window_start_s, stage.window_end_s, 1.0)
    none = np.full(len(t), np.nan)
    given = {k: np.full(len(t), v) if np.isscalar(v) else v for k, v in series.items()}
    return ServerGauge(t, *(given.pop(k, none) for k in ("running", "waiting", "kv_usage", "preemptions_total")), **given)


def codes(found: list[Reason]) -> list[str]:
    return [r.code for r in found]


def test_the_engine_says_what_its_decisions_cost(stage: StageAnalysis) -> None:
    # 50 steps a second, 4 ms of decisions each: 4 of 20 ms, 20 %
    n = int(stage.window_s)
    seconds = np.arange(n, dtype=float)
    slow = page(stage, steps_total=1000 + 50 * seconds, decision_total_s=3 + 50 * seconds * 0.004)
    found = scheduler_overhead([stage], slow, None, None)
    assert codes(found) == ["DIA-SCHED"] and found[0].value == pytest.approx(0.20)
    assert "4.00 ms of decisions per step, 20% of the 20.0 ms that a step takes (50 steps/s)" in found[0].text
    # of four replicas, each makes 12.5 steps a second of 80 ms: 4 of 80 ms is 5 %
    assert not scheduler_overhead([stage], slow, None, None, replicas=4.0)
    quick = page(stage, steps_total=1000 + 50 * seconds, decision_total_s=3 + 50 * seconds * 0.0001)
    assert not scheduler_overhead([stage], quick, None, None)
    anew = page(stage, steps_total=np.where(seconds < 9, 5000 + 50 * seconds, 50 * seconds),
                decision_total_s=50 * seconds * 0.004)  # fmt: skip
    assert not scheduler_overhead([stage], anew, None, None)  # a total that falls says nothing
    assert not scheduler_overhead([stage], page(stage), None, None)


@pytest.mark.parametrize(
    ("running", "waiting", "kv", "speaks"),
    [
        (10.0, 6.0, 0.3, True),
        (10.0, 6.0, np.nan, True),  # the page has no KV memory
        (10.0, 6.0, 0.95, False),  # it is KV memory that binds
        (31.0, 6.0, 0.3, False),  # the seats are taken
        (10.0, 1.0, 0.3, False),  # one that waits for the next step
        (10.0, 0.0, 0.3, False),
    ],
)
def test_empty_seats_beside_a_queue(
    stage: StageAnalysis, running: float, waiting: float, kv: float, speaks: bool
) -> None:
    n = int(stage.window_s)
    taken = np.full(n, running)
    taken[0] = 32.0  # the most that it ever ran
    found = scheduler_overhead([stage], page(stage, running=taken, waiting=waiting, kv_usage=kv), None, None)
    assert codes(found) == (["DIA-SCHED.seats"] if speaks else [])
    if speaks:
        assert "6.0 requests waited on average while only 10.0 of 32 seats were taken" in found[0].text
        assert ("KV memory" in found[0].text) is bool(np.isfinite(kv))
        assert found[0].value == pytest.approx((n - 1) / n)  # the first look is not one


def test_the_cost_that_no_batch_shares(stage: StageAnalysis) -> None:
    fit = {"alpha_s": 0.012, "beta_s": 0.0001, "kappa_s": 0.0, "kv_s": 0.0}
    stage = deepcopy(stage)
    at = stage.little.in_flight_mean_integral = 30.0
    seats, step = 32.0, 12 + 0.1 * 32  # 30 of 32: the batch is full
    found = scheduler_overhead([stage], None, fit, seats)
    assert codes(found) == ["DIA-SCHED.fixed"] and found[0].value == pytest.approx(12 / step)
    assert f"12.00 ms of the fitted {step:.2f} ms of a step" in found[0].text and "weights" in found[0].text
    assert not scheduler_overhead([stage], None, fit, 2 * at)  # half full: a fuller batch shares it
    assert not scheduler_overhead([stage], None, fit | {"beta_s": 0.012}, seats)
    assert not scheduler_overhead([stage], None, fit | {"kv_s": 1e-7}, seats)
    assert not scheduler_overhead([stage], None, fit, None) and not scheduler_overhead([stage], None, None, seats)


def test_it_is_read_from_the_run_folder(tmp_path: Path) -> None:
    """server_metrics.csv of the embedded engine, by its page: the columns reach the diagnosis."""
    from bench.records.server import SERVER_COLUMNS, read_page

    run = write_run(tmp_path / "r", [StageSpec(20, 30, 5)], QUICK)
    lines = [",".join(SERVER_COLUMNS)]
    for second in range(30):
        text = (f"vllm:num_requests_running 4\nvllm:num_requests_waiting 0\nbench_engine_steps_total {40 * second}\n"
                f"bench_engine_decision_seconds_total {40 * second * 0.005}\n")  # fmt: skip
        _, row = read_page(text)
        told = {"t_s": second, "stage": 0, "system": "vllm"} | row
        lines.append(",".join(str(told.get(c, "")) for c in SERVER_COLUMNS))
    (run / "server_metrics.csv").write_text("\n".join(lines) + "\n")
    info = json.loads((run / "run.json").read_text())
    info.pop("files", None)
    (run / "run.json").write_text(json.dumps(info))
    server = read_server_gauge(run)
    assert server is not None and server.steps_total[-1] == 1160
    found = next(r for r in analyse(run).diagnosis if r.reason_id == "DIA-SCHED")
    assert found.value == pytest.approx(0.2)  # 40 steps a second of 25 ms, 5 ms of decisions


def test_throughput_that_falls_as_the_batch_grows(stage: StageAnalysis) -> None:
    """By hand: 20/s finished of 20, 15/s of 40 with five times as many in flight."""
    from analysis.diagnosis import _falling_throughput

    low, high = deepcopy(stage), deepcopy(stage)
    low.offered_qps, low.completed_qps, low.little.in_flight_mean_integral = 20.0, 20.0, 8.0
    high.offered_qps, high.completed_qps, high.little.in_flight_mean_integral = 40.0, 15.0, 40.0
    high.stage = 1
    found = _falling_throughput([high, low])
    assert codes(found) == ["DIA-BATCH"] and (found[0].stage, found[0].value, found[0].limit) == (1, 15.0, 20.0)
    assert "throughput falls from 20.00 to 15.00 requests/s while in-flight rises from 8 to 40" in found[0].text
    assert found[0].next_code == "next.batch"
    high.completed_qps = 19.5  # 2.5 % less: chance
    assert not _falling_throughput([low, high])
    high.completed_qps, high.little.in_flight_mean_integral = 15.0, 5.0  # fewer in flight: it is not the batch
    assert not _falling_throughput([low, high])
    high.little.in_flight_mean_integral, high.verdict = 40.0, "INVALID"
    assert not _falling_throughput([low, high])
