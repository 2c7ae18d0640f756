"""`analysed(run_dir)`: the analysis of a run folder, made in a process of its own while this one gets ready to draw.

Input: a run folder. Output: its `analysis.json`, new, and what it holds.
Does not: arithmetic; see `analysis/analyse.py`.

1. The analysis and the report need different libraries, half a second each; two processes load them side by side.
2. What the analysis refuses comes back as an exception with the same text. Ctrl-C is the caller's to handle: the
   process hears nothing of it, and ends when the caller leaves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.commands.job_options import PROJECT
from bench.records.analysis import Analysis, read_analysis

REFUSED_EXIT = 2


class AnalysisRefused(Exception):
    """A run folder that cannot be analysed; the text says what to do."""


def analysed(run_dir: Path, meanwhile: Callable[[], None] = lambda: None) -> Analysis:
    """The analysis of a run folder, written there too; `meanwhile` runs here while it is made.

    Raises AnalysisRefused where there is nothing to analyse, OSError where a file cannot be read or written.
    """
    command = [sys.executable, "-m", __name__, str(run_dir.absolute())]
    paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    try:
        meanwhile()
        said, _ = process.communicate()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        raise _refusal(run_dir, process.returncode, said)
    return read_analysis(run_dir / "analysis.json")


def _refusal(run_dir: Path, code: int, said: str) -> Exception:
    """What the process said, as an exception; a bug or a signal is a refusal with its code (its text is above)."""
    if code == REFUSED_EXIT:
        told = json.loads(said)
        if told["errno"] is None:
            return AnalysisRefused(told["text"])
        return OSError(told["errno"], told["text"], told["file"])
    ended = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    text = f"{run_dir}: the analysis ended {ended}; when memory was short, close other programs, then: bench analyse"
    return AnalysisRefused(f"{text} {run_dir}")


def _main(run_dir: Path) -> int:
    """The process: write analysis.json, or say on standard output why not."""
    from analysis.analyse import write_analysis
    from analysis.load import LedgerError

    told: dict[str, Any]
    try:
        write_analysis(run_dir)
        return 0
    except LedgerError as error:
        told = {"errno": None, "text": str(error), "file": None}
    except OSError as error:
        told = {"errno": error.errno or 0, "text": error.strerror or str(error), "file": error.filename}
    print(json.dumps(told))
    return REFUSED_EXIT


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
