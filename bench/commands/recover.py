"""`bench recover`: one whole run folder, from what is left of a lost master's run or from the parts of one plan."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import click

from bench.commands.options import quiet_option


@click.command(
    "recover",
    help="""Put a run together: after its master was lost, or out of the parts of several masters.

    SOURCE is a run folder, a .shard file, or a folder that holds .shard files. Arrivals of which nobody kept a row get
    one with code CL-LOST, so that no arrival leaves the denominator. With --into the sources are those of the runs that
    `bench run --part` left; they must be parts of one plan that ran together.

    \b
    Example:
      bench recover runs/RUN shards/RUN -o runs/RUN-recovered
      bench recover runs/PART1 runs/PART2 --into runs/MERGED
      bench analyse runs/MERGED
    """,
)
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--output", "-o", default=None, type=click.Path(path_type=Path), help="New run folder, of one run.")
@click.option("--into", default=None, type=click.Path(path_type=Path), help="New run folder, of all parts of a plan.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output instead of text.")
@quiet_option("Only the new folder, and what was lost.")
def command(
    sources: tuple[Path, ...], output: Path | None, into: Path | None, as_json: bool, quiet: bool
) -> None:
    """Recover one run and exit with 0, or 2 when the sources do not fit together."""
    from bench.commands.recovery import RecoveryError, merge, recover

    if (output is None) == (into is None):
        click.echo("Error: give one of --output (one run) and --into (the parts of one plan)", err=True)
        sys.exit(2)
    try:
        done = merge(list(sources), into) if into is not None else recover(list(sources), output)  # type: ignore[arg-type]
    except (RecoveryError, OSError, ValueError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(done), default=str, ensure_ascii=False))
        return
    lost = {name: count for name, count in done.lost.items() if count}
    short = [f"stage {name}: {count} lost (CL-LOST)" for name, count in lost.items()]
    click.echo("\n".join([*short, f"written: {done.run_dir}"] if quiet else done.lines()))
