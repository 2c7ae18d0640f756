"""Repeats of one load: the two limits from both sides, by hand, in a run folder, and on the engine in virtual time."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from analysis.analyse import analyse_run
from analysis.percentiles import Percentiles
from analysis.repeatability import repeatability, sd_interval
from bench.records.analysis import Repeatability
from benchmarks.evidence_repeats import REPEATS, as_stage, config_of, three
from benchmarks.evidence_service import CAPACITY
from tests.analysis.synthetic import Service, StageSpec, write_run

QUICK = Service(mu=4.4)


def judged(values: list[float], *, same: bool) -> Repeatability:
    """What is said of E2E P95s (s) of one rate."""
    from bench.workload.plan import build_plan
    from engine.settings import EngineConfig
    from engine.simulate import simulate_stage

    config = config_of(same, 0.0, 2.0)
    plan = build_plan(config, "repeat", qps=[5.0], duration_s=2.0, repeats=len(values), seed=1)
    stages = [as_stage(simulate_stage(plan, s, config, EngineConfig.from_config(config))) for s in plan.stages]
    for stage, value in zip(stages, values, strict=True):
        stage.latency = {m: Percentiles(n=1000, p95=value) for m in ("e2e_s", "ttft_s")}
    found = repeatability(stages, {i: 7 if same else i for i in range(len(values))})
    assert [r.statistic for r in found] == ["e2e_p95_s", "ttft_p95_s"] and found[0].values == values
    return found[0]


@pytest.mark.parametrize(
    ("values", "same", "ratio", "ok"),
    [
        ([1.000, 1.010, 1.029], True, 0.029 / 1.013, True),  # 2.86 %
        ([1.000, 1.020, 1.035], True, 0.035 / (3.055 / 3), False),  # 3.44 %
        ([1.000, 1.020, 1.035], False, 0.035 / (3.055 / 3), True),  # fine for other seeds
        ([1.000, 1.100, 1.160], False, 0.160 / (3.26 / 3), True),  # 14.7 %
        ([1.000, 1.100, 1.170], False, 0.170 / 1.09, False),  # 15.6 %
        ([1.000, 1.100, 1.160], True, 0.160 / (3.26 / 3), False),
        ([0.0101, 0.0105, 0.0110], True, 0.0009 / (0.0316 / 3), True),  # 8.5 %, but under a millisecond
        ([0.0100, 0.0105, 0.0111], True, 0.0011 / (0.0316 / 3), False),  # over it
    ],
)
def test_both_limits_from_both_sides(values: list[float], same: bool, ratio: float, ok: bool) -> None:
    found = judged(values, same=same)
    assert found.same_seed is same and found.limit_ratio == (0.03 if same else 0.15)
    assert found.range_ratio == pytest.approx(ratio, rel=1e-9) and found.ok is ok


def test_the_note_says_whether_fifteen_percent_was_attainable() -> None:
    # 1, 1.1, 1.16: sd = sqrt(((-.08667)^2 + .01333^2 + .07333^2)/2) = .0808, CV 7.4 % > 4.5 %
    assert "15 % was not attainable" in judged([1.0, 1.1, 1.16], same=False).note
    assert "15 % was attainable" in judged([1.0, 1.03, 1.05], same=False).note
    assert "same seed" in judged([1.0, 1.1, 1.16], same=True).note
    # chi-square with 2 degrees of freedom: 7.378 and .0506: x .5207 and x 6.285
    assert sd_interval(1.0, 3) == pytest.approx((0.5207, 6.285), rel=1e-3)


def test_a_service_that_was_slower_in_one_repeat_fails_the_same_seed(tmp_path: Path) -> None:
    """The same three loads; the third service takes 6 % longer for every answer, and its P95 with it."""

    def folder(slower: float) -> Path:
        path = write_run(tmp_path / f"{slower}", [StageSpec(20, 40, 5, seed=9, repeat=i) for i in range(3)], QUICK)
        table = path / "requests.csv"
        rows = list(csv.DictReader(table.open(newline="")))
        for row in rows:
            if row["stage"] == "2":
                sent = float(row["sent_s"])
                for key in ("first_token_s", "last_token_s", "done_s"):
                    row[key] = repr(sent + (float(row[key]) - sent) * slower)
                begun, first, last = (float(row[k]) for k in ("intended_s", "first_token_s", "last_token_s"))
                row["ttft_s"] = row["ttfo_s"] = repr(first - begun)
                row["e2e_s"], row["residence_s"] = repr(last - begun), repr(float(row["done_s"]) - sent)
                if row["tpot_s"]:
                    row["tpot_s"] = repr(float(row["tpot_s"]) * slower)
        with table.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        return path

    for slower, ok in ((1.0, True), (1.02, True), (1.06, False)):
        by = {r.statistic: r for r in analyse_run(folder(slower), models=False).repeatability}
        one = by["e2e_p95_s"]
        assert one.same_seed and one.ok is ok, (slower, one)
        # of three values 1, 1, s: (s - 1)/((2 + s)/3)
        assert one.range_ratio == pytest.approx((slower - 1) / ((2 + slower) / 3), abs=0.002)


def test_the_engine_repeats_itself_and_another_load_does_not() -> None:
    """Step noise of 5 %, stages of 60 s at 55 % load. Same seed: P95 moves by less than 3 %, but it moves."""
    qps = 0.55 * CAPACITY
    same, other = three(qps, 5, True, stage_s=60.0), three(qps, 5, False, stage_s=60.0)
    assert len(same[0].values) == REPEATS == len(set(same[0].values))  # the noise has a stream in every repeat
    assert same[0].ok is True and 0 < same[0].range_ratio < 0.03
    assert same[0].values[0] == other[0].values[0]  # the first repeat is the same load
    assert other[0].range_ratio > 2 * same[0].range_ratio


@pytest.mark.evidence
@pytest.mark.parametrize("qps", [15.0, 25.0])
def test_same_seed_within_three_percent_over_many_plans(qps: float) -> None:
    """docs/evidence/analysis.md: largest range .3 to .7 % of E2E P95. Seeds are fixed: it fails when the code does."""
    for seed in range(8):
        assert three(qps, 610_000 + seed, True)[0].range_ratio <= 0.03
