"""How many arrivals send a prompt of the user's file that the run had sent before: a prefix cache can help these.

Input: the checked rows of a run. Output: a share. Does not: know the file, or what the service's cache did (the flag
`cached` says that).

A prompt counts as sent before when an arrival of the run with an earlier intended time, of any stage or phase, sent the
same line; arrivals that were never sent count on neither side.
"""

from __future__ import annotations

import numpy as np

from analysis.load import UNSENT
from analysis.row_checks import Checked


def repeated_share(checked: Checked, window: np.ndarray) -> float:
    """Share of the sent arrivals `window` (row numbers) whose line had been sent before; 0 when prompts are made."""
    line = checked.ledger["prompt_line"]
    if not np.isfinite(line[window]).any():
        return 0.0
    sent = np.flatnonzero(np.isfinite(line) & (checked.status != UNSENT))
    mine = np.intersect1d(window, sent)
    if not len(mine):
        return 0.0
    order = sent[np.argsort(checked.ledger["intended_s"][sent], kind="stable")]
    _, first = np.unique(line[order], return_index=True)
    return float(np.count_nonzero(~np.isin(mine, order[first])) / len(mine))
