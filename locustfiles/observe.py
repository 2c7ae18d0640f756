"""`/metrics` of the running test, for Prometheus: the client's view, beside the service's own page.

Input: batches of rows as they reach the master, the live view. Output: a page in Prometheus text format.
Does not: judge (the analysis does), or keep rows: memory is a few counters per stage.

1. Names and units in full, as Prometheus has them: `_seconds`, `_total`, `_ratio`.
2. Histograms have a bucket edge at each SLO value, so that attainment at the deadline is exact:
   `rate(bench_ttft_seconds_bucket{le="0.8"}[1m]) / rate(bench_ttft_seconds_count[1m])`.
3. Nothing on it changes the test: no route takes an argument, and no label holds a key, an id or a prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector as PrometheusCollector

from bench import __version__
from bench.records.packing import Batch

log = logging.getLogger("bench.observe")

TTFT_EDGES = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6)
TPOT_EDGES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8)
E2E_EDGES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
LAG_EDGES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
STATES = ("ready", "preparing", "sending", "draining", "finished")


class Buckets:
    """A histogram with inclusive upper edges."""

    def __init__(self, edges: tuple[float, ...], slo_s: float) -> None:
        self.edges = tuple(sorted({*edges, slo_s} - {0.0}))
        self.counts = np.zeros(len(self.edges) + 1, dtype=np.int64)
        self.sum = 0.0

    def add(self, values: np.ndarray) -> None:
        """Count seconds; NaN is left out."""
        values = values[~np.isnan(values)]
        if len(values):
            self.counts += np.bincount(np.searchsorted(self.edges, values, side="left"), minlength=len(self.counts))
            self.sum += float(values.sum())

    def cumulative(self) -> list[tuple[str, float]]:
        """(edge, count up to it), the last edge is +Inf."""
        names = [repr(float(edge)) for edge in self.edges] + ["+Inf"]
        return list(zip(names, np.cumsum(self.counts).astype(float).tolist(), strict=True))


class StageCounts:
    """Counters of one stage."""

    def __init__(self, slo: Any) -> None:
        self.statuses: dict[str, int] = {}
        self.output_tokens = 0
        self.ttft, self.tpot = Buckets(TTFT_EDGES, slo.ttft_s), Buckets(TPOT_EDGES, slo.tpot_s)
        self.e2e, self.send_lag = Buckets(E2E_EDGES, slo.e2e_s), Buckets(LAG_EDGES, 0.0)

    def add(self, batch: Batch) -> None:
        """Count the rows of a batch."""
        words, index = batch.words["status"]
        for word, count in zip(words, np.bincount(index, minlength=len(words)).tolist(), strict=True):
            self.statuses[str(word)] = self.statuses.get(str(word), 0) + count
        ok = np.array([word == "ok" for word in words] or [False])[index]
        self.output_tokens += batch.total("output_tokens")
        for buckets, name in ((self.ttft, "ttft_s"), (self.tpot, "tpot_s"), (self.e2e, "e2e_s")):
            buckets.add(batch.seconds(name)[ok])
        self.send_lag.add(np.maximum(batch.seconds("send_lag_s"), 0.0))


class Observer(PrometheusCollector):
    """Counts what the conductor tells it and shows it when asked; begun anew with each run."""

    def __init__(self, conductor: Any) -> None:
        self._conductor = conductor
        self._run_id = ""
        self._stages: dict[str, StageCounts] = {}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def add(self, run_id: str, stage_name: str, batch: Batch) -> None:
        """Count a batch of a stage."""
        if run_id != self._run_id:
            self._run_id, self._stages = run_id, {}
        counts = self._stages.get(stage_name)
        if counts is None:
            counts = self._stages[stage_name] = StageCounts(self._conductor.live.slo)
        counts.add(batch)

    def app(self) -> Any:
        """The page as a WSGI application."""
        return make_wsgi_app(self.registry)

    # -- the page ---------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        yield from self._now()
        yield from self._counters()

    def _now(self) -> Iterator[Metric]:
        conductor, live = self._conductor, self._conductor.live
        now = conductor.run_time_s
        info = InfoMetricFamily("bench_build", "Version of scheduler-bench.")
        info.add_metric([], {"version": __version__})
        yield info
        state = GaugeMetricFamily("bench_state", "1 for what the run does now.", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(live.state == name))
        yield state
        stage = live.stages[-1] if live.stages else None
        sending = stage is not None and stage.state == "sending" and stage.start_s is not None
        offered = stage.plan.rate_at(max(0.0, now - stage.start_s)) if sending else 0.0
        yield _gauge("bench_offered_qps", "Asked arrivals per second now; 0 between stages.", offered)
        yield _gauge("bench_in_flight", "Streams open on all workers.", live.in_flight(now))
        workers = GaugeMetricFamily("bench_workers", "Worker processes.", labels=["state"])
        for name, count in conductor.worker_counts().items():
            workers.add_metric([name], count)
        yield workers
        pair = stage.attainment(now) if stage is not None else None
        if pair is not None:
            shares = GaugeMetricFamily(
                "bench_attainment_ratio",
                "Share of ALL arrivals of the stage's window, due so far, that meet the SLO; an open one counts as "
                "missed (low) or met (high).",
                labels=["stage", "bound"],
            )
            shares.add_metric([stage.plan.name, "low"], pair[0])
            shares.add_metric([stage.plan.name, "high"], pair[1])
            yield shares
        slo = live.slo
        edges = GaugeMetricFamily("bench_slo_seconds", "Deadlines of the SLO.", labels=["metric"])
        for name, value in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s), ("e2e_p95", slo.e2e_s)):
            edges.add_metric([name], value)
        yield edges
        yield _gauge("bench_attainment_target_ratio", "Share of all arrivals that must meet the SLO.", slo.target)
        text = "1 for how each stage stands so far."
        verdict = GaugeMetricFamily("bench_stage_verdict", text, labels=["stage", "verdict"])
        for each in live.stages:
            verdict.add_metric([each.plan.name, each.verdict(now)], 1.0)
        yield verdict

    def _counters(self) -> Iterator[Metric]:
        arrivals = CounterMetricFamily("bench_arrivals", "Arrivals that have their row.", labels=["stage", "status"])
        tokens = CounterMetricFamily("bench_output_tokens", "Output tokens received.", labels=["stage"])
        families = {
            "ttft": _histogram("bench_ttft_seconds", "First token, from the intended send time; ok only."),
            "tpot": _histogram("bench_tpot_seconds", "Time per further output token; ok only."),
            "e2e": _histogram("bench_e2e_seconds", "Last token, from the intended send time; ok only."),
            "send_lag": _histogram("bench_send_lag_seconds", "Lateness of our own sender."),
        }
        for name, counts in list(self._stages.items()):
            for status, count in sorted(counts.statuses.items()):
                arrivals.add_metric([name, status], count)
            tokens.add_metric([name], counts.output_tokens)
            for kind, family in families.items():
                buckets: Buckets = getattr(counts, kind)
                family.add_metric([name], buckets=buckets.cumulative(), sum_value=buckets.sum)
        yield arrivals
        yield tokens
        yield from families.values()


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))


def _histogram(name: str, text: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, labels=["stage"])


def attach(web_ui: Any, options: Any, observer: Observer) -> None:
    """Offer the page at `/metrics` of Locust's web server."""
    base = (getattr(options, "web_base_path", "") or "").rstrip("/")
    app = observer.app()

    @web_ui.auth_required_if_enabled
    def metrics() -> Any:
        from locust.web import request

        caught: dict[str, Any] = {}

        def start(status: str, headers: list[tuple[str, str]], *_: Any) -> None:
            caught.update(status=int(status.split()[0]), headers=headers)

        body = b"".join(app(request.environ, start))
        return body, caught["status"], caught["headers"]

    web_ui.app.add_url_rule(f"{base}/metrics", "bench_metrics", metrics)


def serve(observer: Observer, host: str, port: int) -> Any:
    """Offer the page on a port of its own; the server, or None when the port cannot be had."""
    from gevent.pywsgi import WSGIServer

    server = WSGIServer((host, port), observer.app(), log=None)
    try:
        server.start()
    except OSError as error:
        log.error("--metrics-port: %s:%d cannot be opened (%s); the run goes on without /metrics", host, port, error)
        return None
    log.info("metrics for Prometheus: http://%s:%d/metrics", host, server.server_port)
    return server
