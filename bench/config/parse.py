"""The text of a config file as plain data, with the line of every key.

Input: bytes of a JSON or YAML file.
Output: (data, marks, problems): dicts and lists, path -> (line, column), syntax problems with their place.
Does not: know the schema.

JSON is told from YAML by its first character, not by the file's name. Python's JSON reader takes NaN and
doubled keys silently; here a doubled key is a problem and NaN is left for the schema to refuse.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from bench.config.errors import Problem

MAX_BYTES = 4_000_000
MAX_DEPTH = 40
Path_ = tuple[str | int, ...]
Marks = dict[Path_, tuple[int, int]]


class _Doubled(dict[str, Any]):
    """A JSON object that remembers keys which stood in it twice."""

    doubled: list[str]


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = _Doubled(pairs)
    names = [name for name, _ in pairs]
    out.doubled = sorted({name for name in names if names.count(name) > 1}) if len(out) != len(pairs) else []
    return out


def read_text(path: Path) -> tuple[str, list[Problem]]:
    """The file's text, or the problem that it cannot be read."""

    def refuse(found: str, fix: str) -> tuple[str, list[Problem]]:
        return "", [Problem("CFG-001", str(path), found, "", fix)]

    try:
        if path.is_dir():
            return refuse("is a folder", "name the config file in it")
        with open(path, "rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        return refuse(
            f"cannot be read ({error.strerror or error})", "check the path; `bench init` writes a first config"
        )
    if len(raw) > MAX_BYTES:
        return refuse(f"is larger than {MAX_BYTES} bytes", "name the config file")
    utf16 = raw.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        return raw.decode("utf-16" if utf16 else "utf-8-sig"), []
    except UnicodeDecodeError as error:
        if utf16:
            return refuse(
                f"begins as UTF-16 text (byte order mark) and is damaged at byte {error.start}", "save it as UTF-8"
            )
    return refuse("is not UTF-8 text", "save it as UTF-8")


def parse(text: str, path: Path) -> tuple[Any, Marks, list[Problem]]:
    """(data, marks, problems) of a config text; data is None when it cannot be parsed."""
    if not text.strip():
        return (
            None,
            {},
            [
                Problem(
                    "CFG-002",
                    str(path),
                    "is empty",
                    "a JSON or YAML mapping",
                    "start from configs/scheduler_bench.json",
                )
            ],
        )
    is_json = text.lstrip()[0] in "{[" and path.suffix.lower() not in (".yaml", ".yml")
    data, problems = _parse_json(text, path) if is_json else _parse_yaml(text, path)
    if any(problem.id == "CFG-002" for problem in problems):
        return None, {}, problems
    if not isinstance(data, dict):
        return (
            None,
            {},
            [
                Problem(
                    "CFG-002",
                    str(path),
                    f"holds a {_word(data)}",
                    "a mapping of sections",
                    "start from configs/scheduler_bench.json",
                )
            ],
        )
    return data, marks(text), problems


def _word(value: Any) -> str:
    return {list: "list", str: "text", type(None): "null", bool: "boolean"}.get(type(value), "number")


def _parse_json(text: str, path: Path) -> tuple[Any, list[Problem]]:
    try:
        data = json.loads(text, object_pairs_hook=_pairs)
    except json.JSONDecodeError as error:
        return None, [_json_problem(error, text, path)]
    except (RecursionError, ValueError) as error:  # too deep; a number of thousands of digits
        return None, [
            Problem("CFG-002", str(path), f"is not valid JSON ({type(error).__name__})", "", "correct it by hand")
        ]
    problems: list[Problem] = []
    plain = _undouble(data, (), path, problems)
    return plain, problems


def _json_problem(error: json.JSONDecodeError, text: str, path: Path) -> Problem:
    before = text[: error.pos].rstrip()
    around = text[error.pos : error.pos + 1]
    hint = "correct the text there"
    if before.endswith(",") and around in "}]":
        hint = "remove the comma before the closing bracket"
    elif "double quotes" in error.msg and before.endswith(","):
        hint = "remove the comma before it, or write the next key in double quotes"
    elif around == "'":
        hint = "JSON takes double quotes only"
    elif around in ("/", "#"):
        hint = "JSON has no comments; save the file as .yaml to use them"
    elif "delimiter" in error.msg:
        hint = "a comma or colon is missing before this place"
    return Problem(
        "CFG-002",
        str(path),
        f"is not valid JSON: {error.msg[:1].lower()}{error.msg[1:]}",
        "",
        hint,
        line=error.lineno,
        column=error.colno,
    )


def _undouble(value: Any, at: Path_, path: Path, problems: list[Problem]) -> Any:
    if isinstance(value, dict):
        for name in getattr(value, "doubled", ()):
            problems.append(_doubled(path, (*at, name), None))
        return {name: _undouble(child, (*at, name), path, problems) for name, child in value.items()}
    if isinstance(value, list):
        return [_undouble(child, (*at, index), path, problems) for index, child in enumerate(value)]
    return value


def _doubled(path: Path, at: Path_, line: int | None) -> Problem:
    return Problem("CFG-003", f"{path}: {dotted(at)}", "stands twice", "each key once", "remove one of them", line=line)


class _Loader(yaml.SafeLoader):
    """YAML without dates, merges or aliases bombs: data as JSON would give it."""


# 2024-01-01 stays text: no key of ours is a date.
_Loader.yaml_implicit_resolvers = {
    char: [(tag, regex) for tag, regex in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for char, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _parse_yaml(text: str, path: Path) -> tuple[Any, list[Problem]]:
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is not None and _has_alias(node):
            return None, [
                Problem("CFG-002", str(path), "uses YAML anchors", "plain keys and values", "write the values out")
            ]
        problems: list[Problem] = []
        _doubled_yaml(node, (), path, problems)
        loader = _Loader("")
        return (None if node is None else _text_keys(loader.construct_document(node))), problems
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        return None, [
            Problem(
                "CFG-002",
                str(path),
                f"is not valid YAML: {error.problem or error.context}",
                "",
                "correct the text there",
                line=mark.line + 1 if mark else None,
                column=mark.column + 1 if mark else None,
            )
        ]
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        first = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        return None, [Problem("CFG-002", str(path), f"is not valid YAML: {first}", "", "correct it by hand")]


def _text_keys(value: Any) -> Any:
    """The data with every key as text (YAML takes `1: x` and `yes: x`), as JSON has it."""
    if isinstance(value, dict):
        return {str(name): _text_keys(child) for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_text_keys(child) for child in value]
    return value


def _has_alias(root: yaml.Node) -> bool:
    """Whether one node is used twice: an alias can make a small file endless."""
    seen: set[int] = set()
    stack: list[yaml.Node] = [root]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            return True
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            stack += [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            stack += node.value
    return False


def _doubled_yaml(node: yaml.Node | None, at: Path_, path: Path, problems: list[Problem]) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, child in node.value:
            if key.value in seen:
                problems.append(_doubled(path, (*at, str(key.value)), key.start_mark.line + 1))
            seen.add(str(key.value))
            _doubled_yaml(child, (*at, str(key.value)), path, problems)
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            _doubled_yaml(child, (*at, index), path, problems)


def marks(text: str) -> Marks:
    """(line, column) from 1 of every key and list entry; empty when they cannot be found.

    Most JSON is YAML, so one reader finds the places in both.
    """
    try:
        root = yaml.compose(text.removeprefix("\ufeff").replace("\t", " "), Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    out: Marks = {}
    stack: list[tuple[Path_, yaml.Node]] = [((), root)] if root is not None else []
    while stack:
        at, node = stack.pop()
        if len(at) > MAX_DEPTH:
            continue
        if isinstance(node, yaml.MappingNode):
            for key, child in node.value:
                spot = (*at, str(key.value))
                out[spot] = (key.start_mark.line + 1, key.start_mark.column + 1)
                stack.append((spot, child))
        elif isinstance(node, yaml.SequenceNode):
            for index, child in enumerate(node.value):
                out[(*at, index)] = (child.start_mark.line + 1, child.start_mark.column + 1)
                stack.append(((*at, index), child))
    return out


def dotted(at: Path_) -> str:
    """`scheduler.max_num_seqs`, `gates[0].value`."""
    out = ""
    for part in at:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else str(part)
    return out
