"""A live chart is as high as the drawing that it replaces, so the page does not shift under the reader."""

from __future__ import annotations

import pytest

from tests.reports.test_browser import browser, device, files, load, scroll_through  # noqa: F401 - fixtures

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]
HEIGHTS = (
    "return Object.fromEntries(Array.from(document.querySelectorAll('.plot[data-chart]')).filter(p => p.clientWidth)"
    ".map(p => [p.dataset.chart, p.getBoundingClientRect().height]))"
)


@pytest.mark.parametrize("width", [1280, 390])
def test_a_chart_keeps_its_height_when_it_comes_alive(browser, files, width):  # noqa: F811
    device(browser, width=width, scripts=False)
    load(browser, files / "sweep.html")
    drawn = browser.execute_script(HEIGHTS)
    device(browser, width=width)
    load(browser, files / "sweep.html")
    scroll_through(browser)
    live = browser.execute_script(HEIGHTS)
    assert len(drawn) > 10 and drawn.keys() == live.keys()
    # 180 px is the least that a live chart takes; a horizontal scroll bar of a drawing takes up to 15 px
    apart = {k: (drawn[k], live[k]) for k in drawn if drawn[k] > 200 and abs(drawn[k] - live[k]) > 16}
    assert apart == {}
