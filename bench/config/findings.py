"""Findings of config checks, and the list of checks with the keys that they read.

Input: check functions, registered by `reads`.
Output: `run`: the findings of all checks whose keys are right.
Does not: hold a check (`checks_*.py` do), know files or lines.

A check is skipped when one of the keys it reads was wrong: a default in its place would only confuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.config.parse import Path_
from bench.config.schema import Config


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem before it has a file and a line."""

    id: str
    at: Path_
    found: str
    allowed: str = ""
    fix: str = ""


Check = Callable[[Config], Iterator[Finding]]
_CHECKS: list[tuple[tuple[str, ...], Check]] = []


def reads(*keys: str) -> Callable[[Check], Check]:
    """Registers a check with the dotted keys that it reads."""

    def register(check: Check) -> Check:
        _CHECKS.append((keys, check))
        return check

    return register


def run(config: Config, bad: set[Path_]) -> list[Finding]:
    """Findings of all checks whose keys are right."""
    wrong = {tuple(str(part) for part in at) for at in bad}
    out: list[Finding] = []
    for keys, check in _CHECKS:
        paths = [tuple(key.split(".")) for key in keys]
        touched = any(path[: len(at)] == at or at[: len(path)] == path for path in paths for at in wrong if at)
        if not touched:
            out += check(config)
    return out
