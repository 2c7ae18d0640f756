"""A running load is stopped by the ceilings of its config."""
from __future__ import annotations

import pytest

from bench.config.limits import passed_limit

PRICES = {"price_per_million_input_tokens": 2.0, "price_per_million_output_tokens": 10.0}


@pytest.mark.parametrize(
    ("limits", "sent", "tokens_in", "tokens_out", "elapsed_s", "said"),
    [
        ({}, 10**9, 10**9, 10**9, 1e9, ""),
        ({"max_requests": 100}, 100, 0, 0, 0, ""),  # the plan's last request
        ({"max_requests": 100}, 101, 0, 0, 0, "limits.max_requests is 100, requests sent: 101"),
        ({"max_tokens": 1000}, 1, 400, 601, 0, "limits.max_tokens is 1000, tokens used: 1001"),
        # 1e6 in at 2 + 0.1e6 out at 10 = 3 per million = 3.0
        ({"max_cost": 2.99, **PRICES}, 1, 1_000_000, 100_000, 0, "limits.max_cost is 2.99, cost so far: 3"),
        ({"max_cost": 3.01, **PRICES}, 1, 1_000_000, 100_000, 0, ""),
        ({"max_cost": 1.0}, 1, 10**9, 10**9, 0, ""),  # no price: nothing to count
        ({"max_duration_sec": 60.0}, 1, 0, 0, 60.5, "limits.max_duration_sec is 60, seconds run: 60.5"),
    ],
)
def test_passed_limit(
    limits: dict[str, float], sent: int, tokens_in: int, tokens_out: int, elapsed_s: float, said: str
) -> None:
    assert passed_limit(limits, sent, tokens_in, tokens_out, elapsed_s) == said
