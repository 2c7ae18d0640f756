"""Speed and memory of the simulator: `python -m benchmarks.simulate [--trace PATH] [--quick]`.

Prints one line of JSON:
  requests_per_s     finished requests per second of CPU, one replica H100-8B, 32 sequences, 5 to 7.5 requests/s of
                     the reference lengths, with jump-ahead, rows made
  step_requests_per_s  the same without jump-ahead
  sweep_s            CPU seconds of the 5-to-40 sweep x 300 s x 3 seeds on four replicas, rows made
  azure_conv_s       CPU seconds to replay the trace at --trace on one replica with 128 sequences; null without it
  bytes_per_request  growth of the traced heap per arrival of an overloaded stage, its outcomes kept
CPU seconds, because the machine may be shared; wall seconds are in the `wall` part.
"""
from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

from bench.config import load_config
from bench.workload.plan import build_plan
from engine.simulate import simulate_stages

BASE: dict[str, Any] = {
    "scheduler.policy": "fcfs", "scheduler.batch_size_cap": 32, "admission.reject_on_budget_exceed": False,
}


def run(
    shape: str = "sweep", *, jump: bool = True, repeats: int | None = None, **keys: Any
) -> tuple[int, float, float]:
    """(rows, CPU s, wall s) of one simulation."""
    config = load_config(None, env={}, overrides={**BASE, **keys}).config
    plan = build_plan(config, shape, repeats=repeats)
    cpu, wall, rows = time.process_time(), time.perf_counter(), 0
    for result in simulate_stages(plan, config, jump=jump):
        rows += sum(1 for _ in result.rows())
    return rows, time.process_time() - cpu, time.perf_counter() - wall


def bytes_per_request() -> float:
    """Heap growth per arrival, with the outcomes of the stage kept and the rows streamed."""
    keys = {"sweep.qps": [12.0], "loadgen.duration_sec": 300.0, "target.first_token_timeout_sec": 10.0}
    config = load_config(None, env={}, overrides={**BASE, **keys}).config
    plan = build_plan(config)
    list(simulate_stages(plan, config))  # caches and imports
    gc.collect()
    tracemalloc.start()
    results = list(simulate_stages(plan, config))
    rows = sum(1 for _ in results[0].rows())
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return grown / rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=None, help="an Azure or Mooncake trace to replay")
    parser.add_argument("--quick", action="store_true", help="one seed, a tenth of the sweep's length")
    options = parser.parse_args()
    seconds = 30.0 if options.quick else 300.0
    one = {"sweep.qps": [5.0, 6.25, 7.5], "loadgen.duration_sec": seconds}
    rows, cpu, _ = run(**one)
    step_rows, step_cpu, _ = run(jump=False, **one)
    _, sweep_cpu, sweep_wall = run(
        repeats=1 if options.quick else 3, **{"engine.replicas": 4, "sweep.repeat_seed": "different",
                                              "loadgen.duration_sec": seconds})
    azure = azure_wall = None
    if options.trace is not None:
        _, azure, azure_wall = run("replay", **{
            "loadgen.trace_file": str(options.trace), "loadgen.arrival_process": "trace", "engine.max_model_len": 16384,
            "scheduler.max_num_seqs": 128, "scheduler.batch_size_cap": 128})
    print(json.dumps({
        "requests_per_s": round(rows / cpu), "step_requests_per_s": round(step_rows / step_cpu),
        "sweep_s": round(sweep_cpu, 2), "azure_conv_s": None if azure is None else round(azure, 2),
        "bytes_per_request": round(bytes_per_request()),
        "wall": {"sweep_s": round(sweep_wall, 2), "azure_conv_s": None if azure_wall is None else round(azure_wall, 2)},
    }))


if __name__ == "__main__":
    main()
