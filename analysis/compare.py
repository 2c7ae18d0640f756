"""Attainment of several variants over rates, with intervals over seeds.

Input: counts per variant, rate and seed (any objects with the fields of `engine.compare.Sample`).
Output: `Cell`s: mean and Student t interval over seeds, and the difference to the first variant seed by seed.
Does not: simulate or draw.

All variants see the same arrivals of a seed, so the difference is paired: its interval is far narrower than the two
means suggest. One seed has no interval (None), not a narrow one.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from analysis.intervals import t_quantile


@dataclass(frozen=True, slots=True)
class Cell:
    """One variant at one rate."""

    variant: str
    offered_qps: float
    seeds: int
    attainment: float  # share of all arrivals, mean over seeds
    low: float | None
    high: float | None
    gain: float  # attainment minus the first variant's, mean of the pairs
    gain_low: float | None
    gain_high: float | None
    refused: float  # share of all arrivals
    worst_ttft_s: float  # over all seeds
    preemptions: float  # per finished stage, mean
    fairness: float  # Jain's index over tenants, mean

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float | None, float | None]:
    """(mean, low, high) with Student's t over independent values; no interval for a single one."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, None, None
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n) * t_quantile(n - 1, level)
    return mean, mean - spread, mean + spread


def cells(samples: Iterable[Any]) -> list[Cell]:
    """One cell per variant and rate; variants in the order they came, rates rising."""
    table: dict[str, dict[float, dict[int, list[Any]]]] = {}
    for s in samples:
        table.setdefault(s.variant, {}).setdefault(s.offered_qps, {}).setdefault(s.seed, []).append(s)
    first = next(iter(table.values()), {})
    found = []
    for variant, rates in table.items():
        for qps in sorted(rates):
            seeds = rates[qps]
            shares = {seed: _share(group, "met") for seed, group in seeds.items()}
            base = {seed: _share(group, "met") for seed, group in first.get(qps, {}).items()}
            pairs = [shares[seed] - base[seed] for seed in shares if seed in base] or [math.nan]
            mean, low, high = mean_interval(list(shares.values()))
            gain, gain_low, gain_high = mean_interval(pairs)
            group = [s for many in seeds.values() for s in many]
            found.append(Cell(
                variant, qps, len(seeds), mean, None if low is None else max(0.0, low),
                None if high is None else min(1.0, high), gain, gain_low, gain_high, _share(group, "refused"),
                max(s.worst_ttft_s for s in group), sum(s.preemptions for s in group) / len(group),
                sum(s.fairness for s in group) / len(group),
            ))
    return found


def _share(group: Sequence[Any], name: str) -> float:
    return sum(getattr(s, name) for s in group) / max(1, sum(s.arrivals for s in group))
