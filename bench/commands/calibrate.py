"""`bench calibrate`: a profile for the embedded engine, fitted from a measured run of any service.

Input: a run folder. Output: a profile file for `engine.profile`, the fit with its error, and the same run predicted
with it. Does not: fit (`analysis/calibrate.py`), map (`engine/calibrate.py`) or simulate (`engine/simulate.py`).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from bench.commands.options import quiet_option
from bench.commands.starting import refuse_missing
from bench.commands.untold import untold, with_settings

USAGE_EXIT, INVALID_EXIT = 2, 4


class _Refused(Exception):
    """The run cannot carry a profile."""

DOUBT_S = 0.02  # network and HTTP are in the measurement alone
DOUBT_RATIO = 0.15  # the method gives E2E back within 3 % where the law holds (docs/calibrate.md)


@click.command(
    "calibrate",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Fit a profile of the embedded engine from a measured run.

    Reads first and last token times of the run's stages below overload, fits the time of a step, and writes a profile
    that `engine.profile` can name, with its error and the ranges it was seen in. Then simulates the same run with it
    and prints measured against predicted. Memory and link rates cannot be seen by a client: they come from --base and
    are marked as guesses. An INVALID or too thin run is refused (exit code 4).

    \b
    Example:
      bench calibrate runs/20261129T120000Z-1a2b --output my-service.json
      bench simulate --config configs/demo.json --set engine.profile=my-service.json
    """,
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--output", "-o", type=click.Path(path_type=Path), default=Path("profile.json"), show_default=True,
              help="Where the profile is written.")
@click.option("--base", default="h100-8b", show_default=True, help="Profile for what a client cannot see.")
@click.option("--force", is_flag=True, help="Write over an existing file.")
@click.option("--no-compare", is_flag=True, help="Do not simulate the run with the new profile.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output instead of text.")
@quiet_option("Only the file, and what to doubt of it.")
def command(run: Path, output: Path, base: str, force: bool, no_compare: bool, as_json: bool,
            quiet: bool) -> None:  # fmt: skip
    """Fit, write, predict and print."""
    refuse_missing("calibrate", run)
    from analysis.load import LedgerError

    try:
        profile, found, raw = _calibrate(run, output, base, force)
        table = [] if no_compare else _compare(run, raw, str(output))
    except _Refused as refused:
        click.echo(f"bench calibrate: {run}: {refused}", err=True)
        sys.exit(INVALID_EXIT)
    except (LedgerError, OSError, ValueError) as error:
        click.echo(f"bench calibrate: {error}", err=True)
        sys.exit(USAGE_EXIT)
    if as_json:
        more = {"compare": table, "assumed": _assumed(raw), "doubt": _doubt(table, found)}
        click.echo(json.dumps({"profile": str(output), **asdict(profile), **more}))
    elif quiet:
        doubt = _doubt(table, found)
        click.echo("\n".join([*([f"note: {doubt}"] if doubt else []), f"written: {output}"]))
    else:
        click.echo("\n".join(_text(profile, found, table, _assumed(raw), output)))


def _calibrate(run: Path, output: Path, base: str, force: bool) -> tuple[Any, Any, dict[str, Any]]:
    """(profile, calibration, run.json) after the profile was written."""
    from analysis.analyse import analyse_run, stage_arrays
    from analysis.calibrate import CalibrationError, calibrate, refusal
    from engine.calibrate import profile_from_fit
    from engine.profiles import load_profile, write_profile

    if output.suffix != ".json":
        raise ValueError(f"--output {output}: the name must end in .json, or engine.profile will not read it")
    if output.exists() and not force:
        raise ValueError(f"{output} exists; give another --output, or --force to write over it")
    other = load_profile(base)
    judged = analyse_run(run, models=False)
    raw = judged.run
    reasons = [r.text for r in judged.verdict.reasons if r.severity == "invalid"]
    replicas = int(((raw.get("config") or {}).get("engine") or {}).get("replicas") or 1)
    why = refusal(judged.verdict.status, reasons, replicas)
    if why:
        raise _Refused(why)
    try:
        found = calibrate(stage_arrays(run))
    except CalibrationError as error:
        raise _Refused(str(error)) from None
    said, law, measured = found.as_dict(), found.fit.law, not raw.get("simulated", False)
    fit = {**said["law"], "se": said["se"], "r2": found.fit.r2, "rmse_step_s": found.fit.rmse_s,
           "rows": found.fit.rows, "order": found.fit.order, "batch_size_max": found.fit.batch_size_max,
           "kappa_s": law.kappa_s}  # fmt: skip
    calibration = {"run_id": raw.get("run_id", run.name), "started_utc": raw.get("started_utc"), "measured": measured,
                   "service": raw.get("target") or {}, **said}  # fmt: skip
    profile = profile_from_fit(fit, other, output.stem, f"run {run.name}", measured=measured, calibration=calibration)
    write_profile(output, profile)
    return profile, found, raw


# Of a service that has not said how it schedules: as engines do by default, and no limit that was not seen to bind.
NEUTRAL = {"scheduler.policy": "fcfs", "scheduler.max_num_seqs": 256, "scheduler.batch_size_cap": 256,
           "admission.reject_on_budget_exceed": False}  # fmt: skip


def _assumed(raw: dict[str, Any]) -> dict[str, Any]:
    """Keys of `NEUTRAL` that the run of a service leaves to defaults, which are this tool's and not the service's."""
    return {key: value for key, value in NEUTRAL.items() if untold(raw, key)}


def _compare(run: Path, raw: dict[str, Any], profile: str) -> list[dict[str, Any]]:
    """Measured against simulated, one row per stage and statistic, with the run's own arrivals and lengths."""
    from bench.commands.old_run import read_old_run
    from bench.config.schema import Config
    from bench.workload.plan import build_plan
    from engine.settings import EngineConfig
    from engine.simulate import simulate_stages

    quiet = {"engine.profile": profile, "engine.noise_cv": 0.0, "engine.overhead_ms": None, "engine.time_scale": 1.0}
    config = Config.model_validate(with_settings(raw["config"], _assumed(raw) | quiet))
    engine = EngineConfig.from_config(config)
    caching = engine.prefix_caching  # without one, what the service found in its cache is not to be computed here
    found = read_old_run(run, build_plan(config, "single"), caching=caching, computed_only=not caching)
    old, rows = found.rerun, found.rows
    table: list[dict[str, Any]] = []
    for result in simulate_stages(old.plan, config, engine=engine, old=old):
        stage = result.stage
        mine = [r for r in rows if int(r["stage"]) == stage.index and r["phase"] == "window" and r["status"] == "ok"]
        said = [r for r in result.rows() if r.phase == "window" and r.status == "ok"]
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            seen = sorted(float(r[name]) for r in mine if r[name])
            told = sorted(getattr(r, name) for r in said if getattr(r, name) is not None)
            if not seen or not told:
                continue
            for label, share in (("p50", 0.5), ("p95", 0.95)):
                a, b = (v[min(len(v) - 1, int(share * len(v)))] for v in (seen, told))
                off = b / a - 1 if a else None
                table.append({"stage": stage.name, "offered_qps": stage.offered_qps, "measured_s": a, "predicted_s": b,
                              "statistic": f"{name[:-2]} {label}", "ratio": off})  # fmt: skip
    return table


def _text(profile: Any, found: Any, table: list[dict[str, Any]], assumed: dict[str, Any], output: Path) -> list[str]:
    law, fit = found.fit.law, found.fit
    lines = [
        f"step = {law.alpha_s * 1e3:.4f} ms + {law.beta_s * 1e6:.3f} us/sequence + {law.gamma_s * 1e6:.3f} "
        f"us/prompt token + {law.kv_s * 1e9:.2f} ns/cached token"
        + (f" {law.prefill_s * 1e3:+z.4f} ms/prefill step" if law.prefill_s else ""),
        f"fit: {profile.source}",
        f"a step at the middle batch is known to {found.step_error:.2%}; prefill rate {_rate(profile.prefill_tps)}",
        "seen: " + ", ".join(f"{name} {low:g} to {high:.6g}" for name, (low, high) in found.valid.items()),
        f"{'stage':>6}{'qps':>8}{'rows':>7}{'decode time, measured/fitted - 1: median (p5 to p95)':>56}",
    ]  # fmt: skip
    lines += [
        f"{r.stage:>6}{r.offered_qps:>8g}{r.rows:>7}{r.median:>+z32.2%} ({r.p05:+z.1%} to {r.p95:+z.1%})"
        for r in found.residuals
    ]
    lines += [f"note: {note}" for note in found.notes]
    if fit.outliers:
        lines.append(f"note: {fit.outliers} of {fit.rows + fit.outliers} answers stalled and were left out of the fit")
    if table:
        lines += ["", "the same run, simulated with the profile (no noise, no network):",
                  f"{'stage':<18}{'statistic':<12}{'measured':>12}{'predicted':>12}{'difference':>12}"]  # fmt: skip
        for row in table:
            off = "-" if row["ratio"] is None else f"{row['ratio']:+z.1%}"
            lines.append(f"{row['stage']:<18}{row['statistic']:<12}{row['measured_s'] * 1e3:>9.1f} ms"
                         f"{row['predicted_s'] * 1e3:>9.1f} ms{off:>12}")  # fmt: skip
        if assumed:
            told = ", ".join(f"{key} {value}" for key, value in assumed.items())
            lines.append(f"note: the run does not say how the service schedules; simulated with {told}; say it in the "
                         "config, and the table follows")  # fmt: skip
    if doubt := _doubt(table, found):
        lines.append(f"note: {doubt}")
    lines.append(f"written: {output}")
    return lines


def _doubt(table: list[dict[str, Any]], found: Any) -> str:
    """One sentence when the profile does not give back the stages that it was fitted to; empty when it does.

    The others are overloaded or failed: there the simulated admission refuses what the service let wait.
    """
    fitted = {residual.offered_qps for residual in found.residuals}
    middles = [
        row for row in table
        if row["statistic"] == "e2e p50" and row["ratio"] is not None and row["offered_qps"] in fitted
        and abs(row["predicted_s"] - row["measured_s"]) > DOUBT_S
    ]  # fmt: skip
    worst = max(middles, key=lambda row: abs(row["ratio"]), default=None)
    if worst is None or abs(worst["ratio"]) <= DOUBT_RATIO:
        return ""
    return (
        f"the profile does not give back its own run: the median answer at {worst['offered_qps']:g} requests/s is off "
        f"by {worst['ratio']:+z.0%}; decide nothing by it. Did the service's speed change between the stages?"
    )


def _rate(tps: float) -> str:
    return "not seen" if tps == float("inf") else f"{tps:.0f} tokens/s"
