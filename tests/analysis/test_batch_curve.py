"""The gain of one more seat: closed forms, simulated runs, the command."""
from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from analysis.analyse import analyse_run
from analysis.batch_curve import (
    CapPoint,
    batch_curve,
    cap_of,
    cap_points,
    common_rates,
    curve_of,
    differences,
    gains,
    usl_peak,
)
from bench.__main__ import main
from bench.records.sentences import render

sys.path.insert(0, str(Path(__file__).parent))
from synthetic import Service, StageSpec, default_config, write_run

analyse = partial(analyse_run, models=False)
A, B, TOKENS = 0.010, 0.0002, 100  # s, s per sequence; tokens of an answer


def throughput(n: float, c: float) -> float:
    """X(n) = n/(m T(n)), T(n) = a + b n + c n²: peak at n* = sqrt(a/c)."""
    return n / (TOKENS * (A + B * n + c * n * n))


def point(cap: int, x: float, se: float = 0.001, *, full: bool = True, attainment: float = 0.5) -> CapPoint:
    return CapPoint(cap, 99.0, 1, full, x, x - 2 * se, x + 2 * se, se, attainment, None, None, 0.02, 0.03, float(cap))


@pytest.mark.parametrize(("c", "peak"), [(1e-4, 10.0), (2.5e-5, 20.0), (1e-6, 100.0)])
@pytest.mark.parametrize("caps", [(4, 8, 16), (2, 4, 8, 16, 32, 64)])
def test_the_peak_is_the_closed_form(c: float, peak: float, caps: tuple[int, ...]) -> None:
    x = np.array([throughput(n, c) for n in caps])
    assert usl_peak(np.array(caps), x)[0] == pytest.approx(peak, rel=1e-6)  # sqrt(a/c)


def test_a_line_has_no_peak() -> None:
    caps = np.array([4, 8, 16, 32])
    assert math.isinf(usl_peak(caps, np.array([throughput(n, 0.0) for n in caps]))[0])


def test_gain_per_seat_by_hand() -> None:
    found = gains([point(8, 4.0), point(16, 6.0), point(32, 5.2)])
    assert [(g.low_cap, g.high_cap) for g in found] == [(8, 16), (16, 32)]
    assert found[0].gain_qps == pytest.approx(0.25) and found[1].gain_qps == pytest.approx(-0.05)  # 2/8, -.8/16
    # half width: 1.96 * sqrt(.001² + .001²) / seats
    assert found[0].gain_high_qps - found[0].gain_qps == pytest.approx(1.959964 * 0.001 * math.sqrt(2) / 8, rel=1e-5)
    assert [g.sign for g in found] == ["gain", "loss"]
    assert gains([point(8, 4.0, 0.5), point(16, 4.1, 0.5)])[0].sign == "open"


@pytest.mark.parametrize(
    ("c", "caps", "full", "kind"),
    [
        (1e-4, (2, 4, 8, 16, 32), True, "peak"),  # n* = 10
        (1e-7, (2, 4, 8, 16, 32), True, "rising"),  # n* = 316
        (1e-2, (8, 16, 32), True, "falling"),  # n* = 1
        (1e-4, (2, 4, 8), False, "not_full"),
        (1e-4, (2,), True, "few"),
    ],
)
def test_each_kind_is_named(c: float, caps: tuple[int, ...], full: bool, kind: str) -> None:
    found = curve_of([point(n, throughput(n, c), full=full) for n in caps], 99.0)
    assert found.kind == kind and found.sentence == render(found.code, found.params)
    json.dumps(found.as_dict(), allow_nan=False)
    if kind == "peak":
        assert found.peak == pytest.approx(10.0, rel=1e-6) and found.best_cap == 8  # X(8) 4.44, X(16) 4.12
        assert found.peak_low is not None and found.peak_high is not None
        assert found.peak_low <= 10.0 <= found.peak_high and "about 10" in found.sentence
    if kind == "flat":
        assert "Longer" in found.sentence


def test_the_interval_of_the_peak_covers() -> None:
    """300 noisy curves with n* = 12.9: the nominal 95 % interval holds it in 95 % ± 3 standard errors of .0126."""
    c, caps, rng = 6e-5, (4, 8, 16, 32), np.random.default_rng(5)
    se = [0.02 * throughput(n, c) for n in caps]
    held = 0
    for _ in range(300):
        drawn = [throughput(n, c) + s * rng.standard_normal() for n, s in zip(caps, se, strict=True)]
        found = curve_of([point(n, x, s) for n, x, s in zip(caps, drawn, se, strict=True)], 99.0)
        assert found.peak_low is not None
        held += found.peak_low <= math.sqrt(A / c) <= (found.peak_high or math.inf)
    assert 0.91 <= held / 300 <= 0.99


def test_noise_that_hides_the_gain_is_said() -> None:
    found = curve_of([point(n, throughput(n, 1e-4), 1.0) for n in (8, 16, 32)], 99.0)
    assert found.kind == "flat"


@pytest.mark.parametrize(
    ("config", "cap"),
    [
        ({"scheduler": {"max_num_seqs": 32, "batch_size_cap": 16}}, 16),
        ({"scheduler": {"max_num_seqs": 8, "batch_size_cap": 16}, "engine": {"replicas": 2}}, 16),
        ({"scheduler": {"max_num_seqs": 8}}, 8),
        ({"scheduler": {}}, None),
        ({}, None),
    ],
)
def test_the_cap_of_a_run(config: dict, cap: int | None) -> None:
    assert cap_of({"config": config}) == cap


def test_what_else_differs_is_named() -> None:
    one = {"config": {"scheduler": {"max_num_seqs": 8, "policy": "fcfs"}, "loadgen": {"seed": 1}, "base_url": "a"}}
    two = {"config": {"scheduler": {"max_num_seqs": 16, "policy": "fcfs"}, "loadgen": {"seed": 1}, "base_url": "b"}}
    assert differences([one, two]) == []
    two["config"]["loadgen"] = {"seed": 2}
    assert differences([one, two]) == ["loadgen.seed: 1, 2"]


def folder(path: Path, cap: int, rates: tuple[float, ...] = (8.0, 60.0), **more: object) -> Path:
    config = default_config(20)
    config["scheduler"] = {"max_num_seqs": cap, "batch_size_cap": cap}
    service = Service(alpha=6e-3, beta=0.2e-3, gamma=0.0, mu=4.6, sigma=0.3, seqs=cap)
    specs = [StageSpec(q, 60, 10, seed=int(q)) for q in rates]
    return write_run(path, specs, service, config=config, target_qps=20, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("caps")
    return [folder(home / f"cap{cap}", cap) for cap in (4, 8, 16)]


def test_simulated_runs_give_the_services_own_capacity(runs: list[Path]) -> None:
    """Overload: throughput of a cap K is 1/(m (a/K + b)), m from the law of lengths; 3 % for 50 s of departures."""
    found = [analyse(run) for run in runs]
    assert common_rates(found) == [8.0, 60.0]
    points = cap_points(found, 60.0)
    for p, cap in zip(points, (4, 8, 16), strict=True):
        truth = Service(alpha=6e-3, beta=0.2e-3, gamma=0.0, mu=4.6, sigma=0.3, seqs=cap).capacity_qps()
        assert p.full and p.cap == cap and p.throughput_qps == pytest.approx(truth, rel=0.06)
        assert p.low_qps <= truth <= p.high_qps
    curve = batch_curve(found, 60.0)
    assert curve.kind == "rising" and curve.best_cap == 16 and all(g.sign == "gain" for g in curve.gains)
    # TPOT rises with the cap: T(16)/T(4) = (6 + 3.2)/(6 + .8)
    tpot = [p.tpot_p50_s for p in points]
    assert tpot[2] / tpot[0] == pytest.approx(9.2 / 6.8, rel=0.03)
    low = batch_curve(found, 8.0)
    assert low.kind in ("not_full", "few") and not low.points[-1].full  # 8/s: cap 4 serves 5.6 of them


def test_repeats_are_pooled_and_bad_stages_left_out(runs: list[Path]) -> None:
    found = [analyse(runs[0]), analyse(runs[0]), analyse(runs[1])]
    points = cap_points(found, 60.0)
    assert [p.stages for p in points] == [2, 1]
    found[0].stages[1] = replace(found[0].stages[1], verdict="INVALID")
    assert [p.stages for p in cap_points(found, 60.0)] == [1, 1]


def test_the_command_prints_a_table_and_json(runs: list[Path]) -> None:
    done = CliRunner().invoke(main, ["batch-curve", *map(str, runs)])
    assert done.exit_code == 0 and "still rises at the highest cap" in done.output
    assert len(done.output.splitlines()) == 1 + 3 + 1
    done = CliRunner().invoke(main, ["batch-curve", *map(str, runs), "--qps", "8", "--json"])
    data = json.loads(done.output)
    assert data["offered_qps"] == 8 and [p["cap"] for p in data["points"]] == [4, 8, 16]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cap4"], "all runs have the cap 4"),
        (["cap4", "cap8", "--qps", "9"], "two caps have 8, 60 in common"),
        (["cap4", "nowhere"], "there is no such folder"),
        (["cap4", "other"], "loadgen.target_qps: 20, 30"),
        (["cap4", "rates"], "no rate has a valid stage"),
    ],
)
def test_runs_that_cannot_stand_side_by_side(runs: list[Path], words: list[str], said: str) -> None:
    home = runs[0].parent
    if "other" in words and not (home / "other").exists():
        folder(home / "other", 8)
        data = json.loads((home / "other" / "run.json").read_text())
        data["config"].setdefault("loadgen", {})["target_qps"] = 30
        (home / "other" / "run.json").write_text(json.dumps(data))
    if "rates" in words and not (home / "rates").exists():
        folder(home / "rates", 8, (12.0,))
    args = [w if w.startswith("--") or w == "9" else str(home / w) for w in words]
    done = CliRunner().invoke(main, ["batch-curve", *args])
    assert done.exit_code == 2 and said in done.output, done.output
