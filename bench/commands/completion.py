"""`bench completion SHELL`: the script that makes the shell complete commands and options."""

from __future__ import annotations

import sys

import click

SHELLS = ("bash", "zsh", "fish")


@click.command(
    "completion",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Print the completion script of a shell.

    \b
    Example:
      eval "$(bench completion bash)"
      bench completion zsh > ~/.zfunc/_bench
      bench completion fish > ~/.config/fish/completions/bench.fish
    """,
)
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the script of click for the command `bench`."""
    from click.shell_completion import get_completion_class

    from bench.__main__ import main

    kind = get_completion_class(shell)
    if kind is None:
        click.echo(f"bench completion: this version of click knows no {shell}; update click", err=True)
        sys.exit(2)
    complete = kind(main, {}, "bench", "_BENCH_COMPLETE")
    click.echo(complete.source_template % complete.source_vars())
