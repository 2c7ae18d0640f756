"""`bench calibrate-client`: what the client adds, and the highest rate it can send, against the null server.

Input: a config, for lengths, read mode, processes and deadlines. Output: a small JSON file that `bench run` reads.
Does not: judge (`analysis/client_ceiling.py` does) or speak to the service of the config.

1. The real Locust workers send; `engine.null_server` answers, with known tokens at known times and its own record.
2. Bounded: one run up a ladder of doubled rates that ends at the first miss, one run between the last rate that held
   and the first that did not; the second is left out when the budget is used up.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from bench.commands.options import quiet_option

NULL_TTFT_S = 0.05
GAP_S = 0.010  # between tokens, as a service at an easy load has it
MEAN_ANSWER_S = 1.0  # longer answers come faster than GAP_S, so that a stage stays short
STAGE_S, WARMUP_S = 4.0, 1.0
DRAIN_LIMIT_S = 10.0
OVERHEAD_S = 3.0  # of a stage beyond its arrivals, as a first guess
DOUBLINGS = 5
REFINE = 3
HIGHEST_QPS = 4000.0
START_S = 6.0  # of Locust, its end and the analysis


@click.command(
    "calibrate-client",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Measure what the client adds, and the highest rate it can send.

    Runs the real workers against a server of our own that answers at known times: first at doubled rates until the
    client is late, then between. The lengths, the way to read, the number of processes and the deadlines are those of
    the config. `bench run` on the same machine reads the file, and a stage above the ceiling is INVALID.

    \b
    Example:
      bench calibrate-client --config configs/scheduler_bench.json
      bench calibrate-client --config configs/demo.json --processes 2 --json
    """,
)
@click.option("--config", "-c", type=click.Path(path_type=Path), default=Path("configs/scheduler_bench.json"),
              show_default=True, envvar="BENCH_CONFIG", help="Config file, JSON or YAML.")
@click.option("--qps", default="", help="Rates to try in requests/s, such as 50,100; default: doubled from the target.")
@click.option("--processes", type=click.IntRange(min=0, max=256), default=0, help="Worker processes; 0: the config's.")
@click.option("--budget", "budget_s", type=click.FloatRange(min=10), default=60.0, show_default=True,
              help="Seconds that the whole calibration may take.")
@click.option("--output", "-o", type=click.Path(path_type=Path), default=None,
              help="Where the calibration is written (default: client-calibration.json in the folder of the runs).")
@click.option("--keep", type=click.Path(path_type=Path), default=None, help="Keep the run folders in this folder.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output instead of text.")
@quiet_option("Only the result.")
def command(config: Path, qps: str, processes: int, budget_s: float, output: Path | None, keep: Path | None,
            as_json: bool, quiet: bool) -> None:  # fmt: skip
    """Measure, write, print; exit code 0, or 4 when not even the lowest rate held."""
    from bench.commands.client_calibration import default_file
    from bench.commands.job_options import JobError
    from bench.records.client_calibration import write_calibration

    path = output or default_file()
    try:
        made = calibrate_client(config, qps, processes, budget_s, keep, quiet=as_json or quiet)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_calibration(path, made)
    except JobError as error:
        click.echo(f"bench calibrate-client: {error}", err=True)
        sys.exit(error.exit_code)
    if as_json:
        click.echo(json.dumps({"file": str(path), **dataclasses.asdict(made)}))
    else:
        click.echo("\n".join([*lines(made), f"written: {path}"]))
    sys.exit(0 if made.ceiling_qps is not None else 4)


def calibrate_client(
    config: Path, qps: str = "", processes: int = 0, budget_s: float = 60.0, keep: Path | None = None, *,
    quiet: bool = False,
) -> Any:  # fmt: skip
    """The calibration. Raises JobError for a bad config, a bad rate, or a load that did not start."""
    from analysis.client_ceiling import ceiling, refining_rates
    from bench.commands.console import Console
    from bench.commands.job_options import JobOptions
    from bench.commands.locust_process import Stops
    from bench.commands.prepare import load

    began = time.monotonic()
    options = JobOptions(config=config, processes=processes, quiet=quiet, remarks=False, preflight=False)
    say = Console(options)
    resolved = load(options, say)
    rates = _rates(qps, resolved.config.loadgen.target_qps)
    home = keep or Path(tempfile.mkdtemp(prefix="bench-calibrate-"))
    home.mkdir(parents=True, exist_ok=True)
    try:
        with Stops(say) as stops:
            job = _Job(resolved, options, say, stops, home)
            affordable = max(int((budget_s - START_S) / (STAGE_S + OVERHEAD_S)), 1)
            stages = job.run("ladder", rates[:affordable])
            found = ceiling(stages)
            left_s = budget_s - (time.monotonic() - began) - START_S
            each_s = (time.monotonic() - began) / max(len(stages), 1)
            between = refining_rates(found, min(REFINE, int(left_s / each_s) - 1)) if left_s > 0 else []
            if between and found.kind != "at_least" and not stops.hits:
                stages += job.run("between", between)
    finally:
        if keep is None:
            shutil.rmtree(home, ignore_errors=True)
    return _made(stages, job)


def _rates(given: str, target_qps: float) -> list[float]:
    """The ladder of rates, ascending."""
    from bench.commands.job_options import EXIT_USAGE, JobError

    if not given:
        return [target_qps * 2**k for k in range(DOUBLINGS + 1) if target_qps * 2**k <= HIGHEST_QPS] or [HIGHEST_QPS]
    try:
        rates = sorted({float(part) for part in given.split(",") if part.strip()})
    except ValueError:
        rates = []
    if not rates or not all(0 < rate <= 1e5 for rate in rates):
        raise JobError(f"--qps is {given!r}; positive numbers with commas, such as 50,100,200", EXIT_USAGE)
    return rates


class _Job:
    """Runs of the real client against the null server, with what all of them share."""

    def __init__(self, resolved: Any, options: Any, say: Any, stops: Any, home: Path) -> None:
        from bench.workload.plan import build_plan
        from bench.workload.schedule import build_schedule

        self.resolved, self.options, self.say, self.stops, self.home = resolved, options, say, stops, home
        config = resolved.config
        self.processes = options.processes or config.sweep.processes
        self.data = _config(config)
        plan = build_plan(_validated(self.data), "single", qps=[100.0], duration_s=20.0)
        self.tokens = float(build_schedule(plan, plan.stages[0]).max_tokens.mean())
        self.gap_s = min(GAP_S, MEAN_ANSWER_S / max(self.tokens, 1.0))
        self.host: dict[str, Any] = {}

    def run(self, name: str, rates: list[float]) -> list[Any]:
        """One ladder: what each of its stages says, until the first that misses."""
        from analysis.analyse import analyse_run
        from analysis.client_ceiling import client_stage
        from analysis.load import LedgerError
        from bench.commands.job import _environment
        from bench.commands.job_options import EXIT_INTERRUPTED, EXIT_INVALID, JobError
        from bench.commands.locust_process import run_locust
        from bench.commands.prepare import load, plan_of

        run_dir = self.home / name
        run_dir.mkdir(parents=True, exist_ok=True)
        config = run_dir / "config.json"
        self.data["sweep"]["qps"] = rates
        config.write_text(json.dumps(self.data), encoding="utf-8")
        options = dataclasses.replace(self.options, config=config, run_dir=run_dir, shape="sweep",
                                      processes=self.processes, model="null")  # fmt: skip
        with null_server(NULL_TTFT_S, self.gap_s) as url:
            options = dataclasses.replace(options, base_url=url)
            resolved = load(options, self.say, quiet=True)
            environment = _environment(options, "", run_dir, resolved)
            # no key of the user's goes to a server that needs none
            environment = {k: v for k, v in environment.items() if not k.endswith("API_KEY")}
            code = run_locust(options, resolved, plan_of(options, resolved.config), run_dir, environment, self.say,
                              self.stops)  # fmt: skip
            records = json.loads(_get(url + "/records"))
        if self.stops.hits:
            raise JobError("interrupted; no calibration is written", EXIT_INTERRUPTED)
        try:
            found = analyse_run(run_dir, models=False)
        except LedgerError as error:
            text = f"the load against the null server did not start (Locust ended with {code}): {error}; "
            text += f"see {run_dir / 'log.txt'} (with --keep)"
            raise JobError(text, EXIT_INVALID) from None
        self.host = found.run.get("host") or {}
        measured = [s for s in found.stages if s.verdict != "EMPTY"]
        times = _added(run_dir, records)
        return [client_stage(s, *times(s.stage), NULL_TTFT_S) for s in measured]


def _config(config: Any) -> dict[str, Any]:
    """The config of a run against the null server: lengths, reading, processes and deadlines as given."""
    from bench.records.clauses import lag_limit_s

    data = config.model_dump(mode="json")
    loadgen = data["loadgen"]
    if loadgen["arrival_process"] in ("trace", "constant"):
        loadgen |= {"arrival_process": "poisson", "trace_file": None}
    data["engine"]["embedded"] = False
    data["target"] |= {
        "endpoint": "chat", "auth": "auto", "api_key_file": None, "proxy": None, "trust_env": False,
        "metrics_url": None, "extra_headers": {}, "extra_body": {},
    }  # fmt: skip
    data["sweep"] |= {
        "stage_duration_sec": STAGE_S, "target_duration_sec": None, "min_window_arrivals": 0, "warmup_sec": WARMUP_S,
        "drain_limit_sec": DRAIN_LIMIT_S, "repeats": 1,
    }  # fmt: skip
    lag_ms = 1e3 * lag_limit_s(config.slo.ttft_deadline_ms / 1e3)
    late = {"metric": "send_lag", "statistic": "p99", "operator": "<=", "value": lag_ms, "at": "all", "abort": True}
    data["gates"], data["limits"] = [late], {}
    return data


def _validated(data: dict[str, Any]) -> Any:
    from bench.config import Config

    return Config.model_validate(data)


@contextmanager
def null_server(ttft_s: float, gap_s: float) -> Iterator[str]:
    """The address of a null server while it lives."""
    import subprocess

    command = [sys.executable, "-m", "engine.null_server", "--ttft-ms", f"{ttft_s * 1e3:g}", "--gap-ms",
               f"{gap_s * 1e3:.4f}", "--parent-pid", str(os.getpid())]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                               start_new_session=True)  # fmt: skip
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        if ready[:1] != ["READY"]:
            raise RuntimeError(f"the null server did not start (exit code {process.wait(5)})")
        yield ready[1]
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _get(url: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=20) as answer:
        return answer.read()


def _added(run_dir: Path, records: dict[str, list[float]]) -> Any:
    """A function: stage -> (TTFT added, E2E added, server's TTFT) of its window."""
    import csv

    import numpy as np

    from analysis.client_ceiling import added

    rows: dict[int, list[tuple[str, float, float, float]]] = {}
    with (run_dir / "requests.csv").open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if row["phase"] == "window" and row["status"] == "ok" and row["last_token_s"]:
                times = (float(row["sent_s"]), float(row["first_token_s"]), float(row["last_token_s"]))
                rows.setdefault(int(row["stage"]), []).append((row["request_id"], *times))

    def of(stage: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        mine = rows.get(stage, [])
        return added([r[0] for r in mine], *(np.array([r[i] for r in mine]) for i in (1, 2, 3)), records)

    return of


def _made(stages: list[Any], job: _Job) -> Any:
    from analysis.client_ceiling import added_by_client, by_rate, ceiling, limits, told
    from bench import __version__
    from bench.records.client_calibration import ClientCalibration
    from bench.records.sentences import text_of

    found = ceiling(stages)
    adds = added_by_client(stages)
    sentence = told(found, adds, job.processes)
    config = job.resolved.config
    return ClientCalibration(
        made_utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), tool_version=__version__,
        machine=job.host, workers=job.processes, read=config.client.read, output_tokens_mean=job.tokens,
        ceiling_qps=found.qps, ceiling_kind=found.kind, first_miss_qps=found.first_miss_qps,
        bound_by=list(found.bound_by), limits=limits(config.slo.ttft_deadline_ms / 1e3), adds=adds,
        stages=[s.as_dict() for s in by_rate(stages).values()], sentence=text_of(sentence),
        code=sentence["code"], params=sentence["params"],
    )  # fmt: skip


def lines(made: Any) -> list[str]:
    """The table and the sentence."""
    out = [f"{'requests/s':>10}{'sent':>9}{'answered':>10}{'send lag p50, p99':>20}{'adds to TTFT':>16}"
           f"{'to E2E p50, p99':>19}{'CPU':>6}  holds"]  # fmt: skip
    for s in made.stages:
        lag = f"{_ms(s['send_lag_p50_s'])}, {_ms(s['send_lag_p99_s'])} ms"
        ttft = f"{_ms(s['ttft_added_p50_s'])}, {_ms(s['ttft_added_p99_s'])} ms"
        e2e = f"{_ms(s['e2e_added_p50_s'])}, {_ms(s['e2e_added_p99_s'])} ms"
        cpu = "-" if s["cpu_max_ratio"] is None else f"{s['cpu_max_ratio']:.0%}"
        holds = "yes" if s["ok"] else "no: " + ", ".join(s["bound_by"])
        out.append(f"{s['offered_qps']:>10g}{s['delivered_qps']:>9.1f}{s['answered']:>10}{lag:>20}{ttft:>16}{e2e:>19}"
                   f"{cpu:>6}  {holds}")  # fmt: skip
    return [*out, made.sentence]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}" if seconds < 0.01 else f"{seconds * 1e3:.0f}"
