"""Schema errors in words: which key, what was found, what is allowed, what to do.

Input: pydantic error details and the data they are about.
Output: `Finding`s with ids of `errors.PROBLEMS`; the nearest known key for an unknown one.
Does not: show a text longer than 60 characters, or one that looks like a key.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from typing import Any

from pydantic import BaseModel

from bench.config.errors import PROBLEMS
from bench.config.findings import Finding
from bench.config.parse import Path_, dotted
from bench.config.schema import Config


def severity(problem_id: str) -> str:
    """`error` or `warning`."""
    return PROBLEMS[problem_id][0]


def show(value: Any) -> str:
    """A value for a message: short, and never a text that could be a key."""
    if isinstance(value, str):
        # One long word, or a shorter one with digits: it could be a key.
        one_word = re.fullmatch(r"[\w\-.+/=]+", value) is not None
        if one_word and (len(value) >= 24 or (len(value) >= 12 and re.search(r"\d", value))):
            return f"a text of {len(value)} characters"
        return f'"{value}"' if len(value) <= 60 else f'"{value[:57]}..."'
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, dict):
        return f"a mapping of {len(value)} keys"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return repr(value)[:60]


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Models inside an annotation such as `list[Gate]` or `Annotated[list[Gate], ...]`."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for arg in typing.get_args(annotation) for model in models_in(arg)]


def model_at(at: Path_) -> type[BaseModel] | None:
    """The section that a path leads to, or None when it leads elsewhere."""
    model: type[BaseModel] = Config
    for part in at:
        if isinstance(part, int):
            continue
        info = model.model_fields.get(part)
        inner = models_in(info.annotation) if info is not None else []
        if not inner:
            return None
        model = inner[0]
    return model


def known_keys() -> list[str]:
    """Every key of the schema in dotted form, list entries without an index."""
    out: list[str] = []
    for name, info in Config.model_fields.items():
        inner = models_in(info.annotation)
        out += [f"{name}.{key}" for key in inner[0].model_fields] if inner else []
        out.append(name)
    return out


def nearest(at: Path_) -> str | None:
    """The known key that was probably meant, dotted from the top."""
    section = model_at(at[:-1])
    name = str(at[-1])
    siblings = list(section.model_fields) if section is not None else []
    by_leaf: dict[str, str] = {}
    for key in known_keys():
        by_leaf.setdefault(key.rpartition(".")[2], key)
    plain = name.lower().replace("-", "_")
    if plain in by_leaf and plain not in siblings:  # the right word in the wrong section
        return by_leaf[plain]
    lower = {key.lower(): key for key in siblings}
    near = difflib.get_close_matches(plain, lower, n=1, cutoff=0.6)
    if near:
        return dotted((*at[:-1], lower[near[0]]))
    near = difflib.get_close_matches(plain, by_leaf, n=1, cutoff=0.75)
    return by_leaf[near[0]] if near else None


_WORDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "int_parsing_size": "a smaller whole number",
}
_BOUNDS = {
    "greater_than": ("gt", "above {}"),
    "greater_than_equal": ("ge", "at least {}"),
    "less_than": ("lt", "below {}"),
    "less_than_equal": ("le", "at most {}"),
}


def _value_at(data: Any, at: Path_) -> Any:
    for part in at:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def cut(at: Path_, data: Any) -> Path_:
    """The part of the data to drop so that the rest can be checked: an entry of a list takes the list."""
    for end, part in enumerate(at):
        if isinstance(part, int):
            return at[:end]
    if _value_at(data, at) is None and len(at) > 1 and at[-1] not in (_value_at(data, at[:-1]) or {}):
        return at[:-1]  # a missing key: its section goes
    return at


def real_path(loc: tuple[str | int, ...], data: Any) -> Path_:
    """pydantic's location without the names of union branches and `[key]` marks."""
    out: list[str | int] = []
    node = data
    for part in loc:
        if (
            isinstance(node, dict)
            and part in node
            or isinstance(node, list)
            and isinstance(part, int)
            and part < len(node)
        ):
            node = node[part]
        elif isinstance(node, dict) and part == loc[-1] and isinstance(part, str) and part != "[key]":
            out.append(part)  # a missing key
            break
        else:
            break
        out.append(part)
    return tuple(out)


def finding(detail: Any, data: Any) -> tuple[Path_, Finding | None]:
    """(path, finding) of one pydantic error."""
    kind, context = detail["type"], detail.get("ctx", {})
    at = real_path(detail["loc"], data)
    value = _value_at(data, at)
    if kind == "extra_forbidden":
        near = nearest(at)
        section = model_at(at[:-1])
        listed = ", ".join(section.model_fields) if section is not None else ""
        fix = f"did you mean {near}?" if near else "remove it"
        return at, Finding("CFG-004", at, "is not a known key", "" if near else f"known here: {listed}", fix)
    if kind == "missing":
        return at, Finding("CFG-009", at, "is missing", "it has no default", "add it")
    if kind == "literal_error":
        words = re.findall(r"'([^']*)'", context.get("expected", ""))
        near = [word for word in words if sorted(word) == sorted(str(value))]  # =< for <=
        near = near or difflib.get_close_matches(str(value).lower().replace("-", "_"), words, n=1)
        return at, Finding(
            "CFG-007", at, f"is {show(value)}", f"one of {', '.join(words)}", f"did you mean {near[0]}?" if near else ""
        )
    if kind == "finite_number":
        return at, Finding("CFG-008", at, f"is {value!r}", "a finite number", "write a number")
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return at, Finding(
            "CFG-006",
            at,
            f"is {show(value)}",
            words.format(f"{context[name]:g}" if isinstance(context[name], float) else context[name]),
            "change it",
        )
    if kind in ("too_short", "too_long"):
        name = "min_length" if kind == "too_short" else "max_length"
        return at, Finding(
            "CFG-006",
            at,
            f"holds {context['actual_length']} entries",
            f"{'at least' if name == 'min_length' else 'at most'} {context[name]}",
            "change the list",
        )
    if kind in ("string_too_short", "string_too_long"):
        found = "is empty" if value == "" else f"is a text of {len(value) if isinstance(value, str) else 0} characters"
        return at, Finding(
            "CFG-006",
            at,
            found,
            f"{context.get('min_length', context.get('max_length'))} characters",
            "change or remove it",
        )
    words = _WORDS.get(kind, "another type")
    fix = ""
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type"):
        fix = (
            "remove the quotes"
            if re.fullmatch(r"\s*(-?\d+(\.\d+)?([eE][+-]?\d+)?|true|false)\s*", value)
            else "write it without a unit"
        )
    elif kind in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        fix = f"write {int(value)}"
    elif value is None:
        fix = "remove the key to get the default"
    return at, Finding("CFG-005", at, f"is {show(value)}", words, fix)
