"""The live counts against whole samples: percentiles, attainment over what was due, and abort gates."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.attainment import arrivals_needed, decide
from analysis.intervals import wilson
from bench.records.analysis import Interval
from bench.records.packing import batch_of, pack, unpack
from bench.records.request import RequestRow
from bench.workload.plan import build_plan
from bench.workload.stage_count import GateCount, Histogram, applies
from locustfiles.live import SERIES_POINTS, Live
from tests.load.conftest import CONFIG

SLO = {"ttft_s": 0.8, "tpot_s": 0.1, "e2e_s": 4.0, "target": 0.9, "classes": {"chat": (0.2, 0.05)}}
SECONDS = st.floats(min_value=1e-5, max_value=5000, allow_nan=False)


def plan(qps: list[float], target_s: float = 10.0) -> Any:
    from bench.config.schema import Config

    return build_plan(Config.model_validate({**CONFIG, "sweep": {"warmup_sec": 2}}), qps=qps, duration_s=target_s)


def opened(qps: tuple[float, ...] = (20.0,), gates: list[dict[str, Any]] | None = None, *, loop: str = "open") -> Live:
    live, made = Live(), plan(list(qps))
    settings_ = {"model": "m", "target_qps": qps[0], "slo": SLO, "gates": gates or []}
    live.open_run(made, settings_, run_id="r", run_dir="runs/r", loop=loop)
    return live


def row(arrival: int = 0, status: str = "ok", *, intended_s: float = 5.0, ttft_s: float | None = 0.1,
        tpot_s: float | None = 0.01, phase: str = "window", request_class: str = "") -> RequestRow:  # fmt: skip
    ok = status == "ok"
    return RequestRow(
        stage=0, arrival=arrival, worker=0, repeat=0, offered_qps=20, phase=phase, tenant="", request_class=request_class,
        request_id="", status=status, intended_s=intended_s, sent_s=intended_s + 0.001, send_lag_s=0.001,
        ttft_s=ttft_s if ok else None, tpot_s=tpot_s if ok else None, e2e_s=(ttft_s or 0) + 1 if ok else None,
        done_s=intended_s + 1,
    )  # fmt: skip


@settings(max_examples=200, print_blob=True)
@given(st.lists(SECONDS | st.just(math.inf), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_a_percentile_is_never_low_and_at_most_2_percent_high(values: list[float], share: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    found = histogram.percentile(share)
    assert found is not None
    assert found == exact if math.isinf(exact) else exact * (1 - 1e-9) <= found <= exact * 1.02 * (1 + 1e-9)


def test_an_empty_histogram_has_no_percentile() -> None:
    assert Histogram().percentile(0.5) is None


def test_memory_does_not_grow_with_requests() -> None:
    live = opened()
    stage = live.open_stage(live.plan.stages[0], [])
    live.begin_stage(0.0)
    rng = np.random.default_rng(1)
    live.add_rows(0, [row(i, ttft_s=float(t)) for i, t in enumerate(rng.lognormal(0, 2, 20_000))])
    for second in range(3 * SERIES_POINTS):
        live.tick(float(second))
    assert stage.rows == 20_000
    assert sum(len(h.bins) for h in (stage.ttft, stage.tpot, stage.e2e, stage.send_lag)) < 4 * 1100
    assert len(live.series) < SERIES_POINTS


def test_attainment_is_over_what_was_due_and_open_answers_make_it_a_range() -> None:
    """Window arrivals at 2, 3, ... 9 s (warm-up: 0 and 1); the run started at 100 s."""
    live = opened()
    stage = live.open_stage(live.plan.stages[0], [float(t) for t in range(10)])
    live.begin_stage(100.0)
    assert stage.planned == 8 and stage.attainment(101.5) is None and stage.verdict(101.5) == "warm-up"
    live.add_rows(0, [row(0, phase="warmup"), row(2, intended_s=102.0), row(3, "error", intended_s=103.0)])
    assert stage.attainment(105.5) == (1 / 4, 3 / 4)  # due: 2 3 4 5; met 1, failed 1, open 2
    assert stage.verdict(105.5) == "too few arrivals"  # 3 of 4 happens by chance at 0.9
    live.add_rows(0, [row(i, intended_s=100.0 + i) for i in range(4, 10)])
    assert stage.attainment(105.5) == (7 / 8, 7 / 8)  # rows count as due, whatever the clock says
    assert live.end_stage(111.0, []) == [] and stage.verdict(200.0) == "too few arrivals"
    assert live.add_rows(1, [row()]) is None and stage.rows == 8  # rows of another stage are left out


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "batch"])
def test_what_was_planned_after_a_stop_is_no_miss(packed: bool) -> None:
    """Window arrivals at 2, 3, ... 9 s, stopped at 5.5 s: 2 3 4 5 were due, 6 7 8 9 never."""
    live = opened()
    stage = live.open_stage(live.plan.stages[0], [float(t) for t in range(10)])
    live.begin_stage(100.0)
    live.add_rows(0, [row(2, intended_s=102.0), row(3, intended_s=103.0)])
    live.halt_stage(105.5)
    assert stage.planned == 4 and stage.attainment(108.0) == (2 / 4, 1.0)  # 4 and 5 are open
    unsent = [dataclasses.replace(row(i, "unsent", intended_s=100.0 + i), sent_s=None, done_s=None) for i in range(6, 10)]
    late = [row(4, intended_s=104.0), row(5, "error", intended_s=105.0), *unsent]
    live.add_rows(0, batch_of(late) if packed else late)
    live.end_stage(109.0, ["interrupted"])
    assert stage.attainment(109.0) == (3 / 4, 3 / 4)  # 2 3 4 met, 5 failed
    assert (stage.rows, stage.after_stop, stage.statuses) == (4, 4, {"ok": 3, "error": 1})


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "batch"])
@pytest.mark.parametrize("halted", [False, True], ids=["draining", "sending"])
def test_an_answer_that_a_stop_cancelled_decides_nothing(packed: bool, halted: bool) -> None:
    """Four were due; one met the SLO, one was refused, two were cancelled: between 1/4 and 3/4 of the target 0.9."""
    live = opened()
    stage = live.open_stage(live.plan.stages[0], [2.0, 3.0, 4.0, 5.0])
    live.begin_stage(100.0)
    if halted:
        live.halt_stage(105.5)
    cut = [dataclasses.replace(row(i, "timeout", intended_s=100.0 + i), code="CL-CANCEL") for i in (4, 5)]
    rows = [row(2, intended_s=102.0), row(3, "rejected", intended_s=103.0), *cut]
    live.add_gauge(0, [[105.0, 0, 2]])
    live.add_rows(0, batch_of(rows) if packed else rows)
    live.end_stage(106.0, ["interrupted"])
    assert stage.attainment(106.0) == (1 / 4, 3 / 4) and stage.statuses["timeout"] == 2
    assert stage.verdict(106.0) == "not measured" and "not decided" in live.verdict(106.0)
    live.finish()
    assert live.summary(106.0)["in_flight"] == 0  # the page takes it from here: nothing is open now


@pytest.mark.parametrize("n", [1, 7, 34, 35, 60])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.8, 1.0])
def test_a_stage_is_decided_as_the_report_decides_it(n: int, share: float) -> None:
    met = round(share * n)
    live = opened()
    stage = live.open_stage(live.plan.stages[0], [2.0 + 0.01 * i for i in range(n)])
    live.begin_stage(100.0)
    live.add_rows(0, [row(i, "ok" if i < met else "error", intended_s=102.0 + 0.01 * i) for i in range(n)])
    low, high = wilson(met, n)
    words = {"MET": ("holds", "held"), "NOT_MET": ("misses", "missed")}
    few = "too few arrivals" if n < arrivals_needed(0.9) else "open"
    wanted = words.get(decide(Interval(value=met / n, low=low, high=high, n=n), 0.9), (few, few))
    assert stage.verdict(109.0) == wanted[0]
    live.end_stage(111.0, [])
    assert stage.verdict(111.0) == wanted[1]
    assert live.verdict(111.0).endswith("is not decided: too few arrivals so far") == (wanted[1] == "too few arrivals")


def test_every_arrival_counts_with_the_deadlines_of_its_class() -> None:
    live = opened()
    stage = live.open_stage(live.plan.stages[0], [3.0] * 6)
    live.begin_stage(0.0)
    live.add_rows(0, [
        row(0, ttft_s=0.8), row(1, ttft_s=0.81), row(2, tpot_s=None), row(3, tpot_s=0.11),
        row(4, ttft_s=0.3, request_class="chat"), row(5, "rejected"),
    ])  # fmt: skip
    assert (stage.met, stage.met_ttft, stage.met_tpot, stage.ok) == (2, 3, 4, 5)
    assert stage.statuses == {"ok": 5, "rejected": 1}
    summary = live.summary(10.0)
    assert summary["stages"][0]["ttft_s"]["p50"] is not None and summary["stages"][0]["ttft_s"]["p95"] is None  # n = 6


def test_a_columnar_batch_counts_like_its_rows() -> None:
    """Rows may come as objects or as columns; both give the same numbers."""

    class Columns:
        def __init__(self, rows: list[RequestRow]) -> None:
            self.rows = rows

        def column(self, name: str) -> list[Any]:
            return [getattr(r, name) for r in self.rows]

    many = [row(i, "ok" if i % 3 else "timeout", ttft_s=0.1 * i) for i in range(30)]
    found = []
    for batch in (many, Columns(many), batch_of(many)):
        live = opened()
        live.open_stage(live.plan.stages[0], [3.0] * 30)
        live.begin_stage(0.0)
        live.add_rows(0, batch)
        found.append(live.summary(20.0))
    assert found[0] == found[1] == found[2] and found[0]["stages"][0]["ended"] == 30


# -- gates ---------------------------------------------------------------------------------------


def gate(metric: str, statistic: str, operator: str, value: float, at: Any = "all") -> dict[str, Any]:
    return {"metric": metric, "statistic": statistic, "operator": operator, "value": value, "at": at, "abort": True}


COMPARE = {"<=": np.less_equal, "<": np.less, ">=": np.greater_equal, ">": np.greater}


@settings(max_examples=200, print_blob=True)
@given(
    st.integers(0, 2**32 - 1),  # a seed: drawing 400 values one by one costs a second an example
    st.sampled_from(["p50", "p90", "p95", "p99", "max"]),
    st.sampled_from(list(COMPARE)),
    st.sampled_from([100.0, 200.0, 250.0, 400.0]),
)
def test_a_latency_gate_is_exact(seed: int, statistic: str, operator: str, limit_ms: float) -> None:
    rng = np.random.default_rng(seed)
    odds = rng.dirichlet([1, 1, 1, 1, 0.1])
    values = rng.choice([0.1, 0.2, 0.3, 0.4, math.inf], size=rng.integers(368, 400), p=odds).tolist()
    live = opened(gates=[gate("ttft", statistic, operator, limit_ms)])
    stage = live.open_stage(live.plan.stages[0], [3.0] * len(values))
    live.begin_stage(0.0)
    live.add_rows(0, [row(i, "error" if math.isinf(v) else "ok", ttft_s=v) for i, v in enumerate(values)])
    share = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}[statistic]
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    missed = live.end_stage(20.0, [])
    assert bool(missed) is not bool(COMPARE[operator](exact, limit_ms / 1000))
    assert all(stage.plan.name in text and f"ttft {statistic}" in text for text in missed)


@pytest.mark.parametrize(
    ("spec", "missed"),
    [
        (gate("attainment", "value", ">=", 0.8), False),  # 8 of 10 planned
        (gate("attainment", "value", ">", 0.8), True),
        (gate("attainment_ttft", "value", ">=", 0.81), True),
        (gate("error_ratio", "value", "<=", 0.2), False),  # 2 of 10 did not end well
        (gate("error_ratio", "value", "<=", 0.19), True),
        (gate("goodput_qps", "value", ">=", 1.0), False),  # 8 hits in a window of 8 s
        (gate("goodput_qps", "value", ">=", 1.01), True),
        (gate("completed_qps", "value", ">=", 1.01), True),
        (gate("ttft", "mean", "<=", 1000), True),  # a failed arrival makes the mean endless
        (gate("send_lag", "mean", "<=", 1.1), False),
        (gate("ttft", "p95", "<=", 1), False),  # 10 values cannot carry a p95: nothing is decided
        (gate("knee_qps", "value", ">=", 100), False),  # known after the run only
    ],
)
def test_gates_on_counts(spec: dict[str, Any], missed: bool) -> None:
    live = opened(gates=[spec])
    live.open_stage(live.plan.stages[0], [3.0] * 10)
    live.begin_stage(0.0)
    live.add_rows(0, [row(i, "ok" if i < 8 else "error") for i in range(10)])
    assert bool(live.end_stage(20.0, [])) is missed


def test_a_stage_that_was_cut_short_decides_no_gate() -> None:
    live = opened(gates=[gate("error_ratio", "value", "<=", 0.0)])
    live.open_stage(live.plan.stages[0], [3.0] * 2)
    live.begin_stage(0.0)
    live.add_rows(0, [row(0), row(1, "unsent")])
    assert live.end_stage(20.0, ["interrupted"]) == []


@pytest.mark.parametrize(
    ("at", "stages"), [("all", [0, 1, 2]), ("run", [0, 1, 2]), ("target", [1]), ("max", [2]), (5.0, [0]), (7.0, [])]
)
def test_where_a_gate_looks(at: Any, stages: list[int]) -> None:
    made = plan([5.0, 10.0, 20.0])
    assert [s.index for s in made.stages if applies(gate("ttft", "p95", "<=", 1, at), s, made, 10.0)] == stages


def test_the_words_of_a_gate_are_those_of_the_config() -> None:
    assert GateCount(gate("ttft", "p99", "<=", 1200, "target")).words == "ttft p99 <= 1200 at target"


def test_the_verdict_so_far_in_every_state() -> None:
    live = Live()
    assert live.verdict(0.0) == "no run yet"
    live.refuse("bad rates")
    assert live.verdict(0.0) == "not started: bad rates"
    live = opened((20.0, 40.0))
    assert live.problem == ""
    live.open_stage(live.plan.stages[0], [3.0 + 0.01 * i for i in range(40)])
    live.begin_stage(0.0)
    said = [live.verdict(3.5)]
    live.add_rows(0, [row(i) for i in range(40)])
    said.append(live.verdict(4.5))
    live.end_stage(11.0, [])
    live.stages[0].met = 0
    said.append(live.verdict(12.0))
    live.stopped_by = "gate x"
    said.append(live.verdict(12.0))
    assert [text.split(":")[0] for text in said] == ["open", "passes so far", "fails so far", "stopped early"]


def test_a_rate_above_the_target_that_held_speaks_for_the_target() -> None:
    live = opened((20.0, 40.0))
    live.target_qps = 30.0
    for index, words in ((0, "open: 30 requests/s is not among"), (1, "passes so far: the SLO holds at 40 requests/s")):
        live.open_stage(live.plan.stages[index], [3.0] * 40)
        live.begin_stage(0.0)
        live.add_rows(index, [row(i) for i in range(40)])
        live.end_stage(11.0, [])
        assert live.verdict(12.0).startswith(words)


def test_a_rate_below_the_target_that_missed_speaks_for_the_target() -> None:
    """As in the analysis: a higher rate cannot be better. Where the target has a stage of its own, that one decides."""
    for rates, words in (((20.0, 40.0), "fails so far: the SLO is missed at 20 requests/s, below the target of 30"),
                         ((20.0, 30.0), "open: the stage at 30 requests/s has not begun")):  # fmt: skip
        live = opened(rates)
        live.target_qps = 30.0
        live.open_stage(live.plan.stages[0], [3.0] * 40)
        live.begin_stage(0.0)
        live.add_rows(0, [row(i, "error") for i in range(40)])
        live.end_stage(11.0, [])
        assert live.verdict(12.0).startswith(words)


def test_the_series_is_a_rate_per_second() -> None:
    live = opened()
    live.open_stage(live.plan.stages[0], [])
    live.begin_stage(0.0)
    numbers = itertools.count()
    for second in range(1, 6):
        live.add_rows(0, [row(next(numbers)) for _ in range(7)])
        live.add_gauge(0, [[float(second), 0, 3, 0.0, None, None]])
        live.tick(float(second))
    assert [point[1:] for point in live.series] == [[20.0, 7.0, 7.0, 3]] * 4


@settings(max_examples=100, deadline=None, print_blob=True)
@given(st.integers(0, 2**32 - 1))
def test_a_batch_counts_as_its_rows_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [
        row(
            i, rng.choice(["ok", "error", "unsent"]), intended_s=float(rng.uniform(0, 12)),
            ttft_s=None if rng.random() < 0.1 else float(rng.lognormal(-1, 2)),
            tpot_s=None if rng.random() < 0.2 else float(rng.lognormal(-2, 1)), phase=str(rng.choice(["warmup", "window"])),
            request_class=str(rng.choice(["", "chat", "batch"])),
        )
        for i in range(int(rng.integers(0, 40)))
    ]  # fmt: skip
    states = []
    for given_rows in (rows, unpack(pack(rows))):
        live = opened()
        stage = live.open_stage(live.plan.stages[0], [])
        live.begin_stage(0.5)
        live.add_rows(0, given_rows)
        numbers = {k: v for k, v in vars(stage).items() if isinstance(v, (int, float, dict)) and not isinstance(v, bool)}
        histograms = {k: (v.n, v.infinite, v.bins) for k, v in vars(stage).items() if isinstance(v, Histogram)}
        states.append((numbers, histograms))
    assert states[0] == states[1]
