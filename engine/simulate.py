"""A plan in virtual time: the same schedule, the same scheduler, no waiting; rows as a measured run has them.

Input: a plan (`bench.workload.plan`) and a config. Output: `RequestRow`s stage by stage, stage rows, gauge samples.
Does not: write files (bench/commands/simulate.py does), or model the network, the client and the tokenizer.

1. Same plan + config -> the same rows, byte for byte; the noise has its own random stream.
2. Each stage starts on a cold engine, after the drain of the one before (or its limit), as the load generator does.
3. The gauge comes from the driver's own up and down events, not from the rows.
4. Rows are made when they are read: a finished request costs its columns only.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.records.lost import prompt_line
from bench.records.request import RequestRow
from bench.records.stage import InflightRow, StageRow
from bench.workload.plan import Plan, Stage
from bench.workload.schedule import Schedule, build_schedule
from engine import virtual
from engine.blocks import prompt_blocks
from engine.journal import Entry
from engine.lengths import arrival_key
from engine.request import Request, mix64, predict_tokens, sample_tokens
from engine.rerun import Load, Rerun
from engine.settings import EngineConfig
from engine.virtual import Outcomes, Patience, drive

GAUGE_S = 0.1
# HTTP status -> (status, code, error_kind), as bench.client.outcome classes the engine's own answers.
_REFUSED = {
    400: ("error", "SC-400", "bad_request"),
    429: ("rejected", "SV-429", "rate_limited"),
    503: ("rejected", "SV-503", "overloaded"),
}
_TOO_LONG = ("error", "SC-CONTEXT", "bad_request")
_ENDED = {
    virtual.FIRST_TIMEOUT: ("timeout", "CH-TO-FIRST", "timeout"),
    virtual.TOTAL_TIMEOUT: ("timeout", "CH-TO-TOTAL", "timeout"),
    virtual.CUT: ("timeout", "CL-DRAIN", "timeout"),
}


@dataclass(slots=True)
class StageResult:
    """One simulated stage; its rows are made by `rows`."""

    plan: Plan
    stage: Stage
    schedule: Schedule
    outcomes: Outcomes
    start_s: float  # of the stage, from the run's start
    drained_s: float | None  # from the run's start; None when the drain limit passed
    end_s: float  # when the next stage may start

    def rows(self) -> Iterator[RequestRow]:
        """The ledger rows, in arrival order."""
        return _rows(self)

    def stage_row(self) -> StageRow:
        """The row of `stages.csv`."""
        stage, start = self.stage, self.start_s
        return StageRow(
            stage=stage.index, repeat=stage.repeat, name=stage.name, offered_qps=stage.offered_qps,
            process=stage.process, loop="open", seed=stage.seed, planned=len(self.schedule), start_s=start,
            window_start_s=start + stage.warmup_s, window_end_s=start + stage.duration_s,
            end_s=start + stage.duration_s, drained_s=self.drained_s, workers=1, rows=len(self.schedule),
            schedule_hash=self.schedule.hash, marks="" if self.drained_s is not None else "drain_limit",
        )

    def inflight_rows(self) -> Iterator[InflightRow]:
        """The in-flight counter, ten times a second from the stage's start to its drain."""
        at_s = np.arange(0.0, self.end_s - self.start_s + GAUGE_S / 2, GAUGE_S)
        values = self.outcomes.in_flight(at_s)
        for t, n in zip(at_s.tolist(), values.tolist(), strict=True):
            yield InflightRow(self.start_s + t, 0, self.stage.index, n, 0.0, None, None)


def simulate(plan: Plan, config: Any, *, jump: bool = True) -> list[RequestRow]:
    """All rows of a plan in virtual time, in order of stage and arrival."""
    return [row for result in simulate_stages(plan, config, jump=jump) for row in result.rows()]


def simulate_stages(plan: Plan, config: Any, *, engine: EngineConfig | None = None, old: Rerun | None = None,
                    jump: bool = True, journal: Callable[[Entry], None] | None = None) -> Iterator[StageResult]:
    """The stages of a plan one after another.

    `engine` takes the place of the config's engine settings, `old` (an old run's load) that of the schedules;
    `journal` gets every decision, with the ledger's request ids and times.
    """
    engine = engine or EngineConfig.from_config(config)
    start_s = 0.0
    for i, stage in enumerate(plan.stages):
        load = old.loads[i] if old is not None else None
        result = simulate_stage(plan, stage, config, engine, start_s, load=load, jump=jump, journal=journal)
        yield result
        start_s = result.end_s


def simulate_stage(plan: Plan, stage: Stage, config: Any, engine: EngineConfig, start_s: float = 0.0, *,
                   load: Load | None = None, jump: bool = True,
                   journal: Callable[[Entry], None] | None = None) -> StageResult:
    """One stage on a cold engine, beginning at `start_s`."""
    note = None
    if journal is not None:
        prefix = request_prefix(stage)

        def note(entry: Entry) -> None:
            journal({**entry, "stage": stage.index, "request_id": prefix + entry["request_id"],
                     "at_s": start_s + entry["at_s"]})

    schedule = build_schedule(plan, stage) if load is None else load.schedule
    arrivals = schedule.intended_s.tolist()
    target = config.target
    cut_s = stage.duration_s + stage.drain_limit_s
    patience = Patience(target.first_token_timeout_sec, target.total_timeout_sec, cut_s)
    out = drive(engine, arrivals, _maker(plan, schedule, config, engine, load), jump=jump, patience=patience,
                journal=note, seed=mix64(engine.seed ^ mix64(stage.seed ^ mix64(stage.repeat))) >> 1)
    last_s = max(out.down_s, default=0.0)
    end_s = max(stage.duration_s, last_s)
    drained = not np.any(np.frombuffer(out.kind, dtype=np.uint8) == virtual.CUT) if len(arrivals) else True
    return StageResult(plan, stage, schedule, out, start_s, start_s + end_s if drained else None, start_s + end_s)


def _maker(plan: Plan, schedule: Schedule, config: Any, engine: EngineConfig,
           old: Load | None) -> Callable[[int], Request]:
    """The function that makes the request of arrival i."""
    arrivals, inputs, limits = (schedule.intended_s.tolist(), schedule.input_tokens.tolist(),
                                schedule.max_tokens.tolist())
    key = arrival_key(plan, schedule, engine.seed) if old is None else mix64
    tenants = [plan.tenants[i].name for i in schedule.tenant.tolist()] if plan.tenants else None
    classes = [plan.classes[i].name for i in schedule.request_class.tolist()] if plan.classes else None
    pinned = config.target.ignore_eos
    load = config.loadgen
    guesses = engine.policy == "sjf"
    keyed = guesses or not (pinned or old is not None)
    blocks = prompt_blocks(schedule, engine.block_size, unique=plan.prompts.unique, lines=plan.lines)
    caching = engine.prefix_caching

    def make(i: int) -> Request:
        limit = limits[i]
        drawn = key(i) if keyed else 0
        if old is not None:
            output = old.output_tokens[i]
        else:
            output = limit if pinned else sample_tokens(drawn, load.output_len_mu, load.output_len_sigma, limit)
        return Request(
            str(i), arrivals[i], inputs[i], limit, output, index=i,
            tenant=tenants[i] if tenants else "", request_class=classes[i] if classes else "",
            prefix_hashes=blocks(i) if caching else (),
            predicted_tokens=predict_tokens(output, drawn, engine.prediction_sigma) if guesses else None,
        )

    return make


def request_prefix(stage: Stage) -> str:
    """What stands before the arrival number in the request ids of a stage."""
    return f"sim-{stage.index}-"


def _rows(result: StageResult) -> Iterator[RequestRow]:
    stage, schedule, out, start = result.stage, result.schedule, result.outcomes, result.start_s
    plan = result.plan
    steady = stage.ramp_to_qps is None and not stage.profile
    intended, inputs = schedule.intended_s.tolist(), schedule.input_tokens.tolist()
    limits, tenants, classes = schedule.max_tokens.tolist(), schedule.tenant.tolist(), schedule.request_class.tolist()
    prefix = request_prefix(stage)
    for i, at_s in enumerate(intended):
        row = RequestRow(
            stage=stage.index, arrival=i, worker=0, repeat=stage.repeat,
            offered_qps=stage.offered_qps if steady else stage.rate_at(at_s),
            phase="window" if at_s >= stage.warmup_s else "warmup",
            tenant=plan.tenants[tenants[i]].name if plan.tenants else "",
            request_class=plan.classes[classes[i]].name if plan.classes else "",
            request_id=prefix + str(i), status="ok",
        )
        row.intended_s = row.sent_s = start + at_s
        row.send_lag_s = 0.0
        row.input_tokens, row.max_tokens = inputs[i], limits[i]
        row.prompt_line = prompt_line(plan, schedule, i)
        row.done_s = start + out.done_s[i]
        row.residence_s = out.done_s[i] - at_s
        _answer(row, result, i, at_s)
        yield row


def _answer(row: RequestRow, result: StageResult, i: int, at_s: float) -> None:
    """Fill in what came back for arrival `i`."""
    out, start = result.outcomes, result.start_s
    kind, first_s, last_s = out.kind[i], out.first_s[i], out.last_s[i]
    if kind == virtual.REFUSED:
        refusal = out.refusals[i]
        row.status, row.code, row.error_kind = (
            _TOO_LONG if refusal.reason == "too_long" else _REFUSED[refusal.http_status]
        )
        row.http_status, row.retry_after_s = refusal.http_status, refusal.retry_after_s
        row.detail = f"{refusal.reason}: {refusal.text}" if refusal.text else refusal.reason
        return
    tokens = out.output_tokens[i]
    row.http_status = 200 if not math.isnan(first_s) or kind == virtual.OK else None
    if kind != virtual.OK:
        row.status, row.code, row.error_kind = _ENDED[kind]
    else:
        row.finish_reason = "length" if out.length_stop[i] else "stop"
        row.e2e_s = last_s - at_s
    if math.isnan(first_s):
        return
    row.first_token_s = row.first_content_s = start + first_s
    row.last_token_s = start + last_s
    row.ttft_s = row.ttfo_s = first_s - at_s
    row.prompt_tokens, row.output_tokens, row.chunks = row.input_tokens, tokens, tokens
    row.output_tokens_source = "usage"
    row.cached_tokens = out.cached_tokens[i] or None
    if tokens >= 2:
        row.tpot_s = (last_s - first_s) / (tokens - 1)
