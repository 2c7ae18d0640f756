"""One name for what each serving system calls its own way."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench.client import metrics_page
from bench.records.server import SERVER_COLUMNS, SERVER_MEANING, ServerRow, read_page, samples

PROJECT = Path(__file__).parents[2]
PAGES: dict[str, tuple[str, dict[str, float]]] = {
    # two replicas: 3 + 4 running, 1 + 0 waiting, KV (0.5 + 0.3) / 2
    "vllm": (
        """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="0"} 3.0
vllm:num_requests_running{model_name="m",engine="1"} 4.0
vllm:num_requests_waiting{model_name="m",engine="0"} 1.0
vllm:num_requests_waiting{model_name="m",engine="1"} 0.0
vllm:num_requests_waiting_by_reason{model_name="m",engine="0",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{model_name="m",engine="0"} 0.5
vllm:kv_cache_usage_perc{model_name="m",engine="1"} 0.3
vllm:num_preemptions_total{model_name="m",engine="0"} 7.0
vllm:request_success_total{finished_reason="stop",model_name="m"} 10.0
vllm:request_success_total{finished_reason="length",model_name="m"} 5.0
vllm:time_to_first_token_seconds_bucket{le="0.1"} 3.0
vllm:time_to_first_token_seconds_sum{model_name="m"} 2.5
vllm:time_to_first_token_seconds_count{model_name="m"} 15.0
""",
        {"running": 7, "waiting": 1, "kv_usage": 0.4, "preemptions_total": 7, "requests_total": 15, "ttft_sum_s": 2.5,
         "ttft_count": 15},
    ),
    "sglang": (
        'sglang:num_running_reqs{model="m"} 5\nsglang:num_queue_reqs{model="m"} 2\nsglang:token_usage{model="m"} 0.25\n'
        "sglang:num_retracted_requests_total 3\n",
        {"running": 5, "waiting": 2, "kv_usage": 0.25, "preemptions_total": 3},
    ),
    "tgi": ("tgi_batch_current_size 8\ntgi_queue_size 3\ntgi_request_success{method=\"generate\"} 4\n",
            {"running": 8, "waiting": 3, "requests_total": 4}),
    "trtllm": ("trtllm_num_requests_running 2\ntrtllm_num_requests_waiting 9\ntrtllm_kv_cache_utilization 0.75\n",
               {"running": 2, "waiting": 9, "kv_usage": 0.75}),
    "triton-trtllm": (
        'nv_trt_llm_request_metrics{model="t",request_type="waiting",version="1"} 6\n'
        'nv_trt_llm_request_metrics{model="t",request_type="scheduled",version="1"} 11\n'
        'nv_trt_llm_request_metrics{model="t",request_type="max",version="1"} 512\n'
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="t"} 0.1\n'
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="t"} 90\n',
        {"running": 11, "waiting": 6, "kv_usage": 0.1},
    ),
    "llama.cpp": ("llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\nllamacpp:prompt_tokens_total 1.5e3\n",
                  {"running": 1, "waiting": 0, "prompt_tokens_total": 1500}),
}  # fmt: skip


@pytest.mark.parametrize("system", PAGES)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_each_system_is_known_by_its_names(system: str, end: str) -> None:
    text, expected = PAGES[system]
    name, values = read_page(text.replace("\n", end))
    assert name == system and values == pytest.approx(expected)


def test_sglang_with_underscores_is_the_same_page() -> None:
    """Some versions and exporters write `sglang_` for `sglang:`; a page that has both tells each number once."""
    text, expected = PAGES["sglang"]
    assert read_page(text.replace("sglang:", "sglang_")) == read_page(text) == ("sglang", expected)
    assert read_page(text + text.replace("sglang:", "sglang_")) == ("sglang", expected)
    page = (PROJECT / "tests" / "data" / "metrics" / "sglang.txt").read_text(encoding="utf-8")
    assert metrics_page.fields(page.replace("sglang:", "sglang_")) == metrics_page.fields(page)  # histograms too


def test_old_vllm_names_and_values_that_are_no_numbers() -> None:
    page = "vllm:num_requests_running 1\nvllm:num_requests_waiting NaN\nvllm:gpu_cache_usage_perc 0.5\nvllm:prompt_tokens_total x\n"
    assert read_page(page) == ("vllm", {"running": 1.0, "kv_usage": 0.5})


@pytest.mark.parametrize("page", ["", "<html>404</html>", "node_load1 0.5\n", "vllm:num_requests_waiting 1\n"])
def test_another_page_is_said_so(page: str) -> None:
    with pytest.raises(ValueError, match=r"target\.metrics_url"):
        read_page(page)


def test_every_column_has_a_meaning() -> None:
    assert tuple(SERVER_MEANING) == SERVER_COLUMNS == tuple(f.name for f in dataclasses.fields(ServerRow))


def test_samples_of_a_page_with_and_without_a_choice_of_names():
    page = (
        "# HELP a_total x\n# TYPE a_total counter\na_total 3\n"
        'b{k="x",l="a\\"b{c}"} 1.5 1700000000000\nb{k="y"} +Inf\nb{k="z"} NaN\nb{k="w"} oops\nno sample\n\n'
    )
    # Infinity, NaN and text are no values; a time stamp after the value is left out.
    assert samples(page) == {"a_total": [({}, 3.0)], "b": [({"k": "x", "l": 'a\\"b{c}'}, 1.5)]}
    assert samples(page, {"a_total"}) == {"a_total": [({}, 3.0)]}
    assert metrics_page.samples is samples  # one reader for both
