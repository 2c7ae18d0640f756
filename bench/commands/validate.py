"""`bench validate`: a dry run of a config."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench.commands.options import SHAPES, plan_options, quiet_option
from bench.commands.starting import load_numpy_alone, unfilled

# Warnings for commands that send nothing; a run with them does not start (`Resolved.placeholders`).
FORBID_SENDING = ("CFG-012",)

if TYPE_CHECKING:
    from bench.config import Problem, Resolved
    from bench.workload.expect import StageExpectation
    from bench.workload.plan import Plan


@click.command(
    "validate",
    help="""Check a config without sending anything: problems, values with their origin, what to expect.

    Exit code 0: the run may start (warnings allowed); 2: it may not. An address or a model that nobody filled in is
    no start: give it in the config, in BENCH_BASE_URL and BENCH_MODEL, or as options, as for bench run.

    \b
    Example:
      bench validate configs/demo.json --shape repeat --json
      bench validate configs/scheduler_bench.json --base-url http://localhost:8000/v1 --model my-model
    """,
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--shape", type=click.Choice(SHAPES), default="sweep", show_default=True, help="The plan to look at.")
@plan_options
@click.option("--base-url", default="", help="Address of the service; overrides config and environment.")
@click.option("--model", default="", help="Model id; overrides config and environment.")
@click.option("--all", "show_all", is_flag=True, help="Show defaults too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@quiet_option("Only the problems, and whether the run may start.")
def command(
    file: Path,
    shape: str,
    qps: str,
    stage_duration_s: float,
    repeats: int,
    seed: int,
    base_url: str,
    model: str,
    show_all: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check one config file."""
    from bench.config import ConfigError, Problem, load_config

    try:
        given = {key: value for key, value in (("base_url", base_url), ("model", model)) if value}
        resolved = load_config(file, overrides=given)
    except ConfigError as error:
        _refuse(file, error.problems, as_json)
    load_numpy_alone()
    from bench.config.limits import limit_problems
    from bench.workload.expect import expect_stages, total
    from bench.workload.labels import fault_code
    from bench.workload.plan import PlanError, build_plan

    problems = _key_problems(resolved)
    try:
        plan = build_plan(
            resolved.config, shape, qps=_rates(qps), duration_s=stage_duration_s or None, repeats=repeats or None,
            seed=seed or None,
        )
    except PlanError as error:
        named = _names_file(resolved, str(error))
        wrong = [
            Problem(fault_code(line) if named else "CFG-045", str(file), f"cannot become a plan: {line}")
            for line in str(error).splitlines()
        ]
        found = [*problems, *wrong, *resolved.warnings]
        _refuse(file, found, as_json)
    stages = expect_stages(plan, resolved.config.slo.attainment_target)
    problems += limit_problems(resolved.config, total(plan, stages))
    problems += resolved.warnings + prompt_warnings(plan, stages) + cut_warnings(plan)
    problems += size_warnings(resolved.config.slo.attainment_target, stages)
    document = _document(file, resolved, plan, stages, problems)
    told = _told(problems) if quiet else _report(document, problems, stages, show_all)
    _finish(document, as_json, told)


def _rates(text: str) -> list[float] | None:
    """Rates of `--qps`; None when it was not given."""
    try:
        return [float(part) for part in text.split(",") if part.strip()] or None
    except ValueError:
        raise click.UsageError(f"--qps is {text!r}; positive numbers with commas, such as 5,10,15") from None


def _key_problems(resolved: Resolved) -> list[Problem]:
    """What is wrong with the API key, by length and kind; a missing key is no problem here."""
    from bench.config import ConfigError, api_key

    try:
        api_key(resolved.config)
    except ConfigError as error:
        return list(error.problems)
    return []


def _names_file(resolved: Resolved, text: str) -> bool:
    load = resolved.config.loadgen
    return any(name and name in text for name in (load.trace_file, load.output_len_file, load.prompts_file))


def prompt_warnings(plan: Plan, stages: list[StageExpectation]) -> list[Problem]:
    """CFG-048: how many arrivals send a prompt of the user's file that went before."""
    from bench.config import Problem
    from bench.workload.expect import repeat_sentence

    text = repeat_sentence(plan, stages)
    if not text:
        return []
    fix = "add lines or shorten the run, or read the result as one of a warm cache"
    return [Problem("CFG-048", "loadgen.prompts_file:", text, fix=fix)]


def cut_warnings(plan: Plan) -> list[Problem]:
    """CFG-049: lengths of the user's files that the config cuts."""
    from bench.config import Problem

    return [
        Problem(
            "CFG-049", f"loadgen.{cut.key}:", cut.text(), f"at most {cut.limit} tokens",
            f"raise loadgen.max_output_tokens to {cut.largest}, or lower the lengths in the file",
        )
        for cut in plan.cuts
    ]  # fmt: skip


def size_warnings(target: float, stages: list[StageExpectation]) -> list[Problem]:
    """CFG-042 and CFG-043: stages too small for the attainment target or for a percentile."""
    from bench.config import Problem
    from bench.workload.expect import PERCENTILE_SAMPLES, arrivals_to_decide

    out: list[Problem] = []
    need = arrivals_to_decide(target)
    for stage in stages:
        if stage.misses_allowed is not None or not (stage.at_target or len(stages) == 1):
            continue
        rate = stage.window_arrivals / stage.window_s if stage.window_arrivals else stage.offered_qps
        out.append(
            Problem(
                "CFG-042",
                f'stage "{stage.name}"',
                f"has {stage.window_arrivals} arrivals in its window; "
                f"even without a miss the Wilson lower bound stays below {target:g}",
                f"{need} or more",
                f"make its window {need / rate:.0f} s or longer (sweep.target_duration_sec)",
            )
        )
    short: dict[tuple[str, ...], list[str]] = {}
    for stage in stages:
        if stage.missing_percentiles():
            short.setdefault(tuple(stage.missing_percentiles()), []).append(f"{stage.name} ({stage.window_arrivals})")
    for names, where in short.items():
        needs = ", ".join(f"{name} {PERCENTILE_SAMPLES[name]}" for name in names)
        out.append(
            Problem(
                "CFG-043",
                "stages",
                f"too small for {', '.join(names)}: {'; '.join(where)} arrivals",
                f"at least {needs}",
                "these percentiles are withheld; lengthen the stages or set sweep.min_window_arrivals",
            )
        )
    return out


def _plain(problems: list[Problem]) -> list[dict[str, Any]]:
    return [{**problem.to_dict(), "severity": _severity(problem)} for problem in problems]


def _lines(problems: list[Problem]) -> list[str]:
    marks = {"error": "error  ", "warning": "warning"}
    return [f"{marks[_severity(problem)]} {problem.text()}" for problem in problems]


def _severity(problem: Problem) -> str:
    """As for a run that sends: what a simulation does not need is no warning here."""
    return "error" if problem.id in FORBID_SENDING else problem.severity


def _end(problems: list[Problem]) -> str:
    """The last line: may it start, and if not, because of what."""
    wrong = [problem for problem in problems if _severity(problem) == "error"]
    if not wrong:
        return "the run may start"
    if all(problem.id in FORBID_SENDING for problem in wrong):
        return unfilled(wrong)
    return f"the run may not start: mend the {'error' if len(wrong) == 1 else f'{len(wrong)} errors'} above"


def _document(
    file: Path, resolved: Resolved, plan: Plan, stages: list[StageExpectation], problems: list[Problem]
) -> dict[str, Any]:
    from dataclasses import asdict

    from bench.config.limits import cost
    from bench.workload.expect import total
    from bench.workload.schedule import plan_hash

    limits = resolved.config.limits
    sums = total(plan, stages)
    return {
        "ok": not any(_severity(problem) == "error" for problem in problems),
        "file": str(file),
        "problems": _plain(problems),
        "values": resolved.masked(),
        "origin": resolved.origin,
        "shape": plan.shape,
        "seed": plan.run_seed,
        "schedule_hash": plan_hash(plan),
        **_prompts(plan, stages),
        "stages": [
            {**asdict(stage), "cost": cost(limits, stage.input_tokens, stage.output_tokens)} for stage in stages
        ],
        "total": {**asdict(sums), "tokens": sums.tokens, "cost": cost(limits, sums.input_tokens, sums.output_tokens)},
    }


def _prompts(plan: Plan, stages: list[StageExpectation]) -> dict[str, Any]:
    """What the plan has of the user's own prompts; nothing when they are made."""
    lines = plan.lines
    if lines is None:
        return {}
    return {
        "prompts": {
            "path": lines.path, "sha256": lines.sha256, "order": lines.order, "lines": len(lines),
            "different": lines.different, "estimated_input": lines.estimates,
            "own_max_tokens": int((lines.max_tokens > 0).sum()),
            "repeated_arrivals": sum(stage.repeated_prompts for stage in stages),
        }
    }  # fmt: skip


def _prompt_lines(found: dict[str, Any]) -> list[str]:
    same = "" if found["different"] == found["lines"] else f" ({found['different']} different)"
    estimate = found["estimated_input"]
    input_ = "as the lines say" if not estimate else f"estimated for {estimate} lines as UTF-8 bytes / 4"
    return [
        f"  prompts: {found['path']}, {found['lines']} lines{same}, {found['order']}, SHA-256 {found['sha256'][:16]}",
        f"  input tokens {input_}; output limit of {found['own_max_tokens']} lines is their own, else the config's law",
    ]


def _report(
    document: dict[str, Any], problems: list[Problem], stages: list[StageExpectation], show_all: bool
) -> list[str]:
    from bench.config.errors import plain

    lines = _lines(problems) + ([""] if problems else [])
    lines.append("values")
    for key, value in _leaves(document["values"], document["origin"]):
        origin = document["origin"][key]
        if show_all or origin != "default":
            lines.append(plain(f"  {key} = {json.dumps(value, ensure_ascii=False)}  ({origin})"))
    if not show_all:
        lines.append(f"  and {sum(o == 'default' for o in document['origin'].values())} defaults (--all shows them)")
    target = document["values"]["slo"]["attainment_target"]
    lines += ["", f"plan {document['shape']}, seed {document['seed']}, schedule {document['schedule_hash'][:16]}"]
    lines += [plain(line) for line in _prompt_lines(document["prompts"])] if "prompts" in document else []
    money = document["total"]["cost"] is not None
    header = (
        f"  {'stage':<22}{'seconds':>8}{'expected':>9}{'planned':>8}{'window':>7}{'input tok':>11}{'output tok':>11}"
    )
    lines.append(header + f"{'misses':>8}" + ("      cost" if money else ""))
    for stage, row in zip(stages, document["stages"], strict=True):
        allowed = "-" if stage.misses_allowed is None else str(stage.misses_allowed)
        lines.append(
            f"{'>' if stage.at_target else ' '} {stage.name:<22}{stage.duration_s:>8.6g}"
            f"{stage.expected_arrivals:>9.0f}{stage.arrivals:>8}{stage.window_arrivals:>7}"
            f"{stage.input_tokens:>11}{stage.output_tokens:>11}{allowed:>8}"
            + (f"{row['cost']:>10.2f}" if money else "")
        )
    sums = document["total"]
    lines.append(
        f"  in all: {sums['requests']} requests, {sums['input_tokens']} input and "
        f"up to {sums['output_tokens']} output tokens, "
        f"{sums['arrivals_s']:.0f} s of arrivals, at most {sums['longest_s']:.0f} s with drains"
        + (f", cost up to {sums['cost']:.2f}" if money else "")
    )
    lines.append(
        f"  misses: how many requests of the window may miss so that attainment >= {target:g} is still shown; "
        "-: too few arrivals"
    )
    lines += ["", _end(problems)]
    return lines


def _leaves(values: dict[str, Any], origin: dict[str, str]) -> list[tuple[str, Any]]:
    out = []
    for key in origin:
        node: Any = values
        for part in key.split("."):
            node = node[part]
        out.append((key, node))
    return out


def _told(problems: list[Problem]) -> list[str]:
    """The problems and the last line."""
    return [*_lines(problems), *([""] if problems else []), _end(problems)]


def _refuse(file: Path, problems: list[Problem], as_json: bool) -> None:
    """End where there is no plan to show."""
    document = {"ok": False, "file": str(file), "problems": _plain(problems)}
    _finish(document, as_json, _told(problems))


def _finish(document: dict[str, Any], as_json: bool, lines: list[str]) -> None:
    click.echo(json.dumps(document, allow_nan=False) if as_json else "\n".join(lines))
    sys.exit(0 if document["ok"] else 2)
