"""Shapes become stages; a plan survives JSON; bad arguments name the key to change."""



from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.config.schema import Config
from bench.workload.plan import SHAPES, Plan, PlanError, Stage, build_plan, stage_seed


def config(**sections) -> Config:
    return Config.model_validate(sections)


def rates(plan: Plan) -> list[float]:
    return [stage.offered_qps for stage in plan.stages]


def test_the_default_sweep_is_5_to_40_by_5():
    plan = build_plan(Config())
    assert rates(plan) == [5, 10, 15, 20, 25, 30, 35, 40]
    assert [stage.name for stage in plan.stages][:3] == ["00 chat @5", "01 chat @10", "02 chat @15"]
    assert [stage.index for stage in plan.stages] == list(range(8))
    # 300 s with the first tenth, at most 30 s, as warm-up
    assert {(s.duration_s, s.warmup_s, s.window_s, s.drain_limit_s) for s in plan.stages} == {(300, 30, 270, 60)}
    assert plan.stages[3].expected_arrivals == 6000 and plan.stages[3].expected_window_arrivals == 5400


def test_sweep_with_repeats_runs_the_whole_list_again():
    plan = build_plan(config(sweep={"qps": [5, 10], "repeats": 2}))
    assert [(s.offered_qps, s.repeat) for s in plan.stages] == [(5, 0), (10, 0), (5, 1), (10, 1)]
    assert [s.name for s in plan.stages] == ["00 chat @5", "01 chat @10", "02 chat @5", "03 chat @10"]


def test_durations_of_the_stages():
    # 100 arrivals at 5/s: 20 s + 2 s warm-up; at 10/s: 10 + 2; at 25/s: 4 + 2 < 10, so 10
    plan = build_plan(config(
        loadgen={"target_qps": 15, "duration_sec": 10},
        sweep={"qps": [5, 10, 15, 25], "target_duration_sec": 45, "warmup_sec": 2, "min_window_arrivals": 100},
    ))  # fmt: skip
    assert [s.duration_s for s in plan.stages] == [22, 12, 45, 10]
    assert [s.duration_s for s in build_plan(config(loadgen={"duration_sec": 10}), duration_s=7).stages] == [7] * 8
    assert {s.duration_s for s in build_plan(config(sweep={"stage_duration_sec": 60})).stages} == {60}


def test_arguments_go_before_the_config():
    plan = build_plan(Config(), "sweep", qps=[3.5, 7], duration_s=20, repeats=2, seed=99)
    assert rates(plan) == [3.5, 7, 3.5, 7] and plan.run_seed == 99
    assert {s.duration_s for s in plan.stages} == {20}


def test_repeat_single_and_smoke():
    assert [(s.offered_qps, s.repeat) for s in build_plan(Config(), "repeat").stages] == [(20, 0), (20, 1), (20, 2)]
    assert len(build_plan(Config(), "repeat", repeats=5).stages) == 5
    assert rates(build_plan(Config(), "single")) == [20] and rates(build_plan(Config(), "single", qps=[9])) == [9]
    (smoke,) = build_plan(Config(), "smoke").stages
    assert (smoke.offered_qps, smoke.duration_s) == (2, 30)


def test_ramp():
    (ramp,) = build_plan(Config(), "ramp").stages
    assert (ramp.offered_qps, ramp.ramp_to_qps, ramp.warmup_s, ramp.name) == (5, 40, 0, "00 chat @5-40")
    assert ramp.expected_arrivals == 6750  # (5 + 40)/2 x 300
    assert (ramp.rate_at(0), ramp.rate_at(150), ramp.rate_at(300)) == (5, 22.5, 40)
    (bent,) = build_plan(Config(), "ramp", qps=[10, 20, 10], duration_s=60).stages
    assert bent.rate_at(30) == 20 and bent.expected_arrivals == 900  # 15 x 60
    assert bent.offered_qps == 15  # the mean


def test_spike():
    (spike,) = build_plan(Config(), "spike", qps=[10, 40], duration_s=30).stages
    #  10 for 10 s, 40 for 10 s, 10 for 10 s
    assert [spike.rate_at(t) for t in (0, 9.9, 10, 19.9, 20, 29.9)] == [10, 10, 40, 40, 10, 10]
    assert spike.expected_arrivals == 600 and spike.offered_qps == 20 and spike.name == "00 chat @10^40"
    (default,) = build_plan(Config(), "spike").stages
    assert (default.rate_at(0), default.rate_at(150)) == (20, 60)


@pytest.mark.parametrize(("arguments", "words"), [
    ({"shape": "replay"}, "loadgen.trace_file"), ({"shape": "ramp", "qps": [5.0]}, "two rates"), ({"shape": "zigzag"}, "no shape 'zigzag'"),
    ({"qps": [0.0]}, "qps holds 0"), ({"qps": [1e-300]}, "between 0.0001 and 100000"), ({"qps": [float("nan")]}, "qps holds nan"), ({"qps": [1e9]}, "qps holds 1e"), ({"duration_s": -1}, "duration is -1"),
    ({"repeats": 0}, "repeats is 0"), ({"qps": [100_000.0], "duration_s": 600_000}, "at most 5000000"), ({"duration_s": float("nan")}, "duration is nan"),
])  # fmt: skip
def test_plans_that_cannot_be(arguments, words):
    with pytest.raises(PlanError, match=words):
        build_plan(Config(), **arguments)


def test_a_warm_up_as_long_as_the_stage():
    with pytest.raises(PlanError, match=r"sweep\.warmup_sec is 10, stage 0 lasts 5 s"):
        build_plan(config(sweep={"warmup_sec": 10}), duration_s=5)


def test_files_that_are_missing():
    with pytest.raises(PlanError, match="No such file"):
        build_plan(config(loadgen={"output_len_dist": "empirical", "output_len_file": "/nonexistent/x"}))
    with pytest.raises(PlanError, match="No such file"):
        build_plan(config(loadgen={"arrival_process": "trace", "trace_file": "/nonexistent/x"}))
    with pytest.raises(PlanError, match="output_len_file"):
        build_plan(config(loadgen={"output_len_dist": "empirical"}))


def test_seeds_of_stages():
    one = build_plan(Config())
    # by rate, not by place: the stage at 20 alone, in another list, and in the sweep
    alone = build_plan(Config(), "single", qps=[20.0]).stages[0].seed
    assert (
        {alone}
        == {s.seed for s in one.stages if s.offered_qps == 20}
        == {s.seed for s in build_plan(Config(), qps=[20.0, 5.0]).stages if s.offered_qps == 20}
    )
    assert len({s.seed for s in one.stages}) == 8
    assert all(0 <= s.seed < 2**53 for s in one.stages)
    assert build_plan(Config(), seed=1).stages[0].seed != one.stages[0].seed
    same = build_plan(config(sweep={"repeats": 3}))
    assert len({s.seed for s in same.stages}) == 8
    different = build_plan(config(sweep={"repeats": 3, "repeat_seed": "different"}))
    assert len({s.seed for s in different.stages}) == 24
    assert [s.seed for s in different.stages][:8] == [s.seed for s in one.stages]


def test_close_rates_have_seeds_of_their_own():
    assert len({stage_seed(1, ((0.0, 20 + i * 1e-6), (10.0, 20 + i * 1e-6)), 0) for i in range(100)}) == 100


def test_names_are_unique_and_start_with_the_index():
    plan = build_plan(Config(), repeats=3)
    names = [stage.name for stage in plan.stages]
    assert len(set(names)) == len(names) and [int(name[:2]) for name in names] == list(range(24))
    assert build_plan(config(target={"endpoint": "completions"})).stages[0].name == "00 completions @5"


rate = st.floats(0.01, 500)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([s for s in SHAPES if s != "replay"]),
    st.lists(rate, min_size=2, max_size=4),
    st.floats(1, 100),
    st.integers(0, 2**63 - 1),
    st.integers(1, 3),
)
def test_any_plan_survives_json_to_the_last_bit(shape, qps, duration, seed, repeats):
    plan = build_plan(
        config(tenants=[{"name": "a", "share": 0.3}, {"name": "b", "share": 0.7}], classes=[{"name": "c", "share": 1}]),
        shape,
        qps=qps,
        duration_s=duration,
        seed=seed,
        repeats=repeats,
    )
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.stages == plan.stages and hash(again) == hash(plan)
    for stage in plan.stages:
        assert (
            isinstance(stage, Stage) and stage.levels()[0][0] == 0 and stage.levels()[-1][0] == pytest.approx(duration)
        )


def test_plans_of_another_version_are_refused():
    text = build_plan(Config()).to_json().replace('"format":1', '"format":3')
    with pytest.raises(ValueError, match="use one version everywhere"):
        Plan.from_json(text)
