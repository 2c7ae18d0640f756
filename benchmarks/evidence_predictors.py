"""Section 3 of docs/evidence/queueing.md: birth-death and replay against long-run truth.

Input: seeds. Output: lines of Markdown, and the long-run truths that sections 4 and 5 compare with.
Run by `benchmarks.evidence_queueing`.
Does not: give the birth-death chain the arrivals: its error holds the truth's own, which stands beside it.

1. The truth of the chain is a replay with the true coefficients, without step noise: 8 paths of 30,000 s. It is as
   good as the step-by-step simulator (the table of the replay says how close), and thirty times faster.
2. The truth of the replay is the step-by-step simulator with 5 % step noise, the same arrivals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.batching import StepLaw, lambda_max_qps, mean_field
from analysis.birth_death import limited_ps, residence_quantile_s, ttft_quantile_s
from analysis.percentiles import nearest_rank
from analysis.predict import Deadlines, Latencies, metrics, replay_latencies
from analysis.step_clock import fit
from benchmarks.evidence_page import at_most, met, share, table, today
from benchmarks.evidence_step_clock import BUDGET, SEED_LENGTHS, K, client_rows, law_of, reference_des, trace_of

SLO = Deadlines(0.8, 0.1, 2.0, 0.99)
HIGHEST_LOAD = 0.921  # "u <= .92": 25 of 27.21 is .9187
PATHS, PATH_S = 8, 30_000.0
AFFINE_QPS = (15.0, 20.0, 22.0, 23.0, 24.0, 24.5, 25.0, 26.0)
REPLAY_QPS = (15.0, 20.0, 22.0, 24.0, 25.0, 26.0)
LOADS = (0.55, 0.74, 0.80, 0.85, 0.88, 0.92, 0.955)


@dataclass(frozen=True)
class LongRun:
    """Long-run figures at one rate: seconds and shares, `_se` the standard error of the mean over paths."""

    mean_s: float
    mean_se: float
    p95_s: float
    p95_se: float
    ttft_p95_s: float
    attainment: float
    prompt: np.ndarray
    output: np.ndarray


@dataclass(frozen=True)
class Predicted:
    """Beside the truth at one rate: what the chain said (s), and the relative error of the replay's mean."""

    truth: LongRun
    birth_death_s: float
    replay_error: float | None


def _replayed(law: StepLaw, qps: float, path_s: float, seed: int) -> tuple[Latencies, Any]:
    load = reference_des().poisson_load(qps, path_s, seed)
    rows = replay_latencies(load.arrival, load.prompt, load.output, law, K, BUDGET)
    return rows.take(load.arrival > 60), load


def pooled(parts: list[Latencies]) -> Latencies:
    """Latencies of several paths as one."""
    return Latencies(*(np.concatenate([getattr(p, f) for p in parts]) for f in ("ttft_s", "tpot_s", "e2e_s")))


def long_run(law: StepLaw, qps: float, paths: int, path_s: float) -> LongRun:
    """The truth at one rate. Seeds 77,000 + 100 * rate + path."""
    means, p95s, ttfts, held = [], [], [], []
    for path in range(paths):
        rows, load = _replayed(law, qps, path_s, 77_000 + int(100 * qps) + path)
        m = metrics(rows, SLO)
        means.append(m["e2e_mean_s"])
        p95s.append(m["e2e_p95_s"])
        ttfts.append(m["ttft_p95_s"])
        held.append(m["attainment"])
    root = math.sqrt(paths)
    return LongRun(
        float(np.mean(means)), float(np.std(means, ddof=1)) / root, float(np.mean(p95s)),
        float(np.std(p95s, ddof=1)) / root, float(np.mean(ttfts)), float(np.mean(held)), load.prompt, load.output,
    )  # fmt: skip


def _chain_rows(
    truth: Any, rates: tuple[float, ...], limits: tuple[float, float], paths: int, path_s: float
) -> tuple[list[list[Any]], dict[float, tuple[LongRun, float]], list[str]]:
    """Rows of the chain's table, what it predicted, and the verdict on the worst row within the stated load."""
    law, rows, known = law_of(truth), [], {}
    worst = {"mean": 0.0, "p95": 0.0}
    top = lambda_max_qps(law, SEED_LENGTHS, K)
    for qps in rates:
        true = long_run(law, qps, paths, path_s)
        state = limited_ps(law, SEED_LENGTHS, qps, K)
        assert state is not None
        known[qps] = (true, state.residence_s)
        mean = state.residence_s / true.mean_s - 1
        p95 = residence_quantile_s(state, true.output, 0.95) / true.p95_s - 1
        judged = qps / top <= HIGHEST_LOAD
        if judged:
            worst = {"mean": max(worst["mean"], abs(mean)), "p95": max(worst["p95"], abs(p95))}
        field = mean_field(law, SEED_LENGTHS, qps, K)
        ttft = ttft_quantile_s(state, law, SEED_LENGTHS, true.prompt, 0.95) / true.ttft_p95_s - 1
        rows.append([
            f"{qps:.4g}", f"{qps / top:.3f}", f"{true.mean_s:.4f} ± {true.mean_se / true.mean_s:.2%}",
            f"{true.p95_s:.4f} ± {true.p95_se / true.p95_s:.2%}",
            share(field.residence_s / true.mean_s - 1) if field is not None else "no fixed point",
            share(mean), share(p95), share(ttft) if qps / top > 0.9 else "-",
            met(abs(mean) <= limits[0] and abs(p95) <= limits[1]) if judged else "not asked",
        ])  # fmt: skip
    return rows, known, [at_most(worst["mean"], limits[0]), at_most(worst["p95"], limits[1])]


def _replay_rows(truth: Any, paths: int, path_s: float) -> tuple[list[list[Any]], dict[float, float], dict[str, float]]:
    """Rows of the replay's table, its error of the mean per rate, and the worst errors within the stated load."""
    des = reference_des()
    got = fit([trace_of(*client_rows(truth, r, 300.0, 70 + r, 0.01), 30.0) for r in (5, 10)])
    top = lambda_max_qps(law_of(truth), SEED_LENGTHS, K)
    rows, errors, worst = [], {}, {"mean": 0.0, "p95": 0.0, "ttft": 0.0, "attainment": 0.0}
    for qps in REPLAY_QPS:
        seen, said = [], []
        for path in range(paths):
            seed = int(qps) * 100 + path
            load = des.poisson_load(qps, path_s, seed)
            first, last = des.simulate(load, truth, K, BUDGET, seed=seed + 500)
            tpot = (last - first) / np.maximum(load.output - 1, 1)
            seen.append(Latencies(first - load.arrival, tpot, last - load.arrival).take(load.arrival > 60))
            said.append(_replayed(got.law, qps, path_s, seed)[0])
        m, p = metrics(pooled(seen), SLO), metrics(pooled(said), SLO)
        e = {
            "mean": p["e2e_mean_s"] / m["e2e_mean_s"] - 1, "p95": p["e2e_p95_s"] / m["e2e_p95_s"] - 1,
            "ttft": p["ttft_p95_s"] / m["ttft_p95_s"] - 1, "attainment": p["attainment"] - m["attainment"],
        }  # fmt: skip
        errors[qps] = e["mean"]
        if qps / top <= HIGHEST_LOAD:
            worst = {k: max(worst[k], abs(v)) for k, v in e.items()}
        rows.append([
            f"{qps:g}", f"{qps / top:.3f}", f"{m['e2e_mean_s']:.4f} / {m['e2e_p95_s']:.4f} / {m['ttft_p95_s']:.4f}",
            share(e["mean"]), share(e["p95"]), share(e["ttft"]), f"{round(e['attainment'] * 100, 2) + 0.0:+.2f} pp",
        ])  # fmt: skip
    return rows, errors, worst


def study_predictors(quick: bool = False) -> tuple[list[str], dict[float, Predicted]]:
    """Birth-death with true coefficients and replay with fitted ones against long-run truth."""
    paths, path_s = (2, 2000.0) if quick else (PATHS, PATH_S)
    truth = reference_des().Truth
    affine, heavy = truth(noise_cv=0.05), truth(0.5e-3, 0.03e-3, 15e-6, noise_cv=0.05)
    chain_rows, known, said = _chain_rows(affine, AFFINE_QPS, (0.02, 0.04), paths, path_s)
    top = lambda_max_qps(law_of(heavy), SEED_LENGTHS, K)
    heavy_rows, _, heavy_said = _chain_rows(
        heavy, tuple(round(u * top, 2) for u in LOADS), (0.03, 0.06), paths, path_s
    )  # fmt: skip
    replay_paths, replay_s = (1, 600.0) if quick else (4, 6000.0)
    replay_rows, errors, worst = _replay_rows(affine, replay_paths, replay_s)
    head = ["QPS", "load", "true mean, s", "true p95, s", "mean field, mean", "mean", "p95", "TTFT p95", "verdict"]
    lines = [
        "## 3 Predictors against long-run truth", "",
        f"Written on {today()}.", "",
        f"**Birth-death**, true coefficients, no arrivals. Truth: {paths} paths x {path_s:,.0f} s without step noise, "
        "± one standard error. TTFT from the chain is meant above 90 % load only. The chain gives every request one "
        "mean time per token; in truth a long answer that meets a full batch all along is not the mean one, so p95 "
        "comes out low.", "",
        f"Affine, up to 92 % load: mean {said[0]}, p95 {said[1]}.", "",
        *table(head, chain_rows),
        f"Prefill-heavy (alpha 0.5 ms, beta 0.03 ms, gamma 15 us; lambda_max {top:.2f}/s), up to 92 % load: mean "
        f"{heavy_said[0]}, p95 {heavy_said[1]}. Prefill comes in stalls of a whole prompt "
        "that hit all that run at once, and the chain spreads it evenly: the larger its part, the lower the chain. The "
        "replay, which the reports predict with, knows the stalls.", "",
        *table(head, heavy_rows),
        f"**Replay** with coefficients fitted on 300 s at 5 and 10 QPS with 10 ms jitter, and the planned arrivals. "
        f"Truth: {replay_paths} paths x {replay_s:,.0f} s of the step-by-step simulator with 5 % step noise, the same "
        f"arrivals. Up to 92 % load: mean {at_most(worst['mean'], 0.03)}, p95 {at_most(worst['p95'], 0.03)}, TTFT p95 "
        f"{at_most(worst['ttft'], 0.10)}, attainment {worst['attainment'] * 100:.2f} pp (at most 1 pp: "
        f"{met(worst['attainment'] <= 0.01)}).", "",
        *table(["QPS", "load", "true mean / p95 / TTFT p95, s", "mean", "p95", "TTFT p95", "attainment"], replay_rows),
    ]  # fmt: skip
    return lines, {q: Predicted(t, w, errors.get(q)) for q, (t, w) in known.items()}


def rank(values: np.ndarray, percent: int) -> float:
    """Nearest rank, same unit."""
    return nearest_rank(np.sort(values), percent / 100)
