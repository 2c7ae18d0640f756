"""`bench run`: preflight, load, drain, analysis, report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from bench.commands.options import SHAPES, load_options, refuse_beside


@click.command(
    "run",
    help="""Preflight, sweep, drain, analyse, report.

    \b
    Example:
      bench run --config configs/scheduler_bench.json
      bench run --config configs/demo.json --qps 10,20 --stage-duration 20
      bench run --config configs/demo.json --shape repeat --repeats 3 --processes 2
      bench run --config configs/demo.json --baseline runs/BASE
      bench run --config configs/demo.json --shape hold --qps 12 --stage-duration 600
      bench run --config configs/demo.json --users 16 --stage-duration 60

    Exit code 0: the SLO holds; 1: missed; 2: config or usage; 3: service or network; 4: the measurement is INVALID;
    5: worse than --baseline; 130: interrupted (the report is written).
    """,
)
@click.option(
    "--config",
    "-c",
    type=click.Path(path_type=Path),
    default=Path("configs/scheduler_bench.json"),
    show_default=True,
    envvar="BENCH_CONFIG",
    help="Config file, JSON or YAML.",
)
@click.option(
    "--shape", type=click.Choice(SHAPES), default="sweep", show_default=True, help="What the load looks like over time."
)
@load_options
@click.option(
    "--users", type=click.IntRange(min=1), default=None, help="Closed loop: so many requests always open, no rate."
)
@click.option("--base-url", default="", help="Address of the service; overrides config and environment.")
@click.option("--model", default="", help="Model id; overrides config and environment.")
@click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    default=None,
    help="Run folder to compare with; exit code 5 when something is worse.",
)
@click.option(
    "--client-calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    envvar="BENCH_CLIENT_CALIBRATION",
    help="File of `bench calibrate-client`; default: client-calibration.json beside the runs.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=0),
    default=0,
    envvar="BENCH_WORKERS",
    help="Wait for so many workers of other machines and let them send (docs/scaling.md).",
)
@click.option(
    "--bind",
    default="127.0.0.1:5557",
    show_default=True,
    envvar="BENCH_BIND",
    help="Address for these workers. There is no password on it: keep it inside a network of your own.",
)
@click.option(
    "--part",
    default="",
    envvar="BENCH_PART",
    help="Send only this part of the plan, such as 1/4; other masters send the others (docs/scaling.md).",
)
@click.option(
    "--meet",
    default="127.0.0.1:5560",
    show_default=True,
    envvar="BENCH_MEET",
    help="Address where the master of part 1 waits for the others. No password on it either.",
)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Seconds to wait for a service that is not up yet.",
)
@click.option("--no-preflight", is_flag=True, help="Skip the check of the channel.")
def command(config: Path, shape: str, users: int | None, base_url: str, model: str, baseline: Path | None,
            no_preflight: bool, **load: Any) -> None:  # fmt: skip
    """Run one job and exit with its code."""
    from bench.commands.job import run_job
    from bench.commands.job_options import JobOptions

    if users:
        refuse_beside("--users", "a closed loop has no rate", "--qps", "--shape")
    options = JobOptions(
        config=config, shape=shape, users=users or 0, base_url=base_url, model=model, preflight=not no_preflight,
        baseline=baseline, **load,
    )  # fmt: skip
    sys.exit(run_job(options))
