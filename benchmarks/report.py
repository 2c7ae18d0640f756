"""How fast and how small the report is: one generated run, analysed and written once in a fresh process.

Usage: python -m benchmarks.report [--rows N] [--repeat K] [--report-only]
Output: one JSON object as the last line: {rows, wall_s, peak_rss_mb, html_kb, html_gzip_kb}
(median wall and largest RSS of K runs, that of the analysis and of the report added up, although they
do not peak together; wall counts both from the start of the process, without the writing of the rows;
1 kB = 1,000 bytes). With --report-only the analysis is made beforehand and wall counts the report alone.
Does not: use a cached chart library: the cache folder is fresh for the first run and warm
for the others, and `cold_wall_s` is the first one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.analysis import write_run

CHILD = """
import resource, sys, time
start = time.perf_counter()
from pathlib import Path
folder = Path(sys.argv[1])
from bench.commands.finish import ready_to_draw
if sys.argv[2] == "1":
    ready_to_draw()
    from bench.records.analysis import read_analysis
    analysis = read_analysis(folder / "analysis.json")
else:
    from bench.commands.analysis_apart import analysed
    analysis = analysed(folder, meanwhile=ready_to_draw)
from reports.write import write_all
write_all(folder, analysis, env={})
who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
print(time.perf_counter() - start, sum(resource.getrusage(w).ru_maxrss for w in who) * 1024 / 1e6)
"""


def measure(folder: Path, report_only: bool, cache: Path) -> tuple[float, float]:
    """(wall seconds of the whole process, its peak RSS in MB)."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), "1" if report_only else "0"],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    wall = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return wall, float(done.stdout.split()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, cache = Path(temporary) / "run", Path(temporary) / "cache"
        folder.mkdir()
        write_run(folder, options.rows)
        if options.report_only:
            from analysis.analyse import write_analysis

            write_analysis(folder)
        cold, _ = measure(folder, options.report_only, cache)
        found = [measure(folder, options.report_only, cache) for _ in range(options.repeat)]
        html = (folder / "report.html").read_bytes()
    print(
        json.dumps(
            {
                "rows": options.rows,
                "wall_s": round(statistics.median(w for w, _ in found), 3),
                "cold_wall_s": round(cold, 3),
                "peak_rss_mb": round(max(m for _, m in found), 1),
                "html_kb": round(len(html) / 1000, 1),
                "html_gzip_kb": round(len(gzip.compress(html, 9)) / 1000, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
