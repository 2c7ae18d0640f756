"""`bench recover`: a whole run folder from what the workers kept, after the master was lost."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command(
    "recover",
    help="""Put a run together from workers' shards and what its master left.

    SOURCE is a run folder, a .shard file, or a folder that holds .shard files. Arrivals of which nobody kept a row get
    one with code CL-LOST, so that no arrival leaves the denominator.

    \b
    Example:
      bench recover runs/RUN shards/RUN -o runs/RUN-recovered
      bench analyse runs/RUN-recovered
    """,
)
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path), help="New run folder.")
def command(sources: tuple[Path, ...], output: Path) -> None:
    """Recover one run and exit with 0, or 2 when the sources do not fit together."""
    from bench.commands.recovery import RecoveryError, recover

    try:
        done = recover(list(sources), output)
    except (RecoveryError, OSError, ValueError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    for line in done.lines():
        click.echo(line)
