"""A service's metrics page: fetched, parsed, and read as a `control.alert.Look`'s fields.

Input: the address of a page in Prometheus text format; its text. Output: values under neutral names.
The text is read by `records.server`, which serves the recording of a run too.
Does not: keep history or judge. No proxy, no redirect. The key goes to a page of the service itself alone
(`endpoint.page_headers`), and only after that has refused to answer without. A page that is longer than LIMIT_BYTES, or
takes longer than asked, is not read: half of a page has wrong sums.
"""
from __future__ import annotations

import http.client
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from bench.records.server import Samples, read_samples, samples

TIMEOUT_S = 3.0
LIMIT_BYTES = 16_000_000
# neutral name -> names of histograms, first one that is there
HISTOGRAMS = {
    "ttft": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds",
             "trtllm_time_to_first_token_seconds"),
    "tpot": ("vllm:request_time_per_output_token_seconds", "vllm:time_per_output_token_seconds",
             "sglang:request_time_per_output_token_seconds", "trtllm_time_per_output_token_seconds",
             "tgi_request_mean_time_per_token_duration"),
    "input_lengths": ("vllm:request_prompt_tokens", "tgi_request_input_length"),
    "output_lengths": ("vllm:request_generation_tokens", "tgi_request_generated_tokens"),
}
SERVICE = ("vllm:request_inference_time_seconds", "tgi_request_inference_duration")
REFUSED = ("vllm:admission_rejections_total",)
FAILED = ("sglang:num_aborted_requests_total", "tgi_request_failure")
# TGI has no counters of tokens; the sums of its length histograms are the same.
PROMPT_SUM, OUTPUT_SUM = ("tgi_request_input_length_sum",), ("tgi_request_generated_tokens_sum",)
GPU = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_GR_ENGINE_ACTIVE")  # percent; share


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def open_page(
    opener: urllib.request.OpenerDirector, url: str, timeout_s: float, key_headers: Callable[[], Mapping[str, str]]
) -> Any:
    """The open answer; asked for again with `key_headers` when it is refused without (401, 403). Raises OSError."""
    try:
        return opener.open(url, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        fields = key_headers() if error.code in (401, 403) else {}
        if not fields:
            raise
        error.close()
    return opener.open(urllib.request.Request(url, headers=dict(fields)), timeout=timeout_s)


def fetch(url: str, timeout_s: float = TIMEOUT_S, key_headers: Mapping[str, str] | None = None) -> str:
    """The whole page. Raises OSError when it cannot be read within `timeout_s` (twice that when bytes drip)."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    until_s = time.monotonic() + timeout_s
    parts, size = [], 0
    try:
        with open_page(opener, url, timeout_s, lambda: key_headers or {}) as answer:
            while chunk := answer.read1(1 << 16):
                parts.append(chunk)
                size += len(chunk)
                if size > LIMIT_BYTES:
                    raise OSError(f"the page is longer than {LIMIT_BYTES} bytes; is it the metrics page?")
                if time.monotonic() > until_s:
                    raise TimeoutError(f"the page was not whole after {timeout_s:g} s")
            if answer.length:  # bytes that were announced and did not come
                raise OSError(f"the page ended {answer.length} bytes early")
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP answer ({type(error).__name__}: {str(error)[:80]})") from None
    return b"".join(parts).decode("utf-8", "replace")


def buckets(found: Samples, name: str) -> tuple[tuple[float, float], ...]:
    """(upper edge, cumulative count) summed over all label sets; empty when the histogram is not whole."""
    edges: dict[float, float] = {}
    for labels, value in found.get(name + "_bucket", ()):
        try:
            edge = float(labels.get("le", "").replace("+Inf", "inf"))
        except ValueError:
            return ()
        edges[edge] = edges.get(edge, 0.0) + value
    rows = tuple(sorted(edges.items()))
    return rows if rows and math.isinf(rows[-1][0]) else ()


def fields(text: str) -> dict[str, Any]:
    """The fields of a `Look` that the page tells (without its time). Raises ValueError when it tells nothing known."""
    if text.lstrip()[:1] in ("{", "["):
        raise ValueError("the page is JSON, no Prometheus text; trtllm-serve has its own at /prometheus/metrics")
    found = samples(text)
    _system, row = read_samples(found)
    out: dict[str, Any] = {
        "running": row["running"], "waiting": row.get("waiting", 0.0), "kv_usage": row.get("kv_usage"),
        "finished": row.get("requests_total"),
        "prompt_tokens": row.get("prompt_tokens_total", _sum(found, PROMPT_SUM)),
        "output_tokens": row.get("output_tokens_total", _sum(found, OUTPUT_SUM)),
        "preemptions": row.get("preemptions_total"),
        "refused": _sum(found, REFUSED) or 0.0, "failed": _sum(found, FAILED) or 0.0, "gpu_ratio": _gpu(found),
    }
    for key, names in HISTOGRAMS.items():
        out[key] = next((b for name in names if (b := buckets(found, name))), ())
    for name in SERVICE:
        if name + "_count" in found:
            out["service_sum_s"], out["service_count"] = _sum(found, (name + "_sum",)), _sum(found, (name + "_count",))
            break
    return out


def gpu_ratio(text: str) -> float | None:
    """Utilisation of the GPUs on a page of a DCGM exporter, 0..1; None when it tells none."""
    return _gpu(samples(text))


def _sum(found: Samples, names: tuple[str, ...]) -> float | None:
    for name in names:
        if name in found:
            return sum(value for _, value in found[name])
    return None


def _gpu(found: Samples) -> float | None:
    """Mean utilisation of the GPUs, 0..1."""
    for name, scale in zip(GPU, (100.0, 1.0), strict=True):
        if name in found:
            values = [value for _, value in found[name]]
            return sum(values) / len(values) / scale
    return None
