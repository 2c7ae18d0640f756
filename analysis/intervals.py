"""Intervals for values that depend on each other, and the warm-up cut.

Input: values in arrival order. Output: batch-means intervals, the variance
inflation and effective sample size, Wilson intervals, MSER-5.
Does not: read files, know what a stage is, or judge.

1. An interval never pretends independence: neighbours in a queue share its state.
2. When the data cannot carry an interval, it is flagged unreliable and withheld, not narrowed.

Source: queueing.md 5.1-5.3 of the project's notes (docs/analysis.md, "Intervals");
Law, Simulation Modeling and Analysis, batch means; White 1997, MSER.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from analysis.percentiles import nearest_rank

BATCHES = 5  # five long batches stay independent longest: coverage .975 at 92 % of capacity, 300 s
DEPENDENCE_BATCHES = 20  # more, shorter ones to estimate how dependent neighbours are
MIN_BATCH = 15  # values per batch below which a batch statistic means nothing
LAG1_LIMIT = 0.3  # correlation of neighbouring batch means above which batches are too short
EFFECTIVE_N_LIMIT = 200  # independent values below which a p95 interval is not to be relied on
# Wide and dependent together: near saturation the level wanders more slowly than a batch is
# long, five batches then differ by more than their interval admits. Wide alone is only few values.
WIDE_RATIO = 0.15
DEPENDENT_INFLATION = 4.0
# Independent states of the number in flight that a window must hold: 8 per batch. Below, the
# nominal 95 % interval was measured to cover less than 90 % (docs/evidence/analysis.md).
MIN_STATES = 40
# The window may hold none of the long excursions that the long run has. What that adds to the
# variance was set by simulation: a share of 24/states brings coverage to the nominal level.
EXCURSION_STATES = 24.0
UNRELIABLE = "withheld: interval unreliable"


@dataclass(frozen=True)
class BatchInterval:
    """A statistic of the whole sample with its batch-means interval."""

    value: float
    low: float | None
    high: float | None
    method: str
    effective_n: float
    effective_n_high: float  # with the inflation at its lower 95 % point: sure to be no larger
    inflation: float
    reliable: bool


def t_quantile(degrees: int, level: float = 0.95) -> float:
    """Two-sided Student t quantile."""
    return float(special.stdtrit(degrees, 0.5 + level / 2))


def z_quantile(level: float = 0.95) -> float:
    """Two-sided normal quantile."""
    return float(special.ndtri(0.5 + level / 2))


def wilson(hits: float, n: float, level: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a share; n may be an effective size. (0, 1) when n is 0.

    (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), p = hits/n. Equals
    scipy.stats.binomtest(...).proportion_ci(method="wilson") for whole numbers (tested).
    """
    if n <= 0:
        return 0.0, 1.0
    z = z_quantile(level)
    p = min(max(hits / n, 0.0), 1.0)
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if hits <= 0 else max(0.0, (centre - half) / scale)
    high = 1.0 if hits >= n else min(1.0, (centre + half) / scale)
    return low, high


def split(values: np.ndarray, batches: int) -> list[np.ndarray]:
    """`batches` runs of neighbouring values, sizes apart by one at most."""
    return np.array_split(values, batches)


def lag1_correlation(batch_means: np.ndarray) -> float:
    """Correlation of neighbouring batch means; 0 when they do not vary."""
    d = batch_means - batch_means.mean()
    total = float((d * d).sum())
    return float((d[1:] * d[:-1]).sum() / total) if total > 0 else 0.0


def _variance_ratio(indicator: np.ndarray, batches: int) -> tuple[float, np.ndarray] | None:
    """(Var(batch means) * batch size / Var(values), the means); None with too few values or without variation."""
    n = len(indicator)
    batches = min(batches, n // MIN_BATCH)
    if batches < BATCHES:
        return None
    size = n // batches
    x = np.asarray(indicator[: size * batches], dtype=np.float64)
    variance = float(x.var())
    if variance <= 0:
        return None
    means = x.reshape(batches, size).mean(axis=1)
    return float(means.var(ddof=1)) * size / variance, means


def variance_inflation(indicator: np.ndarray, batches: int = DEPENDENCE_BATCHES) -> float:
    """How many times larger the variance of a mean is than for independent values, at least 1.

    Var(batch means) * batch size / Var(values), from batch means; taken as 1 unless it
    exceeds the upper 10 % point that independent values would reach by chance.
    """
    found = _variance_ratio(indicator, batches)
    if found is None:
        return 1.0
    ratio, means = found
    batches = len(means)
    by_chance = float(special.chdtri(batches - 1, 0.10)) / (batches - 1)
    if ratio <= by_chance:
        return 1.0
    # Positive correlation between batches means that even they are too short: the
    # first-order correction for an AR(1) of batch means, (1 + r)/(1 - r).
    r = min(max(lag1_correlation(means), 0.0), 0.9)
    return max(1.0, ratio * (1 + r) / (1 - r))


def inflation_floor(indicator: np.ndarray, batches: int = DEPENDENCE_BATCHES) -> float:
    """One-sided lower 95 % bound of the variance inflation (chi-square on the batch means), at least 1."""
    found = _variance_ratio(indicator, batches)
    if found is None:
        return 1.0
    ratio, batches = found[0], len(found[1])
    return max(1.0, ratio * (batches - 1) / float(special.chdtri(batches - 1, 0.05)))


def inflation_ceiling(indicator: np.ndarray, batches: int = DEPENDENCE_BATCHES) -> float:
    """One-sided upper 95 % bound of the variance inflation, 1 to n: the most dependence the batches allow.

    The chi-square bound on the variance of the batch means, times (1 + r)/(1 - r) as in `variance_inflation`.
    Too few values for batches: n, that is, the whole sample counts as one observation.
    """
    n = len(indicator)
    if min(batches, n // MIN_BATCH) < BATCHES:
        return float(max(n, 1))
    found = _variance_ratio(indicator, batches)
    if found is None:
        return 1.0  # all alike: nothing to share a state about
    ratio, means = found
    batches = len(means)
    ratio = ratio * (batches - 1) / float(special.chdtri(batches - 1, 0.95))
    r = min(max(lag1_correlation(means), 0.0), 0.9)
    return min(max(1.0, ratio * (1 + r) / (1 - r)), float(n))


def independent_states(series: np.ndarray) -> float:
    """Independent values that an evenly sampled series is worth: n / integrated autocorrelation time.

    The time is summed by Geyer's initial positive sequence: pairs of lags until their sum
    turns negative. A constant series is worth n.
    """
    n = len(series)
    d = np.asarray(series, dtype=np.float64) - float(np.mean(series)) if n else np.empty(0)
    total = float(d @ d)
    if n < 4 or total <= 0:
        return float(n)
    rho = np.correlate(d, d, "full")[n - 1 :] / total
    pairs = rho[1 : n - (n - 1) % 2].reshape(-1, 2).sum(axis=1)
    stop = np.flatnonzero(pairs <= 0)
    pairs = pairs[: stop[0]] if len(stop) else pairs
    return n / (1 + 2 * float(pairs.sum()))


def batch_correction(states: float, batches: int) -> float:
    """Factor on the variance of a mean that makes up for batches shorter than the memory of the data.

    For autocorrelation exp(-t/theta), Var(mean over L) = v(L) = 2 theta/L (1 - theta/L (1 - exp(-L/theta))),
    and the sample variance of b batch means has expectation b/(b-1) (v(L/b) - v(L)), so the factor is
    v(L) (b - 1)/(v(L/b) - v(L)); theta = L/(2 states). At least 1.
    """
    theta = 1 / (2 * max(states, 1.0))

    def v(length: float) -> float:
        x = length / theta
        return 2 / x * (1 - (1 - math.exp(-x)) / x)

    return max(1.0, v(1.0) * (batches - 1) / (v(1.0 / batches) - v(1.0)))


def memory_factor(states: float, batches: int) -> float:
    """Factor on a batch-means variance for data with memory: short batches, and excursions the window lacks."""
    return batch_correction(states, batches) * (1 + EXCURSION_STATES / max(states, 1.0))


def quantile_interval(
    values: np.ndarray, share: float = 0.95, batches: int = BATCHES, states: float | None = None
) -> BatchInterval | None:
    """`batch_interval` as it is published: without its ends where they are not to be relied on.

    That is where it is flagged unreliable, and where it reaches below the smallest or above the
    largest value of the sample: four degrees of freedom on a logarithm then speak, not the data.
    """
    found = batch_interval(values, share, batches, states)
    if found is None:
        return None
    low, high = found.low, found.high
    within = low is not None and high is not None and np.nanmin(values) <= low and high <= np.nanmax(values)
    if found.reliable and within:
        return found
    return replace(found, low=None, high=None, method=UNRELIABLE, reliable=False)


def batch_interval(
    values: np.ndarray, share: float = 0.95, batches: int = BATCHES, states: float | None = None
) -> BatchInterval | None:
    """Batch-means interval of a percentile; None when a batch would hold too few values.

    `values`: (n,) in arrival order, inf allowed. Centre = percentile of the whole sample,
    half-width = t(.975, b-1) * sd(batch percentiles) / sqrt(b), on the logarithm, since a
    percentile of a queue spreads to the right. `states`: independent states of the system
    within the window, see `independent_states`.
    """
    values = values[~np.isnan(values)]
    n = len(values)
    if n < batches * MIN_BATCH:
        return None
    value = nearest_rank(np.sort(values), share)
    inflation = variance_inflation(values > value)
    effective = n / inflation
    at_most = n / inflation_floor(values > value)
    per_batch = np.array([nearest_rank(np.sort(part), share) for part in split(values, batches)])
    if not np.isfinite(per_batch).all():
        # Some batch has more than 1 - share misses: no symmetric interval exists.
        return BatchInterval(value, None, None, UNRELIABLE, effective, at_most, inflation, False)
    stretch = 1.0
    if states is not None:
        stretch = math.sqrt(memory_factor(states, batches))
    scale = stretch * t_quantile(batches - 1) / math.sqrt(batches)
    if value > 0 and per_batch.min() > 0:
        half = scale * float(np.log(per_batch).std(ddof=1))
        low, high = value * math.exp(-half), value * math.exp(half)
    else:
        half = scale * float(per_batch.std(ddof=1))
        low, high = max(0.0, value - half), value + half
    wanders = inflation > DEPENDENT_INFLATION and high - low > 2 * WIDE_RATIO * value
    few = inflation > 1 and effective < EFFECTIVE_N_LIMIT
    forgetful = states is None or states >= MIN_STATES
    reliable = forgetful and not (few or wanders or _batches_depend(values, value))
    return BatchInterval(value, low, high, f"batch means, b={batches}", effective, at_most, inflation, reliable)


def _batches_depend(values: np.ndarray, value: float) -> bool:
    """True when neighbouring batches move together: the batches are too short to be independent."""
    batches = min(DEPENDENCE_BATCHES, len(values) // MIN_BATCH)
    if batches < 10:
        return False
    means = np.array([float(np.mean(part > value)) for part in split(values, batches)])
    # For independent batches the correlation has sd 1/sqrt(b): ask for the larger of the two limits.
    return lag1_correlation(means) > max(LAG1_LIMIT, 1.645 / math.sqrt(batches))


def mser5(series: np.ndarray, batch: int = 5) -> int | None:
    """Number of leading samples to cut (a multiple of `batch`); None when it wants more than half.

    Minimises sum((y - mean)^2) / count^2 over what is left, searching the first half only.
    The boundary of the search means that the series never settled.
    """
    groups = len(series) // batch
    if groups < 4:
        return None
    y = np.asarray(series[: groups * batch], dtype=np.float64).reshape(groups, batch).mean(axis=1)
    counts = np.arange(groups, 0, -1)
    tail_sum = np.cumsum(y[::-1])[::-1]
    tail_squares = np.cumsum((y * y)[::-1])[::-1]
    spread = np.maximum(tail_squares - tail_sum**2 / counts, 0.0)
    last = groups // 2
    best = int(np.argmin((spread / counts.astype(float) ** 2)[: last + 1]))
    return None if best == last else best * batch


def ratio_interval(numerators: np.ndarray, denominators: np.ndarray) -> tuple[float, float, float] | None:
    """Ratio of sums with its 95 % interval from sub-window pairs (delta method); None below 3 pairs.

    W = sum L_j / sum lam_j; se = sqrt(sum d_j^2/(b-1)/b) / mean(lam), d_j = L_j - W lam_j.
    Source: Kim & Whitt, Statistical Analysis with Little's Law, Operations Research 61(4), 2013.
    """
    b = len(numerators)
    total = float(np.sum(denominators))
    if b < 3 or total <= 0:
        return None
    ratio = float(np.sum(numerators)) / total
    d = numerators - ratio * denominators
    se = math.sqrt(float((d * d).sum()) / (b - 1) / b) / (total / b)
    half = t_quantile(b - 1) * se
    return ratio, ratio - half, ratio + half
