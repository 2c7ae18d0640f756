"""`bench calibrate`: a profile for the embedded engine, fitted from a measured run of any service.

Input: a run folder. Output: a profile file for `engine.profile`, the fit and its error.
Does not: fit (`analysis/step_clock.py`) or map (`engine/calibrate.py`).
"""
from __future__ import annotations

import sys
from pathlib import Path

import click

USAGE_EXIT = 2


@click.command(
    "calibrate",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Fit a profile of the embedded engine from a measured run.

    Reads first and last token times of the run's low-load stages, fits the time of a step, and writes a profile that
    `engine.profile` can name. Memory and link rates cannot be seen by a client: they come from --base and are marked
    as guesses.

    \b
    Example:
      bench calibrate runs/20261129T120000Z-1a2b --output my-service.json
      bench simulate --config configs/demo.json --set engine.profile=my-service.json
    """,
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--output", "-o", type=click.Path(path_type=Path), default=Path("profile.json"), show_default=True,
              help="Where the profile is written.")
@click.option("--base", default="h100-8b", show_default=True, help="Profile for what a client cannot see.")
@click.option("--force", is_flag=True, help="Write over an existing file.")
def command(run: Path, output: Path, base: str, force: bool) -> None:
    """Fit, write and print."""
    from analysis.analyse import analyse_run
    from analysis.load import LedgerError
    from engine.calibrate import profile_from_fit
    from engine.profiles import load_profile, write_profile

    try:
        if output.suffix != ".json":
            raise ValueError(f"--output {output}: the name must end in .json, or engine.profile will not read it")
        if output.exists() and not force:
            raise ValueError(f"{output} exists; give another --output, or --force to write over it")
        model = analyse_run(run).model or {}
        if not model.get("fit"):
            raise ValueError(f"{run}: no step law could be fitted. {' '.join(model.get('notes', []))}")
        profile = profile_from_fit(model["fit"], load_profile(base), output.stem, f"run {run.name}")
        write_profile(output, profile)
    except (LedgerError, OSError, ValueError) as error:
        click.echo(f"bench calibrate: {error}", err=True)
        sys.exit(USAGE_EXIT)
    fit = model["fit"]
    click.echo(f"step = {fit['alpha_s'] * 1e3:.4f} ms + {fit['beta_s'] * 1e6:.3f} us/sequence + "
               f"{fit['gamma_s'] * 1e6:.3f} us/prompt token + {(fit.get('kv_s') or 0) * 1e9:.2f} ns/cached token")
    click.echo(f"fit: {profile.source}")
    for note in model.get("notes", []):
        click.echo(f"note: {note}")
    click.echo(f"written: {output}")
