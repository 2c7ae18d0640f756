"""The parts of a live rollout: a twin that is exact, observations that are certain, tables that hold or change nothing."""
from __future__ import annotations

import math

import numpy as np
import pytest

from engine.live import Live, LiveError, Table
from engine.observed import Book, sample
from engine.request import ABORTED, FINISHED, REJECTED, RUNNING, Request
from engine.scheduler import Core
from engine.settings import AdmissionSpec, ClassSpec, EngineConfig
from engine.twin import Twin
from engine.virtual import OK, drive

CONFIG = EngineConfig(max_num_seqs=8, num_blocks=401, max_model_len=2048, default_class=ClassSpec(0.8, 0.1), noise_cv=0.05,
                      replicas=2)


# -- the twin ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "slack_aware", "fair"])
@pytest.mark.parametrize("router", ["round_robin", "least_loaded"])
def test_a_twin_that_is_fed_as_time_goes_by_equals_one_run(policy, router):
    """Arrivals one by one, looks at odd moments in between; the whole list at once gives the same times."""
    rng = np.random.default_rng(5)
    n = 200
    at = np.cumsum(rng.exponential(1 / 30, n)).tolist()
    prompts, outputs = rng.integers(50, 1000, n).tolist(), rng.integers(2, 150, n).tolist()
    config = CONFIG.with_(policy=policy, router=router, admission=AdmissionSpec(1.0, 2.0, max_queued_requests=5))
    twin, copies = Twin(config), []
    for i in range(n):
        copies.append(twin.submit(Request(str(i), at[i], prompts[i], outputs[i] + 9, outputs[i])))
        for _ in range(rng.integers(0, 3)):
            until = at[i + 1] if i + 1 < n else at[i]
            twin.advance(float(rng.uniform(at[i], until)))
    twin.advance(math.inf)
    out = drive(config, at, lambda i: Request(str(i), at[i], prompts[i], outputs[i] + 9, outputs[i], index=i),
                seed=config.seed)
    assert [c.state == FINISHED for c in copies] == [kind == OK for kind in out.kind]
    assert 0 < sum(c.state == REJECTED for c in copies) < n / 2
    done = [i for i in range(n) if copies[i].state == FINISHED]
    np.testing.assert_allclose([copies[i].first_token_s for i in done], [out.first_s[i] for i in done], rtol=0, atol=1e-9)
    np.testing.assert_allclose([copies[i].done_s for i in done], [out.done_s[i] for i in done], rtol=0, atol=1e-9)
    assert [copies[i].preemptions for i in done] == [out.preemptions[i] for i in done] and twin.inside == 0


def test_a_client_that_leaves_leaves_the_twin_at_that_moment():
    """8 sequences for 8 slots of one replica; the ninth starts when one leaves, in the step after."""
    twin = Twin(CONFIG.with_(replicas=1))
    first = [twin.submit(Request(f"a{i}", 0.0, 10, 1000, 1000)) for i in range(8)]
    waiting = twin.submit(Request("b", 0.1, 10, 1000, 5))
    twin.advance(1.0)
    assert waiting.scheduled_s is None and all(r.state == RUNNING for r in first)
    twin.leave("a3", 1.0)
    twin.advance(2.0)
    step_s = CONFIG.profile.a0_s + CONFIG.profile.overhead_s
    assert first[3].state == ABORTED and first[3].done_s == 1.0
    assert waiting.state == FINISHED and 1.0 <= waiting.scheduled_s < 1.0 + 3 * step_s
    twin.leave("a3", 2.0)  # twice, or one that is unknown: nothing
    twin.leave("nobody", 2.0)


# -- observations ------------------------------------------------------------------------------------------------------


def served(state=RUNNING, *, first_s=None, last_s=None, generated=0, max_tokens=101):
    request = Request("r", 10.0, 50, max_tokens, max_tokens, ttft_deadline_s=0.8, tpot_deadline_s=0.1)
    request.state, request.first_token_s, request.last_token_s, request.generated = state, first_s, last_s, generated
    return request


MET, MISSED = True, False
CASES = [
    # request, now, horizon, met or None while open
    (served(FINISHED, first_s=10.5, last_s=20.5, generated=101), 21.0, 0.0, MET),  # 0.5 s <= 0.8, 10 / 100 = 0.1 s <= 0.1
    (served(FINISHED, first_s=10.5, last_s=20.6, generated=101), 21.0, 0.0, MISSED),  # 0.101 s
    (served(FINISHED, first_s=10.9, last_s=10.9, generated=1), 21.0, 0.0, MISSED),  # 0.9 s
    (served(FINISHED, first_s=10.7, last_s=10.7, generated=1), 21.0, 0.0, MET),  # one token has no gap
    (served(REJECTED), 10.0, 0.0, MISSED),
    (served(ABORTED, first_s=10.5), 11.0, 0.0, MISSED),
    (served(), 10.7, 0.0, None),  # may still come in time
    (served(), 10.9, 0.0, MISSED),  # 0.9 s without a first token
    (served(), 10.9, 2.0, None),  # whether within 2 s is worth knowing
    (served(), 12.1, 2.0, MISSED),
    (served(first_s=10.85, generated=3), 10.9, 0.0, MISSED),  # it came late: no end can mend that
    (served(first_s=10.5, generated=3), 20.0, 0.0, None),  # 9.5 s < 100 gaps of 0.1 s
    (served(first_s=10.5, generated=3), 20.6, 0.0, MISSED),  # 10.1 s > 100 gaps of 0.1 s
]


@pytest.mark.parametrize(("request_", "now", "horizon", "met"), CASES)
def test_a_miss_is_known_before_its_end(request_, now, horizon, met):
    found = sample(request_, now, horizon)
    assert (found is None) == (met is None)
    if found is not None:
        assert found["met"] is met and found["refused"] == (request_.state == REJECTED)


def test_rows_come_in_order_and_by_cursor():
    book = Book()
    slow, quick, refused = served(), served(FINISHED, first_s=10.5, last_s=10.5, generated=1), served(REJECTED)
    book.add("old", slow, quick)
    book.add("old", quick, refused)
    book.settle(10.5)
    assert book.page(0) == ([], 0, 0) and book.open == 2  # the first is open: the second waits for its turn
    book.settle(10.9)
    rows, after, lost = book.page(0)
    assert [(r["arm"], r["old"]["met"], r["new"]["met"]) for r in rows] == [("old", False, True), ("old", True, False)]
    assert (after, lost, book.open) == (2, 0, 0)
    book.add("new", quick)
    book.settle(10.9)
    (row,), after, _ = book.page(after)
    assert row["new"]["met"] and row["old"] is None and after == 3


# -- tables ------------------------------------------------------------------------------------------------------------


class Driver:
    """As much of a real-time driver as a table touches."""

    def __init__(self) -> None:
        self.core = Core(CONFIG)

    def adopt(self, config, now_s):
        self.core.adopt(config, now_s)


def live(replicas: int = 4) -> Live:
    config = CONFIG.with_(replicas=replicas)
    drivers = [Driver() for _ in range(replicas)]
    for driver in drivers:
        driver.core.config = config
    return Live(config, drivers, lambda changes: config.with_(**changes), clock=lambda: 5.0)  # type: ignore[arg-type]


def table(stage: str, **changes) -> Table:
    return Table.read({"rollout": "r", "stage": stage, "new_policy": {"policy": "edf"}, "new_policy_share": 0.5} | changes)


def rules(of: Live) -> list[str]:
    return [driver.core.config.policy for driver in of._drivers]


def test_each_stage_has_its_replicas_and_its_twin():
    one = live()
    for stage, policies, twin in (("shadow", "ffff", "edf"), ("gray", "ffee", None), ("full", "eeee", "fcfs"),
                                  ("complete", "eeee", None), ("rolled_back", "ffff", None), ("shadow", "ffff", "edf")):
        assert one.apply(table(stage))
        assert "".join(p[0] for p in rules(one)) == policies, stage
        assert (one.twin.config.policy if one.twin else None) == twin
        epoch = one.epoch
        assert not one.apply(table(stage)) and one.epoch == epoch  # the same again changes nothing
    one.clear()
    assert one.state()["stage"] == "off" and rules(one) == ["fcfs"] * 4
    # a quarter of the load is served by a quarter of the replicas, never by none
    for share, count in ((0.25, 1), (0.5, 2), (0.01, 1), (0.9, 3)):
        one.apply(table("gray", new_policy_share=share))
        assert rules(one).count("edf") == count


def test_tenants_keep_their_arm_and_a_larger_share_keeps_everybody():
    requests = [Request(f"q{i}", 0.0, 10, 10, 10, tenant=f"tenant-{i % 200}") for i in range(400)]
    small, large = table("gray", new_policy_share=0.2), table("gray", new_policy_share=0.6)
    few, many = ({r.tenant for r in requests if t.chooses(r)} for t in (small, large))
    assert few < many and 20 < len(few) < 60 and 90 < len(many) < 150  # of 200, by a uniform hash
    for r in requests:
        assert large.chooses(r) == (r.tenant in many)
    named = table("gray", new_policy_tenants=["tenant-3"])
    assert {r.tenant for r in requests if named.chooses(r)} == {"tenant-3"}
    # who has no tenant is told apart by the request
    nobody = [Request(f"q{i}", 0.0, 10, 10, 10) for i in range(200)]
    assert 60 < sum(large.chooses(r) for r in nobody) < 180
    one = live()
    one.apply(large)
    for r in requests[:50]:
        assert one.choose(r) in ((2, 3) if large.chooses(r) else (0, 1))


def test_arrivals_count_when_nobody_is_left_from_before():
    one = live(2)
    core = one._drivers[0].core
    core.submit(Request("before", 4.0, 10, 10, 10), 4.0)
    one.apply(table("shadow"))
    one.arrived(Request("early", 5.0, 10, 10, 10), 0)
    assert one.book.open == 0 and one.state()["settling"] == 1
    core.abort("before", 5.5)
    one.arrived(Request("counts", 5.6, 10, 10, 10), 0)
    assert one.book.open == 1 and one.twin is not None and one.twin.inside == 2  # the twin saw both
    # one that hangs does not hold the stage for ever
    core.submit(Request("hangs", 5.0, 10, 10, 10), 5.0)
    one.apply(table("full"))
    one.arrived(Request("much later", 100.0, 10, 10, 10), 0)
    assert one.book.open == 1


@pytest.mark.parametrize(("data", "said"), [
    ([], "not a JSON object"), ({"rollout": ""}, "rollout is ''"), ({"stage": "half"}, "stage is 'half'; allowed"),
    ({"new_policy": {}}, "new_policy is {}"), ({"new_policy_tenants": [1]}, "a list of names"),
    ({"new_policy_share": 2}, "new_policy_share is 2"), ({"new_policy_share": True}, "new_policy_share is True"),
    ({"ttft_horizon_s": -1}, "ttft_horizon_s is -1"),
])
def test_tables_that_cannot_be_read(data, said):
    with pytest.raises(LiveError, match=said.replace("[", r"\[")):
        Table.read({"rollout": "r", "stage": "gray", "new_policy": {"policy": "edf"}} | data if isinstance(data, dict) else data)


def test_tables_that_cannot_be_put_in_force_change_nothing():
    one = live()
    one.apply(table("gray"))
    before = one.state()
    for bad, said in ((table("full", new_policy={"num_blocks": 99}), "num_blocks cannot change"),
                      (table("full", new_policy={"default_class": ClassSpec(9, 9)}), "default_class cannot change"),
                      (table("gray", new_policy_share=0.0), "between 0 and 1"),
                      (table("full", new_policy={"policy": "odd"}), "engine policy is 'odd'"),
                      (table("full", rollout="other"), "'r' is at stage gray")):
        with pytest.raises(LiveError, match=said):
            one.apply(bad)
        assert one.state() == before and rules(one) == ["fcfs", "fcfs", "edf", "edf"]
    with pytest.raises(LiveError, match="has 1 replica"):
        live(1).apply(table("gray"))
    with pytest.raises(LiveError, match="without a config file"):
        Live(CONFIG, []).apply(table("shadow"))
