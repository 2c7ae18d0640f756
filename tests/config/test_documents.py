"""`docs/config.md` and `configs/schema.json` say what the schema says; UPDATE_GOLDEN=1 rewrites them and fails."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from bench.config import load_config
from bench.config.document import key_tables, problem_table, schema_text
from bench.config.errors import PROBLEMS
from bench.config.explain import known_keys

ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "docs" / "config.md"
SCHEMA = ROOT / "configs" / "schema.json"
TRACKED = sorted(p for p in (ROOT / "configs").iterdir() if p.suffix in (".json", ".yaml", ".yml") and p != SCHEMA)


def _between(text: str, name: str) -> str:
    match = re.search(rf"<!-- begin {name} -->\n(.*?)<!-- end {name} -->", text, re.S)
    assert match, f"docs/config.md has no part {name}"
    return match.group(1)


@pytest.mark.parametrize(("name", "write"), [("keys", key_tables), ("problems", problem_table)])
def test_tables_in_the_documentation(name, write):
    text = DOC.read_text(encoding="utf-8")
    if os.environ.get("UPDATE_GOLDEN"):
        part = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.S)
        DOC.write_text(part.sub(lambda m: m.group(1) + write() + m.group(2), text), encoding="utf-8")
        pytest.fail("docs/config.md rewritten")
    assert _between(text, name) == write()


def test_schema_file_is_up_to_date():
    if os.environ.get("UPDATE_GOLDEN"):
        SCHEMA.write_text(schema_text(), encoding="utf-8")
        pytest.fail("configs/schema.json rewritten")
    assert SCHEMA.read_text(encoding="utf-8") == schema_text()


def test_every_key_and_every_id_stands_in_the_documentation():
    text = DOC.read_text(encoding="utf-8")
    for key in known_keys():
        name = key.rpartition(".")[2]
        assert f"`{name}`" in text or f"### {name}" in text, key
    for name in PROBLEMS:
        assert name in text


def test_ids_in_the_code_are_in_the_table():
    used = set()
    for path in [*(ROOT / "bench").rglob("*.py"), *(ROOT / "locustfiles").rglob("*.py")]:
        if path.name != "errors.py":  # the table itself
            used |= set(re.findall(r"\bCFG-\d{3}", path.read_text(encoding="utf-8")))
    assert used == set(PROBLEMS)


@pytest.mark.parametrize("path", TRACKED, ids=lambda p: p.name)
def test_tracked_configs_load_and_obey_the_json_schema(path):
    resolved = load_config(path, env={})
    assert resolved.config.loadgen.target_qps in resolved.config.sweep.qps
    text = path.read_text(encoding="utf-8")
    data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    jsonschema.Draft202012Validator(json.loads(schema_text())).validate(data)


@pytest.mark.parametrize("change", [
    {"scheduler": {"batch_size_cap": "16"}}, {"modle": "x"}, {"loadgen": {"input_len_range": [1, 2, 3]}},
    {"slo": {"attainment_target": 1.0}}, {"gates": [{"metric": "ttft"}]},
])  # fmt: skip
def test_the_json_schema_refuses_what_the_loader_refuses(change):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(json.loads(schema_text())).validate(change)
