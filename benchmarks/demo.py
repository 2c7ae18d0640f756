"""The demo, measured: what the client says against what the engine itself recorded.

    python -m benchmarks.demo                 # runs the demo, about 4 minutes
    python -m benchmarks.demo --run-dir RUN   # judges a demo that has been run

Last line: one JSON object
  delivered_qps_error  worst |delivered - planned| / planned over the stages below the knee, arrivals of the window
  send_lag_p99_ms      lateness of our own sender, all arrivals
  ttft_err_p50_ms      |client's first_token - sent minus engine's first_token - received|, median
  e2e_err_p50_ms       the same for the last token
  rows_missing         planned arrivals without exactly one row
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, by the standard library: no code is shared with the analysis."""
    with path.open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def delivered_error(rows: list[dict[str, str]], stages: list[dict[str, str]], knee_qps: float) -> float:
    """Worst relative difference of arrivals sent in the window to arrivals planned in it, below the knee."""
    worst = 0.0
    for stage in stages:
        if float(stage["offered_qps"]) >= knee_qps:
            continue
        low, high = float(stage["window_start_s"]), float(stage["window_end_s"])
        mine = [row for row in rows if row["stage"] == stage["stage"]]
        planned = sum(low <= float(row["intended_s"]) < high for row in mine)
        sent = sum(bool(row["sent_s"]) and low <= float(row["sent_s"]) < high for row in mine)
        worst = max(worst, abs(sent - planned) / planned)
    return worst


def rows_missing(rows: list[dict[str, str]], stages: list[dict[str, str]]) -> int:
    """Planned arrivals that have no row, plus rows that are one too many."""
    wrong = 0
    for stage in stages:
        seen: dict[str, int] = {}
        for row in rows:
            if row["stage"] == stage["stage"]:
                seen[row["arrival"]] = seen.get(row["arrival"], 0) + 1
        wrong += sum(seen.get(str(i), 0) != 1 for i in range(int(stage["planned"])))
    return wrong


def errors_ms(rows: list[dict[str, str]], truth: dict[str, dict[str, Any]]) -> tuple[list[float], list[float]]:
    """(TTFT, E2E) differences to the engine's own record, ms, signed, of answers that are ok."""
    first: list[float] = []
    last: list[float] = []
    for row in rows:
        said = truth.get(row["request_id"])
        if row["status"] != "ok" or said is None or said.get("first_token_s") is None:
            continue
        sent = float(row["sent_s"])
        first.append(1000 * (float(row["first_token_s"]) - sent - (said["first_token_s"] - said["received_s"])))
        last.append(1000 * (float(row["last_token_s"]) - sent - (said["last_token_s"] - said["received_s"])))
    return first, last


def measure(run_dir: Path) -> dict[str, float]:
    """The five figures of one demo run."""
    rows, stages = read(run_dir / "requests.csv"), read(run_dir / "stages.csv")
    analysis = json.loads((run_dir / "analysis.json").read_text(encoding="utf-8"))
    lines = (run_dir / "engine_requests.ndjson").read_text(encoding="utf-8").splitlines()
    truth = {record["request_id"]: record for record in map(json.loads, filter(None, lines))}
    first, last = errors_ms(rows, truth)
    lags = [1000 * float(row["send_lag_s"]) for row in rows if row["send_lag_s"]]
    return {
        "delivered_qps_error": round(delivered_error(rows, stages, analysis["capacity"]["knee_qps"] or 1e9), 5),
        "send_lag_p99_ms": round(float(np.percentile(lags, 99)), 3),
        "ttft_err_p50_ms": round(float(np.median(np.abs(first))), 3),
        "e2e_err_p50_ms": round(float(np.median(np.abs(last))), 3),
        "rows_missing": rows_missing(rows, stages),
        "compared": len(first),
        "ttft_err_p99_ms": round(float(np.percentile(np.abs(first), 99)), 3),
        "e2e_err_p99_ms": round(float(np.percentile(np.abs(last), 99)), 3),
    }


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path, exists=True), default=None, help="Judge this run instead.")
@click.option("--processes", default=1, help="Worker processes of the sender.")
def main(run_dir: Path | None, processes: int) -> None:
    """Print the five figures."""
    if run_dir is not None:
        print(json.dumps(measure(run_dir)))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench", "demo", "--run-dir", folder, "--processes", str(processes), "--json"]
        code = subprocess.run(command, check=False).returncode
        print(json.dumps(measure(Path(folder)) | {"exit_code": code}))


if __name__ == "__main__":
    main()
