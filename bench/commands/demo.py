"""`bench demo`: the main job against the embedded engine, with nothing to set up."""
from __future__ import annotations

import sys
from pathlib import Path

import click


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
@click.option("--run-dir", type=click.Path(path_type=Path), default=None, help="Folder for this run; default runs/<time>-<id>.")
@click.option("--processes", type=click.IntRange(min=0), default=0, help="Worker processes of the sender.")
@click.option("--lang", type=click.Choice(["en", "zh-CN"]), default="en", show_default=True, help="Language of the report.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on standard output at the end.")
@click.option("--quiet", "-q", is_flag=True, help="Only the result.")
def command(run_dir: Path | None, processes: int, lang: str, as_json: bool, quiet: bool) -> None:
    """Run the demo and exit with its code."""
    from bench.commands.job import PROJECT, JobOptions, run_job

    options = JobOptions(
        config=PROJECT / "configs" / "demo.json", run_dir=run_dir, processes=processes, lang=lang, as_json=as_json,
        quiet=quiet, command=["bench", "demo"],
    )
    sys.exit(run_job(options))
