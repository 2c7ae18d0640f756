"""The start form, the tab SLO and the page /slo in a real Chromium, as a person uses them.

Needs Chromium and chromedriver (Debian: `chromium`, `chromium-driver`); skipped with a message where they are absent,
unless BENCH_REQUIRE_BROWSER is set. Screenshots are kept in artifacts/screenshots.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bench.commands.job_options import PROJECT
from tests.load.test_live_web import served, wait_until  # noqa: F401 (a fixture)
from tests.load.test_web import Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
HOSTILE = "<script>document.title='hacked'</script>"


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


def press(browser: Any, script: str, limit_s: float = 25) -> None:
    """Click what the script finds, as soon as nothing lies over it: panels of the form still move on a busy machine."""
    from selenium.common.exceptions import ElementClickInterceptedException, StaleElementReferenceException

    limit = time.monotonic() + limit_s
    while True:
        try:
            return shown(browser, script, limit_s).click()
        except (ElementClickInterceptedException, StaleElementReferenceException):
            if time.monotonic() > limit:
                raise
            time.sleep(0.1)


def keep(browser: Any, name: str) -> None:
    """A screenshot for people: CI keeps the folder."""
    folder = PROJECT / "artifacts" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(folder / f"{name}.png"))


@pytest.mark.browser
@pytest.mark.timeout(180)
def test_a_person_starts_a_sweep_and_follows_it(browser: Any, served: Page) -> None:  # noqa: F811
    from selenium.webdriver.common.by import By

    wait_until(served, lambda d: d["state"] in ("ready", "finished"))
    browser.get(served.url + "/?tab=slo")
    if browser.execute_script("return !document.querySelector('[name=qpsStages]')"):  # a run was there: ask for the form
        press(browser, "return [...document.querySelectorAll('button')].find(b => /^new$/i.test(b.textContent.trim()))")
    shown(browser, "return document.querySelector('[name=qpsStages]')")
    press(browser, "return [...document.querySelectorAll('.MuiAccordionSummary-root')].find(b => /Custom/.test(b.textContent))")
    shown(browser, "const f = document.querySelector('[name=qpsStages]'); return f.offsetParent && f")
    note = shown(browser, "return document.querySelector('[name=userCount]').closest('.MuiFormControl-root').innerText")
    assert "Open loop: users do not set the rate." in note
    keep(browser, "start-form")

    def fill_and_start(**values: str) -> None:
        for name, value in values.items():
            field = browser.find_element(By.NAME, name)
            field.send_keys(browser.execute_script("arguments[0].select(); return ''", field) or "", value)
        start = "return [...document.querySelectorAll('button')].find(b => /^start/i.test(b.textContent.trim()))"
        press(browser, start)

    fill_and_start(qpsStages="15,ten", stageDuration="3")
    shown(browser, "return [...document.querySelectorAll('[role=alert]')].some(a => /--qps-stages is/.test(a.textContent))")
    for _ in ("as it stands", "drawn anew"):
        typed = "return ['qpsStages', 'stageDuration'].map(n => document.querySelector(`[name=${n}]`).value).join(' ')"
        assert shown(browser, "return document.querySelector('[name=qpsStages]') && (() => {" + typed + "})()") == "15,ten 3"
        browser.refresh()
    shown(browser, "return document.querySelector('[name=qpsStages]')")
    press(browser, "return [...document.querySelectorAll('.MuiAccordionSummary-root')].find(b => /Custom/.test(b.textContent))")
    shown(browser, "const f = document.querySelector('[name=qpsStages]'); return f.offsetParent && f")
    fill_and_start(qpsStages="15,25", stageDuration="3")
    press(browser, "return [...document.querySelectorAll('[role=tab]')].find(t => t.textContent.trim() === 'SLO')")
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
    refused = served.swarm(qps_stages=HOSTILE)  # the form's own look, before anything starts
    assert refused["success"] is False and HOSTILE[:20] in refused["message"]
    shown(browser, "return document.getElementById('verdict-text').textContent.includes('<script>')")  # text, not markup
    assert "hacked" not in browser.title and "NOT STARTED" in browser.title
    run_id = wait_until(served, lambda d: d["problem"])["run_id"]
    told = browser.find_element(By.ID, "previous").text
    assert told.startswith(f"Nothing was started. All figures below are of the previous run {run_id}: ")
    assert browser.find_element(By.ID, "title").text == "Start refused"
    assert browser.find_element(By.ID, "stages-title").text == f"Stages of the previous run {run_id}"
    keep(browser, "slo-page-refused")
    served.start(qps_stages="", offered_qps="5", stage_duration="1", target_model=HOSTILE)  # a name may be anything
    shown(browser, f"return document.getElementById('title').textContent.startsWith({json.dumps(HOSTILE)})")
    assert browser.execute_script("return document.querySelectorAll('#title *').length") == 0
    wait_until(served, lambda d: d["state"] == "finished" and d["model"] == HOSTILE)
    shown(browser, "return /finished/.test(document.getElementById('meta').textContent)", 40)
    assert "hacked" not in browser.title and "SLO" in browser.title
    assert not browser.find_element(By.ID, "previous").is_displayed()
    assert browser.find_element(By.ID, "stages-title").text == "Stages"
    assert [e for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")] == []
    asked = [json.loads(e["message"])["message"] for e in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in asked if m["method"] == "Network.requestWillBeSent"]
    assert asked and all(url.startswith((served.url + "/slo", "data:")) for url in asked)  # no other address


@pytest.mark.browser
@pytest.mark.timeout(60)
def test_a_late_sender_and_a_missed_deadline_are_said_in_words(browser: Any, tmp_path: Any) -> None:
    """The page as a file, its data from counted rows: 10 and 40 requests/s miss the TTFT deadline, 20 does not."""
    from dataclasses import replace

    from locustfiles.live import Live
    from tests.load.test_live import SLO, plan, row

    live = Live()
    settings = {"model": "m", "target_qps": 40.0, "slo": SLO, "gates": []}
    live.open_run(plan([10.0, 20.0, 40.0]), settings, run_id="r", run_dir="runs/r", loop="open")
    for index, (ttft_s, lag_s) in enumerate([(0.9, 0.001), (0.1, 0.001), (0.9, 0.05)]):
        live.open_stage(live.plan.stages[index], [3.0] * 100)
        live.begin_stage(0.0)
        rows = [replace(row(i, ttft_s=ttft_s), send_lag_s=lag_s) for i in range(100)]
        if index == 1:
            rows = [replace(each, tpot_s=None, output_tokens=30, chunks=1) for each in rows[:4]] + rows[4:]
        live.add_rows(index, rows)
        live.end_stage(11.0, [])
    summary = json.dumps(live.summary(12.0))
    pages = PROJECT / "locustfiles" / "pages"
    page = (pages / "slo.html").read_text(encoding="utf-8")
    for word, name in (("STYLE", "slo.css"), ("SCRIPT", "slo.js")):
        page = page.replace(word, (pages / name).read_text(encoding="utf-8"), 1)
    answer = "new Response(" + json.dumps(summary) + ", {headers: {'content-type': 'application/json'}})"
    page = page.replace("<script>", f"<script>window.fetch = async () => {answer};</script><script>", 1)
    (tmp_path / "slo.html").write_text(page, encoding="utf-8")
    browser.get((tmp_path / "slo.html").as_uri())
    shown(browser, "return document.querySelectorAll('#charts figure svg[role=img]').length === 5")
    text = {name: browser.execute_script(f"return document.getElementById('{name}').innerText")
            for name in ("verdict", "tiles", "charts", "stages")}  # fmt: skip
    assert "INVALID SO FAR" in text["verdict"] and "send lag p99" in text["verdict"] and "limit of 40 ms" in text["verdict"]
    assert "✕ too late, limit 40 ms: INVALID" in text["tiles"]
    assert "The p95 is above the deadline at 10 and 40 requests/s." in text["charts"]
    assert "The p95 is within the deadline at every measured rate so far." in text["charts"]  # TPOT
    rows_text = text["stages"].splitlines()
    assert "INVALID, our sender is late (missed)" in rows_text[1] and "limit 40" in rows_text[1]
    assert "INVALID" not in "".join(rows_text[2:])
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    keep(browser, "slo-page-late-sender")
