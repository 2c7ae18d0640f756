"""What the pages of docs/evidence have in common: tables, the word met or missed beside a figure, sections.

Input: figures. Output: lines of Markdown.
Does not: measure.

1. A figure that an acceptance number exists for is printed with that number and one of two words: met or missed.
2. A page is rewritten section by section; sections that were not run again stay as they were, with their date.
"""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any


def today() -> str:
    """The date of a run, UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def table(head: list[str], rows: list[list[Any]]) -> list[str]:
    """Lines of a Markdown table, with an empty line behind it."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows] + [""]


def share(value: float) -> str:
    """A relative error in percent with its sign; no negative nought."""
    return f"{round(value * 100, 2) + 0.0:+.2f} %"


def met(holds: bool) -> str:
    """The word of a judged figure; a missed one is set in bold."""
    return "met" if holds else "**missed**"


def at_most(value: float, limit: float, form: str = "{:.2%}") -> str:
    """`1.28% (at most 1.00%: missed)`; a value that is no number misses."""
    return f"{form.format(value)} (at most {form.format(limit)}: {met(value <= limit)})"


def at_least(value: float, limit: float, form: str = "{:.2f}") -> str:
    """`0.88 (at least 0.90: missed)`; a value that is no number misses."""
    return f"{form.format(value)} (at least {form.format(limit)}: {met(value >= limit)})"


def standard_error(share_: float, n: int) -> float:
    """Of a share counted over n; at 0 and 1 as if half a case more had been seen."""
    p = (share_ * n + 0.5) / (n + 1)
    return math.sqrt(p * (1 - p) / n)


def replace_section(text: str, heading: str, lines: list[str]) -> str:
    """`text` with the section that begins with the line `heading` replaced by `lines`; at the end when it is new.

    `heading` may be the beginning of that line, up to the end of a word. A section ends before the next heading of the
    same or a higher level. `lines` begin with their own heading, which may go on otherwise.
    """
    level = len(heading) - len(heading.lstrip("#"))
    old = text.rstrip("\n").split("\n")
    new = "\n".join(lines).strip("\n").split("\n")
    starts = [i for i, line in enumerate(old) if line.startswith(heading) and not line[len(heading) :][:1].isalnum()]
    if not starts:
        return "\n".join([*old, "", *new]) + "\n"
    end = next(
        (i for i in range(starts[0] + 1, len(old)) if old[i].startswith("#") and _level(old[i]) <= level), len(old)
    )
    return "\n".join([*old[: starts[0]], *new, *([""] if end < len(old) else []), *old[end:]]) + "\n"


def _level(line: str) -> int:
    return len(line) - len(line.lstrip("#"))


def rewrite(path: Path, head: list[str], sections: dict[str, list[str]]) -> None:
    """Write the page: `head` anew, the given sections (heading -> lines) replaced, the others kept."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    kept = old[old.index("\n## ") + 1 :] if "\n## " in old else ""
    text = "\n".join(head).strip("\n") + "\n\n" + kept
    for heading, lines in sections.items():
        text = replace_section(text, heading, lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
