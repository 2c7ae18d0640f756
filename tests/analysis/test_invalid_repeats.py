"""Repeats of one rate of which some are INVALID, or which differ: verdict, gate, warnings and their figures."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from junitparser import JUnitXml

from analysis.analyse import analyse_run, write_analysis
from analysis.repeatability import RANGE_SD
from bench.records.analysis import Analysis
from tests.analysis.synthetic import StageSpec, list_digests, write_run
from tests.analysis.test_verdict import QUICK, analyse

RATE = 20.0


def folder(tmp_path: Path, stages: list[StageSpec], shape: str = "repeat", config: dict | None = None) -> Path:
    run = write_run(tmp_path / "r", stages, QUICK, config=config)
    info = json.loads((run / "run.json").read_text())
    info["shape"] = shape
    info.pop("files", None)
    (run / "run.json").write_text(json.dumps(info))
    return run


def rewrite(run: Path, stages: list[int], change: Callable[[dict[str, float]], dict[str, float]]) -> Path:
    """Change the stamps of the answers of some stages, and the latencies with them, as a row would have them."""
    path = run / "requests.csv"
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        if int(row["stage"]) in stages and row["status"] == "ok":
            t = change({k: float(row[k]) for k in ("sent_s", "first_token_s", "last_token_s", "done_s")})
            tokens, begun = float(row["output_tokens"]), float(row["intended_s"])
            t |= {"ttft_s": t["first_token_s"] - begun, "ttfo_s": t["first_token_s"] - begun,
                  "e2e_s": t["last_token_s"] - begun, "residence_s": t["done_s"] - t["sent_s"],
                  "send_lag_s": t["sent_s"] - begun}  # fmt: skip
            if row["tpot_s"]:
                t["tpot_s"] = (t["last_token_s"] - t["first_token_s"]) / (tokens - 1)
            row.update({k: repr(v) for k, v in t.items()})
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (run / "locust_stats.csv").unlink(missing_ok=True)
    return run


def spoil(run: Path, stages: list[int]) -> Path:
    """Make our own sender 200 ms late in these stages (limit 40 ms)."""
    (run / "inflight.csv").unlink()  # it counted what was sent in time; the run may be older than the file
    return simulated(rewrite(run, stages, lambda t: {k: v + 0.2 for k, v in t.items()}))


def simulated(run: Path) -> Path:
    """A run that wrote no independent records, as `bench simulate`: their absence says nothing then."""
    info = json.loads((run / "run.json").read_text()) | {"simulated": True}
    (run / "run.json").write_text(json.dumps(info))
    return run


def repeats(n: int, rate: float = RATE) -> list[StageSpec]:
    return [StageSpec(rate, 40, 5, seed=9, repeat=i) for i in range(n)]


def reasons(found: Analysis) -> list[str]:
    return [r.code for r in found.verdict.reasons]


def test_one_valid_repeat_of_three_does_not_pass(tmp_path: Path) -> None:
    run = spoil(folder(tmp_path, repeats(3)), [1, 2])
    found = analyse_run(run, models=False)
    late = [s.stimulus.send_lag_p99_s > 0.04 for s in found.stages]  # second path: the lag of each stage, by its rows
    assert late == [False, True, True]
    assert found.verdict.status == "INVALID" and found.verdict.exit_code == 4
    assert "1 of 3 repeats at 20 requests/s is valid" in found.verdict.sentence and "send lag" in found.verdict.sentence
    assert "WARN-REPEAT.few" in reasons(found)
    assert [s.verdict for s in found.stages] == ["INVALID"] * 3 and found.capacity.knee_kind == "none"
    assert all(r.range_ratio is None and r.ok is None for r in found.repeatability)
    gate = next(g for g in found.gates if g.metric == "repeat_spread")
    assert gate.status == "not_measured" and "1 of 3 repeats" in gate.text


def test_two_valid_repeats_of_three_are_enough_and_it_is_said(tmp_path: Path) -> None:
    found = analyse_run(spoil(folder(tmp_path, repeats(3)), [1]), models=False)
    assert found.verdict.status == "PASS" and "(2 of 3 repeats valid)" in found.verdict.sentence
    assert "WARN-REPEAT.invalid" in reasons(found)
    assert all(len(r.values) == 2 and r.ok is True for r in found.repeatability)


def test_half_of_two_is_no_majority_but_shows_no_repeatability(tmp_path: Path) -> None:
    found = analyse_run(spoil(folder(tmp_path, repeats(2)), [1]), models=False)
    assert found.verdict.status == "PASS"
    assert "(1 of 2 repeats valid; repeatability is not shown)" in found.verdict.sentence
    assert "WARN-REPEAT.few" in reasons(found)


def test_a_rate_that_does_not_decide_is_left_out_alone(tmp_path: Path) -> None:
    """A sweep whose repeats at a rate above the target are INVALID: that rate is, the run is not."""
    stages = [StageSpec(rate, 30, 5, seed=9, repeat=i) for i in range(3) for rate in (RATE, 30.0)]
    found = analyse_run(spoil(folder(tmp_path, stages, "sweep"), [3, 5]), models=False)
    at = {rate: [s.verdict for s in found.stages if s.offered_qps == rate] for rate in (RATE, 30.0)}
    assert at[30.0] == ["INVALID"] * 3 and "INVALID" not in at[RATE]
    assert found.verdict.status == "PASS" and "repeats valid" not in found.verdict.sentence
    assert any(r.code == "WARN-REPEAT.few" and r.params["offered_qps"] == 30.0 for r in found.verdict.reasons)


def test_a_search_judges_its_stages_by_itself(tmp_path: Path) -> None:
    found = analyse_run(spoil(folder(tmp_path, repeats(3), "knee_search"), [1, 2]), models=False)
    assert [s.verdict for s in found.stages].count("INVALID") == 2
    assert not [c for c in reasons(found) if c.startswith(("WARN-REPEAT", "INV-REPEATS"))]


def slower(run: Path, stage: int, factor: float) -> Path:
    """Every answer of a stage takes `factor` times as long."""
    (run / "inflight.csv").unlink()
    sent = "sent_s"
    return simulated(rewrite(run, [stage], lambda t: {k: t[sent] + (v - t[sent]) * factor for k, v in t.items()}))


def test_a_spread_over_the_limit_reaches_every_place(tmp_path: Path) -> None:
    """1, 1, 1.06: range / mean = .06 / (3.06 / 3) = 5.9 % of a limit of 3 %."""
    from reports.junit import junit
    from reports.summary import summary

    run = slower(folder(tmp_path, repeats(3)), 2, 1.06)
    found = write_analysis(run, models=False)
    by = {r.statistic: r for r in found.repeatability}
    assert by["e2e_p95_s"].range_ratio == pytest.approx(0.06 / 1.02, abs=0.002)
    assert found.verdict.status == "PASS" and "its repeats differ by" in found.verdict.sentence
    warned = next(r for r in found.verdict.reasons if r.code == "WARN-REPEAT")
    worst = max(r.range_ratio for r in found.repeatability if r.ok is False)
    assert warned.value == worst and warned.limit == 0.03 and f"{worst:.1%} (limit 3% for the same seed)" in warned.text
    assert "attainable at this load" in warned.text and warned in found.warnings
    gate = next(g for g in found.gates if g.metric == "repeat_spread")
    assert (gate.status, gate.severity, gate.limit, gate.measured) == ("fail", "warn", 0.03, worst)
    told = summary(found)
    assert any(g["metric"] == "repeat_spread" and g["status"] == "fail" for g in told["gates"])
    assert "WARN-REPEAT" in json.dumps(told)
    cases = [case for suite in JUnitXml.fromstring(junit(found).encode()) for case in suite]
    mine = next(c for c in cases if "repeat_spread" in c.name)
    assert mine.system_out and not mine.result  # a warning never fails the suite


def test_a_gate_of_the_config_can_fail_the_run(tmp_path: Path) -> None:
    config = {"loadgen": {"target_qps": RATE}, "slo": {"ttft_deadline_ms": 800, "tpot_deadline_ms": 100,
              "p95_target_ms": 20000, "attainment_target": 0.9}, "scheduler": {"max_num_seqs": 32, "batch_size_cap": 32},
              "gates": [{"metric": "repeat_spread", "operator": "<=", "value": 0.04}]}  # fmt: skip
    run = slower(folder(tmp_path, repeats(3), "sweep", config), 2, 1.06)
    found = analyse_run(run, models=False)
    assert [g.gate_id for g in found.gates if g.metric == "repeat_spread"] == ["repeat_spread@target"]
    assert found.verdict.status == "FAIL" and "the spread of the repeats is" in found.verdict.sentence
    assert ", above 4 %" in found.verdict.sentence


def test_beyond_capacity_it_is_unstable_and_no_failed_repeat(tmp_path: Path) -> None:
    from tests.analysis.synthetic import Service

    run = write_run(tmp_path / "r", [StageSpec(45, 40, 5, repeat=i) for i in range(2)], Service(), target_qps=45)
    info = json.loads((run / "run.json").read_text()) | {"shape": "repeat"}
    info.pop("files", None)
    (run / "run.json").write_text(json.dumps(info))
    found = analyse(run)
    gate = next(g for g in found.gates if g.metric == "repeat_spread")
    assert gate.status == "not_measured" and gate.text.startswith("unstable, not a failed repeat: 45 requests/s")
    assert found.verdict.status == "FAIL" and not [c for c in reasons(found) if c.startswith("WARN-REPEAT")]


def test_the_range_of_normals_behind_attainable() -> None:
    """Second path: 95 % points of the range of n drawn normals."""
    import numpy as np

    rng = np.random.default_rng(3)
    for n, factor in RANGE_SD.items():
        drawn = np.ptp(rng.standard_normal((60_000, n)), axis=1)
        assert np.mean(drawn <= factor) == pytest.approx(0.95, abs=0.004), n


def test_other_seeds_are_measured_against_the_intervals_within_the_stages(tmp_path: Path) -> None:
    from analysis.repeatability import repeat_reasons, repeatability

    found = analyse(write_run(tmp_path / "r", [StageSpec(RATE, 40, 5, repeat=i) for i in range(3)], QUICK))
    for half_width, code in ((0.02, "repeat.attainable"), (0.30, "repeat.chance")):
        # a CV of .02 / 1.96 = 1.0 % lies under .15 / 3.314 = 4.5 %, one of 15.3 % above it
        for stage, value in zip(found.stages, (1.0, 1.1, 1.3), strict=True):
            p = replace(stage.latency["e2e_s"], p95=value, p95_low=value * (1 - half_width),
                        p95_high=value * (1 + half_width))  # fmt: skip
            stage.latency["e2e_s"] = stage.latency["ttft_s"] = p
        told = repeatability(found.stages, {0: 1, 1: 2, 2: 3})
        warned = repeat_reasons(found.stages, told)
        assert [r.code for r in warned] == ["WARN-REPEAT"] and warned[0].params["reachable"]["code"] == code
        # .3 / (3.4 / 3) = 26.5 %
        assert "26.5% (limit 15% for different seeds), 1, 1.1, 1.3 s;" in warned[0].text


def test_the_record_keeps_its_files(tmp_path: Path) -> None:
    run = folder(tmp_path, repeats(3))
    list_digests(run)
    assert analyse_run(run, models=False).verdict.status == "PASS"


def test_repeats_of_other_seeds_decide_together_and_those_of_one_seed_do_not(tmp_path: Path) -> None:
    """At .99 without a miss 381 arrivals are needed: no repeat has them, three have, if they are other arrivals."""
    for name, seed, decided in (("a", None, True), ("b", 9, False)):
        stages = [StageSpec(RATE, 20, 5, seed=seed, repeat=i) for i in range(3)]
        found = analyse_run(folder(tmp_path / name, stages), models=False)
        assert all(s.planned < 381 and s.attainment_joint.value == 1.0 for s in found.stages)
        assert sum(s.planned for s in found.stages) > 600 and found.verdict.status == "PASS"
        assert reasons(found).count("WARN-UNDECIDED") == (0 if decided else 1)
        assert ("not decided by the number" in found.verdict.sentence) is not decided


@pytest.mark.parametrize(("hits", "n"), [(100, 100), (97, 100), (10, 400), (1, 7), (990, 1000)])
def test_what_an_interval_is_worth_is_found_back(hits: int, n: int) -> None:
    from analysis.intervals import wilson
    from analysis.verdict import _worth
    from bench.records.analysis import Interval

    assert _worth(Interval(hits / n, *wilson(hits, n), n=10_000)) == pytest.approx(n, rel=1e-6)


def test_a_queue_is_no_idle_floor(tmp_path: Path) -> None:
    from tests.analysis.synthetic import Service

    over = analyse(write_run(tmp_path / "o", [StageSpec(60, 30, 5)], Service(), target_qps=60))
    assert over.stages[0].survivors["ttft_s"].p50 > over.slo["ttft_deadline_s"]
    assert over.stages[0].stationarity == "UNSTABLE" and "DIA-FLOOR" not in {r.reason_id for r in over.diagnosis}
