"""Whole runs, analysed and reported in Chinese: no English sentence is left outside code, names and server text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis.analyse import analyse_run
from analysis.compare_runs import compare_runs
from reports.html import render
from tests.analysis.synthetic import Faults, Service, StageSpec, write_run
from tests.reports import examples
from tests.reports.test_html import ENGLISH, parsed, readable

SWEEP = [StageSpec(qps=q, duration_s=30, warmup_s=3) for q in (10, 20, 60)]
KINDS = {
    "sweep": (SWEEP, {}),
    "one stage": (SWEEP[:1], {"target_qps": 20}),
    "repeats": ([StageSpec(qps=10, duration_s=20, warmup_s=2, repeat=r) for r in (0, 1, 2)], {"target_qps": 10}),
    "no success": (SWEEP[:2], {"faults": Faults(error=1.0), "target_qps": 10}),
    "late sender": (SWEEP[:2], {"faults": Faults(send_lag_s=0.2, cpu_ratio=0.99, loop_lag_s=0.1), "target_qps": 10}),
    "rejections": (SWEEP[:2], {"faults": Faults(rejected=0.3), "target_qps": 10}),
    "rows lost and doubled": (SWEEP[:2], {"faults": Faults(drop_rows=5, double_rows=7), "target_qps": 10}),
    "interrupted": (SWEEP[:2], {"interrupted": True, "target_qps": 20}),
    "unfinished, simulated, no CSV": (SWEEP[:1], {"finished_utc": None, "simulated": True, "locust_csv": False}),
    "closed loop": ([replace(SWEEP[0], process="closed")], {"loop": "closed", "target_qps": 10}),
}


def english_of(html: str) -> list[str]:
    return sorted({m.group() for m in ENGLISH.finditer(readable(html))})


@pytest.mark.parametrize("kind", KINDS)
def test_no_english_sentence_is_left(kind: str, tmp_path: Path) -> None:
    specs, more = KINDS[kind]
    analysis = analyse_run(write_run(tmp_path / "run", specs, Service(), **more), models=kind in ("sweep", "repeats"))
    html = render(analysis, lang="zh-CN", live=False)
    assert english_of(html) == []
    assert parsed(html).problems == []
    assert english_of(render(analysis, live=False)), "the check would pass on an English page"


def test_no_english_sentence_in_a_comparison(tmp_path: Path) -> None:
    base = write_run(tmp_path / "base", SWEEP[:2], Service(), target_qps=10)
    new = write_run(tmp_path / "new", SWEEP[:2], Service(), faults=Faults(rejected=0.2), target_qps=10)
    found = compare_runs(base, new, force=True).to_dict()
    html = render(analyse_run(new, models=False), lang="zh-CN", live=False, comparison=found)
    assert 'id="compare"' in html and english_of(html) == []
    for code in ("differs", "invalid", "no_rate", "unreadable"):
        refused = {"refused": {"code": code, "details": ["model: a against b"], "text": "", "base": "runs/base"}}
        assert english_of(render(examples.nothing(), lang="zh-CN", live=False, comparison=refused)) == []
