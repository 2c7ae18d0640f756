"""`bench run`: preflight, load, drain, analysis, report."""
from __future__ import annotations

import sys
from pathlib import Path

import click

SHAPES = ("sweep", "repeat", "ramp", "spike", "smoke", "replay", "single")


@click.command(
    "run",
    help="""Preflight, sweep, drain, analyse, report.

    \b
    Example:
      bench run --config configs/scheduler_bench.json
      bench run --config configs/demo.json --qps 10,20 --stage-duration 20
      bench run --config configs/demo.json --shape repeat --repeats 3 --processes 2
    """,
)
@click.option("--config", "-c", type=click.Path(path_type=Path), default=Path("configs/scheduler_bench.json"), show_default=True, help="Config file, JSON or YAML.")
@click.option("--shape", type=click.Choice(SHAPES), default="sweep", show_default=True, help="What the load looks like over time.")
@click.option("--qps", default="", help="Offered rates, such as 5,10,15; overrides the config.")
@click.option("--stage-duration", type=click.FloatRange(min=0), default=0.0, help="Seconds per stage; overrides the config.")
@click.option("--repeats", type=click.IntRange(min=0), default=0, help="Times each rate is run.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of arrivals, lengths and prompts.")
@click.option("--processes", type=click.IntRange(min=0), default=0, help="Worker processes of the sender.")
@click.option("--users", type=click.IntRange(min=0), default=0, help="Closed loop with this concurrency instead of an offered rate.")
@click.option("--base-url", default="", help="Address of the service; overrides config and environment.")
@click.option("--model", default="", help="Model id; overrides config and environment.")
@click.option("--run-dir", type=click.Path(path_type=Path), default=None, help="Folder for this run; default runs/<time>-<id>.")
@click.option("--lang", type=click.Choice(["en", "zh-CN"]), default="en", show_default=True, help="Language of the report.")
@click.option("--no-preflight", is_flag=True, help="Skip the check of the channel.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on standard output at the end.")
@click.option("--quiet", "-q", is_flag=True, help="Only the result.")
def command(config: Path, shape: str, qps: str, stage_duration: float, repeats: int, seed: int, processes: int, users: int,
            base_url: str, model: str, run_dir: Path | None, lang: str, no_preflight: bool, as_json: bool, quiet: bool) -> None:
    """Run one job and exit with its code."""
    from bench.commands.job import JobOptions, run_job

    options = JobOptions(
        config=config, shape=shape, run_dir=run_dir, qps=qps, stage_duration_s=stage_duration, repeats=repeats, seed=seed,
        processes=processes, users=users, base_url=base_url, model=model, lang=lang, preflight=not no_preflight,
        as_json=as_json, quiet=quiet,
    )
    sys.exit(run_job(options))
