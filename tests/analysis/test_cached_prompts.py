"""Prompt tokens from the service's cache are context, not prefill work: in the fit, the replay and every prediction.

The truth is the embedded engine's own scheduler in virtual time with a prefix cache; its own count of what the cache
held is the ledger's column `cached_tokens`.
"""
from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from analysis.batching import Lengths, StepLaw, lambda_max_gradient, lambda_max_qps, lengths_of
from analysis.calibrate import calibrate
from analysis.computed_tokens import computed
from analysis.model import fit_and_predict
from analysis.model_stages import StageArrays, prepare
from analysis.replay import replay
from analysis.step_clock import fit
from engine.profiles import Profile
from engine.request import Request
from engine.settings import EngineConfig
from engine.virtual import drive

LAW = StepLaw(6e-3, 0.2e-3, 40e-6)
BLOCK, SEQS, BUDGET = 16, 32, 4096
ALL = ("alpha_s", "beta_s", "gamma_s")


def served(qps: float, seconds: float, seed: int, law: StepLaw = LAW, starts: int = 5) -> StageArrays:
    """A stage of the engine: each prompt of 500 to 1,500 tokens begins with one of `starts` shared ones of 0 to 1,200."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / qps, int(qps * seconds)))
    prompt, output = rng.integers(500, 1501, arrival.size), rng.integers(40, 160, arrival.size)
    shared = np.linspace(0, 1200, starts).astype(int)
    which = rng.integers(0, starts, arrival.size)
    profile = Profile("known", "", law.alpha_s, law.gamma_s, 0.0, 0.0, law.kv_s, 1, kv_tokens=20_000_000, overhead_s=0.0,
                      decode_s=law.beta_s - law.gamma_s, kind="fitted")  # fmt: skip
    config = EngineConfig(profile=profile, max_num_seqs=SEQS, max_num_batched_tokens=BUDGET, max_model_len=4000,
                          prefix_caching=True, block_size=BLOCK)  # fmt: skip

    def request(i: int) -> Request:
        own = [(int(which[i]) + 1) * 10**6 + b if b < shared[which[i]] // BLOCK else 10**9 + i * 1000 + b
               for b in range(int(prompt[i]) // BLOCK)]  # fmt: skip
        return Request(str(i), arrival[i], int(prompt[i]), int(output[i]), int(output[i]), index=i, prefix_hashes=tuple(own))

    out = drive(config, arrival.tolist(), request, seed=0)
    first, last = np.array(out.first_s), np.array(out.last_s)
    return StageArrays(
        seed, qps, arrival, first, last, last, prompt, output, np.ones(arrival.size, bool), seconds / 10, seconds,
        cached_tokens=np.array(out.cached_tokens, dtype=float),
    )  # fmt: skip


def without(stage: StageArrays) -> StageArrays:
    """The same rows of a service that does not say what its cache held."""
    return dataclasses.replace(stage, cached_tokens=None)


@pytest.fixture(scope="module")
def stages() -> list[StageArrays]:
    return [served(3, 60, 1), served(7, 60, 2), served(12, 60, 3)]


def errors(stages: list[StageArrays]) -> dict[str, float]:
    law = fit([prepare(s, []).trace for s in stages], "affine").law  # type: ignore[union-attr]
    return {name: getattr(law, name) / getattr(LAW, name) - 1 for name in ALL}


def test_the_cache_held_a_good_part(stages: list[StageArrays]) -> None:
    share = sum(s.cached_tokens.sum() for s in stages) / sum(s.input_tokens.sum() for s in stages)
    assert 0.4 < share < 0.7
    assert {int(c) % BLOCK for s in stages for c in s.cached_tokens} == {0}


def test_the_law_comes_back_with_the_column_and_not_without(stages: list[StageArrays]) -> None:
    right, wrong = errors(stages[:2]), errors([without(s) for s in stages[:2]])
    assert max(abs(e) for e in right.values()) < 0.01, right
    assert wrong["gamma_s"] < -0.25, wrong  # prompt tokens that cost nothing make each look cheap


@pytest.mark.parametrize("kv", [0.0, 5e-8])
@pytest.mark.parametrize("qps", [3.0, 14.0])
def test_the_replay_is_the_engine_with_its_cache(qps: float, kv: float) -> None:
    """Two programs, step for step: what is cached is read from memory, and not computed."""
    law = dataclasses.replace(LAW, kv_s=kv)
    there = served(qps, 30, int(qps), law)
    ours = replay(there.send_s, there.input_tokens, there.output_tokens, law, SEQS, BUDGET, there.cached_tokens)
    np.testing.assert_allclose(ours.first_token_s, there.first_token_s, rtol=0, atol=1e-8)
    np.testing.assert_allclose(ours.last_token_s, there.last_token_s, rtol=0, atol=1e-8)
    cold = replay(there.send_s, there.input_tokens, there.output_tokens, law, SEQS, BUDGET)
    assert np.mean(cold.first_token_s - there.send_s) > 1.5 * np.mean(there.first_token_s - there.send_s)


def test_the_higher_rate_is_predicted_and_the_limit_is_that_of_the_work(stages: list[StageArrays]) -> None:
    slo = {"ttft_deadline_s": 0.5, "tpot_deadline_s": 0.1, "e2e_target_s": 5.0, "attainment_target": 0.9}
    found = fit_and_predict(stages, slo, SEQS, max_num_batched_tokens=BUDGET)
    rows = [p for p in found["predictions"] if p["stage"] == 3 and p["metric"] != "attainment"]
    assert found["predictive"] and max(abs(p["residual_ratio"]) for p in rows) < 0.03, rows
    work = np.concatenate([s.input_tokens - s.cached_tokens for s in stages]).mean()
    m = np.concatenate([s.output_tokens for s in stages]).mean()
    by_hand = 1 / (m * (LAW.alpha_s / SEQS + LAW.beta_s) + LAW.gamma_s * work)
    assert found["lambda_max_qps"] == pytest.approx(by_hand, rel=0.02)
    kept = found["lengths"]
    assert kept["input_mean_tokens"] - kept["cached_mean_tokens"] == pytest.approx(work)
    assert any("service's cache: they count as context" in note for note in found["notes"])
    assert found["knee_predicted_qps"] is None or found["knee_predicted_qps"] < by_hand


def test_an_absent_column_changes_nothing(stages: list[StageArrays]) -> None:
    """Not told, and told as nothing (empty cells or 0), are the same numbers to the last bit."""
    plain = [without(s) for s in stages[:2]]
    for value in (0.0, np.nan):
        told = [dataclasses.replace(s, cached_tokens=np.full(s.send_s.size, value)) for s in plain]
        assert fit_and_predict(told, {}, SEQS) == fit_and_predict(plain, {}, SEQS)


def test_calibrate_takes_it_too(stages: list[StageArrays]) -> None:
    found = calibrate(stages)
    assert found.fit.law.gamma_s == pytest.approx(LAW.gamma_s, rel=0.02)
    low, high = found.valid["computed_tokens"]
    assert low < 200 and high <= 1500 and max(abs(r.median) for r in found.residuals) < 0.01
    assert "computed_tokens" not in calibrate([without(s) for s in stages]).valid


def test_computed_by_hand() -> None:
    # 100 - 64, an empty cell, all of it (the last token is computed all the same), more than there is, an empty prompt
    got = computed(np.array([100, 100, 64, 64, 0]), np.array([64, np.nan, 64, 80, 0]))
    assert got.tolist() == [36, 100, 1, 1, 0] and computed(np.array([7]), None).tolist() == [7]
    lengths = lengths_of(np.array([100, 50]), np.array([10, 20]), np.array([60, np.nan]))
    # P = 75, cached (60 + 0)/2 = 30, computed 45; context P + E[o^2]/(2 E[o]) = 75 + 250/30
    assert (lengths.cached_mean, lengths.computed_mean) == (30, 45)
    assert lengths.context_mean == pytest.approx(75 + 250 / 30)
    law = StepLaw(1e-3, 1e-4, 1e-5, 0, 1e-8)
    step = 1e-3 / 8 + 1e-4 + 1e-8 * (75 + 250 / 30)
    assert lambda_max_qps(law, lengths, 8) == pytest.approx(1 / (15 * step + 1e-5 * 45))
    small = 1e-9
    moved = lambda_max_qps(dataclasses.replace(law, gamma_s=law.gamma_s + small), lengths, 8)
    slope = (moved - lambda_max_qps(law, lengths, 8)) / small
    assert lambda_max_gradient(law, lengths, 8)[2] == pytest.approx(slope, rel=1e-3)
    assert Lengths(75, 15, 250).computed_mean == 75


def test_a_load_for_an_engine_without_a_cache_has_the_work_that_was_done(tmp_path: Path) -> None:
    """`bench calibrate` simulates its run with the profile; the old run's prompts are then as long as what was computed."""
    from click.testing import CliRunner

    from bench.commands.old_run import read_dicts, read_old_run
    from bench.commands.simulate import command
    from bench.config import load_config
    from bench.workload.plan import build_plan

    config = Path(__file__).resolve().parents[2] / "configs" / "demo.json"
    folder = tmp_path / "r"
    asked = ["--config", str(config), "--trace", str(config.parent / "study" / "chat_turns.jsonl"), "--run-dir", str(folder),
             "--set", "engine.prefix_caching=true", "--no-report"]  # fmt: skip
    assert CliRunner().invoke(command, asked).exit_code == 0
    rows = read_dicts(folder / "requests.csv")
    plan = build_plan(load_config(config, env={}).config, "single")
    for computed_only in (False, True):
        (load,) = read_old_run(folder, plan, caching=False, computed_only=computed_only).rerun.loads
        by_hand = [int(r["prompt_tokens"] or r["input_tokens"]) - computed_only * int(r["cached_tokens"] or 0) for r in rows]
        assert load.schedule.input_tokens.tolist() == by_hand
    assert sum(bool(r["cached_tokens"]) for r in rows) > len(rows) / 2
