"""The sample of single requests and the service's own numbers, against counts and differences made by hand."""
from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.analyse import analyse_run
from analysis.run_files import ServerGauge
from analysis.sample import OUTCOMES, _choose, _fair
from analysis.server_series import MAX_POINTS, _growth, _series
from bench.records.server import SERVER_COLUMNS, SERVER_METRICS
from tests.analysis.synthetic import Faults, Service, StageSpec, write_run


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "requests.csv").open(encoding="utf-8") as stream:
        return [r for r in csv.DictReader(stream) if r["phase"] == "window"]


def run_with_failures(folder: Path) -> Path:
    specs = [StageSpec(qps=10, duration_s=40, warmup_s=4), StageSpec(qps=20, duration_s=60, warmup_s=4)]
    return write_run(folder, specs, Service(), faults=Faults(rejected=0.05), target_qps=10)


def test_everything_is_kept_below_the_limit_and_counts_agree_with_the_ledger(tmp_path: Path) -> None:
    found = analyse_run(run_with_failures(tmp_path / "run"), models=False).points
    rows = rows_of(tmp_path / "run")
    assert found["arrivals"] == len(rows) > 500
    refused = sum(r["status"] == "rejected" for r in rows)
    assert found["outcomes"]["rejected"] == [min(refused, 1000), refused] and refused > 10
    assert sum(all_ for _, all_ in found["outcomes"].values()) == len(rows)
    assert all(len(found[k]) == len(found["outcome"]) for k in ("stage", "input_tokens", "ttft_s", "e2e_s"))
    # a bin's p50 by plain sorting: what was refused counts as endless
    for b in found["bins"]["input_ttft"]:
        mine = [r for r in rows if b["low"] <= int(r["input_tokens"]) <= b["high"]]
        assert len(mine) == b["n"]
        ordered = sorted(float(r["ttft_s"]) if r["status"] == "ok" else float("inf") for r in mine)
        assert b["p50_s"] == pytest.approx(ordered[(len(ordered) + 1) // 2 - 1], rel=1e-6)


def test_misses_and_extremes_survive_thinning() -> None:
    rng = np.random.default_rng(5)
    n = 50_000
    outcome = np.where(rng.random(n) < 0.004, rng.integers(1, len(OUTCOMES), n), 0)
    order = rng.lognormal(size=n)
    stage = rng.integers(0, 8, n)
    kept = _choose(stage * len(OUTCOMES) + outcome, outcome, order, 1500)
    assert len(kept) <= 1500 and len(kept) > 1400 and len(set(kept.tolist())) == len(kept)
    assert set(np.flatnonzero(outcome > 0)) <= set(kept.tolist())  # about 200 misses: all of them
    for s in range(8):
        met = np.flatnonzero((stage == s) & (outcome == 0))
        assert {met[np.argmin(order[met])], met[np.argmax(order[met])]} <= set(kept.tolist())


def test_many_misses_leave_room_for_the_rest_and_for_rare_ones() -> None:
    outcome = np.array([1] * 30_000 + [2] * 3 + [0] * 10_000)
    kept = _choose(outcome.copy(), outcome, np.arange(len(outcome), dtype=float), 1500)
    counts = np.bincount(outcome[kept], minlength=3)
    assert counts[2] == 3 and counts[1] == 997 and counts[0] == 500


@pytest.mark.parametrize(("counts", "places", "expected"), [
    ([5, 100, 100], 45, [5, 20, 20]), ([1, 2, 3], 10, [1, 2, 3]), ([10, 10], 0, [0, 0]), ([7], 3, [3]),
])  # fmt: skip
def test_fair_places(counts: list[int], places: int, expected: list[int]) -> None:
    assert _fair(np.array(counts), places) == expected


def test_a_run_without_arrivals_has_no_points(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [StageSpec(qps=5, duration_s=20, warmup_s=19.99)], target_qps=5)
    assert analyse_run(folder, models=False).points.get("arrivals", 0) <= 1


def scrape(folder: Path, rows: list[dict[str, Any]]) -> None:
    with (folder / SERVER_METRICS).open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, SERVER_COLUMNS)
        writer.writeheader()
        writer.writerows({c: r.get(c, "") for c in SERVER_COLUMNS} for r in rows)


def test_server_and_client_ttft_are_means_over_the_same_first_tokens(tmp_path: Path) -> None:
    folder = run_with_failures(tmp_path / "run")
    with (folder / "requests.csv").open(encoding="utf-8") as stream:
        served = [r for r in csv.DictReader(stream) if r["first_token_s"]]
    waits = np.array([float(r["first_token_s"]) - float(r["sent_s"]) for r in served])
    tokens = np.array([float(r["first_token_s"]) for r in served])
    samples = []
    for t in np.arange(0.5, tokens.max() + 5, 1.0):  # a service that saw each first token and called it 2 ms less
        seen = tokens <= t
        samples.append({
            "t_s": t, "stage": 0, "system": "vllm", "running": 3, "waiting": 1, "kv_usage": 0.25,
            "preemptions_total": int(t) // 20, "ttft_sum_s": float((waits[seen] - 0.002).sum()),
            "ttft_count": int(seen.sum()),
        })  # fmt: skip
    scrape(folder, samples)
    found = analyse_run(folder, models=False).server
    assert found["samples"] == len(samples)
    for stage in found["stages"]:
        assert stage["server_ttft_n"] == stage["client_ttft_n"] > 100
        gap = stage["client_ttft_mean_s"] - stage["server_ttft_mean_s"]
        assert gap == pytest.approx(0.002, abs=1e-5)
        assert (stage["running_mean"], stage["waiting_mean"], stage["kv_max_ratio"]) == (3.0, 1.0, 0.25)
    assert sum(v or 0 for v in found["series"]["preemptions"]) == samples[-1]["preemptions_total"]


def test_a_restarted_or_unscraped_service_gives_no_difference(tmp_path: Path) -> None:
    folder = run_with_failures(tmp_path / "run")
    assert analyse_run(folder, models=False).server == {}
    count = [0, 50, 90, 5, 30]
    scrape(folder, [{"t_s": 5 + 8 * i, "running": 1, "waiting": 0, "ttft_count": c, "ttft_sum_s": c * 0.1}
                    for i, c in enumerate(count)])  # fmt: skip
    first = analyse_run(folder, models=False).server["stages"][0]
    assert first["server_ttft_mean_s"] is None and first["kv_max_ratio"] is None and first["preemptions"] is None


def test_growth_over_gaps_and_falls() -> None:
    nan = np.nan
    assert _growth(np.array([1.0, nan, 4.0]), 0, 2) == 3.0
    assert _growth(np.array([1.0, 9.0, 4.0]), 0, 2) is None
    assert _growth(np.array([nan, 2.0, nan]), 0, 2) is None


def test_a_long_series_keeps_its_peaks_and_its_sum() -> None:
    n = 5 * MAX_POINTS + 7
    rng = np.random.default_rng(1)
    waiting, total = rng.integers(0, 9, n).astype(float), np.cumsum(rng.random(n) < 0.01).astype(float)
    waiting[1234] = 77.0
    gauge = ServerGauge(np.arange(n, dtype=float), np.ones(n), waiting, np.full(n, np.nan), total)
    found = _series(gauge)
    assert len(found["t_s"]) == MAX_POINTS and max(v or 0 for v in found["waiting"]) == 77.0
    assert sum(v or 0 for v in found["preemptions"]) == total[-1] - total[0]
    assert set(found["kv_usage"]) == {None}


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_a_run_json_that_holds_no_json_number_is_named(tmp_path: Path, word: str) -> None:
    folder = write_run(tmp_path / "run", [StageSpec(qps=5, duration_s=20, warmup_s=2)], target_qps=5)
    path = folder / "run.json"
    path.write_text(path.read_text().replace('"seed": 1', f'"seed": {word}'))
    problems = analyse_run(folder, models=False).ledger["problems"]
    assert [p["message"] for p in problems if p["problem_id"] == "LED-019"] == [
        f"run.json cannot be read (it holds {word}, which is no JSON); the SLO comes from the command line or the defaults"
    ]
