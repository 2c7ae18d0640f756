"""`bench simulate` and the virtual driver: a run folder like a measured one, the same every time."""
from __future__ import annotations

import csv
import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bench.commands.simulate import command
from bench.config import load_config
from bench.records.request import FIELD_NAMES
from bench.records.stage import INFLIGHT_COLUMNS, STAGE_COLUMNS
from bench.workload.plan import build_plan
from bench.workload.schedule import build_schedule
from engine import simulate as module
from engine.profiles import load_profile
from engine.scheduler import EngineConfig
from engine.settings import ClassSpec
from engine.simulate import simulate, simulate_stages

# Answers of about 98 tokens: one H100-8B holds about 20 requests/s.
SHORT = {
    "scheduler.policy": "fcfs", "scheduler.batch_size_cap": 32, "admission.reject_on_budget_exceed": False,
    "loadgen.output_len_mu": 4.4, "loadgen.duration_sec": 20.0, "sweep.warmup_sec": 2.0, "sweep.qps": [5.0, 15.0],
    "target.first_token_timeout_sec": 5.0, "sweep.drain_limit_sec": 10.0,
}


def config(**changes):
    return load_config(None, env={}, overrides={**SHORT, **changes}).config


def test_engine_config_takes_every_key():
    c = config(**{
        "scheduler.policy": "edf", "scheduler.max_num_seqs": 20, "scheduler.batch_size_cap": 10,
        "scheduler.max_num_batched_tokens": 1000, "scheduler.preemption_mode": "swap", "scheduler.swap_space_gb": 2.0,
        "admission.kv_reserve_ratio": 0.5, "engine.style": "sglang", "engine.profile": "l4-8b", "engine.replicas": 2,
        "engine.block_size": 8, "engine.num_blocks": 4000, "engine.max_model_len": 7000, "engine.prefix_caching": True,
        "engine.noise_cv": 0.1, "engine.overhead_ms": 3.0, "engine.time_scale": 2.0, "engine.seed": 9,
        "engine.router": "least_loaded", "slo.ttft_deadline_ms": 500.0,
        "classes": [{"name": "a", "share": 1.0, "ttft_deadline_ms": 100.0, "priority": 3}],
        "tenants": [{"name": "t", "share": 1.0, "weight": 2.0, "quota_qps": 4.0}],
    })
    e = EngineConfig.from_config(c)
    assert (e.policy, e.active_cap, e.max_num_batched_tokens, e.style, e.replicas, e.router) == (
        "edf", 10, 1000, "sglang", 2, "least_loaded")
    # 2 GB / (8 tokens x 131,072 bytes) = 1907 blocks
    assert e.preemption_mode == "swap" and e.swap_blocks == 1907 and e.usable_blocks == 3999
    assert e.default_class == ClassSpec(0.5, 0.1, 0) and e.spec("a") == ClassSpec(0.1, 0.1, -3)
    assert e.tenants["t"].quota_qps == 4.0 and e.overhead_s == 0.003 and e.time_scale == 2.0
    assert e.admission.kv_reserve_ratio == 0.5 and not e.admission.reject


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="chunked prefill is off"):
        EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=100, max_model_len=200)
    with pytest.raises(ValueError, match="policy is 'best'"):
        EngineConfig(policy="best")
    with pytest.raises(ValueError, match="did you mean h100-8b"):
        load_profile("h100-8B")


def test_rows_follow_the_schedule_and_their_definitions():
    c = config()
    plan = build_plan(c)
    rows = simulate(plan, c)
    assert len(rows) == sum(len(build_schedule(plan, stage)) for stage in plan.stages)
    start = 0.0
    for stage, result in zip(plan.stages, simulate_stages(plan, c), strict=True):
        schedule, mine = build_schedule(plan, stage), [r for r in rows if r.stage == stage.index]
        np.testing.assert_allclose([r.intended_s - start for r in mine], schedule.intended_s, atol=1e-9)
        assert [r.max_tokens for r in mine] == schedule.max_tokens.tolist()
        start = result.end_s
    for r in rows:
        assert r.status == "ok" and r.output_tokens == r.max_tokens and r.finish_reason == "length"
        assert r.ttft_s == pytest.approx(r.first_token_s - r.intended_s, abs=1e-9)
        assert r.e2e_s == pytest.approx(r.last_token_s - r.intended_s, abs=1e-9)
        assert r.residence_s == pytest.approx(r.done_s - r.sent_s, abs=1e-9)
        if r.output_tokens > 1:
            assert r.tpot_s == pytest.approx((r.last_token_s - r.first_token_s) / (r.output_tokens - 1), abs=1e-9)
    # 2 of 20 s are warm-up; of the first stage, which begins at 0
    assert all((r.phase == "window") == (r.intended_s >= 2.0) for r in rows if r.stage == 0)


def test_refusals_timeouts_and_the_drain_limit_are_rows():
    from bench.client.outcome import CODES

    c = config(**{"sweep.qps": [60.0], "sweep.drain_limit_sec": 3.0, "engine.max_model_len": 1900})
    rows = simulate(build_plan(c), c)
    by_status = {s: [r for r in rows if r.status == s] for s in ("ok", "rejected", "error", "timeout")}
    assert sum(map(len, by_status.values())) == len(rows)
    assert {r.code for r in by_status["timeout"]} == {"CH-TO-FIRST", "CL-DRAIN"}
    assert all(r.residence_s == pytest.approx(5.0) for r in by_status["timeout"] if r.code == "CH-TO-FIRST")
    assert {r.code for r in by_status["error"]} == {"SC-CONTEXT"}  # prompt + output above 1900 tokens
    assert all(r.input_tokens + r.max_tokens > 1900 for r in by_status["error"])
    rejecting = config(**{"sweep.qps": [60.0], "admission.reject_on_budget_exceed": True})
    more = simulate(build_plan(rejecting), rejecting)
    refused = [r for r in more if r.status == "rejected"]
    assert {r.detail.split(":")[0] for r in refused} <= {"ttft_budget", "kv_budget"} and len(refused) > len(more) / 4
    for r in rows + more:
        if r.code:
            assert (CODES[r.code].status, CODES[r.code].error_kind) == (r.status, r.error_kind)
    for table in (*module._REFUSED.values(), module._TOO_LONG, *module._ENDED.values()):
        status, code, kind = table
        assert (CODES[code].status, CODES[code].error_kind) == (status, kind)


def test_jump_and_step_give_the_same_rows_at_the_reference_sweep():
    c = config(**{"engine.replicas": 2, "engine.router": "least_loaded", "sweep.qps": [30.0, 45.0]})
    plan = build_plan(c)
    for a, b in zip(simulate(plan, c), simulate(plan, c, jump=False), strict=True):
        assert a.status == b.status and a.output_tokens == b.output_tokens
        assert a.done_s == pytest.approx(b.done_s, abs=1e-9)


def test_more_replicas_and_better_routers():
    """Four replicas carry four times the load; looking at the load beats chance."""
    attained = {}
    for replicas, router, qps in ((1, "round_robin", 15.0), (4, "least_loaded", 60.0), (4, "random", 80.0),
                                  (4, "least_loaded", 80.0)):
        c = config(**{"engine.replicas": replicas, "engine.router": router, "sweep.qps": [qps]})
        rows = simulate(build_plan(c), c)
        attained[replicas, router, qps] = np.mean([r.ttft_s is not None and r.ttft_s <= 0.8 for r in rows])
    assert attained[1, "round_robin", 15.0] > 0.97 and attained[4, "least_loaded", 60.0] > 0.97
    assert attained[4, "least_loaded", 80.0] > attained[4, "random", 80.0] + 0.05


def test_equal_prompts_hit_the_prefix_cache():
    same = {"loadgen.unique_prompts": False, "loadgen.input_len_range": [800, 800], "sweep.qps": [10.0]}
    cold, warm = (config(**same, **{"engine.prefix_caching": on}) for on in (False, True))
    without, hits = simulate(build_plan(cold), cold), simulate(build_plan(warm), warm)
    # 800 tokens = 50 blocks; the last token is always computed, so 49 blocks = 784 tokens can hit
    assert {r.cached_tokens for r in hits[20:]} == {784} and hits[0].cached_tokens is None
    assert all(r.cached_tokens is None for r in without)
    assert np.mean([r.ttft_s for r in hits]) < np.mean([r.ttft_s for r in without])


def run(args, expect=None):
    result = CliRunner().invoke(command, args)
    if expect is not None:
        assert result.exit_code in expect, result.output
    return result


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    nested: dict = {}
    for key, value in SHORT.items():
        section, name = key.split(".")
        nested.setdefault(section, {})[name] = value
    path.write_text(json.dumps(nested), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def test_the_command_writes_a_run_folder_and_its_analysis(tmp_path, config_file):
    folder = tmp_path / "run"
    result = run(["-c", str(config_file), "--run-dir", str(folder), "--json", "--quiet"], {0, 1})
    assert json.loads(result.stdout.splitlines()[-1])["run_dir"] == str(folder)
    rows, stages, gauge = (read(folder / f"{n}.csv") for n in ("requests", "stages", "inflight"))
    assert tuple(rows[0]) == FIELD_NAMES and tuple(stages[0]) == STAGE_COLUMNS and tuple(gauge[0]) == INFLIGHT_COLUMNS
    info = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert info["simulated"] is True and info["shape"] == "sweep" and info["schedule_hash"]
    assert info["target"]["profile"] == "h100-8b" and info["target"]["profile_kind"] == "fitted"
    assert [int(s["rows"]) for s in stages] == [sum(r["stage"] == s["stage"] for r in rows) for s in stages]
    analysis = json.loads((folder / "analysis.json").read_text(encoding="utf-8"))
    for stage in analysis["stages"]:
        assert stage["verdict"] != "INVALID" and abs(stage["little"]["gap_ratio_gauge"]) < 0.05
    # the gauge is the driver's own counter: compare it with the rows at a few moments
    for sample in gauge[:: len(gauge) // 20]:
        t = float(sample["t_s"])
        inside = sum(float(r["sent_s"]) <= t < float(r["done_s"]) for r in rows)
        assert abs(inside - int(sample["in_flight"])) <= 1  # cells are rounded to 1e-9 s


def test_the_same_command_writes_the_same_bytes(tmp_path, config_file):
    for name in ("a", "b"):
        run(["-c", str(config_file), "--run-dir", str(tmp_path / name), "--quiet", "--no-report"], {0})
    for name in ("requests.csv", "stages.csv", "inflight.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_an_old_run_is_simulated_again(tmp_path, config_file):
    common = ["-c", str(config_file), "--quiet", "--no-report"]
    run([*common, "--run-dir", str(tmp_path / "old")], {0})
    run([*common, "--run", str(tmp_path / "old"), "--run-dir", str(tmp_path / "new")], {0})
    old, new = (read(tmp_path / name / "requests.csv") for name in ("old", "new"))
    keys = ("stage", "arrival", "input_tokens", "output_tokens", "phase")
    assert [[r[k] for k in keys] for r in old] == [[r[k] for k in keys] for r in new]
    # Same load, other noise: the means agree to a few percent.
    mean_old, mean_new = (np.mean([float(r["e2e_s"]) for r in rows]) for rows in (old, new))
    assert mean_new == pytest.approx(mean_old, rel=0.05)


TURNS = Path(__file__).resolve().parents[2] / "configs" / "study" / "chat_turns.jsonl"
WARM = ["--set", "engine.prefix_caching=true", "--set", "engine.max_model_len=32768", "--quiet", "--no-report"]


def info(folder):
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("packed", [False, True])
def test_an_old_run_keeps_the_starts_that_its_prompts_share(tmp_path, config_file, packed):
    trace = tmp_path / "turns.jsonl"
    trace.write_bytes(TURNS.read_bytes())
    run(["-c", str(config_file), "--trace", str(trace), "--run-dir", str(tmp_path / "old"), *WARM], {0})
    before = (tmp_path / "old" / "requests.csv").read_bytes()
    assert sum(int(r["cached_tokens"] or 0) for r in read(tmp_path / "old" / "requests.csv")) > 50_000
    if packed:
        (tmp_path / "old" / "requests.csv.gz").write_bytes(gzip.compress(before))
        (tmp_path / "old" / "requests.csv").unlink()
    again = run(["-c", str(config_file), "--run", str(tmp_path / "old"), "--run-dir", str(tmp_path / "new"), *WARM], {0})
    assert (tmp_path / "new" / "requests.csv").read_bytes() == before  # the same cache hits, so the same times
    assert "loss" not in again.output and "losses" not in info(tmp_path / "new")["target"]


def test_stages_at_other_rates_than_the_config_keep_their_starts_too(tmp_path, config_file):
    sets = ["--set", "loadgen.arrival_process=trace", "--set", f"loadgen.trace_file={TURNS}", *WARM]
    run(["-c", str(config_file), "--qps", "1,3", "--stage-duration", "20", *sets, "--run-dir", str(tmp_path / "old")], {0})
    again = run(["-c", str(config_file), "--run", str(tmp_path / "old"), "--run-dir", str(tmp_path / "new"), *WARM], {0})
    old, new = (read(tmp_path / name / "requests.csv") for name in ("old", "new"))
    assert [r["cached_tokens"] for r in new] == [r["cached_tokens"] for r in old] and "loss" not in again.output
    assert {r["stage"] for r in old if r["cached_tokens"]} == {"0", "1"}


def test_equal_prompts_of_an_old_run_are_equal_again(tmp_path, config_file):
    load = ["--set", "loadgen.unique_prompts=false", "--set", "loadgen.input_len_range=[400,400]"]
    run(["-c", str(config_file), *load, "--run-dir", str(tmp_path / "old"), *WARM], {0})
    run(["-c", str(config_file), "--run", str(tmp_path / "old"), "--run-dir", str(tmp_path / "new"), *WARM], {0})
    old, new = (read(tmp_path / name / "requests.csv") for name in ("old", "new"))
    assert [r["cached_tokens"] for r in new] == [r["cached_tokens"] for r in old] and {r["cached_tokens"] for r in old} > {""}


def gone(old, trace):
    (old / "run.json").unlink()


def moved(old, trace):
    trace.rename(trace.with_name("elsewhere.jsonl"))


def changed(old, trace):
    trace.write_text(trace.read_text().replace('"hash_ids": [0, 1, 5]', '"hash_ids": [0, 2, 5]'))


def other_config(old, trace):
    data = info(old)
    data["config"] = {"loadgen": {"seed": 3}}
    (old / "run.json").write_text(json.dumps(data))


def damaged(old, trace):
    (old / "run.json").write_text("[1, 2]")


@pytest.mark.parametrize(("damage", "words"), [
    (gone, "run.json: No such file or directory: which prompts began alike is not recorded"),
    (damaged, "run.json holds no config that this version reads"),
    (moved, "which prompts began alike cannot be carried: "),
    (changed, "their schedule hash differs"),
    (other_config, "which prompts began alike is not recorded; here none do"),
], ids=lambda v: v.__name__ if callable(v) else "")
def test_starts_that_cannot_be_carried_are_a_stated_loss(tmp_path, config_file, damage, words):
    trace = tmp_path / "turns.jsonl"
    trace.write_bytes(TURNS.read_bytes())
    old, new = tmp_path / "old", tmp_path / "new"
    run(["-c", str(config_file), "--trace", str(trace), "--run-dir", str(old), *WARM], {0})
    damage(old, trace)
    rows = read(old / "requests.csv")
    share = sum(int(r["cached_tokens"] or 0) for r in rows) / sum(int(r["prompt_tokens"]) for r in rows)
    again = run(["-c", str(config_file), "--run", str(old), "--run-dir", str(new), *WARM], {0})  # said with --quiet too
    (line,) = [text for text in again.output.splitlines() if text.startswith("loss: ")]
    assert words in line and f"the prefix cache is colder than in that run (there {share:.1%} of the prompt tokens" in line
    assert info(new)["target"]["losses"] == [line.removeprefix("loss: ")]
    assert all(not r["cached_tokens"] for r in read(new / "requests.csv"))


def test_hidden_reasoning_of_the_old_run_is_a_stated_loss(tmp_path, config_file):
    """Its answers streamed nothing of their reasoning; the engine streams it, so TTFT is another quantity there."""
    old, new = tmp_path / "old", tmp_path / "new"
    run(["-c", str(config_file), "--run-dir", str(old), "--quiet", "--no-report"], {0})
    rows = read(old / "requests.csv")
    for row in rows[:7]:
        row.update(flags="hidden_reasoning", reasoning_tokens="3")
    with (old / "requests.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    again = run(["-c", str(config_file), "--run", str(old), "--run-dir", str(new), "--quiet", "--no-report"], {0})
    (line,) = [text for text in again.output.splitlines() if "reasoning" in text]
    assert f"7 of {len(rows)} answers hid 21 tokens of reasoning" in line and "first reasoning token" in line
    assert info(new)["target"]["losses"] == [line.removeprefix("loss: ")]


def test_a_simulation_without_a_cache_says_so_when_the_old_run_had_one(tmp_path, config_file):
    run(["-c", str(config_file), "--trace", str(TURNS), "--run-dir", str(tmp_path / "old"), *WARM], {0})
    again = run(["-c", str(config_file), "--run", str(tmp_path / "old"), "--run-dir", str(tmp_path / "new"), "--no-report",
                 "--set", "engine.max_model_len=32768"], {0})
    assert "note: engine.prefix_caching is off" in again.output and "loss" not in again.output


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_is_replayed_with_rate_scale(tmp_path, config_file, packed):
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:{10 + i // 4:02d}.{i % 4 * 25:02d}00000,{100 + i},{10 + i % 5}" for i in range(40)]
    trace = tmp_path / ("trace.csv.gz" if packed else "trace.csv")
    trace.write_bytes(gzip.compress("\r\n".join(lines).encode()) if packed else "\r\n".join(lines).encode())
    run(["-c", str(config_file), "--trace", str(trace), "--rate-scale", "2", "--run-dir", str(tmp_path / "r"), "--quiet",
         "--no-report"], {0})
    rows = read(tmp_path / "r" / "requests.csv")
    assert [int(r["input_tokens"]) for r in rows] == [100 + i for i in range(40)]
    gaps = np.diff([float(r["intended_s"]) for r in rows])
    assert gaps.tolist() == pytest.approx([0.125] * 39, abs=2e-6)  # 0.25 s in the trace


def test_compare_prints_one_table(tmp_path, config_file):
    variants = tmp_path / "policies.yaml"
    variants.write_text("fcfs: {}\nslack: {scheduler.policy: slack_aware}\n", encoding="utf-8")
    result = run(["-c", str(config_file), "--compare", str(variants), "--qps", "10,30", "--seeds", "2", "--json",
                  "--quiet", "--run-dir", str(tmp_path / "out")], {0})
    cells = json.loads(result.stdout)
    assert [(c["variant"], c["offered_qps"], c["seeds"]) for c in cells] == [
        ("fcfs", 10.0, 2), ("fcfs", 30.0, 2), ("slack", 10.0, 2), ("slack", 30.0, 2)]
    assert cells[3]["attainment"] > cells[1]["attainment"] and cells[3]["gain"] == pytest.approx(
        cells[3]["attainment"] - cells[1]["attainment"], abs=0.05)
    assert all(0 <= c["low"] <= c["attainment"] <= c["high"] <= 1 for c in cells)
    assert (tmp_path / "out" / "compare.svg").read_text(encoding="utf-8").startswith("<svg")
    assert "SIMULATED" in run(["-c", str(config_file), "--compare", str(variants), "--qps", "10", "--seeds", "1"], {0}).output


BAD = [
    (["--set", "scheduler.policy"], "KEY=VALUE"),
    (["--set", "scheduler.polcy=edf"], "policy"),
    (["--set", "engine.profile=h200"], "h100-8b"),
    (["--qps", "five"], "five"),
    (["--rate-scale", "2"], "--trace"),
    (["--run", "/nonexistent-folder"], "nonexistent-folder"),
    (["--trace", "/nonexistent.csv"], "nonexistent.csv"),
    (["--trace", "a.csv", "--run", "b"], "exclude"),
    (["--compare", "a.yaml", "--run", "b"], "cannot take that of --run"),
    (["--compare", "/nonexistent.yaml"], "nonexistent.yaml"),
]


@pytest.mark.parametrize(("args", "said"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input_is_exit_2_with_the_place(tmp_path, config_file, args, said):
    result = run(["-c", str(config_file), "--run-dir", str(tmp_path / "r"), *args])
    assert result.exit_code == 2 and said in result.output and "Traceback" not in result.output


def test_paired_intervals_by_hand():
    from analysis.compare import cells, mean_interval

    mean, low, high = mean_interval([0.8, 0.9, 1.0])
    # sd 0.1, standard error 0.1/sqrt(3) = 0.057735, t(0.975, 2) = 4.302653
    assert (mean, high - mean, mean - low) == (pytest.approx(0.9), pytest.approx(0.248413, abs=1e-6), pytest.approx(0.248413, abs=1e-6))
    assert mean_interval([0.5]) == (0.5, None, None)

    class S:
        def __init__(self, variant, seed, met):
            self.variant, self.offered_qps, self.seed, self.arrivals, self.met = variant, 5.0, seed, 100, met
            self.refused, self.worst_ttft_s, self.preemptions, self.fairness = 0, 1.0, 0, 1.0

    found = cells([S("a", 1, 60), S("a", 2, 80), S("b", 1, 70), S("b", 2, 90)])
    assert found[1].gain == pytest.approx(0.1) and found[1].gain_high - found[1].gain_low == pytest.approx(0.0, abs=1e-12)
    assert math.isclose(found[0].attainment, 0.7)
