"""Every sentence of an analysis carries the code and parameters that it was made from."""
from __future__ import annotations

import ast
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from analysis.analyse import analyse_run
from bench.records.analysis import Analysis, Gate, Reason, from_json, to_json
from bench.records.sentences import ENGLISH, render

sys.path.insert(0, str(Path(__file__).parent))
from synthetic import Faults, Service, StageSpec, default_config, write_run

ROOT = Path(__file__).parents[2]
QUICK = Service(mu=4.4)
analyse = partial(analyse_run, models=False)


def all_reasons(found: Analysis) -> list[Reason]:
    return [*found.verdict.reasons, *found.warnings, *found.diagnosis, *(r for s in found.stages for r in s.reasons)]


def check(found: Analysis) -> Analysis:
    """Render every sentence again from what JSON holds, and compare with the text beside it."""
    back = from_json(to_json(found))
    for r in all_reasons(back):
        assert r.code and (r.code == "left_out" or r.code.startswith(r.reason_id.split("-")[0])), r
        assert render(r.code, r.params) == r.text and render(r.next_code, r.next_params) == r.next_step, r
    assert render(back.verdict.code, back.verdict.params) == back.verdict.sentence != ""
    assert render(back.capacity.code, back.capacity.params) == back.capacity.sentence != ""
    for gate in back.gates:
        assert render(gate.code, gate.params) == gate.text, gate
    for s in back.stages:
        assert render(s.little.code, s.little.params) == s.little.note
        for p in (*s.latency.values(), *s.survivors.values()):
            assert {k: render(v["code"], v["params"]) for k, v in p.withheld_said.items()} == p.withheld
    if back.model:
        assert render(back.model["code"], back.model["params"]) == back.model["sentence"] != ""
        assert [render(n["code"], n["params"]) for n in back.model["notes_said"]] == back.model["notes"]
    return back


CASES: dict[str, dict[str, Any]] = {
    "pass": dict(stages=[StageSpec(20, 30, 5)]),
    "unsent": dict(stages=[StageSpec(20, 30, 5)], faults=Faults(unsent=0.03)),
    "late": dict(stages=[StageSpec(20, 30, 5)], faults=Faults(send_lag_s=0.02)),
    "busy": dict(stages=[StageSpec(20, 30, 5)], faults=Faults(cpu_ratio=0.95, loop_lag_s=0.01, clock="user")),
    "bursts": dict(stages=[StageSpec(20, 30, 5)], faults=Faults(flags={"burst": 0.2, "short": 0.05})),
    "refused": dict(stages=[StageSpec(20, 30, 5), StageSpec(30, 30, 5)], faults=Faults(rejected=0.1)),
    "rows": dict(stages=[StageSpec(20, 30, 5)], faults=Faults(drop_rows=3)),
    "overload": dict(stages=[StageSpec(20, 30, 5), StageSpec(200, 30, 5)]),
    "between": dict(stages=[StageSpec(10, 30, 5), StageSpec(40, 30, 5)]),
    "short": dict(stages=[StageSpec(20, 4, 1)]),
    "below": dict(stages=[StageSpec(8, 30, 5)]),
    "own rate": dict(stages=[StageSpec(8, 30, 5)], shape="smoke"),
    "ramp": dict(stages=[StageSpec(8, 30, 5)], shape="ramp"),
    "closed": dict(stages=[StageSpec(8, 30, 5, process="closed")], loop="closed"),
}


@pytest.mark.parametrize("case", CASES)
def test_text_and_code_say_the_same(tmp_path: Path, case: str) -> None:
    given = dict(CASES[case])
    check(analyse(write_run(tmp_path / "r", given.pop("stages"), QUICK, target_qps=20, **given)))


def test_models_and_tight_targets_as_well(tmp_path: Path) -> None:
    config = default_config(20)
    config["slo"] = config["slo"] | {"ttft_deadline_ms": 5, "p95_target_ms": 100}
    folder = write_run(tmp_path / "r", [StageSpec(q, 40, 5) for q in (10, 20, 60)], QUICK, config=config)
    found = check(analyse_run(folder))
    assert found.model and found.model["sentence"]
    assert {"SLO-MISS", "DIA-FLOOR"} <= {r.reason_id for r in all_reasons(found)}


def test_old_documents_without_codes_are_read(tmp_path: Path) -> None:
    found = analyse(write_run(tmp_path / "r", [StageSpec(20, 30, 5)], QUICK, target_qps=20))
    data = json.loads(to_json(found))
    for entry in [data["verdict"], data["capacity"], *data["gates"]]:
        del entry["code"], entry["params"]
    back = from_json(json.dumps(data))
    assert back.verdict.sentence == found.verdict.sentence and back.verdict.code == ""
    assert isinstance(back.gates[0], Gate) and back.gates[0].code == ""


def literal_codes() -> set[str]:
    """First arguments of `reason(...)` and `said(...)` in the analysis, by the syntax tree; f-strings by their head."""
    found = set()
    for path in sorted((ROOT / "analysis").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                found.add(str(node.values[0].value) + "*")
    return found


def test_the_catalogue_holds_no_sentence_that_nobody_says() -> None:
    said = literal_codes()
    heads = tuple(code[:-1] for code in said if code.endswith("*") and len(code) > 4)
    unused = [code for code in ENGLISH if code not in said and not code.startswith(heads)
              and not code.endswith(".only") and not code.startswith("join.")]  # fmt: skip
    assert not unused


def test_the_document_lists_every_code() -> None:
    text = (ROOT / "docs" / "verdicts.md").read_text(encoding="utf-8")
    missing = sorted({code.split(".")[0] for code in ENGLISH if code[:3].isupper()} - {"LED"} - {
        word for word in text.replace("`", " ").split()})  # fmt: skip
    assert not missing
