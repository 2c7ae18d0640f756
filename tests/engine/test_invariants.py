"""The invariants of the scheduler core, each as a property over random small systems (docs/engine.md lists them).

Every example is a random engine (style, policy, preemption, pool, caches, admission) under a random load with random
client aborts. Failing examples print a blob that reproduces them.
"""
from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.policies import MlfqPolicy
from engine.profiles import Profile
from engine.request import RUNNING, SWAPPED, Request
from engine.scheduler import Admit, Core, EngineConfig, Reject
from engine.settings import POLICIES, STYLES, AdmissionSpec, ClassSpec, TenantSpec
from engine.virtual import OK, Patience, drive

# Coefficients without common factors, so that step ends and arrivals do not coincide.
TINY = Profile("tiny", "test", 0.00101234567, 3.1e-6, 0.0004, 2.71e-5, 1.3e-7, 1000, 10**6, overhead_s=0.00017,
               decode_s=1.9e-6, attention_s=1e-9, pcie_gb_s=0.05, transfer_fixed_s=0.0003)
# Shrinking is bounded elsewhere only by five minutes; the blob of a failure reproduces it as it is.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
LAWS = settings(max_examples=200, deadline=None, print_blob=True, phases=PHASES,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
CLASSES = {"fast": ClassSpec(0.02, 0.005, 0), "slow": ClassSpec(0.5, 0.05, 1), "": ClassSpec(0.1, 0.02, 0)}


@pytest.fixture(autouse=True, scope="module")
def short_quanta():
    """Answers here have a few dozen tokens; mlfq must sink and give way within them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MlfqPolicy, "QUANTUM", 3)
        patch.setattr(MlfqPolicy, "STARVE_S", 0.03)
        yield


@dataclass
class Case:
    """A random system; `rows` holds (gap_us, prompt, max_tokens, output, class, tenant, prefix, patience_us)."""

    config: EngineConfig
    rows: list[tuple] = field(default_factory=list)

    def requests(self, outputs: list[int] | None = None) -> list[Request]:
        made, at_s = [], 0.0
        for i, (gap, prompt, limit, output, name, tenant, prefix, _) in enumerate(self.rows):
            at_s += gap * 1e-6 + (i % 7) * 1.7e-8
            made.append(Request(
                f"r{i}", at_s, prompt, limit, output if outputs is None else outputs[i], index=i, request_class=name,
                tenant=tenant, predicted_tokens=output,
                prefix_hashes=tuple((prefix << 16) + b for b in range(prompt // self.config.block_size)),
            ))
        return made


@st.composite
def cases(draw, **fixed):
    pick = lambda *options: draw(st.sampled_from(options))  # noqa: E731
    chunked = fixed.get("enable_chunked_prefill", pick(True, True, False))
    length = pick(24, 64)
    settings_ = {
        "profile": dataclasses.replace(TINY, swap_async=pick(False, True)),
        "style": pick(*STYLES), "policy": pick(*POLICIES), "preemption_mode": pick("recompute", "swap", "auto"),
        "swap_space_gb": pick(0.0, 2e-5, 1e-3), "block_size": pick(1, 4, 16), "max_num_seqs": pick(1, 2, 4, 8),
        "batch_size_cap": pick(None, 3), "enable_chunked_prefill": chunked,
        "max_num_batched_tokens": pick(8, 16, 48) if chunked else 80, "max_model_len": length,
        "watermark": pick(0.0, 0.1), "prefix_caching": pick(False, True), "noise_cv": pick(0.0, 0.1),
        "hopeless": pick("demote", "shed", "keep"), "seed": draw(st.integers(0, 2**32)),
        "revoke": pick(None, True, False),
        "admission": pick(None, None, AdmissionSpec(reject=False), AdmissionSpec(),
                          AdmissionSpec(0.5, 4.0, max_queued_requests=3)),
        "classes": CLASSES, "default_class": CLASSES[""],
        "tenants": pick({}, {"a": TenantSpec(1.0, 400.0), "b": TenantSpec(3.0)}),
    }
    settings_.update(fixed)
    # From "one request barely fits" to "nothing is ever short".
    blocks = -(-length // settings_["block_size"])
    settings_.setdefault("num_blocks", 1 + blocks * pick(1, 2, 4) + draw(st.integers(0, 3)))
    row = st.tuples(st.integers(0, 9000), st.integers(1, 40), st.integers(1, 24), st.integers(1, 30),
                    st.sampled_from(("", "fast", "slow")), st.sampled_from(("a", "b")), st.integers(0, 2),
                    st.sampled_from((None, None, None, 2000, 15000)))
    return Case(EngineConfig(**settings_), draw(st.lists(row, min_size=1, max_size=14)))


@dataclass
class Trace:
    """What a stepwise run showed, for the properties to look at."""

    requests: list[Request]
    core: Core
    answers: list = field(default_factory=list)
    log: list = field(default_factory=list)  # decisions per step
    tokens: Counter = field(default_factory=Counter)  # request id -> emissions seen
    token_times: dict = field(default_factory=dict)
    changes: list = field(default_factory=list)  # (time, +1 | -1) of requests inside
    steps: int = 0
    done_by_step: dict = field(default_factory=dict)  # request id -> step of its end
    generated_by_step: list = field(default_factory=list)


def run(case: Case, check=None, *, outputs=None, max_steps=20_000, aborts=True) -> Trace:
    """Step by step, with `check(core, event, plan)` at every event; independent of engine.virtual."""
    core, requests = Core(case.config), case.requests(outputs)
    t = Trace(requests, core)
    events = [(r.arrival_s, 0, r) for r in requests]
    if aborts:
        events += [(r.arrival_s + row[7] * 1e-6, 1, r) for r, row in zip(requests, case.rows, strict=True) if row[7]]
    events.sort(key=lambda e: (e[0], e[1], e[2].index))
    check = check or (lambda *a: None)

    def happen(until, inclusive):
        while events and (events[0][0] < until or (inclusive and events[0][0] <= until)):
            at_s, kind, request = events.pop(0)
            if kind == 0:
                answer = core.submit(request, at_s)
                t.answers.append(answer)
                t.changes.append((at_s, 1))
                if isinstance(answer, Reject):
                    t.changes.append((at_s, -1))
            elif core.abort(request.request_id, at_s) and request.done_s is not None:
                t.changes.append((request.done_s, -1))
            check(core, "event", None)

    now = 0.0
    while True:
        happen(now, True)
        plan = core.plan(now)
        for request in core.dropped:
            t.changes.append((request.done_s, -1))
        core.dropped.clear()
        check(core, "plan", plan)
        if plan is None:
            following = min(events[0][0] if events else math.inf, core.wake_s(now))
            if following == math.inf:
                break
            now = following
            continue
        t.steps += 1
        assert t.steps < max_steps, "no progress"
        t.log.append((plan.index, tuple(r.request_id for r in plan.decode),
                      tuple((r.request_id, n) for r, n in plan.prefill),
                      tuple(r.request_id for r in plan.preempted), tuple(r.request_id for r in plan.admitted)))
        end = now + core.duration(plan)
        assert end > now
        happen(end, False)
        result = core.commit(plan, end)
        for request in result.tokens:
            t.tokens[request.request_id] += 1
            t.token_times.setdefault(request.request_id, []).append(end)
        for request in result.finished + result.aborted:
            t.changes.append((end, -1))
            t.done_by_step[request.request_id] = t.steps
        t.generated_by_step.append({r.request_id: r.generated for r in requests})
        check(core, "commit", plan)
        now = end
    return t


def held_blocks(core: Core) -> int:
    return sum(r.blocks - r.shared for r in core.by_id.values()) + len(core.pool.refs)


@LAWS
@given(cases())
def test_01_every_request_is_somewhere(case):
    def check(core, event, plan):
        c = core.counters
        s = core.snapshot()
        assert c.submitted == c.finished + c.rejected + c.aborted + s.waiting + s.running + s.swapped
        assert s.in_flight == len(core.by_id)

    t = run(case, check)
    assert t.core.counters.submitted == len(case.rows) and not t.core.by_id


@LAWS
@given(cases())
def test_02_blocks_are_conserved_and_free_at_the_end(case):
    size = case.config.block_size

    def check(core, event, plan):
        pool = core.pool
        assert pool.plain >= 0 and pool.plain + len(pool.idle) + held_blocks(core) == pool.total
        assert not set(pool.idle) & set(pool.refs)
        refs = Counter(h for r in core.by_id.values() for h in r.prefix_hashes[: r.shared])
        assert refs == Counter(pool.refs)
        for r in core.by_id.values():
            assert r.room == r.blocks * size
            if r.state == RUNNING and event == "commit":
                assert r.blocks == -(-r.computed // size)
            elif r.state != RUNNING:
                assert r.blocks == 0
        swapped = sum(r.swap_blocks for r in core.by_id.values())
        assert core.swap_free + swapped == case.config.swap_blocks and core.swap_free >= 0

    t = run(case, check)
    assert t.core.pool.free == t.core.pool.total and not t.core.pool.refs
    assert t.core.backlog == 0 and t.core.started == 0 and t.core.door.committed == 0


@LAWS
@given(cases())
def test_03_a_step_keeps_its_limits(case):
    config = case.config

    def check(core, event, plan):
        assert len(core.running) <= min(config.max_num_seqs, config.batch_size_cap or config.max_num_seqs)
        if plan is None or event != "plan":
            return
        ids = [r.request_id for r in plan.decode] + [r.request_id for r, _ in plan.prefill]
        assert len(ids) == len(set(ids)) and set(ids) <= {r.request_id for r in core.running}
        total = len(plan.decode) + sum(n for _, n in plan.prefill)
        assert total == plan.tokens and all(n >= 1 for _, n in plan.prefill)
        if config.style != "sglang" or plan.prefill:  # sglang bounds the prefill batch, decoding by max_num_seqs
            assert total <= config.max_num_batched_tokens
        if config.style == "sglang":
            assert not (plan.decode and plan.prefill)
        if not config.enable_chunked_prefill:
            for r, n in plan.prefill:
                assert r.computed + n == r.num_tokens or r.request_id not in {p.request_id for p in plan.admitted}

    run(case, check)


@LAWS
@given(cases())
def test_04_tokens_are_emitted_once_and_within_limits(case):
    t = run(case)
    for r in t.requests:
        limit = min(r.max_tokens, case.config.max_model_len - r.prompt_tokens)
        assert t.tokens[r.request_id] == r.generated <= max(limit, 0)
        if r.state == "finished":
            assert r.generated == min(r.output_tokens, limit)
            assert r.finish_reason == ("length" if r.output_tokens >= limit else "stop")
    assert t.core.counters.generated_tokens == sum(t.tokens.values())


@LAWS
@given(cases())
def test_05_times_are_in_order(case):
    t = run(case)
    for r in t.requests:
        times = t.token_times.get(r.request_id, [])
        assert times == sorted(times) and len(times) == len(set(times))
        if r.state == "finished":
            assert r.arrival_s <= r.scheduled_s < r.first_token_s <= r.last_token_s == r.done_s
            assert times[0] == r.first_token_s and times[-1] == r.last_token_s
            gaps = sum(b - a for a, b in zip(times, times[1:], strict=False))
            assert math.isclose(r.first_token_s - r.arrival_s + gaps, r.done_s - r.arrival_s, abs_tol=1e-12)


@LAWS
@given(st.integers(1, 500), st.integers(1, 30), st.integers(1, 200), st.sampled_from(STYLES))
def test_05_ttft_at_idle_is_the_own_prefill_time(prompt, output, budget, style):
    config = EngineConfig(profile=TINY, style=style, max_num_batched_tokens=budget, max_model_len=600)
    r = Request("x", 0.25, prompt, output, output)
    core = Core(config)
    core.submit(r, 0.25)
    now = 0.25
    while (plan := core.plan(now)) is not None:
        now += core.duration(plan)
        core.commit(plan, now)
    # Chunks of `budget` tokens, each reading the context before it; counted by hand.
    own, done = 0.0, 0
    while done < prompt:
        n = min(budget, prompt - done)
        own += max(TINY.a0_s + TINY.b0_s * n, TINY.a1_s + TINY.b1_s * n) + TINY.kv_s * done + TINY.overhead_s
        done += n
    assert math.isclose(r.first_token_s - 0.25, own, rel_tol=1e-9)


@LAWS
@given(cases(style="vllm", admission=None))
def test_06_nothing_that_fits_waits(case):
    config = case.config

    def check(core, event, plan):
        if event != "plan" or core.swapped:
            return
        if plan is None:
            assert not core.by_id, "requests are inside and nothing is computed"
            return
        head = core.policy.peek(core.plan_end_s - core.duration(plan))
        if head is None or plan.preempted or config.policy == "mlfq":
            return
        r = core.by_id[head.request_id]
        matched = core.pool.match(r, (r.num_tokens - 1) // config.block_size)
        left = r.num_tokens - matched * config.block_size
        room = config.max_num_batched_tokens - plan.tokens
        need = -(-r.num_tokens // config.block_size) - matched + core.pool.idle_among(r, matched)
        fits = (len(core.running) < config.active_cap and need <= core.pool.free - core._watermark
                and (room >= left if not config.enable_chunked_prefill else room > 0))
        assert not fits, f"{r.request_id} fits and waits"

    run(case, check)


@LAWS
@given(cases())
def test_07_everything_ends(case):
    """No livelock: every accepted request ends, in a number of steps bounded by the tokens asked."""
    asked = sum(min(row[1], 64) + row[2] for row in case.rows)
    # 200 steps per token: far above a few preemptions per token, far below an endless loop.
    t = run(case, max_steps=200 * asked + 1000, aborts=False)
    for r, answer in zip(t.requests, t.answers, strict=True):
        assert isinstance(answer, Admit) == (r.state == "finished" or r.reason == "hopeless")
    if case.config.policy == "mlfq" and case.config.num_blocks > 40:
        assert all(r.preemptions <= 5 for r in t.requests)


@LAWS
@given(cases())
def test_08_same_config_and_seed_give_the_same_run(case):
    one, two = run(case), run(case)
    assert one.log == two.log
    assert [(r.first_token_s, r.done_s, r.reason) for r in one.requests] == [
        (r.first_token_s, r.done_s, r.reason) for r in two.requests]


def test_08_output_does_not_depend_on_the_hash_seed():
    code = (
        "from engine.settings import *; from engine.request import Request; from engine.virtual import drive\n"
        "import hashlib\n"
        "h = hashlib.sha256()\n"
        "for policy in POLICIES:\n"
        "  for style in STYLES:\n"
        "    c = EngineConfig(policy=policy, style=style, num_blocks=120, max_num_seqs=8, noise_cv=0.05, replicas=2,\n"
        "      router='least_loaded', tenants={n: TenantSpec() for n in 'abc'}, max_model_len=600)\n"
        "    o = drive(c, [i * 0.05 for i in range(60)], lambda i: Request(f'q{i}', i * 0.05, 50 + 7 * i % 300, 90,\n"
        "      40 + i % 50, index=i, tenant='abc'[i % 3]), seed=3)\n"
        "    h.update(o.done_s.tobytes() + o.first_s.tobytes() + o.replica.tobytes())\n"
        "print(h.hexdigest())"
    )
    prints = {subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PATH": ""}, check=True,
                             capture_output=True, text=True).stdout for seed in ("0", "1", "4711")}
    assert len(prints) == 1


@LAWS
@given(cases(), st.sampled_from([(1, "round_robin"), (2, "random"), (3, "least_loaded"), (2, "prefix")]),
       st.sampled_from([Patience(), Patience(0.02, 0.08, 0.3), Patience(math.inf, 0.05)]))
def test_09_jumping_changes_nothing(case, fleet, patience):
    config = case.config.with_(replicas=fleet[0], router=fleet[1])
    arrivals = [r.arrival_s for r in case.requests()]
    runs = []
    for jump in (False, True):
        made = case.requests()
        runs.append(drive(config, arrivals, made.__getitem__, seed=5, patience=patience, jump=jump))
    step, jump = runs
    assert step.kind == jump.kind and step.output_tokens == jump.output_tokens and step.replica == jump.replica
    assert step.preemptions == jump.preemptions and step.refusals.keys() == jump.refusals.keys()
    for name in ("scheduled_s", "first_s", "last_s", "done_s"):
        np.testing.assert_allclose(getattr(step, name), getattr(jump, name), rtol=0, atol=1e-9, err_msg=name)
    assert [c.steps for c in step.counters] == [c.steps for c in jump.counters]


@LAWS
@given(cases(style="vllm"), st.sampled_from([Patience(), Patience(0.02, 0.08, 0.3)]))
def test_09_blocks_are_conserved_while_jumping(case, patience):
    size = case.config.block_size

    def check(lane, result):
        core = lane.core
        held = len(core.pool.refs)
        for r in core.by_id.values():
            ahead = core.group.tick - r.joined if core.group is not None and r.joined >= 0 else 0
            held += -(-(r.computed + ahead) // size) - r.shared if r.state == RUNNING else 0
        assert core.pool.plain >= 0 and core.pool.plain + len(core.pool.idle) + held == core.pool.total
        if core.group is not None and core.group.active:
            assert core.running[: len(core.group.members)] == core.group.members
        seen.append(core)

    seen: list[Core] = []
    made = case.requests()
    drive(case.config, [r.arrival_s for r in made], made.__getitem__, seed=5, patience=patience, watch=check)
    for core in seen[-1:]:
        assert core.pool.free == core.pool.total and core.backlog == core.started == core.door.committed == 0


@LAWS
@given(cases())
def test_10_littles_law_holds_as_an_identity(case):
    t = run(case)
    changes = sorted(t.changes)
    inside, area, before = 0, 0.0, 0.0
    for at_s, change in changes:
        area += inside * (at_s - before)
        inside, before = inside + change, at_s
    assert inside == 0
    stay = sum(r.done_s - r.arrival_s for r in t.requests)
    # integral of L dt = sum of W over a run that starts and ends empty
    assert math.isclose(area, stay, rel_tol=1e-9, abs_tol=1e-9)


@LAWS
@given(cases(), st.floats(0.0, 1.0), st.integers(0, 2**16))
def test_11_the_hidden_length_changes_no_earlier_decision(case, share, salt):
    first = run(case)
    cut = int(share * len(first.log))
    if cut == 0:
        return
    outputs = []
    for r in first.requests:
        ended = first.done_by_step.get(r.request_id, math.inf) <= cut or r.state in ("rejected", "aborted")
        so_far = first.generated_by_step[cut - 1][r.request_id]
        # Any other length that is not reached by then; the prediction stays.
        outputs.append(r.output_tokens if ended else so_far + 1 + (salt * (r.index + 3)) % 17)
    second = run(case, outputs=outputs)
    assert first.log[:cut] == second.log[:cut]


@LAWS
@given(cases(policy="fcfs", style="vllm", preemption_mode="recompute", prefix_caching=False))
def test_12_fcfs_starts_in_arrival_order(case):
    t = run(case, aborts=False)
    if t.core.counters.preemptions == 0:
        started = [name for step in t.log for name in step[4]]
        assert started == sorted(started, key=lambda name: int(name[1:]))


@LAWS
@given(cases(policy="fcfs", style="vllm", classes={}))
def test_12_edf_with_one_deadline_is_fcfs(case):
    other = Case(case.config.with_(policy="edf"), case.rows)
    assert run(case).log == run(other).log


@LAWS
@given(cases(policy="fcfs", style="vllm", classes={}, hopeless="keep"), st.integers(1, 40))
def test_12_slack_with_one_deadline_and_one_length_is_fcfs(case, prompt):
    """Without preemption: the victim score of slack_aware is its own rule."""
    rows = [(row[0], prompt, *row[2:]) for row in case.rows]
    fcfs = run(Case(case.config, rows))
    if fcfs.core.counters.preemptions == 0:
        assert fcfs.log == run(Case(case.config.with_(policy="slack_aware"), rows)).log


@pytest.mark.parametrize("change", [{"num_blocks": 900}, {"replicas": 3, "router": "least_loaded"}])
def test_13_more_of_anything_serves_more(change):
    """Share of requests with a first token within 0.8 s; 20 seeds, so a fall of 0.02 is beyond noise."""
    base = EngineConfig(num_blocks=400, max_model_len=1200, replicas=2, router="least_loaded", noise_cv=0.03)

    def attainment(config):
        met = []
        for seed in range(20):
            rng = np.random.default_rng(seed)
            times = np.cumsum(rng.exponential(1 / 14, 150)).tolist()
            prompts, outputs = rng.integers(50, 700, 150).tolist(), rng.integers(20, 300, 150).tolist()
            out = drive(config, times, lambda i: Request(str(i), times[i], prompts[i], outputs[i], outputs[i], index=i),  # noqa: B023
                        seed=seed)
            met.append(np.mean(np.array(out.first_s) - times <= 0.8))
        return float(np.mean(met))

    assert attainment(base.with_(**change)) >= attainment(base) - 0.02


@LAWS
@given(cases(), st.sampled_from([Patience(), Patience(0.02, 0.08, 0.3)]))
def test_15_counters_equal_the_records(case, patience):
    made = case.requests()
    out = drive(case.config, [r.arrival_s for r in made], made.__getitem__, seed=5, patience=patience)
    c = out.counters[0]
    assert c.submitted == len(made) and c.rejected == len(out.refusals) == sum(c.rejections.values())
    assert c.finished == sum(k == OK for k in out.kind)
    assert c.aborted == len(made) - c.finished - c.rejected
    if patience.cut_s == math.inf:
        assert c.generated_tokens == sum(out.output_tokens)
    assert c.preemptions == sum(r.preemptions for r in made)
    assert Counter(a.reason for a in out.refusals.values()) == Counter(c.rejections)
    assert len(out.up_s) == len(out.down_s) == len(made)


def test_views_hide_the_true_length():
    r = Request("x", 0.0, 10, 50, 17)
    view = r.refresh()
    shown = {name: getattr(view, name) for name in view.__slots__}
    assert 17 not in shown.values() and not any(isinstance(v, Request) for v in shown.values())
    assert not hasattr(view, "__dict__")
    assert SWAPPED != RUNNING
