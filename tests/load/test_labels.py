"""Tenant and class reach a separately started engine when the config asks for it, and nobody else by default."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from bench.commands.engine_process import start_engine
from bench.config.schema import Config

from .conftest import config_with

GROUPS = {"tenants": [{"name": "acme", "share": 0.5}, {"name": "zeta", "share": 0.5}],
          "classes": [{"name": "chat", "share": 0.5}, {"name": "batch", "share": 0.5}]}  # fmt: skip


@pytest.mark.parametrize(("send_labels", "named"), [(True, True), (None, False)])
def test_a_separately_started_engine_is_told_when_asked_for(
    run_locust: Any, config_file: Path, tmp_path: Path, send_labels: bool | None, named: bool
) -> None:
    """Second path: the engine's own record. Its key is still sent: only the embedded engine is owed none."""
    key = tmp_path / "key"
    key.write_text("sk-of-the-engine", encoding="utf-8")
    config = config_with(engine={"embedded": False}, target={"send_labels": send_labels, "api_key_file": str(key)}, **GROUPS)
    path = tmp_path / "labels.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    with start_engine(config_file, api_key_file=key) as engine:
        ran = run_locust("--bench-config", str(path), "--qps-stages", "30", "--stage-duration", "2", url=engine.base_url)
        with urllib.request.urlopen(engine.base_url + "/debug/requests", timeout=10) as answer:
            truth = {r["request_id"]: r for r in map(json.loads, answer.read().decode().splitlines())}
    rows = ran.rows()
    assert len(rows) > 20 and {row["status"] for row in rows} == {"ok"}, ran.err
    assert {row["tenant"] for row in rows} == {"acme", "zeta"} and {row["request_class"] for row in rows} == {"chat", "batch"}
    for row in rows:
        told = truth[row["request_id"]]["tenant"], truth[row["request_id"]]["request_class"]
        assert told == ((row["tenant"], row["request_class"]) if named else (None, None))


@pytest.mark.parametrize(
    ("embedded", "send_labels", "url", "named"),
    [
        (True, None, "http://127.0.0.1:8000", True),
        (True, None, "http://localhost:8000/v1", True),
        (True, None, "http://[::1]:8000", True),
        (True, None, "https://api.example.com/v1", False),  # --base-url or --host in place of the embedded engine
        (True, None, "https://127.example.com/v1", False),
        (False, None, "http://127.0.0.1:8000", False),
        (False, True, "https://api.example.com/v1", True),
        (True, False, "http://127.0.0.1:8000", False),
    ],
)
def test_who_is_told_by_default(embedded: bool, send_labels: bool | None, url: str, named: bool) -> None:
    from locustfiles.labels import wanted

    config = Config.model_validate({"base_url": url, "engine": {"embedded": embedded}, "target": {"send_labels": send_labels}})
    assert wanted(config) is named
