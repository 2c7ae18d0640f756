"""Rules on single rows that the live view and the analysis share, so that both say the same about the same rows.

Input: cells of a ledger row, or arrays of them; deadlines. Output: yes or no, a limit in seconds.
Does not: read a ledger or count.
"""

from __future__ import annotations

from typing import Any

from bench.records.request import MANY_TOKENS

LAG_SHARE = 0.05  # of the TTFT deadline
LAG_FLOOR_S = 0.005


def lag_limit_s(ttft_deadline_s: float) -> float:
    """Largest send lag p99 that leaves the TTFT clause meaningful, s; beyond it a stage is INVALID (INV-LAG)."""
    return max(LAG_SHARE * ttft_deadline_s, LAG_FLOOR_S)


def may_have_gaps(estimated: Any, max_tokens: Any, streamed_tokens: Any, chunks: Any) -> Any:
    """Whether an answer may have many gaps between its tokens: without a TPOT it does not meet the TPOT clause.

    An answer of a few tokens has no TPOT and meets it. By its usage it may have many tokens, and at least as many as
    it had events; without usage (`estimated`) one event may hold as many as were asked for. Cells or arrays alike; an
    absent count is 0 or NaN.
    """
    told = (streamed_tokens >= MANY_TOKENS) | (chunks >= MANY_TOKENS)
    return (estimated & (max_tokens >= MANY_TOKENS)) | ((estimated ^ True) & told)


def tpot_unmeasured(
    flags: str, output_tokens: int | None, reasoning_tokens: int | None, max_tokens: int | None, chunks: int | None
) -> bool:
    """`may_have_gaps` of a row's own cells. Hidden reasoning has no gaps that could be seen."""
    marks = flags.split(";")
    hidden = (reasoning_tokens or 0) if "hidden_reasoning" in marks else 0
    return may_have_gaps("tokens_estimated" in marks, max_tokens or 0, (output_tokens or 0) - hidden, chunks or 0)
