"""Locust's stats table of a run folder against the ledger, and alone.

Input: a run folder and its checked rows. Output: the `csv_check` object of analysis.json.
Does not: parse or compare (`locust_csv.py` does).
"""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis import load, locust_csv
from analysis.row_checks import Checked
from bench.records.ledger import LOCUST_STATS
from bench.records.stage import StageRow


def check_csv(run_dir: Path, checked: Checked, rows: list[StageRow]) -> dict[str, Any]:
    """Locust's stats table of the folder against the ledger."""
    path = run_dir / LOCUST_STATS
    if not path.is_file():
        return {"present": False, "ok": None, "note": "there is no locust_stats.csv in the folder"}
    table = locust_csv.read_stats(path)
    # Statistics that a lost worker had not sent are gone, its rows need not be; that stage is INVALID by its mark.
    whole = [row for row in rows if "worker_lost" not in row.marks]
    lossy = {row.name for row in rows if "worker_lost" in row.marks}
    table = replace(table, rows=[line for line in table.rows if line.name not in lossy])
    return locust_csv.compare(table, csv_figures(checked, whole))


def csv_figures(checked: Checked, rows: list[StageRow]) -> list[locust_csv.LedgerFigures]:
    """Exact figures per stage and kind of row, over all phases, as Locust counts them."""
    ledger = checked.ledger
    figures = []
    for row in rows:
        mine = (ledger["stage"] == row.stage) & (ledger["repeat"] == row.repeat)
        ok = mine & (checked.status == load.OK)
        total, failed = int(mine.sum()), int(mine.sum() - ok.sum())
        # A failed request is logged with the time until it ended; one that was never sent has no time.
        waits = ledger["done_s"][mine & ~ok] - ledger["intended_s"][mine & ~ok]
        values = np.concatenate([ledger["e2e_s"][ok], waits])
        figures.append(_figure(row.name, "E2E", total, failed, values))
        for kind, column in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")):
            x = ledger[column][ok]
            x = x[np.isfinite(x)]
            figures.append(_figure(row.name, kind, len(x), 0, x))
    return figures


def _figure(name: str, kind: str, requests: int, failures: int, values: np.ndarray) -> locust_csv.LedgerFigures:
    values = np.sort(values[np.isfinite(values)])
    exact = {}
    if len(values):
        exact = {
            c: float(values[locust_csv.locust_rank(len(values), p)]) for c, p in locust_csv.PERCENTILE_COLUMNS.items()
        }
    mean = float(values.mean()) if len(values) else None
    return locust_csv.LedgerFigures(name, kind, requests, failures, mean, exact)


def csv_only_report(run_dir: Path) -> dict[str, Any]:
    """What Locust's CSV alone can say, for a run made by plain `locust --csv`; raises LedgerError without one."""
    candidates = [run_dir] if run_dir.is_file() else sorted(run_dir.glob("*_stats.csv"))
    if not candidates:
        raise load.LedgerError(f"{run_dir}: there is neither requests.csv nor a Locust *_stats.csv in this folder")
    table = locust_csv.read_stats(candidates[0])
    return {"source": candidates[0].name, "loss": locust_csv.csv_loss(table), "rows": locust_csv.csv_only(table),
            "problems": table.problems}  # fmt: skip
