"""The analysis of a run folder made again from its rows, with what an old analysis.json of it had asked.

Input: a run folder. Output: an `Analysis`, and what was asked otherwise than the run's own config.
Does not: write. Nothing but the SLO and the target is taken from the old file: its numbers may have been edited.
"""
from __future__ import annotations

import math
from pathlib import Path

from analysis.analyse import analyse_run, settings
from bench.records.analysis import Analysis, read_analysis

# option of `analyse_run` -> (key of `Analysis.slo`, the option's unit over that of the key)
SLO_OPTIONS = {
    "slo_ttft_ms": ("ttft_deadline_s", 1e3),
    "slo_tpot_ms": ("tpot_deadline_s", 1e3),
    "slo_p95_ms": ("e2e_target_s", 1e3),
    "attainment_target": ("attainment_target", 1.0),
}


def analyse_again(run_dir: Path, *, models: bool | None = None) -> tuple[Analysis, dict[str, float]]:
    """(the analysis of the rows, options that the old analysis.json asks and the run's config does not).

    `models`: whether to fit them; None: as in the old file. Raises `load.LedgerError` as `analyse_run` does.
    """
    old = _old(run_dir / "analysis.json")
    fit = models if models is not None else old is None or old.model is not None
    asked = {} if old is None else _asked(old, run_dir)
    return analyse_run(run_dir, models=fit, **asked), asked


def _old(path: Path) -> Analysis | None:
    """The analysis.json that is there; None where it cannot be read or is of another version."""
    try:
        return read_analysis(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _asked(old: Analysis, run_dir: Path) -> dict[str, float]:
    """Options that ask what `old` asked, where the run's config asks something else."""
    slo, target_qps = settings(run_dir)
    ours = slo.as_dict()
    asked = {}
    for option, (key, scale) in SLO_OPTIONS.items():
        value = _positive(old.slo.get(key))
        if value is not None and abs(value - ours[key]) > 1e-9:
            asked[option] = round(value * scale, 9)
    target = _positive(old.target_qps)
    if target is not None and target != target_qps:
        asked["target_qps"] = target
    if not 0 < asked.get("attainment_target", 0.5) < 1:
        del asked["attainment_target"]
    return asked


def _positive(value: object) -> float | None:
    """The value as a float where it is a finite number above 0, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        return None
    return float(value)
