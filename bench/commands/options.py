"""Options that several commands share; each can come from the environment too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

LANGUAGES = ("en", "zh-CN")
# Those of bench/workload/plan.py, which loads numpy: help must not wait for it.
SHAPES = ("sweep", "repeat", "ramp", "spike", "smoke", "replay", "single", "hold", "knee_search")

# (flags, keyword of JobOptions and settings of click); the environment's names are those of Locust's options.
# 0 or nothing: as the config says.
PLAN: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("--qps",),
        {"default": "", "envvar": "BENCH_QPS_STAGES", "help": "Offered rates in requests/s, such as 5,10,15; overrides the config."},
    ),
    (
        ("--stage-duration", "stage_duration_s"),
        {
            "type": click.FloatRange(min=0),
            "default": 0.0,
            "envvar": "BENCH_STAGE_DURATION",
            "help": "Seconds per stage; 0: as the config says.",
        },
    ),
    (
        ("--repeats",),
        {
            "type": click.IntRange(min=0),
            "default": 0,
            "envvar": "BENCH_STAGE_REPEATS",
            "help": "Times each rate is run; 0: as the config says.",
        },
    ),
    (
        ("--seed",),
        {
            "type": click.IntRange(min=0),
            "default": 0,
            "envvar": "BENCH_SEED",
            "help": "Seed of arrivals, lengths and prompts; 0: the config's.",
        },
    ),
)
LOAD: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    *PLAN,
    (
        ("--processes",),
        {
            "type": click.IntRange(min=0, max=256),
            "default": 0,
            "help": "Worker processes of the sender; 0: the config's.",
        },
    ),
    (
        ("--run-dir",),
        {"type": click.Path(path_type=Path), "default": None, "help": "Folder for this run; default runs/<time>-<id>."},
    ),
    (
        ("--lang",),
        {"type": click.Choice(LANGUAGES), "default": "en", "show_default": True, "help": "Language of the report."},
    ),
    (("--json", "as_json"), {"is_flag": True, "help": "One line of JSON on standard output at the end."}),
    (("--quiet", "-q"), {"is_flag": True, "help": "Only the result."}),
)


def quiet_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--quiet`, with what is left of the output; errors are always said, and --json prints its object all the same."""
    return click.option("--quiet", "-q", is_flag=True, help=text)


def load_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a job to a command; they arrive as keywords of `JobOptions`."""
    return _with(LOAD, function)


def plan_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that make a plan: rates, stage length, repeats, seed."""
    return _with(PLAN, function)


def refuse_beside(option: str, why: str, *others: str) -> None:
    """Refuse options on the command line that another one leaves without effect. Raises click.UsageError."""
    context = click.get_current_context()
    for parameter in context.command.params:
        flag = max(parameter.opts, key=len)
        if flag in others and context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{flag} has no effect beside {option}: {why}; leave one of them out")


def _with(options: tuple[tuple[tuple[str, ...], dict[str, Any]], ...], function: Callable[..., Any]) -> Callable[..., Any]:
    for flags, settings in reversed(options):
        function = click.option(*flags, **settings)(function)
    return function
