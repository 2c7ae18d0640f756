"""Whether a value can stand in the body of a request as it is: JSON libraries differ in what they take.

Input: a value that was read from JSON or YAML. Output: the place in it that cannot be sent, and why.
Does not: know which fields a service takes.

Python reads more than the client's writer writes: whole numbers of any length, 1e999 as infinity (written as null),
halves of surrogate pairs, any depth. Such a value would end a request before it is sent, or change it unseen.
"""

from __future__ import annotations

import math
from typing import Any

INT_LOW, INT_HIGH = -(1 << 63), (1 << 64) - 1
MAX_DEPTH = 200  # lists and objects within each other; the writer ends at 254
ALLOWED = "texts of whole characters, finite numbers, whole numbers of at most 64 bits, true, false, null"

Place = tuple[str | int, ...]


def body_fault(value: Any) -> tuple[Place, str] | None:
    """(place within `value`, what is wrong there) of the first thing that cannot be sent as it is; None without one."""
    stack: list[tuple[Place, Any]] = [((), value)]
    while stack:
        at, node = stack.pop()
        if isinstance(node, (dict, list)) and len(at) > MAX_DEPTH:
            return (), f"is nested more than {MAX_DEPTH} deep"
        if isinstance(node, dict):
            for name in node:
                if not isinstance(name, str):
                    return at, "has a key that is no text"
                if _is_half(name):
                    return at, "has a key with half a character (a lone surrogate)"
            stack += [((*at, name), child) for name, child in reversed(node.items())]
        elif isinstance(node, list):
            stack += [((*at, index), child) for index, child in reversed(list(enumerate(node)))]
        elif wrong := _wrong(node):
            return at, wrong
    return None


def _wrong(node: Any) -> str:
    if node is None or isinstance(node, bool):
        return ""
    if isinstance(node, str):
        return "holds half a character (a lone surrogate)" if _is_half(node) else ""
    if isinstance(node, int):
        return "" if INT_LOW <= node <= INT_HIGH else "is a whole number of more than 64 bits"
    if isinstance(node, float):
        return "" if math.isfinite(node) else "is no finite number (JSON has none, and 1e999 is too large)"
    return f"is of a kind that JSON does not have ({type(node).__name__})"


def _is_half(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)


def shown_place(root: str, at: Place) -> str:
    """`root.name[0]`, cut where it is long."""
    text = root + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at)
    return ascii(text)[1:-1][:120]
