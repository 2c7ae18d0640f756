"""Which arrivals of a plan are one master's, when several masters share the plan.

Arrival i is of part i modulo the number of parts, and inside a part of the workers in turn. So worker w of part p
(from 0) has the stripe p + parts * w out of parts * workers: numbers that no other part uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST = 1000


@dataclass(frozen=True)
class Part:
    """Part `index` (from 0) of `of`."""

    index: int = 0
    of: int = 1

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.of}"

    def stripe(self, worker: int) -> int:
        """The stripe of the part's worker with this number; there are `stripes(workers)` of them."""
        return self.index + self.of * worker

    def stripes(self, workers: int) -> int:
        """Stripes that the whole plan would have, were all parts as wide as this one."""
        return self.of * workers

    def count(self, planned: int) -> int:
        """How many of so many arrivals are of this part."""
        return len(range(self.index, planned, self.of))


WHOLE = Part()


def parse_part(text: str) -> Part:
    """`2/4` is the second of four parts; empty is the whole plan. Raises ValueError."""
    if not text:
        return WHOLE
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text.strip())
    number, of = (int(match[1]), int(match[2])) if match else (0, 0)
    if not (2 <= of <= MOST and 1 <= number <= of):
        raise ValueError(f"--part is {text!r}; which part of how many, such as 1/4, with 2 to {MOST} parts")
    return Part(number - 1, of)


def part_of(said: Mapping[str, Any]) -> Part:
    """The part that `run.json` names under `part`; empty is the whole plan."""
    return Part(said["part"] - 1, said["of"]) if said else WHOLE
