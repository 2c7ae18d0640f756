"""One client process of `benchmarks.client`: our transport inside a Locust worker, or a plain FastHttpUser.

    python -m benchmarks.client_worker --mode lazy --url http://127.0.0.1:PORT --rate 140 --seconds 8

Output: one line of JSON on standard output: CPU seconds of this process in the middle of the load, from when to when
(CLOCK_MONOTONIC), peak memory, and per request [sent, first output, last output, chunks].
Does not: compare with the server's record (benchmarks.client does).

1. Ours is measured with all that a worker does: pacing, parsing, ledger rows, Locust events, packing of batches, and
   the gauge of streams in flight.
2. The peer is what its documentation shows: one user per stream in flight, read line by line, JSON per event.
"""
from __future__ import annotations

import locust  # isort: skip  # noqa: F401  # it patches the process, so it comes first

import argparse
import json
import random
import resource
import sys
import time
from typing import Any

import gevent
from locust import FastHttpUser, constant, task
from locust.env import Environment

from bench.client.endpoint import parse_base_url
from bench.client.outcome import Outcome
from bench.client.stream import Stream
from bench.client.transport import Transport, TransportOptions
from bench.records.packing import pack
from bench.records.request import RequestRow
from locustfiles import stats
from locustfiles.calm import calm
from locustfiles.pacing import YIELD_S, Breaks, Waiter

WARMUP_S = 3.0
# As the generator does: gauge, rows and Locust events ten times a second, a batch of rows to the master once a second.
GAUGE_S, SHIP_S = 0.1, 1.0
PROMPT_SHARE = 0.05


class Meter:
    """CPU of this process between the warm-up and the end of the load."""

    def __init__(self, seconds: float) -> None:
        self.cpu_s = self.from_s = self.to_s = 0.0
        warmup_s = min(WARMUP_S, seconds / 3)
        gevent.spawn_later(warmup_s, self._begin)
        gevent.spawn_later(seconds, self._end)

    def _begin(self) -> None:
        self.cpu_s, self.from_s = -time.process_time(), time.monotonic()

    def _end(self) -> None:
        self.cpu_s, self.to_s = self.cpu_s + time.process_time(), time.monotonic()

    def result(self) -> dict[str, Any]:
        """What was measured."""
        return {"cpu_s": self.cpu_s, "from_s": self.from_s, "to_s": self.to_s,
                "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def run_transport(args: argparse.Namespace) -> dict[str, Any]:
    """Open loop of Poisson arrivals through our transport."""
    environment = Environment(user_classes=[])
    environment.create_local_runner()
    stats.install(environment)
    calm()
    options = TransportOptions(read="prompt" if args.mode == "prompt" else "lazy",
                               drain_interval_s=args.drain_ms / 1e3, idle_reuse_s=0.0 if args.new else 4.0)
    transport = Transport(parse_base_url(args.url), options, "sk-benchmark")
    finished: list[tuple[str, float, Outcome]] = []
    requests: dict[str, list[float]] = {}
    connects_s: list[float] = []
    lags_s: list[float] = []
    prompt = " ".join(["word"] * 300)
    body = json.dumps({"model": "null", "stream": True, "max_tokens": args.tokens, "ignore_eos": True,
                       "messages": [{"role": "user", "content": prompt}]}).encode()

    def prepare(name: str, intended_s: float, prompt_read: bool) -> Stream:
        return transport.prepare(body, request_id=name, prompt_read=prompt_read, pinned_tokens=args.tokens,
                                 on_done=lambda outcome: finished.append((name, intended_s, outcome)))

    ready: list[RequestRow] = []
    breaks = Breaks(lambda: gevent.sleep(YIELD_S))

    def flush() -> None:
        while finished:
            breaks()
            name, intended_s, outcome = finished.pop()
            row = outcome.to_row(stage=0, arrival=len(requests), worker=0, repeat=0, offered_qps=args.rate,
                                 phase="window", tenant="", request_class="", request_id=name, intended_s=intended_s,
                                 input_tokens=300, max_tokens=args.tokens, to_run_s=float)
            stats.fire(environment, "00 benchmark", row)
            ready.append(row)
            if row.status == "ok":
                requests[name] = [row.sent_s, row.first_token_s, row.last_token_s, row.chunks]
            if row.send_lag_s is not None:
                lags_s.append(row.send_lag_s)
            if row.connect_s is not None:
                connects_s.append(row.connect_s)

    def ship() -> None:
        if ready:
            taken = ready.copy()
            ready.clear()
            pack(taken, breaks)

    in_flight: list[int] = []

    def always() -> None:
        shipped_s = due_s = time.monotonic()
        while True:
            due_s += GAUGE_S
            gevent.sleep(max(0.0, due_s - time.monotonic()))
            now_s = time.monotonic()
            in_flight.append(transport.in_flight_at(now_s - transport.settle_s))
            flush()
            if now_s - shipped_s >= SHIP_S:
                shipped_s = now_s
                ship()

    beat = gevent.spawn(always)
    blocker = gevent.spawn(_block, args.block_ms / 1e3) if args.block_ms else None
    meter = Meter(args.seconds)
    rng = random.Random(args.seed)
    start_s = due_s = time.monotonic()
    i = 0
    alarm = Waiter()
    while due_s < start_s + args.seconds:
        stream = prepare(f"{args.name}-{i}", due_s, rng.random() < args.prompt_share)
        transport.open_ahead(due_s)
        alarm.until(due_s)
        transport.start(stream)
        due_s += rng.expovariate(args.rate)
        i += 1
    alarm.close()
    gevent.sleep(0.2)
    until_s = time.monotonic() + 5.0
    while transport.in_flight and time.monotonic() < until_s:
        gevent.sleep(0.05)
    transport.cancel_all("CL-DRAIN")
    for greenlet in filter(None, (beat, blocker)):
        greenlet.kill()
    flush()
    result = meter.result() | {"requests": requests, "planned": i, "connects_s": connects_s, "lags_s": lags_s,
                               "stats": transport.stats().to_json()}
    transport.close()
    return result


def _block(block_s: float) -> None:
    """Hold the loop ten times a second."""
    while True:
        gevent.sleep(0.1 - block_s)
        until_s = time.monotonic() + block_s
        while time.monotonic() < until_s:
            pass


def run_peer(args: argparse.Namespace) -> dict[str, Any]:
    """Closed loop of plain FastHttpUsers, as many as the streams in flight of the same rate."""
    requests: dict[str, list[float]] = {}
    numbers = iter(range(10**9))
    body = json.dumps({"model": "null", "stream": True, "max_tokens": args.tokens, "ignore_eos": True,
                       "messages": [{"role": "user", "content": " ".join(["word"] * 300)}]})

    class Reader(FastHttpUser):
        host = args.url
        wait_time = constant(0)
        network_timeout = connection_timeout = 30.0

        @task
        def read(self) -> None:
            name = f"{args.name}-{next(numbers)}"
            sent_s = time.monotonic()
            first_s = last_s = 0.0
            chunks = 0
            headers = {"Content-Type": "application/json", "x-request-id": name}
            with self.client.post("/v1/chat/completions", data=body, headers=headers, stream=True,
                                  catch_response=True) as response:
                while line := response.stream.readline(b"\n"):
                    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                        continue
                    event = json.loads(line[6:])
                    if event["choices"] and event["choices"][0]["delta"].get("content"):
                        last_s = time.monotonic()
                        first_s = first_s or last_s
                        chunks += 1
                response.success()
            requests[name] = [sent_s, first_s, last_s, chunks]

    environment = Environment(user_classes=[Reader])
    runner = environment.create_local_runner()
    users = max(1, round(args.rate * args.stream_s))
    runner.start(users, spawn_rate=max(1.0, users / 2.0))
    meter = Meter(args.seconds)
    gevent.sleep(args.seconds + 0.05)
    done = dict(requests)
    runner.quit()
    return meter.result() | {"requests": done, "planned": len(done), "connects_s": [], "lags_s": [], "stats": {}}


def main(argv: list[str] | None = None) -> int:
    """Run one client and print its result."""
    parser = argparse.ArgumentParser(description="one client process of benchmarks.client")
    parser.add_argument("--mode", choices=["lazy", "prompt", "fasthttp"], required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--name", default="r")
    parser.add_argument("--rate", type=float, default=140.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--stream-s", type=float, default=2.05, help="how long one answer takes")
    parser.add_argument("--drain-ms", type=float, default=200.0)
    parser.add_argument("--block-ms", type=float, default=0.0, help="hold the loop that long, ten times a second")
    parser.add_argument("--prompt-share", type=float, default=PROMPT_SHARE, help="streams read promptly")
    parser.add_argument("--new", action="store_true", help="a new connection for each request")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    result = run_peer(args) if args.mode == "fasthttp" else run_transport(args)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
