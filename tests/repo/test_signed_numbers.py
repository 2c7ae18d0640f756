"""A number that rounds to zero is printed without a minus: signed formats have `z` (PEP 682)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SIGNED = re.compile(r":[ <>^=]?\+(?!z)[\d.,]*[efgEFG%]?\}")
PLACES = ("analysis", "bench/commands", "bench/client", "bench/records", "control", "engine", "locustfiles", "shapes")


@pytest.mark.parametrize("place", PLACES)
def test_signed_formats_know_no_negative_zero(place: str) -> None:
    found = [
        f"{path.relative_to(PROJECT)}:{number}: {hit.group()}"
        for path in sorted((PROJECT / place).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for hit in SIGNED.finditer(line)
    ]
    assert not found, "write +z instead of +: " + "; ".join(found)


def test_what_the_pattern_finds() -> None:
    assert SIGNED.search("{x:+.3f}") and SIGNED.search("{x:>+9.2%}") and SIGNED.search("{x:+g}")
    assert not SIGNED.search("{x:+z.3f}") and not SIGNED.search("{x:>+z9.2%}")
    assert f"{-1e-9:+z.4f}" == "+0.0000" and f"{-0.0:+zg}" == "+0"
