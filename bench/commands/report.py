"""`bench report RUN`: write report.html, summary and JUnit again, from the run's rows.

1. Where the rows are, they are analysed again: nothing that stands in an old analysis.json is drawn unchecked. Its SLO
   and target are asked again (`bench analyse --slo-ttft-ms 500` stays), and this is said where they are not the run's.
2. An analysis.json without its rows is drawn with the mark UNCHECKED.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from bench.commands.options import LANGUAGES

INVALID_EXIT = 4


def default_language(env: dict[str, str]) -> str:
    """The report language that the locale asks for, else English."""
    locale = env.get("LC_ALL") or env.get("LC_MESSAGES") or env.get("LANG") or ""
    return "zh-CN" if locale.lower().startswith("zh") else "en"


@click.command(
    "report",
    help="""Write the report of a run again.

    \b
    Example:
      bench report runs/20261129T101500Z-7f3a
      bench report runs/20261129T101500Z-7f3a --lang zh-CN
      bench report runs/20261129T101500Z-7f3a --baseline runs/20261128T093000Z-1c0e

    RUN is a run folder. Its rows are analysed again, with the SLO of its analysis.json where there is one; an
    analysis.json that is not what they give is replaced. Without the rows, analysis.json (RUN may be the file itself)
    is drawn with the mark UNCHECKED. Without -o, report.html, summary.json, summary.md and junit.xml are written into
    the folder; in Chinese the first and the third are report.zh-CN.html and summary.zh-CN.md, beside the
    English ones. With -o, only the page is written. With --baseline the page compares RUN with another run
    (`bench compare` does the same on a page of its own); a comparison made before (compare.json) is shown again.
    Exit code 0: the files are written and the measurement can be trusted, whether the SLO holds or not (`bench analyse`
    gives the verdict's code); 4: they are written, and the measurement is INVALID; 2: there is nothing to draw; with
    --baseline 5 when something is worse, 2 or 4 when the runs cannot be compared.
    """,
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--lang", type=click.Choice(LANGUAGES), default=None, help="Language of the page (default: from LANG).")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="Write the page to this file only.",
)
@click.option(
    "--baseline", type=click.Path(path_type=Path), default=None, help="Run folder to compare with, inside the page."
)
@click.option("--force", is_flag=True, help="With --baseline: compare although the loads differ or a run is INVALID.")
@click.option("--static", is_flag=True, help="Leave the chart library out: a small page without live charts.")
@click.option("--json", "as_json", is_flag=True, help="Print the written paths as one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing on success.")
def command(
    run: Path, lang: str | None, output: Path | None, baseline: Path | None, force: bool, static: bool, as_json: bool,
    quiet: bool,
) -> None:  # fmt: skip
    """Analyse the rows, or read analysis.json where there are none; write the outputs."""
    path = run / "analysis.json" if run.is_dir() else run
    analysis, said = analysed(run, path, keep=output is None)
    language = lang or default_language(dict(os.environ))
    shown, compared, note = _comparison(path.parent, baseline, force, language, analysis)
    code = _exit_code(analysis, compared)
    for line in (said, note):
        if line:
            click.echo(f"bench report: {line}", err=True)
    try:
        written = _write(path.parent, analysis, language, output, static, shown)
    except OSError as error:
        raise click.UsageError(
            f"{error.filename or path.parent}: {error.strerror or error}. "
            "Choose a folder that can be written (-o FILE)."
        ) from error
    if as_json:
        paths = [str(p) for p in written]
        click.echo(json.dumps({"verdict": analysis.verdict.status, "exit_code": code, "files": paths}))
    elif not quiet:
        for item in written:
            click.echo(str(item))
    if code == INVALID_EXIT and analysis.verdict.status == "INVALID":
        click.echo(f"bench report: INVALID: {analysis.verdict.sentence} (exit code {code})", err=True)
    sys.exit(code)


def _exit_code(analysis: Any, compared: int) -> int:
    """What drawing says: the measurement cannot be trusted, what the comparison found, or 0.

    A missed SLO is no fault of a page: the code of the verdict comes from `bench run` and `bench analyse`.
    """
    invalid = INVALID_EXIT if analysis.verdict.status == "INVALID" else 0
    if not (invalid and compared):
        return invalid or compared
    from analysis.verdict import exit_code

    return exit_code({invalid, compared})


def analysed(run: Path, path: Path, *, keep: bool) -> tuple[Any, str]:
    """(the analysis to draw, what to say about it). `keep`: analysis.json may be replaced. Raises click.UsageError."""
    from bench.records.ledger import find_requests

    if csv := _csv_alone(run):
        raise click.UsageError(
            f"{csv}: no page can be drawn from Locust's CSV alone: it holds one row of counts and rounded percentiles "
            f"per name, and no arrival. `bench analyse {run}` prints these with their bounds. A page needs the "
            "requests.csv of a run: `bench run` writes it, and so does plain locust with locustfiles/chat.py."
        )
    if not run.is_dir() or find_requests(run) is None:
        found = _read(run, path)
        found.run = {**found.run, "unchecked": True}
        return found, f"{path} is drawn as it is: it was not checked against the rows of the run (UNCHECKED)"
    from reports import svg

    svg.warm()  # the drawing engine starts beside the analysis
    from analysis.again import analyse_again
    from analysis.load import LedgerError
    from bench.records.analysis import to_json
    from reports.write import write_text

    said = []
    try:
        found, asked = analyse_again(run)
        if asked:
            values = ", ".join(f"{name} {value:g}" for name, value in asked.items())
            said = [f"asked as in {path.name}, not as in the run: {values}"]
        text = to_json(found) + "\n"
        if keep and (not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text):
            said += [f"{path} was not what the rows of the run give, and is replaced"] if path.is_file() else []
            write_text(path, text)
    except LedgerError as error:
        raise click.UsageError(f"{error}. Give {path} itself to draw it unchecked.") from error
    except OSError as error:
        raise click.UsageError(f"{error.filename or run}: {error.strerror or error}. Check its rights.") from error
    return found, "; ".join(said)


def _csv_alone(run: Path) -> Path | None:
    """Locust's own table, where there are neither rows nor an analysis to draw."""
    from bench.records.ledger import find_requests

    if not run.is_dir():
        return run if run.name.endswith(("_stats.csv", "_stats_history.csv")) and run.is_file() else None
    if find_requests(run) is not None or (run / "analysis.json").exists():
        return None
    return min(run.glob("*_stats.csv"), default=None)


def _read(run: Path, path: Path) -> Any:
    """The analysis of a file, or a usage error that says what to do."""
    from bench.records.analysis import read_analysis

    if path.name != "analysis.json" and not path.name.endswith(".json") or not path.exists():
        what = "holds neither requests.csv nor analysis.json" if run.exists() else "is not there"
        raise click.UsageError(f"{run}: {what}; give the run folder that `bench run` printed, or its analysis.json.")
    try:
        return read_analysis(path)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise click.UsageError(
            f"{path}: cannot be read as an analysis of this version ({error}). Run `bench analyse {run}` again."
        ) from error
    except OSError as error:
        raise click.UsageError(f"{path}: {error.strerror or error}. Check that the file can be read.") from error


def _comparison(
    run_dir: Path, baseline: Path | None, force: bool, lang: str, analysis: Any
) -> tuple[dict[str, Any] | None, int, str]:
    """(what the page shows, exit code, what to say on standard error) of the comparison, new or stored."""
    if baseline is not None:
        from bench.commands.compare import against

        try:
            made = None if analysis.run.get("unchecked") else analysis
            shown, _, refused, code = against(baseline, run_dir, force=force, lang=lang, analysed=made)
        except OSError as error:
            raise click.UsageError(f"{error.filename or baseline}: {error.strerror or error}.") from error
        return shown, code, f"no comparison: {refused}" if refused else ""
    stored = run_dir / "compare.json"
    if not stored.exists():
        return None, 0, ""
    try:
        if stored.stat().st_mtime < (run_dir / "analysis.json").stat().st_mtime:
            return None, 0, f"{stored} is older than analysis.json and is not shown; add --baseline to compare again"
        shown = json.loads(stored.read_text(encoding="utf-8"))
        if not isinstance(shown, dict) or not {"changes", "counts", "not_compared"} <= shown.keys():
            raise ValueError("it is not of this version")
    except (OSError, ValueError) as error:
        return None, 0, f"{stored} cannot be used ({error}) and is not shown; add --baseline to compare again"
    return shown, 0, ""


def _write(
    run_dir: Path, analysis: Any, lang: str, output: Path | None, static: bool, shown: dict[str, Any] | None
) -> list[Path]:
    """The files written, as the options ask."""
    from reports.write import file_name, write_all, write_text

    if output is None and not static:
        return write_all(run_dir, analysis, lang=lang, beside=True, comparison=shown)
    from reports.html import render

    page = output or run_dir / file_name("report.html", lang)
    page.parent.mkdir(parents=True, exist_ok=True)
    return [write_text(page, render(analysis, lang=lang, live=not static, comparison=shown))]
