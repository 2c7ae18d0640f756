"""Failures grouped by code and stage, each with its layer and one sample line.

Input: the checked ledger. Output: `ErrorGroup`s, largest first.
Does not: read the whole text of the ledger; one line per group is fetched.
"""
from __future__ import annotations

import numpy as np

from analysis.load import OK, UNSENT, read_lines
from analysis.row_checks import Checked
from bench.records.analysis import ErrorGroup
from bench.records.request import STATUSES

# Prefix of a code -> layer. The table of all codes is in bench/client/outcome.py.
LAYERS = {"CH": "channel", "SC": "script", "SV": "scheduler", "CL": "client"}
MAX_GROUPS = 400


def layer_of(code: str, status: int) -> str:
    """Layer of a code by its prefix; by the status when a row has no code."""
    prefix = code.split("-")[0]
    if prefix in LAYERS:
        return LAYERS[prefix]
    return "client" if status == UNSENT else "scheduler" if STATUSES[status] == "rejected" else "channel"


def error_groups(checked: Checked) -> list[ErrorGroup]:
    """One group per (stage, code); rows without a code are grouped by their status."""
    ledger, status = checked.ledger, checked.status
    failed = np.flatnonzero(status != OK)
    if not len(failed):
        return []
    code = ledger.codes["code"][failed].astype(np.int64)
    key = (ledger["stage"][failed].astype(np.int64) << 24) + ((code + 1) << 4) + status[failed]
    unique, first, inverse, count = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    begin = np.full(len(unique), np.inf)
    end = np.full(len(unique), -np.inf)
    np.minimum.at(begin, inverse, ledger["intended_s"][failed])
    np.maximum.at(end, inverse, ledger["intended_s"][failed])
    order = np.argsort(count)[::-1][:MAX_GROUPS]
    text = read_lines(ledger, [int(failed[first[k]]) for k in order])
    groups = []
    for k in order:
        row = int(failed[first[k]])
        full = text.get(row, {})
        index = int(ledger.codes["code"][row])
        name = ledger.names["code"][index] if index >= 0 else ""
        kind = full.get("error_kind") or STATUSES[int(status[row])]
        groups.append(
            ErrorGroup(
                layer=layer_of(name, int(status[row])),
                code=name or STATUSES[int(status[row])].upper(),
                error_kind=kind,
                stage=int(ledger["stage"][row]),
                count=int(count[k]),
                first_s=float(begin[k]),
                last_s=float(end[k]),
                sample=full.get("detail", "")[:200],
            )  # fmt: skip
        )
    return groups
