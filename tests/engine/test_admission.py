"""The three budgets, their order, and the costs of preemption."""
from __future__ import annotations

import math

import numpy as np
import pytest

from control import admission as rules
from control.preemption import (
    MAX_PREEMPTIONS,
    Candidate,
    VictimRule,
    break_even_tokens,
    cheaper_mode,
    choose_victim,
    recompute_s,
    swap_s,
)
from engine.admission import Bucket
from engine.profiles import PROFILES
from engine.request import Request
from engine.scheduler import Admit, Core, EngineConfig, Reject
from engine.settings import AdmissionSpec, ClassSpec, TenantSpec

SHAPE = PROFILES["reference-shape"]


def submit(core, name, prompt=100, limit=100, now_s=0.0, **more):
    answer = core.submit(Request(name, now_s, prompt, limit, limit, **more), now_s)
    return "ok" if isinstance(answer, Admit) else (answer.reason, answer.http_status)


# prompt, max_tokens, chunked, expected; model length 1000, 20 usable blocks of 16 = 320 tokens, budget 1000
IMPOSSIBLE = [
    (900, 101, True, ("too_long", 400)),
    (900, 100, True, ("never_fits", 400)),  # 1000 tokens = 63 blocks
    (220, 100, True, "ok"),  # 320 tokens = 20 blocks
    (221, 100, True, ("never_fits", 400)),  # 321 tokens = 21 blocks
    (0, 5, True, ("too_long", 400)),
    (5, 0, True, ("too_long", 400)),
]


@pytest.mark.parametrize(("prompt", "limit", "chunked", "expected"), IMPOSSIBLE)
def test_a_request_that_can_never_run_is_400(prompt, limit, chunked, expected):
    core = Core(EngineConfig(max_model_len=1000, num_blocks=21, enable_chunked_prefill=chunked))
    assert submit(core, "x", prompt, limit) == expected
    assert core.counters.rejected == (expected != "ok")


def test_memory_budget_counts_promises():
    # 100 usable blocks, limit 100 x 0.85 x 1.3 = 110; a promise of 100 + 100 tokens is 13 blocks: 8 fit (104)
    spec = AdmissionSpec(0.85, 1.3)
    core = Core(EngineConfig(num_blocks=101, admission=spec, max_num_seqs=50))
    answers = [submit(core, f"r{i}") for i in range(9)]
    assert answers == ["ok"] * 8 + [("kv_budget", 503)]
    assert core.door.committed == 104
    core.abort("r0", 0.0)
    assert submit(core, "again") == "ok"


def test_the_first_promise_always_passes():
    core = Core(EngineConfig(num_blocks=101, admission=AdmissionSpec(0.1, 1.0)))
    assert submit(core, "big", 800, 700) == "ok"
    assert submit(core, "small", 1, 1) == ("kv_budget", 503)


def test_without_reject_the_queue_waits_for_the_budget():
    spec = AdmissionSpec(0.5, 1.0, reject=False)  # limit 50 blocks; 13 each: 3 may run
    core = Core(EngineConfig(num_blocks=101, admission=spec, max_num_seqs=50))
    assert [submit(core, f"r{i}") for i in range(6)] == ["ok"] * 6
    plan = core.plan(0.0)
    assert len(plan.admitted) == 3 and plan.stop == "blocked"


def test_compute_budget_refuses_what_would_be_late():
    """One slot, 1 s per request: the second waits 1 s, above its deadline of 0.5 s."""
    config = EngineConfig(profile=SHAPE, max_num_seqs=1, admission=AdmissionSpec(), default_class=ClassSpec(0.5))
    core = Core(config)
    core.service_s = 1.0
    assert submit(core, "first") == "ok"
    assert submit(core, "second") == ("ttft_budget", 503)
    assert submit(core, "patient", ttft_deadline_s=3.0) == "ok"


def test_predicted_ttft_by_hand():
    load = rules.Load(running=4, waiting=2, active_cap=4, backlog_tokens=3000, committed_blocks=0, usable_blocks=10,
                      prefill_tps=10_000.0, residual_step_s=0.01, service_s=2.0)
    # residual 0.01 + max(3000/10000, (4 + 2 + 1 - 4) x 2/4 = 1.5) + 500/10000
    assert rules.predicted_ttft_s(load, 500) == pytest.approx(0.01 + 1.5 + 0.05)


def test_tenant_quota_is_a_bucket():
    bucket = Bucket(2.0)  # two per second, two at once
    assert [bucket.take(0.0), bucket.take(0.0)] == [0.0, 0.0]
    assert bucket.take(0.0) == pytest.approx(0.5)
    assert bucket.take(0.5) == 0.0 and bucket.take(0.5) > 0
    core = Core(EngineConfig(tenants={"a": TenantSpec(quota_qps=1.0), "b": TenantSpec()}))
    assert [submit(core, f"a{i}", tenant="a") for i in range(2)] == ["ok", ("tenant_quota", 429)]
    assert [submit(core, f"b{i}", tenant="b") for i in range(5)] == ["ok"] * 5


def test_under_memory_pressure_a_tenant_keeps_to_its_share():
    # limit 100 blocks, weights 1 : 3. Promises of 13 blocks. Above 80 % (80 blocks) tenant a may hold 25.
    config = EngineConfig(num_blocks=101, admission=AdmissionSpec(1.0, 1.0), max_num_seqs=50,
                          tenants={"a": TenantSpec(1.0), "b": TenantSpec(3.0)})
    core = Core(config)
    assert [submit(core, f"a{i}", tenant="a") for i in range(6)] == ["ok"] * 6  # 78 blocks, no pressure yet
    assert submit(core, "a6", tenant="a") == ("tenant_share", 429)
    assert submit(core, "b0", tenant="b") == "ok"


def test_the_order_of_checks_is_400_429_503():
    config = EngineConfig(num_blocks=21, max_model_len=1000, admission=AdmissionSpec(0.5, 1.0, max_queued_requests=1),
                          tenants={"a": TenantSpec(quota_qps=1.0)})
    core = Core(config)
    assert submit(core, "1", tenant="a") == "ok"
    assert submit(core, "2", 2000, 1, tenant="a") == ("too_long", 400)
    assert submit(core, "3", tenant="a") == ("tenant_quota", 429)
    assert submit(core, "4", tenant="") == ("queue_full", 503)


def test_every_refusal_has_a_reason_and_a_retry_hint():
    for reason, status in rules.REASONS.items():
        assert rules.refuse(reason).http_status == status and status in (400, 429, 503)
    core = Core(EngineConfig(num_blocks=101, admission=AdmissionSpec(0.1, 1.0)))
    submit(core, "x")
    answer = core.submit(Request("y", 0.0, 100, 100, 100), 0.0)
    assert isinstance(answer, Reject) and answer.retry_after_s is not None


# --- preemption: rows of docs/engine.md; us per token as in the table there ---------------------------------------

COSTS = [
    # name, prefill us, bytes, link GB/s, context, recompute ms, swap ms (without the fixed cost)
    ("a100-80-llama2-7b", 64.7, 524_288, 25.0, 1024, 68, 43),
    ("a100-80-llama3-8b", 67.0, 131_072, 25.0, 1024, 70, 11),
    ("h100-8b", 21.0, 131_072, 50.0, 1024, 22, 5.4),
    ("h100-8b", 21.0, 131_072, 50.0, 4096, 95, 21.5),
]


@pytest.mark.parametrize(("name", "prefill_us", "size", "link", "context", "recompute_ms", "swap_ms"), COSTS)
def test_costs_of_preemption(name, prefill_us, size, link, context, recompute_ms, swap_ms):
    profile = PROFILES[name]
    assert profile.kv_bytes_per_token == size and profile.pcie_gb_s == link
    found = recompute_s(context, 0, prefill_us / 1e6, profile.attention_s) * 1e3
    assert found == pytest.approx(recompute_ms, rel=0.03)
    assert swap_s(context, size, link * 1e9, 0.0) * 1e3 == pytest.approx(swap_ms, rel=0.03)


def test_break_even_length():
    # b1 = 60 us, 2B/link = 2 x 100,000 / 10e9 = 20 us, t_fix = 1 ms: L* = 2 ms / 40 us = 50 tokens
    assert break_even_tokens(60e-6, 100_000, 10e9, 1e-3) == pytest.approx(50.0)
    assert break_even_tokens(20e-6, 100_000, 10e9, 1e-3) == math.inf
    rule = VictimRule(60e-6, 0.0, 100_000, 10e9, 1e-3, True)
    assert cheaper_mode(49, 0, rule) == "recompute" and cheaper_mode(51, 0, rule) == "swap"
    assert cheaper_mode(51, 20, rule) == "recompute"  # 31 tokens to compute, 1.86 ms, against 3.02 ms


RULE = VictimRule(20e-6, 1e-9, 131_072, 50e9, 1e-3, False)


def candidate(context=500, generated=100, limit=400, blocks=32, preemptions=0, arrival=0.0, slack=math.inf):
    return Candidate(context, generated, limit, blocks, preemptions, arrival, slack)


def test_victim_exemptions():
    head, almost, often, free = candidate(), candidate(generated=320), candidate(preemptions=MAX_PREEMPTIONS), candidate()
    assert choose_victim([head, free, almost, often], 10.0, RULE) == 1
    assert choose_victim([head, almost, often], 10.0, RULE) == 2  # all exempt: the last
    assert choose_victim([head], 10.0, RULE) == 0


def test_victim_is_cheap_patient_and_greedy():
    head = candidate()
    assert choose_victim([head, candidate(context=2000), candidate(context=300)], 10.0, RULE) == 2
    assert choose_victim([head, candidate(slack=-1.0), candidate(slack=5.0)], 10.0, RULE) == 2
    assert choose_victim([head, candidate(limit=4000, blocks=200), candidate(limit=200)], 10.0, RULE) == 1
    assert choose_victim([head, candidate(), candidate()], 10.0, RULE) == 2  # ties go to the later one


def test_early_refusal_beats_a_queue_even_counting_refusals():
    """One H100-8B past its 6.2 requests/s: the same arrivals with and without the compute budget."""
    from engine.virtual import drive

    def share(admission):
        rng = np.random.default_rng(2)
        n = 900
        times = np.cumsum(rng.exponential(1 / 7.0, n)).tolist()
        prompts, outputs = rng.integers(100, 2001, n).tolist(), np.maximum(1, rng.lognormal(6, 0.6, n)).astype(int).tolist()
        config = EngineConfig(admission=admission, default_class=ClassSpec(0.8, 0.1), noise_cv=0.03)
        out = drive(config, times, lambda i: Request(str(i), times[i], prompts[i], outputs[i], outputs[i], index=i), seed=1)
        return float(np.mean(np.array(out.first_s) - times <= 0.8))

    assert share(AdmissionSpec()) > share(None) + 0.4
