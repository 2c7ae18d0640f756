"""Rules of the analysis that the live view follows row by row, so that both say the same about the same rows.

Input: cells of a ledger row, deadlines. Output: yes or no, a limit in seconds.
Does not: import the analysis (the sender's process stays without it; `tests/load/test_live.py` compares the two).
"""

from __future__ import annotations

from bench.records.request import MANY_TOKENS

LAG_SHARE = 0.05  # of the TTFT deadline
LAG_FLOOR_S = 0.005


def lag_limit_s(ttft_deadline_s: float) -> float:
    """Largest send lag p99 of a stage that counts, in seconds; beyond it the stage is INVALID (INV-LAG)."""
    return max(LAG_SHARE * ttft_deadline_s, LAG_FLOOR_S)


def tpot_unmeasured(
    flags: str, output_tokens: int | None, reasoning_tokens: int | None, max_tokens: int | None, chunks: int | None
) -> bool:
    """Whether an answer without a TPOT is not known to be short: it does not meet the TPOT clause.

    By its usage it may have many tokens, and at least as many as it had events; without usage one event may hold as
    many as were asked for. Hidden reasoning has no gaps that could be seen.
    """
    marks = flags.split(";")
    if "tokens_estimated" in marks:
        return (max_tokens or 0) >= MANY_TOKENS
    streamed = (output_tokens or 0) - ((reasoning_tokens or 0) if "hidden_reasoning" in marks else 0)
    return max(streamed, chunks or 0) >= MANY_TOKENS
