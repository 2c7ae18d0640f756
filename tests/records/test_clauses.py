"""An answer without a TPOT: may it have gaps that nobody measured? Cell by cell and as arrays, against the rule in words."""

from __future__ import annotations

import itertools

import numpy as np

from bench.records.clauses import may_have_gaps, tpot_unmeasured

COUNTS = (None, 0, 1, 7, 8, 300)  # 8 tokens are many
FLAGS = ("", "tokens_estimated", "hidden_reasoning", "burst;hidden_reasoning", "hidden_reasoning;tokens_estimated")


def in_words(flags: str, output: int | None, hidden: int | None, asked: int | None, chunks: int | None) -> bool:
    if "tokens_estimated" in flags:  # one event may hold as many as were asked for
        return asked is not None and asked >= 8
    tokens = output or 0
    if "hidden_reasoning" in flags:
        tokens -= hidden or 0
    return tokens >= 8 or (chunks is not None and chunks >= 8)  # a usage below the number of events is wrong


def test_every_row() -> None:
    cases = list(itertools.product(FLAGS, COUNTS, COUNTS, COUNTS, COUNTS))
    wanted = [in_words(*case) for case in cases]
    assert [tpot_unmeasured(*case) for case in cases] == wanted
    assert 0.2 < sum(wanted) / len(wanted) < 0.8
    absent = [[np.nan if cell is None else cell for cell in case[1:]] for case in cases]
    output, hidden, asked, chunks = np.array(absent, dtype=float).T
    marks = np.array(["hidden_reasoning" in case[0] for case in cases])
    streamed = output - np.where(marks, np.nan_to_num(hidden), 0.0)
    estimated = np.array(["tokens_estimated" in case[0] for case in cases])
    # a row of the ledger without a count of tokens has its events only
    kept = ~(np.isnan(output) & marks)
    assert may_have_gaps(estimated, asked, streamed, chunks)[kept].tolist() == np.array(wanted)[kept].tolist()
