"""`bench analyse`: write analysis.json again from any run folder, and print its verdict.

Input: a run folder (or a Locust *_stats.csv). Output: analysis.json, a short text or the JSON.
Does not: arithmetic; see `analysis/analyse.py`.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from bench.commands.options import quiet_option
from bench.commands.starting import refuse_missing

USAGE_EXIT = 2
NO_VERDICT_EXIT = 4  # a CSV alone cannot carry a verdict


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print analysis.json instead of the summary.")
@click.option(
    "--slo-ttft-ms", type=click.FloatRange(min=0, min_open=True), help="TTFT deadline instead of the run's, ms."
)
@click.option(
    "--slo-tpot-ms", type=click.FloatRange(min=0, min_open=True), help="TPOT deadline instead of the run's, ms."
)
@click.option("--slo-p95-ms", type=click.FloatRange(min=0, min_open=True), help="P95 target of whole answers, ms.")
@click.option(
    "--attainment",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Share of all arrivals that must meet the deadlines, 0..1.",
)
@click.option("--target-qps", type=click.FloatRange(min=0, min_open=True), help="Rate at which the SLO must hold, 1/s.")
@click.option("--models/--no-models", default=True, help="Fit the queueing models too (the slower half).")
@quiet_option("Only the verdict.")
def command(
    run: Path, as_json: bool, slo_ttft_ms: float | None, slo_tpot_ms: float | None, slo_p95_ms: float | None,
    attainment: float | None, target_qps: float | None, models: bool, quiet: bool,
) -> None:  # fmt: skip
    """Write analysis.json again from any run folder and print its verdict.

    The exit code is the verdict's: 0 passed, 1 SLO missed, 3 nothing answered, 4 INVALID, 130 interrupted;
    2 when the folder cannot be analysed. A folder with only Locust's CSV gives its rows with their bounds
    and no verdict (exit code 4).

    \b
    Example:
      bench analyse runs/20261129T120000Z-1a2b
      bench analyse runs/20261129T120000Z-1a2b --slo-ttft-ms 500 --json
    """
    refuse_missing("analyse", run)
    from analysis.load import LedgerError

    try:
        code = _analyse(
            run, as_json, quiet, slo_ttft_ms=slo_ttft_ms, slo_tpot_ms=slo_tpot_ms, slo_p95_ms=slo_p95_ms,
            attainment_target=attainment, target_qps=target_qps, models=models,
        )  # fmt: skip
    except LedgerError as exc:
        click.echo(f"bench analyse: {exc}", err=True)
        sys.exit(USAGE_EXIT)
    except OSError as exc:
        click.echo(
            f"bench analyse: {exc.filename or run}: {exc.strerror or exc}; check the folder and its rights", err=True
        )
        sys.exit(USAGE_EXIT)
    sys.exit(code)


def _analyse(run: Path, as_json: bool, quiet: bool, **overrides: Any) -> int:
    from analysis.analyse import write_analysis
    from analysis.csv_check import csv_only_report
    from bench.records.analysis import to_json
    from bench.records.ledger import find_requests

    if find_requests(run) is None and (run.is_file() or any(run.glob("*_stats.csv"))):
        report = csv_only_report(run)
        lines = _csv_text(report)
        click.echo(json.dumps(report, indent=1) if as_json else lines[0] if quiet else "\n".join(lines))
        return NO_VERDICT_EXIT
    found = write_analysis(run, **overrides)
    if as_json:
        click.echo(to_json(found))
    else:
        click.echo(verdict_lines(found)[0] if quiet else "\n".join(summary_lines(found, run)))
    return found.verdict.exit_code


def summary_lines(found: Any, run: Path) -> list[str]:
    """The verdict, its reasons, the capacity and one line per stage, as text."""
    from analysis.run_files import read_stages

    planned = {(row.stage, row.repeat): row.planned for row in read_stages(run)[0]}
    lines = verdict_lines(found)
    lines.append("")
    head = f"{'stage':<16}{'planned':>8}{'window':>8}{'done/s':>9}{'good/s':>9}{'attain':>9}"
    lines.append(f"{head} {'TTFT p95':>12} {'TPOT p95':>12} {'E2E p95':>12}  verdict")
    measured = [s for s in found.stages if s.verdict != "EMPTY"]
    for s in measured:
        share = s.attainment_joint.value
        cells = [_ms(s.latency["ttft_s"].p95), _ms(s.latency["tpot_s"].p95), _ms(s.latency["e2e_s"].p95)]
        attained = "-" if share is None else f"{share:.4f}"
        lines.append(
            f"{s.name:<15} {planned.get((s.stage, s.repeat), '-'):>8}{s.planned:>8}"
            f"{s.completed_qps:>9.2f}{s.goodput_qps:>9.2f}{attained:>9}"
            f" {cells[0]:>12} {cells[1]:>12} {cells[2]:>12}  {s.verdict}, {s.stationarity}"
        )
    if measured:
        lines.append("planned: arrivals of the whole stage in stages.csv; window: rows found that were due in the "
                     "measurement window")  # fmt: skip
        lines.append("done/s: answers that ended in the window; good/s: arrivals planned in it that met the SLO, "
                     "whenever they ended")  # fmt: skip
    missing = [s.name for s in found.stages if s.verdict == "EMPTY"]
    if missing:
        lines.append(f"not measured: {', '.join(missing)}")
    lines += [f"{r.reason_id}: {r.text} -> {r.next_step}" for r in found.diagnosis]
    lines.append(f"written: {run / 'analysis.json'}")
    return lines


def verdict_lines(found: Any) -> list[str]:
    """The verdict, its reasons with their next steps, and the capacity; none of it under INVALID."""
    v = found.verdict
    marks = ["INTERRUPTED"] * v.interrupted + ["SIMULATED"] * bool(found.run.get("simulated"))
    marked = f" ({', '.join(marks)})" if marks else ""
    lines = [f"{v.status}{marked}: {v.sentence.removeprefix('INTERRUPTED. ')}"]
    for reason in v.reasons:
        if reason.severity in ("invalid", "fail", "warn"):
            if reason.text in v.sentence and not reason.next_step:
                continue  # the sentence says it all
            step = f" -> {reason.next_step}" if reason.next_step else ""
            lines.append(f"  {reason.reason_id}: {reason.text}{step}")
    if v.status != "INVALID" and found.capacity.sentence:
        lines.append(found.capacity.sentence)
    return lines


def _ms(value: float | None) -> str:
    """Seconds as text in ms; a value that is withheld is a dash."""
    if value is None:
        return "-"
    return "inf" if value == float("inf") else f"{value * 1e3:.1f} ms"


def _csv_text(report: dict[str, Any]) -> list[str]:
    lines = [f"{report['source']}: no verdict. {report['loss']}", ""]
    lines += [f"problem: {p}" for p in report["problems"]]
    lines.append(f"{'type':<12}{'name':<20}{'requests':>9}{'failures':>9}{'mean ms':>11}{'p95 ms (bounds)':>24}")
    for row in report["rows"]:
        mean = "-" if row["mean_s"] is None else f"{row['mean_s'] * 1e3:.2f}"
        low, high = row.get("p95_low_s"), row.get("p95_high_s")
        bounds = "-" if low is None else f"{low * 1e3:.5g} to {high * 1e3:.5g}"
        lines.append(
            f"{row['type']:<12}{row['name']:<20}{row['requests']:>9}{row['failures']:>9}{mean:>11}{bounds:>24}"
        )
    return lines
