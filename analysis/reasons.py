"""Reasons made from the catalogue: the English text and the code and parameters it came from, always together.

Input: a code of `bench/records/sentences_en.py` and its parameters. Output: `Reason`.
Does not: decide that something is so.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.records.analysis import Reason
from bench.records.sentences import plain, render


def reason(
    code: str,
    severity: str,
    step: str = "",
    *,
    stage: int | None = None,
    value: float | None = None,
    limit: float | None = None,
    params: dict[str, Any] | None = None,
    step_params: dict[str, Any] | None = None,
) -> Reason:
    """One reason; its id is the code up to the first dot. `step`: code of the next step, "" for none."""
    params = {name: plain(given) for name, given in (params or {}).items()}
    next_params = {name: plain(given) for name, given in (step_params or {}).items()}
    return Reason(
        code.split(".")[0], severity, render(code, params), render(step, next_params), stage, value, limit,
        code=code, params=params, next_code=step, next_params=next_params,
    )  # fmt: skip


def left_out(first: Reason, stage_name: str) -> Reason:
    """The warning that a stage is left out, for the reason given."""
    params = {"stage_name": stage_name, "reason": sentence(first)}
    return replace(first, severity="warn", text=render("left_out", params), code="left_out", params=params)


def sentence(given: Reason) -> dict[str, Any]:
    """A reason as a parameter of another sentence."""
    if not given.code:
        return {"code": "text", "params": {"text": given.text}}
    return {"code": given.code, "params": given.params}
