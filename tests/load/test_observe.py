"""`/metrics` of the running test and the service's own metrics, against the ledger of the same run."""

from __future__ import annotations

import contextlib
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.commands.locust_process import free_port

from .conftest import Ran, clean_environment, end, locust_command

KEY = "sk-observe-never-to-be-seen"


def page(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, sorted labels) -> value, read by the parser of prometheus-client."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert KEY not in text
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


@pytest.fixture(scope="module")
def watched(engine: Any, config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run and the pages that were seen while it lasted."""
    folder = tmp_path_factory.mktemp("observe")
    port, pages = free_port(), []
    process = subprocess.Popen(
        locust_command("--headless", "--bench-config", str(config_file), "--run-dir", str(folder / "run"),
                       "--qps-stages", "20,30", "--metrics-port", str(port)),
        env=clean_environment(BENCH_TARGET_URL=engine.base_url, BENCH_API_KEY=KEY), cwd=folder,
        stdout=subprocess.DEVNULL, stderr=(folder / "log.txt").open("w"), start_new_session=True,
    )  # fmt: skip
    try:
        limit = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < limit:
            with contextlib.suppress(OSError):
                pages.append(page(port))
            time.sleep(0.2)
        assert process.wait(10) == 0, (folder / "log.txt").read_text()
    finally:
        end(process)
    return pages, Ran(0, "", "", folder / "run")


def test_the_page_counts_what_the_ledger_holds(watched: Any) -> None:
    pages, ran = watched
    rows = [r for r in ran.rows() if r["stage"] == "0"]
    last = pages[-1]  # the first stage was over by then
    stage = ("stage", "00 chat @20")
    assert last["bench_arrivals_total", (stage, ("status", "ok"))] == len(rows)
    assert last["bench_ttft_seconds_count", (stage,)] == len(rows)
    assert last["bench_ttft_seconds_sum", (stage,)] == pytest.approx(sum(float(r["ttft_s"]) for r in rows), rel=1e-6)
    for edge in ("0.8", "0.01"):  # 0.8 s is the deadline of the config
        within = sum(float(r["ttft_s"]) <= float(edge) for r in rows)
        assert last["bench_ttft_seconds_bucket", (("le", edge), stage)] == within
    assert last["bench_tpot_seconds_bucket", (("le", "0.1"), stage)] == sum(float(r["tpot_s"] or 9) <= 0.1 for r in rows)
    assert last["bench_output_tokens_total", (stage,)] == sum(int(r["output_tokens"]) for r in rows)


def test_the_page_follows_the_run(watched: Any) -> None:
    pages, _ = watched
    assert {20.0, 30.0} <= {p["bench_offered_qps", ()] for p in pages}
    assert max(p["bench_in_flight", ()] for p in pages) >= 1
    states = {labels[0][1] for p in pages for (name, labels), value in p.items() if name == "bench_state" and value}
    assert {"sending"} <= states
    assert all(p["bench_workers", (("state", "connected"),)] == 1 for p in pages)
    assert any(name == "bench_attainment_ratio" for p in pages for name, _ in p)
    assert pages[-1]["bench_slo_seconds", (("metric", "ttft"),)] == 0.8


def test_the_services_own_metrics_lie_beside_ours(watched: Any) -> None:
    _, ran = watched
    rows = ran.rows("server_metrics.csv")
    assert len(rows) >= 5 and {r["system"] for r in rows} == {"vllm"}
    times = [float(r["t_s"]) for r in rows]
    assert times == sorted(times) and all(0.5 < b - a < 3 for a, b in zip(times, times[1:], strict=False))
    stages = {r["stage"]: r for r in ran.rows("stages.csv")}
    for row in rows:  # aligned: a look in the window of a stage carries its number
        for number, stage in stages.items():
            if float(stage["start_s"]) <= float(row["t_s"]) < float(stage["end_s"]):
                assert row["stage"] == number
    # counters between the first and the last look are those of the rows that ended between them
    finished = sum(times[0] < float(r["done_s"]) <= times[-1] for r in ran.rows())
    grown = float(rows[-1]["requests_total"]) - float(rows[0]["requests_total"])
    assert abs(grown - finished) <= 3
