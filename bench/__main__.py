"""The command `bench`: finds the sub-command, imports only that one, exits with its code.

Input: command-line arguments. Output: an exit code (see docs/exit-codes.md).
Does not: load locust, numpy or a chart library before a command asks for it.
"""
from __future__ import annotations

import errno
import importlib
import sys

import click

from bench import __version__

# name -> (module, one-line help); a module holds a click command named `command`.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("bench.commands.demo", "The main job against the embedded engine, ending in a report."),
    "init": ("bench.commands.init", "Write a first config, .env.example and a compose file."),
    "check": ("bench.commands.check", "Preflight: is the service reachable, and if not, whose fault is it."),
    "probe": ("bench.commands.probe", "Send one streamed request and print what was recorded of it."),
    "validate": ("bench.commands.validate", "Dry run of a config: problems, resolved values, what to expect."),
    "run": ("bench.commands.run", "Preflight, sweep, drain, analyse, report."),
    "analyse": ("bench.commands.analyse", "Write analysis.json again from any run folder."),
    "report": ("bench.commands.report", "Write report.html again from any run folder."),
    "compare": ("bench.commands.compare", "A run against a baseline: worse, better, or no clear change."),
    "batch-curve": ("bench.commands.batch_curve", "Throughput against the batch cap: where one more seat harms."),
    "recover": ("bench.commands.recover", "Put a run together after its master was lost."),
    "simulate": ("bench.commands.simulate", "The same sweep in virtual time."),
    "plan": ("bench.commands.plan", "From a run to production: safe rate, instances, limits and engine options."),
    "explain": ("bench.commands.explain", "The story of one request: every decision, its numbers and its rule."),
    "watch": ("bench.commands.watch", "A running service by its own metrics: alerts, and a trace to replay."),
    "rollout": ("bench.commands.rollout", "A new policy through replay, shadow, gray and full, with rollback."),
    "calibrate": ("bench.commands.calibrate", "Fit an engine profile from a measured run."),
    "calibrate-client": ("bench.commands.calibrate_client", "What the client adds, and the highest rate it can send."),
    "serve-engine": ("bench.commands.serve_engine", "Start the embedded engine and leave it running."),
    "completion": ("bench.commands.completion", "Print the completion script of bash, zsh or fish."),
}


# What the machine refuses, and what to do about it. Any other OSError is a bug of ours, or a pipe that was closed.
REFUSED: dict[int, str] = {
    errno.ENOSPC: "free space there, or name another folder",
    errno.EDQUOT: "free space there, or name another folder",
    errno.EROFS: "name a folder that can be written",
    errno.EACCES: "check who may read and write it",
    errno.EPERM: "check who may read and write it",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close other programs: the machine has no more open files to give",
    errno.EIO: "check the disk",
}
USAGE_EXIT = 2


class LazyGroup(click.Group):
    """A group whose commands are imported only when they are called."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; a full disk or a missing right ends in a sentence, not in a traceback."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            where = f"{error.filename}: " if error.filename else ""
            click.echo(f"error: {where}{error.strerror}; {REFUSED[error.errno]}", err=True)
            sys.exit(USAGE_EXIT)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(COMMANDS[cmd_name][0]).command

    def resolve_command(self, ctx: click.Context, args: list[str]):  # type: ignore[no-untyped-def]
        name = args[0] if args else ""
        if name and name not in COMMANDS and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else f" Commands: {', '.join(COMMANDS)}."
            raise click.UsageError(f"no command '{name}'.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""A load test for LLM inference services that audits itself.

    \b
    Example:
      bench demo
      bench check --config configs/scheduler_bench.json
      bench run --config configs/scheduler_bench.json
    """,
)
@click.version_option(__version__, prog_name="scheduler-bench")
def main() -> None:
    """Run one sub-command."""


if __name__ == "__main__":
    main(prog_name="bench")
