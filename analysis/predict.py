"""Latency and attainment of a rate that was not used for the fit, by four models.

Input: a step law, planned arrivals and lengths, deadlines in seconds.
Output: the metrics of METRICS by replay, by the birth-death chain, and by the two naive
models (M/G/1 and M/G/K with service times of the lowest stage); the predicted knee.
Does not: read a measured latency of the stage it predicts, or judge the outcome.

1. The same function computes the metrics of measured and of predicted rows, so they differ by
   the rows only: nearest rank, +inf for what did not finish, every arrival in the denominator.
2. Knee paths use common random numbers: only the rate changes along one path.

Source: `docs/queueing.md` sections 4-7.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import special

from analysis.batching import Lengths, StepLaw, lambda_max_qps
from analysis.birth_death import limited_ps, residence_quantile_s, ttft_quantile_s
from analysis.percentiles import SHARES, nearest_rank
from analysis.queueing import QueueWait, mgc_wait, pollaczek_khinchine_wait_s, sample_moments
from analysis.replay import replay

METRICS = ("e2e_mean_s", "e2e_p95_s", "ttft_p95_s", "attainment")
KNEE_PATHS = 6  # independent paths: their spread is the simulation's own error
KNEE_REQUESTS = 5000  # per path: 50 misses at a target of 0.99; a shorter one is too lucky near capacity
KNEE_STEPS = 7  # halvings: 1.2 lambda_max / 128 is below the spread of the paths
KNEE_TOP = 1.2  # of lambda_max: where the search begins
NAIVE_ROWS = 400  # quantiles of the lowest stage that stand for its distribution


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The service level objective in seconds; inf = no such clause."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2e_s: float = math.inf
    attainment_target: float = 0.99


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of a set of arrivals, seconds; arrays of shape (n,), inf = never, nan TPOT = one token."""

    ttft_s: np.ndarray
    tpot_s: np.ndarray
    e2e_s: np.ndarray

    def take(self, mask: np.ndarray) -> Latencies:
        """The rows of a mask."""
        return Latencies(self.ttft_s[mask], self.tpot_s[mask], self.e2e_s[mask])


def p95(values: np.ndarray) -> float:
    """Nearest-rank 95th percentile, same unit; nan when empty."""
    return nearest_rank(np.sort(values), SHARES["p95"])


def _binomial_rank(p: float, n: int, share: float) -> int:
    """binom.ppf(p, n, share): the smallest k with P(X <= k) >= p. By itself scipy.stats takes 0.45 s to import."""
    rank = max(0, math.ceil(float(special.bdtrik(p, n, share)) - 1e-9))
    while rank > 0 and special.bdtr(rank - 1, n, share) >= p:
        rank -= 1
    while special.bdtr(rank, n, share) < p:
        rank += 1
    return rank


def p95_interval(values: np.ndarray) -> tuple[float, float]:
    """Order-statistic 95 % interval of the p95, same unit, as if rows were independent (so at best too narrow).

    Ranks binom.ppf(.025, n, .95) and binom.ppf(.975, n, .95) + 1; the upper end is inf when it is past n.
    """
    ordered, n = np.sort(values), values.size
    low, high = (_binomial_rank(p, n, SHARES["p95"]) for p in (0.025, 0.975))
    return float(ordered[max(low, 1) - 1]), float(ordered[high]) if high < n else math.inf


def metrics(rows: Latencies, slo: Deadlines) -> dict[str, float]:
    """The METRICS of the rows; the mean is over finished ones, everything else over all."""
    finished = rows.e2e_s[np.isfinite(rows.e2e_s)]
    met = (rows.ttft_s <= slo.ttft_s) & ~(rows.tpot_s > slo.tpot_s) & np.isfinite(rows.e2e_s)
    return {
        "e2e_mean_s": float(finished.mean()) if finished.size else math.nan,
        "e2e_p95_s": p95(rows.e2e_s),
        "ttft_p95_s": p95(rows.ttft_s),
        "attainment": float(met.mean()) if met.size else math.nan,
    }


class TtftShift:
    """What the client sees on top of the engine's TTFT, learnt on the calibration stages.

    Network, HTTP and tokenizer are not in the step law. The shift is measured minus replayed TTFT
    at equal rank, as a function of the rank: it keeps the shape of the jitter and does not add the
    replay's own phase error to it.
    """

    def __init__(self, measured_s: np.ndarray, replayed_s: np.ndarray) -> None:
        ranks = (np.arange(20) + 0.5) / 20  # 20 steps: about ten rows each in a short run
        finite = np.isfinite(measured_s)
        self.ranks = ranks
        if finite.any():
            self.shift_s = np.quantile(measured_s[finite], ranks) - np.quantile(replayed_s[finite], ranks)
        else:
            self.shift_s = np.zeros(ranks.size)

    @property
    def median_s(self) -> float:
        """The shift at the middle, seconds."""
        return float(np.interp(0.5, self.ranks, self.shift_s))

    def apply(self, rows: Latencies) -> Latencies:
        """The rows with the shift added to TTFT and E2E."""
        if not rows.ttft_s.size:
            return rows
        order = np.argsort(np.argsort(rows.ttft_s, kind="stable"), kind="stable")
        shift = np.interp((order + 0.5) / order.size, self.ranks, self.shift_s)
        ttft = np.maximum(rows.ttft_s + shift, 0.0)
        return Latencies(ttft, rows.tpot_s, rows.e2e_s - rows.ttft_s + ttft)


def replay_latencies(
    arrival_s: np.ndarray, input_tokens: np.ndarray, output_tokens: np.ndarray, law: StepLaw, seqs: int, budget: int,
    cached_tokens: np.ndarray | None = None,
) -> Latencies:
    """Latencies of the replayed arrivals (sorted), engine only."""
    out = replay(arrival_s, input_tokens, output_tokens, law, seqs, budget, cached_tokens)
    steps = np.maximum(output_tokens, 1) - 1.0
    decode = out.last_token_s - out.first_token_s
    tpot = np.divide(decode, steps, out=np.full(decode.shape, np.nan), where=steps > 0)
    return Latencies(out.first_token_s - arrival_s, tpot, out.last_token_s - arrival_s)


def birth_death_metrics(
    law: StepLaw, lengths: Lengths, input_tokens: np.ndarray, output_tokens: np.ndarray, qps: float, seqs: int,
    overhead_s: float,
) -> dict[str, float | None]:
    """Mean and p95 of E2E, p95 of TTFT by the chain; TTFT only above 90 % load, None without a steady state.

    `input_tokens`: those that are computed.
    """
    state = limited_ps(law, lengths, qps, seqs)
    if state is None:
        return dict.fromkeys(METRICS)
    ttft = ttft_quantile_s(state, law, lengths, input_tokens, 0.95) + overhead_s if state.load_ratio >= 0.9 else None
    return {
        "e2e_mean_s": state.residence_s + overhead_s,
        "e2e_p95_s": residence_quantile_s(state, output_tokens, 0.95) + overhead_s,
        "ttft_p95_s": ttft,
        "attainment": None,
    }


# ---- naive models -----------------------------------------------------------


def naive_pk_metrics(lowest: Latencies, qps: float) -> dict[str, float | None]:
    """M/G/1 with the service times of the lowest stage: what P-K says about a batching service.

    Mean only; None where rho = lambda S >= 1, which is nearly everywhere: one request is not a server.
    """
    result: dict[str, float | None] = dict.fromkeys(METRICS)
    service = lowest.e2e_s[np.isfinite(lowest.e2e_s)]
    if service.size:
        moments = sample_moments(service)
        wait = pollaczek_khinchine_wait_s(qps, moments.mean, moments.scv)
        result["e2e_mean_s"] = moments.mean + wait if math.isfinite(wait) else None
    return result


def naive_mgk_metrics(lowest: Latencies, qps: float, seqs: int, slo: Deadlines) -> dict[str, float | None]:
    """M/G/K with service times of the lowest stage (Erlang C and Kimura): no coupling through the batch."""
    rows = lowest.take(np.isfinite(lowest.e2e_s))
    if not rows.e2e_s.size:
        return dict.fromkeys(METRICS)
    moments = sample_moments(rows.e2e_s)
    wait = mgc_wait(qps, moments.mean, seqs, moments.scv)
    if wait is None:
        return dict.fromkeys(METRICS)
    pick = np.argsort(rows.e2e_s)[np.linspace(0, rows.e2e_s.size - 1, min(NAIVE_ROWS, rows.e2e_s.size)).astype(int)]
    rows = rows.take(pick)
    tpot_ok = ~(rows.tpot_s > slo.tpot_s)
    return {
        "e2e_mean_s": moments.mean + wait.mean_s,
        "e2e_p95_s": _shifted_p95(wait, rows.e2e_s),
        "ttft_p95_s": _shifted_p95(wait, rows.ttft_s),
        "attainment": float(np.mean(tpot_ok * (1 - wait.survival(slo.ttft_s - rows.ttft_s)))),
    }


def _shifted_p95(wait: QueueWait, base_s: np.ndarray) -> float:
    """p95 of wait + base for independent parts, by bisection on P(wait > x - base) = 0.05."""
    low, high = 0.0, float(base_s.max()) + 1e-9
    while float(wait.survival(high - base_s).mean()) > 0.05:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float(wait.survival(middle - base_s).mean()) > 0.05 else (low, middle)
    return high


# ---- knee -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Knee:
    """A predicted crossing with the interval of its own simulation and coefficients, 1/s."""

    qps: float | None
    low_qps: float | None
    high_qps: float | None
    kind: str  # "crossing" | "at_least" | "below"


def unit_gaps(rng: np.random.Generator, count: int, process: str, burstiness: float) -> np.ndarray:
    """Gaps of mean 1 of the arrival process: constant, poisson, or gamma with shape `burstiness`."""
    if process == "constant":
        return np.ones(count)
    if process == "gamma":
        return rng.gamma(burstiness, 1 / burstiness, count)
    return rng.exponential(1.0, count)


@dataclass(frozen=True, slots=True)
class KneeInput:
    """Everything the knee prediction needs except the criterion."""

    law: StepLaw
    lengths: Lengths
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    seqs: int
    budget: int
    shift: TtftShift
    process: str = "poisson"
    burstiness: float = 1.0
    lambda_max_se_ratio: float = 0.0
    seed: int = 1
    cached_tokens: np.ndarray | None = None  # of the prompts, in the same order


@dataclass(frozen=True, slots=True)
class Criterion:
    """A share of rows that must hold, such as attainment >= 0.99 or P(E2E <= 2 s) >= 0.95."""

    holds: Callable[[Latencies], np.ndarray]
    target: float


class KneeSearch:
    """Shares of all criteria by rate, on KNEE_PATHS fixed paths; each rate is replayed once."""

    def __init__(self, case: KneeInput, criteria: list[Criterion]) -> None:
        self.case, self.criteria = case, criteria
        self.top = KNEE_TOP * lambda_max_qps(case.law, case.lengths, case.seqs)
        self.seen: dict[float, np.ndarray] = {}  # rate -> (criteria, paths)
        self.paths = []
        for path in range(KNEE_PATHS):
            rng = np.random.default_rng([case.seed, path])
            clock = np.cumsum(unit_gaps(rng, KNEE_REQUESTS, case.process, case.burstiness))
            pick = rng.integers(0, case.output_tokens.size, KNEE_REQUESTS)
            cached = None if case.cached_tokens is None else case.cached_tokens[pick]
            self.paths.append((clock, case.input_tokens[pick], case.output_tokens[pick], cached))

    def shares(self, qps: float) -> np.ndarray:
        """(criteria, paths): share of the settled rows of each path that hold at `qps`."""
        if qps not in self.seen:
            case, settled = self.case, slice(KNEE_REQUESTS // 10, None)  # from empty: a tenth is warm-up
            found = []
            for clock, prompt, output, cached in self.paths:
                rows = replay_latencies(clock / qps, prompt, output, case.law, case.seqs, case.budget, cached)
                rows = case.shift.apply(rows)
                found.append([float(c.holds(rows)[settled].mean()) for c in self.criteria])
            self.seen[qps] = np.array(found).T
        return self.seen[qps]

    def knee(self, index: int) -> Knee:
        """The rate at which the mean share over the paths falls below the target of criterion `index`.

        The mean over paths crosses, not the mean of their crossings: near capacity single paths are
        too lucky. Interval: 2 jackknife errors of the paths, and 2 of lambda_max, added.
        """
        target = self.criteria[index].target
        if self.shares(self.top)[index].mean() >= target:
            return Knee(self.top, None, None, "at_least")
        low, high = 0.0, self.top
        for _ in range(KNEE_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.shares(middle)[index].mean() >= target else (low, middle)
        if low == 0.0:
            return Knee(None, None, high, "below")
        every = np.arange(KNEE_PATHS)
        point = self._crossing(index, every)
        left_out = np.array([self._crossing(index, every[every != path]) for path in every])
        error = math.sqrt((KNEE_PATHS - 1) / KNEE_PATHS * float(((left_out - left_out.mean()) ** 2).sum()))
        # the last bracket of the search is its own error
        half = 2 * error + 2 * self.case.lambda_max_se_ratio * point + self.top / 2**KNEE_STEPS
        return Knee(point, max(0.0, point - half), point + half, "crossing")

    def _crossing(self, index: int, paths: np.ndarray) -> float:
        """Where the mean share of some paths crosses the target, linear between the rates replayed."""
        rates = np.array(sorted(self.seen))
        share = np.array([self.seen[r][index, paths].mean() for r in rates])
        target = self.criteria[index].target
        below = np.nonzero(share < target)[0]
        if not below.size or below[0] == 0:
            return float(rates[-1] if not below.size else rates[0])
        i = int(below[0])
        part = (share[i - 1] - target) / (share[i - 1] - share[i])
        return float(rates[i - 1] + part * (rates[i] - rates[i - 1]))
