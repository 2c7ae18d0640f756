"""What keeps the start of a command short: a first look at its folders, and numpy without its threads.

Used by: commands that send no load. Does not: read a run (the analysis does, and says more).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

USAGE_EXIT = 2


def refuse_missing(name: str, *runs: Path) -> None:
    """End with code 2 when a run is not there, before the libraries of the analysis are loaded."""
    for run in runs:
        if not run.exists():
            text = f"{run}: there is no such folder; give the run folder that `bench run` printed"
            click.echo(f"bench {name}: {text}", err=True)
            sys.exit(USAGE_EXIT)


def unfilled(problems: Sequence[Any]) -> str:
    """The last line about an address or a model that nobody filled in; `problems`: one for each."""
    names = " and ".join(problem.where.split()[-1] for problem in problems)
    return f"the run may not start: {names} {'is' if len(problems) == 1 else 'are'} not filled in"


def load_numpy_alone() -> None:
    """Load numpy without the threads of its linear algebra, for a command that does none.

    OpenBLAS starts one thread per core when it is loaded, half of the CPU that loading numpy takes. It reads the
    variable then and never again; so it is put back, and processes that are started later are as the user asked.
    """
    if "numpy" in sys.modules:
        return
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        import numpy  # noqa: F401 - for what loading it does
    finally:
        if before is None:
            del os.environ["OPENBLAS_NUM_THREADS"]
        else:
            os.environ["OPENBLAS_NUM_THREADS"] = before
