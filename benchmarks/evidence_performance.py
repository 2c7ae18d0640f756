"""The page of performance figures: runs the benchmarks that are named and rewrites their rows.

Usage: python -m benchmarks.evidence_performance NAME ... [--trace PATH] [--out docs/evidence/performance.md]
       python -m benchmarks.evidence_performance --list
Input: names of benchmarks as --list gives them, or "all"; --trace is handed to the simulator's.
Output: docs/evidence/performance.md: one section per benchmark with date, command, machine and load, each figure
beside what was asked of it and the word met or missed. Sections of benchmarks that are not named stay as they are.
Does not: judge a machine that was busy: the load average stands in the section, and what is missed there wants a
rerun.

1. A figure that the benchmark did not print is "not measured", which is missed, never met.
2. The machine is told by its processor, cores and memory; no name of it, and no path.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.evidence_page import met, rewrite, table, today

PAGE = Path("docs/evidence/performance.md")
TIMEOUT_S = 1800.0
Figures = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """A figure: its key in what the benchmark prints, its meaning, its limit; `least`: at least, not at most."""

    key: str
    meaning: str
    limit: float
    least: bool = False

    def row(self, found: Figures) -> list[str]:
        """Meaning, figure, limit, verdict."""
        value = found.get(self.key)
        asked = f"at {'least' if self.least else 'most'} {self.limit:,g}"
        if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
            return [self.meaning, "not measured", asked, met(False)]
        return [self.meaning, f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}", asked,
                met(value >= self.limit if self.least else value <= self.limit)]  # fmt: skip


@dataclass(frozen=True)
class Benchmark:
    """What to run, and what is asked of its figures."""

    module: str
    arguments: tuple[str, ...]
    asked: tuple[Asked, ...]
    read: Callable[[str], Figures]

    def command(self) -> str:
        return " ".join(("python -m", f"benchmarks.{self.module}", *self.arguments))


def last_object(text: str) -> Figures:
    """The last line that is a JSON object."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise ValueError("the benchmark printed no line of JSON")


def startup_table(text: str) -> Figures:
    """The slowest command of the table of `benchmarks.startup`, ms of CPU and of wall time."""
    rows = list(csv.DictReader(text.splitlines()))
    if not rows:
        raise ValueError("the benchmark printed no table")
    return {k: max(float(row[k]) for row in rows) for k in ("cpu_ms", "wall_ms")}


BENCHMARKS: dict[str, Benchmark] = {
    "analysis": Benchmark("analysis", (), (
        Asked("wall_s", "1,000,000 rows analysed, wall s", 6.0), Asked("peak_rss_mb", "memory, MB", 800.0),
    ), last_object),
    "report": Benchmark("report", (), (
        Asked("wall_s", "20,000 rows analysed and drawn, wall s", 3.0),
    ), last_object),
    "report-million": Benchmark("report", ("--rows", "1000000", "--repeat", "1"), (
        Asked("wall_s", "1,000,000 rows analysed and drawn, wall s", 12.0),
        Asked("peak_rss_mb", "memory of both processes added, MB", 1200.0),
    ), last_object),
    "client": Benchmark("client", (), (
        Asked("ratio_lazy", "chunks per CPU second, lazy, times FastHttpUser", 10.0, least=True),
        Asked("ratio_prompt", "the same, prompt", 2.0, least=True),
        Asked("ttft_err_p50_ms", "TTFT error p50, ms", 0.1),
        Asked("ttft_err_p99_ms", "TTFT error p99, lazy, ms", 0.5),
        Asked("prompt_ttft_err_p99_ms", "TTFT error p99, prompt, ms", 0.5),
        Asked("blocked_loop_ttft_err_p99_ms", "TTFT error p99 with a blocked loop, ms", 1.0),
    ), last_object),
    # the arrivals are drawn: 2 % below the offered rate is the draw's
    "scaling": Benchmark("scaling", (), (
        Asked("streams_per_s_per_worker", "streams of 200 tokens per second and worker, of 400", 392.0, least=True),
        Asked("send_lag_p99_ms", "their send lag p99, ms", 10.0),
        Asked("short_streams_per_s_per_worker", "streams of 20 tokens, of 1,000", 980.0, least=True),
        Asked("short_send_lag_p99_ms", "their send lag p99, ms", 10.0),
        Asked("efficiency", "rate per worker, two workers over one", 0.85, least=True),
        Asked("wire_bytes_per_request", "ledger bytes per request on the wire", 60.0),
        Asked("master_us_per_request", "master CPU per request, us", 3.0),
    ), last_object),
    "simulate": Benchmark("simulate", (), (
        Asked("requests_per_s", "simulated requests per CPU second", 10_000.0, least=True),
        Asked("sweep_s", "5-to-40 sweep x 300 s x 3 seeds, CPU s", 15.0),
        Asked("azure_conv_s", "Azure conversation trace, CPU s (--trace)", 3.0),
        Asked("bytes_per_request", "bytes per finished request", 1000.0),
    ), last_object),
    "engine_http": Benchmark("engine_http", (), (
        Asked("chunks_per_s", "chunks per second at the last level in time", 15_000.0, least=True),
        Asked("lateness_p99_ms", "step lateness p99 there, ms", 5.0),
        Asked("twin_ttft_p95_diff", "TTFT p95, real against virtual", 0.05),
        Asked("twin_attainment_diff", "attainment, real against virtual", 0.01),
    ), last_object),
    "startup": Benchmark("startup", (), (
        Asked("cpu_ms", "slowest command that sends no load, CPU ms", 400.0),
        Asked("wall_ms", "the same, wall ms", 400.0),
    ), startup_table),
}  # fmt: skip


def processor() -> str:
    """The processor's own words, or the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return ", ".join(sorted(names)) or platform.machine()


def machine() -> str:
    """Processor, cores and memory in words; no host name."""
    memory = psutil.virtual_memory().total / 2**30
    system = f"{platform.system()}, Python {platform.python_version()}"
    return f"{processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {system}"


def section(name: str, found: Figures, load: tuple[float, float], seconds: float, more: str = "") -> list[str]:
    """The lines of one benchmark. `load`: load average before and after; `more`: of its command."""
    bench = BENCHMARKS[name]
    shown = {k: v for k, v in found.items() if isinstance(v, int | float | str)}
    rows = [asked.row(found) for asked in bench.asked]
    return [
        f"## {name}", "",
        f"Written on {today()}, {seconds:.0f} s; `{bench.command()}{more}`; {machine()}; load average {load[0]:.1f} "
        f"before, {load[1]:.1f} after.", "",
        *table(["figure", "reached", "asked", "verdict"], rows),
        f"All it printed: `{json.dumps(shown)}`", "",
    ]  # fmt: skip


def measure(name: str, trace: Path | None = None) -> list[str]:
    """Run one benchmark in a process of its own. Raises RuntimeError with its last words when it fails."""
    bench = BENCHMARKS[name]
    more = ["--trace", str(trace)] if trace is not None and name == "simulate" else []
    before, begun = psutil.getloadavg()[0], time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{bench.module}", *bench.arguments, *more],
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"`{bench.command()}` ended with {done.returncode}: {done.stderr[-800:].strip()}")
    load = (before, psutil.getloadavg()[0])
    told = f" --trace {trace.name}" if more and trace is not None else ""  # no path of this machine
    return section(name, bench.read(done.stdout), load, time.monotonic() - begun, told)


def head() -> list[str]:
    """The first lines of the page."""
    return [
        "# Evidence: performance", "",
        "Written by `python -m benchmarks.evidence_performance NAME ...`, each section on the date, machine and load "
        "that it gives. Wall times want a quiet machine: where the load average is above the number of cores, what is "
        "missed wants a rerun first.", "",
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the benchmarks named, one after another; 1 when one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)}, or all")
    parser.add_argument("--list", action="store_true", help="print names and commands, run nothing")
    parser.add_argument("--trace", type=Path, default=None, help="an Azure trace for the simulator")
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(f"{name}: {bench.command()}" for name, bench in BENCHMARKS.items()))
        return 0
    unknown = [n for n in options.names if n not in BENCHMARKS and n != "all"]
    if unknown or not options.names:
        parser.error(f"{', '.join(unknown) or 'no name'}; give some of {', '.join(BENCHMARKS)}, or all")
    code = 0
    for name in BENCHMARKS if "all" in options.names else options.names:
        print(f"{name}: {BENCHMARKS[name].command()}", file=sys.stderr, flush=True)
        try:
            rewrite(options.out, head(), {f"## {name}": measure(name, options.trace)})
        except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
            print(f"{name}: {error}; its section stays as it was", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
