"""What one worker process sends, what a row costs on the wire and on the master, and how that grows with workers.

    python -m benchmarks.scaling                   # about two minutes; the last line is one JSON object
    python -m benchmarks.scaling --quick           # about 40 s
    python -m benchmarks.scaling --master 500      # one master and 500 simulated workers that talk to it as real ones
    python -m benchmarks.scaling --master-ramp     # 100, 200, 400, ... of them, until it does not keep up

Input: none. Output: a table on standard error, one line of JSON on standard output.
Does not: need a service; `engine.null_server` answers with streams of a known length.

1. The load is our whole locustfile under a real Locust: master and worker processes, plan, pacing, rows, ledger.
2. `master_us_per_request` is CPU of the master from a packed batch to its written CSV line when it is busy, which is
   when it matters; `in_run_us_per_request` is the same in the runs here, where it sleeps in between and finds cold
   caches; `master_cpu_us_per_request` is all CPU of the master process in a run, Locust's own messages too.
3. `efficiency` is the rate per worker of N processes over that of one, at the same offered rate per worker. Server,
   master and workers share this machine's cores, so it is a lower bound; `cores` says how many there are.
"""
from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.commands.job_options import PROJECT
from bench.commands.locust_process import free_port

HEARTBEAT_ROWS = 400  # rows a second of each simulated worker under --master


def percentile(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else float("nan")


def run(*, rate: float, tokens: int, seconds: float, workers: int, gap_ms: float) -> dict[str, Any]:
    """One stage of `rate` new streams a second over `workers` processes of their own."""
    folder = Path(tempfile.mkdtemp(prefix="bench-scaling-"))
    server = subprocess.Popen(
        [sys.executable, "-m", "engine.null_server", "--ttft-ms", "20", "--gap-ms", str(gap_ms), "--parent-pid",
         str(os.getpid())], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    children = [server]
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[1]
        config = {
            "model": "null", "base_url": url,
            "loadgen": {"duration_sec": seconds, "target_qps": rate, "arrival_process": "poisson",
                        "input_len_range": [100, 400], "output_len_dist": "fixed", "output_len_fixed": tokens},
            "sweep": {"qps": [rate], "warmup_sec": min(2.0, seconds / 4), "drain_limit_sec": 30},
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        children += start_locust(folder, workers)
        master = psutil.Process(children[1].pid)
        cpu = watch(master, folder / "run" / "run.json", limit_s=seconds + 120)
        return {**read(folder / "run", seconds), "master_cpu_s": cpu}
    finally:
        for child in reversed(children):
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(5)
                except subprocess.TimeoutExpired:
                    child.kill()
        shutil.rmtree(folder, ignore_errors=True)


def start_locust(folder: Path, workers: int) -> list[subprocess.Popen[Any]]:
    """Master first, then the workers."""
    port = str(free_port())
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("BENCH_", "LOCUST_", "TAOTOKEN_"))}
    files = f"{PROJECT / 'locustfiles' / 'chat.py'},{PROJECT / 'shapes' / 'sweep.py'}"
    base = [sys.executable, "-m", "locust", "-f", files, "--only-summary"]
    log = (folder / "log.txt").open("w")
    more: dict[str, Any] = {"env": environment, "stdout": log, "stderr": log, "cwd": PROJECT}
    master = subprocess.Popen(
        [*base, "--headless", "--master", "--expect-workers", str(workers), "--master-bind-host", "127.0.0.1",
         "--master-bind-port", port, "--bench-config", str(folder / "config.json"), "--run-dir", str(folder / "run")],
        **more,
    )  # fmt: skip
    others = [
        subprocess.Popen([*base, "--worker", "--master-host", "127.0.0.1", "--master-port", port], **more)
        for _ in range(workers)
    ]
    return [master, *others]


def watch(master: psutil.Process, run_json: Path, *, limit_s: float) -> float:
    """CPU seconds of the master from the run's first file to its last."""
    limit = time.monotonic() + limit_s
    began: float | None = None
    used = 0.0
    while time.monotonic() < limit:
        try:
            used = sum(master.cpu_times()[:2])
        except psutil.Error:
            break
        if began is None and run_json.exists():
            began = used
        if began is not None and '"finished_utc": null' not in run_json.read_text(encoding="utf-8"):
            break
        time.sleep(0.05)
    return used - (began or used)


def read(run_dir: Path, seconds: float) -> dict[str, Any]:
    """What the run folder says of its one stage."""
    with (run_dir / "requests.csv").open(encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    info = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    window = [r for r in rows if r["phase"] == "window"]
    ok = [r for r in window if r["status"] == "ok"]
    span = seconds - min(2.0, seconds / 4)
    with (run_dir / "inflight.csv").open(encoding="utf-8", newline="") as handle:
        cpu = [float(r["cpu_ratio"]) for r in csv.DictReader(handle) if r["cpu_ratio"]]
    moved = info["transport"]
    return {
        "rows": len(rows), "streams_per_s": len(ok) / span, "complete_ratio": len(ok) / max(1, len(window)),
        "lag_p99_ms": 1e3 * percentile([float(r["send_lag_s"]) for r in window if r["send_lag_s"]], 0.99),
        "wire_bytes": moved["bytes"], "ledger_cpu_us": moved["cpu_us"],
        "worker_cpu": sorted(cpu)[len(cpu) // 2] if cpu else float("nan"), "problems": info["problems"],
    }  # fmt: skip


def busy_master_us(rows: int = 8000, batch_rows: int = 1000, repeats: int = 7) -> float:
    """Median CPU in microseconds per row from packed batch to written line, one batch after the other."""
    from bench.records.collect import Collector
    from bench.records.packing import unpack
    from bench.records.stage import RunInfo
    from benchmarks.scaling_master import _batch

    packed = [_batch(0, 1, first, batch_rows) for first in range(0, rows, batch_rows)]
    info = RunInfo("run", "", None, "", {}, {}, 1, "", [], {}, {}, "open", "sweep", 1)
    took = []
    with tempfile.TemporaryDirectory(prefix="bench-scaling-") as folder:
        collector = Collector(Path(folder), info)
        for _ in range(repeats):
            collector.open_stage(0, planned=rows)
            began = time.thread_time()
            for seq, data in enumerate(packed, 1):
                collector.add_batch(0, 0, seq, unpack(data))
            collector.flush()
            took.append(1e6 * (time.thread_time() - began) / rows)
        assert not collector.problems
    return sorted(took)[len(took) // 2]


def say(label: str, result: dict[str, Any]) -> None:
    """One line of the table."""
    rows = max(1, result["rows"])
    print(f"{label:32} {result['streams_per_s']:8.0f} {result['complete_ratio']:7.3f} {result['lag_p99_ms']:8.2f} "
          f"{result['worker_cpu']:7.2f} {result['wire_bytes'] / rows:7.1f} {result['ledger_cpu_us'] / rows:7.2f} "
          f"{1e6 * result['master_cpu_s'] / rows:9.1f}", file=sys.stderr, flush=True)
    for problem in result["problems"]:
        print(f"    {problem}", file=sys.stderr)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One worker with long and short streams, then more workers."""
    heads = ("stream/s", "whole", "lag p99", "worker", "B/req", "us/req")
    print(f"{'':32} {heads[0]:>8}" + "".join(f" {head:>7}" for head in heads[1:]) + " master us", file=sys.stderr)
    long = run(rate=args.rate, tokens=200, seconds=args.seconds, workers=1, gap_ms=10)
    say(f"1 worker, {args.rate:g}/s of 200 tokens", long)
    short = run(rate=args.short_rate, tokens=20, seconds=args.seconds, workers=1, gap_ms=10)
    say(f"1 worker, {args.short_rate:g}/s of 20 tokens", short)
    said: dict[str, Any] = {}
    each = args.rate / 2  # a rate that leaves room for server and master on few cores
    one = run(rate=each, tokens=50, seconds=args.seconds, workers=1, gap_ms=10)
    say(f"1 worker, {each:g}/s of 50 tokens", one)
    many = run(rate=each * args.workers, tokens=50, seconds=args.seconds, workers=args.workers, gap_ms=10)
    say(f"{args.workers} workers, {each:g}/s each", many)
    total = [long, short, one, many]
    rows = sum(r["rows"] for r in total)
    said |= {
        "streams_per_s_per_worker": long["streams_per_s"], "send_lag_p99_ms": long["lag_p99_ms"],
        "short_streams_per_s_per_worker": short["streams_per_s"], "short_send_lag_p99_ms": short["lag_p99_ms"],
        "efficiency": many["streams_per_s"] / (args.workers * one["streams_per_s"]), "efficiency_workers": args.workers,
        "efficiency_send_lag_p99_ms": many["lag_p99_ms"],
        "wire_bytes_per_request": sum(r["wire_bytes"] for r in total) / rows,
        "master_us_per_request": busy_master_us(),
        "in_run_us_per_request": short["ledger_cpu_us"] / short["rows"],
        "master_cpu_us_per_request": 1e6 * short["master_cpu_s"] / short["rows"],
        "worker_cpu_ratio": long["worker_cpu"], "short_worker_cpu_ratio": short["worker_cpu"],
        "complete_ratio": min(r["complete_ratio"] for r in total), "cores": os.cpu_count(),
    }  # fmt: skip
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in said.items()}


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="throughput of workers, cost of rows on wire and master")
    parser.add_argument("--rate", type=float, default=400.0, help="new streams of 200 tokens per second, one worker")
    parser.add_argument("--short-rate", type=float, default=1000.0, help="new streams of 20 tokens per second")
    parser.add_argument("--seconds", type=float, default=12.0, help="arrivals of one stage")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the efficiency run")
    parser.add_argument("--quick", action="store_true", help="stages of 5 s")
    parser.add_argument("--master", type=int, default=0, help="only the master: so many simulated workers")
    parser.add_argument("--master-ramp", action="store_true", help="more and more of them, to the master's end")
    args = parser.parse_args(argv)
    if args.quick:
        args.seconds = 5.0
    if args.master or args.master_ramp:
        from benchmarks.scaling_master import measure_master, ramp_master

        if args.master_ramp:
            said = ramp_master(HEARTBEAT_ROWS, args.seconds)
        else:
            said = measure_master(args.master, HEARTBEAT_ROWS, args.seconds)
    else:
        said = measure(args)
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
