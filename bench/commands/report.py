"""`bench report RUN`: write report.html, summary and JUnit again from a run's analysis.json."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

LANGUAGES = ("en", "zh-CN")


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

    RUN is a run folder that holds analysis.json. Without -o, report.html, summary.json, summary.md and junit.xml
    are written into it; in Chinese the first and the third are report.zh-CN.html and summary.zh-CN.md, beside the
    English ones. With -o, only the page is written.
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
@click.option("--static", is_flag=True, help="Leave the chart library out: a small page without live charts.")
@click.option("--json", "as_json", is_flag=True, help="Print the written paths as one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing on success.")
def command(run: Path, lang: str | None, output: Path | None, static: bool, as_json: bool, quiet: bool) -> None:
    """Read analysis.json, write the outputs."""
    from bench.records.analysis import read_analysis

    path = run / "analysis.json" if run.is_dir() else run
    if path.name != "analysis.json" and not path.name.endswith(".json") or not path.exists():
        raise click.UsageError(f"{run}: no analysis.json there. Run `bench analyse {run}` first, then this again.")
    try:
        analysis = read_analysis(path)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise click.UsageError(
            f"{path}: cannot be read as an analysis of this version ({error}). Run `bench analyse {run}` again."
        ) from error
    except OSError as error:
        raise click.UsageError(f"{path}: {error.strerror or error}. Check that the file can be read.") from error
    language = lang or default_language(dict(os.environ))
    try:
        if output is not None:
            from reports.html import render
            from reports.write import write_text

            output.parent.mkdir(parents=True, exist_ok=True)
            written = [write_text(output, render(analysis, lang=language, live=not static))]
        elif static:
            from reports.html import render
            from reports.write import file_name, write_text

            page = path.parent / file_name("report.html", language)
            written = [write_text(page, render(analysis, lang=language, live=False))]
        else:
            from reports.write import write_all

            written = write_all(path.parent, analysis, lang=language, beside=True)
    except OSError as error:
        raise click.UsageError(
            f"{error.filename or path.parent}: {error.strerror or error}. "
            "Choose a folder that can be written (-o FILE)."
        ) from error
    if as_json:
        click.echo(json.dumps({"verdict": analysis.verdict.status, "files": [str(p) for p in written]}))
    elif not quiet:
        for item in written:
            click.echo(str(item))
