"""`bench demo`: the main job against the embedded engine, with nothing to set up."""

from __future__ import annotations

import sys
from typing import Any

import click

from bench.commands.options import load_options


@click.command(
    "demo",
    help="""The main job against the embedded engine, ending in a report.

    Starts a simulated LLM service on this machine, sweeps it past its knee in
    under four minutes, and writes the report. No GPU and no key are needed.

    \b
    Example:
      bench demo
    """,
)
@load_options
def command(**load: Any) -> None:
    """Run the demo and exit with its code."""
    from bench.commands.job import run_job
    from bench.commands.job_options import PROJECT, JobOptions

    config = PROJECT / "configs" / "demo.json"  # ours: remarks on it are for nobody here to act on
    sys.exit(run_job(JobOptions(config=config, remarks=False, command=["bench", *sys.argv[1:]], **load)))
