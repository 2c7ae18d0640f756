"""The adaptive search walks to a known knee, within its budget, and says why it stops."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from analysis.search import (
    WIDER,
    Bracket,
    Curve,
    Limits,
    Probe,
    Spent,
    bracket,
    decide,
    dispersion,
    estimate,
    fieller,
    next_step,
)
from benchmarks.evidence_knee import Searched, mm1, mm1_knee, search

LIMITS = Limits(start_qps=20, lowest_qps=0.5, highest_qps=500, stage_s=120, max_time_s=7200, hold_s=60, overhead_s=60)


UNEVEN = (1.0, 0.75, 0.9, 0.6, 0.8)  # sd of the logarithms .194
EVEN = (1.0, 0.98, 0.99, 0.97, 0.99)  # sd .0116


def stage(
    qps: float, misses: int, arrivals: int = 2000, *, score: float = 0.9, spread: bool = True,
    shape: tuple[float, ...] = UNEVEN, **more: object,
) -> Probe:  # fmt: skip
    """A stage of ten parts; its misses spread evenly, or all in one part. `shape`: its five scores over the largest."""
    parts = [misses // 10 + (i < misses % 10) for i in range(10)] if spread else [misses] + [0] * 9
    fields = {"stable": True, **more}
    return Probe(qps, 100.0, (arrivals // 10,) * 10, tuple(parts), score, tuple(score * x for x in shape), **fields)  # type: ignore[arg-type]


def test_the_knee_of_the_queue_is_where_the_closed_form_says() -> None:
    """M/M/1, mu = 25, d = .8 s: P(W > d) = rho exp(-(mu - lambda) d); 200,000 s of it agree within 5 %."""
    knee = mm1_knee(25, 0.8, 0.99)
    assert knee / 25 * math.exp(-(25 - knee) * 0.8) == pytest.approx(0.01, rel=1e-9)
    served = mm1(25, 0.8)(knee, 200_000, 7)
    assert float(np.mean(served.score > 1)) == pytest.approx(0.01, rel=0.05)


@pytest.fixture(scope="module")
def walks() -> list[Searched]:
    """Thirty whole searches of a queue whose stages depend on their past, from a third to three times the knee."""
    starts = np.exp(np.random.default_rng(3).uniform(-1.1, 1.1, 30)) * mm1_knee(25, 0.8, 0.95)
    return [search(mm1(25, 0.8), replace(LIMITS, start_qps=s), 0.95, i + 1) for i, s in enumerate(starts)]


def test_the_interval_covers_the_knee_over_the_whole_search(walks: list[Searched]) -> None:
    """At a coverage of .93 (docs/evidence/knee_search.md), 24 or fewer of 30 have p = .02."""
    knee = mm1_knee(25, 0.8, 0.95)
    found = [w.found for w in walks]
    assert all(f.kind == "crossing" and f.low < f.value < f.high for f in found)
    assert sum(f.low <= knee <= f.high for f in found) >= 25
    assert np.mean([abs(f.value / knee - 1) for f in found]) < 0.03
    assert np.median([(f.high - f.low) / f.value for f in found]) <= 0.1 * WIDER  # the search stops by the width before it


def test_it_ends_with_a_hold_at_the_watermark(walks: list[Searched]) -> None:
    for w in walks:
        assert [s.kind for s in w.steps[-2:]] == ["hold", "stop"] and w.probes[-1].hold
        assert w.steps[-2].qps == pytest.approx(0.75 * w.found.low, rel=0.02)  # the hold itself moves the fit a little
        assert all(s.reason for s in w.steps)


@pytest.mark.parametrize("budget", [{"max_time_s": 1000.0}, {"max_requests": 9000}, {"max_time_s": 100.0}, {"max_requests": 10}])
def test_never_more_than_the_budget(budget: dict[str, float]) -> None:
    for seed in range(20):
        w = search(mm1(25, 0.8), replace(LIMITS, width_ratio=0.001, **budget), 0.99, seed)  # type: ignore[arg-type]
        assert w.time_s <= budget.get("max_time_s", math.inf) and w.requests <= budget.get("max_requests", math.inf)
        assert any("budget" in s.reason for s in w.steps)


def test_an_open_rate_moves_no_bound_and_is_measured_longer() -> None:
    # 20 of 2000 missed at a target of .99: the interval holds the target, whatever the dispersion
    probes = [stage(20, 20)]
    assert bracket(probes, 0.99).open == (20,) and bracket(probes, 0.99).low is bracket(probes, 0.99).high is None
    first = next_step(probes, 0.99, LIMITS, Spent())
    second = next_step(probes * 2, 0.99, LIMITS, Spent())
    third = next_step(probes * 3, 0.99, LIMITS, Spent())
    assert (first.qps, first.duration_s, second.qps, second.duration_s) == (20, 240, 20, 480)
    assert (third.qps, third.duration_s) == (25, 120)  # near the knee: a quarter above, not double


def test_a_rate_at_the_knee_is_not_divided_at_for_ever() -> None:
    """15.35 * (38/15.35)^.2 = 18.4 divides the bracket; open after three stages, it gives way to sqrt(18.4 * 38),

    and that, open too, to sqrt(18.4 * 15.35); then the search refines.
    """
    ends = [stage(15.35, 20, 20_000, score=0.6), stage(38, 2000, score=40.0, stable=False)]
    assert bracket([*ends, *[stage(18.4, 20)] * 3], 0.99) == Bracket(15.35, 38, (18.4,))
    rates = [next_step([*ends, *[stage(18.4, 20)] * n], 0.99, replace(LIMITS, width_ratio=0.001), Spent()).qps for n in (0, 2, 3)]
    assert rates == [18.4, 18.4, 26.44]
    more = [*ends, *[stage(18.4, 20)] * 3, *[stage(26.44, 20)] * 3]
    steps = [next_step([*more, *[stage(16.81, 20)] * n], 0.99, replace(LIMITS, width_ratio=1e-4), Spent()) for n in (0, 3)]
    assert steps[0].qps == 16.81 and "narrow it" in steps[1].reason


@pytest.mark.parametrize(("probe", "said"), [
    (stage(10, 0, score=0.3), "under"),  # every part far inside its deadline
    (stage(10, 0, score=0.6), "under"),  # the limit of that
    (stage(10, 0, score=0.7), "open"),  # not far enough: at a knee a stage may look like that
    (stage(10, 0, score=0.7, shape=EVEN), "under"),  # not far inside, and steady: -ln .7 = .357 is 30 sd
    (stage(10, 0, score=0.96, shape=EVEN), "under"),  # -ln .96 = .041 is 3.5 sd
    (stage(10, 0, score=0.97, shape=EVEN), "open"),  # .030 is 2.6 sd
    (stage(10, 1, score=0.7, shape=EVEN), "open"),  # a miss is no steady score
    (stage(10, 0, score=0.7, shape=EVEN, states=10.0), "open"),  # too short to know how steady it is
    (stage(10, 0, arrivals=2000), "open"),  # no miss, but close: 2000/10 = 200 effective, Wilson 99 % low = .968
    (stage(10, 0, arrivals=10_000), "under"),  # 1000 effective: 1/(1 + 6.63/1000) = .9934
    (stage(10, 1500), "over"),
    (stage(10, 1500, states=1.0), "over"),  # whatever the memory: most arrivals missed
    (stage(10, 200, states=1.0), "open"),  # 10 % missed, three clusters at most: (.9 + 1.105 + 1.19)/3.21 = .996
    (stage(10, 0, score=0.3, states=10.0), "open"),  # too few states to have seen the long waits
    (stage(10, 40), "open"),  # 2 %: 200 effective, 4 misses: (.98 + .0166 + .0304)/1.0332 = .994
    (stage(10, 60), "over"),  # 3 %: (.97 + .0166 + .0352)/1.0332 = .989
    (stage(10, 60, spread=False), "open"),  # in one cluster
    (stage(10, 0, score=0.3, stable=False), "over"),  # it grows: given time, it will miss
    (stage(10, 0, arrivals=40, score=0.2), "open"),  # 40 arrivals decide nothing
])  # fmt: skip
def test_what_one_stage_decides(probe: Probe, said: str) -> None:
    assert decide([probe], 0.99) == said


def test_dispersion_counts_clusters() -> None:
    # ten parts of 100, 10 misses each: no more spread than chance gives, so 1
    assert dispersion([((100,) * 10, (10,) * 10)]) == 1.0
    # all 100 misses in one part: p = .1, z = (100 - 10)/3 = 30 once and -10/3 nine times: (900 + 100)/9 = 111
    assert dispersion([((100,) * 10, (100,) + (0,) * 9)]) == pytest.approx(1000 / 9)


def test_fieller_without_slope_error_is_the_plain_interval() -> None:
    # a = 0 at c: x = 0 +- t sd(a)/b = 2.228 * .1/10 (10 degrees of freedom)
    c = math.log(0.01 / 0.99)
    low, value, high = fieller(Curve(20.0, c, 10.0, np.diag([0.01, 0.0]), 10, 5, 1), 0.99)  # type: ignore[misc]
    assert value == pytest.approx(20) and high == pytest.approx(20 * math.exp(0.02228), rel=1e-4)
    assert low == pytest.approx(20 * math.exp(-0.02228), rel=1e-4)
    assert fieller(Curve(20.0, c, 1.0, np.diag([0.01, 1.0]), 10, 5, 1), 0.99) is None  # slope 1 +- 2.2


def test_bounds_instead_of_numbers_at_the_ends() -> None:
    slow = search(mm1(1000, 0.8), replace(LIMITS, highest_qps=80), 0.99, 1)
    assert slow.found.kind == "at_least" and slow.found.low == 80 and [s.qps for s in slow.steps[:3]] == [20, 40, 80]
    never = search(mm1(1, 0.8), replace(LIMITS, lowest_qps=4), 0.99, 1)
    assert never.found.kind == "below" and never.found.high == 4 and [s.qps for s in never.steps[:4]] == [20, 10, 5, 4]
    assert estimate([], 0.99).kind == "none" and estimate([stage(5, 20)], 0.99).kind == "none"


def test_a_jump_is_answered_with_its_bracket() -> None:
    """All is well up to 23.4, and a third is refused above: no curve, so bounds decided twice each."""

    def serve(qps: float, duration_s: float, seed: int):
        from benchmarks.evidence_knee import Served, poisson

        rng = np.random.default_rng(seed)
        arrival = poisson(qps, duration_s, rng)
        refused = rng.random(len(arrival)) < (0.33 if qps > 23.4 else 0.0)
        return Served(arrival, arrival + 0.1, np.where(refused, np.inf, 0.1))

    w = search(serve, LIMITS, 0.99, 1)
    assert w.found.low <= 23.4 <= w.found.high and w.found.high - w.found.low <= 0.1 * w.found.value
    assert "decided" in w.found.method


def test_three_invalid_stages_in_a_row_end_the_search() -> None:
    bad = replace(stage(20, 0), valid=False, reason="late sender")
    again = next_step([stage(20, 0, score=0.5), bad], 0.99, LIMITS, Spent())
    assert (again.kind, again.qps) == ("measure", 20) and "late sender" in again.reason
    end = next_step([bad, bad, bad], 0.99, LIMITS, Spent())
    assert end.kind == "stop" and "INVALID" in end.reason


@pytest.mark.evidence
@pytest.mark.timeout(3600)  # 920 searches; `make evidence` gives as much
def test_coverage_of_the_full_study() -> None:
    """At least 90 % of whole searches cover the knee, for every service of benchmarks/evidence_knee.py.

    Measured: .935 to .980 (docs/evidence/knee_search.md). The seeds are fixed: it fails when the code does. On other
    seeds, at a true coverage of .95 fewer than 144 of 160 have probability .004, fewer than 180 of 200 .001.
    """
    from benchmarks.evidence_knee import studies

    for row in studies(quick=False):
        assert row["covered"] >= 0.90 and row["found"] == 1, row
