"""Before and after an overload: counts by hand, published intervals, simulated loads."""
from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from analysis.analyse import analyse_run
from analysis.hysteresis import findings, hysteresis, newcombe
from analysis.intervals import wilson
from bench.__main__ import main
from bench.records.analysis import Interval, from_json, to_json
from bench.records.sentences import render

sys.path.insert(0, str(Path(__file__).parent))
from synthetic import Service, StageSpec, write_run

analyse = partial(analyse_run, models=False)


def visit(rates: list[tuple[float, int, int]], varying: bool = False) -> tuple[np.ndarray, ...]:
    """(rate, arrivals, misses) one after the other, misses spread evenly; one arrival a second."""
    rate = np.concatenate([np.full(n, q) for q, n, _ in rates])
    missed = np.concatenate([np.isin(np.arange(n), np.linspace(0, n - 1, k).astype(int) if k else []) for _, n, k in rates])
    return np.arange(len(rate), dtype=float), rate, missed, np.full(len(rate), varying)


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        ([(10, 400, 0), (40, 400, 300), (10, 400, 0)], "recovers"),
        ([(10, 400, 0), (40, 400, 300), (10, 400, 80)], "degraded"),
        ([(10, 400, 0), (40, 400, 300), (10, 40, 0)], "undecided"),  # 40 arrivals bound a loss of 9 points
        ([(10, 400, 0), (40, 400, 0), (10, 400, 80)], "no_overload"),
    ],
)
def test_the_verdict_by_hand(rates: list, verdict: str) -> None:
    found = hysteresis(*visit(rates), 0.99)
    assert [h.verdict for h in found] == [verdict] and found[0].offered_qps == pytest.approx(10)
    n, k = rates[2][1:]
    assert found[0].after.value == pytest.approx(1 - k / n) and found[0].before.value == 1.0
    said = findings(found)
    assert [r.code for r in said] == ([f"DIA-HYSTERESIS.{verdict}"] if verdict in ("recovers", "degraded") else [])
    for r in said:
        assert render(r.code, r.params) == r.text and "10 requests/s" in r.text


@pytest.mark.parametrize(
    "rates",
    [
        [(10, 400, 0), (20, 400, 0), (40, 400, 300)],  # never back
        [(10, 400, 0), (40, 400, 300), (10, 20, 0)],  # too few
        [(10, 400, 100), (40, 400, 300), (10, 400, 0)],  # did not hold before
        [(10, 400, 0), (40, 400, 300), (10, 400, 0), (40, 400, 300)],  # the peak comes again: no after yet
        [],
    ],
)
def test_nothing_is_said_without_two_sides(rates: list) -> None:
    arrays = visit(rates) if rates else (np.empty(0),) * 4
    assert hysteresis(*arrays, 0.99) == []


def test_a_spike_counts_the_second_half_and_tells_the_recovery() -> None:
    """10/s: 300 arrivals; peak to t = 599; then 300, of which the first 100 miss: the last miss at t = 699."""
    t, rate, missed, varying = visit([(10, 300, 0), (60, 300, 250), (10, 300, 0)], varying=True)
    missed[600:700] = True
    (found,) = hysteresis(t, rate, missed, varying, 0.99)
    assert (found.verdict, found.after.n, found.recovery_s) == ("recovers", 150, 100.0)
    (said,) = findings([found])
    assert "the last miss 100 s after the peak" in said.text


def test_a_ramp_falls_into_bins() -> None:
    up = np.linspace(4, 40, 1200)
    rate = np.concatenate([up, up[::-1]])
    missed = rate > 30
    missed[1200:] |= (rate[1200:] > 15) & (np.arange(1200) % 3 == 0)  # a third stays late on the way down, above 15/s
    found = hysteresis(np.arange(2400.0), rate, missed, np.ones(2400, bool), 0.99)
    # eight bins of 4.5 from 4: the way back is worse from the bin 13 to 17.5 on
    assert [h.verdict for h in found if h.offered_qps < 13] == ["recovers"] * 2
    assert {h.verdict for h in found if 17.5 < h.offered_qps < 30} == {"degraded"}
    assert findings(found)[0].code == "DIA-HYSTERESIS.degraded"


def test_the_interval_is_newcombes() -> None:
    """56/70 against 48/80: difference .2 with .0524 to .3339 by method 10 (Newcombe 1998, table II)."""
    sides = [Interval(k / n, *wilson(k, n), n=n) for k, n in ((48, 80), (56, 70))]
    found = newcombe(*sides)
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_a_sweep_that_comes_back_is_in_the_document(tmp_path: Path) -> None:
    specs = [StageSpec(8, 40, 5), StageSpec(80, 40, 5), StageSpec(8, 40, 5, repeat=1)]
    found = analyse(write_run(tmp_path / "r", specs, Service(mu=4.4), target_qps=8))
    back = from_json(to_json(found))
    assert [h.verdict for h in back.hysteresis] == ["recovers"] and back.hysteresis == found.hysteresis


def test_a_burst_in_the_virtual_engine_leaves_a_backlog(tmp_path: Path) -> None:
    """A third of 60 s at eight times the capacity: the backlog outlasts the run, and the engine's own record says so."""
    config = tmp_path / "c.json"
    config.write_text(json.dumps({
        "engine": {"embedded": True, "profile": "reference-shape", "noise_cv": 0.0},
        "admission": {"reject_on_budget_exceed": False}, "loadgen": {"target_qps": 10},
        "scheduler": {"policy": "fcfs", "batch_size_cap": 32, "max_num_seqs": 32},
    }))  # fmt: skip
    folder = tmp_path / "run"
    CliRunner().invoke(main, ["simulate", "-c", str(config), "--shape", "spike", "--qps", "10,200", "--stage-duration",
                              "60", "--run-dir", str(folder), "-q"])  # fmt: skip
    found = analyse(folder)
    (h,) = found.hysteresis
    assert h.verdict == "degraded" and h.after.value == 0.0 and h.before.value is not None and h.before.value > 0.97
    assert any(r.reason_id == "DIA-HYSTERESIS" for r in found.diagnosis)


def test_two_ramps_with_a_gap_between_their_rates() -> None:
    """Rates 10 to 12 and 30 to 40: no arrival lies between, and none is asked for there."""
    rate = np.concatenate([np.linspace(10, 12, 300), np.linspace(30, 40, 300)])
    found = hysteresis(np.arange(600.0), rate, np.zeros(600, bool), np.ones(600, bool), 0.99)
    assert found == []  # one pass upwards has no second side
