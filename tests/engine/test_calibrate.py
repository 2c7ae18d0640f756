"""`bench calibrate`: the profile that made a run comes back from that run's rows."""
from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from bench.commands.calibrate import _assumed, _doubt, command
from bench.commands.simulate import command as simulate
from bench.commands.untold import with_settings
from engine.calibrate import profile_from_fit
from engine.profiles import PROFILES, load_profile

SETTINGS = {
    "scheduler": {"policy": "fcfs", "batch_size_cap": 32}, "admission": {"reject_on_budget_exceed": False},
    "sweep": {"qps": [5.0, 10.0], "warmup_sec": 5.0}, "loadgen": {"duration_sec": 100.0, "target_qps": 10.0},
    "engine": {"profile": "reference-shape", "noise_cv": 0.05},
}


def run(what, *args):
    result = CliRunner().invoke(what, [str(a) for a in args])
    return result.exit_code, result.output


def test_the_truth_comes_back(tmp_path: Path):
    config, folder, out = tmp_path / "c.json", tmp_path / "run", tmp_path / "mine.json"
    config.write_text(json.dumps(SETTINGS), encoding="utf-8")
    assert run(simulate, "-c", config, "--run-dir", folder, "--no-report", "--quiet")[0] == 0
    code, said = run(command, folder, "--output", out)
    assert code == 0, said
    profile, truth = load_profile(str(out)), PROFILES["reference-shape"]
    # 0.6 ms, 40 us per sequence, 8 us per prompt token: within 3 % from 1,500 answers with 5 % step noise
    assert profile.a0_s == pytest.approx(truth.a0_s, rel=0.03)
    assert profile.b0_s == pytest.approx(truth.b0_s, rel=0.03)
    assert profile.b0_s + profile.decode_s == pytest.approx(40e-6, rel=0.03)
    assert profile.kind == "fitted" and "R2" in profile.source and profile.origin["kv_tokens"].startswith("guess")
    code, said = run(command, folder, "--output", out)
    assert code == 2 and "exists" in said and run(command, folder, "--output", out, "--force")[0] == 0


# gamma above beta: two lines; t(T=1 decode) = alpha + beta, t(1000 prompt tokens) = alpha + delta + 1000 gamma
def test_a_gpu_like_law_becomes_two_lines():
    fit = {"alpha_s": 7e-3, "beta_s": 11e-6, "gamma_s": 21e-6, "kv_s": 49e-9, "prefill_s": -4e-3, "kappa_s": 0.0}
    p = profile_from_fit(fit, PROFILES["h100-8b"], "x", "run y")
    assert p.step_s(1, 1, 0) == pytest.approx(7e-3 + 11e-6)
    assert p.step_s(1000) == pytest.approx(3e-3 + 21e-3)
    assert p.step_s(32, 32, 10_000) == pytest.approx(7e-3 + 32 * 11e-6 + 0.49e-3)
    with pytest.raises(ValueError, match="square"):
        profile_from_fit({**fit, "kappa_s": 1e-6}, PROFILES["h100-8b"], "x", "run y")


# without a delta the lines meet at the largest batch seen: decoding costs beta up to there
def test_gamma_above_beta_without_a_delta_keeps_the_cost_of_decoding():
    fit = {"alpha_s": 7e-3, "beta_s": 11e-6, "gamma_s": 21e-6, "batch_size_max": 16.0}
    p = profile_from_fit(fit, PROFILES["h100-8b"], "x", "run y")
    for n in (1, 8, 16):
        assert p.step_s(n, n, 0) == pytest.approx(7e-3 + n * 11e-6)
    # 1000 prompt tokens beside 16 sequences: gamma each, less 16 (gamma - beta) = 0.16 ms
    assert p.step_s(1016, 16) == pytest.approx(7e-3 + 1016 * 21e-6 - 16 * 10e-6)


# gamma below beta with a delta: prompts are free up to -delta/gamma = 100 tokens, then gamma each
def test_a_delta_below_beta_is_not_lost():
    fit = {"alpha_s": 5e-3, "beta_s": 40e-6, "gamma_s": 20e-6, "prefill_s": -2e-3}
    p = profile_from_fit(fit, PROFILES["h100-8b"], "x", "run y")
    assert p.step_s(10, 10) == pytest.approx(5e-3 + 10 * 40e-6) and p.step_s(90) == pytest.approx(5e-3)
    assert p.step_s(1000) == pytest.approx(5e-3 - 2e-3 + 1000 * 20e-6)


def test_a_gpu_profile_comes_back_and_predicts_its_run(tmp_path: Path):
    config, folder, out = tmp_path / "c.json", tmp_path / "run", tmp_path / "mine.json"
    settings = {**SETTINGS, "sweep": {"qps": [1.0, 2.0], "warmup_sec": 5.0},
                "loadgen": {"duration_sec": 100.0, "target_qps": 2.0}, "engine": {"profile": "h100-8b", "noise_cv": 0.03}}
    config.write_text(json.dumps(settings), encoding="utf-8")
    assert run(simulate, "-c", config, "--run-dir", folder, "--no-report", "--quiet")[0] == 0
    code, said = run(command, folder, "--output", out, "--json")
    assert code == 0, said
    found, profile, truth = json.loads(said), load_profile(str(out)), PROFILES["h100-8b"]
    # host overhead (1.5 ms) is inside alpha; a middle step: 8 sequences with 1,000 tokens of context each
    assert profile.step_s(8, 8, 8000) == pytest.approx(truth.step_s(8, 8, 8000), rel=0.02)
    assert profile.kv_s == pytest.approx(truth.kv_s, rel=0.15)
    assert {r["statistic"] for r in found["compare"]} >= {"ttft p95", "tpot p50", "e2e p95"}
    for row in found["compare"]:  # TTFT of one step: the phase within a step is all its spread
        assert abs(row["ratio"]) < (0.10 if row["statistic"].startswith("ttft") else 0.03), row
    held = profile.calibration
    assert held["run_id"] == "run" and held["measured"] is False and held["r2"] > 0.98
    assert held["valid"]["offered_qps"] == [1.0, 2.0] and held["residuals"][0]["rows"] > 40


def test_replicas_are_refused_with_exit_4(tmp_path: Path):
    config, folder = tmp_path / "c.json", tmp_path / "run"
    config.write_text(json.dumps({**SETTINGS, "engine": {"replicas": 2}, "sweep": {"qps": [5.0], "warmup_sec": 2.0},
                                  "loadgen": {"duration_sec": 20.0}}), encoding="utf-8")  # fmt: skip
    assert run(simulate, "-c", config, "--run-dir", folder, "--no-report", "--quiet")[0] == 0
    code, said = run(command, folder, "--output", tmp_path / "x.json")
    assert code == 4 and "2 replicas" in said and not (tmp_path / "x.json").exists()


def test_bad_input_is_exit_2(tmp_path: Path):
    assert run(command, tmp_path / "none", "-o", tmp_path / "x.json")[0] == 2
    code, said = run(command, tmp_path, "-o", tmp_path / "x.txt")
    assert code == 2 and ".json" in said


@pytest.mark.parametrize(
    ("medians", "said"),
    [([0.02, -0.15], ""), ([0.02, -0.16, 0.151], "at 2 requests/s is off by -16%"), ([None], ""), ([], "")],
)
def test_a_profile_that_does_not_give_back_its_run_is_doubted(medians: list[float | None], said: str):
    table = [{"offered_qps": float(k + 1), "statistic": "e2e p50", "ratio": ratio} for k, ratio in enumerate(medians)]
    for row in table:
        row |= {"measured_s": 1.0, "predicted_s": 1.0 + (row["ratio"] or 0.0)}
    small = {"offered_qps": 4.0, "statistic": "e2e p50", "ratio": -0.3, "measured_s": 0.06, "predicted_s": 0.042}
    table += [small, {"offered_qps": 1.0, "statistic": "e2e p50", "ratio": None, "measured_s": 1.0, "predicted_s": 1.0}]
    table += [{"offered_qps": 1.0, "statistic": name, "ratio": 3.0} for name in ("ttft p50", "e2e p95", "tpot p50")]
    table += [{"offered_qps": 9.0, "statistic": "e2e p50", "ratio": -0.9}]  # overloaded, so not fitted
    found = SimpleNamespace(residuals=[SimpleNamespace(offered_qps=float(k)) for k in range(1, 5)])
    assert (_doubt(table, found) == "") is (said == "") and said in _doubt(table, found)


def test_a_service_that_does_not_say_how_it_schedules_is_simulated_without_our_defaults() -> None:
    service = {"config": {"engine": {"embedded": False}}, "config_origin": {"scheduler.policy": "file c.json",
                                                                            "scheduler.max_num_seqs": "default"}}  # fmt: skip
    assert _assumed(service) == {"scheduler.max_num_seqs": 256, "scheduler.batch_size_cap": 256,
                                 "admission.reject_on_budget_exceed": False}
    for ours in ({"simulated": True}, {"config": {"engine": {"embedded": True}}}, {"config_origin": {}}):
        assert _assumed(service | ours) == {}
    old = {"scheduler": {"policy": "sjf", "max_num_seqs": 32}, "engine": {}}
    made = with_settings(old, _assumed(service))
    assert made["scheduler"] == {"policy": "sjf", "max_num_seqs": 256, "batch_size_cap": 256}
    assert old["scheduler"]["max_num_seqs"] == 32 and made["admission"] == {"reject_on_budget_exceed": False}
