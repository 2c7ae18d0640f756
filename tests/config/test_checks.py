"""What keys must mean together; each row shows its arithmetic."""



from __future__ import annotations

import json

import pytest
import scipy.stats

from bench.config import ConfigError, load_config
from bench.config.checks import affine_batch_bound, naive_batch_bound, p95_output_tokens
from bench.config.errors import PROBLEMS
from bench.config.schema import Config

OK = {"model": "m", "base_url": "http://127.0.0.1:8000"}
QUIET = {**OK, "scheduler": {"batch_size_cap": 8}, "slo": {"p95_target_ms": 600_000}}


def problems_of(tmp_path, data, base=QUIET):
    merged = {
        key: ({**base.get(key, {}), **value} if isinstance(value, dict) else value) for key, value in data.items()
    }
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**base, **merged}), encoding="utf-8")
    try:
        return load_config(path, env={}).warnings
    except ConfigError as error:
        return error.problems


def test_the_base_of_these_tests_has_no_problem(tmp_path):
    assert problems_of(tmp_path, {}) == []


CASES = [
    # id, data, words of the message
    ("CFG-020", {"scheduler": {"batch_size_cap": 9, "max_num_seqs": 8}}, "is 9, above scheduler.max_num_seqs (8)"),
    ("CFG-021", {"scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 32}}, "is 16, below scheduler.max_num_seqs (32)"),
    # longest prompt 2000 > budget 1999
    ("CFG-022", {"scheduler": {"enable_chunked_prefill": False, "max_num_batched_tokens": 1999}}, "loadgen.input_len_range (2000)"),
    ("CFG-022", {"scheduler": {"enable_chunked_prefill": False, "max_num_batched_tokens": 8191}, "engine": {"embedded": True}}, "engine.max_model_len (8192)"),
    # 0.85 x 1.36 = 1.156 > 1.15
    ("CFG-023", {"admission": {"oversubscribe_factor": 1.36}}, "1.36 x 0.85 = 1.156"),
    # 0.85 x 2.4 = 2.04 > 2
    ("CFG-024", {"admission": {"oversubscribe_factor": 2.4}}, "2.4 x 0.85 = 2.04"),
    # h100-8b: 1 s/(5.6 + 0.0109 + 1.5 ms) = 140.6/s; x 0.008 s = 1.12 < 16; (8 - 7.1)/(0.0109 + 0.000049 x 1334) = 11.8
    ("CFG-025", {"scheduler": {"batch_size_cap": 16}, "slo": {"p95_target_ms": 600_000, "tpot_deadline_ms": 8}}, "141/s x 0.008 s = 1.1"),
    # fixed 10 tokens: 800 + 9 x 100 = 1700 > 1600
    ("CFG-026", {"loadgen": {"output_len_dist": "fixed", "output_len_fixed": 10}, "slo": {"p95_target_ms": 1600}}, "= 1700 ms"),
    # 2000 + 4096 = 6096 > 6000
    ("CFG-027", {"engine": {"embedded": True, "max_model_len": 6000}}, "= 6096"),
    # ceil(6096/16) = 381 blocks + the null block = 382
    ("CFG-027", {"engine": {"embedded": True, "num_blocks": 381}}, "382 with the null block"),
    ("CFG-028", {"scheduler": {"preemption_mode": "swap", "swap_space_gb": 0}}, "is 0 with preemption_mode swap"),
    ("CFG-030", {"loadgen": {"input_len_range": [5, 4]}}, "is [5, 4]"),
    ("CFG-030", {"loadgen": {"trace_start_sec": 5, "trace_end_sec": 5}}, "not after"),
    ("CFG-031", {"loadgen": {"output_len_dist": "uniform"}}, "output_len_range is missing"),
    ("CFG-031", {"loadgen": {"output_len_dist": "fixed"}}, "output_len_fixed is missing"),
    ("CFG-031", {"loadgen": {"output_len_dist": "empirical"}}, "output_len_file is missing"),
    ("CFG-031", {"loadgen": {"arrival_process": "trace"}}, "trace_file is missing"),
    ("CFG-032", {"loadgen": {"burstiness": 0.5}}, "no effect"),
    ("CFG-032", {"loadgen": {"output_len_fixed": 5}}, "no effect"),
    ("CFG-033", {"sweep": {"warmup_sec": 300}}, "a stage lasts 300 s"),
    ("CFG-033", {"sweep": {"warmup_sec": 30, "target_duration_sec": 30}}, "a stage lasts 30 s"),
    ("CFG-034", {"sweep": {"qps": [5, 10]}}, "no stage at loadgen.target_qps (20)"),
    ("CFG-035", {"tenants": [{"name": "a", "share": 0.5}, {"name": "a", "share": 0.5}]}, "twice"),
    ("CFG-036", {"classes": [{"name": "a", "share": 0.5}, {"name": "b", "share": 0.4}]}, "add up to 0.9"),
    ("CFG-037", {"target": {"first_token_timeout_sec": 130}}, "above total_timeout_sec (120)"),
    ("CFG-037", {"target": {"first_token_timeout_sec": 0.5}}, "below slo.ttft_deadline_ms (0.8 s)"),
    ("CFG-038", {"target": {"extra_body": {"max_tokens": 5}}}, "set by the plan"),
    ("CFG-039", {"limits": {"max_cost": 5, "price_per_million_input_tokens": 1}}, "price_per_million_output_tokens is not"),
    ("CFG-038", {"target": {"endpoint": "responses", "pin_length": False, "extra_body": {"input": "x"}}}, "set by the plan"),
    ("CFG-044", {"target": {"tls_verify": False}}, "is false"),
    ("CFG-046", {"target": {"endpoint": "messages"}}, "messages has no field"),
    ("CFG-046", {"target": {"endpoint": "responses"}}, "responses has no field"),
    ("CFG-047", {"target": {"endpoint": "messages"}, "engine": {"embedded": True}}, "engine.embedded is true"),
    ("CFG-011", {"base_url": "http://127.0.0.1:8000/v1/messages"}, "ends in the endpoint"),
    ("CFG-007", {"engine": {"profile": "h100-8"}}, "did you mean h100-8b?"),
    ("CFG-006", {"target": {"extra_headers": {"a b": "x"}}}, "HTTP does not allow"),
    ("CFG-006", {"target": {"extra_headers": {"a": "x\r\ny: z"}}}, "HTTP does not allow"),
    ("CFG-006", {"target": {"extra_headers": {"content-Length": "3"}}}, "frames the request"),
    ("CFG-006", {"target": {"extra_headers": {"Transfer-Encoding": "chunked"}}}, "frames the request"),
    ("CFG-006", {"target": {"extra_headers": {"Host": "other"}}}, "frames the request"),
    ("CFG-006", {"target": {"extra_headers": {"Connection": "close"}}}, "frames the request"),
    ("CFG-006", {"sweep": {"qps": [1e-300, 20]}}, "is 1e-300"),
    ("CFG-006", {"search": {"lowest_qps": 9.9e-5}}, "is 9.9e-05"),
    ("CFG-006", {"target": {"proxy": "127.0.0.1:3128"}}, "scheme"),
    ("CFG-006", {"loadgen": {"output_len_dist": "fixed", "output_len_fixed": 5000}}, "above max_output_tokens (4096)"),
    ("CFG-006", {"loadgen": {"output_len_dist": "uniform", "output_len_range": [1, 5000]}}, "above max_output_tokens (4096)"),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "data", "words"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_cross_checks(tmp_path, problem, data, words):
    found = problems_of(tmp_path, data)
    assert [p.id for p in found] == [problem]
    assert words in found[0].text()
    assert found[0].severity == PROBLEMS[problem][0]


ALLOWED = [
    {"scheduler": {"batch_size_cap": 8, "max_num_seqs": 8, "max_num_batched_tokens": 8}},  # equal is allowed
    {"scheduler": {"enable_chunked_prefill": False, "max_num_batched_tokens": 2000}},
    {"admission": {"kv_reserve_ratio": 0.85, "oversubscribe_factor": 1.3}},  # 1.105
    {"admission": {"kv_reserve_ratio": 0.5, "oversubscribe_factor": 2.3}},  # 1.15 exactly
    {"scheduler": {"batch_size_cap": 14}},  # 14 <= 14.06
    {"loadgen": {"output_len_dist": "fixed", "output_len_fixed": 10}, "slo": {"p95_target_ms": 1700}},
    {"engine": {"embedded": True, "max_model_len": 6096, "num_blocks": 382}},
    {"loadgen": {"arrival_process": "gamma", "burstiness": 0.5}},
    {"classes": [{"name": "a", "share": 0.1}, {"name": "b", "share": 0.9}]},
    {"engine": {"profile": "mine.json"}},
]


@pytest.mark.parametrize("data", ALLOWED, ids=range(len(ALLOWED)))
def test_values_on_the_allowed_side(tmp_path, data):
    assert problems_of(tmp_path, data) == []


def test_two_at_two_is_a_warning_and_above_is_an_error(tmp_path):
    assert [p.id for p in problems_of(tmp_path, {"admission": {"kv_reserve_ratio": 1, "oversubscribe_factor": 2}})] == [
        "CFG-023"
    ]
    assert [
        p.id for p in problems_of(tmp_path, {"admission": {"kv_reserve_ratio": 1, "oversubscribe_factor": 2.001}})
    ] == ["CFG-024"]


def test_batch_bounds_of_the_reference_notes():
    # v_single 160 tok/s x 100 ms = 16
    assert naive_batch_bound(160, 0.1) == pytest.approx(16)
    # H100-8B, c = 1,300: (100 - 7.1)/(0.0109 + 0.0637) = 1,245; with 0.063 as in the notes 1,257
    assert affine_batch_bound("h100-8b", 0.1, 1300) == pytest.approx((100 - 7.1) / (0.0109 + 0.049e-3 * 1300), rel=1e-9)
    assert affine_batch_bound("h100-8b", 0.1, 1300) == pytest.approx(1257, rel=0.02)
    assert affine_batch_bound("a100-80-llama3-8b", 0.1, 1300) == pytest.approx(650, rel=0.02)
    assert affine_batch_bound("nobody", 0.1, 1300) is None


def test_both_rules_are_printed(tmp_path):
    # deadline 8 ms: v_single x 0.008 = 1.1; affine (8 - 7.1)/0.0757 = 11.8 with context 1050 + 270: the cap of 16 is above both
    (found,) = problems_of(tmp_path, {"scheduler": {"batch_size_cap": 16}, "slo": {"tpot_deadline_ms": 8}})
    assert "at most 1 by that rule" in found.text() and "affine rule" in found.text() and "it is 11" in found.text()
    assert "lower the cap" in found.text() and "both rules say so" in found.text()


@pytest.mark.parametrize(("mu", "sigma"), [(6.0, 0.6), (4.4, 0.6), (0.0, 1.0), (3.0, 0.0)])
def test_p95_of_the_output_length(mu, sigma):
    config = Config.model_validate({"loadgen": {"output_len_mu": mu, "output_len_sigma": sigma}})
    exact = scipy.stats.lognorm(sigma, scale=2.718281828459045**mu).ppf(0.95) if sigma else 2.718281828459045**mu
    assert p95_output_tokens(config) == int(exact)


def test_p95_of_the_reference_is_1082_tokens():
    # exp(6 + 0.6 x 1.64485) = 1082.37
    assert p95_output_tokens(Config()) == 1082


def test_a_cap_above_the_naive_rule_alone_is_no_remark(tmp_path):
    """h100-8b: 140.6/s x 0.1 s = 14.06 < 16, but the affine rule allows more than a thousand: nothing to do."""
    assert problems_of(tmp_path, {"scheduler": {"batch_size_cap": 16}}) == []


def test_extreme_but_legal_values_do_not_raise(tmp_path):
    extreme = {
        "loadgen": {
            "output_len_mu": 16.0,
            "output_len_sigma": 5.0,
            "max_output_tokens": 10_000_000,
            "target_qps": 1e-4,
        },
        "slo": {"tpot_deadline_ms": 1e-300},
        "engine": {"overhead_ms": 0},
    }
    assert {p.id for p in problems_of(tmp_path, extreme)} >= {"CFG-025", "CFG-034"}
