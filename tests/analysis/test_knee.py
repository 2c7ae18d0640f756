"""The knee on curves with a known crossing; the CSV path; gaps and rates of the stimulus."""
from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from analysis.analyse import analyse_run
from analysis.intervals import independent_states, inflation_ceiling, split, variance_inflation, wilson
from analysis.knee import (
    Level,
    add_note,
    below_met,
    capacity,
    crossing,
    first_crossing,
    flattening,
    rate_text,
    score_quantile,
    share_draws,
    share_interval,
)
from analysis.little import in_flight_at
from analysis.run_files import Gauge
from analysis.stimulus import ClientHealth, client_health, dispersion, drift_z, gap_test, stimulus
from bench.records.clauses import lag_limit_s
from benchmarks.evidence_knee import mm1, mm1_knee

INF = math.inf
ROOT = Path(__file__).parents[2]


def curve(qps: float) -> float:
    """log score of a service whose crossing is at 22 requests/s."""
    return 0.25 * (qps - 22)


def level(qps: float, *, noise: float = 0.02, stable: bool = True, seed: int = 0, score: float | None = None,
          attainment: float | None = None) -> Level:  # fmt: skip
    rng = np.random.default_rng(seed + int(qps * 10))
    shift = noise * rng.standard_normal()
    y = math.exp(curve(qps) + shift) if score is None else score
    batches = tuple(y * math.exp(noise * math.sqrt(5) * z) for z in rng.standard_normal(5))
    held = (1.0 if y <= 1 else 0.5) if attainment is None else attainment
    return Level(qps, held, 2000, y, batches, stable, min(qps, 27.0))


def test_score_quantile_is_attainment_the_other_way_round() -> None:
    scores = np.array([0.5] * 99 + [INF])
    assert score_quantile(scores, 0.99) == 0.5 and np.mean(scores <= 1) >= 0.99
    assert score_quantile(np.append(scores, INF), 0.99) == INF  # 99 of 101 = .9802


def test_crossing_between_the_right_rates() -> None:
    found = crossing([level(q, noise=0.001) for q in (5, 10, 15, 20, 25, 30)], 0.99)
    assert found.kind == "crossing" and found.last_met == 20
    assert found.value == pytest.approx(22, abs=0.1) and found.low < 22 < found.high


def test_interval_covers_the_crossing() -> None:
    """Nominal 95 %: of 60 sweeps at least 52 (binomial .95: fewer has probability .003)."""
    covered, near = 0, 0
    for seed in range(60):
        found = crossing([level(q, noise=0.08, seed=seed * 1000) for q in (10, 15, 20, 25, 30)], 0.99)
        covered += found.low <= 22 <= found.high
        near += abs(found.value / 22 - 1) < 0.03
    assert covered >= 52 and near >= 54


def test_never_and_always_met_are_bounds() -> None:
    high = crossing([level(q) for q in (25, 30)], 0.99)
    assert (high.kind, high.value, high.low, high.high) == ("below", None, None, 25)
    low = crossing([level(q) for q in (5, 10)], 0.99)
    assert (low.kind, low.value, low.low, low.high) == ("at_least", 10, 10, None)
    assert crossing([], 0.99).kind == "none"


def test_a_lucky_trial_above_a_failed_one_counts_for_nothing() -> None:
    lucky = [level(10), level(15), level(20, score=1.3, attainment=0.97), level(25, score=0.9, attainment=0.995)]
    found = crossing(lucky, 0.99)
    assert found.last_met == 15 and 15 < found.value < 20


@pytest.mark.parametrize(("finished", "value"), [(13.0, 15.0), (17.5, 17.5), (25.0, 20.0)])
def test_growth_above_a_rate_whose_answers_were_in_time(finished: float, value: float) -> None:
    """All answers in time at 20, but in-flight grew: the knee lies between 10 and 20, and no curve crosses there."""
    good = level(10.0, score=0.2)
    grown = replace(level(20.0, score=0.3, stable=False), completed_qps=finished)
    made = capacity([good, grown], 0.99)
    assert made.knee_kind == "crossing" and made.knee_qps == pytest.approx(value, rel=1e-5)
    assert (made.knee_low_qps, made.knee_high_qps, made.grows_qps) == (10.0, 20.0, 20.0)
    assert f"the service finished {finished:.1f} a second" in made.sentence
    # A tighter SLO that the grown stage missed is a crossing like any other, and says nothing of growth.
    missed = replace(grown, attainment=0.9, score=2.0)
    assert capacity([good, missed], 0.99).grows_qps is None


def test_unstable_never_holds() -> None:
    found = crossing([level(10), level(20), level(30, stable=False, score=0.8, attainment=1.0)], 0.99)
    assert found.last_met == 20 and found.value == 27 and found.high == 30 and "UNSTABLE" in found.method


def test_rejections_are_interpolated_on_the_share() -> None:
    # misses 0 at 20 and 5 % at 25, allowed 1 %: linear 20 + 5 * .01/.05 = 21; log from .5/2000 = .00025:
    # ln(40)/ln(200) = .6963 -> 23.48
    found = crossing([level(10), level(20), level(25, score=INF, attainment=0.95)], 0.99)
    assert found.low == pytest.approx(21.0) and found.high == pytest.approx(23.48, abs=0.01)


def overloaded(qps: float, score: float, share: float, *, stable: bool, most: float) -> Level:
    """A stage whose batches have nothing in common: its redrawn score may be anything."""
    batches = tuple(score * f for f in (0.1, 0.4, 1.0, 2.5, 10.0))
    return Level(qps, share, 230, score, batches, stable, 20.0, states=2.0, attainment_most=most)


@pytest.mark.parametrize(
    ("at_22", "at_25", "top"),
    [
        # UNSTABLE at 22
        ({"stable": False, "most": 1.0}, {"stable": False, "most": 1.0}, 22),
        # stable, but below the target under any dependence that its batches allow
        ({"stable": True, "most": 0.95}, {"stable": False, "most": 0.9}, 22),
        # 22 is not decided: the highest measured rate ends the interval
        ({"stable": True, "most": 0.995}, {"stable": True, "most": 0.9}, 25),
        ({"stable": True, "most": 0.995}, {"stable": False, "most": 1.0}, 25),
        # nothing is decided: the interval may end above every rate, and the sentence says so
        ({"stable": True, "most": 0.995}, {"stable": True, "most": 0.995}, None),
    ],
)
def test_the_interval_ends_at_the_lowest_rate_that_clearly_misses(at_22: dict, at_25: dict, top: float | None) -> None:
    levels = [level(q, noise=0.2) for q in (10, 15, 20)]
    levels += [overloaded(22, 1.5, 0.75, **at_22), overloaded(25, 2.2, 0.33, **at_25)]
    found = crossing(levels, 0.99)
    said = capacity(levels, 0.99).sentence
    if top is None:
        assert found.high > 25 and found.open_above and "above every measured rate" in said
        return
    assert found.low < found.value < 22 and found.high == top and not found.open_above
    assert f"between the stages at 20 and 22; 95 % interval {rate_text(found.low)} to {top:.1f})" in said


def test_a_clear_miss_below_the_knee_is_rare() -> None:
    """M/M/1 at its knee, windows of 60 s: nominal 2.5 %; the interval for independent arrivals errs in 21 %.

    200 windows: more than 12 of 2.5 % has probability .002, fewer than 25 of 21 % has .003.
    """
    from benchmarks.evidence_knee import mm1, mm1_knee

    knee, clear, independent = mm1_knee(25, 0.8, 0.99), 0, 0
    for seed in range(200):
        served = mm1(25, 0.8)(knee, 70, seed)
        hit = served.score[served.arrival_s >= 10] <= 1
        worth = len(hit) / inflation_ceiling(hit)
        clear += wilson(float(hit.mean()) * worth, worth)[1] < 0.99
        independent += wilson(int(hit.sum()), len(hit))[1] < 0.99
    assert clear <= 12 and independent >= 25


def test_inflation_ceiling_by_hand() -> None:
    halves = np.repeat([0.0, 1.0], 150)
    # 20 batches of 15, ten means 0 and ten 1: var = 20/4/19, times 15 over .25 = 15.79; chi-square(19) at 5 % is
    # 10.117: 29.65; lag-1 correlation (18 - 1)/4/5 = .85: times 1.85/.15 = 365.7, above n
    assert inflation_ceiling(halves) == 300
    # runs of 5: every batch of 15 has 5 or 10 ones, in turns: no positive correlation.
    # var = 20 (1/6)²/19, times 15 over .25 = 1.754, times 19/10.117 = 3.295
    assert inflation_ceiling(np.tile(np.repeat([0.0, 1.0], 5), 30)) == pytest.approx(3.295, abs=0.001)
    assert inflation_ceiling(np.ones(300)) == 1.0 and inflation_ceiling(np.ones(40)) == 40


@pytest.mark.parametrize(
    ("qps", "down"), [(19.98, "19.9"), (20.0, "20.0"), (0.7 * 20, "14.0"), (0.7 * 17, "11.9"), (0.58, "0.58"), (0.0999, "0.099")]
)
def test_a_capacity_is_rounded_down(qps: float, down: str) -> None:
    assert rate_text(qps) == down


def test_the_rate_that_missed_is_not_the_knee() -> None:
    """The score at 20 is 1.0000001: the crossing lies a hair below 20 and prints as 19.9."""
    levels = [level(10, noise=0.001), level(20, score=1.0000001, attainment=0.9899), level(30, noise=0.001)]
    found = capacity(levels, 0.99)
    assert found.knee_qps < 20 and "holds up to about 19.9 requests/s (crossing between the stages at 10 and 20;" in found.sentence


def test_first_crossing_by_hand() -> None:
    q, y = np.array([10.0, 20, 30]), np.array([-1.0, -0.5, 0.5])
    assert first_crossing(q, y, cubic=False) == 25
    assert 20 < first_crossing(q, y, cubic=True) < 30
    assert first_crossing(q, np.array([0.1, 1, 2]), cubic=False) == 10
    assert first_crossing(q, np.array([-3.0, -2, -1]), cubic=True) == 30


def test_capacity_sentence_watermark_and_flattening() -> None:
    levels = [level(q, noise=0.001) for q in (10, 20, 25)] + [level(30, stable=False), level(40, stable=False)]
    found = capacity(levels, 0.99, lambda_max_qps=27.2)
    assert found.watermark_low_qps == pytest.approx(0.7 * found.knee_low_qps)
    assert found.watermark_high_qps == pytest.approx(0.8 * found.knee_low_qps)
    assert found.lambda_max_qps == 27.2 and found.flattening_qps == 27.0 and "70-80 %" in found.sentence
    assert flattening([level(10)]) is None
    assert "flattens" not in capacity([level(q) for q in (10, 20, 25)], 0.99).sentence
    assert capacity([], 0.99).watermark_low_qps is None
    assert "below" in capacity([level(30)], 0.99).sentence


def test_the_point_where_throughput_flattens_is_said_with_its_rates() -> None:
    """Mean of what the UNSTABLE rates finished, rounded down; a run's own counts are the second path."""
    levels = [level(q, stable=q < 30) for q in (10, 20, 24, 30, 35)]
    levels[3:] = [replace(levels[3], completed_qps=26.4), replace(levels[4], completed_qps=27.1)]
    said = capacity(levels, 0.99).sentence
    assert "Throughput flattens at about 26.7 requests/s: so many were finished where more came (30, 35)." in said


def test_a_rate_whose_growth_is_said_is_not_said_twice() -> None:
    levels = [level(10), replace(level(30, stable=False, attainment=1.0, score=0.9), completed_qps=26.0)]
    said = capacity(levels, 0.99).sentence
    assert "kept growing" in said and "flattens" not in said


def test_the_demo_in_virtual_time(tmp_path: Path) -> None:
    """The sweep of the demo goes to 25 requests/s and overloads at 22: the interval must not end at twice 25."""
    from bench.__main__ import main

    with contextlib.suppress(SystemExit):
        main(["simulate", "--config", str(ROOT / "configs/demo.json"), "--run-dir", str(tmp_path / "r"), "--no-report"])
    found = analyse_run(tmp_path / "r", models=False)
    rates = {s.offered_qps: s for s in found.stages}
    over = [q for q, s in rates.items() if s.stationarity == "UNSTABLE"]
    c = found.capacity
    assert over and c.knee_kind == "crossing" and c.last_met_qps < c.knee_qps < min(over)
    missed = min(q for q, s in rates.items() if s.verdict == "NOT_MET")
    assert c.knee_low_qps < c.knee_qps < missed and c.knee_high_qps <= min(over) < max(rates)
    printed = float(c.sentence.split("about ")[1].split(" ")[0])
    assert printed <= c.knee_qps < missed


# ---------------------------------------------------------------- the stimulus


def gaps(process: str, rate: float, n: int, seed: int, shape: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.gamma(shape, 1 / (rate * shape), n) if process == "gamma" else rng.exponential(1 / rate, n)


@pytest.mark.parametrize(("process", "shape"), [("poisson", 1.0), ("gamma", 0.5), ("gamma", 4.0)])
def test_gap_test_has_its_nominal_size_and_sees_another_process(process: str, shape: float) -> None:
    p = [gap_test(gaps(process, 20, 400, s, shape), process, 20, shape)[1] for s in range(200)]
    # uniform p: 10 % below .1; 200 draws: 20 +- 4 * 4.24
    assert 4 <= sum(x < 0.1 for x in p) <= 37
    other = gaps("gamma", 20, 1500, 1, 4.0 if shape != 4.0 else 1.0)
    distance, p_other = gap_test(other, process, 20, shape)
    assert p_other < 1e-4 and distance > 0.05


def test_gap_test_sees_a_wrong_rate_and_needs_gaps() -> None:
    assert gap_test(gaps("poisson", 25, 1500, 1), "poisson", 20, 1.0)[1] < 1e-4
    assert gap_test(np.ones(5), "poisson", 20, 1.0) is None
    assert gap_test(np.ones(500), "trace", 20, 1.0) is None


def test_dispersion_of_poisson_and_of_a_clock() -> None:
    times = np.cumsum(gaps("poisson", 30, 3000, 4))
    index, p = dispersion(times, 0, 100)
    assert index == pytest.approx(1, abs=0.45) and p > 1e-4  # sd of the index: sqrt(2/99) = .14
    index, p = dispersion(np.arange(0.01, 100, 1 / 30), 0, 100)
    assert index < 0.1 and p < 1e-6
    assert dispersion(times, 0, 5) == (None, None)


def test_drift_by_hand() -> None:
    # 60 arrivals before the middle, 40 after: (100 - 120)/10 = -2
    assert drift_z(np.concatenate([np.full(60, 1.0), np.full(40, 9.0)]), 0, 10) == -2


def check(intended: np.ndarray, sent: np.ndarray, **over: object):
    base = dict(intended_s=intended, sent_s=sent, t0=0.0, t1=50.0, process="poisson", offered_qps=20.0, burstiness=1.0,
                varying_rate=False, health=ClientHealth(0.001, 0.3, 1.0), ttft_deadline_s=0.8, stage=0,
                sent_in_window=int(np.count_nonzero((sent >= 0) & (sent < 50))))  # fmt: skip
    return stimulus(**{**base, **over})  # type: ignore[arg-type]


def test_a_clean_stimulus() -> None:
    times = np.cumsum(gaps("poisson", 20, 1100, 3))
    times = times[times < 50]
    found, reasons = check(times, times + 0.0003)
    assert found.ok and not [r for r in reasons if r.severity == "invalid"]
    assert found.gap_cv == pytest.approx(1, abs=0.1) and found.send_lag_p99_s == pytest.approx(0.0003)
    assert found.planned == len(times) and abs(found.rate_error_ratio) < 0.005


def test_constant_gaps() -> None:
    times = np.arange(0.01, 50, 0.05)
    assert check(times, times + 0.0002, process="constant")[0].ok
    late = times + np.random.default_rng(1).exponential(0.012, len(times))
    assert "INV-GAPS" in {r.reason_id for r in check(times, late, process="constant")[1]}


def test_a_sender_that_lost_its_rate() -> None:
    times = np.cumsum(gaps("poisson", 20, 1100, 3))
    times = times[times < 50]
    sent = times.copy()
    sent[::20] = np.nan  # 5 %
    found, reasons = check(times, sent)
    assert (
        not found.ok
        and "INV-RATE" in {r.reason_id for r in reasons}
        and found.rate_error_ratio == pytest.approx(-0.05, abs=0.01)
    )


def test_limits_of_lag_and_health() -> None:
    assert lag_limit_s(0.8) == pytest.approx(0.04) and lag_limit_s(0.01) == 0.005
    gauge = Gauge(*(np.array(x, dtype=float) for x in
                    ([1, 2, 1, 2], [0, 0, 1, 1], [0, 0, 0, 0], [0.001, 0.002, 0.05, 0.001], [0.2, 0.3, 0.9, 0.8], [1, 1, 1, 1])))  # fmt: skip
    health = client_health(gauge, 0, 10, 1.0)
    assert health.loop_lag_p99_s == 0.05 and health.cpu_max_ratio == 0.9
    assert client_health(None, 0, 10, None).cpu_max_ratio is None


# ------------------------------------------------------------------ clusters of misses


def thin(
    qps: float, misses: int, *, n: int = 6600, states: float = 50.0, inflation: float = 1.0, held: float = 0.8
) -> Level:
    """A rate whose parts lie around `held` of the deadline when it held, whatever it missed."""
    score = held if misses <= 0.01 * n else 3.0
    return Level(qps, 1 - misses / n, n, score, (score * 0.9, score, score * 1.1, score, score), True, qps,
                 states=states, attainment_most=1.0 if misses <= 0.01 * n else 0.9, inflation=inflation)  # fmt: skip


def test_independent_misses_are_a_gamma() -> None:
    """Without memory and inflation the share is Gamma(k + 1/2)/n, Jeffreys' posterior of a Poisson rate."""
    drawn = share_draws([thin(20, 30, n=2000, states=1e9)])[:, 0]
    for share in (0.025, 0.5, 0.975):
        assert np.quantile(drawn, share) == pytest.approx(stats.gamma.ppf(share, 30.5) / 2000, rel=0.05)


def test_a_stage_without_a_miss_may_have_missed_a_cluster() -> None:
    """6,600 arrivals of 50 states: clusters of 6600/(2*50) = 66, so P(share > 1 %) = P(Gamma(1/2) > 1) = erfc(1)."""
    drawn = share_draws([thin(20, 0)])[:, 0]
    assert np.mean(drawn > 0.01) == pytest.approx(math.erfc(1.0), abs=0.03)  # .157; sd of 2,000 draws .008
    sure = share_draws([thin(20, 0, states=6600 / 2)])[:, 0]  # clusters of one: 6,600 independent arrivals
    assert np.mean(sure > 0.01) == 0.0


def test_clusters_widen_what_misses_say() -> None:
    """40 misses with inflation 20 are 4 clusters of 10: far wider than 40 single ones."""
    single, clustered = (share_draws([thin(20, 40, states=1e9, inflation=i)])[:, 0] for i in (1.0, 20.0))
    spread = [np.log(np.quantile(d, 0.975) / np.quantile(d, 0.025)) for d in (single, clustered)]
    assert spread[1] > 2.5 * spread[0]


def test_the_lower_end_allows_for_the_clusters_a_stage_did_not_hold() -> None:
    """25 held without a miss in 50 states; the next rate is overloaded: the knee may lie below 25, not below 20."""
    rates = [thin(15, 0), thin(20, 0), thin(25, 0), thin(30, 3000)]
    found = crossing(rates, 0.99)
    assert 20 <= found.low < 24 and found.value > 25 and "clusters" in found.method
    known = [replace(x, states=3300.0) for x in rates]
    assert crossing(known, 0.99).low >= 25
    assert crossing([replace(x, inflation=None) for x in rates], 0.99).low >= 25  # nothing known: as before


def test_a_short_stage_at_a_low_rate_borrows_from_the_one_above() -> None:
    """10 requests/s held 95 arrivals of 7 states, 15 held 657 of 38: what a higher rate shows bounds a lower one.

    At 15 the 97.5 % point of the share is 2.51 (Gamma(1/2)) clusters of 657/76 = 8.6: 3.3 %, log odds 1.21 above
    those of 1 %; at 10 they lie 5 ln 1.5 = 2.03 lower, or more. The line between crosses at 15 - 5 * 1.21/2.03 = 12.0,
    or above.
    """
    rates = [thin(10, 0, n=95, states=7), thin(15, 0, n=657, states=38), thin(20, 3000)]
    low, _ = share_interval(rates, 0.99) or (0, 0)
    assert 11.9 < low < 13
    one_missed = [replace(rates[0], attainment=1 - 1 / 95), *rates[1:]]  # misses of its own: nothing is borrowed
    assert (share_interval(one_missed, 0.99) or (0, 0))[0] < 11


def test_the_page_says_why_the_lower_end_lies_below_a_rate_that_is_met() -> None:
    rates = [thin(15, 0), thin(20, 0), thin(25, 0, n=657, states=38), thin(30, 3000)]
    made = capacity(rates, 0.99)
    assert made.knee_low_qps is not None and made.knee_low_qps < 25
    why = below_met(made, rates[:3])
    assert why["params"] == {"rate_qps": 25, "arrivals": 657, "states": 38}
    add_note(made, why)
    assert "The lower end lies below 25 requests/s, where the SLO held without a miss" in made.sentence
    assert below_met(made, rates[:2])["code"] == "" and below_met(made, [])["code"] == ""  # 25 is not decided
    assert below_met(made, [thin(25, 3)])["code"] == "capacity.below_met"
    assert below_met(made, [thin(40, 0)])["code"] == ""  # above a rate that failed


def test_a_short_sweep_that_held_claims_less_than_its_highest_rate() -> None:
    short = crossing([thin(10, 0, n=150, states=25), thin(20, 0, n=300, states=25)], 0.99)
    assert short.kind == "at_least" and short.last_met == 20 and short.low is not None and 7 < short.low < 20
    said = capacity([thin(10, 0, n=150, states=25), thin(20, 0, n=300, states=25)], 0.99)
    assert said.code == "capacity.at_least.thin" and "too briefly to prove it" in said.sentence
    sure = capacity([thin(10, 0, n=30000, states=5000), thin(20, 0, n=60000, states=5000)], 0.99)
    assert sure.code == "capacity.at_least" and sure.knee_low_qps == 20
    one = crossing([thin(20, 0, n=300, states=25)], 0.99)
    assert one.low is not None and 8 < one.low < 20  # 20 exp(-log odds/10): a bound, and not nought


def test_a_coarse_sweep_of_a_queue_covers_its_knee() -> None:
    """M/M/1, mu 25, wait 0.8 s at most for 99 %: knee 19.55 in closed form; step 5, 270 s. Nominal 95 %: of 60
    sweeps at least 52 (binomial .95: fewer has probability .003)."""
    truth, service = mm1_knee(25, 0.8, 0.99), mm1(25, 0.8)
    covered = 0
    for sweep in range(60):
        levels = []
        for qps in (10.0, 15.0, 20.0, 25.0):
            served = service(qps, 300.0, 7000 * sweep + int(qps))
            window = served.arrival_s >= 30
            score = served.score[window]
            worth = len(score) / inflation_ceiling(score <= 1)
            t = np.linspace(30, 300, 600, endpoint=False)
            levels.append(Level(
                qps, float(np.mean(score <= 1)), len(score), score_quantile(score, 0.99),
                tuple(score_quantile(p, 0.99) for p in split(score, 5)), True, qps,
                states=independent_states(in_flight_at(t, served.arrival_s, served.done_s)),
                attainment_most=wilson(float(np.mean(score <= 1)) * worth, worth)[1],
                inflation=variance_inflation(score <= 1),
            ))  # fmt: skip
        found = crossing(levels, 0.99)
        covered += found.low <= truth <= (found.high or INF)
    assert covered >= 52
