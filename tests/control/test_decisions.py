"""Decisions carry their numbers, in both clocks; the story of a request; tenants, promises, and a way down."""
from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bench.commands.explain import command as explain
from bench.commands.simulate import command as simulate
from bench.config import load_config
from bench.workload.plan import build_plan
from control import admission as rules
from control.preemption import Candidate, VictimRule, exemption, standings
from engine.decision_time import decision_us
from engine.request import Request
from engine.scheduler import Admit, Core, EngineConfig
from engine.settings import POLICIES, AdmissionSpec, ClassSpec, TenantSpec
from engine.simulate import simulate as simulate_rows

ROOT = Path(__file__).resolve().parents[2]
BUSY = rules.Load(running=4, waiting=2, active_cap=4, backlog_tokens=3000, committed_blocks=90, usable_blocks=100,
                  prefill_tps=10_000.0, residual_step_s=0.01, service_s=2.0)


def asked(**changes):
    return rules.Asked(**{"prompt_tokens": 500, "promise_blocks": 10, "ttft_deadline_s": 5.0} | changes)


# what is asked, limits, expected reason, text, Retry-After in s
CASES = [
    # 3 departures of 2/4 s and 1.645 sqrt(3) = 2.849 more: residual 0.01 + max(0.3, 5.849 x 0.5 = 2.925) + 0.05 = 2.985 s
    # against 0.8 s: try again when 2.185 s less are ahead
    (asked(ttft_deadline_s=0.8), rules.Budgets(200), "ttft_budget", "predicted TTFT 2985 ms > 800 ms (19 of 20", 2.1846),
    # two wait, one may: two departures of 2/4 s
    (asked(), rules.Budgets(200, 1), "queue_full", "2 requests wait >= max_num_queued_reqs 1", 1.0),
    # 3500 tokens against 3000: 500 / 10,000
    (asked(), rules.Budgets(200, None, 3000), "queue_tokens", "3500 prompt tokens would wait > max_num_queued_tokens 3000", 0.05),
    (asked(), rules.Budgets(99), "kv_budget", "100 KV blocks would be promised > 99", 0.5),
    # 20 + 10 blocks against a fourth of 110, and 100 of 110 are promised (above 80 %)
    (asked(tenant_blocks=20, tenant_share=0.25), rules.Budgets(110), "tenant_share", "30 KV blocks > its share of 28", 2.0),
]


@pytest.mark.parametrize(("request_", "budgets", "reason", "text", "retry_s"), CASES)
def test_every_refusal_says_its_numbers(request_, budgets, reason, text, retry_s):
    found = rules.decide(request_, BUSY, budgets)
    assert found is not None and found.reason == reason and text in found.text
    assert found.retry_after_s == pytest.approx(retry_s, rel=1e-4) and found.measured > found.limit or reason == "queue_full"


@pytest.mark.parametrize("qps", [24.0, 28.0])
def test_past_capacity_who_is_let_in_is_in_time(qps):
    """One of 20 may be late at the edge of the deadline; not half of them, as when the mean decides."""
    changes = {"admission.reject_on_budget_exceed": True, "sweep.qps": [qps]}
    config = load_config(ROOT / "configs" / "demo.json", overrides=changes).config
    rows = simulate_rows(build_plan(config, "sweep", duration_s=60.0), config)
    ended = [r for r in rows if r.phase == "window" and r.status == "ok"]
    late = [r for r in ended if r.ttft_s > 0.8]
    refused = [r for r in rows if r.status == "rejected"]
    assert len(refused) > 0.05 * len(rows) and len(late) < 0.05 * len(ended)


def test_a_request_within_all_budgets_is_accepted():
    assert rules.decide(asked(), BUSY, rules.Budgets(200, 5, 4000)) is None


def test_a_tenant_of_priority_may_use_what_is_oversubscribed():
    low, high = asked(tenant_blocks=20, tenant_share=0.25), asked(tenant_blocks=20, tenant_share=0.25, tenant_priority=1)
    assert rules.decide(low, BUSY, rules.Budgets(110)).reason == "tenant_share"
    assert rules.decide(high, BUSY, rules.Budgets(110)) is None
    assert rules.decide(high, BUSY, rules.Budgets(99)).reason == "kv_budget"  # but not what is not there
    config = EngineConfig(num_blocks=101, admission=AdmissionSpec(1.0, 1.0), max_num_seqs=50,
                          tenants={"a": TenantSpec(1.0), "b": TenantSpec(3.0, None, 5)})
    core = Core(config)

    def enter(i, tenant):
        return isinstance(core.submit(Request(f"{tenant}{i}", 0.0, 100, 100, 100, tenant=tenant), 0.0), Admit)

    assert [enter(i, "b") for i in range(7)] == [True] * 7 and not enter(8, "b")  # 7 x 13 = 91 of 100; 8 would be 104
    assert not enter(0, "b9") and core.counters.rejections


def test_oversubscription_goes_away_by_preemptions_and_comes_back_by_finishes():
    # 100 blocks x 0.8 x (1 + 0.5 relief): 120, after one preemption 100, after two 90, never below the reserve of 80
    relief, limits = 1.0, [rules.commit_limit(100, 0.8, 1.5, 1.0)]
    for _ in range(2):
        relief = rules.relief_after_preemption(relief)
        limits.append(rules.commit_limit(100, 0.8, 1.5, relief))
    assert limits == [120, 100, 90] and rules.commit_limit(100, 0.8, 1.5, 0.0) == 80
    for _ in range(400):
        relief = rules.relief_after_finish(relief)
    assert rules.commit_limit(100, 0.8, 1.5, relief) >= 119


def test_promises():
    assert rules.promised_output("max_tokens", 500, 100.0, 200.0) == 500
    assert rules.promised_output("ewma", 500, 100.0, 200.0) == 100 and rules.promised_output("p95_output", 500, 100.0, 200.0) == 200
    assert rules.promised_output("p95_output", 150, 100.0, 200.0) == 150 and rules.promised_output("ewma", 9, 0.0, 0.0) == 9
    assert rules.nearest_rank_p95(list(range(1, 101))) == 95 and rules.nearest_rank_p95([]) == 0
    core = Core(EngineConfig(admission=AdmissionSpec(promise="p95_output")))
    for n in range(1, 301):  # the last 256 are 45..300; their P95 is 45 + 243 = 288 (rank 244)
        done = Request(f"x{n}", 0.0, 10, 400, n)
        done.generated = n
        core.door.finished(done)
    assert core.door.promise(Request("y", 0.0, 16, 400, 1)) == -(-(16 + 288) // 16)


def test_why_a_sequence_stays():
    def one(generated=10, preemptions=0):
        return Candidate(500, generated, 100, 32, preemptions, 0.0, float("inf"))

    rule = VictimRule(20e-6, 1e-9, 131_072, 50e9, 1e-3, True)
    found = standings([one(), one(80), one(10, 3), one(79)], 1.0, rule)
    assert [bool(s.exempt) for s in found] == [True, True, True, False]
    assert "80%" in exemption(one(80), 1) and "at most 3" in exemption(one(10, 3), 1)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A simulated overload with short memory, with its decisions."""
    folder = tmp_path_factory.mktemp("explain") / "run"
    sets = ("admission.reject_on_budget_exceed=true", "engine.num_blocks=1400", "admission.oversubscribe_factor=2",
            "admission.kv_reserve_ratio=1", "scheduler.policy=slack_aware", "scheduler.hopeless=shed")
    done = CliRunner().invoke(simulate, [
        "--config", str(ROOT / "configs" / "demo.json"), "--qps", "26", "--stage-duration", "12", "--no-report",
        "--decisions", "--run-dir", str(folder), "-q", *(part for s in sets for part in ("--set", s))])
    assert done.exit_code == 0, done.output
    return folder, [json.loads(line) for line in (folder / "decisions.ndjson").read_text().splitlines()]


def test_the_log_is_whole_and_in_order(told):
    _, entries = told
    by_request: dict[str, list[str]] = {}
    for e in entries:
        by_request.setdefault(e["request_id"], []).append(e["event"])
        assert e["text"] and e["rule"] and isinstance(e["numbers"], dict)
    for events in by_request.values():
        assert events[0] in ("accepted", "refused")
        assert events == ["refused"] or events[-1] in ("finished", "aborted", "revoked")
        gone = events.count("preempted") - events.count("preemption_revoked")
        assert events.count("scheduled") == gone + 1 or "scheduled" not in events
    kinds = {event for events in by_request.values() for event in events}
    assert {"accepted", "refused", "scheduled", "preempted", "first_token", "finished"} <= kinds


def test_the_prediction_at_the_door_is_near_the_truth(told):
    _, entries = told
    predicted = {e["request_id"]: e["numbers"]["predicted_ttft_s"] for e in entries if e["event"] == "accepted"}
    true = {e["request_id"]: e["numbers"]["ttft_s"] for e in entries if e["event"] == "first_token"}
    errors = [abs(predicted[r] - true[r]) for r in true]
    # memory is short here, which the prediction does not know: half of the requests within 0.3 s is what it is good for
    assert np.median(errors) < 0.3


@pytest.mark.parametrize("event", ["preempted", "refused", "first_token"])
def test_explain_tells_what_the_log_holds(told, event):
    folder, entries = told
    one = next(e for e in entries if e["event"] == event)
    said = CliRunner().invoke(explain, [str(folder), one["request_id"]])
    assert said.exit_code == 0 and one["text"] in said.output and "outcome: " in said.output
    shown = one["request_id"].removeprefix("sim-")  # 0-117, as the report has it
    for place in (shown, shown.replace("-", ":")):
        found = json.loads(CliRunner().invoke(explain, [str(folder), place, "--json"]).output)
        assert found["request_id"] == one["request_id"] and one in found["decisions"]


def test_explain_finds_a_place_in_any_ledger_and_an_id_before_a_place(told, tmp_path):
    folder, _ = told
    (tmp_path / "requests.csv.gz").write_bytes(gzip.compress((folder / "requests.csv").read_bytes()))
    assert "request sim-0-7 of" in CliRunner().invoke(explain, [str(tmp_path), "0-7"]).output
    text = (folder / "requests.csv").read_text().replace("sim-0-9,", "0-7,")  # another request is named like a place
    (tmp_path / "requests.csv").write_text(text)
    assert "request 0-7 of" in CliRunner().invoke(explain, [str(tmp_path), "0-7"]).output
    assert "stage 0, arrival 9" in CliRunner().invoke(explain, [str(tmp_path), "0-7"]).output
    assert "stage 0, arrival 7" in CliRunner().invoke(explain, [str(tmp_path), "0:7"]).output
    none = CliRunner().invoke(explain, [str(tmp_path), "0-99999"])
    assert none.exit_code == 2 and "STAGE-ARRIVAL such as 3-117" in none.output


def test_explain_without_a_log_and_without_a_request(told, tmp_path):
    folder, _ = told
    for name in ("requests.csv", "run.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    bare = CliRunner().invoke(explain, [str(tmp_path), "0:1"])
    assert bare.exit_code == 0 and "no decision was recorded" in bare.output
    record = {"request_id": "sim-0-1", "received_s": 10.0, "queued_s": 10.001, "scheduled_s": 10.01, "first_token_s": 10.1,
              "last_token_s": 11.0, "done_s": 11.0, "outcome": "ok", "reason": "length", "preemptions": 0, "decision_s": 0.002}
    (tmp_path / "engine_requests.ndjson").write_text(json.dumps(record) + "\n")
    engine = CliRunner().invoke(explain, [str(tmp_path), "0:1"]).output
    assert "first token" in engine and "100.0 ms" in engine and "scheduler CPU 2.00 ms" in engine
    assert CliRunner().invoke(explain, [str(tmp_path), "nobody"]).exit_code == 2
    assert CliRunner().invoke(explain, [str(tmp_path / "none"), "0:1"]).exit_code == 2


def test_a_journal_changes_no_decision(told):
    folder, _ = told
    from engine.virtual import drive

    rng = np.random.default_rng(3)
    times = np.cumsum(rng.exponential(1 / 26, 300)).tolist()
    prompts, outputs = rng.integers(100, 2000, 300).tolist(), rng.integers(5, 200, 300).tolist()
    config = EngineConfig(num_blocks=1400, admission=AdmissionSpec(1.0, 2.0), default_class=ClassSpec(0.8, 0.1), noise_cv=0.03)

    def outcome(journal):
        return drive(config, times, lambda i: Request(str(i), times[i], prompts[i], outputs[i], outputs[i], index=i), seed=1,
                     journal=journal)

    seen: list[dict] = []
    a, b = outcome(None), outcome(seen.append)
    assert a.kind == b.kind and a.done_s == b.done_s and seen


def test_decisions_are_fast_with_a_thousand_waiting():
    config = EngineConfig(admission=AdmissionSpec(max_queued_requests=100_000), tenants={f"t{i}": TenantSpec() for i in range(7)},
                          hopeless="keep")
    for policy in POLICIES:
        p99 = np.quantile(decision_us(config.with_(policy=policy), requests=600), 0.99)
        # 60 to 85 us here; CPU time, so other processes do not count; 3 times the limit would be a change of order
        assert p99 < 600, policy
