"""Tenant and class of a trace's rows stand in the plan, in the schedule and in the rows; unknown names are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.config.schema import Config
from bench.workload.plan import Plan, PlanError, build_plan
from bench.workload.schedule import build_schedule
from bench.workload.trace import TraceError, read_trace
from engine.simulate import simulate

ROWS = [("acme", "chat"), ("acme", "batch"), (None, "chat"), ("zeta", "chat"), ("acme", None)]
DECLARED = {"tenants": [{"name": "zeta", "share": 0.5}, {"name": "acme", "share": 0.5}],
            "classes": [{"name": "chat", "share": 0.9, "ttft_deadline_ms": 5}, {"name": "batch", "share": 0.1}]}  # fmt: skip


def write(folder: Path, rows=ROWS) -> Path:
    path = folder / "seen.jsonl"
    path.write_text("".join(json.dumps({"timestamp": 1000 * i, "input_length": 20 + i, "output_length": 5, "tenant": t,
                                        "request_class": c}) + "\n" for i, (t, c) in enumerate(rows)))  # fmt: skip
    return path


def config(path: Path, **sections) -> Config:
    return Config.model_validate({"loadgen": {"trace_file": str(path)}, **sections})


def pairs(rows) -> list[tuple[str, str]]:
    return [(r.tenant, r.request_class) for r in rows]


EXPECTED = [(t or "", c or "") for t, c in ROWS]


@pytest.mark.parametrize("sections", [{}, DECLARED, {"tenants": DECLARED["tenants"]}])
def test_rows_have_the_labels_of_the_trace(tmp_path, sections):
    c = config(write(tmp_path), **sections)
    plan = Plan.from_json(build_plan(c, "replay").to_json())
    assert pairs(simulate(plan, c)) == EXPECTED
    s = build_schedule(plan, plan.stages[0])
    assert [(plan.tenants[t].name, plan.classes[k].name) for t, k in zip(s.tenant, s.request_class, strict=True)] == EXPECTED


def test_groups_are_the_declared_ones_and_nobody(tmp_path):
    taken = build_plan(config(write(tmp_path)), "replay")
    assert [(g.name, g.share) for g in taken.tenants] == [("acme", 0.6), ("", 0.2), ("zeta", 0.2)]
    declared = build_plan(config(write(tmp_path), **DECLARED), "replay")
    assert [g.name for g in declared.tenants] == ["zeta", "acme", ""] and declared.tenants[2].share == 0.2
    assert [g.name for g in declared.classes] == ["chat", "batch", ""]


def test_a_sweep_repeats_the_labels_turn_by_turn(tmp_path):
    c = config(write(tmp_path), **DECLARED)
    c = c.model_copy(update={"loadgen": c.loadgen.model_copy(update={"arrival_process": "trace"})})
    rows = simulate(build_plan(c, "sweep", qps=[2.0], duration_s=12), c)
    assert len(rows) > 20 and pairs(rows) == (EXPECTED * 5)[: len(rows)]


def test_labels_change_the_hash(tmp_path):
    hashes = set()
    for rows in (ROWS, ROWS[::-1], [(None, None)] * 5):
        plan = build_plan(config(write(tmp_path, rows)), "replay")
        hashes.add(build_schedule(plan, plan.stages[0]).hash)
    assert len(hashes) == 3


def test_a_trace_that_names_nobody_leaves_the_draw(tmp_path):
    plain = write(tmp_path, [(None, None)] * 40)
    plan = build_plan(config(plain, **DECLARED), "replay")
    assert [g.name for g in plan.tenants] == ["zeta", "acme"]
    assert len(set(build_schedule(plan, plan.stages[0]).tenant.tolist())) == 2  # by share, as without labels


@pytest.mark.parametrize(("rows", "words"), [
    ([*ROWS, ("nobody", "chat")], ":6: tenant is 'nobody', the config's tenants are zeta, acme; declare it there"),
    ([("acme", "chat"), ("acme", "vip"), ("acme", "vip")], ":2: request_class is 'vip', the config's classes are chat, batch"),
])  # fmt: skip
def test_names_that_the_config_does_not_declare_are_refused(tmp_path, rows, words):
    path = write(tmp_path, rows)
    with pytest.raises(PlanError) as caught:
        build_plan(config(path, **DECLARED), "replay")
    assert words in str(caught.value) and str(path) in str(caught.value)
    build_plan(config(path), "replay")  # nothing declared: taken as they come


@pytest.mark.parametrize(("name", "words"), [
    (5, "tenant is '5'; a printable name"), ("a\nb", "a printable name of at most 100"), ("x" * 101, "at most 100"),
    (["a"], "tenant is"), ("\x1b[31m", "printable"),
])  # fmt: skip
def test_damaged_names_are_refused_with_their_line(tmp_path, name, words):
    with pytest.raises(TraceError) as caught:
        read_trace(write(tmp_path, [("ok", None), (name, None)]))
    assert ":2: tenant is" in str(caught.value) and words in str(caught.value) and "\x1b" not in str(caught.value)


def test_endless_names_are_refused(tmp_path):
    with pytest.raises(TraceError, match=":1001: more than 1000 different names of tenant"):
        read_trace(write(tmp_path, [(f"user-{i}", None) for i in range(1001)]))


def test_a_rollout_replays_rows_of_nobody_beside_declared_tenants(tmp_path):
    from engine.arms import serve, traffic_of
    from engine.settings import EngineConfig

    c = config(write(tmp_path), **DECLARED)
    plan = build_plan(c, "replay")
    traffic = traffic_of(plan, build_schedule(plan, plan.stages[0]), c, ["zeta", "acme"], 1, 100)
    assert [traffic.names[t] for t in traffic.tenant] == [t or "" for t, _ in ROWS]
    assert len(serve(EngineConfig.from_config(c), traffic, 1)) == len(ROWS)
