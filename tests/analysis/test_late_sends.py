"""A pause of our own sender that hits less than 1 % of the arrivals: whether it decides, by hand counts."""
from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from analysis.analyse import analyse_run
from analysis.late_sends import held_reads, late_arrivals, late_reason
from analysis.run_files import Gauge
from bench.records.sentences import said
from tests.analysis.synthetic import Faults, Service, StageSpec, default_config, write_run

QUICK = Service(mu=4.4)
LABEL = said("gate.label", metric="attainment")


@pytest.mark.parametrize(
    ("met", "late_met", "late_missed", "target", "decides"),
    [
        # 1,000 arrivals, of which 8 late ones: as met .992 + .008 = 1.0, as missed .992
        (992, 0, 8, 0.995, True),
        (992, 0, 8, 0.99, False),  # 99 % hold even so
        (950, 0, 8, 0.995, False),  # 42 misses are the service's own: .958 at best
        (995, 3, 0, 0.995, True),  # the late ones met: .995 with them, .992 without
        (1000, 3, 0, 0.995, False),
        (990, 0, 0, 0.995, False),  # nobody was late
    ],
)
def test_who_decides(met: int, late_met: int, late_missed: int, target: float, decides: bool) -> None:
    hit, late = np.zeros(1000, bool), np.zeros(1000, bool)
    hit[:met] = True
    late[:late_met] = True
    late[met : met + late_missed] = True
    made = late_reason(late, hit, target, LABEL, stage=3, limit_s=0.04, cpu_ratio=0.2, own_machine=True)
    assert (made is not None) == decides
    if made is not None:
        assert (made.reason_id, made.severity, made.stage, made.value) == ("INV-LAG", "invalid", 3, late_met + late_missed)
        assert f"{late_met + late_missed} of 1000 arrivals" in made.text and "close other programs" in made.next_step


def test_late_by_five_percent_of_the_own_deadline_or_never_sent() -> None:
    """Deadlines .8 s and .02 s: 40 ms, and 5 ms rather than 1 ms."""
    lag = np.array([0.039, 0.041, 0.004, 0.006, np.nan])
    deadline = np.array([0.8, 0.8, 0.02, 0.02, 0.8])
    late = late_arrivals(
        intended_s=np.full(5, 10.0), sent_s=10 + lag, unsent=np.isnan(lag), ttft_deadline_s=deadline, held=np.zeros(5, bool)
    )
    assert late.tolist() == [False, True, False, True, True]


def test_an_output_in_a_pause_of_the_loop_is_read_late_unless_the_kernel_stamped_it() -> None:
    """Worker 0 stood still from 4.9 to 5.2, worker 1 from 7.0 to 7.1; 60 ms count."""
    gauge = Gauge(*(np.array(x, dtype=float) for x in ([5.0, 5.2, 7.1], [0, 0, 1], [1, 1, 1], [0.03, 0.3, 0.1],
                                                       [0.2] * 3, [1.0] * 3)))  # fmt: skip
    first = np.array([4.89, 4.95, 5.19, 5.21, 5.23, 7.05, 7.05, np.nan])
    worker = np.array([0, 0, 0, 0, 0, 0, 1, 0])
    user = np.ones(8, bool)
    held = held_reads(gauge, worker, (first,), user, 0.06)
    assert held.tolist() == [False, True, True, True, False, False, True, False]
    assert not held_reads(gauge, worker, (first,), ~user, 0.06).any()
    assert not held_reads(gauge, worker, (first,), user, 0.4).any() and not held_reads(None, worker, (first,), user, 0).any()


def spoil(folder: Path, count: int) -> None:
    """A pause of 2 s in front of `count` arrivals of the window: sent late, answered late, TTFT missed."""
    with (folder / "requests.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    inside = [r for r in rows if r["phase"] == "window"]
    for r in inside[200 : 200 + count]:
        for name in ("sent_s", "first_token_s", "first_content_s", "last_token_s", "done_s", "headers_s", "send_lag_s",
                     "ttft_s", "ttfo_s", "e2e_s"):  # fmt: skip
            r[name] = repr(round(float(r[name]) + 2, 9))
    with (folder / "requests.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (folder / "locust_stats.csv").unlink()


@pytest.mark.parametrize(("target", "status"), [(0.995, "INVALID"), (0.99, "PASS"), (0.98, "PASS")])
def test_a_pause_that_no_p99_shows(tmp_path: Path, target: float, status: str) -> None:
    """About 1,000 arrivals, 8 of them sent 2 s late: the send lag p99 stays below a millisecond or two."""
    config = default_config(20)
    config["slo"] = config["slo"] | {"attainment_target": target}
    folder = write_run(tmp_path / "r", [StageSpec(20, 55, 5)], QUICK, config=config, faults=Faults(send_lag_s=0.0003))
    spoil(folder, 8)
    found = analyse_run(folder, models=False)
    stage = found.stages[0]
    assert stage.planned > 850 and stage.stimulus.send_lag_p99_s is not None and stage.stimulus.send_lag_p99_s < 0.005
    assert stage.attainment_joint.value == pytest.approx(1 - 8 / stage.planned)
    reasons = [r for r in stage.reasons if r.reason_id == "INV-LAG"]
    assert bool(reasons) == (status == "INVALID")
    if reasons:
        assert (stage.verdict, found.verdict.status) == ("INVALID", "INVALID")
        assert f"our own client decides: 8 of {stage.planned} arrivals" in found.verdict.sentence
