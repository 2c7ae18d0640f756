"""Cost and accuracy of the streaming client, next to a plain Locust FastHttpUser in the same run.

    python -m benchmarks.client            # about 80 s; the last line is one JSON object
    python -m benchmarks.client --quick    # about 25 s, one repetition

Input: none. Output: a table on standard error, one line of JSON on standard output.
Does not: need a network, a GPU, or a quiet machine: trust the ratios, which come from one run.

1. Events per CPU-second = events that the server wrote between two moments / CPU time of the client process then.
2. An error is the client's time minus the server's own CLOCK_MONOTONIC just before the write of that event.
3. Modes take turns, so that a noisy minute hits all of them; the medians over the repetitions are printed.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any

# Weight of the processes under --isolate; only root may take it.
ISOLATED_NICE = -15
MODES = ("lazy", "prompt", "fasthttp")


@dataclass
class Result:
    """One client process: CPU efficiency, errors in ms, memory."""

    chunks_per_cpu_s: float
    chunks_per_s: float
    ttft_err_ms: list[float] = field(default_factory=list)
    e2e_err_ms: list[float] = field(default_factory=list)
    send_lag_ms: list[float] = field(default_factory=list)
    connects_ms: list[float] = field(default_factory=list)
    rss_mb: float = 0.0
    complete_ratio: float = 0.0


def isolated(core: int | None) -> dict[str, Any]:
    """Arguments of Popen that give a process a core and priority over others; none when core is None."""
    if core is None:
        return {}

    def prepare() -> None:
        os.sched_setaffinity(0, {core})
        os.setpriority(os.PRIO_PROCESS, 0, ISOLATED_NICE)
        # Under autogroup scheduling a nice value acts only inside its session, so the session gets one too.
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as file:
            file.write(str(ISOLATED_NICE))

    return {"preexec_fn": prepare, "start_new_session": True}


class Server:
    """A null server in its own process, stopped at the end."""

    def __init__(self, ttft_ms: float, gap_ms: float, isolate: bool) -> None:
        self.isolate = isolate
        command = [sys.executable, "-m", "engine.null_server", "--ttft-ms", str(ttft_ms), "--gap-ms", str(gap_ms),
                   "--parent-pid", str(os.getpid())]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **isolated(0 if isolate else None))
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().split()[1]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=10)

    def get(self, path: str, method: str = "GET") -> Any:
        """A document of the server, past any proxy of the environment."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(self.url + path, method=method), timeout=30) as answer:
            return json.loads(answer.read())


def percentile(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else float("nan")


def run_worker(server: Server, mode: str, name: str, *options: str) -> Result:
    """Run one client process against the server and compare the two records."""
    command = [sys.executable, "-m", "benchmarks.client_worker", "--mode", mode, "--url", server.url, "--name", name,
               *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=90, check=True,
                          **isolated(1 if server.isolate else None))
    said = json.loads(done.stdout.splitlines()[-1])
    counts = server.get("/counts")
    truth = server.get("/records", "DELETE")
    bucket_s = counts["bucket_s"]
    low, high = said["from_s"] / bucket_s, said["to_s"] / bucket_s
    events = sum(n for bucket, n in counts["events"].items() if low <= int(bucket) and int(bucket) + 1 <= high)
    # Whole buckets only, so the time is that of the buckets, not of the window.
    covered_s = bucket_s * sum(1 for bucket in counts["events"] if low <= int(bucket) and int(bucket) + 1 <= high)
    rate = events / covered_s if covered_s else 0.0
    cpu_ratio = said["cpu_s"] / (said["to_s"] - said["from_s"])
    result = Result(rate / cpu_ratio, rate, rss_mb=said["rss_mb"])
    for key, (_, first_s, last_s, chunks) in said["requests"].items():
        _, true_first_s, true_last_s, tokens = truth[key]
        if chunks == tokens and true_last_s:
            result.ttft_err_ms.append((first_s - true_first_s) * 1e3)
            result.e2e_err_ms.append((last_s - true_last_s) * 1e3)
    result.complete_ratio = len(result.ttft_err_ms) / max(1, said["planned"])
    result.send_lag_ms = [lag_s * 1e3 for lag_s in said["lags_s"]]
    result.connects_ms = [connect_s * 1e3 for connect_s in said["connects_s"]]
    return result


def say(label: str, result: Result) -> None:
    """One line of the table."""
    print(f"{label:22} {result.chunks_per_cpu_s:9.0f} {result.chunks_per_s:9.0f} "
          f"{percentile(result.ttft_err_ms, 0.5):8.3f} {percentile(result.ttft_err_ms, 0.99):8.3f} "
          f"{percentile(result.e2e_err_ms, 0.99):8.3f} {result.rss_mb:6.0f} {result.complete_ratio:6.3f}",
          file=sys.stderr, flush=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All modes in turns, then the blocked loop and new connections."""
    print(f"{'client':22} {'chunks/CPU':>9} {'chunks/s':>9} {'ttft p50':>8} {'p99 ms':>8} {'e2e p99':>8} {'MB':>6} "
          f"{'whole':>6}", file=sys.stderr)
    load = ["--rate", str(args.rate), "--tokens", str(args.tokens), "--seconds", str(args.seconds),
            "--drain-ms", str(args.drain_ms), "--stream-s", str((args.ttft_ms + args.gap_ms * args.tokens) / 1e3)]
    results: dict[str, list[Result]] = {mode: [] for mode in MODES}
    with Server(args.ttft_ms, args.gap_ms, args.isolate) as server:
        for repeat in range(args.repeats):
            for mode in MODES:
                result = run_worker(server, mode, f"{mode}{repeat}", *load, "--seed", str(repeat))
                results[mode].append(result)
                say(f"{mode} {repeat}", result)
        new = run_worker(server, "lazy", "new", "--rate", str(args.rate / 2), "--tokens", "50", "--seconds",
                         str(args.side_seconds), "--new")
        say("new connections", new)
    with Server(args.ttft_ms, 40.0, args.isolate) as server:
        blocked = run_worker(server, "lazy", "blocked", "--rate", "40", "--tokens", "20", "--seconds",
                             str(args.side_seconds), "--block-ms", "20")
        say("loop blocked 20 ms", blocked)
    return summary(results, new, blocked)


def summary(results: dict[str, list[Result]], new: Result, blocked: Result) -> dict[str, Any]:
    """The printed object: medians over the repetitions."""

    def middle(mode: str, value: Any) -> float:
        return statistics.median(value(result) for result in results[mode])

    per_cpu = {mode: middle(mode, lambda r: r.chunks_per_cpu_s) for mode in MODES}
    ratio = {mode: statistics.median(ours.chunks_per_cpu_s / peer.chunks_per_cpu_s
                                     for ours, peer in zip(results[mode], results["fasthttp"], strict=True))
             for mode in ("lazy", "prompt")}
    said: dict[str, Any] = {
        "chunks_per_cpu_s_lazy": per_cpu["lazy"], "chunks_per_cpu_s_prompt": per_cpu["prompt"],
        "chunks_per_s": middle("lazy", lambda r: r.chunks_per_s),
        "ratio_lazy": ratio["lazy"], "ratio_prompt": ratio["prompt"]}
    for mode, prefix in (("lazy", ""), ("prompt", "prompt_"), ("fasthttp", "fasthttpuser_")):
        said[f"{prefix}ttft_err_p50_ms"] = middle(mode, lambda r: percentile(r.ttft_err_ms, 0.5))
        said[f"{prefix}ttft_err_p99_ms"] = middle(mode, lambda r: percentile(r.ttft_err_ms, 0.99))
        said[f"{prefix}e2e_err_p99_ms"] = middle(mode, lambda r: percentile(r.e2e_err_ms, 0.99))
        said[f"{prefix}rss_mb"] = middle(mode, lambda r: r.rss_mb)
    said |= {
        "send_lag_p99_ms": middle("lazy", lambda r: percentile(r.send_lag_ms, 0.99)),
        "complete_ratio": middle("lazy", lambda r: r.complete_ratio),
        "blocked_loop_ttft_err_p99_ms": percentile(blocked.ttft_err_ms, 0.99),
        "blocked_loop_e2e_err_p99_ms": percentile(blocked.e2e_err_ms, 0.99),
        "new_connection_ttft_err_p99_ms": percentile(new.ttft_err_ms, 0.99),
        "new_connection_connect_p50_ms": percentile(new.connects_ms, 0.5),
        "new_connection_connect_p99_ms": percentile(new.connects_ms, 0.99),
        "new_connection_chunks_per_cpu_s": new.chunks_per_cpu_s,
        "fasthttpuser_chunks_per_cpu_s": per_cpu["fasthttp"],
        "fasthttpuser_chunks_per_s": middle("fasthttp", lambda r: r.chunks_per_s)}
    return {key: round(value, 4) for key, value in said.items()}


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="cost and accuracy of the streaming client")
    parser.add_argument("--rate", type=float, default=140.0, help="requests per second")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--gap-ms", type=float, default=10.0)
    parser.add_argument("--drain-ms", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=7.0, help="load of one client, without the drain")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--side-seconds", type=float, default=5.0, help="the blocked-loop and new-connection runs")
    parser.add_argument("--quick", action="store_true", help="one short repetition")
    parser.add_argument("--isolate", action="store_true",
                        help="as root on a shared machine: server and client get a core each, and priority")
    args = parser.parse_args(argv)
    if args.quick:
        args.seconds, args.repeats, args.side_seconds = 4.0, 1, 2.0
    started_s = time.monotonic()
    said = measure(args)
    said["wall_s"] = round(time.monotonic() - started_s, 1)
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
