"""Where to measure next: the adaptive search for the knee, as a function of what was measured.

Input: the levels measured so far, the limits. Output: `Step`: measure a rate, hold the
watermark, or stop, with the reason in words.
Does not: send load, wait, or keep state; the shape that walks the search does.

1. Bracket from both sides: double while every rate holds, halve while none does.
2. Then measure where the crossing is expected, inside the middle of the bracket, so that
   neither end is only creeping up.
3. Once the bracket is narrow, repeat the end that is known worse: a repeat adds batches,
   another rate would not.
4. Stop when the interval of the crossing is narrow enough, or when the next level would
   not fit the budget; never later.
5. The last level is a hold at the watermark, which proves it.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from analysis.knee import WATERMARK, Crossing, Level, crossing

INNER = 0.2  # a new rate stays this share of the bracket away from both of its ends
GROWTH = 2.0
NARROW_RATIO = 0.06  # a bracket narrower than this, relative to the crossing, is not divided further
HOLD_SHARE = sum(WATERMARK) / 2


@dataclass(frozen=True)
class Limits:
    """What the search may spend, and when it is content."""

    start_qps: float
    lowest_qps: float
    highest_qps: float
    max_levels: int
    max_time_s: float
    width_ratio: float = 0.10  # (high - low)/crossing at which to stop


@dataclass(frozen=True)
class Step:
    """What to do next. `kind`: "measure" | "hold" | "stop"."""

    kind: str
    qps: float | None
    reason: str


@dataclass(frozen=True)
class Spent:
    """Levels measured and seconds used so far; `level_s(qps)`: expected seconds of one more, drain included."""

    levels: int
    time_s: float
    level_s: Callable[[float], float]


def next_step(levels: list[Level], target: float, limits: Limits, spent: Spent, *, held: bool = False) -> Step:
    """The next step of the search. `levels`: one per rate, repeats pooled; `held`: the watermark was held."""
    found = crossing(levels, target)
    if held:
        return Step("stop", None, "the watermark was held")
    wish = _wish(levels, found, limits)
    if wish.kind == "stop":
        return _hold(found, limits, spent, wish.reason)
    assert wish.qps is not None
    # Keep room for the hold, which is what the search is for.
    hold_s = spent.level_s(wish.qps * HOLD_SHARE)
    if spent.levels + 2 > limits.max_levels or spent.time_s + spent.level_s(wish.qps) + hold_s > limits.max_time_s:
        return _hold(found, limits, spent, "the budget is used up")
    return wish


def _wish(levels: list[Level], found: Crossing, limits: Limits) -> Step:
    """The next step if there were no budget."""
    if found.kind == "none":
        return Step("measure", limits.start_qps, "the first rate")
    ordered = sorted(levels, key=lambda x: x.qps)
    if found.kind == "at_least":
        top = ordered[-1].qps
        if top >= limits.highest_qps:
            return Step("stop", None, f"every rate up to the highest allowed, {top:g} requests/s, held the target")
        return Step("measure", min(top * GROWTH, limits.highest_qps), "every rate held so far: go up")
    if found.kind == "below":
        bottom = ordered[0].qps
        if bottom <= limits.lowest_qps:
            return Step("stop", None, f"even the lowest allowed rate, {bottom:g} requests/s, missed the target")
        return Step("measure", max(bottom / GROWTH, limits.lowest_qps), "no rate held so far: go down")
    return _refine(ordered, found, limits)


def _refine(ordered: list[Level], found: Crossing, limits: Limits) -> Step:
    assert found.value is not None and found.last_met is not None
    good = found.last_met
    bad = next(x.qps for x in ordered if x.qps > good)
    width = (
        (found.high if found.high is not None else bad) - (found.low if found.low is not None else good)
    ) / found.value
    if width <= limits.width_ratio:
        return Step(
            "stop", None, f"the interval of the crossing is {width:.1%} wide, {limits.width_ratio:.1%} were asked for"
        )
    if (bad - good) / found.value > NARROW_RATIO:
        inner = INNER * (bad - good)
        rate = min(max(found.value, good + inner), bad - inner)
        return Step("measure", round(rate, 2), f"the crossing lies between {good:g} and {bad:g} requests/s")
    ends = [x for x in ordered if x.qps in (good, bad)]
    worse = max(ends, key=_uncertainty)
    return Step("measure", worse.qps, "the bracket is narrow: repeat the end that is known worse")


def _uncertainty(level: Level) -> float:
    """Relative standard error of a level's score, larger for fewer batches."""
    scores = np.array([s for s in level.batch_scores if np.isfinite(s) and s > 0])
    if len(scores) < 2:
        return float("inf")
    return float(np.log(scores).std(ddof=1)) / float(np.sqrt(len(scores)))


def _hold(found: Crossing, limits: Limits, spent: Spent, why: str) -> Step:
    """Hold the watermark when there is one and the budget allows, otherwise stop."""
    if found.low is None or found.low <= 0:
        return Step("stop", None, why)
    qps = round(HOLD_SHARE * found.low, 2)
    if spent.levels + 1 > limits.max_levels or spent.time_s + spent.level_s(qps) > limits.max_time_s:
        return Step("stop", None, why + "; no budget is left to hold the watermark")
    return Step("hold", qps, why + "; hold the watermark")
