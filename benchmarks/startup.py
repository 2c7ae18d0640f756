"""How long the command takes to say something: `python -m benchmarks.startup`.

Output: one row per command: median CPU time (the machine may be shared) and median wall time of a fresh process, ms.
The goal is 400 ms for every command that sends no load.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

COMMANDS = (
    ("--help",), ("--version",), ("report", "--help"), ("validate", "--help"), ("run", "--help"), ("compare", "--help"),
    ("validate", "configs/demo.json"),
)  # fmt: skip


def one(arguments: tuple[str, ...]) -> tuple[float, float]:
    """(CPU, wall) of one fresh process, ms."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "bench", *arguments]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000, wall * 1000


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="processes per command")
    runs = parser.parse_args().runs
    print("command,runs,cpu_ms,wall_ms")
    for arguments in COMMANDS:
        cpu, wall = zip(*(one(arguments) for _ in range(runs)), strict=True)
        print(f"bench {' '.join(arguments)},{runs},{statistics.median(cpu):.0f},{statistics.median(wall):.0f}")


if __name__ == "__main__":
    main()
