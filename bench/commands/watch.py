"""`bench watch`: a running service by its own metrics: load, latency, attainment, alerts; and a trace to replay.

Input: the address of a metrics page; the SLO of a config. Output: a table on a terminal, else JSON lines; a trace.
Does not: compute (control/alert.py), or touch the service: it only reads the page.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

USAGE_EXIT, CHANNEL_EXIT, ALERT_EXIT = 2, 3, 1


@click.command(
    "watch",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Watch a running service by its metrics page (vLLM, SGLang, TensorRT-LLM, TGI, llama.cpp, the engine).

    Shows load, token rate, P95 TTFT and TPOT, attainment in rolling windows; alerts when queue depth x mean service
    time / running nears the P95 target, when the attainment budget burns, and when the page is away or cannot be right.
    The arrivals it saw can be written as a trace for `bench run --shape replay` and `bench simulate --trace`.

    Exit code 0: watched; 1: with --fail-on-alert, an alert was raised; 3: the page could never be read.

    \b
    Example:
      bench watch --metrics-url http://127.0.0.1:8000/metrics
      bench watch --metrics-url http://127.0.0.1:8000/metrics --duration 600 --trace seen.jsonl --json
    """,
)
@click.option("--metrics-url", default="", help="Address of the page (default: target.metrics_url of the config).")
@click.option("--config", "-c", type=click.Path(path_type=Path), default=None, help="Config whose SLO counts.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.05, max=600),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option(
    "--duration", type=click.FloatRange(min=0), default=0.0, help="Stop after so many seconds (default: Ctrl-C)."
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="Write the arrivals that were seen to this file (Mooncake JSONL: times and lengths, no text).",
)
@click.option("--gpu-metrics-url", default="", help="Page of a DCGM exporter, for the GPU's utilisation.")
@click.option(
    "--window-scale",
    type=click.FloatRange(min=1e-4, max=100),
    default=1.0,
    show_default=True,
    help="Multiplies the windows of the burn alerts (5 min, 1 h, 6 h).",
)
@click.option("--fail-on-alert", is_flag=True, help="Exit code 1 when an alert was raised.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines even on a terminal.")
def command(
    metrics_url: str,
    config: Path | None,
    interval: float,
    duration: float,
    trace: Path | None,
    gpu_metrics_url: str,
    window_scale: float,
    fail_on_alert: bool,
    as_json: bool,
) -> None:
    """Watch until the time is over or Ctrl-C."""
    from bench.config import ConfigError, load_config
    from control.alert import Slo, Watch

    try:
        settings = load_config(config).config
    except ConfigError as error:
        click.echo(f"bench watch: {error}", err=True)
        sys.exit(USAGE_EXIT)
    url = metrics_url or settings.target.metrics_url or ""
    if not url.startswith(("http://", "https://")):
        raise click.UsageError("no page to watch; give --metrics-url http://HOST:PORT/metrics")
    slo = Slo(
        settings.slo.ttft_deadline_ms / 1e3,
        settings.slo.tpot_deadline_ms / 1e3,
        settings.slo.p95_target_ms / 1e3,
        settings.slo.attainment_target,
    )
    watch = Watch(slo, scale=window_scale)
    show = _Json() if as_json or not sys.stdout.isatty() else _Table(url)
    key_headers = _key_headers(settings, url)
    read, alerted = _loop(watch, url, gpu_metrics_url, interval, duration, show, key_headers)
    if trace is not None:
        count, kind = _write_trace(trace, watch, url)
        replay = f"; replay them with: bench simulate --trace {trace}" if count else ""
        click.echo(f"{trace}: {count} arrivals ({kind}){replay}", err=True)
    if not read:
        click.echo(f"bench watch: {url} could never be read: {show.problem}; is it the metrics page?", err=True)
        sys.exit(CHANNEL_EXIT)
    sys.exit(ALERT_EXIT if fail_on_alert and alerted else 0)


def _key_headers(settings: Any, url: str) -> dict[str, str]:
    """The key's header field for a page of the config's own service; empty for any other, or without a usable key."""
    from bench.client.endpoint import page_headers
    from bench.client.request import PATHS
    from bench.config import ConfigError, api_key

    try:
        key = api_key(settings)
    except ConfigError:
        return {}
    return page_headers(url, settings.base_url, key, PATHS[settings.target.endpoint], settings.target.auth)


def _loop(
    watch: Any, url: str, gpu_url: str, interval: float, duration: float, show: Any, key_headers: dict[str, str]
) -> tuple[int, int]:
    """(looks that could be read, looks with an alert)."""
    begun = due = time.monotonic()
    read = alerted = 0
    try:
        with show:
            while True:
                look, at_s = _look(url, gpu_url, begun, show, key_headers)
                view = watch.look(look, at_s)
                read += look is not None
                alerted += any(a.level == "over" for a in view.alerts)
                show.view(view)
                due += interval
                if duration and due - begun > duration:
                    return read, alerted
                time.sleep(max(0.0, due - time.monotonic()))
    except KeyboardInterrupt:
        return read, alerted


def _look(url: str, gpu_url: str, begun: float, show: Any, key_headers: dict[str, str]) -> tuple[Any, float]:
    """(the look, or None when the page could not be read; seconds since the start)."""
    from bench.client.metrics_page import fetch, fields
    from control.alert import Look

    before = time.monotonic()
    try:
        found = fields(fetch(url, key_headers=key_headers))
    except (OSError, ValueError) as error:
        show.problem = f"{type(error).__name__}: {error}"
        return None, time.monotonic() - begun
    after = time.monotonic()
    if gpu_url:
        found["gpu_ratio"] = _gpu(gpu_url)
    return Look((before + after) / 2 - begun, scrape_s=after - before, **found), after - begun


def _gpu(url: str) -> float | None:
    from bench.client.metrics_page import fetch, gpu_ratio

    try:
        return gpu_ratio(fetch(url))
    except OSError:
        return None


def _write_trace(path: Path, watch: Any, url: str) -> tuple[int, str]:
    """Write what was seen: the embedded engine's own record when it has one, else the counters' arrivals."""
    rows = _engine_rows(url)
    kind = "each request, from the engine's own record"
    if rows is None:
        kind = "counts and lengths from the page's counters; spread evenly between two looks"
        rows = [{"timestamp": at_s * 1e3, "input_length": i, "output_length": o} for at_s, i, o in watch.arrivals]
        if watch.left_out:
            kind += f"; {watch.left_out} more were left out: a trace ends at {len(rows)}"
        if not rows:
            kind = "none came, or the page counts no answers (llama.cpp's does not): there is nothing to replay"
    first = rows[0]["timestamp"] if rows else 0.0
    with path.open("w", encoding="utf-8") as handle:
        for row in rows:
            handle.write(json.dumps({**row, "timestamp": round(row["timestamp"] - first, 3)}) + "\n")
    return len(rows), kind


def _engine_rows(url: str) -> list[dict[str, Any]] | None:
    """Requests of the embedded engine in order of arrival; None when the service is another one."""
    from bench.client.metrics_page import fetch

    try:
        if "bench_engine_steps_total" not in fetch(url):
            return None
        text = fetch(url.rsplit("/", 1)[0] + "/debug/requests", 10.0)
        records = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError):
        return None
    rows = []
    for r in records:
        if r.get("received_s") is None or not r.get("prompt_tokens"):
            continue
        rows.append(
            {
                "timestamp": r["received_s"] * 1e3,
                "input_length": r["prompt_tokens"],
                "output_length": r.get("output_tokens") or r.get("max_tokens") or 1,
                "tenant": r.get("tenant"),
                "request_class": r.get("request_class"),
            }
        )
    return sorted(rows, key=lambda r: r["timestamp"])


class _Json:
    """One line of JSON per look."""

    problem = ""

    def __enter__(self) -> _Json:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def view(self, view: Any) -> None:
        """Print a look."""
        click.echo(json.dumps(_plain(asdict(view))))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


class _Table:
    """A table that is drawn again at each look."""

    problem = ""

    def __init__(self, url: str) -> None:
        from rich.live import Live

        self._url = url
        self._live = Live(refresh_per_second=4)

    def __enter__(self) -> _Table:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def view(self, view: Any) -> None:
        """Draw a look."""
        from rich.table import Table

        table = Table(title=f"{self._url}  {view.at_s:.0f} s", title_justify="left")
        for name in ("now", "last 60 s", "alerts"):
            table.add_column(name)
        now = [
            f"{_n(view.running)} running, {_n(view.waiting)} waiting",
            f"KV {_pct(view.kv_usage)}, GPU {_pct(view.gpu_ratio)}",
            f"expected wait {_s(view.expected_wait_s)}",
        ]
        last = [
            f"{_n(view.arrival_qps)} arrivals/s, {_n(view.completed_qps)} done/s, {_n(view.output_tps)} tokens/s",
            f"TTFT p95 {_span(view.ttft_p95_s)}, TPOT p95 {_span(view.tpot_p95_s)}",
            f"TTFT in time {_shares(view.attainment_ttft)}",
        ]
        alerts = [f"{a.level.upper()} {a.kind}: {a.text}" for a in view.alerts] or ["none"]
        if not view.readable:
            alerts.insert(0, f"cannot read the page: {self.problem}")
        table.add_row("\n".join(now), "\n".join(last), "\n".join([*alerts, *view.marks]))
        self._live.update(table)


def _n(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _pct(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _span(pair: tuple[float, float] | None) -> str:
    return "-" if pair is None else f"{pair[0]:g} to {pair[1]:g} s"


def _shares(pair: tuple[float, float] | None) -> str:
    return "-" if pair is None else f"{pair[0]:.2%} to {pair[1]:.2%}"
