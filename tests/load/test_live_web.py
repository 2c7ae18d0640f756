"""The tab SLO and the page /slo: over HTTP, behind a login and a base path, and in a real browser."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from bench.commands.job import PROJECT, _free_port
from tests.load.conftest import CONFIG, clean_environment, config_with, end, locust_command
from tests.load.test_web import KEY, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
HOSTILE = "<script>document.title='hacked'</script>"


@pytest.fixture(scope="module")
def served(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Locust's web page below a base path, with our locustfile and no shape."""
    folder = tmp_path_factory.mktemp("web")
    (folder / "config.json").write_text(json.dumps(config_with(loadgen={"output_len_mu": 3.5})), encoding="utf-8")
    port = _free_port()
    process = subprocess.Popen(
        locust_command("--web-host", "127.0.0.1", "--web-port", str(port), "--web-base-path", "/bench", "--bench-config",
                       "config.json", shape=None),
        env=clean_environment(BENCH_TARGET_URL=engine.base_url, BENCH_API_KEY=KEY), cwd=folder,
        stdout=subprocess.DEVNULL, stderr=(folder / "log.txt").open("w"), start_new_session=True,
    )  # fmt: skip
    page = Page(folder, f"http://127.0.0.1:{port}/bench")
    try:
        limit = time.monotonic() + 30
        while time.monotonic() < limit:
            try:
                page.get("/")
                break
            except OSError:
                time.sleep(0.1)
        yield page
    finally:
        end(process)


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

    served.start(qps_stages="15,25", stage_duration="4", slo_ttft_ms="700", slo_tpot_ms="90", plan_seed="5",
                 target_model="embedded")  # fmt: skip
    second = wait_until(served, lambda d: len(d["stages"]) == 2 and d["stages"][1]["due"] > 10)
    assert second["slo"] == {"ttft_s": 0.7, "tpot_s": 0.09, "attainment": 0.9} and second["seed"] == 5
    assert second["model"] == "embedded" and second["planned_stages"] == 2
    first = second["stages"][0]
    assert first["state"] == "ended" and first["verdict"] == "held" and first["attainment"] == [1.0, 1.0]
    rows = tab(served)
    assert [r["stage"][:11] for r in rows[1:]] == ["01 chat @25", "00 chat @15"] and rows[0]["offered"] == "target 20"
    assert re.fullmatch(r"100\.00 % of \d+", rows[2]["attainment"]) and rows[2]["verdict"] == "held"
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
    served.start(qps_stages="ten", stage_duration="1", slo_ttft_ms="0", slo_tpot_ms="0")
    refused = wait_until(served, lambda d: d["problem"])
    assert refused["verdict"].startswith("not started: --qps-stages is 'ten'")
    assert tab(served)[0]["verdict"].startswith("not started")
    served.start(qps_stages="", offered_qps="30", stage_duration="2", target_model="", slo_ttft_ms="0", slo_tpot_ms="0")
    found = wait_until(served, lambda d: d["state"] == "finished" and not d["problem"])
    assert [s["offered_qps"] for s in found["stages"]] == [30.0]
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


# -- in a browser ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if not CHROMIUM or not DRIVER:
        if os.environ.get("BENCH_REQUIRE_BROWSER"):
            pytest.fail("chromium and chromedriver are required here; install them (Debian: chromium chromium-driver)")
        pytest.skip("no Chromium with chromedriver on this machine (Debian: chromium chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
                 "--disable-component-update", "--disable-dev-shm-usage", "--window-size=1300,1400",
                 f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def shown(browser: Any, script: str, limit_s: float = 25) -> Any:
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        found = browser.execute_script(script)
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"still not so after {limit_s} s: {script[:200]}")


def keep(browser: Any, name: str) -> None:
    """A screenshot for people: CI keeps the folder."""
    folder = PROJECT / "artifacts" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(folder / f"{name}.png"))


@pytest.mark.browser
@pytest.mark.timeout(180)
def test_a_person_starts_a_sweep_and_follows_it(browser: Any, served: Page) -> None:
    from selenium.webdriver.common.by import By

    wait_until(served, lambda d: d["state"] in ("ready", "finished"))
    browser.get(served.url + "/?tab=slo")
    if browser.execute_script("return !document.querySelector('[name=qpsStages]')"):  # a run was there: ask for the form
        shown(browser, "return [...document.querySelectorAll('button')].find(b => /^new$/i.test(b.textContent.trim()))").click()
    shown(browser, "return document.querySelector('[name=qpsStages]')")
    shown(browser, "return [...document.querySelectorAll('.MuiAccordionSummary-root')].find(b => /Custom/.test(b.textContent))").click()
    field = shown(browser, "const f = document.querySelector('[name=qpsStages]'); return f.offsetParent && f")
    keep(browser, "start-form")
    for name, value in (("qpsStages", "15,25"), ("stageDuration", "4")):
        field = browser.find_element(By.NAME, name)
        field.send_keys(browser.execute_script("arguments[0].select(); return ''", field) or "", value)
    shown(browser, "return [...document.querySelectorAll('button')].find(b => /^start/i.test(b.textContent.trim()))").click()
    shown(browser, "return [...document.querySelectorAll('[role=tab]')].find(t => t.textContent.trim() === 'SLO')").click()
    shown(browser, "return /Attainment so far/.test(document.body.innerText) && /chat @15/.test(document.body.innerText)")
    keep(browser, "tab-slo")

    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(served.url + "/slo")
    shown(browser, "return document.querySelectorAll('#charts figure svg[role=img]').length === 5")
    shown(browser, "return document.querySelectorAll('#stages tbody tr').length === 2", 40)  # it follows by itself
    shown(browser, "return /finished/.test(document.getElementById('meta').textContent)", 40)
    assert browser.execute_script("return document.querySelectorAll('#charts circle').length") > 4
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    keep(browser, "slo-page")
    served.start(qps_stages=HOSTILE)
    shown(browser, "return document.getElementById('verdict-text').textContent.includes('<script>')")  # text, not markup
    assert "hacked" not in browser.title and "NOT STARTED" in browser.title
    assert [e for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")] == []
    asked = [json.loads(e["message"])["message"] for e in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in asked if m["method"] == "Network.requestWillBeSent"]
    assert asked and all(url.startswith((served.url + "/slo", "data:")) for url in asked)  # no other address


def test_the_config_of_these_tests_is_the_common_one() -> None:
    assert CONFIG["loadgen"]["target_qps"] == 20  # named in the first test
