"""The tables of `docs/config.md` and the file `configs/schema.json`, written from the schema.

Input: the pydantic models and `errors.PROBLEMS`.
Output: Markdown and JSON text; `tests/config/test_documents.py` compares them with the tracked files.
Does not: write files.
"""

from __future__ import annotations

import json
from typing import Any

from bench.config.errors import PROBLEMS
from bench.config.schema import json_schema


def schema_text() -> str:
    """The text of `configs/schema.json`."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def _allowed(spec: dict[str, Any]) -> str:
    """Type and bounds of one key in words."""
    if "anyOf" in spec:
        parts = [_allowed(option) for option in spec["anyOf"] if option.get("type") != "null"]
        return " or ".join(parts)
    if "enum" in spec:
        return ", ".join(f"`{word}`" for word in spec["enum"])
    if "const" in spec:
        return f"`{spec['const']}`"
    kind = {
        "integer": "whole number",
        "number": "number",
        "boolean": "`true`, `false`",
        "string": "text",
        "object": "mapping",
        "array": "list",
    }.get(spec.get("type", ""), "any value")
    bounds = [
        f"{sign} {spec[name]:g}"
        for name, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
        if name in spec and not (spec[name] >= 1e6 and name == "maximum")
    ]
    if kind == "list" and spec.get("items", {}).get("type") in ("integer", "number"):
        size = (
            f"{spec['minItems']}"
            if spec.get("minItems") == spec.get("maxItems")
            else f"{spec.get('minItems', 0)} or more"
        )
        return f"list of {size}: {_allowed(spec['items'])}"
    return kind + (" " + ", ".join(bounds) if bounds else "")


def _default(spec: dict[str, Any], required: bool, fallback: Any) -> str:
    if required:
        return "required"
    value = spec.get("default", fallback)
    return "" if value is None else f"`{json.dumps(value)}`"


def key_tables() -> str:
    """Markdown: one table of keys for each section."""
    from bench.config.explain import models_in
    from bench.config.schema import Config

    whole = json_schema()
    out: list[str] = []
    top = {name: spec for name, spec in whole["properties"].items() if name in ("model", "base_url")}
    out.append(_table("top level", "who is asked", top, set(), Config().model_dump(mode="json")))
    for name, info in Config.model_fields.items():
        inner = models_in(info.annotation)
        if not inner:
            continue
        schema = inner[0].model_json_schema()
        defaults = {
            key: field.get_default(call_default_factory=True)
            for key, field in inner[0].model_fields.items()
            if not field.is_required()
        }
        listed = "[ ]" if name in ("gates", "classes", "tenants") else ""
        out.append(
            _table(
                f"{name}{listed}",
                info.description or "",
                schema["properties"],
                set(schema.get("required", ())),
                defaults,
            )
        )
    return "\n".join(out)


def _table(title: str, text: str, keys: dict[str, Any], required: set[str], defaults: dict[str, Any]) -> str:
    lines = [
        f"### {title}",
        "",
        f"{text[:1].upper()}{text[1:]}.",
        "",
        "| key | unit | default | allowed | meaning |",
        "|---|---|---|---|---|",
    ]
    for name, spec in keys.items():
        default = _default(spec, name in required, defaults.get(name))
        cells = (f"`{name}`", spec.get("unit", ""), default, _allowed(spec), spec.get("description", ""))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def problem_table() -> str:
    """Markdown: every problem id with its severity and meaning."""
    rows = [f"| {name} | {severity} | {text} |" for name, (severity, text) in PROBLEMS.items()]
    return "\n".join(["| id | severity | meaning |", "|---|---|---|", *rows, ""])
