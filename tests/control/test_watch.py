"""`bench watch` beside the embedded engine: what it shows, and that its trace can be replayed; pages of other systems."""
from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from bench.client.metrics_page import fields, gpu_ratio
from bench.commands.engine_process import start_engine
from bench.config import load_config
from bench.workload.plan import build_plan
from bench.workload.schedule import build_schedule
from bench.workload.trace import read_trace

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def send(base_url: str, words: int, tokens: int, tenant: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "w " * words}], "max_tokens": tokens,
            "ignore_eos": True, "tenant": tenant}
    request = urllib.request.Request(base_url + "/v1/chat/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    OPENER.open(request, timeout=30).read()


@pytest.mark.timeout(120)
def test_watch_sees_the_engine_and_its_trace_replays(tmp_path):
    config = tmp_path / "engine.json"
    config.write_text(json.dumps({"model": "m", "engine": {"embedded": True}}))
    trace = tmp_path / "seen.jsonl"
    with start_engine(config) as engine:
        watcher = subprocess.Popen(
            [sys.executable, "-m", "bench", "watch", "--metrics-url", engine.base_url + "/metrics", "--interval", "0.2",
             "--duration", "4", "--trace", str(trace)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert watcher.stdout is not None
        first = watcher.stdout.readline()  # it looks already
        for i in range(12):
            send(engine.base_url, 20 + i, 5, f"t{i % 2}")
        out, err = watcher.communicate(timeout=60)
    views = [json.loads(line) for line in [first, *out.splitlines()]]
    assert watcher.returncode == 0 and all(v["readable"] for v in views), err
    last = views[-1]
    assert last["running"] == 0 and last["attainment_ttft"][0] > 0 and last["output_tps"] > 0
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [r["input_length"] for r in rows] == list(range(20, 32)) and {r["output_length"] for r in rows} == {5}
    assert [r["tenant"] for r in rows] == ["t0", "t1"] * 6 and "12 arrivals (each request" in err
    # the loop closes: the file is a trace that a replay sends
    assert len(read_trace(trace)) == 12
    plan = build_plan(load_config(config, overrides={
        "loadgen.trace_file": str(trace), "loadgen.arrival_process": "trace"}).config, "replay")
    schedule = build_schedule(plan, plan.stages[0])
    assert schedule.input_tokens.tolist() == list(range(20, 32)) and set(schedule.max_tokens.tolist()) == {5}


class Page(BaseHTTPRequestHandler):
    """A vLLM page whose counters follow `done`; away while `gone`."""

    done = 0
    gone = False

    def do_GET(self) -> None:
        if Page.gone or "debug" in self.path:
            self.send_error(500)
            return
        text = (f"vllm:num_requests_running 2\nvllm:num_requests_waiting 0\nvllm:request_success_total {Page.done}\n"
                f"vllm:prompt_tokens_total {50 * Page.done}\nvllm:generation_tokens_total {7 * Page.done}\n")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        return


@pytest.mark.timeout(120)
def test_a_foreign_page_that_goes_away_gives_a_trace_of_counts(tmp_path):
    server = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    trace = tmp_path / "seen.jsonl"
    try:
        watcher = subprocess.Popen(
            [sys.executable, "-m", "bench", "watch", "--metrics-url", f"http://127.0.0.1:{server.server_port}/metrics",
             "--interval", "0.2", "--duration", "4", "--trace", str(trace), "--fail-on-alert"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert watcher.stdout is not None
        lines = [watcher.stdout.readline()]
        Page.done += 10
        while not json.loads(lines[-1])["completed_qps"]:
            lines.append(watcher.stdout.readline())
        Page.gone = True
        out, err = watcher.communicate(timeout=60)
    finally:
        server.shutdown()
        server.server_close()
    views = [json.loads(line) for line in [*lines, *out.splitlines()]]
    assert watcher.returncode == 1 and any(a["kind"] == "page" for v in views for a in v["alerts"]), err
    assert not views[-1]["readable"]
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    assert all(r["output_length"] == 7 and r["input_length"] == 50 for r in rows) and len(rows) == 10


def test_a_page_that_never_answers_is_the_channel():
    done = subprocess.run([sys.executable, "-m", "bench", "watch", "--metrics-url", "http://127.0.0.1:9/metrics",
                           "--interval", "0.05", "--duration", "0.1"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3 and "could never be read" in done.stderr and "Traceback" not in done.stderr


PAGES = [
    ('sglang:num_running_reqs{m="a"} 3\nsglang:num_running_reqs{m="b"} 4\nsglang:num_queue_reqs 2\nsglang:token_usage 0.5\n'
     'sglang:num_requests_total 10\n', dict(running=7.0, waiting=2.0, kv_usage=0.5, finished=10.0)),
    ('tgi_batch_current_size 5\ntgi_queue_size 1\ntgi_request_success 8\n', dict(running=5.0, waiting=1.0, finished=8.0)),
    ('vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n'
     'vllm:time_to_first_token_seconds_bucket{le="0.5"} 4\nvllm:time_to_first_token_seconds_bucket{le="+Inf"} 5\n'
     'vllm:admission_rejections_total{reason="a"} 2\nvllm:admission_rejections_total{reason="b"} 3\n',
     dict(running=1.0, refused=5.0, ttft=((0.5, 4.0), (float("inf"), 5.0)))),
]


@pytest.mark.parametrize(("text", "expected"), PAGES)
def test_pages_of_serving_systems(text, expected):
    found = fields(text)
    assert {key: found[key] for key in expected} == expected


def test_half_a_histogram_is_none_and_noise_is_no_page():
    found = fields('vllm:num_requests_running 1\nvllm:time_to_first_token_seconds_bucket{le="0.5"} 4\ngarbage {{\n')
    assert found["ttft"] == ()
    with pytest.raises(ValueError, match="known serving system"):
        fields("<html>login</html>")


def test_utilisation_by_dcgm():
    assert gpu_ratio('DCGM_FI_DEV_GPU_UTIL{gpu="0"} 90\nDCGM_FI_DEV_GPU_UTIL{gpu="1"} 70\n') == pytest.approx(0.8)
    assert gpu_ratio("DCGM_FI_PROF_GR_ENGINE_ACTIVE 0.4\n") == pytest.approx(0.4) and gpu_ratio("x 1\n") is None
