"""Nearest-rank percentiles, in one function for the whole project.

Input: values in seconds, `inf` for arrivals that did not finish. Output: the
order statistic at rank ceil(p * n), as numpy's `inverted_cdf` gives it.
Does not: interpolate, drop values, or decide what is an arrival.

1. With `inf` for misses, "P95 <= x" holds exactly when at least 95 % of all
   arrivals finished within x.
2. A percentile whose upper 95 % confidence bound does not exist for the number
   of independent values is withheld: None, with the reason.
"""
from __future__ import annotations

import math
from typing import Any

import numpy as np

from bench.records.analysis import Percentiles
from bench.records.sentences import said, text_of

# Smallest n with 1 - p^n >= 0.975: below it the order-statistic interval of the
# percentile p has no upper end. p = .95: .95^72 = .0249; .99^368 = .0248.
MIN_SAMPLES: dict[str, int] = {"p50": 6, "p90": 36, "p95": 72, "p99": 368, "p999": 3688}
SHARES: dict[str, float] = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99, "p999": 0.999}


def nearest_rank(sorted_values: np.ndarray, share: float) -> float:
    """The value at rank ceil(share * n) of ascending values; NaN when there are none."""
    n = len(sorted_values)
    if n == 0:
        return math.nan
    # share * n is a float: 0.95 * 100 is 94.99999999999999, which must stay rank 95.
    rank = math.ceil(round(share * n, 9))
    return float(sorted_values[min(max(rank, 1), n) - 1])


def min_samples(share: float) -> int:
    """Independent values needed before the percentile `share` has a two-sided 95 % interval."""
    return math.ceil(math.log(0.025) / math.log(share))


def summarise(
    values: np.ndarray, *, effective_n: float | None = None, effective_n_high: float | None = None
) -> Percentiles:
    """Mean, maximum and percentiles of `values` (seconds, inf = never finished, NaN = not part of it).

    `effective_n`: independent values that the sample is worth, for the record; n when None.
    `effective_n_high`: the same at the end that favours the sample: a percentile is withheld for
    dependence only when even this is too small.
    The mean is over finite values when all are finite, otherwise inf.
    """
    values = values[~np.isnan(values)]
    n = len(values)
    if n == 0:
        none = dict.fromkeys(("p50", "p90", "p95", "p99"), said("withheld.none"))
        return Percentiles(n=0, withheld=_texts(none), withheld_said=none)
    ordered = np.sort(values)
    worth = float(n) if effective_n_high is None else min(float(n), effective_n_high)
    found: dict[str, float] = {}
    withheld: dict[str, dict[str, Any]] = {}
    for name in ("p50", "p90", "p95", "p99"):
        need = MIN_SAMPLES[name]
        if worth >= need:
            found[name] = nearest_rank(ordered, SHARES[name])
        elif n >= need:
            withheld[name] = said("withheld.dependent", n=n, worth=worth, need=need)
        else:
            withheld[name] = said("withheld.few", n=n, need=need)
    return Percentiles(
        n=n,
        mean=float(values.mean()),
        p50=found.get("p50"),
        p90=found.get("p90"),
        p95=found.get("p95"),
        p99=found.get("p99"),
        maximum=float(ordered[-1]),
        withheld=_texts(withheld),
        withheld_said=withheld,
        effective_n=None if effective_n is None else min(float(n), effective_n),
    )


def _texts(withheld: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: text_of(why) for name, why in withheld.items()}


def ecdf_points(values: np.ndarray, points: int = 100) -> list[list[float]]:
    """At most `points` pairs [value_s, share of all values <= value]; infinite values only lower the share."""
    values = values[~np.isnan(values)]
    n = len(values)
    if n == 0:
        return []
    ordered = np.sort(values)
    ranks = np.unique(np.linspace(1, n, min(points, n)).round().astype(int))
    picked = [[float(ordered[r - 1]), float(r / n)] for r in ranks]
    return [p for p in picked if math.isfinite(p[0])]
