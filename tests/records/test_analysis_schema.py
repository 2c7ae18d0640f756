"""The published schema of analysis.json: up to date, strict enough to refuse nonsense, and every analysis follows it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from analysis.analyse import analyse_run
from bench.commands.simulate import command as simulate
from bench.records.analysis import to_json
from bench.records.analysis_schema import WORDS, schema, schema_text
from tests.analysis.synthetic import Faults, StageSpec, write_run
from tests.repo.write_analysis_schema import FILE
from tests.reports import examples

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "demo.json"
SHORT = [StageSpec(8, 20, 4), StageSpec(16, 20, 4)]
MADE: dict[str, dict[str, Any]] = {
    "holds": {},
    "refused": {"faults": Faults(rejected=0.3)},
    "nobody answered": {"faults": Faults(error=1.0)},
    "late and torn": {"faults": Faults(send_lag_s=0.3, drop_rows=30, double_rows=3)},
    "one token each": {"faults": Faults(one_token=1.0)},
    "not sent": {"faults": Faults(unsent=1.0)},
    "up and down": {"specs": [StageSpec(8, 20, 4), StageSpec(40, 20, 4), StageSpec(8, 20, 4)]},
    "repeats": {"specs": [StageSpec(8, 20, 4, repeat=i) for i in range(3)]},
    "without CSV": {"locust_csv": False},
    "interrupted": {"interrupted": True, "finished_utc": None},
    "closed loop": {"loop": "closed", "shape": "single"},
}


def strict(node: Any) -> Any:
    """The schema, refusing keys that it does not name: for what this version writes."""
    if isinstance(node, list):
        return [strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    closed = {"additionalProperties": False} if "properties" in node else {}
    return {**closed, **{key: strict(value) for key, value in node.items()}}


@cache
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(strict(json.loads(FILE.read_text(encoding="utf-8"))))


def faults_of(text: str) -> list[str]:
    return [f"{list(e.absolute_path)}: {e.message[:200]}" for e in validator().iter_errors(json.loads(text))]


def test_the_published_file_is_what_the_dataclasses_say() -> None:
    assert FILE.read_text(encoding="utf-8") == schema_text(), "run python -m tests.repo.write_analysis_schema"
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("name", sorted(examples.ALL))
def test_the_examples_of_the_report_follow_it(name: str) -> None:
    assert faults_of(to_json(examples.ALL[name]())) == []


@pytest.mark.parametrize("name", list(MADE))
def test_measured_runs_follow_it(name: str, tmp_path: Path) -> None:
    given = dict(MADE[name])
    write_run(tmp_path / "r", given.pop("specs", SHORT), target_qps=8, **given)
    found = analyse_run(tmp_path / "r", models=name in ("holds", "nobody answered"))
    assert faults_of(to_json(found)) == []


def test_a_simulation_with_gates_and_classes_follows_it(tmp_path: Path) -> None:
    gates = [{"metric": "ttft", "statistic": "p99", "operator": "<", "value": 900, "at": at} for at in ("max", "all", 5)]
    config = json.loads(CONFIG.read_text(encoding="utf-8")) | {"gates": gates}
    config["classes"] = [{"name": "a", "share": 0.5, "ttft_deadline_ms": 500}, {"name": "b", "share": 0.5}]
    (tmp_path / "c.json").write_text(json.dumps(config), encoding="utf-8")
    done = CliRunner().invoke(simulate, ["-c", str(tmp_path / "c.json"), "--qps", "5,30", "--stage-duration", "20", "-q",
                                         "--run-dir", str(tmp_path / "r"), "--no-report"])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert faults_of(to_json(analyse_run(tmp_path / "r"))) == []


def _set(document: Any, place: list[Any], value: Any) -> None:
    for key in place[:-1]:
        document = document[key]
    document[place[-1]] = value


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["schema_version"], 2),
        (["verdict", "status"], "MAYBE"),
        (["verdict", "exit_code"], "4"),
        (["stages", 0, "verdict"], "GOOD"),
        (["stages", 0, "planned"], 12.5),
        (["stages", 0, "completed_qps"], "fast"),
        (["stages", 0, "attainment_joint", "value"], [1]),
        (["stages", 0, "latency", "ttft_s", "p95"], "nan"),
        (["gates", 0, "status"], "ok"),
        (["capacity", "knee_kind"], "maybe"),
        (["slo", "ttft_deadline_s"], "0.8"),
        (["errors"], {}),
    ],
)
def test_nonsense_is_refused(place: list[Any], value: Any) -> None:
    document = json.loads(to_json(examples.sweep()))
    jsonschema.validate(document, schema())
    _set(document, place, value)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema())


def test_the_words_stand_at_fields_that_there_are() -> None:
    """A renamed field would lose its list of words without a sound."""
    parts = schema()["$defs"]
    assert all(parts[record]["properties"][field].get("enum") == list(words) for (record, field), words in WORDS.items())
    described = [p for part in parts.values() for p in part.get("properties", {}).values() if "description" in p]
    assert len(described) > 40  # the comments of the dataclasses are read
