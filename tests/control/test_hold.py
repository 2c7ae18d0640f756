"""The hold shape: one rate for as long as asked, with a verdict about that rate."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.commands.simulate import command as simulate
from bench.config import load_config
from bench.workload.plan import build_plan

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo.json"


def test_the_plan_is_one_stage_at_the_rate_that_was_asked():
    config = load_config(DEMO).config
    plan = build_plan(config, "hold", qps=[14.08], duration_s=600.0)
    assert len(plan.stages) == 1 and plan.stages[0].offered_qps == 14.08 and plan.stages[0].duration_s == 600.0
    assert build_plan(config, "hold").stages[0].offered_qps == config.loadgen.target_qps


@pytest.mark.parametrize(("qps", "verdict"), [("14", "PASS"), ("24", "FAIL")])
def test_holding_proves_the_watermark_or_breaks_it(tmp_path, qps, verdict):
    """14/s is the safe rate of the demo (80 % of a lower bound of 17.6); 24/s is past its knee of 20."""
    done = CliRunner().invoke(simulate, ["--config", str(DEMO), "--shape", "hold", "--qps", qps, "--stage-duration", "120",
                                         "--run-dir", str(tmp_path / "run"), "--no-report", "-q"])
    assert done.exit_code == 0, done.output
    from analysis.analyse import write_analysis

    found = write_analysis(tmp_path / "run", models=False)
    assert found.verdict.status == verdict and json.loads((tmp_path / "run" / "run.json").read_text())["shape"] == "hold"
