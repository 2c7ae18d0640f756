"""Both arms of a rollout meet the shared prompt starts of their arrivals, as a plain simulation does."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.config.schema import Config
from bench.workload.plan import build_plan
from bench.workload.schedule import build_schedule
from engine.arms import Traffic, serve, traffic_of
from engine.blocks import block_names
from engine.request import Request
from engine.settings import EngineConfig
from engine.simulate import simulate_stage
from engine.virtual import drive

TURNS = Path(__file__).resolve().parents[2] / "configs" / "study" / "chat_turns.jsonl"


def traffic(**loadgen) -> tuple[Traffic, Config, EngineConfig]:
    engine = {"prefix_caching": True, "max_model_len": 30_000, "noise_cv": 0.0}
    config = Config.model_validate({"loadgen": loadgen, "engine": engine})
    plan = build_plan(config, "replay" if "trace_file" in loadgen else "single")
    schedule = build_schedule(plan, plan.stages[0])
    return traffic_of(plan, schedule, config, ("a", "b"), 1, 150), config, EngineConfig.from_config(config)


@pytest.mark.parametrize("loadgen", [
    {"trace_file": str(TURNS), "trace_rate_scale": 3.0},
    {"unique_prompts": False, "input_len_range": [800, 800], "target_qps": 4, "duration_sec": 60,
     "output_len_mu": 3.0},
], ids=["trace", "equal prompts"])
def test_an_arm_meets_the_cache_of_a_plain_simulation(loadgen):
    load, config, engine = traffic(**loadgen)
    met = [one.ttft_s for one in serve(engine, load, 1)]
    # second path: the simulation of the same schedule, of which the arm has the first arrivals
    plan = build_plan(config, "replay" if "trace_file" in loadgen else "single")
    plain = simulate_stage(plan, plan.stages[0], config, engine)
    first_s = np.array(plain.outcomes.first_s)[: len(load)] - load.arrival_s
    alone = int(np.searchsorted(load.arrival_s, load.arrival_s[-1] - 5.0))  # later arrivals of the schedule slow the last
    assert met[:alone] == pytest.approx(first_s[:alone].tolist(), abs=1e-9)
    assert sum(plain.outcomes.cached_tokens) > 0
    cold = [one.ttft_s for one in serve(engine.with_(prefix_caching=False), load, 1)]
    assert np.mean(met) < 0.95 * np.mean(cold)


def test_a_gray_arm_keeps_the_prompts_of_its_own_arrivals():
    load, _, engine = traffic(trace_file=str(TURNS), trace_rate_scale=3.0)
    keep = np.arange(len(load)) % 3 != 0
    mine = load.take(keep)
    numbers = np.flatnonzero(keep).tolist()

    def by_hand(i: int) -> Request:
        a, n = numbers[i], int(load.input_tokens[numbers[i]])
        names = block_names(load.schedule.shared, a, n, engine.block_size, int(load.schedule.prompt_seed[a]))
        return Request(str(i), float(load.arrival_s[a]), n, int(load.max_tokens[a]), int(load.output_tokens[a]),
                       index=i, prefix_hashes=names)

    out = drive(engine, [float(load.arrival_s[a]) for a in numbers], by_hand, seed=1)
    expected = [out.first_s[i] - float(load.arrival_s[a]) for i, a in enumerate(numbers)]
    assert [one.ttft_s for one in serve(engine, mine, 1)] == pytest.approx(expected, abs=1e-9)
    assert sum(out.cached_tokens) > 0
