"""The times of a stage's record."""

from __future__ import annotations

import pytest

from bench.records.stage import drain_time_s


@pytest.mark.parametrize(
    ("done_s", "end_s", "expected"),
    [
        (12.5, 12.0, 0.5),
        (12.0, 12.0, 0.0),
        (9.0, 12.0, 0.0),  # no worker was ready: given up 3 s before its planned end
    ],
)
def test_a_drain_is_never_negative(done_s: float, end_s: float, expected: float) -> None:
    assert drain_time_s(done_s, end_s) == expected
