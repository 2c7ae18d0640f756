"""`bench batch-curve RUN...`: throughput, TPOT and attainment against the batch cap, and where one more seat harms.

Input: run folders that differ in their cap alone, measured or simulated. Output: a table or JSON.
Does not: compute (`analysis/batch_curve.py` does) or run anything.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from bench.commands.options import quiet_option
from bench.commands.starting import refuse_missing

USAGE_EXIT = 2


@click.command(
    "batch-curve",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Throughput against the batch cap, over runs that differ in nothing else.

    Each RUN is a folder of `bench run` or `bench simulate` with another max_num_seqs or batch_size_cap at the same
    load. Prints throughput, TPOT and attainment per cap, the gain of one more seat with its interval, and the cap at
    which the gain turns negative. Caps that served all that came say nothing about it: choose a rate above capacity.

    \b
    Example:
      bench batch-curve runs/cap8 runs/cap16 runs/cap32
      bench batch-curve runs/cap8 runs/cap16 runs/cap32 --qps 40 --json
    """,
)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--qps", type=click.FloatRange(min=0, min_open=True), default=None,
              help="Offered rate; default: the highest that two caps have in common.")
@click.option("--force", is_flag=True, help="Although the configs differ in more than the cap.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output instead of text.")
@quiet_option("Only the sentence.")
def command(runs: tuple[Path, ...], qps: float | None, force: bool, as_json: bool, quiet: bool) -> None:
    """Read, compute and print."""
    refuse_missing("batch-curve", *runs)
    from analysis.batch_curve import batch_curve
    from analysis.load import LedgerError

    try:
        analyses = [_analysis(run) for run in runs]
        rate = _rate(analyses, runs, qps, force)
    except (LedgerError, OSError, ValueError) as error:
        click.echo(f"bench batch-curve: {error}", err=True)
        sys.exit(USAGE_EXIT)
    found = batch_curve(analyses, rate)
    click.echo(json.dumps(found.as_dict()) if as_json else found.sentence if quiet else "\n".join(lines(found)))


def _analysis(run: Path) -> Any:
    """The analysis of a run folder, from its rows."""
    from analysis.analyse import analyse_run

    return analyse_run(run, models=False)


def _rate(analyses: list[Any], runs: tuple[Path, ...], qps: float | None, force: bool) -> float:
    """The rate to look at. Raises ValueError with what to do when the runs cannot be set side by side."""
    from analysis.batch_curve import cap_of, common_rates, differences

    caps = [cap_of(found.run) for found in analyses]
    for run, cap in zip(runs, caps, strict=True):
        if cap is None:
            raise ValueError(f"{run}: run.json has no scheduler.max_num_seqs or batch_size_cap; give runs that have")
    if len(set(caps)) < 2:
        raise ValueError(f"all runs have the cap {caps[0]}; give runs with different scheduler.max_num_seqs")
    other = differences([found.run for found in analyses])
    if other and not force:
        raise ValueError(f"the runs differ in more than the cap ({'; '.join(other[:4])}); run them again with one "
                         "config, or --force")  # fmt: skip
    rates = common_rates(analyses)
    if not rates:
        raise ValueError("no rate has a valid stage in runs of two caps; run the same sweep.qps with each cap")
    if qps is None:
        return rates[-1]
    near = min(rates, key=lambda rate: abs(rate - qps))
    if abs(near - qps) > 1e-6 * max(qps, 1.0):
        raise ValueError(f"--qps {qps:g}: two caps have {', '.join(f'{r:g}' for r in rates)} in common; choose one")
    return near


def lines(found: Any) -> list[str]:
    """The table and the sentence."""
    out = [f"{'cap':>6}{'stages':>8}{'full':>6}{'done/s':>9}{'95 % interval':>18}{'in flight':>11}{'TPOT p50':>11}"
           f"{'TPOT p95':>11}{'attainment':>12}{'gain per seat':>32}"]  # fmt: skip
    steps = {step.high_cap: step for step in found.gains}
    for p in found.points:
        step = steps.get(p.cap)
        gain = ""
        if step is not None:
            gain = f"{step.gain_qps:+z.3f} ({step.gain_low_qps:+z.3f} to {step.gain_high_qps:+z.3f})"
        span = f"{p.low_qps:.2f} to {p.high_qps:.2f}"
        flying = "-" if p.in_flight_mean is None else f"{p.in_flight_mean:.1f}"
        full = "yes" if p.full else "no"
        out.append(f"{p.cap:>6}{p.stages:>8}{full:>6}{p.throughput_qps:>9.2f}{span:>18}{flying:>11}"
                   f"{_ms(p.tpot_p50_s):>11}{_ms(p.tpot_p95_s):>11}{p.attainment:>12.2%}{gain:>32}")  # fmt: skip
    return [*out, found.sentence]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"
