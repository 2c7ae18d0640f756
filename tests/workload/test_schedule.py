"""A schedule is a pure function of plan and stage: the same on every worker and machine, each purpose on its own."""



from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.config import load_config
from bench.config.schema import Config
from bench.workload.plan import Plan, build_plan
from bench.workload.schedule import STREAMS, Schedule, build_schedule, plan_hash, stream

ROOT = Path(__file__).resolve().parents[2]
GROUPS = {"tenants": [{"name": "a", "share": 0.2}, {"name": "b", "share": 0.8}],
          "classes": [{"name": "x", "share": 0.5}, {"name": "y", "share": 0.25}, {"name": "z", "share": 0.25}]}  # fmt: skip
COLUMNS = ("intended_s", "input_tokens", "max_tokens", "prompt_seed", "tenant", "request_class")


def one(config: Config | None = None, shape: str = "single", **more) -> tuple[Plan, Schedule]:
    plan = build_plan(config or Config.model_validate(GROUPS), shape, **more)
    return plan, build_schedule(plan, plan.stages[0])


def differing(a: Schedule, b: Schedule) -> set[str]:
    return {name for name in COLUMNS if not np.array_equal(getattr(a, name), getattr(b, name))}


def test_shape_and_types():
    _, schedule = one()
    assert all(len(getattr(schedule, name)) == len(schedule) for name in COLUMNS)
    assert schedule.intended_s.dtype == np.float64 and schedule.prompt_seed.dtype == np.uint64
    assert (np.diff(schedule.intended_s) >= 0).all() and schedule.intended_s[0] >= 0 and schedule.intended_s[-1] < 300
    assert len(np.unique(schedule.prompt_seed)) == len(schedule)
    # whole microseconds: a CSV cell of nine decimals holds them exactly
    assert np.array_equal(schedule.intended_s, np.round(schedule.intended_s, 9))
    assert all(float(repr(round(t, 9))) == t for t in schedule.intended_s[:100].tolist())


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_the_stripes_of_all_workers_are_the_whole_stage(workers):
    plan, schedule = one()
    text = plan.to_json()
    arrivals: list[int] = []
    for worker in range(workers):
        mine = Plan.from_json(text)  # each worker computes the stage by itself
        own = build_schedule(mine, mine.stages[0])
        assert own.hash == schedule.hash and differing(own, schedule) == set()
        stripe = own.stripe(worker, workers)
        assert all(i % workers == worker for i in stripe)
        arrivals += stripe.tolist()
    assert sorted(arrivals) == list(range(len(schedule)))


def test_each_purpose_has_a_stream_of_its_own():
    assert len(set(STREAMS.values())) == len(STREAMS)
    plan, base = one()
    for change, touched in (
        ({"loadgen": {"output_len_mu": 5.0}}, {"max_tokens"}),
        ({"loadgen": {"input_len_range": [1, 50]}}, {"input_tokens"}),
        ({"loadgen": {"output_len_dist": "fixed", "output_len_fixed": 9}}, {"max_tokens"}),
        ({"tenants": []}, {"tenant"}),
        ({"classes": []}, {"request_class"}),
    ):
        _, other = one(Config.model_validate({**GROUPS, **change}))
        assert differing(base, other) == touched
    first = {purpose: stream(plan.stages[0], purpose).integers(0, 2**63) for purpose in STREAMS}
    assert len(set(first.values())) == len(STREAMS)


def test_streams_are_not_correlated():
    _, schedule = one(duration_s=3000)
    n = len(schedule)
    gaps = np.diff(schedule.intended_s, prepend=0)
    columns = [
        gaps,
        schedule.input_tokens,
        np.log(schedule.max_tokens),
        schedule.tenant,
        schedule.request_class,
        schedule.prompt_seed.astype(float),
    ]
    matrix = np.corrcoef(columns)
    off = matrix[~np.eye(len(columns), dtype=bool)]
    assert np.abs(off).max() < 5 / np.sqrt(n)


def test_shares_of_tenants_and_classes():
    _, schedule = one(duration_s=3000)
    n = len(schedule)
    for column, shares in ((schedule.tenant, (0.2, 0.8)), (schedule.request_class, (0.5, 0.25, 0.25))):
        for index, share in enumerate(shares):
            assert abs((column == index).mean() - share) < 4 * np.sqrt(share * (1 - share) / n)


def test_seed_stage_and_repeat_change_the_load():
    plan = build_plan(Config(), "sweep", qps=[20.0, 21.0], duration_s=60)
    a, b = (build_schedule(plan, stage) for stage in plan.stages)
    assert differing(a, b) >= {"intended_s", "input_tokens", "max_tokens", "prompt_seed"}
    assert one(seed=1)[1].hash != one(seed=2)[1].hash == one(seed=2)[1].hash
    repeats = build_plan(Config(), "repeat", duration_s=60)
    assert len({build_schedule(repeats, stage).hash for stage in repeats.stages}) == 1
    different = build_plan(Config.model_validate({"sweep": {"repeat_seed": "different"}}), "repeat", duration_s=60)
    assert len({build_schedule(different, stage).hash for stage in different.stages}) == 3


def test_a_longer_stage_begins_like_a_shorter_one():
    short, long = one(duration_s=60)[1], one(duration_s=90)[1]
    n = len(short)
    assert np.array_equal(short.intended_s, long.intended_s[:n]) and np.array_equal(
        short.max_tokens, long.max_tokens[:n]
    )


def test_the_hash_covers_every_column_and_the_plan_hash_every_stage():
    plan, schedule = one()
    hashes = {schedule.hash}
    for change in (
        {"output_len_mu": 5.0},
        {"input_len_range": [100, 1999]},
        {"target_qps": 20.000001},
        {"burstiness": 0.5, "arrival_process": "gamma"},
    ):
        hashes.add(one(Config.model_validate({**GROUPS, "loadgen": change}))[1].hash)
    hashes.add(
        one(Config.model_validate({**GROUPS, "tenants": [{"name": "a", "share": 0.8}, {"name": "b", "share": 0.2}]}))[
            1
        ].hash
    )
    assert len(hashes) == 6
    sweep = build_plan(Config(), qps=[5.0, 10.0], duration_s=20)
    assert (
        plan_hash(sweep)
        != plan_hash(replace(sweep, stages=sweep.stages[:1]))
        != plan_hash(replace(sweep, stages=sweep.stages[::-1]))
    )
    assert plan_hash(Plan.from_json(sweep.to_json())) == plan_hash(sweep)
    assert len(plan_hash(plan)) == 64


# Golden hashes: another numpy, another machine or a change here must not move one arrival unnoticed.
# They were written by this code; that the numbers behind them are right is shown by the tests of the laws.
GOLDEN = {
    "constant": "5a7b67050e165fd4",
    "poisson": "ef3fb50e86c14040",
    "gamma": "37fb5ff56d57512d",
    "ramp": "730fd4e3466d8ff3",
}


def golden_schedules() -> dict[str, str]:
    load = {
        "constant": {"arrival_process": "constant"},
        "poisson": {},
        "gamma": {"arrival_process": "gamma", "burstiness": 0.25},
        "ramp": {},
    }
    return {
        name: one(
            Config.model_validate({**GROUPS, "loadgen": changes}),
            "ramp" if name == "ramp" else "single",
            seed=42,
            duration_s=60,
        )[1].hash
        for name, changes in load.items()
    }


def test_golden_hashes():
    assert {name: value[:16] for name, value in golden_schedules().items()} == GOLDEN


def test_a_processor_without_vector_units_computes_the_same_load():
    code = (
        "from bench.config.schema import Config; from bench.workload.plan import build_plan; from bench.workload.schedule import plan_hash;"
        "c = Config.model_validate({'loadgen': {'arrival_process': 'gamma', 'burstiness': 0.4}});"
        "print(plan_hash(build_plan(c, 'ramp', qps=[3.0, 50.0, 7.0], duration_s=200)), plan_hash(build_plan(Config(), qps=[5.0, 31.7], duration_s=200)))"
    )
    seen = set()
    # Names of this numpy's groups; those that the processor has not are ignored with a warning.
    for features in ("", "X86_V4 AVX512_ICL AVX512_SPR", "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"):
        env = {
            **os.environ,
            "NPY_DISABLE_CPU_FEATURES": features,
            "PYTHONHASHSEED": str(len(features)),
            "PYTHONWARNINGS": "ignore",
        }
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, env=env
        )
        assert done.returncode == 0, done.stderr
        seen.add(done.stdout)
    assert len(seen) == 1 and len(seen.pop()) > 128


def test_the_plan_of_the_demo_is_drawn_in_well_under_a_second():
    import time

    plan = build_plan(load_config(ROOT / "configs" / "scheduler_bench.json", env={}).config)
    start = time.perf_counter()
    plan_hash(plan)  # 54,000 arrivals
    assert time.perf_counter() - start < 1.0  # typical: 0.02 s


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["constant", "poisson", "gamma"]),
    st.floats(0.01, 300),
    st.floats(0.01, 20),
    st.floats(0.05, 20),
    st.integers(0, 2**40),
)
def test_any_stage_has_a_schedule_inside_its_time(process, qps, duration, burstiness, seed):
    config = Config.model_validate({"loadgen": {"arrival_process": process, "burstiness": burstiness, "seed": seed}})
    plan = build_plan(config, "single", qps=[qps], duration_s=duration)
    schedule = build_schedule(plan, plan.stages[0])
    mean = qps * duration
    # 6 sd of a renewal count with cv^2 = 1/burstiness, and room for small counts
    assert abs(len(schedule) - mean) <= 6 * np.sqrt(mean * max(1, 1 / burstiness)) + 6 * max(1, 1 / burstiness)
    if len(schedule):
        assert schedule.intended_s[0] >= 0 and schedule.intended_s[-1] < duration
        assert schedule.max_tokens.min() >= 1 and schedule.max_tokens.max() <= 4096
        assert schedule.input_tokens.min() >= 100 and schedule.input_tokens.max() <= 2000


def test_an_unknown_process_is_refused():
    plan, _ = one()
    with pytest.raises(ValueError, match="process is 'weibull'"):
        build_schedule(plan, replace(plan.stages[0], process="weibull"))
