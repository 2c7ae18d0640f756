"""The rollout: gates, tenants, journal, crash, lock; a good policy goes to full, a bad one goes back."""
from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.commands import rollout as door
from bench.commands.rollout import Journal, RolloutError, command, lock, put_in_force, run
from bench.commands.rollout_plan import PlanFileError, read_plan
from control import rollout as rules
from control.rollout import Gate, Rollout, Sample, StageSpec, StageWatch, gray_tenants

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "configs" / "study"
GOOD, MISS = Sample(True, 0.1, False, 0), Sample(False, 2.0, False, 0)
PLAN = Rollout("r", tuple(StageSpec(name, 2000) for name in rules.STAGES), (Gate("attainment"),))


def feed(watch: StageWatch, new_misses: int, old_misses: int, blocks: int):
    """Judge after each block of 25 with so many misses per block and arm."""
    judged = []
    for _ in range(blocks):
        judged = watch.add([MISS] * new_misses + [GOOD] * (25 - new_misses), [MISS] * old_misses + [GOOD] * (25 - old_misses))
        if judged[0].status == "failed":
            break
    return judged[0], watch.requests


def test_a_gate_fails_on_a_loss_and_not_on_a_gain_or_the_same():
    # 10 of 25 against none: a loss of 0.4, seen at the first judgement (12 blocks x 25 requests of a paired stage)
    failed, requests = feed(StageWatch(PLAN, PLAN.stage("shadow")), 10, 0, 80)
    assert failed.status == "failed" and requests == 300 and "new minus old -0.4000" in failed.text
    assert feed(StageWatch(PLAN, PLAN.stage("shadow")), 0, 10, 80)[0].status == "clear"
    assert feed(StageWatch(PLAN, PLAN.stage("gray")), 2, 2, 40)[0].status in ("pending", "clear")


def test_metrics_have_their_own_direction():
    sample = Sample(False, 0.5, True, 3)
    assert [rules.value_of(Gate(m, limit=0.8), sample) for m in ("attainment", "rejections", "preemptions", "ttft_p95")] == [
        0.0, 1.0, 3.0, 1.0]
    refusing = Rollout("r", (StageSpec("gray", 2000),), (Gate("rejections", 0.05, 0.2),))
    watch = StageWatch(refusing, refusing.stages[0])
    status = ""
    for _ in range(30):
        status = watch.add([Sample(False, None, True, 0)] * 10 + [GOOD] * 15, [GOOD] * 25)[0].status
    assert status == "failed"
    alone = Rollout("r", (StageSpec("full", 2000),), (Gate("ttft_p95", limit=0.8),))
    slow = StageWatch(alone, alone.stages[0])
    for _ in range(40):
        status = slow.add([MISS] * 5 + [GOOD] * 20, [MISS] * 25)[0].status  # 80 % in time, whatever the old one does
    assert status == "failed"


def test_a_gate_that_can_never_be_judged_is_named_before_the_start():
    short = Rollout("r", (StageSpec("gray", 300, share=0.1),), (Gate("attainment"),))
    found = rules.problems(short)
    assert len(found) == 1 and "stage gray: gate attainment can never be judged" in found[0] and "300" in found[0]
    assert not rules.problems(PLAN)
    assert "must lie above margin" in rules.problems(Rollout("r", PLAN.stages, (Gate("attainment", 0.2, 0.1),)))[0]
    # a smaller arm needs more requests in all
    small, even = (rules.needed_requests(PLAN, StageSpec("gray", 10**6, share=s), Gate("attainment")) for s in (0.1, 0.5))
    assert small == pytest.approx(5 * even, rel=0.01)


def test_gray_tenants_are_stable_grow_and_never_all():
    shares = {f"t{i}": 1 / 40 for i in range(40)}
    ten, half = gray_tenants(shares, 0.1, "x"), gray_tenants(shares, 0.5, "x")
    assert len(ten) == 4 and len(half) == 20 and set(ten) < set(half)
    assert gray_tenants(dict(reversed(shares.items())), 0.5, "x") == half
    assert gray_tenants(shares, 0.5, "y") != half
    assert len(gray_tenants(shares, 1.0, "x")) == 39 and len(gray_tenants({"a": 0.9, "b": 0.1}, 0.05, "x")) == 1


# -- journal and state ---------------------------------------------------------------------------------------------------


def small(tmp_path: Path, **changes):
    """A plan over short stages of the demo, with a harmless new policy."""
    plan = {"name": "small", "config": str(ROOT / "configs" / "demo.json"), "new_policy": {"scheduler.policy": "edf"},
            "load": {"qps": 10}, "gates": [{"metric": "attainment", "margin": 0.02, "detect": 0.5}],
            "stages": {name: {"requests": 700} for name in rules.STAGES}} | changes
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(plan))
    return path


def quiet(_text: str) -> None:
    return None


class Crash(Exception):
    """The process dies here."""


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("before", [True, False])
def test_a_crash_between_journal_and_action_is_repaired(tmp_path, at, before):
    """Five actions: replay, shadow, gray, full, complete. Each dies once, before or after it was carried out."""
    loaded, folder = read_plan(small(tmp_path)), tmp_path / "state"
    calls = 0

    def dying(where: Path, active: dict) -> None:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            if not before:
                put_in_force(where, active)
            raise Crash
        put_in_force(where, active)

    with pytest.raises(Crash):
        run(loaded, folder, quiet, act=dying)
    state = rules.replay_events(Journal(folder / "journal.ndjson").events())
    assert state.pending is not None and state.status == rules.RUNNING
    said: list[str] = []
    result = run(loaded, folder, said.append)
    assert result["status"] == "completed" and any("repairing" in line for line in said)
    assert json.loads((folder / "active.json").read_text())["new_policy_tenants"] == ["*"]
    events = Journal(folder / "journal.ndjson").events()
    assert [e["stage"] for e in events if e["event"] == "passed"] == list(rules.STAGES)  # none twice, none left out
    again = run(loaded, folder, quiet)
    assert again["status"] == "completed" and Journal(folder / "journal.ndjson").events() == events


def test_a_torn_last_line_never_happened(tmp_path):
    path = tmp_path / "journal.ndjson"
    journal = Journal(path)
    journal.add(event="started", plan="x")
    with path.open("a") as handle:
        handle.write('{"event": "int')
    assert journal.events() == [{"event": "started", "plan": "x"}]
    journal.add(event="note")
    assert len(journal.events()) == 2
    path.write_text('{"event": "started"}\nnonsense\n{"event": "note"}\n')
    with pytest.raises(RolloutError, match="damaged"):
        journal.events()


@pytest.mark.parametrize(("events", "said"), [
    ([{"event": "note"}], "begins with 'started'"), ([{"event": "started"}, {"event": "done"}], "never meant"),
    ([{"event": "started"}, {"event": "started"}], "second start"), ([{"event": "started"}, {"event": "odd"}], "unknown"),
])
def test_a_journal_that_cannot_be(events, said):
    with pytest.raises(ValueError, match=said):
        rules.replay_events(events)


def test_another_plan_does_not_take_over_a_journal(tmp_path):
    folder = tmp_path / "state"
    run(read_plan(small(tmp_path, stages={"replay": {"requests": 1000}})), folder, quiet)
    with pytest.raises(RolloutError, match="another plan"):
        run(read_plan(small(tmp_path)), folder, quiet)


def test_two_rollouts_at_once(tmp_path):
    path = small(tmp_path)
    with lock(tmp_path / "home", read_plan(path).config):
        other = subprocess.run([sys.executable, "-m", "bench", "rollout", str(path), "--home", str(tmp_path / "home")],
                               capture_output=True, text=True, timeout=60, check=False)
    assert other.returncode == 2 and "another rollout of demo.json runs" in other.stderr
    with lock(tmp_path / "home", read_plan(path).config):
        pass  # given back


# -- plan files ----------------------------------------------------------------------------------------------------------

BAD = [
    ({"stagse": 1}, "did you mean stages"), ({"gates": [{"metric": "speed"}]}, "attainment, ttft_p95"),
    ({"stages": {"gray": {"requests": 200}}, "gates": [{"metric": "attainment"}]}, "can never be judged"),
    ({"stages": {"gray": {"share": 1.5}}}, "stages.gray.share is 1.5"), ({"new_policy": {}}, "new_policy"),
    ({"config": ""}, "config is missing"), ({"replicas": 1}, "at least 2 for a gray stage"),
    ({"gates": [{"metric": "ttft_p95"}]}, "limit_ms is None"), ({"alpha": "low"}, "alpha is 'low'"),
    ({"gates": []}, "gates is empty"), ({"stages": {"gray": {"requests": True}}}, "requests is True"),
]


@pytest.mark.parametrize(("change", "said"), BAD)
def test_bad_plans_are_refused_in_words(tmp_path, change, said):
    with pytest.raises(PlanFileError, match=said.replace("[", r"\[")):
        read_plan(small(tmp_path, **change))


def test_all_problems_come_at_once(tmp_path):
    with pytest.raises(PlanFileError) as caught:
        read_plan(small(tmp_path, alpha=7, replicas=0, odd=1))
    assert len(caught.value.problems) >= 3


def test_unknown_tenants_and_files(tmp_path):
    path = small(tmp_path, stages={"gray": {"requests": 1000, "tenants": ["nobody"]}})
    done = CliRunner().invoke(command, [str(path), "--home", str(tmp_path / "h")])
    assert done.exit_code == 2 and "nobody" in done.output
    assert CliRunner().invoke(command, [str(tmp_path / "none.yaml")]).exit_code == 2


# -- the whole way ----------------------------------------------------------------------------------------------------------


def test_the_shipped_good_policy_goes_to_full_and_the_bad_one_back(tmp_path):
    said = CliRunner().invoke(command, [str(STUDY / "rollout_good.yaml"), "--home", str(tmp_path), "--json", "-q"])
    good = json.loads(said.output)
    assert said.exit_code == 0 and good["passed"] == list(rules.STAGES)
    said = CliRunner().invoke(command, [str(STUDY / "rollout_bad.yaml"), "--home", str(tmp_path), "--json", "-q"])
    bad = json.loads(said.output)
    assert said.exit_code == 1 and bad["status"] == "rolled_back" and bad["passed"] == ["replay"]
    assert "stage shadow" in bad["reason"] and bad["active"]["new_policy_share"] == 0.0
    stage = read_plan(STUDY / "rollout_bad.yaml").rollout.stage("shadow")
    used = next(e for e in Journal(Path(bad["journal"])).events() if e["event"] == "judged" and e["stage"] == "shadow"
                and e["gates"][0]["status"] == "failed")["requests"]
    assert used <= stage.requests
    difference = json.loads((tmp_path / "batch-cap-too-small" / "difference_shadow.json").read_text())
    assert difference["only_old_met"] > 0


def test_no_difference_is_zero_without_a_sign_and_pending_is_explained():
    """Preemptions count against a policy (sign -1): none on both sides must not print as -0."""
    plan = Rollout("r", PLAN.stages, (Gate("preemptions", 0.0, 1.0), Gate("attainment")))
    watch, told = StageWatch(plan, plan.stage("shadow")), []
    for _ in range(13):  # equal arms; two misses of 25 on each side leave the share open
        judged = watch.add([MISS] * 2 + [GOOD] * 23, [MISS] * 2 + [GOOD] * 23)
    assert "new minus old +0.0000 in +0.0000..+0.0000, accepted up to +0" in judged[0].text
    assert not re.search(r"-0\.?0*(?![\d.])", " ".join(j.text for j in judged))
    assert [j.status for j in judged] == ["pending", "pending"]
    door.say_judged(plan.stage("shadow"), judged, told.append)
    assert len(told) == 3 and told[2].startswith("  shadow: pending (preemptions, attainment): the interval reaches beyond")
    assert "stages.shadow.requests" in told[2]
    told.clear()
    door.say_judged(plan.stage("shadow"), [dataclasses.replace(j, status="clear") for j in judged], told.append)
    assert len(told) == 2 and "pending" not in " ".join(told)


def test_gray_alone_catches_the_planted_policy(tmp_path):
    path = small(tmp_path, new_policy={"scheduler.batch_size_cap": 12}, load={"qps": 15}, replicas=4,
                 stages={"gray": {"requests": 2000, "share": 0.5}}, gates=[{"metric": "attainment"}])
    result = run(read_plan(path), tmp_path / "state", quiet)
    assert result["status"] == "rolled_back" and "stage gray" in result["reason"]


def test_a_slow_policy_fails_its_decision_gate(tmp_path, monkeypatch):
    import numpy as np

    import engine.decision_time as timing

    monkeypatch.setattr(timing, "decision_us", lambda *_a, **_k: np.full(500, 900.0))
    path = small(tmp_path, gates=[{"metric": "attainment", "detect": 0.5}, {"metric": "decision_us", "limit_us": 200}])
    result = run(read_plan(path), tmp_path / "state", quiet)
    assert result["status"] == "rolled_back" and "p99 900 us > 200 us" in result["reason"]
    assert door.EXIT_ROLLED_BACK == 1


@pytest.mark.parametrize("ids", [True, False])
def test_a_replay_says_when_its_trace_has_no_shared_starts(tmp_path, ids):
    config = json.loads((ROOT / "configs" / "demo.json").read_text())
    config["engine"] |= {"prefix_caching": True, "max_model_len": 32_768}
    (tmp_path / "cached.json").write_text(json.dumps(config))
    turns = [json.loads(line) for line in (ROOT / "configs" / "study" / "chat_turns.jsonl").read_text().splitlines()]
    keep = [row if ids else {k: v for k, v in row.items() if k != "hash_ids"} for row in turns]
    (tmp_path / "turns.jsonl").write_text("".join(json.dumps(row) + "\n" for row in keep))
    path = small(tmp_path, config=str(tmp_path / "cached.json"), stages={"replay": {"requests": 700}},
                 load={"trace": str(tmp_path / "turns.jsonl")}, tenants=2)
    told: list[str] = []
    run(read_plan(path), tmp_path / "state", told.append)
    losses = [text for text in told if "loss: " in text]
    assert losses == [] if ids else len(losses) == 1 and "does not say which prompts began alike" in losses[0]
