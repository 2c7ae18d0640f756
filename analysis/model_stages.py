"""The stages of a run as the models need them: arrays in, prepared stages out.

Input: `StageArrays`, one per stage. Output: `Stage` (sorted, bounded, split into what the fit and
the replay need), the choice of the calibration stages, the sample of lengths.
Does not: fit, predict or judge.

1. Rows keep together: where a bound cuts, it keeps the first rows, since neighbours share steps.
2. Of a stage that is only predicted nothing but arrivals and lengths is used, see `model_report.py`.

Source: `docs/queueing.md` sections 3 and 6.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.predict import Latencies
from analysis.step_clock import MIN_ROWS, MIN_STEPS, Trace
from bench.records.sentences import said

MAX_FIT_ROWS = 8_000  # per stage: the standard error of lambda_max is far below 1 % by then
MAX_REPLAY_ROWS = 30_000  # per stage: 0.1 s of replay
# Of the output tokens: while a request reasons unseen, the batch that the client counts lacks it, and the cost of a
# sequence comes out too high by this share. 1 % is the accuracy that the method claims for its coefficients.
MAX_HIDDEN_RATIO = 0.01
MAX_FAILED_RATIO = 0.02  # of a calibration stage: failures hold slots the clock cannot see


@dataclass(frozen=True, eq=False)
class StageArrays:
    """One stage as arrays of shape (n,), one entry per planned arrival, warm-up and drain included.

    Times in seconds on one clock; nan = absent. `output_tokens` of failed rows is not used.
    `input_tokens` should be the service's own count where it gave one; `cached_tokens` is the part of it that came from
    the service's cache, nan or None = none. `hidden_tokens`: reasoning among `output_tokens` that was not streamed, so
    that no event shows its steps; None = none. `intended_s` None means
    `send_s`. `max_tokens`: pass it only when the plan pins the length; it then is the planned
    output length of rows without an answer and of the length law.
    """

    stage: int
    offered_qps: float
    send_s: np.ndarray
    first_token_s: np.ndarray
    last_token_s: np.ndarray
    done_s: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    ok: np.ndarray  # bool
    window_start_s: float
    window_end_s: float
    intended_s: np.ndarray | None = None
    max_tokens: np.ndarray | None = None
    valid: bool = True  # False: the stage is INVALID, never calibrate on it
    stationarity: str = "STABLE"
    name: str = ""
    cached_tokens: np.ndarray | None = None
    hidden_tokens: np.ndarray | None = None

    @property
    def start_s(self) -> np.ndarray:
        """Where SLO latencies begin: intended, else sent."""
        return self.send_s if self.intended_s is None else self.intended_s


@dataclass(slots=True, eq=False)
class Stage:
    """A stage prepared for the models: sorted by start, finite, cut to the bound."""

    source: StageArrays
    start_s: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray  # planned where unknown
    complete: np.ndarray  # bool: an answer with first and last token
    window: np.ndarray  # bool
    measured: Latencies
    trace: Trace
    calibration: bool = False
    failed_ratio: float = 0.0
    cached_tokens: np.ndarray | None = None  # nan = not known
    hidden_ratio: float = 0.0  # of the output tokens of complete rows


def prepare(source: StageArrays, notes: list[dict[str, Any]]) -> Stage | None:
    """The stage sorted, bounded and split into what each model needs; None when it has no arrivals."""
    start = np.asarray(source.start_s, dtype=float)
    order = np.argsort(start, kind="stable")
    order = order[np.isfinite(start[order])]
    if not order.size:
        return None
    if order.size > MAX_REPLAY_ROWS:
        notes.append(said("model.rows", stage=source.stage, rows=order.size, limit=MAX_REPLAY_ROWS))
        order = order[:MAX_REPLAY_ROWS]

    def pick(values: np.ndarray) -> np.ndarray:
        return np.asarray(values, dtype=float)[order]

    start, first, last = start[order], pick(source.first_token_s), pick(source.last_token_s)
    prompt, output = pick(source.input_tokens), pick(source.output_tokens)
    ok = np.asarray(source.ok, dtype=bool)[order]
    complete = ok & np.isfinite(first) & np.isfinite(last) & (last >= first) & (output >= 1) & np.isfinite(prompt)
    window = (start >= source.window_start_s) & (start < source.window_end_s)
    planned = output if source.max_tokens is None else np.where(complete, output, pick(source.max_tokens))
    decode = np.subtract(last, first, out=np.zeros(start.size), where=complete)
    hidden = np.zeros(start.size) if source.hidden_tokens is None else np.nan_to_num(pick(source.hidden_tokens))
    streamed, made = output - hidden, float(output[complete].sum())
    measured = Latencies(
        np.where(complete, first - start, np.inf),
        np.divide(decode, streamed - 1, out=np.full(start.size, np.nan), where=complete & (streamed > 1)),
        np.where(complete, last - start, np.inf),
    )
    counted = max(int(window.sum()), 1)
    stage = Stage(
        source, start, prompt, planned, complete, window, measured, _trace(source, order, complete, window),
        failed_ratio=float((window & ~complete).sum()) / counted,
        cached_tokens=None if source.cached_tokens is None else np.where(complete, pick(source.cached_tokens), np.nan),
        hidden_ratio=float(hidden[complete].sum()) / made if made else 0.0,
    )  # fmt: skip
    return stage


def _trace(source: StageArrays, order: np.ndarray, complete: np.ndarray, window: np.ndarray) -> Trace:
    """What the step clock sees: every answer, the drain included, as all of them shared the engine's steps.

    Past MAX_FIT_ROWS the clock would miss companions, so rows that meet the cut only run the clock.
    """
    index = order[complete]
    first, last = (np.asarray(a, dtype=float)[index] for a in (source.first_token_s, source.last_token_s))
    use = window[complete]
    keep = slice(0, MAX_FIT_ROWS)
    if index.size > MAX_FIT_ROWS:
        use = use & (last < first[MAX_FIT_ROWS:].min())
    if source.hidden_tokens is not None:  # its steps before the first output are not seen: it only runs the clock
        use = use & ~(np.asarray(source.hidden_tokens, dtype=float)[index] > 0)
    cached = source.cached_tokens
    return Trace(
        first[keep], last[keep], np.asarray(source.input_tokens, dtype=float)[index][keep],
        np.asarray(source.output_tokens, dtype=float)[index][keep], use[keep],
        None if cached is None else np.asarray(cached, dtype=float)[index][keep],
    )  # fmt: skip


def _usable(stage: Stage) -> int:
    return int((stage.trace.use & (stage.trace.output_tokens > MIN_STEPS)).sum())


def choose_calibration(stages: Sequence[Stage], notes: list[dict[str, Any]]) -> list[Stage]:
    """The two lowest valid stages (more only while the rows do not suffice), marked."""
    able = [s for s in stages if s.source.valid and s.source.stationarity != "UNSTABLE"]
    able = [s for s in able if s.failed_ratio <= MAX_FAILED_RATIO]
    seen = [s for s in able if s.hidden_ratio <= MAX_HIDDEN_RATIO]
    if able and not seen:
        notes.append(said("model.hidden", share=max(s.hidden_ratio for s in able), limit=MAX_HIDDEN_RATIO))
        return []
    able = [s for s in seen if _usable(s) > 0]
    able.sort(key=lambda s: (s.source.offered_qps, s.source.stage))
    if not able:
        notes.append(said("model.no_stage"))
        return []
    chosen = [able[0]]
    # the second lowest rate tells batch from base cost better than a repeat of the lowest
    rest = sorted(able[1:], key=lambda s: (s.source.offered_qps == able[0].source.offered_qps, s.source.offered_qps))
    while rest and (len(chosen) < 2 or sum(map(_usable, chosen)) < MIN_ROWS):
        chosen.append(rest.pop(0))
    rows = sum(map(_usable, chosen))
    if rows < MIN_ROWS:
        notes.append(said("model.few_rows", rows=rows, tokens=MIN_STEPS + 1, need=MIN_ROWS))
        return []
    if len(chosen) == 1:
        notes.append(said("model.one_stage"))
    if len(chosen) > 2:
        notes.append(said("model.more_stages", stages=len(chosen), rows=MIN_ROWS))
    for stage in chosen:
        stage.calibration = True
    return chosen


def length_sample(
    stages: Sequence[Stage], lengths: tuple[np.ndarray, np.ndarray] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(input, output, cached) token samples of equal size: as given, else of all stages that can tell.

    A stage tells when its lengths are pinned, or when next to nothing failed in it: the survivors of a
    failing stage are the short ones. Lengths are no latencies, so predicted stages may contribute. What the cache held
    of a prompt is taken as a length too; given lengths have none.
    """
    if lengths is not None and len(lengths[0]) and len(lengths[0]) == len(lengths[1]):
        sample = [np.asarray(a, dtype=float) for a in lengths]
        keep = np.isfinite(sample[0]) & np.isfinite(sample[1]) & (sample[1] >= 1)
        if keep.any():
            return sample[0][keep], sample[1][keep], np.zeros(int(keep.sum()))
    known = [s for s in stages if s.source.max_tokens is not None or s.failed_ratio <= MAX_FAILED_RATIO]
    prompt = np.concatenate([s.input_tokens for s in known])
    output = np.concatenate([s.output_tokens for s in known])
    usable = np.concatenate([s.complete | (s.source.max_tokens is not None) for s in known])
    keep = usable & np.isfinite(prompt) & np.isfinite(output) & (output >= 1)
    cached = np.concatenate([np.zeros(s.start_s.size) if s.cached_tokens is None else s.cached_tokens for s in known])
    return prompt[keep], output[keep], np.nan_to_num(cached[keep])
