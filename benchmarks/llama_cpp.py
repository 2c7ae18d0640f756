"""A run against llama.cpp's server beside the server's own log: tokens, times and waits of each answer, as JSON.

    python -m benchmarks.llama_cpp runs/RUN server.log

Input: a run folder, and what `llama-server` wrote to its console (lines `launch_slot_`, `print_timing`, `release`).
Output: how many answers were found on both sides, and how far apart the two clocks are. Nothing is sent.
Does not: judge. docs/evidence/outside-engine.md shows what came out.

1. Rows carry no task number: both sides are put in order, and an answer is the next task with the same numbers of
   computed prompt tokens and of output tokens. Tasks before the run (checks, other runs) are skipped by the offset that
   fits best.
2. The log's clock starts with the server: it is tied to the run's by the median of (done - release).
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_LINE = re.compile(r"^(\d+)\.(\d+)\.(\d+)\.(\d+) \w slot\s+(\S+): id\s+\d+ \| task (\d+) \|\s*(.*)")
_TIME = re.compile(r"(prompt eval|eval) time =\s+([\d.]+) ms /\s+(\d+) tokens")
AHEAD = 60  # tasks that may be queued before one that was sent earlier
SHARES = (0.0, 0.01, 0.5, 0.9, 0.99, 1.0)


@dataclass
class Task:
    """One answer as the server logged it; seconds of the server's clock."""

    launch_s: float | None = None
    release_s: float | None = None
    prompt_s: float = 0.0
    prompt_tokens: int = -1  # computed, without what came from the cache
    decode_s: float = 0.0
    output_tokens: int = -1


def read_log(lines: Iterable[str]) -> list[Task]:
    """The answers that were launched, timed and released, in order of their task numbers."""
    tasks: dict[int, Task] = {}
    for line in lines:
        found = _LINE.match(line)
        if not found:
            continue
        minutes, seconds, millis, micros = (int(found[k]) for k in range(1, 5))
        at_s = minutes * 60 + seconds + millis / 1e3 + micros / 1e6
        task = tasks.setdefault(int(found[6]), Task())
        if found[5].startswith("launch"):
            task.launch_s = at_s
        elif found[5].startswith("release"):
            task.release_s = at_s
        elif took := _TIME.search(found[7]):
            if took[1] == "eval":
                task.decode_s, task.output_tokens = float(took[2]) / 1e3, int(took[3])
            else:
                task.prompt_s, task.prompt_tokens = float(took[2]) / 1e3, int(took[3])
    whole = (tasks[number] for number in sorted(tasks))
    return [t for t in whole if t.launch_s is not None and t.release_s is not None and t.output_tokens >= 0]


def pair(rows: list[dict[str, str]], tasks: list[Task]) -> list[tuple[dict[str, str], Task]]:
    """Rows with status ok, in order of sending, each with its task; a row that fits none is left out."""
    rows = sorted((r for r in rows if r["status"] == "ok"), key=lambda r: float(r["sent_s"]))
    keys = [(int(float(r["prompt_tokens"] or -1)) - int(float(r["cached_tokens"] or 0)),
             int(float(r["output_tokens"] or -1))) for r in rows]  # fmt: skip
    theirs = [(t.prompt_tokens, t.output_tokens) for t in tasks]
    first = keys[:100]
    starts = range(max(len(theirs) - len(keys), 0) + 1)
    start = max(starts, key=lambda k: sum(a == b for a, b in zip(first, theirs[k:], strict=False)), default=0)
    left, out = list(range(start, len(tasks))), []
    for row, key in zip(rows, keys, strict=True):
        place = next((i for i, j in enumerate(left[:AHEAD]) if theirs[j] == key), None)
        if place is not None:
            out.append((row, tasks[left.pop(place)]))
    return out


def compare(rows: list[dict[str, str]], tasks: list[Task]) -> dict[str, Any]:
    """Counts, and quantiles (SHARES) in ms of what the two sides say of the same answers."""
    pairs = pair(rows, tasks)
    out: dict[str, Any] = {"answers": sum(r["status"] == "ok" for r in rows), "paired": len(pairs)}
    if not pairs:
        return out

    def ours(name: str) -> np.ndarray:
        return np.array([float(r[name] or "nan") for r, _ in pairs])

    first, last, sent, done = (ours(f"{name}_s") for name in ("first_token", "last_token", "sent", "done"))
    decode, prompt = np.array([t.decode_s for _, t in pairs]), np.array([t.prompt_s for _, t in pairs])
    launch, release = (np.array([getattr(t, name) for _, t in pairs]) for name in ("launch_s", "release_s"))
    offset = float(np.median(done - release))
    steps = ours("output_tokens") - 1
    out |= {
        "decode_mean_ours_s": float((last - first).mean()), "decode_mean_server_s": float(decode.mean()),
        "decode_ours_less_server_ms": _ms(last - first - decode),
        "ttft_less_wait_and_prompt_ms": _ms(first - sent - prompt - (launch + offset - sent)),
        "wait_ms": _ms(launch + offset - sent),
        "done_less_release_ms": _ms(done - release - offset),
        "stages": {},
    }  # fmt: skip
    stages = np.array([int(r["stage"]) for r, _ in pairs])
    for stage in np.unique(stages).tolist():
        mine = stages == stage
        per_token = [float(x[mine].sum() / max(steps[mine].sum(), 1.0) * 1e3) for x in (last - first, decode)]
        entry = {"answers": int(mine.sum()), "tpot_ours_ms": per_token[0], "tpot_server_ms": per_token[1]}
        out["stages"][stage] = entry
    return out


def _ms(values_s: np.ndarray) -> dict[str, float]:
    found = np.quantile(values_s, SHARES) * 1e3
    return {f"p{share * 100:g}": round(float(v), 3) for share, v in zip(SHARES, found, strict=True)}


def main() -> None:
    """Read both sides and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("log", type=Path)
    given = parser.parse_args()
    with (given.run / "requests.csv").open(encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    with given.log.open(encoding="utf-8", errors="replace") as handle:
        tasks = read_log(handle)
    print(json.dumps(compare(rows, tasks), indent=1))


if __name__ == "__main__":
    main()
