"""Asks the service for its own metrics once a second while a run lasts.

Input: the address of a Prometheus page. Output: rows for `server_metrics.csv` (bench/records/server.py reads the page).
Does not: judge, or hold up the run: a page that is slow or away costs rows, nothing else.

1. No proxy and no redirect. The API key goes to a page of the service itself alone, and only when that answers 401 or
   403 without it.
2. A page that cannot be read is said once, and again when it changes its mind.
"""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import gevent

from bench.client.endpoint import parse_base_url
from bench.client.metrics_page import open_page
from bench.records.server import ServerRow, read_page
from locustfiles.clock import now_s

log = logging.getLogger("bench.server_metrics")

INTERVAL_S = 1.0
TIMEOUT_S = 2.0
LIMIT_BYTES = 16_000_000


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def metrics_address(metrics_url: str | None, base_url: str, *, embedded: bool) -> str | None:
    """Where the page is: as configured, or the embedded engine's; None when nobody has said."""
    if metrics_url:
        return metrics_url
    if not embedded or not base_url:
        return None
    there = parse_base_url(base_url)
    host = f"[{there.host}]" if ":" in there.host else there.host
    return f"{there.scheme}://{host}:{there.port}/metrics"


class Scraper:
    """One greenlet that looks at one page; `row` takes what it saw, `where` gives (run time, stage)."""

    def __init__(
        self,
        url: str,
        where: Callable[[], tuple[float, int]],
        row: Callable[[ServerRow], None],
        key_headers: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self.url, self._where, self._row, self._key_headers = url, where, row, key_headers
        self.last: ServerRow | None = None
        self.misses = 0
        self._said = ""
        handlers = (urllib.request.ProxyHandler({}), _NoRedirect())
        self._opener = urllib.request.build_opener(*handlers)
        self._greenlet = gevent.spawn(self._run)

    def stop(self) -> None:
        """No more looks."""
        self._greenlet.kill()

    def _run(self) -> None:
        due = now_s()
        while True:
            self._look()
            due = max(due + INTERVAL_S, now_s())
            gevent.sleep(max(0.0, due - now_s()))

    def _look(self) -> None:
        before = now_s()
        try:
            with open_page(self._opener, self.url, TIMEOUT_S, self._key_headers) as answer:
                text = answer.read(LIMIT_BYTES).decode("utf-8", "replace")
            system, values = read_page(text)
        except (OSError, ValueError) as error:  # urllib's errors are OSErrors
            self.misses += 1
            self._say(f"{type(error).__name__}: {error}")
            return
        took = now_s() - before
        run_s, stage = self._where()
        self.last = ServerRow(run_s - took / 2, stage, system, scrape_s=took, **values)
        self._row(self.last)
        self._said = ""

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            log.warning("the service's metrics page %s gives nothing: %s", self.url, text)
