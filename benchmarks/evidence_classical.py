"""Section 1 of docs/evidence/queueing.md: the classical formulas against simulations of their own queues.

Input: a seed. Output: lines of Markdown. Run by `benchmarks.evidence_queueing`.
Does not: judge an approximation as if it were exact: its error is printed, and whether simulation tells it apart.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np

from analysis import queueing as q
from benchmarks.evidence_page import met, share, table, today

SEED = 11
SCV = math.exp(0.36) - 1  # of lognormal(., 0.6)
RUNS = 10
T_975 = 2.262  # Student's t, 9 degrees of freedom


def study_classical(quick: bool = False) -> list[str]:
    """Closed forms against independent simulations."""
    rng = np.random.default_rng(SEED)
    part = 20 if quick else 1
    rows = []
    for rho in (0.5, 0.7, 0.8, 0.9):
        waits = [lindley(rng, 1_000_000 // part, rho) for _ in range(RUNS)]
        rows.append(_against(f"P-K: M/LN(0.6)/1, rho {rho}", q.pollaczek_khinchine_wait_s(1, rho, SCV), waits))
    for sigma in (0.6, 1.5):
        means = [_processor_sharing(rng, 60_000 // part, 0.8, sigma) for _ in range(RUNS)]
        formula = q.processor_sharing_residence_s(0.8, 1.0)
        rows.append(_against(f"PS residence: M/LN({sigma})/1, rho 0.8", formula, means))
    for servers, rho in ((8, 0.8), (32, 0.9)):
        waits = [many(rng, 250_000 // part, servers, rho, scv=1.0) for _ in range(RUNS)]
        rows.append(_against(f"Erlang C: M/M/{servers}, rho {rho}", q.mmc_wait_s(servers * rho, 1, servers), waits))
    near = []
    for servers, rho in ((2, 0.8), (8, 0.8), (32, 0.8), (32, 0.9)):
        waits = [many(rng, (1_000_000 if rho > 0.85 else 500_000) // part, servers, rho) for _ in range(RUNS)]
        name = f"M/LN(0.6)/{servers}, rho {rho}"
        near.append(_near(f"Kimura: {name}", q.kimura_wait_s(servers * rho, 1, servers, SCV), waits))
        near.append(_near(f"Allen-Cunneen: {name}", q.allen_cunneen_wait_s(servers * rho, 1, servers, SCV), waits))
    for name, shape in (("E2/LN(0.6)/1", 2.0), ("Gamma(CV 2)/LN(0.6)/1", 0.25)):
        for rho in (0.7, 0.9):
            waits = [lindley(rng, 1_000_000 // part, rho, shape) for _ in range(RUNS)]
            near.append(_near(f"Kingman: {name}, rho {rho}", q.kingman_wait_s(1, rho, 1 / shape, SCV), waits))
    inside = sum(row[-1] == "yes" for row in rows)
    told = sum(row[-1] == "no" for row in near)
    return [
        "## 1 Classical formulas against simulation", "",
        f"Written on {today()}. Mean wait in units of the mean service time (P-K and Kingman: service = rho, lambda = "
        f"1). {RUNS} replications, 95 % t-interval, generator seed {SEED}. Accepted: the simulation agrees within its "
        f"95 % interval. Exact formulas: {inside} of {len(rows)} inside ({met(inside >= len(rows) - 1)}; of "
        f"{len(rows)} true formulas one outside or none has probability {_binomial(len(rows), 1):.2f}).", "",
        *table(["exact formula", "formula", "simulation", "inside"], rows),
        f"Approximations: {len(near) - told} of {len(near)} inside, so the condition is {met(told == 0)} here. It "
        "cannot be met by an approximation once the simulation is long enough to see its error; the error is what is "
        f"worth knowing: largest {_largest(near, 'Kimura')} for Kimura, {_largest(near, 'Allen')} for Allen-Cunneen, "
        f"{_largest(near, 'Kingman')} for Kingman, which is for heavy traffic: high for arrivals more regular than "
        "Poisson, low for burstier ones. None of them predicts a batching service (section 5); the reports show "
        "Allen-Cunneen and P-K as the naive models that they are.", "",
        *table(["approximation", "formula", "simulation", "error", "inside"], near),
    ]  # fmt: skip


def _binomial(n: int, outside: int) -> float:
    """P(at most `outside` of n true formulas fall outside their 95 % intervals)."""
    return sum(math.comb(n, k) * 0.05**k * 0.95 ** (n - k) for k in range(outside + 1))


def _interval(runs: list[float]) -> tuple[float, float]:
    """(mean, half-width of the 95 % t-interval)."""
    values = np.array(runs)
    return float(values.mean()), T_975 * float(values.std(ddof=1)) / math.sqrt(len(values))


def _against(name: str, formula: float, runs: list[float]) -> list[Any]:
    mean, half = _interval(runs)
    return [name, f"{formula:.5f}", f"{mean:.5f} +- {half:.5f}", "yes" if abs(mean - formula) <= half else "no"]


def _near(name: str, formula: float, runs: list[float]) -> list[Any]:
    mean, half = _interval(runs)
    row = _against(name, formula, runs)
    return [*row[:-1], f"{share(formula / mean - 1)} +- {half / mean:.2%}", row[-1]]


def _largest(rows: list[list[Any]], name: str) -> str:
    """The error of that approximation that is largest in size, as printed."""
    return max((row[3].split(" +-")[0] for row in rows if row[0].startswith(name)), key=lambda e: abs(float(e[:-2])))


def lindley(rng: np.random.Generator, n: int, rho: float, shape: float = 1.0) -> float:
    """Mean wait of one server with lognormal service of mean rho and gamma gaps of mean 1 (shape 1 = Poisson)."""
    service = rng.lognormal(math.log(rho) - 0.18, 0.6, n)
    gaps = rng.exponential(1.0, n - 1) if shape == 1 else rng.gamma(shape, 1 / shape, n - 1)
    walk = np.concatenate([[0.0], np.cumsum(service[:-1] - gaps)])
    return float((walk - np.minimum.accumulate(walk)).mean())


def many(rng: np.random.Generator, n: int, servers: int, rho: float, scv: float = SCV) -> float:
    """Mean wait of `servers` servers, mean service 1: lognormal of that squared variation, exponential for 1."""
    arrivals = np.cumsum(rng.exponential(1 / (servers * rho), n)).tolist()
    sigma = math.sqrt(math.log(1 + scv))
    works = rng.exponential(1.0, n) if scv == 1 else rng.lognormal(-sigma * sigma / 2, sigma, n)
    free, total = [0.0] * servers, 0.0
    for at, work in zip(arrivals, works.tolist(), strict=True):
        start = max(at, free[0])
        total += start - at
        heapq.heapreplace(free, start + work)
    return total / n


def _processor_sharing(rng: np.random.Generator, n: int, rho: float, sigma: float) -> float:
    """Mean residence of M/LN/1-PS by attained service: all present get the same, so a heap of levels."""
    arrivals = np.cumsum(rng.exponential(1 / rho, n)).tolist()
    work = rng.lognormal(-sigma * sigma / 2, sigma, n).tolist()
    level, now, heap, total, i = 0.0, 0.0, [], 0.0, 0
    while i < n or heap:
        ends = now + (heap[0][0] - level) * len(heap) if heap else math.inf
        if i < n and arrivals[i] <= ends:
            if heap:
                level += (arrivals[i] - now) / len(heap)
            now = arrivals[i]
            heapq.heappush(heap, (level + work[i], now))
            i += 1
        else:
            level, came = heapq.heappop(heap)
            now = ends
            total += now - came
    return total / n
