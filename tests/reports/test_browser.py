"""The page in a real Chromium: offline, under its own policy, with and without scripts.

Needs Chromium and chromedriver (Debian: `chromium`, `chromium-driver`); skipped with a
message where they are absent, unless BENCH_REQUIRE_BROWSER is set. Screenshots are kept in
artifacts/screenshots.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import shutil
import time
from pathlib import Path
from typing import NoReturn

import pytest

from reports.html import render
from reports.write import write_all
from tests.reports import examples

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
PICTURES = Path(__file__).resolve().parents[2] / "artifacts" / "screenshots"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--window-size=1300,900",
)


def absent(what: str) -> NoReturn:
    """Skip where something is not installed; fail where all must be there, so that CI cannot pass without looking."""
    if os.environ.get("BENCH_REQUIRE_BROWSER"):
        pytest.fail(f"{what}; BENCH_REQUIRE_BROWSER is set: install it")
    pytest.skip(what)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """One headless Chromium with a fresh profile for this module."""
    if not CHROMIUM or not DRIVER:
        absent("no Chromium with chromedriver on this machine (Debian: chromium chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def files(tmp_path_factory, pages):
    """Paths of the rendered examples that are looked at."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("sweep", "empty", "nothing"):
        (folder / f"{name}.html").write_text(pages(name), encoding="utf-8")
    (folder / "sweep-zh.html").write_text(pages("sweep", "zh-CN"), encoding="utf-8")
    return folder


def device(browser, *, width: int = 1300, scripts: bool = True, dark: bool = False, media: str = "") -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not scripts})
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"media": media, "features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]},
    )


def load(browser, path: Path) -> None:
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # empties it
    browser.get(path.as_uri())


def scroll_through(browser) -> None:
    """Show every part of the page, so that every chart that is not folded away comes alive."""
    height = browser.execute_script("return document.documentElement.scrollHeight")
    for y in range(0, height, 600):
        browser.execute_script("window.scrollTo({top: arguments[0], behavior: 'instant'})", y)
        time.sleep(0.05)
    wait(
        browser,
        "return Array.from(document.querySelectorAll('.plot')).filter(p => p.clientWidth && "
        "JSON.parse(document.getElementById('charts').textContent).specs[p.dataset.chart] && p.dataset.state !== 'live').length === 0",
    )


def wait(browser, script: str, limit_s: float = 40.0) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if browser.execute_script(script):
            return
        time.sleep(0.1)
    pytest.fail(f"still not true after {limit_s} s: {script[:160]}")


def requests_of(browser) -> list[str]:
    """Addresses that the page asked for, besides itself."""
    out = []
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            out.append(message["params"]["request"]["url"])
    return [u for u in out if not u.startswith(("file:", "data:"))]


def complaints(browser) -> list[str]:
    return [e["message"] for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")]


@pytest.mark.parametrize("name", ["sweep", "sweep-zh", "empty", "nothing"])
def test_page_is_live_clean_and_offline(browser, files, name):
    device(browser)
    load(browser, files / f"{name}.html")
    if name != "nothing":
        scroll_through(browser)
        assert int(browser.execute_script("return document.documentElement.dataset.live")) >= 5
    assert complaints(browser) == []
    assert requests_of(browser) == []
    assert browser.execute_script("return document.querySelectorAll('[data-state=failed]').length") == 0


def test_hostile_sample_is_text_and_does_not_run(browser, files):
    device(browser)
    load(browser, files / "sweep.html")
    cells = browser.execute_script("return Array.from(document.querySelectorAll('td.sample')).map(c => c.textContent)")
    assert any(examples.HOSTILE in c for c in cells)
    from selenium.common.exceptions import NoAlertPresentException

    with pytest.raises(NoAlertPresentException):
        browser.switch_to.alert.text  # noqa: B018
    assert complaints(browser) == []


def test_policy_stops_a_script_that_is_added_later(browser, files):
    device(browser)
    load(browser, files / "sweep.html")
    browser.execute_cdp_cmd(
        "Runtime.evaluate",
        {
            "expression": """
        var s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.appendChild(s);
        var i = new Image(); i.src = 'http://127.0.0.1:9/x.png';"""
        },
    )
    assert browser.execute_script("return window.hacked === undefined")
    assert any("Content Security Policy" in c for c in complaints(browser))


def test_charts_show_without_scripts(browser, files):
    device(browser, scripts=False)
    load(browser, files / "sweep.html")
    try:
        found = browser.execute_cdp_cmd("DOM.getDocument", {"depth": 0})
        plots = browser.execute_cdp_cmd(
            "DOM.querySelectorAll",
            {
                "nodeId": found["root"]["nodeId"],
                "selector": "#capacity .pane:first-child .plot > svg, .pair .plot > svg",
            },
        )
        boxes = []
        for node in plots["nodeIds"]:
            try:
                boxes.append(browser.execute_cdp_cmd("DOM.getBoxModel", {"nodeId": node})["model"])
            except Exception:
                continue  # folded away
        assert len([b for b in boxes if b["width"] > 300 and b["height"] > 150]) >= 6
        hidden = browser.execute_cdp_cmd(
            "DOM.querySelector", {"nodeId": found["root"]["nodeId"], "selector": ".switch"}
        )
        style = browser.execute_cdp_cmd("CSS.enable", {}) or {}
        del style
        computed = browser.execute_cdp_cmd("CSS.getComputedStyleForNode", {"nodeId": hidden["nodeId"]})["computedStyle"]
        assert next(c["value"] for c in computed if c["name"] == "display") == "none"  # nothing that would not work
    finally:
        device(browser)
    assert requests_of(browser) == []


def background(browser) -> str:
    return browser.execute_script("return getComputedStyle(document.body).backgroundColor")


def test_theme_follows_the_system_and_the_switch(browser, files):
    device(browser, dark=True)
    load(browser, files / "sweep.html")
    assert background(browser) == "rgb(15, 19, 24)"
    line = "return getComputedStyle(document.querySelector('#plot-latency-ttft svg path[stroke^=\"var(--c-ttft\"]')).stroke"
    assert (
        browser.execute_script(line) == "rgb(86, 180, 233)"
    )  # the static or live drawing follows without being drawn again
    browser.execute_script("document.querySelector('[data-set-theme=light]').click()")
    assert background(browser) == "rgb(246, 248, 250)"
    assert browser.execute_script(line) == "rgb(0, 114, 178)"
    assert (
        browser.execute_script("return document.querySelector('[data-set-theme=light]').getAttribute('aria-pressed')")
        == "true"
    )
    device(browser, dark=False)
    browser.execute_script("document.querySelector('[data-set-theme=dark]').click()")
    assert background(browser) == "rgb(15, 19, 24)"
    browser.execute_script("document.querySelector('[data-set-theme=auto]').click(); localStorage.clear()")
    assert background(browser) == "rgb(246, 248, 250)"


@pytest.mark.parametrize("scripts", [True, False], ids=["live", "static"])
def test_phone_width_does_not_scroll_sideways(browser, files, scripts):
    device(browser, width=360, scripts=scripts)
    load(browser, files / "sweep.html")
    if scripts:
        scroll_through(browser)
    metrics = browser.execute_cdp_cmd("Page.getLayoutMetrics", {})
    assert metrics["cssContentSize"]["width"] <= 360
    device(browser)


@pytest.mark.parametrize("scripts", [True, False], ids=["live", "static"])
def test_main_charts_show_their_whole_range_on_a_phone(browser, files, scripts):
    device(browser, width=375, scripts=scripts)
    try:
        load(browser, files / "sweep.html")
        if scripts:
            scroll_through(browser)
        shown = """Array.from(document.querySelectorAll('.plot.two')).filter(p => p.clientWidth).map(p => {
            const svg = Array.from(p.querySelectorAll('svg')).filter(s => s.getBoundingClientRect().width)[0];
            return [p.id, p.clientWidth, p.scrollWidth, svg.getBoundingClientRect().width]})"""
        if not scripts:  # the page's own scripts were off while it loaded
            browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
        plots = browser.execute_script(f"return {shown}")
        assert len(plots) == 6  # latency, attainment, rates, token speed, Little, in-flight; the other tabs are folded away
        for name, inside, whole, drawn in plots:
            assert 250 < drawn <= inside + 1 and whole <= inside + 1, name
    finally:
        device(browser)


def test_gates_are_stacked_on_a_phone(browser, files):
    device(browser, width=375)
    load(browser, files / "sweep.html")
    right = browser.execute_script(
        "return Math.max(...Array.from(document.querySelectorAll('.gates td')).map(c => c.getBoundingClientRect().right))"
    )
    assert right <= 375
    label = "return getComputedStyle(document.querySelector('.gates td:nth-child(4)'), '::before').content"
    assert browser.execute_script(label) == '"Measured"'
    device(browser)


def test_stage_rows_open_and_sort(browser, files):
    device(browser)
    load(browser, files / "sweep.html")
    browser.execute_script("document.querySelectorAll('.opener')[3].click()")
    assert browser.execute_script("return document.getElementById('more-3').offsetHeight") > 150
    order = "return Array.from(document.querySelectorAll('.stagetable tbody')).map(b => b.id)"
    assert browser.execute_script(order)[0] == "stage-0"
    column = "document.querySelectorAll('.stagetable thead tr:last-child .sort')[6].click()"  # failed, below planned
    browser.execute_script(column)
    assert browser.execute_script(order)[-1] == "stage-7"
    browser.execute_script(column)
    assert browser.execute_script(order)[0] == "stage-7"


@pytest.mark.parametrize("lang", ["en", "zh-CN"])
@pytest.mark.parametrize("name", ["sweep", "many", "empty", "one_stage"])
def test_stage_table_fits_a_window_of_1280(browser, pages, tmp_path, name, lang):
    device(browser, width=1280)
    (tmp_path / "page.html").write_text(pages(name, lang, live=False), encoding="utf-8")
    load(browser, tmp_path / "page.html")
    box = "document.querySelector('.scroll.stages')"
    whole, seen = browser.execute_script(f"return [{box}.scrollWidth, {box}.clientWidth]")
    device(browser)
    assert whole <= seen


def test_letters_of_drawings_and_live_charts_have_one_size(browser, files):
    device(browser, width=1280)
    sizes = """return Object.fromEntries(Array.from(document.querySelectorAll('.plot')).filter(p => p.clientWidth).map(p => {
      const t = Array.from(p.querySelectorAll('svg text')).find(t => t.textContent && t.getBoundingClientRect().height);
      const svg = t.ownerSVGElement;
      return [p.dataset.chart || '', svg.getBoundingClientRect().width / svg.viewBox.baseVal.width
              * parseFloat(getComputedStyle(t).fontSize)]; }))"""
    load(browser, files / "sweep.html")
    scroll_through(browser)
    live = browser.execute_script(sizes)
    (files / "still.html").write_text(render(examples.sweep(), live=False), encoding="utf-8")
    load(browser, files / "still.html")
    still = browser.execute_script(sizes)
    device(browser)
    assert len(live) > 8 and live.keys() == still.keys()
    assert {k: (live[k], still[k]) for k in live if abs(live[k] / still[k] - 1) > 0.05} == {}


def test_tabs_and_scale_switch(browser, files):
    device(browser)
    load(browser, files / "sweep.html")
    browser.execute_script("document.querySelector('#tab-attainment-misses').click()")
    shown = "return getComputedStyle(document.querySelector('#plot-attainment-misses').closest('.pane')).display"
    assert browser.execute_script(shown) == "block"
    browser.execute_script("document.querySelector('#fig-latency').scrollIntoView()")
    wait(browser, "return document.querySelector('#plot-latency-ttft').dataset.state === 'live'")
    before = browser.execute_script("return document.querySelector('#plot-latency-ttft').textContent")
    browser.execute_script("document.querySelector('[data-scale=latency]').click()")
    wait(
        browser,
        f"return document.querySelector('#plot-latency-ttft').textContent !== {json.dumps(before)} "
        "&& document.querySelector('#plot-latency-ttft').dataset.state === 'live'",
    )
    assert complaints(browser) == []


def test_many_stages_open_with_their_curves(browser, files, tmp_path, pages):
    path = tmp_path / "many.html"
    path.write_text(pages("many"), encoding="utf-8")
    device(browser)
    load(browser, path)
    browser.execute_script("document.querySelector('#stage-119 .opener').click()")
    box = (
        "var b = document.querySelector('#more-119 .mini svg path').getBoundingClientRect(); return [b.width, b.height]"
    )
    width, height = browser.execute_script(box)
    assert width > 100 and height > 40
    assert complaints(browser) == []


def test_print_shows_tables_and_light_colours(browser, files):
    device(browser, dark=True, media="print")
    load(browser, files / "empty.html")
    assert (
        browser.execute_script(
            "return getComputedStyle(document.documentElement).getPropertyValue('--c-panel')"
        ).strip()
        == "#FFFFFF"
    )
    assert browser.execute_script(
        "return document.querySelector('details.numbers .scroll').checkVisibility({contentVisibilityAuto: true})"
    )
    device(browser)


@pytest.mark.parametrize("name", ["sweep", "sweep-zh"])
def test_print_is_not_wider_than_the_page(browser, files, name):
    device(browser, width=718, media="print")  # A4 or Letter less Chromium's margins
    load(browser, files / f"{name}.html")
    wide = """return [...document.querySelectorAll("table")].filter(e => e.getBoundingClientRect().right > innerWidth)
        .map(e => [e.closest(".scroll")?.getAttribute("aria-label"), e.getBoundingClientRect().right])"""
    assert browser.execute_script(wide) == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 718
    device(browser)


def axe_source() -> str:
    """The script of axe-core: BENCH_AXE_JS, or that of the package axe-core-python."""
    spec = importlib.util.find_spec("axe_core_python")
    path = Path(os.environ.get("BENCH_AXE_JS") or (Path(spec.origin).parent / "axe.min.js" if spec else "axe.min.js"))
    if not path.is_file():
        absent("axe-core is not installed (PyPI: axe-core-python)")
    return path.read_text(encoding="utf-8")


def test_nothing_is_skipped_where_a_browser_is_required(monkeypatch, tmp_path):
    monkeypatch.setenv("BENCH_AXE_JS", str(tmp_path / "none.js"))
    monkeypatch.delenv("BENCH_REQUIRE_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="axe-core is not installed"):
        axe_source()
    monkeypatch.setenv("BENCH_REQUIRE_BROWSER", "1")
    with pytest.raises(pytest.fail.Exception, match="axe-core is not installed.* install it"):
        axe_source()


@pytest.mark.parametrize(("name", "dark"), [("sweep", False), ("sweep", True), ("sweep-zh", False)])
def test_axe_finds_nothing_serious(browser, files, name, dark):
    source = axe_source()
    device(browser, dark=dark)
    load(browser, files / f"{name}.html")
    browser.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
    try:
        load(browser, files / f"{name}.html")
        scroll_through(browser)
        browser.execute_cdp_cmd("Runtime.evaluate", {"expression": source})
        found = browser.execute_async_script(
            "axe.run(document, {resultTypes: ['violations']}).then(r => arguments[arguments.length - 1](r.violations))"
        )
    finally:
        browser.execute_cdp_cmd("Page.setBypassCSP", {"enabled": False})
        device(browser)
    bad = [
        f"{v['id']}: {v['nodes'][0]['html'][:160]} ({len(v['nodes'])})"
        for v in found
        if v["impact"] in ("serious", "critical")
    ]
    assert bad == []


def test_page_without_the_library_is_clean(browser, tmp_path):
    path = tmp_path / "static.html"
    path.write_text(render(examples.one_stage(), live=False), encoding="utf-8")
    device(browser)
    load(browser, path)
    assert complaints(browser) == []


def keep(browser, name: str) -> tuple[int, int]:
    """(width, height) in px of a picture of the whole page, kept for people: CI keeps the folder."""
    size = browser.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16_000), "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    data = base64.b64decode(shot["data"])
    PICTURES.mkdir(parents=True, exist_ok=True)
    (PICTURES / f"{name}.png").write_bytes(data)
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")  # from the PNG itself


@pytest.mark.parametrize(
    ("name", "page", "looks"),
    [
        ("report-light", "sweep", {}),
        ("report-dark", "sweep", {"dark": True}),
        ("report-phone", "sweep", {"width": 390}),
        ("report-phone-dark", "sweep", {"width": 390, "dark": True}),
        ("report-zh-CN", "sweep-zh", {}),
    ],
)
def test_pictures_of_the_page_are_kept(browser, files, name, page, looks):
    (PICTURES / f"{name}.png").unlink(missing_ok=True)
    device(browser, **looks)
    try:
        load(browser, files / f"{page}.html")
        scroll_through(browser)
        browser.execute_script("window.scrollTo(0, 0)")
        width, height = keep(browser, name)
    finally:
        device(browser)
    wanted = looks.get("width", 1300)
    assert wanted - 20 <= width <= wanted and height > 3000  # less a scroll bar; all of it, not the first screen
    assert complaints(browser) == [] and requests_of(browser) == []
    assert (PICTURES / f"{name}.png").stat().st_size > 100_000  # something is drawn


def test_both_languages_of_one_run_stand_side_by_side(browser, tmp_path):
    """`--lang` gives a page of its own: neither replaces the other, and each is in one language, with one set of numbers."""
    found = examples.sweep()
    for lang in ("en", "zh-CN"):
        write_all(tmp_path, found, lang=lang, beside=True, env={})
    pages = {"en": tmp_path / "report.html", "zh-CN": tmp_path / "report.zh-CN.html"}
    seen = {}
    device(browser)
    for lang, path in pages.items():
        load(browser, path)
        scroll_through(browser)
        assert browser.execute_script("return document.documentElement.lang") == lang
        heads = browser.execute_script("return Array.from(document.querySelectorAll('h1, h2')).map(h => h.textContent)")
        han = [any("\u4e00" <= char <= "\u9fff" for char in head) for head in heads]
        assert len(heads) > 8 and (all(han) if lang == "zh-CN" else not any(han)), heads
        charts = browser.execute_script("return Array.from(document.querySelectorAll('.plot[id]')).map(p => p.id)")
        cells = browser.execute_script(
            "return Array.from(document.querySelectorAll('.stagetable tbody tr:first-child td')).map(c => c.textContent.trim())"
            ".filter(t => /^[0-9.]+$/.test(t))"
        )
        seen[lang] = (charts, cells)
        assert complaints(browser) == [] and requests_of(browser) == []
    assert seen["en"] == seen["zh-CN"] and len(seen["en"][0]) > 8 and len(seen["en"][1]) >= 16  # two for each of its eight stages
