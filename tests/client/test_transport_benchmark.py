"""The benchmark of the client: its arithmetic, and one short run of the whole."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.client import Result, percentile, summary

ROOT = Path(__file__).parents[2]


def test_percentiles_are_nearest_rank() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    # rank = ceil(share * n): 50, 99, 100 of 1..100
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([7.0], 0.99) == 7.0


def test_ratios_pair_the_repetitions() -> None:
    def results(*rates: float) -> list[Result]:
        return [Result(rate, 1.0, [0.1], [0.2], [0.3], [0.4], 50.0, 1.0) for rate in rates]

    said = summary({"lazy": results(100.0, 300.0, 900.0), "prompt": results(20.0, 40.0, 90.0),
                    "fasthttp": results(10.0, 20.0, 30.0)}, results(5.0)[0], results(6.0)[0])
    assert said["ratio_lazy"] == 15.0  # median of 10, 15, 30
    assert said["ratio_prompt"] == 2.0  # median of 2, 2, 3
    assert said["chunks_per_cpu_s_lazy"] == 300.0 and said["fasthttpuser_chunks_per_cpu_s"] == 20.0


@pytest.mark.slow
def test_a_short_run_measures_everything() -> None:
    command = [sys.executable, "-m", "benchmarks.client", "--rate", "20", "--tokens", "40", "--seconds", "3",
               "--repeats", "1", "--side-seconds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=ROOT, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    for key in ("chunks_per_cpu_s_lazy", "chunks_per_cpu_s_prompt", "chunks_per_s", "ttft_err_p50_ms", "ttft_err_p99_ms",
                "e2e_err_p99_ms", "blocked_loop_ttft_err_p99_ms", "rss_mb", "fasthttpuser_chunks_per_cpu_s",
                "ratio_lazy", "ratio_prompt", "new_connection_connect_p50_ms"):
        assert said[key] == said[key] and said[key] > -1.0, key  # no NaN
    assert said["complete_ratio"] > 0.95  # (almost) every answer was read to its end
    assert 600.0 < said["chunks_per_s"] < 1000.0  # 20 requests * 40 tokens a second
    assert said["ttft_err_p50_ms"] < 1.0
