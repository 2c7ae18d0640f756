"""The load of an old run folder, for a simulation of it: its rows, and which of its prompts began alike.

Input: a run folder, the plan of the simulation. Output: `OldRun`: the load, and in words what could not be carried.
Does not: simulate, or guess what begins alike: a stage's starts are taken only where its schedule hash agrees.

A ledger holds lengths, not prompts. Which prompts begin alike is in the load that made them: the block ids of the trace
that the run's config names, or `unique_prompts: false`. Both are rebuilt from the folder's run.json.
"""
from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.config.schema import Config
from bench.records.ledger import REQUESTS, RUN, STAGES, find_requests, open_rows
from bench.workload.plan import SHAPES, Plan, Prompts, build_plan
from engine.rerun import Rerun, rerun


@dataclass(frozen=True)
class OldRun:
    """The load, its rows, and remarks: `notes` on what was carried, `losses` on what was not."""

    rerun: Rerun
    rows: list[dict[str, str]]
    notes: list[str]
    losses: list[str]


def read_dicts(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file of a run folder, plain or gzip. Raises OSError."""
    with open_rows(path) as handle:
        return list(csv.DictReader(handle))


def read_old_run(folder: Path, plan: Plan, *, caching: bool, computed_only: bool = False) -> OldRun:
    """The load of a folder; `plan`, `computed_only` as for `engine.rerun.rerun`, `caching`: has the simulation a cache?

    Raises OSError and ValueError when the folder's rows cannot be read.
    """
    rows = read_dicts(find_requests(folder) or folder / REQUESTS)
    config, origin, why = _origin(folder)
    if config is not None:
        plan = replace(plan, prompts=Prompts(config.target.tokens_per_word, config.loadgen.unique_prompts))
    found = rerun(plan, read_dicts(folder / STAGES), rows, origin=origin, computed_only=computed_only)
    notes, losses = _remarks(found, rows, config, why, caching)
    losses += hidden_reasoning(rows)
    return OldRun(found, rows, notes, losses)


def hidden_reasoning(rows: list[dict[str, str]]) -> list[str]:
    """What is lost when answers of the run hid their reasoning: the engine streams every token."""
    hidden = [r for r in rows if "hidden_reasoning" in (r.get("flags") or "").split(";")]
    tokens = sum(int(float(r.get("reasoning_tokens") or 0)) for r in hidden)
    if not tokens:
        return []
    return [
        f"{len(hidden)} of {len(rows)} answers hid {tokens} tokens of reasoning; the simulation streams every token, "
        "so its TTFT is that of the first reasoning token: compare E2E with that run, not TTFT, TPOT or attainment"
    ]


def _origin(folder: Path) -> tuple[Config | None, Plan | None, str]:
    """(config of the run, its plan as far as the config tells, why there is none)."""
    config = None
    try:
        raw: dict[str, Any] = json.loads((folder / RUN).read_text(encoding="utf-8"))
        config = Config.model_validate(raw["config"])
        shape = raw.get("shape")
        if config.loadgen.arrival_process == "trace" and shape not in SHAPES:
            shape = "replay"
        return config, build_plan(config, shape if shape in SHAPES else "single", seed=raw.get("seed")), ""
    except OSError as error:
        return config, None, f"{error.filename or folder / RUN}: {error.strerror}"
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if config is None:  # pydantic's text has many lines
            return None, None, f"{folder / RUN} holds no config that this version reads"
        return config, None, str(error)


def _remarks(
    found: Rerun, rows: list[dict[str, str]], config: Config | None, why: str, caching: bool
) -> tuple[list[str], list[str]]:
    """What to say of the prefix cache: (notes, losses)."""
    asked = sum(int(float(r.get("prompt_tokens") or r.get("input_tokens") or 0)) for r in rows)
    cached = sum(int(float(r.get("cached_tokens") or 0)) for r in rows)
    there = f" (there {cached / asked:.1%} of the prompt tokens were found in the service's cache)" if cached else ""
    if not caching:
        off = f"engine.prefix_caching is off, so no prompt finds its start in a cache{there}"
        return ([off] if cached else []), []
    colder = f"the prefix cache is colder than in that run{there}"
    if config is None:
        return [], [f"{why}: which prompts began alike is not recorded; here none do: {colder}"]
    load = config.loadgen
    by_trace = load.trace_file is not None and load.trace_prefixes
    if (by_trace or load.prompts_file is not None) and why:
        return [], [f"which prompts began alike cannot be carried: {why}; here none do: {colder}"]
    if load.prompts_file is not None:
        return _by_file(found, load.prompts_file, "text", colder)
    if by_trace and found.named:
        return _by_file(found, str(load.trace_file), "hash_ids", colder)
    if not load.unique_prompts:
        return ["prompts of one length are equal, as in that run (unique_prompts: false)"], []
    return [], [f"which prompts began alike is not recorded; here none do: {colder}"] if cached else []


def _by_file(found: Rerun, file: str, what: str, colder: str) -> tuple[list[str], list[str]]:
    """The same for a run that replayed a trace with block ids, or sent the prompts of a file."""
    lost = [one.stage.name for one in found.loads if one.schedule.shared is None and one.schedule.place is None]
    notes = [f"prompts begin alike as in that run, by the {what} of {file}"] if len(lost) < len(found.loads) else []
    text = (
        f"stages {', '.join(lost)} were sent from another {file} or another config (their schedule hash differs): "
        f"which of their prompts began alike is not carried; {colder}"
    )
    return notes, [text] if lost else []
