"""What the service says of itself: one row of `server_metrics.csv` a second, whatever serving system it is.

Input: a page in Prometheus text format. Output: `ServerRow`, with one name for what each system calls its own way.
Does not: fetch the page, or compute anything over time.

1. Replicas of one page are summed (requests, counters) or averaged (shares).
2. What a system does not tell is None; nothing is derived but counts from shares of themselves.

Source of the names: the metrics pages of vLLM (V1, and V0's names), SGLang, TGI, TensorRT-LLM (trtllm-serve and
Triton) and llama.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields

SERVER_METRICS = "server_metrics.csv"


@dataclass(slots=True)
class ServerRow:
    """One look at the service's metrics page; counters are since the service's start."""

    t_s: float  # seconds from the run's start, middle of the request for the page
    stage: int
    system: str
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    preemptions_total: float | None = None
    prompt_tokens_total: float | None = None
    output_tokens_total: float | None = None
    requests_total: float | None = None
    ttft_sum_s: float | None = None
    ttft_count: float | None = None
    queue_sum_s: float | None = None
    queue_count: float | None = None
    steps_total: float | None = None
    decision_total_s: float | None = None
    scrape_s: float | None = None


SERVER_COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(ServerRow))
SERVER_MEANING: dict[str, tuple[str, str]] = {
    "t_s": ("s", "middle of the request for the page"),
    "stage": ("", "stage that ran then"),
    "system": ("", "serving system by the names on its page"),
    "running": ("", "requests in the batch, all replicas"),
    "waiting": ("", "requests in the queue, all replicas"),
    "kv_usage": ("1", "share of the KV memory in use, mean over replicas"),
    "preemptions_total": ("", "preemptions (SGLang: retractions) so far"),
    "prompt_tokens_total": ("tokens", "prompt tokens so far"),
    "output_tokens_total": ("tokens", "output tokens so far"),
    "requests_total": ("", "requests that ended so far"),
    "ttft_sum_s": ("s", "sum of the service's own TTFT so far"),
    "ttft_count": ("", "number of these"),
    "queue_sum_s": ("s", "sum of the waits in the queue so far"),
    "queue_count": ("", "number of these"),
    "steps_total": ("", "engine steps so far, all replicas; pages of the embedded engine only"),
    "decision_total_s": ("s", "scheduler's own time in these steps so far; pages of the embedded engine only"),
    "scrape_s": ("s", "time the page took"),
}

# column -> names, first that is there; a name may carry one label that must hold, as name{label="value"}
_VLLM = {
    "running": ["vllm:num_requests_running"], "waiting": ["vllm:num_requests_waiting"],
    "kv_usage": ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"],
    "preemptions_total": ["vllm:num_preemptions_total", "vllm:num_preemptions"],
    "prompt_tokens_total": ["vllm:prompt_tokens_total"], "output_tokens_total": ["vllm:generation_tokens_total"],
    "requests_total": ["vllm:request_success_total"],
    "ttft_sum_s": ["vllm:time_to_first_token_seconds_sum"], "ttft_count": ["vllm:time_to_first_token_seconds_count"],
    "queue_sum_s": ["vllm:request_queue_time_seconds_sum"], "queue_count": ["vllm:request_queue_time_seconds_count"],
    "steps_total": ["bench_engine_steps_total"], "decision_total_s": ["bench_engine_decision_seconds_total"],
}  # fmt: skip
_SGLANG = {
    "running": ["sglang:num_running_reqs"], "waiting": ["sglang:num_queue_reqs"], "kv_usage": ["sglang:token_usage"],
    "preemptions_total": ["sglang:num_retracted_requests_total"],
    "prompt_tokens_total": ["sglang:prompt_tokens_total"], "output_tokens_total": ["sglang:generation_tokens_total"],
    "requests_total": ["sglang:num_requests_total"],
    "ttft_sum_s": ["sglang:time_to_first_token_seconds_sum"],
    "ttft_count": ["sglang:time_to_first_token_seconds_count"],
    "queue_sum_s": ["sglang:queue_time_seconds_sum"], "queue_count": ["sglang:queue_time_seconds_count"],
}  # fmt: skip
_TGI = {
    "running": ["tgi_batch_current_size"], "waiting": ["tgi_queue_size"], "requests_total": ["tgi_request_success"],
    "queue_sum_s": ["tgi_request_queue_duration_sum"], "queue_count": ["tgi_request_queue_duration_count"],
}  # fmt: skip
_TRTLLM = {
    "running": ["trtllm_num_requests_running"], "waiting": ["trtllm_num_requests_waiting"],
    "kv_usage": ["trtllm_kv_cache_utilization"], "requests_total": ["trtllm_request_success_total"],
    "ttft_sum_s": ["trtllm_time_to_first_token_seconds_sum"],
    "ttft_count": ["trtllm_time_to_first_token_seconds_count"],
    "queue_sum_s": ["trtllm_request_queue_time_seconds_sum"],
    "queue_count": ["trtllm_request_queue_time_seconds_count"],
}  # fmt: skip
_TRITON = {
    "running": ['nv_trt_llm_request_metrics{request_type="scheduled"}'],
    "waiting": ['nv_trt_llm_request_metrics{request_type="waiting"}'],
    "kv_usage": ['nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"}'],
}
_LLAMA = {
    "running": ["llamacpp:requests_processing"], "waiting": ["llamacpp:requests_deferred"],
    "kv_usage": ["llamacpp:kv_cache_usage_ratio"],
    "prompt_tokens_total": ["llamacpp:prompt_tokens_total"], "output_tokens_total": ["llamacpp:tokens_predicted_total"],
}  # fmt: skip
SYSTEMS = {
    "vllm": _VLLM, "sglang": _SGLANG, "tgi": _TGI, "trtllm": _TRTLLM, "triton-trtllm": _TRITON, "llama.cpp": _LLAMA,
}  # fmt: skip
Samples = dict[str, list[tuple[dict[str, str], float]]]  # name -> (labels, value)
_SHARES = ("kv_usage",)
_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?\s*$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


def samples(text: str, wanted: Collection[str] | None = None) -> Samples:
    """Every sample of a page with a finite value, by name; `wanted`: only these names. Other lines are left out.

    Names of SGLang have their colon, also when the page has an underscore there; what has both counts once.
    """
    found: Samples = {}
    for line in text.splitlines():
        match = _LINE.match(line) if line[:1] not in ("#", "") else None
        if match and (wanted is None or _colon(match[1]) in wanted):
            try:
                value = float(match[3])
            except ValueError:
                continue
            if math.isfinite(value):
                found.setdefault(match[1], []).append((dict(_LABEL.findall(match[2] or "")), value))
    for name in [name for name in found if _colon(name) != name]:
        found.setdefault(_colon(name), found.pop(name))
    return found


def _colon(name: str) -> str:
    """SGLang's names begin with `sglang:`, in some versions and behind some exporters with `sglang_`."""
    return f"sglang:{name[7:]}" if name.startswith("sglang_") else name


def read_page(text: str) -> tuple[str, dict[str, float]]:
    """(serving system, column -> value) of a metrics page. Raises ValueError when no known system speaks there."""
    wanted = {name.partition("{")[0] for names in SYSTEMS.values() for options in names.values() for name in options}
    return read_samples(samples(text, wanted))


def read_samples(found: Samples) -> tuple[str, dict[str, float]]:
    """The same from samples that hold at least the names of `SYSTEMS`."""
    for system, names in SYSTEMS.items():
        row = {c: v for c, options in names.items() if (v := _first(options, found, share=c in _SHARES)) is not None}
        if "running" in row:
            return system, row
    known = ", ".join(SYSTEMS)
    raise ValueError(f"no metric of a known serving system ({known}) is on the page; set target.metrics_url to it")


def _first(options: Iterable[str], found: Samples, *, share: bool) -> float | None:
    for option in options:
        name, _, rest = option.partition("{")
        label = _LABEL.match(rest)
        samples = [v for labels, v in found.get(name, ()) if label is None or labels.get(label[1]) == label[2]]
        if samples:
            return sum(samples) / len(samples) if share else sum(samples)
    return None
