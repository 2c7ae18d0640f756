"""What a plan will send, and what its stages can decide; Wilson references of the reference notes."""

from __future__ import annotations

import pytest

from analysis.intervals import wilson
from bench.config.schema import Config
from bench.workload.expect import arrivals_to_decide, expect_plan, expect_stages, misses_allowed, wilson_low
from bench.workload.plan import build_plan
from bench.workload.schedule import build_schedule


@pytest.mark.parametrize(
    ("hits", "n", "low"), [(1485, 1500, 0.98357), (4455, 4500, 0.98665), (297, 300, 0.97102), (1500, 1500, 0.99745)]
)
def test_wilson_references(hits, n, low):
    assert wilson_low(hits, n) == pytest.approx(low, abs=5e-6)


def test_the_same_interval_as_the_analysis():
    for n in (1, 7, 80, 381, 6000):
        for hits in {0, n // 2, n - 1, n}:
            assert wilson_low(hits, n) == pytest.approx(wilson(hits, n)[0], abs=1e-12)
    assert wilson_low(0, 0) == 0.0


def test_misses_that_99_percent_allows():
    # reference: none of 300; 7 of 1500, 31 of 4500, 44 of 6000, 58 of 7500
    assert misses_allowed(300, 0.99) is None
    assert [misses_allowed(n, 0.99) for n in (1500, 4500, 6000, 7500)] == [7, 31, 44, 58]


def test_arrivals_that_decide():
    # z^2 0.99/0.01 = 3.8415 x 99 = 380.3
    assert arrivals_to_decide(0.99) == 381
    assert misses_allowed(381, 0.99) == 0 and misses_allowed(380, 0.99) is None
    assert arrivals_to_decide(0.9) == 35  # 3.8415 x 9 = 34.6


def test_sums_over_a_plan():
    plan = build_plan(
        Config.model_validate({"loadgen": {"target_qps": 10}, "sweep": {"warmup_sec": 5, "drain_limit_sec": 7}}),
        qps=[10.0, 20.0],
        duration_s=30,
    )
    stages = expect_stages(plan)
    schedules = [build_schedule(plan, stage) for stage in plan.stages]
    assert [s.arrivals for s in stages] == [len(s) for s in schedules]
    assert [s.window_arrivals for s in stages] == [sum(t >= 5 for t in s.intended_s) for s in schedules]
    assert [s.at_target for s in stages] == [True, False]
    assert [s.schedule_hash for s in stages] == [s.hash for s in schedules]
    total = expect_plan(plan)
    assert total.requests == sum(len(s) for s in schedules)
    assert total.tokens == sum(int(s.input_tokens.sum() + s.max_tokens.sum()) for s in schedules)
    assert (total.arrivals_s, total.longest_s) == (60, 74)


def test_percentiles_that_are_withheld_are_those_of_the_analysis():
    from analysis.percentiles import MIN_SAMPLES
    from bench.workload.expect import PERCENTILE_SAMPLES

    assert {name: MIN_SAMPLES[name] for name in PERCENTILE_SAMPLES} == PERCENTILE_SAMPLES
