"""What an assistant may start: limits on the load of a plan, and on the files and addresses of a config.

Input: a config path with overrides, a shape and rates; the user's settings. Output: the plan, or `JobRefused`.
Does not: start anything (bench/commands/mcp_jobs.py does).

1. The whole load is known before it begins: a shape that adds stages by itself is refused.
2. The rate is bounded at every moment, twice: as planned, and as drawn (trace and gamma arrivals come in clumps).
3. Files that a config or an override names lie below the working folder, or are those of the user's own config.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

SHAPES = ("sweep", "repeat", "smoke", "single", "hold", "spike", "ramp", "replay")
MAX_SIMULATED = 1_000_000  # arrivals of one simulation: about a minute of CPU and 300 MB of rows
NOISE_SD = 6.0  # a Poisson second is above mean + 6 sd once in 10^8 seconds


class JobRefused(Exception):
    """A tool was asked for something that is not allowed or not there; the text says what is."""


def load(path: Path, overrides: dict[str, Any], settings: Any) -> Any:
    """The resolved config. Raises JobRefused: damaged, or it names files and addresses that only the user may name."""
    from bench.config import ConfigError, load_config

    try:
        config = load_config(path, overrides=overrides).config
        if path == settings.config and not overrides:
            return config
        own = _named(load_config(settings.config).config) if settings.config.is_file() else {}
    except ConfigError as error:
        raise JobRefused(f"{error}") from None
    for key, name in _named(config).items():
        where = (settings.home / name).resolve()
        if own.get(key) != name and not where.is_relative_to(settings.home.resolve()):
            raise JobRefused(f"{key} is {name!r}: only files below the working folder are read")
    return config


def _named(config: Any) -> dict[str, str]:
    """Files that a config names, by key."""
    profile = config.engine.profile
    found = {
        "loadgen.trace_file": config.loadgen.trace_file,
        "loadgen.prompts_file": config.loadgen.prompts_file,
        "loadgen.output_len_file": config.loadgen.output_len_file,
        "target.api_key_file": config.target.api_key_file,
        "target.ca_file": config.target.ca_file,
        "engine.profile": profile if "/" in profile or profile.endswith(".json") else None,
    }
    return {key: str(name) for key, name in found.items() if name}


def plan(config: Any, shape: str, qps: str, stage_duration_s: float) -> Any:
    """The plan of a run. Raises JobRefused for what `bench run` would refuse, and for a load that is not known yet."""
    from bench.workload.plan import PlanError, build_plan

    if shape not in SHAPES:
        raise JobRefused(
            f"shape is {shape!r}; here: {', '.join(SHAPES)}. A knee_search adds stages by itself, so its load cannot "
            "be bounded beforehand: the user can start it with bench run"
        )
    try:
        rates = [float(part) for part in qps.split(",") if part.strip()] or None
        return build_plan(config, shape, qps=rates, duration_s=stage_duration_s or None)
    except (PlanError, ValueError) as error:
        raise JobRefused(f"{error}") from None


def bound(plan: Any, settings: Any) -> tuple[float, float]:
    """(planned seconds, planned arrivals) of a run within the limits. Raises JobRefused with number and limit."""
    highest = max(level for stage in plan.stages for _, level in stage.levels())
    seconds = sum(stage.duration_s for stage in plan.stages)
    arrivals = sum(stage.expected_arrivals for stage in plan.stages)
    _within("rate", highest, settings.max_qps, "BENCH_MCP_MAX_QPS")
    _within("planned seconds", seconds, settings.max_duration_s, "BENCH_MCP_MAX_DURATION_S")
    _within("planned requests", arrivals, settings.max_requests, "BENCH_MCP_MAX_REQUESTS")
    busiest, tokens = _drawn(plan)
    noise = settings.max_qps + NOISE_SD * math.sqrt(settings.max_qps) + NOISE_SD
    _within("requests in the busiest second", busiest, math.floor(noise), "BENCH_MCP_MAX_QPS")
    _within("planned tokens", tokens, settings.max_tokens, "BENCH_MCP_MAX_TOKENS")
    return seconds, arrivals


def bound_simulation(plan: Any) -> None:
    """Refuse a simulation that would fill the disk."""
    arrivals = sum(stage.expected_arrivals for stage in plan.stages)
    if arrivals > MAX_SIMULATED:
        raise JobRefused(f"simulated requests: {arrivals:g} asked, at most {MAX_SIMULATED} allowed; ask for less")


def refuse_addresses(config: Any, path: Path, settings: Any) -> None:
    """Refuse a config that sends or asks elsewhere, unless it is the user's own."""
    if path == settings.config:
        return
    if config.target.proxy or config.target.trust_env:
        raise JobRefused(f"config {path.name} sends through a proxy; only the user's own config (BENCH_CONFIG) may")
    page = config.target.metrics_url
    if page and urlsplit(page).netloc != urlsplit(settings.base_url).netloc:
        raise JobRefused(
            f"config {path.name} asks {urlsplit(page).netloc} for metrics; only the user's own config (BENCH_CONFIG) "
            "may"
        )


def _within(what: str, value: float, most: float, name: str) -> None:
    if value > most * (1 + 1e-9):
        raise JobRefused(
            f"{what}: {value:g} asked, at most {most:g} allowed; ask for less, or let the user raise "
            f"{name} in the server's environment"
        )


def _drawn(plan: Any) -> tuple[int, int]:
    """(most arrivals within any one second, prompt and output tokens of all) of the schedules themselves."""
    from bench.workload.schedule import build_schedule

    busiest = tokens = 0
    for stage in plan.stages:
        schedule = build_schedule(plan, stage)
        at_s = schedule.intended_s
        if len(at_s):
            busiest = max(busiest, int((np.searchsorted(at_s, at_s + 1.0) - np.arange(len(at_s))).max()))
        tokens += int(schedule.input_tokens.sum() + schedule.max_tokens.sum())
    return busiest, tokens
