"""Synthetic run folders with known truth, made without the sender, the engine or the analysis.

A continuous-time simulator of limited processor sharing: at most `seqs` requests run,
all of them at the same speed 1/T(n) tokens per second, T(n) = alpha + beta n, the rest
wait first come first served. Prompt work gamma * prompt is paid before the first token.
Virtual work time makes it O(log n) per event. Everything is seeded.

    stages = [StageSpec(qps=5), StageSpec(qps=20)]
    write_run(folder, stages, Service(), seed=1)

`faults` change rows after the simulation: see `Faults`.
"""
from __future__ import annotations

import csv
import heapq
import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.records.digests import file_digests
from bench.records.ledger import content_digest
from bench.records.request import FIELD_NAMES, RequestRow
from bench.records.stage import INFLIGHT_COLUMNS, STAGE_COLUMNS, InflightRow, StageRow


@dataclass(frozen=True)
class Service:
    """Step-time coefficients in seconds; defaults have capacity 27.2 requests/s at mean 482 tokens."""

    alpha: float = 0.6e-3
    beta: float = 0.04e-3
    gamma: float = 8e-6
    seqs: int = 32
    mu: float = 6.0
    sigma: float = 0.6
    prompt: tuple[int, int] = (100, 2000)
    queue_limit: int | None = None  # waiting requests above which an arrival is refused

    def capacity_qps(self) -> float:
        """lambda_max = 1/(m (alpha/K + beta) + gamma P)."""
        mean_out = float(np.exp(self.mu + self.sigma**2 / 2)) - 0.5  # floor costs half a token
        mean_in = sum(self.prompt) / 2
        return 1 / (mean_out * (self.alpha / self.seqs + self.beta) + self.gamma * mean_in)


@dataclass(frozen=True)
class StageSpec:
    """One stage as planned."""

    qps: float
    duration_s: float = 60.0
    warmup_s: float = 10.0
    process: str = "poisson"
    burstiness: float = 1.0
    seed: int | None = None  # None: from the run's seed and the stage number
    repeat: int = 0


@dataclass
class Faults:
    """What goes wrong, as shares of the arrivals (chosen by a seeded draw)."""

    rejected: float = 0.0  # answered 429 at once
    error: float = 0.0
    unsent: float = 0.0
    one_token: float = 0.0
    flags: dict[str, float] = field(default_factory=dict)
    send_lag_s: float = 0.0003  # mean of an exponential
    cpu_ratio: float = 0.3
    loop_lag_s: float = 0.001
    clock: str = "kernel"
    drop_rows: int = 0
    double_rows: int = 0


@dataclass
class Simulated:
    """Times of one stage from its start, seconds; NaN where nothing happened."""

    arrival: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    start: np.ndarray  # admission into the batch
    first: np.ndarray
    last: np.ndarray
    refused: np.ndarray


def arrivals(spec: StageSpec, rng: np.random.Generator) -> np.ndarray:
    """Arrival times in [0, duration)."""
    n = int(spec.qps * spec.duration_s * 1.5 + 50)
    if spec.process == "constant":
        gaps = np.full(n, 1 / spec.qps)
    elif spec.process == "gamma":
        gaps = rng.gamma(spec.burstiness, 1 / (spec.qps * spec.burstiness), n)
    else:
        gaps = rng.exponential(1 / spec.qps, n)
    times = np.cumsum(gaps)
    return times[times < spec.duration_s]


def simulate(arrival: np.ndarray, service: Service, rng: np.random.Generator) -> Simulated:
    """Run the arrivals through the service to the last token."""
    n = len(arrival)
    prompt = rng.integers(service.prompt[0], service.prompt[1] + 1, n)
    output = np.maximum(1, rng.lognormal(service.mu, service.sigma, n).astype(int))
    # The mean prompt cost is spread over a request's tokens as seen by everybody: gamma P / m per token.
    extra = service.gamma * float(prompt.mean() / output.mean()) if n else 0.0
    slope = service.beta + extra
    start = np.full(n, np.nan)
    last = np.full(n, np.nan)
    refused = np.zeros(n, dtype=bool)
    running: list[tuple[float, int]] = []  # (work time at which it ends, index)
    waiting: deque[int] = deque()
    now, work, i = 0.0, 0.0, 0
    times, lengths = arrival.tolist(), output.tolist()
    while i < n or running:
        k = len(running)
        pace = service.alpha + slope * k if k else 0.0
        ends = now + (running[0][0] - work) * pace if k else np.inf
        if i < n and times[i] <= ends:
            if k:
                work += (times[i] - now) / pace
            now = times[i]
            if k < service.seqs:
                heapq.heappush(running, (work + lengths[i], i))
                start[i] = now
            elif service.queue_limit is not None and len(waiting) >= service.queue_limit:
                refused[i] = True
            else:
                waiting.append(i)
            i += 1
        else:
            now, work = ends, running[0][0]
            _, done = heapq.heappop(running)
            last[done] = now
            if waiting:
                j = waiting.popleft()
                heapq.heappush(running, (work + lengths[j], j))
                start[j] = now
    # First token: prefill and one step after admission, never after the last token.
    prefill = service.gamma * prompt + service.alpha + slope * service.seqs / 2
    with np.errstate(invalid="ignore"):
        first = np.where(output > 1, np.minimum(start + prefill, start + 0.9 * (last - start)), last)
    return Simulated(arrival, prompt, output, start, first, last, refused)


def _rows(
    index: int, spec: StageSpec, sim: Simulated, start_s: float, faults: Faults, workers: int, rng: np.random.Generator
) -> list[RequestRow]:
    rows = []
    n = len(sim.arrival)
    draw = rng.random(n)
    lag = rng.exponential(faults.send_lag_s, n) if faults.send_lag_s else np.zeros(n)
    flag_draw = {name: rng.random(n) < share for name, share in sorted(faults.flags.items())}
    single = rng.random(n) < faults.one_token
    for i in range(n):
        intended = start_s + float(sim.arrival[i])
        base: dict[str, Any] = dict(
            stage=index, arrival=i, worker=i % workers, repeat=spec.repeat, offered_qps=spec.qps,
            phase="warmup" if sim.arrival[i] < spec.warmup_s else "window", tenant="", request_class="",
            request_id=f"s{index}-{i:06d}", intended_s=intended, input_tokens=int(sim.prompt[i]),
            max_tokens=int(sim.output[i]),
        )  # fmt: skip
        if draw[i] < faults.unsent:
            rows.append(RequestRow(status="unsent", code="CL-CAP", error_kind="unsent", **base))
            continue
        sent = intended + float(lag[i])
        base |= dict(sent_s=sent, send_lag_s=sent - intended, clock=faults.clock, read_mode="lazy",
                     connection="reused" if i >= 20 else "new")  # fmt: skip
        if sim.refused[i] or draw[i] < faults.unsent + faults.rejected:
            done = sent + 0.002
            rows.append(RequestRow(status="rejected", code="SV-429", error_kind="rate_limited", http_status=429,
                                   done_s=done, residence_s=done - sent, detail="too many requests", **base))  # fmt: skip
            continue
        if draw[i] < faults.unsent + faults.rejected + faults.error:
            done = sent + 0.05
            rows.append(RequestRow(status="error", code="CH-RESET", error_kind="reset", done_s=done,
                                   residence_s=done - sent, detail="connection reset", **base))  # fmt: skip
            continue
        first, last = start_s + float(sim.first[i]) + float(lag[i]), start_s + float(sim.last[i]) + float(lag[i])
        tokens = 1 if single[i] else int(sim.output[i])
        if tokens == 1:
            last = first
        done = last + 0.0001
        flags = ";".join(name for name in sorted(flag_draw) if flag_draw[name][i])
        rows.append(RequestRow(
            status="ok", http_status=200, finish_reason="length", headers_s=sent + 0.001, first_token_s=first,
            first_content_s=first, last_token_s=last, done_s=done, ttft_s=first - intended, ttfo_s=first - intended,
            tpot_s=(last - first) / (tokens - 1) if tokens > 1 else None, e2e_s=last - intended,
            residence_s=done - sent, prompt_tokens=int(sim.prompt[i]), output_tokens=tokens,
            output_tokens_source="usage", chunks=tokens, reads=2, bytes_in=200 * tokens, flags=flags, **base,
        ))  # fmt: skip
    return rows


def _gauge(
    rows: list[RequestRow], end_s: float, workers: int, faults: Faults, rng: np.random.Generator
) -> list[InflightRow]:
    """A 10 Hz gauge per worker, counted from the rows' true times (before any row is lost)."""
    samples = []
    for worker in range(workers):
        sent = np.sort([r.sent_s for r in rows if r.worker == worker and r.sent_s is not None])
        done = np.sort([r.done_s for r in rows if r.worker == worker and r.done_s is not None])
        t = np.arange(0.0, end_s, 0.1) + rng.uniform(0, 0.002)
        level = np.searchsorted(sent, t, side="right") - np.searchsorted(done, t, side="right")
        for k in range(len(t)):
            samples.append(InflightRow(float(t[k]), worker, 0, int(level[k]), float(rng.exponential(faults.loop_lag_s)),
                                       faults.cpu_ratio, 80_000_000))  # fmt: skip
    return samples


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return repr(round(value, 9)) if isinstance(value, float) else value


def write_csv(path: Path, columns: tuple[str, ...], rows: list[Any]) -> None:
    """A run file: header, then one line a row, absent = empty."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows([_cell(getattr(row, name)) for name in columns] for row in rows)


def default_config(target_qps: float = 20.0) -> dict[str, Any]:
    """The part of a resolved config that the analysis reads."""
    return {
        "slo": {"ttft_deadline_ms": 800, "tpot_deadline_ms": 100, "p95_target_ms": 4000, "attainment_target": 0.99},
        "loadgen": {"target_qps": target_qps, "burstiness": 1.0},
        "scheduler": {"max_num_seqs": 32, "batch_size_cap": 32},
        "engine": {"replicas": 1},
        "sweep": {"repeat_seed": "different"},
        "gates": [],
    }


def make_run(
    specs: list[StageSpec], service: Service, *, seed: int = 1, faults: Faults | None = None,
    faults_at: dict[int, Faults] | None = None, workers: int = 1, gap_s: float = 2.0,
) -> tuple[list[RequestRow], list[StageRow], list[InflightRow]]:  # fmt: skip
    """Rows of all files of one run. `faults_at`: stage -> its own faults."""
    everybody, stages = [], []
    start = 1.0
    for index, spec in enumerate(specs):
        mine = (faults_at or {}).get(index, faults or Faults())
        stage_seed = seed * 1000 + index if spec.seed is None else spec.seed
        rng = np.random.default_rng(stage_seed)
        sim = simulate(arrivals(spec, rng), service, rng)
        rows = _rows(index, spec, sim, start, mine, workers, rng)
        everybody.extend(rows)
        end = start + spec.duration_s
        drained = max([end, *(r.done_s for r in rows if r.done_s is not None)])
        stages.append(StageRow(
            stage=index, repeat=spec.repeat, name=f"{index:02d} chat @{spec.qps:g}", offered_qps=spec.qps,
            process=spec.process, loop="closed" if spec.process == "closed" else "open", seed=stage_seed, planned=len(rows), start_s=start,
            window_start_s=start + spec.warmup_s, window_end_s=end, end_s=end, drained_s=drained, workers=workers,
            rows=len(rows), schedule_hash=f"{stage_seed:064x}",
        ))  # fmt: skip
        start = drained + gap_s
    rng = np.random.default_rng(seed + 77)
    first = faults or Faults()
    return everybody, stages, _gauge(everybody, start, workers, first, rng)


def write_run(
    folder: Path, specs: list[StageSpec], service: Service | None = None, *, seed: int = 1, target_qps: float = 20.0,
    faults: Faults | None = None, faults_at: dict[int, Faults] | None = None, workers: int = 1,
    config: dict[str, Any] | None = None, locust_csv: bool = True, **run: Any,
) -> Path:  # fmt: skip
    """Write a whole run folder and return it. `run`: values that replace those of run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    faults = faults or Faults()
    rows, stages, gauge = make_run(
        specs, service or Service(), seed=seed, faults=faults, faults_at=faults_at, workers=workers
    )
    if locust_csv:
        write_locust_stats(folder / "locust_stats.csv", rows, stages)
    kept = rows[faults.drop_rows :] + rows[-faults.double_rows :] if faults.double_rows else rows[faults.drop_rows :]
    write_csv(folder / "requests.csv", FIELD_NAMES, kept)
    write_csv(folder / "stages.csv", STAGE_COLUMNS, stages)
    write_csv(folder / "inflight.csv", INFLIGHT_COLUMNS, gauge)
    document = {
        "run_id": folder.name, "started_utc": "2026-11-29T00:00:00Z", "finished_utc": "2026-11-29T00:10:00Z",
        "tool_version": "0.1.0", "versions": {}, "host": {}, "seed": seed, "schedule_hash": "0" * 64, "command": [],
        "config": config or default_config(target_qps), "config_origin": {}, "loop": "open", "shape": "sweep",
        "workers": workers, "worker_info": [], "target": {}, "interrupted": False, "simulated": False,
        "preflight": {}, "problems": [], "files": {}, "schema_version": 1,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(document | run))
    return folder


def list_digests(folder: Path) -> Path:
    """The folder, its files listed in run.json with their digests, as the end of a real run does."""
    run = json.loads((folder / "run.json").read_text())
    own = {"run.json": {"sha256": content_digest(run)}}
    (folder / "run.json").write_text(json.dumps(run | {"files": file_digests(folder) | own}))
    return folder


def write_locust_stats(path: Path, rows: list[RequestRow], stages: list[StageRow]) -> None:
    """Locust's table, computed its own way: running sums, rounded buckets, top-down percentile walk."""
    columns = ("50%", "66%", "75%", "80%", "90%", "95%", "98%", "99%", "99.9%", "99.99%", "100%")
    shares = (0.5, 0.66, 0.75, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999, 1.0)
    with path.open("w", encoding="utf-8", newline="") as stream:
        out = csv.writer(stream)
        out.writerow(["Type", "Name", "Request Count", "Failure Count", "Median Response Time", "Average Response Time",
                      "Min Response Time", "Max Response Time", "Average Content Size", "Requests/s", "Failures/s", *columns])  # fmt: skip
        for stage in stages:
            mine = [r for r in rows if r.stage == stage.stage]
            for kind in ("chat", "TTFT", "TPOT"):
                values: list[float | None] = []
                failures = 0
                for r in mine:
                    if r.status == "ok":
                        v = {"chat": r.e2e_s, "TTFT": r.ttft_s, "TPOT": r.tpot_s}[kind]
                        if v is not None:
                            values.append(v * 1e3)
                    elif kind == "chat":
                        failures += 1
                        values.append(None if r.done_s is None else (r.done_s - r.intended_s) * 1e3)
                if not values:
                    continue
                timed = [v for v in values if v is not None]
                buckets: dict[float, int] = {}
                for v in timed:
                    step = 1 if v < 100 else 10 if v < 1000 else 100 if v < 10000 else 1000
                    buckets[round(v / step) * step] = buckets.get(round(v / step) * step, 0) + 1
                cells = [_locust_percentile(buckets, len(timed), p) for p in shares]
                out.writerow(
                    [
                        kind,
                        stage.name,
                        len(values),
                        failures,
                        cells[0],
                        sum(timed) / max(len(timed), 1),
                        0,
                        0,
                        0,
                        0,
                        0,
                        *cells,
                    ]
                )


def _locust_percentile(buckets: dict[float, int], n: int, share: float) -> int:
    wanted, seen = int(n * share), 0
    for value in sorted(buckets, reverse=True):
        seen += buckets[value]
        if n - seen <= wanted:
            return int(value)
    return 0
