"""The JSON Schema of analysis.json, made from the dataclasses that are written there.

Input: `bench/records/analysis.py`: fields, types, and the comments beside them. Output: the schema, as data and text.
Does not: validate. `python -m tests.repo.write_analysis_schema` writes the published file.

1. A key without a default is required. A reader must bear keys that it does not know: within a version, some are added.
2. A number that never ended is the text "inf"; null is what was not measured or is withheld.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from typing import Any

from bench.records import analysis
from bench.records.analysis import SCHEMA_VERSION, STAGE_VERDICTS, STATIONARITY, VERDICTS, Analysis

NUMBER = {"$ref": "#/$defs/number"}
# (record, field) -> the only words there.
WORDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("Verdict", "status"): VERDICTS,
    ("StageAnalysis", "verdict"): STAGE_VERDICTS,
    ("StageAnalysis", "stationarity"): STATIONARITY,
    ("StageAnalysis", "binding_clause"): ("ttft", "tpot", "failures", "none"),
    ("Reason", "severity"): ("invalid", "fail", "warn", "info"),
    ("Capacity", "knee_kind"): ("crossing", "at_least", "below", "none"),
    ("Gate", "status"): ("pass", "fail", "invalid", "not_measured"),
    ("Hysteresis", "verdict"): ("recovers", "degraded", "undecided", "no_overload"),
    ("ErrorGroup", "layer"): ("channel", "script", "scheduler", "client"),
}
_FIELD = re.compile(r"^    (\w+): [^#]+#\s*(.+)$")
_NEXT = re.compile(r"^    (\w+): ")


def schema() -> dict[str, Any]:
    """The schema of analysis.json, draft 2020-12."""
    records = [
        kind for _, kind in inspect.getmembers(analysis, inspect.isclass)
        if dataclasses.is_dataclass(kind) and kind.__module__ == analysis.__name__ and kind is not Analysis
    ]  # fmt: skip
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://scheduler-bench.invalid/analysis.schema.json",
        "title": "analysis.json of scheduler-bench",
        "description": "Units stand in the key names (s, qps, tps, tokens, ratio). null = not measured or withheld. "
        '"inf" = did not finish. Keys are only ever added within one schema_version.',
        **_record(Analysis),
        "$defs": {
            "number": {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf"]}]},
            **{kind.__name__: _record(kind) for kind in records},
        },
    }


def schema_text() -> str:
    """The published file."""
    return json.dumps(schema(), ensure_ascii=False, indent=1) + "\n"


def _record(kind: type) -> dict[str, Any]:
    """The schema of one dataclass."""
    hints, comments = typing.get_type_hints(kind), _comments(kind)
    properties, required = {}, []
    for f in dataclasses.fields(kind):
        found = _words(kind, f.name) or _type(hints[f.name])
        text = comments.get(f.name)
        properties[f.name] = {**found, "description": text} if text else found
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            required.append(f.name)
    what = (kind.__doc__ or "").strip().splitlines()[0]
    own = {} if kind is Analysis else {"description": what}
    return {"type": "object", **own, "required": required, "properties": properties}


def _words(kind: type, name: str) -> dict[str, Any] | None:
    if (kind, name) == (Analysis, "schema_version"):
        return {"const": SCHEMA_VERSION}
    words = WORDS.get((kind.__name__, name))
    return {"enum": list(words)} if words else None


def _type(hint: Any) -> dict[str, Any]:
    """The schema of a type hint."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_type(arg) for arg in args]}
    if origin is list:
        return {"type": "array", "items": _type(args[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(args[1])}
    if dataclasses.is_dataclass(hint):
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if hint is Any:
        return {}
    known: dict[Any, dict[str, Any]] = {
        str: {"type": "string"}, bool: {"type": "boolean"}, int: {"type": "integer"}, float: NUMBER,
        type(None): {"type": "null"},
    }  # fmt: skip
    return known[hint]


def _comments(kind: type) -> dict[str, str]:
    """Field -> the comment behind it, or those on the lines before it."""
    found: dict[str, str] = {}
    before: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        text = line.strip()
        if text.startswith("#"):
            before.append(text.lstrip("# "))
            continue
        beside, field = _FIELD.match(line), _NEXT.match(line)
        if beside:
            found[beside[1]] = beside[2].strip()
        elif field and before:
            found[field[1]] = " ".join(before)
        before = []
    return found
