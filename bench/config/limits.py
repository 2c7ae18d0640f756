"""The ceilings of a run: requests, tokens, money and time, against what a plan will send.

Input: `Limits` and an `Expectation` (bench.workload.expect makes one from a plan).
Output: problems CFG-041, one for each ceiling that the plan exceeds.
Does not: count what was sent; who sends compares that with the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.config.errors import Problem
from bench.config.schema import Config, Limits


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a plan sends, to the last request: seeds decide it before the run."""

    requests: int
    input_tokens: int  # asked prompt lengths; the service may count a little differently
    output_tokens: int  # sum of max_tokens: an upper bound of the answers
    arrivals_s: float  # all stages without drains
    longest_s: float  # all stages with each drain at its limit

    @property
    def tokens(self) -> int:
        """Input and output tokens together."""
        return self.input_tokens + self.output_tokens


def cost(limits: Limits, input_tokens: int, output_tokens: int) -> float | None:
    """Money for so many tokens; None when no price is given; a missing one of two counts as 0."""
    prices = (limits.price_per_million_input_tokens, limits.price_per_million_output_tokens)
    if prices == (None, None):
        return None
    return ((prices[0] or 0.0) * input_tokens + (prices[1] or 0.0) * output_tokens) / 1e6


def limit_problems(config: Config, expected: Expectation) -> list[Problem]:
    """One CFG-041 for each of limits.* that the plan exceeds; empty when it may start."""
    limits = config.limits
    money = cost(limits, expected.input_tokens, expected.output_tokens)
    rows = (
        ("max_requests", limits.max_requests, expected.requests, "requests"),
        ("max_tokens", limits.max_tokens, expected.tokens, "tokens"),
        ("max_cost", limits.max_cost, money, "of money"),
        ("max_duration_sec", limits.max_duration_sec, expected.longest_s, "s with all drains at their limit"),
    )
    problems = []
    for name, ceiling, planned, unit in rows:
        if ceiling is not None and planned is not None and planned > ceiling:
            shown = f"{planned:,.2f}" if isinstance(planned, float) else f"{planned:,}"
            problems.append(
                Problem(
                    "CFG-041",
                    f"limits.{name}",
                    f"is {ceiling:g}, the plan has {shown} {unit}",
                    f"plans up to {ceiling:g}",
                    "run fewer, slower or shorter stages, or raise the limit",
                )
            )
    return problems


def passed_limit(limits: dict[str, Any], sent: int, input_tokens: int, output_tokens: int, elapsed_s: float) -> str:
    """The first ceiling that a running load has passed, as a sentence; empty when none is.

    limits: the section as a dict; a missing price counts as 0.
    """
    money = (
        input_tokens * (limits.get("price_per_million_input_tokens") or 0.0)
        + output_tokens * (limits.get("price_per_million_output_tokens") or 0.0)
    ) / 1e6
    checks = (
        ("max_requests", sent, "requests sent"),
        ("max_tokens", input_tokens + output_tokens, "tokens used"),
        ("max_cost", money, "cost so far"),
        ("max_duration_sec", elapsed_s, "seconds run"),
    )
    for name, value, words in checks:
        ceiling = limits.get(name)
        if ceiling is not None and value > ceiling:  # a plan that just reaches it may run to its end
            return f"limits.{name} is {ceiling:g}, {words}: {value:.6g}"
    return ""
