"""Every planned number by hand, and the command from a simulated run."""
from __future__ import annotations

import json
import math
import random
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.commands.plan import command, plan_document
from bench.commands.plan_facts import LIMITS, now_of, unknown_limits
from bench.commands.run import command as run
from bench.config import load_config
from control.watermark import Burst, Facts, StepLaw, burst_rate_qps, dispersion, engine_flags, make_plan, residence_at_s

ROOT = Path(__file__).resolve().parents[2]
# T(n) = 10 ms + (0.1 ms + 1 us x 1000) n: 32 sequences take 10 + 32 x 1.1 = 45.2 ms; 20 us per prompt token
LAW = StepLaw(0.010, 0.0001, 20e-6, 1e-6)
FACTS = Facts(
    knee_low_qps=20.0, ttft_deadline_s=0.8, tpot_deadline_s=0.1, attainment_target=0.99, max_num_seqs=32,
    batch_size_cap=32, max_num_batched_tokens=4096, input_mean=1000.0, output_mean=100.0, input_p95=2000.0,
    context_mean=1000.0, lambda_max_qps=25.0, law=LAW, residence=((10.0, 1.0), (20.0, 3.0)), kv_tokens=44_000,
    kv_reserve_ratio=0.5,
)


def value(plan, key):
    return plan.line(key).value


def test_the_safe_rate_is_70_to_80_percent_of_the_lower_bound():
    plan = make_plan(FACTS)
    assert value(plan, "safe_low_qps") == pytest.approx(14.0)
    assert value(plan, "watermark_qps") == value(plan, "safe_high_qps") == pytest.approx(16.0)


def test_instances_by_little():
    # W at 16/s: 1 + (3 - 1) x 6/10 = 2.2 s; L of one instance 35.2; target 50 x 1.3 = 65/s: 143; 143 / 35.2 = 4.06 -> 5
    plan = make_plan(FACTS, target_qps=50.0, growth=0.3)
    assert value(plan, "in_flight_per_instance") == pytest.approx(35.2)
    assert value(plan, "in_flight_total") == pytest.approx(143.0)
    assert value(plan, "instances") == 5
    assert value(plan, "load_per_instance_ratio") == pytest.approx(65 / 5 / 20)
    # exactly what n instances carry needs n, not n + 1
    assert value(make_plan(FACTS, target_qps=48.0), "instances") == 3
    # without a stage that held there is no W, and rates decide alone
    bare = make_plan(replace(FACTS, residence=()), target_qps=48.0)
    assert value(bare, "in_flight_per_instance") is None and value(bare, "instances") == 3


def test_batch_limits_are_the_smallest_candidate():
    plan = make_plan(FACTS)
    # TPOT: lambda gamma P = 16 x 20e-6 x 1000 = 0.32; (0.1 x 0.68 - 0.01) / 0.0011 = 52.7; memory: 0.5 x 44000 / 1100 = 20
    assert value(plan, "max_num_seqs") == 20
    assert value(plan, "batch_size_cap") == 20
    # gap: n = 20: T = 10 + 22 = 32 ms; 20 + (100 - 32) ms / 20 us = 3420
    assert value(plan, "max_num_batched_tokens") == 3420
    wide = make_plan(replace(FACTS, kv_tokens=None))
    assert value(wide, "max_num_seqs") == 32  # what was measured; 52 would be another service than the one measured
    assert "= 52 " in wide.line("max_num_seqs").numbers


def test_cached_prompt_tokens_are_no_prefill_work_but_take_memory():
    # 900 of 1000 prompt tokens from the cache: lambda gamma (P - C) = 16 x 20e-6 x 100 = 0.032;
    # (0.1 x 0.968 - 0.01) / 0.0011 = 78.9 where the whole prompt gave 52.7
    warm = make_plan(replace(FACTS, cached_mean=900.0, kv_tokens=None)).line("max_num_seqs")
    assert "(P - C)" in warm.numbers and "= 78 " in warm.numbers
    # memory holds the cached tokens too: 0.5 x 44000 / 1100 = 20, as without a cache
    assert value(make_plan(replace(FACTS, cached_mean=900.0)), "max_num_seqs") == 20


def test_the_share_that_was_cached_comes_from_the_fit(simulated):
    from bench.commands.plan_facts import facts_of
    from bench.records.analysis import read_analysis

    found = read_analysis(simulated / "analysis.json")
    assert facts_of(found, simulated).cached_mean == 0.0
    found.model["lengths"]["cached_mean_tokens"] = 123.0
    assert facts_of(found, simulated).cached_mean == 123.0


def test_queue_limits_are_deadline_times_rate():
    plan = make_plan(FACTS)
    # wait: 0.8 - T(32) 0.0452 - 2000 x 20 us = 0.7148 s; X = 25/s: 17.87 departures.
    # N + 1.645 sqrt(N) = 17.87: sqrt(N) = (sqrt(1.645^2 + 4 x 17.87) - 1.645) / 2 = 3.484, N = 12.14; check: 12.14 + 5.73
    # slots 12.14 x 2000 = 24280
    # R = (4096 - 32) / (0.0452 + 4064 x 20 us = 0.12648) = 32132/s: 0.7148 x 32132 = 22968 tokens
    assert value(plan, "max_num_queued_reqs") == 12
    assert value(plan, "max_num_queued_tokens") == pytest.approx(22967, abs=2)
    # four replicas share 25/s: 4.468 departures, sqrt(N) = (sqrt(2.706 + 17.87) - 1.645) / 2 = 1.446, N = 2.09
    assert value(make_plan(replace(FACTS, replicas=4)), "max_num_queued_reqs") == 2
    # nobody could wait: one may still, and a P95 prompt may always
    tight = make_plan(replace(FACTS, ttft_deadline_s=0.05))
    assert value(tight, "max_num_queued_reqs") == 1 and value(tight, "max_num_queued_tokens") == 2000


def test_dispersion_of_known_streams():
    even = [i * 0.1 for i in range(1000)]  # ten in each second
    assert dispersion(even, 100.0, 1.0).dispersion == pytest.approx(0.0)
    rng = random.Random(7)
    t, poisson = 0.0, []
    while t < 2000:
        t += rng.expovariate(10.0)
        poisson.append(t)
    # variance / mean of 2,000 Poisson counts is 1 with sd sqrt(2/2000) = 0.032: 4 sd
    assert dispersion(poisson, 2000.0, 1.0).dispersion == pytest.approx(1.0, abs=0.13)
    batches = [float(i) for i in range(0, 2000, 10) for _ in range(100)]
    # 100 in one second of ten: mean 10, variance 0.1 x 90^2 + 0.9 x 10^2 = 900
    assert dispersion(batches, 2000.0, 1.0).dispersion == pytest.approx(90.0, rel=0.01)
    assert dispersion(even, 5.0, 1.0) is None and dispersion([], 100.0, 1.0) is None


def test_bursts_lower_the_safe_rate_and_never_raise_it():
    rate = burst_rate_qps(20.0, 3.0, 1.0, z=2.0)
    assert rate + 2.0 * math.sqrt(3.0 * rate / 1.0) == pytest.approx(20.0)
    calm, wild = [Burst(1.0, 0.5, 100)], [Burst(1.0, 1.1, 100), Burst(10.0, 30.0, 20)]
    assert value(make_plan(FACTS, bursts=calm), "watermark_qps") == pytest.approx(16.0)
    plan = make_plan(FACTS, bursts=wild)
    assert value(plan, "watermark_qps") == pytest.approx(burst_rate_qps(20.0, 29.0, 10.0)) and value(plan, "watermark_qps") < 14
    assert "30" in plan.line("burst_qps").numbers and plan.line("watermark_qps").note


def test_residence_between_and_outside():
    points = [(20.0, 3.0), (10.0, 1.0)]
    assert [residence_at_s(points, q) for q in (5, 10, 15, 20, 30)] == [1.0, 1.0, 2.0, 3.0, 3.0]


def test_flags_name_what_an_engine_lacks():
    flags = engine_flags(make_plan(FACTS))
    # vLLM counts the 20 that run with the 12 that may wait (its max_num_queued_reqs is of requests in flight)
    assert flags["vllm"] == ("--max-num-seqs 20 --max-num-batched-tokens 3420 --max-num-active-seqs 20 "
                             "--max-num-queued-reqs 32 --max-num-queued-tokens 22967", [])
    assert flags["sglang"] == ("--max-running-requests 20 --chunked-prefill-size 3420 --max-queued-requests 12",
                               ["max_num_queued_tokens"])
    assert flags["tensorrt-llm"] == ("--max_batch_size 20 --enable_chunked_prefill --max_num_tokens 3420",
                                     ["max_num_queued_reqs", "max_num_queued_tokens"])
    assert flags["llama.cpp"] == ("--parallel 20 --batch-size 3420", ["max_num_queued_reqs", "max_num_queued_tokens"])


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """A short simulated sweep of the demo, analysed without models."""
    from bench.commands.simulate import command as simulate

    folder = tmp_path_factory.mktemp("plan") / "run"
    done = CliRunner().invoke(simulate, ["--config", str(ROOT / "configs" / "demo.json"), "--qps", "10,18,24",
                                         "--stage-duration", "20", "--run-dir", str(folder), "--no-report", "-q"])
    assert done.exit_code == 0, done.output
    from analysis.analyse import write_analysis

    write_analysis(folder)
    return folder


def test_the_command_plans_a_run_and_writes_a_config_that_loads(simulated, tmp_path):
    out = tmp_path / "planned.json"
    done = CliRunner().invoke(command, [str(simulated), "--target-qps", "40", "--json", "--write", str(out)])
    assert done.exit_code == 0, done.output
    document = json.loads(done.output)
    assert document["watermark_qps"] == pytest.approx(0.8 * document["knee_low_qps"])
    settings = document["settings"]
    loaded = load_config(out).config
    assert loaded.admission.max_num_queued_reqs == settings["admission.max_num_queued_reqs"] > 3
    assert loaded.admission.reject_on_budget_exceed is True
    assert {"key": "admission.reject_on_budget_exceed", "now": False, "now_known": True, "planned": True} in document["diff"]
    demo = f"bench run --config {ROOT / 'configs' / 'demo.json'} --shape hold --qps "
    assert document["hold"].startswith(demo)
    assert "run (1 replica);" in next(line["note"] for line in document["lines"] if line["key"] == "instances")
    assert run.make_context("run", shlex.split(document["hold"])[2:]).params["config"] == ROOT / "configs" / "demo.json"
    text = CliRunner().invoke(command, [str(simulated)]).output
    assert f"prove it: {demo}" in text and "N + z sqrt(N) = (D_ttft - T(n) - gamma P95) x X" in text


ORIGIN = {"scheduler.max_num_seqs": "default", "scheduler.batch_size_cap": "default",
          "scheduler.max_num_batched_tokens": "default"}


@pytest.mark.parametrize(("told", "runs_with", "unknown"), [
    ((), {}, ["max_num_seqs", "max_num_batched_tokens"]),
    (("max_num_seqs",), {}, ["max_num_batched_tokens"]),
    (("batch_size_cap", "max_num_batched_tokens"), {}, []),
    ((), {"max_num_seqs": 64, "max_num_batched_tokens": 8192}, []),
    ((), {"max_num_seqs": 64}, ["max_num_batched_tokens"]),
])
def test_a_service_runs_with_what_it_runs_with(told, runs_with, unknown):
    origin = ORIGIN | {f"scheduler.{key}": "file c.json" for key in told}
    run = {"config": {"engine": {"embedded": False}}, "config_origin": origin}
    assert unknown_limits(run, runs_with) == unknown
    for ours in ({"simulated": True}, {"config": {"engine": {"embedded": True}}}, {"config_origin": {}}):
        assert unknown_limits(run | ours, {}) == []


@pytest.mark.parametrize(("told", "runs_with", "key", "now"), [
    ((), {}, "scheduler.max_num_seqs", (None, False)),
    ((), {"max_num_seqs": 64}, "scheduler.max_num_seqs", (64, True)),
    ((), {"max_num_seqs": 64}, "scheduler.batch_size_cap", (64, True)),  # the batch has two names
    ((), {"max_num_seqs": 64}, "scheduler.max_num_batched_tokens", (None, False)),
    (("scheduler.batch_size_cap",), {}, "scheduler.max_num_seqs", (24, True)),
    (("scheduler.batch_size_cap",), {}, "admission.max_num_queued_reqs", (None, False)),
    (("admission.max_num_queued_reqs",), {}, "admission.max_num_queued_reqs", (9, True)),
])
def test_what_the_service_has_now_is_what_somebody_said(told, runs_with, key, now):
    config = {"engine": {"embedded": False}, "admission": {"max_num_queued_reqs": 9},
              "scheduler": {"max_num_seqs": 32, "batch_size_cap": 24, "max_num_batched_tokens": 4096}}
    run = {"config": config, "config_origin": ORIGIN | dict.fromkeys(told, "file c.json")}
    assert now_of(run, runs_with, key) == now
    section, _, name = key.partition(".")
    assert now_of(run | {"simulated": True}, {}, key) == (config[section][name], True)  # the engine runs with the config


def test_no_limit_is_proposed_where_the_service_has_not_said_its_own(simulated, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(simulated, folder)
    document = json.loads((folder / "analysis.json").read_text())
    document["run"] |= {"simulated": False, "config_origin": ORIGIN}
    document["run"]["config"]["engine"]["embedded"] = False
    (folder / "analysis.json").write_text(json.dumps(document))
    plan = plan_document(folder)
    values = {line["key"]: line["value"] for line in plan["lines"]}
    assert values["watermark_qps"] > 0 and values["instances"] >= 1 and plan["hold"]
    assert [values[key] for key in (*LIMITS, "max_num_queued_reqs", "max_num_queued_tokens")] == [None] * 5
    assert not plan["settings"] and not plan["flags"] and not plan["diff"]
    assert "replica" not in next(line["note"] for line in plan["lines"] if line["key"] == "instances")  # nobody has said it
    shown = CliRunner().invoke(command, [str(folder)]).output
    assert shown.count("give --runs-with KEY=N") == 1 and shown.count("note: as above") == 4
    told = plan_document(folder, runs_with={"max_num_seqs": 20, "max_num_batched_tokens": 2048})
    assert told["settings"]["scheduler.max_num_seqs"] <= 20 and "--max-num-seqs" in told["flags"]["vllm"]["options"]
    # The batch has two names; told by one it is known by both.
    assert told["settings"]["scheduler.batch_size_cap"] <= 20
    now = {change["key"]: (change["now"], change["now_known"]) for change in told["diff"]}
    assert {now[key] for key in now if key.startswith("scheduler.max_num_seqs")} <= {(20, True)}
    assert now["admission.reject_on_budget_exceed"] == now["admission.max_num_queued_reqs"] == (None, False)
    text = CliRunner().invoke(command, [str(folder), "--runs-with", "max_num_seqs=20", "--runs-with",
                                        "max_num_batched_tokens=2048"]).output
    assert "- admission.reject_on_budget_exceed: (not said by the service)" in text and ": false" not in text
    wrong = CliRunner().invoke(command, [str(folder), "--runs-with", "max_num_seqs=0"])
    assert wrong.exit_code == 2 and "max_num_seqs=0" in wrong.output


def test_an_invalid_run_gives_no_plan(simulated, tmp_path):
    data = json.loads((simulated / "analysis.json").read_text())
    data["verdict"] = {**data["verdict"], "status": "INVALID", "exit_code": 4}
    (tmp_path / "analysis.json").write_text(json.dumps(data))
    done = CliRunner().invoke(command, [str(tmp_path)])
    assert done.exit_code == 4 and "INVALID" in done.output and "--max-num-seqs" not in done.output
    data["verdict"]["status"] = "FAIL"
    data["capacity"]["knee_low_qps"] = None
    (tmp_path / "analysis.json").write_text(json.dumps(data))
    assert CliRunner().invoke(command, [str(tmp_path)]).exit_code == 1
    nothing = CliRunner().invoke(command, [str(tmp_path / "nothing")])
    assert nothing.exit_code == 2 and "nothing does not exist" in nothing.output and "bench analyse" not in nothing.output
    assert CliRunner().invoke(command, []).exit_code == 2


def test_the_proof_goes_to_the_service_of_the_run():
    from bench.commands.plan import _same_service

    origin = {"model": "command line", "base_url": "command line", "slo.ttft_deadline_ms": "file my configs/a.json"}
    config = {"base_url": "http://127.0.0.1:8000/v1", "model": "m", "engine": {"embedded": False}}
    said = _same_service({"config": config, "config_origin": origin})
    assert said == " --config 'my configs/a.json' --base-url http://127.0.0.1:8000/v1 --model m"
    config["engine"]["embedded"] = True  # its address is made anew by each run
    assert _same_service({"config": config, "config_origin": origin}) == " --config 'my configs/a.json'"
    assert _same_service({}) == ""


@pytest.mark.parametrize(("text", "said"), [
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,5,5\n2023-11-16 17:00:00,5,5\n", "sort the file"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,-5,5\n", "negative"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,99999999999,5\n", "damaged"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,,5\n", "missing"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,5,5\n", "10 s"),
])
def test_a_damaged_trace_is_refused_with_its_fault(simulated, tmp_path, text, said):
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    done = CliRunner().invoke(command, [str(simulated), "--trace", str(trace)])
    assert done.exit_code == 2 and said in done.output
