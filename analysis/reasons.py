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


# A fault of our own side that keeps arrivals from being sent, or sends other ones, by the id of its reason: missing
# rates, wrong gaps, late sends and failures of the same stage follow from it.
OWN_CAUSES = ("INV-PROMPTS", "INV-FAULT", "INV-WORKER", "INV-PLAN", "INV-CANCEL", "INV-CAP")
# The others that say our own side was at fault: what the stage's misses tell of the service is not known.
OWN_EFFECTS = ("INV-RATE", "INV-GAPS", "INV-LAG", "INV-LOOP", "INV-CPU", "INV-CEILING", "INV-CLOCK")
LATE_CAUSES = ("INV-WORKER", "INV-PLAN")  # those that make others send late; the rest only keep arrivals unsent
OF_THE_RUN = -1
LAST_OF_THE_RUN = ("INV-CSV",)  # what a lost worker took with it is missing in Locust's table too


def causes_first(reasons: list[Reason]) -> list[Reason]:
    """The reasons in the order of cause and effect, else as they are.

    First what concerns the files of the whole run, then our own faults in a stage, then the rest.
    """

    def rank(given: Reason) -> int:
        if given.severity != "invalid":
            return len(OWN_CAUSES)
        if given.reason_id in OWN_CAUSES:
            return OWN_CAUSES.index(given.reason_id)
        whole = given.stage is None and given.reason_id not in LAST_OF_THE_RUN
        return OF_THE_RUN if whole else len(OWN_CAUSES)

    return sorted(reasons, key=rank)


def known_cause(reasons: list[Reason]) -> list[Reason]:
    """The reasons of a stage; a late send does not blame the machine where one of them is the cause of it.

    What a lost worker left is sent late by the others, whatever else ran there: their idle CPU says nothing then.
    """
    spoilt = [r for r in reasons if r.severity == "invalid" and r.reason_id in OWN_CAUSES]
    if not spoilt:
        return reasons
    first = causes_first(spoilt)[0]

    def told(given: Reason) -> Reason:
        causes = LATE_CAUSES if given.code == "INV-LAG" else OWN_CAUSES if given.code == "INV-LAG.decides" else ()
        known = next((r for r in causes_first(spoilt) if r.reason_id in causes), None)
        if known is None:
            return given
        params = given.params | {"cause": {"code": "cause.known", "params": {}}}
        return replace(given, text=render(given.code, params), params=params, next_step=first.next_step,
                       next_code=first.next_code, next_params=first.next_params)  # fmt: skip

    return [told(r) for r in reasons]


def own_fault(reasons: list[Reason]) -> bool:
    """Whether our own side spoilt the stage that these reasons are of."""
    return any(r.severity == "invalid" and r.reason_id in (*OWN_CAUSES, *OWN_EFFECTS) for r in reasons)


def left_out(first: Reason, stage_name: str) -> Reason:
    """The warning that a stage is left out, for the reason given."""
    params = {"stage_name": stage_name, "reason": sentence(first)}
    return replace(first, severity="warn", text=render("left_out", params), code="left_out", params=params)


def sentence(given: Reason) -> dict[str, Any]:
    """A reason as a parameter of another sentence."""
    if not given.code:
        return {"code": "text", "params": {"text": given.text}}
    return {"code": given.code, "params": given.params}
