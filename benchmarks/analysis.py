"""How fast and how small the analysis is: one generated run of 1,000,000 rows, analysed once in a fresh process.

Usage: python -m benchmarks.analysis [--rows N] [--repeat K]
Output: one JSON object as the last line: {rows, wall_s, peak_rss_mb} (median wall, largest RSS of K runs).
Does not: measure the writing of the rows.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.records.digests import file_digests
from bench.records.request import FIELD_NAMES
from bench.records.stage import INFLIGHT_COLUMNS, STAGE_COLUMNS

STAGES = 10
WORKERS = 4
CELLS = {
    "stage": "{stage}", "arrival": "{i}", "worker": "{worker}", "repeat": "0", "offered_qps": "{qps}",
    "phase": "{phase}",
    "request_id": "req-{stage:02d}-{i:08d}-5f3a", "status": "ok", "http_status": "200", "finish_reason": "length",
    "intended_s": "{intended:.9f}", "sent_s": "{sent:.9f}", "headers_s": "{headers:.9f}",
    "first_token_s": "{first:.9f}",
    "first_content_s": "{first:.9f}", "last_token_s": "{last:.9f}", "done_s": "{done:.9f}", "send_lag_s": "{lag:.9f}",
    "ttft_s": "{ttft:.9f}", "ttfo_s": "{ttft:.9f}", "tpot_s": "{tpot:.9f}", "e2e_s": "{e2e:.9f}",
    "residence_s": "{residence:.9f}", "input_tokens": "{prompt}", "prompt_tokens": "{prompt}", "max_tokens": "{tokens}",
    "output_tokens": "{tokens}", "output_tokens_source": "usage", "chunks": "{tokens}", "reads": "3",
    "bytes_in": "{size}", "connection": "reused", "clock": "kernel", "read_mode": "lazy", "reader_lag_s": "0.000123",
}  # fmt: skip
ROW = ",".join(CELLS.get(name, "") for name in FIELD_NAMES) + "\n"


def write_run(folder: Path, rows: int) -> None:
    """A run of `rows` arrivals in ten stages: Poisson arrivals, lognormal answers, no queue."""
    rng = np.random.default_rng(1)
    per_stage = rows // STAGES
    start, stages, gauge = 1.0, [], []
    with (folder / "requests.csv").open("w", encoding="utf-8") as out:
        out.write(",".join(FIELD_NAMES) + "\n")
        for stage in range(STAGES):
            qps = 100.0 * (stage + 1)
            count = per_stage if stage < STAGES - 1 else rows - per_stage * (STAGES - 1)
            arrival = start + np.cumsum(rng.exponential(1 / qps, count))
            lag = rng.exponential(0.0003, count)
            ttft = lag + rng.lognormal(np.log(0.02), 0.4, count)
            tokens = np.maximum(2, rng.lognormal(4.4, 0.6, count).astype(int))
            last = arrival + ttft + rng.lognormal(np.log(0.008), 0.1, count) * (tokens - 1)
            prompt = rng.integers(100, 2001, count)
            end = float(arrival[-1]) + 0.5 / qps
            warm = start + 0.1 * (end - start)
            arrays = (arrival, lag, ttft, tokens, last, prompt)
            columns = zip(*(a.tolist() for a in arrays), strict=True)
            for i, (t, late, wait, n, finish, p) in enumerate(columns):
                out.write(ROW.format(
                    stage=stage, i=i, worker=i % WORKERS, qps=qps, phase="warmup" if t < warm else "window",
                    intended=t, sent=t + late, headers=t + late + 0.001, first=t + wait, last=finish,
                    done=finish + 0.0001, lag=late, ttft=wait, tpot=(finish - t - wait) / (n - 1), e2e=finish - t,
                    residence=finish + 0.0001 - t - late, prompt=p, tokens=n, size=220 * n,
                ))  # fmt: skip
            drained = float(last.max()) + 0.001
            name = f"{stage:02d} chat @{qps:g}"
            row = (stage, 0, name, qps, "poisson", "open", stage, count, start, warm, end, end, drained)
            stages.append((*row, WORKERS, count, "0" * 64, ""))
            gauge.extend(_gauge(arrival + lag, last + 0.0001, start, drained, stage))
            start = drained + 1.0
    _write(folder / "stages.csv", STAGE_COLUMNS, stages)
    _write(folder / "inflight.csv", INFLIGHT_COLUMNS, gauge)
    config = {
        "slo": {"ttft_deadline_ms": 800, "tpot_deadline_ms": 100, "p95_target_ms": 2000, "attainment_target": 0.99},
        "loadgen": {"target_qps": 500},
    }
    run = {"schema_version": 1, "run_id": "benchmark", "config": config, "files": file_digests(folder)}
    (folder / "run.json").write_text(json.dumps(run))


def _gauge(sent: np.ndarray, done: np.ndarray, start: float, end: float, stage: int) -> list[tuple]:
    samples = []
    for worker in range(WORKERS):
        t = np.arange(start, end, 0.1)
        mine = slice(worker, None, WORKERS)
        level = np.searchsorted(np.sort(sent[mine]), t) - np.searchsorted(np.sort(done[mine]), t)
        samples += [(f"{x:.6f}", worker, stage, int(n), 0.001, 0.4, 90_000_000) for x, n in zip(t, level, strict=True)]
    return samples


def _write(path: Path, columns: tuple[str, ...], rows: list[tuple]) -> None:
    with path.open("w", encoding="utf-8") as out:
        out.write(",".join(columns) + "\n")
        out.writelines(",".join(str(v) for v in row) + "\n" for row in rows)


def measure(folder: Path) -> tuple[float, float]:
    """(wall seconds, peak RSS in MB) of `bench analyse` in a fresh process, imports included."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", "analyse", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    message = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1, 4):
        raise RuntimeError(f"bench analyse ended with {process.returncode}: {message.decode()[-500:]}")
    return wall, usage.ru_maxrss / 1024


def main() -> None:
    """Print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-analysis-") as name:
        folder = Path(name)
        write_run(folder, options.rows)
        size = (folder / "requests.csv").stat().st_size
        print(f"{options.rows} rows, {size / 1e6:.0f} MB", file=sys.stderr)
        runs = [measure(folder) for _ in range(options.repeat)]
    print(json.dumps({
        "rows": options.rows,
        "wall_s": round(statistics.median(w for w, _ in runs), 3),
        "peak_rss_mb": round(max(r for _, r in runs), 1),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
