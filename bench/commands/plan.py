"""`bench plan`: from a run (or a simulation) to the safe rate, the instances and the limits of production.

Input: a run folder or a config to simulate; a target rate, growth, a trace. Output: text or JSON; an exit code.
Does not: arithmetic (control/watermark.py) or change any setting.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from bench.commands.options import quiet_option

USAGE_EXIT, INVALID_EXIT, FAILED_EXIT = 2, 4, 1
BURST_INTERVALS_S = (1.0, 5.0, 10.0, 30.0, 60.0)


@click.command(
    "plan",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""From a run to production: safe rate, instances, batch and queue limits, each with its formula.

    RUN is a run folder with a verdict. Nothing is changed; the settings are printed as a config diff and as options
    of vLLM, SGLang, TensorRT-LLM and llama.cpp.

    Exit code 0: planned; 1: no rate held the SLO; 2: cannot be read; 4: the run is INVALID, nothing follows from it.

    \b
    Example:
      bench plan runs/20261129T120000Z-1a2b
      bench plan runs/20261129T120000Z-1a2b --target-qps 60 --growth 0.3
      bench plan runs/20261129T120000Z-1a2b --runs-with max_num_seqs=64 --runs-with max_num_batched_tokens=8192
      bench plan --simulate configs/demo.json --trace configs/study/chat_turns.jsonl --json
    """,
)
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option(
    "--simulate",
    "config",
    type=click.Path(path_type=Path),
    default=None,
    help="Simulate this config's sweep and plan from that.",
)
@click.option(
    "--target-qps",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    help="Rate that production must carry (default: loadgen.target_qps of the run).",
)
@click.option(
    "--growth",
    type=click.FloatRange(min=-0.99, max=1000),
    default=0.0,
    show_default=True,
    help="How much the target rate will grow, as a share: 0.3 = 30 % more.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    default=None,
    help="Arrivals of production (Azure CSV or Mooncake JSONL): headroom for their bursts.",
)
@click.option(
    "--runs-with",
    "runs_with",
    multiple=True,
    metavar="KEY=N",
    help="What your service runs with: max_num_seqs, batch_size_cap, max_num_batched_tokens. A run of a service does "
    "not say; without them no batch or queue limit is proposed.",
)
@click.option(
    "--write",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="Write the run's config with the planned settings to this file.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@quiet_option("Only the safe rate.")
def command(
    run: Path | None,
    config: Path | None,
    target_qps: float | None,
    growth: float,
    trace: Path | None,
    runs_with: tuple[str, ...],
    write: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Plan and exit."""
    from bench.config import ConfigError

    if (run is None) == (config is None):
        raise click.UsageError("give a run folder, or --simulate CONFIG (not both)")
    try:
        with _run_folder(run, config) as folder:
            document = plan_document(
                folder, target_qps=target_qps, growth=growth, trace=trace, runs_with=_runs_with(runs_with)
            )
    except PlanRefused as error:
        click.echo(f"bench plan: {error}", err=True)
        sys.exit(error.exit_code)
    except ConfigError as error:
        click.echo(f"bench plan: {error}", err=True)
        sys.exit(USAGE_EXIT)
    if write is not None:
        try:
            write.write_text(json.dumps(document["config"], ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            click.echo(f"bench plan: {write}: {error.strerror}; give --write a file that can be written", err=True)
            sys.exit(USAGE_EXIT)
    lines = _text(document, write)
    click.echo(json.dumps(document, ensure_ascii=False) if as_json else lines[0] if quiet else "\n".join(lines))


class PlanRefused(Exception):
    """Nothing can be planned; the text says why and what to do."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@contextmanager
def _run_folder(run: Path | None, config: Path | None) -> Iterator[Path]:
    """The folder to plan from; a simulation writes one for as long as it takes."""
    if run is not None:
        yield run
        return
    from analysis.analyse import write_analysis
    from bench.commands.console import Console
    from bench.commands.job_options import JobError, JobOptions
    from bench.commands.simulate import _simulate

    assert config is not None
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as name:
        folder = Path(name) / "run"
        options = JobOptions(config=config, run_dir=folder, quiet=True)
        try:
            _simulate(options, {}, None, Console(options))
        except JobError as error:
            raise PlanRefused(str(error), error.exit_code) from None
        write_analysis(folder)
        yield folder


def plan_document(
    folder: Path,
    *,
    target_qps: float | None = None,
    growth: float = 0.0,
    trace: Path | None = None,
    runs_with: dict[str, int] | None = None,
) -> dict[str, Any]:
    """The plan of a run folder as a JSON-able dict. Raises PlanRefused."""
    from bench.commands.plan_facts import facts_of, unknown_limits
    from bench.commands.untold import with_settings
    from bench.records.analysis import read_analysis
    from control.watermark import engine_flags, make_plan, without_limits

    if not folder.exists():
        raise PlanRefused(f"{folder} does not exist; give the folder of a run, such as one under runs/", USAGE_EXIT)
    path = folder / "analysis.json" if folder.is_dir() else folder
    try:
        analysis = read_analysis(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanRefused(f"{path}: {reason}; run `bench analyse {folder}` first", USAGE_EXIT) from None
    verdict, capacity = analysis.verdict, analysis.capacity
    if verdict.status == "INVALID":
        reasons = "; ".join(r.reason_id for r in verdict.reasons if r.severity == "invalid")
        raise PlanRefused(
            f"{folder} is INVALID ({reasons or verdict.sentence}): no capacity follows from it; mend the "
            "cause and measure again",
            INVALID_EXIT,
        )
    if capacity.knee_low_qps is None:
        raise PlanRefused(
            f"{folder}: {capacity.sentence} No rate is safe; measure lower rates, or relax the SLO", FAILED_EXIT
        )
    facts, unknown = facts_of(analysis, folder, runs_with or {}), unknown_limits(analysis.run, runs_with or {})
    plan = make_plan(facts, target_qps=target_qps or analysis.target_qps, growth=growth, bursts=_bursts(trace))
    if unknown:
        plan = without_limits(
            plan,
            f"the run does not say {' and '.join(unknown)} of the service (the config's value is this tool's default); "
            "give --runs-with KEY=N",
        )
    diff = _diff(analysis.run, runs_with or {}, plan.settings)
    safe = plan.line("watermark_qps").value
    return {
        "run": analysis.run.get("run_id") or folder.name,
        "simulated": bool(analysis.run.get("simulated")),
        "knee_qps": capacity.knee_qps,
        "knee_low_qps": capacity.knee_low_qps,
        "knee_kind": capacity.knee_kind,
        "lambda_max_qps": capacity.lambda_max_qps,
        "watermark_qps": safe,
        "settings": plan.settings,
        "diff": diff,
        "lines": [
            {
                "key": line.key,
                "value": line.value,
                "unit": line.unit,
                "formula": line.formula,
                "numbers": line.numbers,
                "note": line.note,
            }
            for line in plan.lines
        ],
        "flags": {
            name: {"options": text, "no_option_for": missing} for name, (text, missing) in engine_flags(plan).items()
        },
        "hold": f"bench run{_same_service(analysis.run)} --shape hold --qps {math.floor(safe * 100) / 100:g} "
        f"--stage-duration {plan.line('hold_s').value:g}",
        "config": with_settings(analysis.run.get("config") or {}, plan.settings),
    }


def _runs_with(given: tuple[str, ...]) -> dict[str, int]:
    from bench.commands.plan_facts import LIMITS

    found = {}
    for text in given:
        key, _, value = text.partition("=")
        if key not in LIMITS or not value.isdecimal() or int(value) < 1:
            raise click.UsageError(f"--runs-with {text}: give {', '.join(LIMITS)} = a whole number, at least 1")
        found[key] = int(value)
    return found


def _same_service(run: dict[str, Any]) -> str:
    """Options that make `bench run` use the config and the service of a run, as its run.json names them."""
    config, origin = run.get("config") or {}, run.get("config_origin") or {}
    files = [where.removeprefix("file ") for where in origin.values() if where.startswith("file ")]
    options = ["--config", max(set(files), key=files.count)] if files else []
    if not (config.get("engine") or {}).get("embedded"):
        for key, option in (("base_url", "--base-url"), ("model", "--model")):
            if origin.get(key) == "command line" and config.get(key):
                options += [option, config[key]]
    return "".join(f" {shlex.quote(option)}" for option in options)


def _bursts(trace: Path | None) -> list[Any]:
    from bench.workload.trace import TraceError, read_trace
    from control.watermark import dispersion

    if trace is None:
        return []
    try:
        rows = read_trace(trace)
    except TraceError as error:
        raise PlanRefused(str(error), USAGE_EXIT) from None
    times, span = (rows.time_us / 1e6).tolist(), rows.span_us / 1e6
    found = [burst for w in BURST_INTERVALS_S if (burst := dispersion(times, span, w)) is not None]
    if not found:
        raise PlanRefused(f"{trace}: lasts {span:.3g} s; at least 10 s are needed to see bursts", USAGE_EXIT)
    return found


def _diff(run: dict[str, Any], runs_with: dict[str, int], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Keys whose planned value is not the run's, or for which nobody has said what the service has."""
    from bench.commands.plan_facts import now_of

    found = []
    for key, value in settings.items():
        now, known = now_of(run, runs_with, key)
        if not known or now != value:
            found.append({"key": key, "now": now, "now_known": known, "planned": value})
    return found


def _text(document: dict[str, Any], write: Path | None) -> list[str]:
    lines = [
        f"{'SIMULATED; ' if document['simulated'] else ''}run {document['run']}: keep production at "
        f"{document['watermark_qps']:.4g} requests/s or below (knee's lower bound {document['knee_low_qps']:.4g})",
        "",
    ]
    note = ""
    for line in document["lines"]:
        value = "-" if line["value"] is None else f"{line['value']:.5g}"
        lines.append(f"{line['key']:<24}{value:>9} {line['unit']:<10} {line['formula']}")
        if line["numbers"]:
            lines.append(f"{'':24}  {line['numbers']}")
        if line["note"]:
            lines.append(f"{'':24}  note: {'as above' if line['note'] == note else line['note']}")
        note = line["note"] or note
    lines += ["", "config diff:"]
    for change in document["diff"]:
        now = json.dumps(change["now"]) if change["now_known"] else "(not said by the service)"
        lines += [
            f"- {change['key']}: {now}",
            f"+ {change['key']}: {json.dumps(change['planned'])}",
        ]
    if not document["diff"]:
        lines.append(
            "  (none: the run's settings are the planned ones)" if document["settings"] else "  (none: see the notes)"
        )
    if document["flags"]:
        lines.append("")
    for name, flags in document["flags"].items():
        missing = (
            f"   (no option: {', '.join(flags['no_option_for'])}; keep them in the gateway)"
            if (flags["no_option_for"])
            else ""
        )
        lines.append(f"{name:<13}{flags['options']}{missing}")
    lines += ["", f"prove it: {document['hold']}"]
    if write is not None:
        lines.append(f"written: {write}")
    return lines
