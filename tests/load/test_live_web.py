"""The tab SLO and the page /slo: over HTTP, below a base path, behind a login."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from bench.commands.job_options import PROJECT
from tests.load.conftest import CONFIG, clean_environment, config_with
from tests.load.test_web import KEY, Page, serve_page


@pytest.fixture(scope="module")
def served(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Locust's web page below a base path, with our locustfile and no shape."""
    folder = tmp_path_factory.mktemp("web")
    (folder / "config.json").write_text(json.dumps(config_with(loadgen={"output_len_mu": 3.5})), encoding="utf-8")
    with serve_page(folder, engine.base_url, folder / "config.json", "/bench") as page:
        yield page


def data(page: Page) -> dict[str, Any]:
    return json.loads(page.get("/slo/data"))


def wait_until(page: Page, ready: Any, limit_s: float = 30) -> dict[str, Any]:
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        found = data(page)
        if ready(found):
            return found
        time.sleep(0.1)
    raise AssertionError(f"not so after {limit_s} s: {json.dumps(data(page))[:800]}")


def tab(page: Page) -> list[dict[str, str]]:
    """The rows of the tab SLO, as Locust's page asks for them."""
    stats = json.loads(page.get("/stats/requests"))
    (table,) = stats["extended_stats"]
    assert table["key"] == "slo"
    return table["data"]


def test_the_run_in_the_tab_and_on_the_page(served: Page) -> None:
    form = served.get("/")
    assert "extended_tabs" in form
    for field in ("qps_stages", "stage_duration", "plan_seed", "slo_ttft_ms", "slo_tpot_ms", "target_model"):
        assert field in form, field
    assert KEY not in form
    assert data(served)["verdict"] == "no run yet" and tab(served)[0]["verdict"] == "no run yet"

    served.start(qps_stages="15,25", stage_duration="3", slo_ttft_ms="700", slo_tpot_ms="90", plan_seed="5",
                 target_model="embedded")  # fmt: skip
    second = wait_until(served, lambda d: len(d["stages"]) == 2 and d["stages"][1]["due"] > 10)
    assert second["slo"] == {"ttft_s": 0.7, "tpot_s": 0.09, "attainment": 0.9} and second["seed"] == 5
    assert second["model"] == "embedded" and second["planned_stages"] == 2
    first = second["stages"][0]
    held = "held" if first["due"] >= 35 else "too few arrivals"  # 35 hits reach 0.9 with their Wilson interval
    assert first["state"] == "ended" and first["verdict"] == held and first["attainment"] == [1.0, 1.0]
    rows = tab(served)
    assert [r["stage"][:11] for r in rows[1:]] == ["01 chat @25", "00 chat @15"] and rows[0]["offered"] == "target 20"
    assert re.fullmatch(r"100\.00 % of \d+", rows[2]["attainment"]) and rows[2]["verdict"] == held
    assert re.fullmatch(r"[\d.]+ / [\d.–]+ / [\d.–]+", rows[2]["ttft"]) and float(rows[2]["arrived"]) > 5

    done = wait_until(served, lambda d: d["state"] == "finished")
    run = served.wait_for_run(1, finished=True)
    assert run["config"]["slo"]["ttft_deadline_ms"] == 700 and run["config"]["slo"]["tpot_deadline_ms"] == 90
    assert run["config_origin"]["slo.ttft_deadline_ms"] == "command line" and run["seed"] == 5
    # second path: the ledger has the same counts
    with (run["dir"] / "requests.csv").open(encoding="utf-8") as handle:
        window = [line.split(",") for line in handle if ",window," in line]
    for stage in done["stages"]:
        number = str(int(stage["name"][:2]))
        assert stage["due"] == stage["ended"] == sum(cells[0] == number for cells in window)
        assert stage["in_flight_max"] >= 1
    assert KEY not in json.dumps(done)


def test_another_run_begins_afresh_and_a_bad_start_is_shown(served: Page) -> None:
    answer = served.swarm(qps_stages="ten", stage_duration="1", slo_ttft_ms="0", slo_tpot_ms="0")
    assert answer["success"] is False and answer["message"].startswith("--qps-stages is 'ten'")
    refused = wait_until(served, lambda d: d["problem"])
    assert refused["verdict"].startswith("not started: --qps-stages is 'ten'")
    rows = tab(served)
    assert rows[0]["stage"] == "refused start" and rows[0]["verdict"].startswith("not started")
    assert refused["stages"] and len(rows) == 2 + len(refused["stages"])  # of the run before, and said so in each row
    assert rows[1]["stage"] == f"previous run {refused['run_id']}" and rows[1]["verdict"] == refused["run_verdict"]
    assert all(row["stage"].startswith("previous run: ") for row in rows[2:])
    served.start(qps_stages="", offered_qps="30", stage_duration="2", target_model="", slo_ttft_ms="0", slo_tpot_ms="0")
    found = wait_until(served, lambda d: d["state"] == "finished" and not d["problem"])
    assert [s["offered_qps"] for s in found["stages"]] == [30.0]
    assert tab(served)[0]["stage"] == f"run {found['run_id']}" and tab(served)[1]["stage"] == "00 chat @30"
    assert found["slo"]["ttft_s"] == 0.8  # 0 in the form: as the config says


def test_the_page_has_a_strict_policy(served: Page) -> None:
    with urllib.request.urlopen(served.url + "/slo", timeout=10) as answer:
        html, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    assert "unsafe" not in policy and "http" not in policy and policy.startswith("default-src 'none'; ")
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"(src|href)=\"(?!data:|\./)", html) and "innerHTML" not in html and KEY not in html


def test_page_and_data_ask_for_the_login_when_there_is_one() -> None:
    script = """
        from locust import env, events
        from types import SimpleNamespace
        from locustfiles import live_page
        from locustfiles.live import Live
        e = env.Environment(events=events)
        e.create_local_runner()
        ui = e.create_web_ui("127.0.0.1", 0, web_login=True, delayed_start=True)
        ui.app.config["SECRET_KEY"] = "test"
        ui.login_manager.user_loader(lambda user: None)
        live_page.attach(ui, SimpleNamespace(web_base_path=""), SimpleNamespace(live=Live(), run_time_s=0.0))
        client = ui.app.test_client()
        for path in ("/slo", "/slo/data", "/stats/requests"):
            answer = client.get(path)
            assert answer.status_code == 302 and "/login" in answer.headers["Location"], (path, answer.status_code)
        print("asked")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=clean_environment(), cwd=PROJECT,
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert done.stdout.strip() == "asked", done.stderr[-2000:]


def test_the_web_page_listens_on_loopback_unless_told_otherwise() -> None:
    script = """
        from locust.argument_parser import get_empty_argument_parser, setup_parser_arguments
        from locustfiles.wiring import add_options
        parser = get_empty_argument_parser()
        setup_parser_arguments(parser)
        add_options(parser)
        print([parser.parse_args(a).web_host for a in ([], ["--web-host", "*"], ["--web-host", "10.0.0.1"])])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=clean_environment(), cwd=PROJECT,
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert done.stdout.strip() == "['127.0.0.1', '*', '10.0.0.1']", done.stderr[-2000:]


def test_the_config_of_these_tests_is_the_common_one() -> None:
    assert CONFIG["loadgen"]["target_qps"] == 20  # named in the first test
