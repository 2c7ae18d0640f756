"""`write_all(run_dir, analysis)`: every file that a finished run shows to people and machines.

Input: a run folder and its analysis. Output: report.html, summary.json,
summary.md, junit.xml in that folder; summary.md is appended to the file
named by `GITHUB_STEP_SUMMARY` when that is set.
Does not: analyse.

1. A file is written beside its place and moved, so a reader never sees half of one.
2. One output that cannot be made does not hide the others: they are written
   first, then the error is raised.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.records.analysis import Analysis
from reports.html import render
from reports.junit import junit
from reports.summary import markdown, summary

STEP_SUMMARY_LIMIT = 1_000_000  # bytes; GitHub drops a step's summary above 1,024 kB


MACHINE = ("analysis.json", "requests.csv", "stages.csv", "run.json")  # what else a program may read, if it is there


def write_text(path: Path, text: str) -> Path:
    """Write `text` to `path` in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def file_name(name: str, lang: str, beside: bool = True) -> str:
    """`report.html`, or `report.zh-CN.html` for a translation that stands beside the English file."""
    stem, _, ending = name.rpartition(".")
    return f"{stem}.{lang}.{ending}" if beside and lang != "en" else name


def typed(folder: Path) -> str:
    """The folder as one types it here: from the current folder where it lies below it, else as it was given."""
    try:
        return str(folder.resolve().relative_to(Path.cwd().resolve()))
    except (ValueError, OSError):
        return str(folder)


def other_page(run_dir: Path, page: str) -> str:
    """The name of the same page in the other language, where it lies beside `page`; else an empty text."""
    pair = ("report.html", file_name("report.html", "zh-CN"))
    other = pair[1 - pair.index(page)] if page in pair else ""
    return other if other and (run_dir / other).exists() else ""


def write_all(
    run_dir: Path, analysis: Analysis, *, lang: str = "en", beside: bool = False, env: Mapping[str, str] | None = None,
    comparison: dict[str, Any] | None = None,
) -> list[Path]:  # fmt: skip
    """The paths written, the page last. Raises OSError where a file cannot be written.

    `comparison`: the content of compare.json, or {"refused": ...}, for the page's own section.
    `beside`: texts in another language than English get its name, so that they overwrite no English one.
    """
    env = os.environ if env is None else env
    page, text = (file_name(name, lang, beside) for name in ("report.html", "summary.md"))
    machine = ("summary.json", text, "junit.xml", *MACHINE)
    makers: list[tuple[str, Callable[[], str]]] = [
        ("summary.json", lambda: json.dumps(summary(analysis), ensure_ascii=False, indent=1, allow_nan=False) + "\n"),
        (text, lambda: markdown(analysis, lang=lang)),
        ("junit.xml", lambda: junit(analysis)),
        (page, lambda: render(analysis, lang=lang, comparison=comparison, folder=typed(run_dir),
                              beside=[name for name in machine if (run_dir / name).exists()],
                              other=other_page(run_dir, page))),
    ]
    written: list[Path] = []
    failure: Exception | None = None
    for name, make in makers:
        try:
            written.append(write_text(run_dir / name, make()))
        except Exception as error:  # kept and raised below, after the other outputs
            failure = failure or error
    append_step_summary(run_dir / text, env)
    if failure is not None:
        raise failure
    return written


def append_step_summary(summary_md: Path, env: Mapping[str, str]) -> None:
    """Append summary.md to the CI's step summary, if there is one and it still has room."""
    target = env.get("GITHUB_STEP_SUMMARY")
    if not target or not summary_md.exists():
        return
    path, text = Path(target), summary_md.read_text(encoding="utf-8")
    used = path.stat().st_size if path.exists() else 0
    if used + len(text.encode("utf-8")) > STEP_SUMMARY_LIMIT:
        return
    with path.open("a", encoding="utf-8") as out:
        out.write(text + "\n")
