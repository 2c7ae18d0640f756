"""Run against the engine, watch it, replay what was seen: the same tenants, classes, lengths and prefix hits."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.commands.engine_process import start_engine

ROOT = Path(__file__).resolve().parents[2]
TURNS = ROOT / "configs" / "study" / "chat_turns.jsonl"


def bench(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "bench", *map(str, arguments)], capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "requests.csv").open(newline="") as handle:
        return sorted(csv.DictReader(handle), key=lambda r: float(r["intended_s"]))


def shape(rows: list[dict[str, str]]) -> Counter:
    return Counter((r["tenant"], r["request_class"], int(r["input_tokens"]), int(r["max_tokens"])) for r in rows)


@pytest.mark.timeout(240)
def test_what_watch_saw_is_what_the_replay_sends(tmp_path):
    config = tmp_path / "c.json"
    config.write_text(json.dumps({
        "model": "m",
        "tenants": [{"name": "acme", "share": 0.7}, {"name": "zeta", "share": 0.3}],
        "classes": [{"name": "chat", "share": 0.5}, {"name": "batch", "share": 0.5, "ttft_deadline_ms": 30000}],
        "loadgen": {"output_len_mu": 1.5, "max_output_tokens": 20, "input_len_range": [10, 200]},
        "engine": {"embedded": True}, "sweep": {"warmup_sec": 0, "drain_limit_sec": 20},
    }))  # fmt: skip
    seen, run, sim = tmp_path / "seen.jsonl", tmp_path / "run", tmp_path / "sim"
    with start_engine(config) as engine:
        done = bench("run", "--config", config, "--base-url", engine.base_url + "/v1", "--no-preflight", "--shape",
                     "hold", "--qps", "15", "--stage-duration", "3", "--run-dir", run)  # fmt: skip
        assert done.returncode in (0, 1, 4) and (run / "requests.csv").exists(), done.stderr
        watched = bench("watch", "--metrics-url", engine.base_url + "/metrics", "--interval", "0.1", "--duration", "0.3",
                        "--trace", seen)  # fmt: skip
        assert watched.returncode == 0, watched.stderr
    measured = rows_of(run)
    assert len(measured) > 25 and {r["tenant"] for r in measured} == {"acme", "zeta"}
    assert {r["status"] for r in measured} == {"ok"}
    replayed = bench("simulate", "--config", config, "--trace", seen, "--run-dir", sim, "--no-report")
    assert replayed.returncode == 0, replayed.stderr
    assert shape(rows_of(sim)) == shape(measured)
    # and the order of arrival, as far as the sender kept it
    assert [r["intended_s"] for r in rows_of(sim)] == sorted((r["intended_s"] for r in rows_of(sim)), key=float)


@pytest.mark.timeout(240)
def test_a_measured_replay_has_the_hits_of_a_cache_without_end(tmp_path):
    """In real time over HTTP, with memory for all: every arrival finds what earlier ones left, as the file says."""
    config, run = tmp_path / "c.json", tmp_path / "run"
    config.write_text(json.dumps({
        "model": "m", "loadgen": {"trace_file": str(TURNS), "trace_end_sec": 60, "max_output_tokens": 2},
        "engine": {"embedded": True, "prefix_caching": True, "num_blocks": 10**6, "max_model_len": 30_000, "time_scale": 0.02},
        "sweep": {"drain_limit_sec": 20},
    }))  # fmt: skip
    done = bench("run", "--config", config, "--no-preflight", "--shape", "replay", "--qps", "12", "--run-dir", run)
    assert done.returncode in (0, 1, 4) and (run / "requests.csv").exists(), done.stderr
    measured = rows_of(run)
    seen: set[int] = set()
    expected = []
    for line in TURNS.read_text().splitlines()[: len(measured)]:
        r = json.loads(line)
        leading = next((k for k, one in enumerate(r["hash_ids"]) if one not in seen), len(r["hash_ids"]))
        expected.append(min(leading * 512, (r["input_length"] - 1) // 16 * 16))
        seen |= set(r["hash_ids"])
    found = [int(float(r["cached_tokens"] or 0)) for r in measured]
    assert len(found) > 30 and all(f <= e for f, e in zip(found, expected, strict=True))
    # a busy machine may send two arrivals at once, of which the second then cannot find the first one's blocks
    assert sum(found) >= 0.8 * sum(expected) and sum(expected) > 20_000
