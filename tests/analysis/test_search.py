"""The adaptive search walks to a known crossing, within its budget, and says why it stops."""
from __future__ import annotations

import math

import numpy as np
import pytest

from analysis.knee import Level, crossing
from analysis.search import Limits, Spent, Step, next_step

LIMITS = Limits(start_qps=10, lowest_qps=1, highest_qps=200, max_levels=16, max_time_s=4000)


def measure(qps: float, knee: float, rng: np.random.Generator, noise: float) -> list[float]:
    """Five batch scores of a service whose log score is .3 (qps - knee)."""
    return [math.exp(0.3 * (qps - knee) + noise * z) for z in rng.standard_normal(5)]


def pooled(samples: dict[float, list[float]]) -> list[Level]:
    levels = []
    for qps, scores in samples.items():
        score = math.exp(float(np.mean(np.log(scores))))
        levels.append(Level(qps, 1.0 if score <= 1 else 0.5, 1000, score, tuple(scores), True, qps))
    return levels


def walk(knee: float, limits: Limits = LIMITS, noise: float = 0.1, seed: int = 0, level_s: float = 100.0):
    rng = np.random.default_rng(seed)
    samples: dict[float, list[float]] = {}
    steps: list[Step] = []
    spent_s, held = 0.0, False
    while True:
        step = next_step(pooled(samples), 0.99, limits, Spent(len(steps), spent_s, lambda _: level_s), held=held)
        steps.append(step)
        if step.kind == "stop":
            return steps, crossing(pooled(samples), 0.99), spent_s
        spent_s += level_s
        if step.kind == "hold":
            held = True
        else:
            samples.setdefault(step.qps, []).extend(measure(step.qps, knee, rng, noise))


@pytest.mark.parametrize("knee", [2.5, 9.0, 10.0, 23.0, 110.0])
def test_finds_the_knee_from_either_side_and_holds_the_watermark(knee: float) -> None:
    steps, found, _ = walk(knee)
    assert found.value == pytest.approx(knee, abs=max(0.03 * knee, 0.6))
    assert [s.kind for s in steps[-2:]] == ["hold", "stop"]
    assert steps[-2].qps == pytest.approx(0.75 * found.low, abs=0.01)
    assert len(steps) - 1 <= LIMITS.max_levels and all(s.reason for s in steps)


def test_interval_covers_the_knee_over_the_whole_search() -> None:
    """Nominal 95 % after adaptive stopping: of 100 searches at least 88 (binomial .95: fewer has p = .003)."""
    covered = sum(f.low <= 23 <= f.high for _, f, _ in (walk(23.0, seed=s) for s in range(100)))
    assert covered >= 88


@pytest.mark.parametrize(("levels", "time_s"), [(3, 1e9), (6, 1e9), (100, 350.0), (1, 1e9), (100, 50.0)])
def test_never_more_than_the_budget(levels: int, time_s: float) -> None:
    limits = Limits(10, 1, 200, levels, time_s, width_ratio=0.001)
    steps, _, spent = walk(23.0, limits)
    assert spent <= time_s and sum(s.kind != "stop" for s in steps) <= levels
    assert "budget" in steps[-1].reason or steps[-1].reason == "the watermark was held"


def test_bounds_instead_of_numbers_at_the_ends() -> None:
    steps, found, _ = walk(1000.0, Limits(10, 1, 40, 20, 1e9))
    assert found.kind == "at_least" and [s.qps for s in steps[:3]] == [10, 20, 40]
    steps, found, _ = walk(-50.0, Limits(10, 4, 40, 20, 1e9))
    assert found.kind == "below" and [s.qps for s in steps[:3]] == [10, 5, 4] and "missed" in steps[-1].reason


def test_a_narrow_bracket_is_repeated_not_divided() -> None:
    noisy = {22.9: measure(22.9, 23, np.random.default_rng(1), 0.001),
             23.4: measure(23.4, 23, np.random.default_rng(2), 1.0)}  # fmt: skip
    noisy[23.4] = [s * 3 for s in noisy[23.4]]
    step = next_step(pooled(noisy), 0.99, LIMITS, Spent(2, 0, lambda _: 1.0))
    assert step.kind == "measure" and step.qps == 23.4 and "repeat" in step.reason
