"""Counters and histograms of a metrics page: what they rose by, and what a histogram can tell.

Input: values of two looks; histograms as (upper edge, cumulative count). Output: differences, bounds, lengths.
Does not: keep anything.

1. A counter, or a bucket, that fell was reset: all of what it shows now is new.
2. A histogram knows its edges only, so shares and quantiles are bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Buckets = tuple[tuple[float, float], ...]  # (upper edge, cumulative count), last edge inf


def delta(now: float | None, before: float | None) -> tuple[float, bool]:
    """(increase of a counter, whether it was reset); an absent counter did not move."""
    if now is None:
        return 0.0, False
    if before is None:
        return 0.0, False
    return (now, True) if now < before else (now - before, False)


def delta_buckets(now: Buckets, before: Buckets) -> Buckets:
    """Increase per bucket, cumulative; after a reset all of `now`."""
    if not now or [e for e, _ in now] != [e for e, _ in before]:
        return now if before else ()
    if any(b < a for (_, b), (_, a) in zip(now, before, strict=True)):
        return now
    return tuple((edge, b - a) for (edge, b), (_, a) in zip(now, before, strict=True))


def add_buckets(parts: Sequence[Buckets]) -> Buckets:
    """Sum of histograms of one shape."""
    parts = [p for p in parts if p]
    if not parts:
        return ()
    edges = [e for e, _ in parts[-1]]
    total = [0.0] * len(edges)
    for part in parts:
        if [e for e, _ in part] == edges:
            total = [t + c for t, (_, c) in zip(total, part, strict=True)]
    return tuple(zip(edges, total, strict=True))


def quantile_bucket(buckets: Buckets, share: float) -> tuple[float, float] | None:
    """(lower edge, upper edge) of the bucket with the nearest rank; None when empty. The truth lies between them."""
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    low = 0.0
    for edge, count in buckets:
        if count >= share * total - 1e-9:
            return low, edge
        low = edge
    return low, math.inf


def share_within(buckets: Buckets, limit: float) -> tuple[float, float] | None:
    """Bounds of the share at or below `limit`: a histogram knows its edges only."""
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    low = max((count for edge, count in buckets if edge <= limit), default=0.0)
    high = next((count for edge, count in buckets if edge >= limit), total)
    return low / total, high / total


def lengths(buckets: Buckets, n: int, mean: float) -> list[int]:
    """`n` lengths that are spread as the histogram is, scaled to the mean that the counters tell; at least 1."""
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return [max(1, round(mean))] * n
    raw = []
    for i in range(n):
        rank, low, before = (i + 0.5) / n * total, 0.0, 0.0
        for edge, count in buckets:
            if count >= rank:
                top = edge if edge < math.inf else max(2 * low, 1.0)
                part = (rank - before) / (count - before) if count > before else 0.5
                raw.append(low + (top - low) * part)
                break
            low, before = edge, count
        else:
            raw.append(low)
    # evenly mixed, so that the trace is not sorted by length
    mixed = [raw[(i * 7919) % n] for i in range(n)] if n % 7919 else raw
    scale = mean * n / sum(mixed) if mean > 0 and sum(mixed) > 0 else 1.0
    return [max(1, round(x * scale)) for x in mixed]
