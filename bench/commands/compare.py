"""`bench compare BASE NEW`: what became worse, better, or did not clearly change."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from bench.commands.options import LANGUAGES
from bench.commands.starting import refuse_missing

USAGE_EXIT, INVALID_EXIT = 2, 4


@click.command(
    "compare",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Compare a run with a baseline, rate by rate.

    \b
    Example:
      bench compare runs/BASE runs/NEW
      bench compare runs/BASE runs/NEW --tolerance 0.2 --json

    Both are run folders of one test: other loads, models or SLOs are refused without --force. A number is called
    worse when its interval excludes no change and the effect exceeds the tolerance and the spread between repeats.
    Writes compare.json and compare.html into NEW. Exit code 5: something is worse; 0: nothing is; 2: not the same
    test or no run; 4: a run is INVALID.
    """,
)
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Compare although the loads differ or a run is INVALID.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, max=10),
    default=0.10,
    show_default=True,
    help="Relative change of a latency that is let pass; a tenth of it for attainment.",
)
@click.option("--lang", type=click.Choice(LANGUAGES), default="en", show_default=True, help="Language of the page.")
@click.option("--json", "as_json", is_flag=True, help="Print compare.json instead of the summary.")
@click.option("--quiet", "-q", is_flag=True, help="Only the exit code and the files.")
def command(base: Path, new: Path, force: bool, tolerance: float, lang: str, as_json: bool, quiet: bool) -> None:
    """Compare two runs and exit with 5 on a regression."""
    refuse_missing("compare", base, new)
    from analysis.compare_runs import CompareError
    from analysis.load import LedgerError

    try:
        found = compare(base, new, force=force, tolerance=tolerance, lang=lang)
    except CompareError as error:
        click.echo(f"bench compare: {error}", err=True)
        sys.exit(INVALID_EXIT if error.invalid else USAGE_EXIT)
    except LedgerError as error:
        click.echo(f"bench compare: {error}", err=True)
        sys.exit(USAGE_EXIT)
    except OSError as error:
        what = error.filename or new
        click.echo(f"bench compare: {what}: {error.strerror or error}; check the folder and its rights", err=True)
        sys.exit(USAGE_EXIT)
    if as_json:
        click.echo(json.dumps(found.to_dict(), ensure_ascii=False, allow_nan=False))
    elif not quiet:
        click.echo("\n".join([*lines(found), f"report: {new / 'compare.html'}"]))
    sys.exit(found.exit_code)


def compare(
    base: Path, new: Path, *, force: bool = False, tolerance: float = 0.10, lang: str = "en", analysed: Any = None
) -> Any:
    """The comparison, after compare.json and compare.html are in the folder of the new run.

    `analysed`: the analysis of the new run where it was just made of its rows.
    """
    from analysis.compare_runs import compare_runs
    from reports.compare import render
    from reports.write import write_text

    found = compare_runs(base, new, force=force, tolerance=tolerance, analysed=analysed)
    data = found.to_dict()
    write_text(new / "compare.json", json.dumps(data, ensure_ascii=False, indent=1, allow_nan=False) + "\n")
    write_text(new / "compare.html", render(data, lang=lang))
    return found


def against(
    base: Path, new: Path, *, force: bool = False, lang: str = "en", analysed: Any = None
) -> tuple[dict[str, Any], Any, str, int]:
    """(what the report shows of it, the comparison or None, why there is none, exit code) of a run with a baseline."""
    from analysis.compare_runs import CompareError
    from analysis.load import LedgerError

    try:
        found = compare(base, new, force=force, lang=lang, analysed=analysed)
    except CompareError as error:
        refusal = {"code": error.code, "details": error.details, "text": str(error), "base": str(base)}
        return {"refused": refusal}, None, str(error), INVALID_EXIT if error.invalid else USAGE_EXIT
    except LedgerError as error:
        refusal = {"code": "unreadable", "details": [str(error)], "text": str(error), "base": str(base)}
        return {"refused": refusal}, None, str(error), USAGE_EXIT
    return found.to_dict(), found, "", found.exit_code


def lines(found: Any) -> list[str]:
    """The comparison as text: the sentence, what changed, and what to know about it."""
    out = [found.sentence]
    for change in found.changes:
        if change.outcome in ("worse", "better"):
            out.append(f"  {change.outcome:<6} {_words(change)}")
    out.append(f"  {found.counts['no_clear_change']} no clear change, {found.counts['not_compared']} not compared")
    out += [f"not compared: {_missing(item)}" for item in found.not_compared]
    out += [f"left out: {text}" for text in found.left_out]
    out += [f"different: {text}" for text in found.differences]
    return out + [f"note: {text}" for text in found.notes]


def _missing(item: dict[str, Any]) -> str:
    """`TTFT p95 at 4, 8 requests/s: too few arrivals`; without a number the whole rate."""
    rates = f"{', '.join(f'{q:g}' for q in item['rates'])} requests/s"
    what = f"{', '.join(item['numbers'])} at {rates}" if item["numbers"] else rates
    return f"{what}: {item['reason']}"


def _words(change: Any) -> str:
    from analysis.compare_runs import words

    bounds = ""
    if change.low is not None:
        scale, unit = (100, " %") if change.unit == "s" else (1, "")
        low, high = (f"{v * scale:+z.3g}" for v in (change.low, change.high))
        bounds = f"; change {low} to {high}{unit}"
    floor = ""
    if change.noise_floor is not None:
        floor = f"; repeats differ by {change.noise_floor:.2g}" + ("" if change.unit == "1" else " of it")
    return words(change) + bounds + floor
