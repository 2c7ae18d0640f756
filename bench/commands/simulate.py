"""`bench simulate`: the same sweep in virtual time; a run folder as a measured run has, marked SIMULATED.

Input: options; config, trace or an old run folder. Output: a run folder, its analysis and report, an exit code.
Does not: schedule or judge; see `engine/simulate.py` and `analysis/analyse.py`.
"""
from __future__ import annotations

import datetime
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import click

from bench.commands.options import SHAPES as ALL_SHAPES
from bench.commands.options import plan_options, refuse_beside

SHAPES = tuple(name for name in ALL_SHAPES if name not in ("replay", "knee_search"))  # those need a trace, a service
USAGE_EXIT = 2
CHUNK_ROWS = 4096


@click.command(
    "simulate",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""The same sweep in virtual time.

    Runs the config's load through the embedded engine's scheduler without waiting, and writes a run folder that
    `bench analyse` and `bench report` read like a measured one. Nothing is sent anywhere. A gate with `abort` ends the
    sweep early, as in `bench run`; with --compare every rate is simulated.

    \b
    Example:
      bench simulate --config configs/scheduler_bench.json
      bench simulate --config configs/demo.json --set scheduler.policy=edf --set engine.replicas=2
      bench simulate --config configs/demo.json --trace configs/study/chat_turns.jsonl --rate-scale 2
      bench simulate --config configs/demo.json --run runs/20261129T120000Z-1a2b
      bench simulate --config configs/demo.json --compare configs/study/policies.yaml --seeds 3

    Exit code 0: the SLO holds; 1: missed; 2: config or usage; 4: INVALID.
    """,
)
@click.option("--config", "-c", type=click.Path(path_type=Path), default=Path("configs/scheduler_bench.json"),
              show_default=True, help="Config file, JSON or YAML.")
@click.option("--shape", type=click.Choice(SHAPES), default="sweep", show_default=True,
              help="What the load looks like over time.")
@plan_options
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE",
              help="One config value, such as scheduler.policy=edf; may be repeated.")
@click.option("--trace", type=click.Path(path_type=Path), default=None,
              help="Replay this Azure CSV or Mooncake JSONL instead of a shape.")
@click.option("--rate-scale", type=click.FloatRange(min=0, min_open=True), default=None,
              help="With --trace: 2 replays it twice as fast.")
@click.option("--run", "old", type=click.Path(path_type=Path), default=None,
              help="Simulate the load of this old run folder again: its arrivals and lengths.")
@click.option("--compare", type=click.Path(path_type=Path), default=None,
              help="YAML or JSON of name: {key: value}; one table of attainment per rate for all of them.")
@click.option("--seeds", type=click.IntRange(min=1, max=100), default=3, show_default=True,
              help="With --compare: seeds per variant.")
@click.option("--run-dir", type=click.Path(path_type=Path), default=None,
              help="Folder for this run; default runs/<time>-<id>.")
@click.option("--lang", type=click.Choice(["en", "zh-CN"]), default="en", show_default=True,
              help="Language of the report.")
@click.option("--decisions", is_flag=True,
              help="Write decisions.ndjson too: every decision with its numbers, for `bench explain`.")
@click.option("--no-report", is_flag=True, help="Write requests, stages and gauge only; no analysis, no report.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on standard output at the end.")
@click.option("--quiet", "-q", is_flag=True, help="Only the result.")
def command(config: Path, shape: str, qps: str, stage_duration_s: float, repeats: int, seed: int, sets: tuple[str, ...],
            trace: Path | None, rate_scale: float | None, old: Path | None, compare: Path | None, seeds: int,
            run_dir: Path | None, lang: str, decisions: bool, no_report: bool, as_json: bool, quiet: bool) -> None:
    """Simulate and exit with the verdict's code."""
    from bench.commands.console import Console
    from bench.commands.finish import finish_run
    from bench.commands.job_options import JobError, JobOptions
    from bench.config import ConfigError

    if trace is not None and old is not None:
        raise click.UsageError("--trace and --run exclude each other; give one load")
    if compare is not None and old is not None:
        raise click.UsageError("--compare draws its load with seeds of its own; it cannot take that of --run")
    if old is not None:
        load = ("--shape", "--qps", "--stage-duration", "--repeats", "--seed")
        refuse_beside("--run", "the old run has its arrivals", *load)
    if trace is not None:
        refuse_beside("--trace", "the trace is the shape", "--shape")
    if compare is not None:
        refuse_beside("--compare", "it writes a table, no run", "--decisions", "--no-report", "--lang")
    options = JobOptions(
        config=config, shape="replay" if trace else shape, run_dir=run_dir, qps=qps, stage_duration_s=stage_duration_s,
        repeats=repeats, seed=seed, lang=lang, as_json=as_json, quiet=quiet,
    )
    say = Console(options)
    try:
        overrides = _overrides(sets, trace, rate_scale)
        if compare is not None:
            _compare(options, overrides, compare, seeds, say)
            sys.exit(0)
        folder = _simulate(options, overrides, old, say, decisions=decisions)
        code = 0 if no_report else finish_run(folder, lang=lang, say=say)
    except ConfigError as error:
        say.error(str(error), USAGE_EXIT)
        sys.exit(USAGE_EXIT)
    except JobError as error:
        say.error(str(error), error.exit_code)
        sys.exit(error.exit_code)
    sys.exit(code)


def _overrides(sets: tuple[str, ...], trace: Path | None, rate_scale: float | None) -> dict[str, Any]:
    """Dotted config keys from the command line; values are read as YAML."""
    import yaml

    found: dict[str, Any] = {}
    for text in sets:
        key, mark, value = text.partition("=")
        if not mark or not key.strip():
            raise click.UsageError(f"--set {text!r} has no KEY=VALUE; write --set scheduler.policy=edf")
        found[key.strip()] = yaml.safe_load(value)
    if trace is not None:
        found["loadgen.trace_file"] = str(trace)
        found["loadgen.arrival_process"] = "trace"
    if rate_scale is not None:
        if trace is None:
            raise click.UsageError("--rate-scale is for --trace; rates of a sweep come from --qps")
        found["loadgen.trace_rate_scale"] = rate_scale
    return found


def _engine(config: Any) -> Any:
    from bench.commands.job_options import JobError
    from engine.settings import EngineConfig

    try:
        return EngineConfig.from_config(config)
    except ValueError as error:
        raise JobError(str(error), USAGE_EXIT) from None


def _simulate(options: Any, overrides: dict[str, Any], old: Path | None, say: Any, *, decisions: bool = False) -> Path:
    """Write the run folder; its path."""
    from contextlib import ExitStack

    from bench.commands.decisions import DECISIONS, writer
    from bench.commands.prepare import note_prompts, plan_of, run_dir_of, say_remarks
    from bench.config import load_config

    resolved = load_config(options.config, overrides=overrides)
    from engine.simulate import simulate_stages

    # Nothing is sent, so no address is needed.
    say_remarks(options, [problem for problem in resolved.warnings if problem.id != "CFG-012"], say)
    plan, engine = plan_of(options, resolved.config), _engine(resolved.config)
    note_prompts(plan, say)
    found = _old_run(old, plan, say, caching=engine.prefix_caching) if old is not None else None
    rerun = found.rerun if found is not None else None
    if rerun is not None:
        plan = rerun.plan
    with ExitStack() as stack:
        folder = stack.enter_context(run_dir_of(options))
        started = datetime.datetime.now(datetime.UTC)
        journal = stack.enter_context(writer(folder / DECISIONS)) if decisions else None
        stages = simulate_stages(plan, resolved.config, engine=engine, old=rerun, journal=journal)
        stopped_by = _write(folder, plan, stages, resolved.config, say)
        _write_info(folder, resolved, plan, engine, started, "rerun" if rerun is not None else options.shape,
                    found.losses if found is not None else None, stopped_by)
    return folder


def _write(folder: Path, plan: Any, results: Iterator[Any], config: Any, say: Any) -> str:
    """Requests, stages and gauge of a simulation, stage by stage; the `abort` gate that ended it early, or nothing."""
    from bench.commands.simulate_gates import Gates
    from bench.records import ledger
    from bench.records.lost import stage_not_run
    from bench.records.request import FIELD_NAMES
    from bench.records.stage import INFLIGHT_COLUMNS, STAGE_COLUMNS

    gates, stopped_by, done = Gates(plan, config), "", 0
    with (ledger.RowWriter(folder / ledger.REQUESTS, FIELD_NAMES) as requests,
          ledger.RowWriter(folder / ledger.STAGES, STAGE_COLUMNS) as stages,
          ledger.RowWriter(folder / ledger.INFLIGHT, INFLIGHT_COLUMNS) as gauge):
        for result in results:
            rows, row, count = result.rows(), result.stage_row(), gates.begin(result)
            while chunk := list(islice(rows, CHUNK_ROWS)):
                requests.write(chunk)
                gates.add(count, chunk)
            stopped_by = gates.missed(count, row)
            stages.write([row])
            gauge.write(result.inflight_rows())
            seconds = result.end_s - result.start_s
            say.note(f"  {result.stage.name:<18} {len(result.schedule)} arrivals, {seconds:.0f} s simulated")
            done += 1
            if stopped_by:
                break
        stages.write([stage_not_run(stage, marks=["not_run"]) for stage in plan.stages[done:]])
    if stopped_by:
        say.warn(f"stopped in order: {stopped_by}")
    return stopped_by


def _write_info(folder: Path, resolved: Any, plan: Any, engine: Any, started: datetime.datetime, shape: str,
                losses: list[str] | None, stopped_by: str = "") -> None:
    """Write run.json; `losses` of a simulated old run: what could not be carried from it (None: no old run)."""
    from bench import __version__
    from bench.records.digests import file_digests
    from bench.records.ledger import RUN, write_run
    from bench.records.stage import RunInfo
    from bench.workload.schedule import plan_hash

    profile = engine.profile
    write_run(folder / RUN, RunInfo(
        run_id=folder.name, started_utc=started.isoformat(timespec="seconds"),
        finished_utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), tool_version=__version__,
        versions={"python": platform.python_version(), "numpy": version("numpy")},
        host={"system": platform.system(), "machine": platform.machine()}, seed=plan.run_seed,
        schedule_hash=plan_hash(plan) if losses is None else "", command=["bench", *sys.argv[1:]],
        config=resolved.masked(), config_origin=resolved.origin, loop="open", shape=shape, workers=1, simulated=True,
        stopped_by=stopped_by,
        target={"kind": "simulated", "profile": profile.name, "profile_kind": profile.kind,
                "profile_source": profile.source, "replicas": engine.replicas, "style": engine.style,
                **({"losses": losses} if losses else {})},
        files=file_digests(folder),
    ))


def _old_run(folder: Path, plan: Any, say: Any, *, caching: bool) -> Any:
    """The load of an old run folder; what could not be carried from it is said, also with --quiet."""
    from bench.commands.job_options import JobError
    from bench.commands.old_run import read_old_run

    try:
        found = read_old_run(folder, plan, caching=caching)
    except (OSError, ValueError) as error:
        raise JobError(f"--run {folder}: {error}; give the folder that `bench run` printed", USAGE_EXIT) from None
    loads = found.rerun.loads
    guessed, total = sum(load.guessed for load in loads), sum(len(load.schedule) for load in loads)
    if guessed:
        say.note(f"note: {guessed} of {total} answers did not end well there; max_tokens stands for their length")
    for text in found.notes:
        say.note(f"note: {text}")
    for text in found.losses:
        say.warn(f"loss: {text}")
    return found


def _compare(options: Any, overrides: dict[str, Any], path: Path, seeds: int, say: Any) -> None:
    """Print one table for all variants; write it, as CSV and as a chart, when --run-dir is given."""
    import json

    import yaml

    from analysis.compare import cells as cells_of
    from bench.commands.job_options import JobError
    from bench.commands.prepare import plan_of
    from bench.config import load_config
    from engine.compare import samples
    from reports.overlay import overlay_svg

    try:
        variants = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise JobError(f"--compare {path}: {error}", USAGE_EXIT) from None
    if not isinstance(variants, dict) or not all(isinstance(v, dict) for v in variants.values()) or not variants:
        raise JobError(f"--compare {path}: holds no mapping of name: {{key: value}}; see docs/engine.md", USAGE_EXIT)
    found, spent, target = [], {}, None
    for name, keys in variants.items():
        config = load_config(options.config, overrides={**overrides, **keys}).config
        engine, target = _engine(config), config.slo.attainment_target
        first, started = options.seed or config.loadgen.seed, time.process_time()
        for offset in range(seeds):
            plan = plan_of(replace(options, seed=first + offset), config)
            found += samples(str(name), plan, config, engine)
        spent[str(name)] = time.process_time() - started
        changed = ", ".join(f"{k}={v}" for k, v in keys.items()) or "as configured"
        say.note(f"  {name:<18} {changed}; {spent[str(name)]:.1f} s of CPU")
    cells = cells_of(found)
    data = [{**cell.to_dict(), "cpu_s": spent[cell.variant]} for cell in cells]
    click.echo(json.dumps(data) if options.as_json else "\n".join(_table(cells)))
    if options.run_dir is not None:
        options.run_dir.mkdir(parents=True, exist_ok=True)
        (options.run_dir / "compare.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        (options.run_dir / "compare.svg").write_text(overlay_svg(cells, target), encoding="utf-8")
        say.note(f"written: {options.run_dir / 'compare.json'}, {options.run_dir / 'compare.svg'}")


def _table(cells: Any) -> list[str]:
    """One line per variant and rate."""
    lines = [
        "SIMULATED; attainment over ALL arrivals, mean and 95 % interval over seeds; gain: paired, to the first",
        f"{'variant':<18}{'qps':>7}{'attain':>9}{'interval':>17}{'gain':>9}{'interval':>18}{'refused':>9}"
        f"{'worst TTFT':>12}{'preempt.':>10}{'Jain':>7}",
    ]
    for c in cells:
        lines.append(
            f"{c.variant:<18}{c.offered_qps:>7g}{c.attainment:>9.4f}{_range(c.low, c.high):>17}{c.gain:>+z9.4f}"
            f"{_range(c.gain_low, c.gain_high):>18}{c.refused:>9.4f}{c.worst_ttft_s:>10.2f} s{c.preemptions:>10.1f}"
            f"{c.fairness:>7.3f}"
        )
    return lines


def _range(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{low:.4f}..{high:.4f}"

