"""The engine's Prometheus metrics, with vLLM's names, labels and buckets.

Input: one call for each thing that happens to a request. Output: `render`, the text exposition of all replicas.
Does not: read a clock or block a step; a scrape formats about 500 lines (under 1 ms).

1. Counters equal the truth: `generation_tokens_total` is the sum of `output_tokens` over all requests,
   `prompt_tokens_total` the sum of `prompt_tokens` over the requests that got a first token (vLLM counts a prompt
   when its prefill ends), `request_success_total` the number of finished requests by reason.
2. Every replica is one `engine` label, as vLLM labels its data-parallel ranks.

Source: vllm/v1/metrics/loggers.py. Hand-written instead of prometheus_client because a token costs one bisection
here and about ten times as much with that library's locks.
"""
from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                40.0, 80.0, 160.0, 640.0, 2560.0)
ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
               80.0)
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                   480.0, 960.0, 1920.0, 7680.0)
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTION_BUCKETS = (0, 1, 2, 3, 4, 5, 10, 20, 50)

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...] | None]] = {
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", TTFT_BUCKETS),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", ITL_BUCKETS),
    "request_time_per_output_token_seconds":
        ("Histogram of time_per_output_token_seconds per request.", ITL_BUCKETS),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", LATENCY_BUCKETS),
    "request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", LATENCY_BUCKETS),
    "request_inference_time_seconds": ("Histogram of time spent in RUNNING phase for request.", LATENCY_BUCKETS),
    "request_prefill_time_seconds": ("Histogram of time spent in PREFILL phase for request.", LATENCY_BUCKETS),
    "request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", LATENCY_BUCKETS),
    "request_num_preemptions": ("Histogram of the number of preemptions per request.", PREEMPTION_BUCKETS),
    "iteration_tokens_total": ("Histogram of number of tokens per engine_step.", ITERATION_BUCKETS),
    "request_prompt_tokens": ("Number of prefill tokens processed.", None),
    "request_generation_tokens": ("Number of generation tokens processed.", None),
    "request_params_max_tokens": ("Histogram of the max_tokens request parameter.", None),
}
FINISH_REASONS = ("stop", "length", "abort", "error")


def one_two_five(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`, vLLM's buckets for token counts."""
    values: list[int] = []
    power = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * power > limit:
                return tuple(values)
            values.append(mantissa * power)
        power *= 10


class Histogram:
    """A cumulative histogram with fixed upper bounds (inclusive, as Prometheus has it)."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class EngineMetrics:
    """Counters and histograms of one replica."""

    def __init__(self, max_model_len: int) -> None:
        counts = one_two_five(max_model_len)
        self.histograms = {name: Histogram(bounds or counts) for name, (_, bounds) in HISTOGRAMS.items()}
        self.itl = self.histograms["inter_token_latency_seconds"]
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.rejections: Counter[str] = Counter()

    def first_token(self, prompt_tokens: int, ttft_s: float) -> None:
        """A request finished its prefill."""
        self.prompt_tokens += prompt_tokens
        self.histograms["time_to_first_token_seconds"].observe(ttft_s)

    def step(self, scheduled_tokens: int, new_tokens: int) -> None:
        """An iteration ended."""
        self.generation_tokens += new_tokens
        self.histograms["iteration_tokens_total"].observe(scheduled_tokens)

    def request(self, truth: Mapping[str, Any], finish_reason: str, max_tokens: int) -> None:
        """A request ended; `truth` is its record (times in seconds of one clock)."""
        self.finished[finish_reason] += 1
        seen = self.histograms
        received, scheduled, done = truth["received_s"], truth["scheduled_s"], truth["done_s"]
        first, last = truth["first_token_s"], truth["last_token_s"]
        seen["e2e_request_latency_seconds"].observe(done - received)
        seen["request_num_preemptions"].observe(truth["preemptions"])
        seen["request_prompt_tokens"].observe(truth["prompt_tokens"])
        seen["request_generation_tokens"].observe(truth["output_tokens"])
        seen["request_params_max_tokens"].observe(max_tokens)
        if scheduled is None or first is None:
            return
        seen["request_queue_time_seconds"].observe(scheduled - truth["queued_s"])
        seen["request_prefill_time_seconds"].observe(first - scheduled)
        seen["request_decode_time_seconds"].observe(last - first)
        seen["request_inference_time_seconds"].observe(last - scheduled)
        if truth["output_tokens"] > 1:
            seen["request_time_per_output_token_seconds"].observe((last - first) / (truth["output_tokens"] - 1))


def number(value: float) -> str:
    """A number as Prometheus prints it."""
    return repr(float(value)) if isinstance(value, float) else f"{value}.0"


def escape(text: str) -> str:
    """A label value."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class Page:
    """Collects metric families in text exposition format 0.0.4."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, text: str, rows: Iterable[tuple[str, float]]) -> None:
        """One family; a row is (suffix plus labels, value)."""
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        self._lines += [f"{name}{labels} {number(value)}" for labels, value in rows]

    def histogram(self, name: str, text: str, rows: Iterable[tuple[str, Histogram]]) -> None:
        """One histogram family; a row is (labels without braces, histogram)."""
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} histogram"]
        for labels, histogram in rows:
            total = 0
            for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
                total += count
                edge = "+Inf" if bound == float("inf") else repr(float(bound))
                self._lines.append(f'{name}_bucket{{{labels},le="{edge}"}} {total}.0')
            self._lines.append(f"{name}_count{{{labels}}} {total}.0")
            self._lines.append(f"{name}_sum{{{labels}}} {number(float(histogram.sum))}")

    def text(self) -> str:
        """The whole page."""
        return "\n".join(self._lines) + "\n"


def render(model: str, replicas: list[tuple[EngineMetrics, Mapping[str, Any]]], own: Mapping[str, tuple[str, str, Any]],
           cache_info: Mapping[str, Any]) -> str:
    """The page of `/metrics`.

    `replicas`: the metrics and gauges (`running`, `waiting`, `capacity`, `deferred`, `kv_usage`) of each replica.
    `own`: further families of this engine, name -> (kind, help, value).
    """
    page = Page()
    base = [f'model_name="{escape(model)}",engine="{index}"' for index in range(len(replicas))]
    both = list(zip(base, replicas, strict=True))

    def gauge(name: str, text: str, key: str, extra: str = "") -> None:
        page.family(name, "gauge", text, [(f"{{{labels}{extra}}}", state[key]) for labels, (_, state) in both])

    gauge("vllm:num_requests_running", "Number of requests in model execution batches.", "running")
    gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", "waiting")
    page.family("vllm:num_requests_waiting_by_reason", "gauge", "Number of waiting requests by reason.", [
        (f'{{{labels},reason="{reason}"}}', state[reason])
        for labels, (_, state) in both for reason in ("capacity", "deferred")])
    gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", "kv_usage")
    for name, text, key in (
        ("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", "prefix_queries"),
        ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", "prefix_hits"),
        ("num_preemptions", "Cumulative number of preemption from the engine.", "preemptions"),
        ("prompt_tokens", "Number of prefill tokens processed.", "prompt_tokens"),
        ("generation_tokens", "Number of generation tokens processed.", "generation_tokens"),
    ):
        page.family(f"vllm:{name}_total", "counter", text,
                    [(f"{{{labels}}}", getattr(metrics, key)) for labels, (metrics, _) in both])
    page.family("vllm:request_success_total", "counter", "Count of successfully processed requests.", [
        (f'{{{labels},finished_reason="{reason}"}}', count)
        for labels, (metrics, _) in both for reason, count in metrics.finished.items()])
    page.family("vllm:admission_rejections_total", "counter", "Requests refused by admission control.", [
        (f'{{{labels},reason="{escape(reason)}"}}', count)
        for labels, (metrics, _) in both for reason, count in sorted(metrics.rejections.items())])
    for name, (text, _) in HISTOGRAMS.items():
        page.histogram(f"vllm:{name}", text, [(labels, metrics.histograms[name]) for labels, (metrics, _) in both])
    info = ",".join(f'{key}="{escape(str(value))}"' for key, value in cache_info.items())
    page.family("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig",
                [(f'{{{info},engine="{index}"}}', 1) for index in range(len(replicas))])
    for name, (kind, text, value) in own.items():
        page.family(name, kind, text, [("", value)])
    return page.text()
