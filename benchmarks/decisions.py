"""What the online decisions are worth and cost, in virtual time, as one line of JSON.

    python -m benchmarks.decisions            (under 3 minutes of CPU)
    python -m benchmarks.decisions --rollouts 20 --seeds 2

attainment_gain      derived early rejection minus plain FCFS, attainment over ALL arrivals, mean over 1.0 to 1.5 times
                     the knee and over the seeds; the limits are what `bench plan` derives from a simulated sweep.
                     `gain` has it per multiple: at the knee itself FCFS still attains most by the meaning of the word,
                     so no policy can gain more than what it lacks there. `capacity_share` is what serving at full
                     capacity, and nobody late, could attain: lambda_max / rate
decision_p99_us      CPU time per request at 1,000 waiting, worst policy
false_rollback_rate  A/A: both policies equal, gray stage of 2,000 requests near the knee; share rolled back
detection_rate       A/B: the new policy loses about 10 points of attainment (`planted_loss`); share rolled back within
                     2,000 requests of both arms
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.commands.plan import plan_document
from bench.config import load_config
from bench.workload.plan import build_plan
from bench.workload.schedule import build_schedule
from control.rollout import Gate, Rollout, StageSpec, StageWatch, gray_tenants
from engine.arms import Traffic, serve, split, traffic_of
from engine.compare import samples
from engine.decision_time import decision_us
from engine.settings import POLICIES, EngineConfig

DEMO = Path(__file__).resolve().parents[1] / "configs" / "demo.json"
MULTIPLES = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
NAMES = tuple(f"tenant-{i:03d}" for i in range(40))
GRAY = StageSpec("gray", 2000, share=0.5)
ROLLOUT = Rollout(
    "benchmark",
    (StageSpec("replay", 2000), StageSpec("shadow", 2000), GRAY, StageSpec("full", 2000)),
    (Gate("attainment", 0.02, 0.10), Gate("preemptions", 0.2, 1.0)),
)
AA_QPS, AB_QPS = 20.0, 17.0  # per replica: where 1 % of the arrivals miss, and where the planted policy loses 10 points


def derived_plan() -> dict[str, Any]:
    """What `bench plan --simulate configs/demo.json` says."""
    from bench.commands.plan import _run_folder

    with _run_folder(None, DEMO) as folder:
        return plan_document(folder)


def gain(plan: dict[str, Any], seeds: int) -> dict[str, Any]:
    """Attainment of FCFS without limits and with the derived ones, per multiple of the knee."""
    plain = load_config(DEMO).config
    planned = load_config(DEMO, overrides=plan["settings"]).config
    rates = [round(m * plan["knee_qps"], 3) for m in MULTIPLES]
    table: dict[str, list[list[float]]] = {"fcfs": [[] for _ in rates], "planned": [[] for _ in rates]}
    for seed in range(1, seeds + 1):
        for name, config in (("fcfs", plain), ("planned", planned)):
            load = build_plan(plain, "sweep", qps=rates, duration_s=60.0, seed=seed)
            for i, sample in enumerate(samples(name, load, config, EngineConfig.from_config(config))):
                table[name][i].append(sample.met / sample.arrivals)
    fcfs, new = np.array(table["fcfs"]), np.array(table["planned"])
    per_seed = (new - fcfs).mean(axis=0)
    return {
        "attainment_gain": float(per_seed.mean()),
        "attainment_gain_min_seed": float(per_seed.min()),
        "multiples": list(MULTIPLES),
        "gain": (new - fcfs).mean(axis=1).round(4).tolist(),
        "capacity_share": [round(min(1.0, plan["lambda_max_qps"] / rate), 4) for rate in rates],
        "fcfs": fcfs.mean(axis=1).round(4).tolist(),
        "planned": new.mean(axis=1).round(4).tolist(),
    }


def decision(requests: int) -> dict[str, float]:
    """p99 of the decision time per policy, microseconds, with all budgets on."""
    config = load_config(
        DEMO, overrides={"admission.reject_on_budget_exceed": True, "admission.max_num_queued_reqs": 100_000}
    ).config
    engine = EngineConfig.from_config(config).with_(hopeless="keep")
    return {
        policy: float(
            np.quantile(decision_us(engine.with_(policy=policy), requests=requests), 0.99, method="inverted_cdf")
        )
        for policy in POLICIES
    }


def gray_load(seed: int, qps: float, config: Any) -> Traffic:
    """2,000 arrivals for two replicas."""
    load = build_plan(config, "single", qps=[2 * qps], duration_s=2000 / (2 * qps) * 1.3, seed=seed)
    return traffic_of(load, build_schedule(load, load.stages[0]), config, NAMES, seed, GRAY.requests)


def rolled_back(old: EngineConfig, new: EngineConfig, traffic: Traffic, seed: int) -> int:
    """Requests of both arms until the gray stage was rolled back; 0 = it passed."""
    tenants = gray_tenants(dict.fromkeys(NAMES, 1.0), GRAY.share, f"benchmark-{seed}")
    watch = StageWatch(ROLLOUT, GRAY)
    for a, b in split(old, new, traffic, tenants, GRAY.block, seed):
        if any(j.status == "failed" for j in watch.add(a, b)):
            return watch.requests
    return 0


def planted(engine: EngineConfig) -> EngineConfig:
    """A policy that refuses too early: a small batch and nobody may wait."""
    assert engine.admission is not None
    return engine.with_(batch_size_cap=21, admission=replace(engine.admission, reject=True, max_queued_requests=1))


def rollouts(count: int) -> dict[str, Any]:
    """A/A and A/B rollouts of the gray stage."""
    config = load_config(DEMO).config
    good = EngineConfig.from_config(config).with_(replicas=2)
    bad = planted(good)
    false, found, loss = 0, [], []
    for i in range(count):
        false += rolled_back(good, good, gray_load(10_000 + i, AA_QPS, config), i) > 0
        traffic = gray_load(20_000 + i, AB_QPS, config)
        found.append(rolled_back(good, bad, traffic, i))
        if i < 20:
            met = [np.mean([s.met for s in serve(e, traffic, i)]) for e in (good, bad)]
            loss.append(float(met[0] - met[1]))
    seen = [n for n in found if n]
    return {
        "false_rollback_rate": false / count,
        "detection_rate": len(seen) / count,
        "requests_to_rollback_median": float(np.median(seen)) if seen else None,
        "requests_to_rollback_max": max(seen, default=None),
        "planted_loss": round(float(np.mean(loss)), 4),
        "rollouts": count,
    }


def main(arguments: list[str] | None = None) -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description="What the online decisions are worth and cost.")
    parser.add_argument("--rollouts", type=int, default=200, help="A/A rollouts, and as many A/B ones (default 200)")
    parser.add_argument("--seeds", type=int, default=10, help="seeds of the attainment gain (default 10)")
    parser.add_argument("--requests", type=int, default=2000, help="decisions timed per policy (default 2000)")
    options = parser.parse_args(arguments)
    begun = time.process_time()
    plan = derived_plan()
    gains = gain(plan, options.seeds)
    per_policy = decision(options.requests)
    rolled = rollouts(options.rollouts)
    print(
        json.dumps(
            {
                "attainment_gain": round(gains.pop("attainment_gain"), 4),
                "decision_p99_us": round(max(per_policy.values()), 1),
                "false_rollback_rate": rolled.pop("false_rollback_rate"),
                "detection_rate": rolled.pop("detection_rate"),
                **rolled,
                **gains,
                "decision_p99_us_by_policy": {k: round(v, 1) for k, v in per_policy.items()},
                "planned_settings": plan["settings"],
                "knee_qps": plan["knee_qps"],
                "cpu_s": round(time.process_time() - begun, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
