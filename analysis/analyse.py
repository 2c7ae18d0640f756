"""`analysis.json` from a run folder: reads the files, calls the pure parts, writes one document.

Input: a run folder. Output: `Analysis`.
Does not: hold formulas; each lives in the module that is named after it.

1. A folder can be analysed again at any time; nothing else in it is changed.
2. SLO values come from `run.json` (config.slo, ms) unless the caller overrides them.
3. A bad file gives a named problem; only an unreadable ledger raises `LedgerError`.
"""
from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis import load, series
from analysis.attainment import Slo
from analysis.csv_check import check_csv
from analysis.diagnosis import diagnose
from analysis.errors import error_groups
from analysis.gates import default_gates, evaluate, locate, usable
from analysis.hysteresis import findings, hysteresis
from analysis.intervals import wilson
from analysis.knee import Crossing, Level, add_note, below_met, capacity, crossing, rate_text
from analysis.reasons import reason
from analysis.repeatability import default_repeat_gate, refuse_minorities, repeat_reasons, repeatability
from analysis.row_checks import Checked, check_rows, streamed_tokens
from analysis.run_files import Gauge, ServerGauge, read_gauge, read_run_info, read_server_gauge, read_stages
from analysis.sample import request_points
from analysis.search import Probe, estimate, probe
from analysis.server_series import server_view
from analysis.stage import Context, StageResult, analyse_stage
from analysis.stage_checks import check_stages
from analysis.verdict import Facts, verdict
from analysis.witnesses import missing_witnesses
from bench.records.analysis import SCHEMA_VERSION, Analysis, Capacity, Hysteresis, Reason, StageAnalysis, to_json
from bench.records.digests import changes
from bench.records.request import LedgerProblem
from bench.records.sentences import joined, said, text_of
from bench.records.stage import RunInfo, StageRow

if TYPE_CHECKING:
    from analysis.model_stages import StageArrays

SLO_DEFAULTS_MS = {"ttft_deadline_ms": 800.0, "tpot_deadline_ms": 100.0, "p95_target_ms": 2000.0}
ATTAINMENT_DEFAULT = 0.99
# Rows that the models read: more do not change a coefficient, and a replay costs 10 µs each.
MODEL_ROWS = 60_000
MODEL_ROWS_STAGE = 4_000
# Loads without a single rate: the SLO is judged over the whole run.
RUN_SHAPES = ("ramp", "spike", "replay")
SINGLE_SHAPES = ("smoke", "single", "repeat", "hold")
# A tenth of the TTFT deadline: a shift of so much can move an arrival across it only when it is that near.
CLOCK_LIMIT = 0.1
VARYING_SHAPES = ("ramp", "spike")


def analyse_run(
    run_dir: Path,
    *,
    slo_ttft_ms: float | None = None,
    slo_tpot_ms: float | None = None,
    slo_p95_ms: float | None = None,
    attainment_target: float | None = None,
    target_qps: float | None = None,
    models: bool = True,
) -> Analysis:
    """The analysis of a run folder. Raises `load.LedgerError` when there is nothing to analyse.

    `models=False` leaves the queueing models out (`Analysis.model` is None): they take most of the time.
    """
    if not run_dir.is_dir():
        raise load.LedgerError(f"{run_dir}: there is no such folder; give the run folder that `bench run` printed")
    path = load.requests_path(run_dir)
    info, raw, problems = read_run_info(run_dir)
    if part := _section(raw, "part"):
        raise load.LedgerError(
            f"{run_dir}: this is part {part.get('part')}/{part.get('of')} of a load; its numbers are not those of the "
            "whole. Merge the parts: bench recover PART1 PART2 ... --into MERGED, then analyse MERGED"
        )
    config = _section(raw, "config")
    slo = _slo(config, slo_ttft_ms, slo_tpot_ms, slo_p95_ms, attainment_target)
    target = target_qps if target_qps is not None else _target_qps(config)
    ledger = load.read_ledger(path)
    with ThreadPoolExecutor(1) as beside:  # the reading above keeps every core; what follows, one
        changed = beside.submit(changes, run_dir, raw.get("files"))
        checked = check_rows(ledger)
        stage_rows, stage_problems = read_stages(run_dir)
        gauge, gauge_problems = read_gauge(run_dir)
        problems = [*problems, *checked.problems, *stage_problems, *gauge_problems]
        stage_rows = _stage_table(stage_rows, checked, raw, problems)
        context = _context(config, raw, slo, gauge, read_server_gauge(run_dir))
        results = [analyse_stage(checked, row, context) for row in stage_rows]
        problems = [*(LedgerProblem("LED-025", text) for text in changed.result()), *problems]
    return _assemble(run_dir, info, raw, config, slo, target, checked, stage_rows, results, context, problems,
                     models)  # fmt: skip


def settings(run_dir: Path) -> tuple[Slo, float | None]:
    """The SLO and the target rate (1/s) of the run's own config, as `analyse_run` reads them."""
    config = _section(read_run_info(run_dir)[1], "config")
    return _slo(config, None, None, None, None), _target_qps(config)


def _target_qps(config: dict[str, Any]) -> float | None:
    return _number(_section(config, "loadgen").get("target_qps"))


def stage_arrays(run_dir: Path) -> list[StageArrays]:
    """The measured stages of a run folder as arrays, for `analysis/calibrate.py`.

    Raises `load.LedgerError` when the ledger cannot be read.
    """
    _, raw, problems = read_run_info(run_dir)
    config = _section(raw, "config")
    checked = check_rows(load.read_ledger(load.requests_path(run_dir)))
    rows = _stage_table(read_stages(run_dir)[0], checked, raw, problems)
    context = _context(config, raw, _slo(config, None, None, None, None), read_gauge(run_dir)[0], None)
    return _stage_arrays(checked, rows, [analyse_stage(checked, row, context) for row in rows])


def search_probes(run_dir: Path, *, after: int = -1) -> list[Probe]:
    """The stages of a knee search that have an index above `after`, as the search reads them; [] when there is none.

    Raises `load.LedgerError` when the ledger cannot be read.
    """
    _, raw, _ = read_run_info(run_dir)
    config = _section(raw, "config")
    slo = _slo(config, None, None, None, None)
    rows = [row for row in read_stages(run_dir)[0] if row.stage > after]
    if not rows:
        return []
    checked = check_rows(load.read_ledger(load.requests_path(run_dir)))
    context = _context(config, raw, slo, read_gauge(run_dir)[0], read_server_gauge(run_dir))
    return [_probe(analyse_stage(checked, row, context)) for row in rows]


def _probe(result: StageResult) -> Probe:
    public, joint = result.public, result.joint
    invalid = next((r.text for r in public.reasons if r.severity == "invalid"), "")
    made = probe(public.offered_qps, public.window_s, result.window_scores, joint.value, joint.batches,
                 stable=public.stationarity != "UNSTABLE", states=result.states)  # fmt: skip
    return replace(made, valid=usable(public), hold=public.name.endswith(" hold"), reason=invalid)


def write_analysis(run_dir: Path, **overrides: Any) -> Analysis:
    """`analysis.json` in the folder, replaced as a whole, and what it holds."""
    found = analyse_run(run_dir, **overrides)
    path = run_dir / "analysis.json"
    part = path.with_suffix(".json.part")
    part.write_text(to_json(found) + "\n", encoding="utf-8")
    os.replace(part, path)  # a reader never sees half a document
    return found


# ---------------------------------------------------------------- settings


def _section(data: Any, name: str) -> dict[str, Any]:
    value = data.get(name) if isinstance(data, dict) else None
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _slo(
    config: dict[str, Any], ttft: float | None, tpot: float | None, p95: float | None, target: float | None
) -> Slo:
    given = _section(config, "slo")

    def seconds(override: float | None, key: str) -> float:
        value = override if override is not None else _number(given.get(key))
        return (value if value is not None else SLO_DEFAULTS_MS[key]) / 1e3

    share = target if target is not None else _number(given.get("attainment_target"))
    return Slo(
        ttft_deadline_s=seconds(ttft, "ttft_deadline_ms"),
        tpot_deadline_s=seconds(tpot, "tpot_deadline_ms"),
        e2e_target_s=seconds(p95, "p95_target_ms"),
        attainment_target=ATTAINMENT_DEFAULT if share is None else share,
    )


def _context(
    config: dict[str, Any], raw: dict[str, Any], slo: Slo, gauge: Gauge | None, server: ServerGauge | None
) -> Context:
    scheduler, engine = _section(config, "scheduler"), _section(config, "engine")
    seqs = _number(scheduler.get("max_num_seqs"))
    cap = _number(scheduler.get("batch_size_cap"))
    at_once = min(x for x in (seqs, cap, math.inf) if x is not None)
    replicas = _number(engine.get("replicas")) or 1.0
    deadlines = {}
    for entry in config.get("classes") or []:
        if isinstance(entry, dict) and entry.get("name"):
            ttft, tpot = _number(entry.get("ttft_deadline_ms")), _number(entry.get("tpot_deadline_ms"))
            deadlines[str(entry["name"])] = (
                slo.ttft_deadline_s if ttft is None else ttft / 1e3,
                slo.tpot_deadline_s if tpot is None else tpot / 1e3,
            )
    return Context(
        slo=slo,
        class_deadlines=deadlines,
        gauge=gauge,
        server=server,
        batch=at_once * replicas if math.isfinite(at_once) else None,
        ceiling_qps=_number(_section(_section(raw, "target"), "calibration").get("ceiling_qps")),
        burstiness=_number(_section(config, "loadgen").get("burstiness")) or 1.0,
        varying=raw.get("shape") in VARYING_SHAPES,
        loop=str(raw.get("loop") or "open"),
        prompts_file=str(_section(config, "loadgen").get("prompts_file") or ""),
        own_machine=bool(engine.get("embedded")) and _is_own_machine(_section(raw, "target").get("base_url")),
    )


def _is_own_machine(url: Any) -> bool:
    from bench.config.own_machine import is_own_machine  # pydantic comes along: 0.1 s, only where it is asked

    return is_own_machine(url)


# ---------------------------------------------------------------- stages


def _stage_table(
    rows: list[StageRow], checked: Checked, raw: dict[str, Any], problems: list[LedgerProblem]
) -> list[StageRow]:
    """Stage rows to analyse: those of stages.csv, checked against the ledger, or made from the ledger."""
    ledger = checked.ledger
    present = {(int(k) >> 32, int(k) & 0xFFFFFFFF) for k in
               np.unique((ledger["stage"].astype(np.int64) << 32) + np.maximum(ledger["repeat"], 0))}  # fmt: skip
    if not rows:
        return _rows_from_ledger(checked, sorted(present))
    known = {(r.stage, r.repeat) for r in rows}
    strange = sorted(present - known)
    if strange:
        count = sum(int(np.count_nonzero((ledger["stage"] == s) & (ledger["repeat"] == r))) for s, r in strange)
        text = f"{count} rows belong to stages that stages.csv does not know: {strange[:5]}"
        problems.append(LedgerProblem("LED-013", text, count))
    missing, examples = 0, []
    for row in rows:
        have = int(np.count_nonzero((ledger["stage"] == row.stage) & (ledger["repeat"] == row.repeat)))
        if have < row.planned:
            missing += row.planned - have
            examples.append(f"stage {row.stage}: {have} of {row.planned}")
    if missing:
        text = f"{missing} planned arrivals have no row"
        problems.append(LedgerProblem("LED-009", text, missing, examples[:5]))
    problems.extend(check_stages(rows, checked, raw))
    _check_seeds(rows, raw, problems)
    return sorted(rows, key=lambda r: (r.stage, r.repeat))


def _check_seeds(rows: list[StageRow], raw: dict[str, Any], problems: list[LedgerProblem]) -> None:
    """Repeats that were asked to send the same load must have the same seed."""
    same = _section(_section(raw, "config"), "sweep").get("repeat_seed") == "same"
    by_rate: dict[float, set[int]] = {}
    for row in rows:
        by_rate.setdefault(row.offered_qps, set()).add(row.seed)
    mixed = [rate for rate, seeds in by_rate.items() if len(seeds) > 1]
    if same and mixed and raw.get("shape") != "knee_search":  # a search never sends a load twice
        text = (
            f"repeats were to send the same load, but seeds differ at {', '.join(f'{r:g}' for r in mixed)} requests/s"
        )
        problems.append(LedgerProblem("LED-018", text, len(mixed)))


def _rows_from_ledger(checked: Checked, present: list[tuple[int, int]]) -> list[StageRow]:
    """Stage rows from the ledger alone: the window spans the rows of phase `window`."""
    ledger = checked.ledger
    window = ledger.is_value("phase", "window")
    if not window.any():
        window = np.ones(ledger.rows, dtype=bool)
    rows = []
    for stage, repeat in present:
        mine = (ledger["stage"] == stage) & (ledger["repeat"] == repeat)
        inside = ledger["intended_s"][mine & window]
        times = ledger["intended_s"][mine]
        if not len(times):
            continue
        if not len(inside):
            inside = times
        n = len(inside)
        # n arrivals span n - 1 gaps: the window is one mean gap longer than first to last.
        gap = float(inside.max() - inside.min()) / max(n - 1, 1)
        rate = ledger["offered_qps"][mine]
        offered = float(np.nanmedian(rate)) if np.isfinite(rate).any() else (1 / gap if gap > 0 else 0.0)
        start, end = float(inside.min()), float(inside.max()) + max(gap, 1e-6)
        done = ledger["done_s"][mine]
        last = float(np.nanmax(done)) if np.isfinite(done).any() else end
        rows.append(StageRow(
            stage=stage, repeat=repeat, name=f"{stage:02d} chat @{offered:g}", offered_qps=offered, process="unknown",
            loop="open", seed=0, planned=int(mine.sum()), start_s=float(times.min()), window_start_s=start,
            window_end_s=end, end_s=end, drained_s=last, workers=1, rows=int(mine.sum()), schedule_hash="",
        ))  # fmt: skip
    return rows


# ---------------------------------------------------------------- the document


def _assemble(
    run_dir: Path, info: RunInfo | None, raw: dict[str, Any], config: dict[str, Any], slo: Slo, target: float | None,
    checked: Checked, stage_rows: list[StageRow], results: list[StageResult], context: Context,
    problems: list[LedgerProblem], models: bool,
) -> Analysis:  # fmt: skip
    stages = [r.public for r in results]
    alone = raw.get("shape") == "knee_search"  # a search measures what is INVALID again, and judges it by itself
    if not alone:
        refuse_minorities(stages)
    repeats = [] if alone else repeatability(stages, {r.stage: r.seed for r in stage_rows})
    errors = error_groups(checked)
    csv_check = check_csv(run_dir, checked, stage_rows)
    model = _model(checked, stage_rows, results, config, slo) if models else None
    searched = estimate([_probe(r) for r in results], slo.attainment_target) if _is_search(raw, results) else None
    found = _capacity(results, slo, model.get("lambda_max_qps") if model else None, searched)
    asked = target
    target, at, notes = _where(raw, config, target, stages)
    asked_gates = _gates(config, raw.get("loop") == "closed")
    specs = default_gates(slo.as_dict(), asked_gates, at)
    if raw.get("shape") == "repeat" and not any(g.get("metric") == "repeat_spread" for g in asked_gates):
        specs += default_repeat_gate(repeats)
    gates = [evaluate(g, stages, found, target, repeats) for g in specs]
    bound, limit = _clock_bound(raw), CLOCK_LIMIT * slo.ttft_deadline_s
    interrupted = bool(raw.get("interrupted")) or any("interrupted" in s.marks for s in stages)
    judged = verdict(Facts(gates, stages, problems, csv_check, errors, target, interrupted, at, bound, limit,
                           asked if notes else None, stopped_by=str(raw.get("stopped_by") or ""),
                           unfinished=bool(raw) and raw.get("finished_utc") is None,
                           missing=missing_witnesses(raw, locust_stats=bool(csv_check.get("present")),
                                                     gauge=bool(context.gauge)), repeats=repeats))  # fmt: skip
    judged.reasons.extend([*([] if alone else repeat_reasons(stages, repeats)), *notes, *_calibration_reasons(raw)])
    if judged.status == "INVALID":
        found = _withheld(slo.attainment_target, said("capacity.invalid"))
    elif raw.get("loop") == "closed":
        found = _withheld(slo.attainment_target, said("capacity.closed"))
    ledger = checked.ledger
    in_window = np.zeros(ledger.rows, dtype=bool)
    for result in results:
        in_window[result.rows] = True
    run = dict(raw) if raw else {"run_id": run_dir.name}
    returned = _hysteresis(checked, results, slo.attainment_target)
    return Analysis(
        schema_version=SCHEMA_VERSION, run=run, slo=slo.as_dict(), target_qps=target, verdict=judged, gates=gates,
        stages=stages, capacity=found, errors=errors,
        repeatability=repeats,
        in_flight_series=series.in_flight_series(context.gauge),
        heatmap=series.heatmap(ledger["intended_s"], ledger["e2e_s"], checked.status == load.OK),
        worst=series.worst_rows(checked, in_window), points=request_points(checked, results),
        server=server_view(context.server, checked, stage_rows, results), csv_check=csv_check,
        clients=series.clients(checked, context.gauge, raw.get("worker_info") or []),
        ledger=_ledger_summary(checked, stage_rows, problems),
        warnings=[r for r in judged.reasons if r.severity == "warn"],
        diagnosis=diagnose(stages, slo, errors, context.server, checked, _trusted_fit(model), _said_seats(raw, context),
                           _number(_section(config, "engine").get("replicas")) or 1.0) + findings(returned),
        model=model,
        hysteresis=returned,
    )  # fmt: skip


def _hysteresis(checked: Checked, results: list[StageResult], target: float) -> list[Hysteresis]:
    """Rates before and after the highest load, over the arrivals of all valid stages."""
    valid = [r for r in results if r.public.verdict not in ("EMPTY", "INVALID") and len(r.rows)]
    if not valid:
        return []
    c = checked.ledger
    varying = [np.full(len(r.rows), "ramp" in r.public.marks) for r in valid]
    rates = [np.where(v & np.isfinite(c["offered_qps"][r.rows]), c["offered_qps"][r.rows], r.public.offered_qps)
             for r, v in zip(valid, varying, strict=True)]  # fmt: skip
    return hysteresis(
        np.concatenate([c["intended_s"][r.rows] for r in valid]), np.concatenate(rates),
        np.concatenate([r.window_scores > 1 for r in valid]), np.concatenate(varying), target,
    )  # fmt: skip


def _model(
    checked: Checked, rows: list[StageRow], results: list[StageResult], config: dict[str, Any], slo: Slo
) -> dict[str, Any] | None:
    """The queueing models against this run; None when no stage was measured."""
    from analysis.model import fit_and_predict  # heavy, and only here

    stages, scheduler = _stage_arrays(checked, rows, results), _section(config, "scheduler")
    if not stages:
        return None
    seqs, cap = _number(scheduler.get("max_num_seqs")), _number(scheduler.get("batch_size_cap"))
    at_once = min((x for x in (seqs, cap) if x is not None), default=None)
    budget = _number(scheduler.get("max_num_batched_tokens"))
    return fit_and_predict(
        stages, slo.as_dict(), None if at_once is None else int(at_once),
        max_num_batched_tokens=None if budget is None else int(budget), process=rows[0].process,
        burstiness=_number(_section(config, "loadgen").get("burstiness")) or 1.0,
        replicas=int(_number(_section(config, "engine").get("replicas")) or 1),
    )  # fmt: skip


def _said_seats(raw: dict[str, Any], context: Context) -> float | None:
    """Sequences that the service runs at once, where somebody has said it; this tool's default is no service's."""
    said_by = _section(raw, "config_origin").get("scheduler.max_num_seqs", "default")
    ours = bool(raw.get("simulated")) or bool(_section(_section(raw, "config"), "engine").get("embedded"))
    return context.batch if ours or said_by != "default" else None


def _trusted_fit(model: dict[str, Any] | None) -> dict[str, Any] | None:
    """The step law of a model that its own higher stages bear out."""
    return model.get("fit") if model and model.get("predictive") else None


def _stage_arrays(checked: Checked, rows: list[StageRow], results: list[StageResult]) -> list[StageArrays]:
    """The measured stages of one rate as the models and the calibration read them."""
    from analysis.model_stages import StageArrays

    c = checked.ledger.columns
    stages = []
    limit = max(MODEL_ROWS // max(len(rows), 1), MODEL_ROWS_STAGE)
    for row, result in zip(rows, results, strict=True):
        public = result.public
        if public.verdict == "EMPTY" or "ramp" in public.marks:
            continue
        mine = np.flatnonzero((c["stage"] == row.stage) & (c["repeat"] == row.repeat))
        end = row.window_end_s
        if len(mine) > limit:  # neighbours share steps: keep rows together, and end the window with them
            mine = mine[np.argsort(c["intended_s"][mine], kind="stable")]
            first = int(np.searchsorted(c["intended_s"][mine], row.window_start_s))
            first = max(first - limit // 4, 0)  # enough of the warm-up to know who was in flight
            mine = mine[first : first + limit]
            end = min(end, float(c["intended_s"][mine[-1]]))
        prompt = np.where(np.isfinite(c["prompt_tokens"][mine]), c["prompt_tokens"][mine], c["input_tokens"][mine])
        cached = c["cached_tokens"][mine]
        hidden = c["output_tokens"][mine] - streamed_tokens(checked.ledger, mine)
        stages.append(StageArrays(
            stage=row.stage, offered_qps=row.offered_qps, send_s=c["sent_s"][mine],
            first_token_s=c["first_token_s"][mine], last_token_s=c["last_token_s"][mine],
            done_s=c["done_s"][mine], input_tokens=prompt,
            output_tokens=c["output_tokens"][mine], ok=(checked.status[mine] == load.OK) & ~checked.impossible[mine],
            window_start_s=row.window_start_s, window_end_s=end, intended_s=c["intended_s"][mine],
            valid=public.verdict != "INVALID", stationarity=public.stationarity, name=row.name,
            cached_tokens=cached if (cached > 0).any() else None,
            hidden_tokens=hidden if (hidden > 0).any() else None,
        ))  # fmt: skip
    return stages


def _gates(config: dict[str, Any], closed: bool) -> list[dict[str, Any]]:
    """The gates of the config. A closed loop offers no rate: what is asked at the target is asked of the run."""
    gates = [g for g in config.get("gates") or [] if isinstance(g, dict)]
    return [{**g, "at": "run"} if closed and g.get("at", "target") == "target" else g for g in gates]


def _where(
    raw: dict[str, Any], config: dict[str, Any], target: float | None, stages: list[StageAnalysis]
) -> tuple[float | None, str, list[Reason]]:
    """The rate that decides, where the SLO's gates apply, and a note when it is not the target of the config."""
    measured = [s for s in stages if s.verdict != "EMPTY"]
    shape, loop = raw.get("shape"), raw.get("loop")
    if measured and (loop == "closed" or shape in RUN_SHAPES or all("ramp" in s.marks for s in measured)):
        return target, "run", []
    rates = {s.offered_qps for s in measured}
    if shape in SINGLE_SHAPES and len(rates) == 1 and target is not None and not locate(measured, target).exact:
        rate = rates.pop()
        invalid_there = locate(measured, target).invalid_exact
        if not invalid_there and abs(rate - target) > 1e-9:
            said_of = {"shape": shape, "rate_qps": rate, "target_qps": target}
            return rate, "target", [reason("WARN-RATE", "warn", "next.sweep", value=rate, params=said_of)]
    return target, "target", []


def _calibration_reasons(raw: dict[str, Any]) -> list[Reason]:
    """A note when no calibration of the client speaks for a run that was sent at a rate of its own."""
    if not raw or raw.get("simulated") or raw.get("loop") == "closed":
        return []
    kept = _section(_section(raw, "target"), "calibration")
    if "ceiling_qps" in kept:
        return []
    differs = [str(why) for why in kept.get("differs") or []]
    why = said("calibration.why", listed=joined("semicolon", differs)) if differs else said("")
    return [reason("WARN-CALIBRATION", "info", "next.calibrate", params={"why": why})]


def _withheld(target: float, why: dict[str, Any]) -> Capacity:
    """No capacity figure, and why."""
    text = text_of(why)
    return replace(capacity([], target), sentence=text, code=why["code"], params=why["params"])


def _levels(results: list[StageResult], kind: str) -> list[Level]:
    """One level per offered rate from the stages that may decide; repeats pooled. `kind`: joint | e2e."""
    groups: dict[float, list[StageResult]] = {}
    for result in results:
        if usable(result.public):
            groups.setdefault(round(result.public.offered_qps, 9), []).append(result)
    levels = []
    for qps, members in sorted(groups.items()):
        n = sum(m.public.planned for m in members)
        hits = sum(m.hit_count if kind == "joint" else m.e2e_hits for m in members)
        scores = [m.joint if kind == "joint" else m.e2e for m in members]
        worth = sum(m.joint_worth if kind == "joint" else m.e2e_worth for m in members)
        inflations = [m.joint_inflation if kind == "joint" else m.e2e_inflation for m in members]
        # The middle repeat stands for the rate; the batches of all repeats carry its spread.
        levels.append(Level(
            qps=qps, attainment=hits / n, arrivals=n, score=sorted(s.value for s in scores)[len(scores) // 2],
            batch_scores=tuple(b for s in scores for b in s.batches),
            stable=not any(m.public.stationarity == "UNSTABLE" for m in members),
            completed_qps=float(np.mean([m.public.completed_qps for m in members])),
            states=sum(m.states for m in members),
            load_sd_ratio=float(np.mean([m.load_sd_ratio for m in members])) / math.sqrt(len(members)),
            attainment_most=wilson(hits / n * worth, worth)[1],
            inflation=sum(b * m.public.planned for b, m in zip(inflations, members, strict=True)) / n,
        ))  # fmt: skip
    return levels


def _is_search(raw: dict[str, Any], results: list[StageResult]) -> bool:
    return raw.get("shape") == "knee_search" and any(usable(r.public) for r in results)


def _capacity(
    results: list[StageResult], slo: Slo, lambda_max_qps: float | None, searched: Crossing | None = None
) -> Capacity:
    held = _held(results) if searched is not None else said("")
    levels = _levels(results, "joint")
    found = capacity(levels, slo.attainment_target, lambda_max_qps=lambda_max_qps, found=searched, note=held)
    verdicts: dict[float, set[str]] = {}
    for result in results:
        if usable(result.public):
            verdicts.setdefault(round(result.public.offered_qps, 9), set()).add(result.public.verdict)
    add_note(found, below_met(found, [x for x in levels if verdicts[x.qps] == {"MET"}]))
    whole = crossing(_levels(results, "e2e"), 0.95)
    found.p95_crossing_qps = whole.value
    found.p95_crossing_kind = whole.kind if whole.finished_qps is None else "growth"
    found.p95_crossing_low_qps, found.p95_crossing_high_qps = whole.low, whole.high
    knee = found.knee_qps if found.knee_qps is not None else found.knee_high_qps
    limit = whole.value if whole.value is not None else whole.high
    # Where in-flight grows though the answers were in time, P95 crossed nothing: it has no steady value.
    passed = whole.kind in ("crossing", "below") and whole.finished_qps is None
    if passed and knee is not None and limit is not None and limit < knee:
        crosses = whole.kind == "crossing" and whole.value is not None
        where = said("capacity.p95_at", qps=rate_text(whole.value)) if crosses else said("capacity.p95_always")
        add_note(found, said("capacity.p95", target_s=slo.e2e_target_s, where=where))
    return found


def _held(results: list[StageResult]) -> dict[str, Any]:
    """What the hold at the watermark showed, as a sentence; an empty one when the search had none."""
    hold = next((r.public for r in results if r.public.name.endswith(" hold")), None)
    if hold is None:
        return said("")
    share, where = hold.attainment_joint.value, {"offered_qps": hold.offered_qps, "window_s": hold.window_s}
    if share is None or not usable(hold):
        return said("hold.void", verdict=hold.verdict, **where)
    word = hold.verdict if hold.verdict in ("MET", "NOT_MET") else "UNDECIDED"
    return said(f"hold.{word}", attainment=share, stationarity=hold.stationarity, **where)


def _clock_bound(raw: dict[str, Any]) -> float | None:
    """Largest stated error of a worker's clock offset, seconds; inf when one has a clock of its own and no bound."""
    workers = [w for w in raw.get("worker_info") or [] if isinstance(w, dict)]
    bounds = [_number(w.get("bound_s")) for w in workers]
    known = [b for b in bounds if b is not None]
    if any(b is None and w.get("shared") is False for b, w in zip(bounds, workers, strict=True)):
        known.append(float("inf"))
    return max(known) if known else None


def _ledger_summary(checked: Checked, rows: list[StageRow], problems: list[LedgerProblem]) -> dict[str, Any]:
    return {
        "rows": checked.ledger.rows,
        "planned": sum(r.planned for r in rows),
        "doubled": len(checked.doubled),
        "missing": sum(p.rows for p in problems if p.problem_id == "LED-009"),
        "problems": [
            {"problem_id": p.problem_id, "message": p.message, "rows": p.rows, "examples": p.examples} for p in problems
        ],
    }


def reasons_of(found: Analysis) -> list[Reason]:
    """All reasons of a document: the verdict's and every stage's."""
    return [*found.verdict.reasons, *(r for s in found.stages for r in s.reasons), *found.diagnosis]
