"""A real Prometheus with our files: it reads each serving system's page and gives one set of names; alerts fire."""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.commands.locust_process import free_port
from bench.records.server import SYSTEMS, read_page

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PAGES = {
    "vllm": """vllm:num_requests_running{engine="0"} 3
vllm:num_requests_running{engine="1"} 2
vllm:num_requests_waiting{engine="0"} 40
vllm:kv_cache_usage_perc{engine="0"} 0.25
""",
    "sglang": "sglang:num_running_reqs 4\nsglang:num_queue_reqs 7\nsglang:token_usage 0.28\n",
    "tgi": "tgi_batch_current_size 6\ntgi_queue_size 9\n",
    "trtllm": "trtllm_num_requests_running 5\ntrtllm_num_requests_waiting 11\ntrtllm_kv_cache_utilization 0.62\n",
    "triton-trtllm": """nv_trt_llm_request_metrics{request_type="scheduled"} 8
nv_trt_llm_request_metrics{request_type="waiting"} 1
nv_trt_llm_request_metrics{request_type="max"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"} 0.4
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"} 1000
""",
    "llama.cpp": "llamacpp:requests_processing 2\nllamacpp:requests_deferred 46\n",
    # what the run itself shows: four answers a second, a target of 2 s
    "bench": 'bench_slo_seconds{metric="e2e_p95"} 2\n',
}
pytestmark = pytest.mark.skipif(
    not shutil.which("prometheus"), reason="prometheus is not installed (Debian: apt-get install prometheus)"
)


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        text = PAGES.get(self.path.strip("/"), "")
        if self.path == "/bench":  # a counter that grows with the clock
            text += f'bench_arrivals_total{{status="ok",stage="s"}} {4 * time.monotonic()}\n'
        if self.path == "/vllm":  # two requests a second, each served for 1.5 s
            now = time.monotonic()
            text += f"vllm:request_inference_time_seconds_sum {3 * now}\nvllm:request_inference_time_seconds_count {2 * now}\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copytree(DEPLOY / "prometheus", folder / "config")
    pages = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    config = yaml.safe_load((folder / "config" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms", "scrape_timeout": "500ms"}
    config["scrape_configs"] = [
        {"job_name": name, "metrics_path": f"/{name}",
         "static_configs": [{"targets": [f"127.0.0.1:{pages.server_address[1]}"]}]} for name in PAGES
    ]  # fmt: skip
    (folder / "config" / "prometheus.yml").write_text(yaml.safe_dump(config))
    for path in folder.glob("config/*.yml"):  # rates of a minute, and an alert after a quarter of one, take too long here
        path.write_text(path.read_text().replace("[1m]", "[5s]").replace("for: 15s", "for: 1s"))
    port = free_port()
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/config/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)
        pages.shutdown()
        pages.server_close()


def ask(url: str, path: str, **query: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
        return json.loads(answer.read())["data"]


def wait_for(url: str, expression: str, count: int, limit_s: float = 60) -> dict[str, float]:
    """system -> value, once there are so many."""
    limit, said = time.monotonic() + limit_s, {}
    while time.monotonic() < limit:
        try:
            found = ask(url, "query", query=expression)["result"]
        except OSError:  # it is starting
            found = []
        said = {row["metric"].get("system", ""): float(row["value"][1]) for row in found}
        if len(said) == count:
            return said
        time.sleep(0.1)
    raise AssertionError(f"{expression}: {said}")


def test_every_system_has_one_set_of_names(prometheus: str) -> None:
    for ours, column in (
        ("llm:requests_running", "running"), ("llm:requests_waiting", "waiting"), ("llm:kv_usage_ratio", "kv_usage"),
    ):  # fmt: skip
        expected = {}
        for system in SYSTEMS:  # what our own reader of pages makes of the same text
            found, row = read_page(PAGES[system])
            assert found == system
            if column in row:
                expected[system] = row[column]
        assert wait_for(prometheus, ours, len(expected)) == pytest.approx(expected), ours
    # TGI has no KV share, and the newer llama.cpp neither
    assert set(wait_for(prometheus, "llm:kv_usage_ratio", 4)) == {"vllm", "sglang", "trtllm", "triton-trtllm"}


def test_the_expected_wait_and_its_alert(prometheus: str) -> None:
    # vLLM: 40 wait, 5 run, 1.5 s each: 40 x 1.5 / 5 = 12 s. Triton: 8 / 4 = 2 s, 1 x 2 / 8 = 0.25 s. llama.cpp: 46 / 4 = 11.5 s
    limit, waits = time.monotonic() + 60, {}
    expected = {"vllm": 12.0, "triton-trtllm": 0.25, "llama.cpp": 11.5}
    while time.monotonic() < limit:
        waits = wait_for(prometheus, "llm:expected_wait_seconds", 3)
        if waits == pytest.approx(expected, rel=0.1):  # the rates settle while the first samples come in
            break
        time.sleep(0.2)
    assert waits == pytest.approx(expected, rel=0.1)
    assert set(wait_for(prometheus, 'ALERTS{alertname="QueueWillMissTheSLO",alertstate="firing"}', 2)) == {"vllm", "llama.cpp"}
    rules = ask(prometheus, "rules")["groups"]
    assert {group["name"] for group in rules} == {"llm", "service", "bench"}
    assert not [r["name"] for group in rules for r in group["rules"] if r["health"] == "err"]
