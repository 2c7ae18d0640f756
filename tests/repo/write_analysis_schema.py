"""Writes bench/records/analysis.schema.json from the dataclasses: `python -m tests.repo.write_analysis_schema`."""

from __future__ import annotations

from pathlib import Path

from bench.records.analysis_schema import schema_text

FILE = Path(__file__).resolve().parents[2] / "bench" / "records" / "analysis.schema.json"

if __name__ == "__main__":
    FILE.write_text(schema_text(), encoding="utf-8")
