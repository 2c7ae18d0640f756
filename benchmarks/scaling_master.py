"""Where one master ends: many simulated workers that talk to a real conductor by Locust's own channel.

Input: how many workers, rows per second of each. Output: what the master process used, and whether it kept up.
Does not: send load. A simulated worker sends what a real one would: heartbeats, statistics, gauges, packed batches.

1. The master side is ours and Locust's: MasterRunner, message loop, unpack, checks, CSV lines, live view.
2. It keeps up as long as its CPU stays under a core and batches are acknowledged within `LATE_S`.
"""
from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from typing import Any

LATE_S = 2.0
FULL = 0.85  # of a core: above it a Python process answers late, by the same limit as for a worker
RAMP = (100, 200, 400, 600, 800, 1200, 1600)
GROUP = 8  # workers whose rows are made; the others send the same under another stage


def measure_master(workers: int, rows_per_s: float, seconds: float) -> dict[str, Any]:
    """CPU of one master with so many workers, each with so many rows a second."""
    there, here = multiprocessing.get_context("spawn").Pipe()
    master = multiprocessing.get_context("spawn").Process(target=_master, args=(there, workers, rows_per_s, seconds))
    master.start()
    try:
        port = here.recv()
        late_s, sent = _workers(port, workers, rows_per_s, seconds)
        here.send("end")
        said: dict[str, Any] = here.recv()
    finally:
        master.join(20)
        if master.is_alive():
            master.kill()
    rows = max(1, said["rows"])
    return {
        "simulated_workers": workers, "rows_per_s_per_worker": rows_per_s, "seconds": seconds,
        # cores that the load needs: CPU of the master for all of it, over the time in which it came
        "master_cpu_ratio": round(said["cpu_s"] / seconds, 3), "rows_sent": sent, "rows_written": said["rows"],
        "master_us_per_request": round(said["ledger_us"] / rows, 3),
        "master_cpu_us_per_request": round(1e6 * said["cpu_s"] / rows, 3), "ack_late_max_s": round(late_s, 3),
        "keeps_up": bool(said["rows"] >= 0.99 * sent and late_s < LATE_S),
    }  # fmt: skip


def ramp_master(rows_per_s: float, seconds: float) -> dict[str, Any]:
    """More and more workers until the master does not keep up; where it ends by CPU.

    CPU grows in line with the rows: `ends_at_rows_per_s` is where that line reaches `FULL` of a core. What else runs on
    this machine takes turns from the master but hardly adds to its CPU, so that figure holds on a busy machine too;
    lateness does not.
    """
    steps: list[dict[str, Any]] = []
    for workers in RAMP:
        # a process for each: the first import of Locust changes how the one it is in reads its pipes
        command = [sys.executable, "-m", "benchmarks.scaling", "--master", str(workers), "--seconds", f"{seconds:g}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120 + 10 * seconds)
        last = json.loads(done.stdout.splitlines()[-1]) | {"load_average": os.getloadavg()[0]}
        steps.append(last)
        print(
            f"{workers:5} workers  {last['rows_sent'] / seconds:9.0f} rows/s  {last['master_cpu_ratio']:5.2f} core  "
            f"{last['master_cpu_us_per_request']:6.2f} us/row  acknowledged within {last['ack_late_max_s']:6.2f} s  "
            f"load average {last['load_average']:.1f}", file=sys.stderr, flush=True,
        )  # fmt: skip
        if last["master_cpu_ratio"] > 1.2:  # more than the core that there is
            break
    kept = [s for s in steps if s["rows_written"] >= 0.99 * s["rows_sent"]] or steps[:1]
    # least squares through 0 of CPU seconds over rows
    per_row_s = sum(1e-6 * s["master_cpu_us_per_request"] * s["rows_written"] ** 2 for s in kept)
    per_row_s /= sum(s["rows_written"] ** 2 for s in kept)
    ends_at = FULL / per_row_s
    return {
        "steps": steps, "master_cpu_us_per_request": round(1e6 * per_row_s, 3), "ends_at_rows_per_s": int(ends_at),
        "ends_at_workers": int(ends_at / rows_per_s),
    }  # fmt: skip


def _batch(worker: int, workers: int, first: int, rows: int) -> bytes:
    """Rows of a stripe as a worker would pack them."""
    import random

    from bench.records.packing import pack
    from bench.records.request import RequestRow

    rng = random.Random(worker * 1_000_003 + first)
    out = []
    for k in range(first, first + rows):
        i, at = worker + workers * k, k / 400
        sent, tokens = at + rng.gauss(3e-4, 1e-4), rng.randint(50, 350)
        first_s = sent + rng.random() * 0.2
        last_s = first_s + tokens * 0.01 * rng.uniform(1, 1.1)
        out.append(RequestRow(
            0, i, worker, 0, 400.0, "window", "", "", f"run-0-{i}", "ok", http_status=200, finish_reason="length",
            intended_s=at, sent_s=sent, headers_s=sent + 0.01, first_token_s=first_s, first_content_s=first_s,
            last_token_s=last_s, done_s=last_s + 1e-4, send_lag_s=sent - at, ttft_s=first_s - at, ttfo_s=first_s - at,
            tpot_s=(last_s - first_s) / (tokens - 1), e2e_s=last_s - at, residence_s=last_s + 1e-4 - sent,
            input_tokens=500,
            prompt_tokens=500, max_tokens=tokens, output_tokens=tokens, chunks=tokens, reads=tokens // 9,
            bytes_in=180 * tokens,
            output_tokens_source="usage", connection="reused", clock="kernel", read_mode="lazy",
        ))  # fmt: skip
    return pack(out)


def _locust_report(requests: int) -> dict[str, Any]:
    """Locust's own statistics of three seconds: E2E, TTFT and TPOT of so many requests."""
    import random

    from locust.stats import RequestStats

    from locustfiles.stats import install_buckets

    install_buckets()
    stats, rng = RequestStats(), random.Random(1)
    for _ in range(requests):
        for kind, scale in (("POST", 2000.0), ("TTFT", 100.0), ("TPOT", 10.0)):
            stats.log_request(kind, "00 chat @400", rng.lognormvariate(0, 0.6) * scale, 100)
    return {"stats": stats.serialize_stats(), "stats_total": stats.total.get_stripped_report(), "errors": {},
            "user_classes_count": {"ChatUser": 1}, "user_count": 1}  # fmt: skip


def _workers(port: int, workers: int, rows_per_s: float, seconds: float) -> tuple[float, int]:
    """Speak for all workers from one process; returns (longest wait for an acknowledgement, rows sent)."""
    import zmq
    from locust.rpc.protocol import Message

    context = zmq.Context()
    poller = zmq.Poller()
    sockets = []
    for w in range(workers):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"sim_{w}".encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{port}")
        sockets.append(socket)
        poller.register(socket, zmq.POLLIN)
    send = lambda w, kind, data: sockets[w].send(Message(kind, data, f"sim_{w}").serialize(), zmq.NOBLOCK)  # noqa: E731
    batch_rows = max(1, min(1000, int(2 * rows_per_s)))
    every_s = batch_rows / rows_per_s
    # packing is the workers' cost: the bytes are made before the clock runs, numbered by hand for each worker
    total = int(seconds / every_s)
    batches = [[_batch(w, GROUP, k * batch_rows, batch_rows) for k in range(total)] for w in range(min(workers, GROUP))]
    report = _locust_report(int(3 * rows_per_s))
    for w in range(workers):
        send(w, "client_ready", "2.47.0")
    time.sleep(1.0)
    open_at: dict[tuple[int, int], float] = {}
    late = 0.0
    start = time.monotonic()
    events = sorted(
        [(w / workers * every_s + k * every_s, "rows", w, k) for w in range(workers) for k in range(total)]
        + [(w / workers + k, "heartbeat", w, k) for w in range(workers) for k in range(int(seconds))]
        + [(w / workers * 3 + k * 3, "stats", w, k) for w in range(workers) for k in range(int(seconds / 3))]
        + [(w / workers * 0.5 + k * 0.5, "gauge", w, k) for w in range(workers) for k in range(int(2 * seconds))]
    )
    for at, kind, w, k in events:
        while time.monotonic() - start < at:
            _acks(poller, open_at, start + at - time.monotonic())
        if kind == "rows":
            open_at[w, k + 1] = time.monotonic()
            stage, stripe = divmod(w, GROUP)  # eight workers have the arrivals of one stage; the next eight of another
            data = {"run_id": "run", "stage": stage, "stripe": stripe, "seq": k + 1, "data": batches[stripe][k]}
            send(w, "bench_rows", data)
        elif kind == "stats":
            send(w, "stats", report)
        elif kind == "heartbeat":
            send(w, "heartbeat", {"state": "running", "current_cpu_usage": 50.0, "current_memory_usage": 10**8})
        else:
            samples = [[at + i / 10, 0, 500, 0.0, 0.5 if not i else None, 10**8 if not i else None] for i in range(5)]
            send(w, "bench_gauge", {"run_id": "run", "stripe": w, "samples": samples, "takes": 0})
    limit = time.monotonic() + 10
    while open_at and time.monotonic() < limit:
        _acks(poller, open_at, 0.05)
        late = max([late, *(time.monotonic() - t for t in open_at.values())])
    return max(late, _acks.late), total * batch_rows * workers  # type: ignore[attr-defined]


def _acks(poller: Any, open_at: dict[tuple[int, int], float], wait_s: float) -> None:
    from locust.rpc.protocol import Message

    for socket, _ in poller.poll(max(0, int(wait_s * 1000))):
        message = Message.unserialize(socket.recv())
        if message.type == "bench_ack":
            worker = message.data["stage"] * GROUP + message.data["stripe"]
            began = open_at.pop((worker, message.data["seq"]), None)
            if began is not None:
                _acks.late = max(_acks.late, time.monotonic() - began)  # type: ignore[attr-defined]


_acks.late = 0.0  # type: ignore[attr-defined]


def _master(pipe: Any, workers: int, rows_per_s: float, seconds: float) -> None:
    import locust  # isort: skip  # noqa: F401  # patches the process, so it comes first

    import tempfile
    from pathlib import Path

    import gevent
    from locust.env import Environment

    from bench.records.collect import Collector
    from bench.records.stage import RunInfo
    from locustfiles.conductor import Conductor
    from locustfiles.crew import Stripe

    environment = Environment(user_classes=[])
    runner = environment.create_master_runner("127.0.0.1", 0)
    conductor = Conductor(environment, dict)
    for name, listener in conductor.listeners().items():
        runner.register_message(name, listener)
    folder = tempfile.TemporaryDirectory(prefix="bench-master-")
    info = RunInfo("run", "", None, "", {}, {}, 1, "", [], {}, {}, "open", "sweep", workers)
    conductor.collector = collector = Collector(Path(folder.name) / "run", info)
    stages = -(-workers // GROUP)
    for stage in range(stages):
        collector.open_stage(stage, planned=int(GROUP * rows_per_s * (seconds + 4)))
    conductor._run_id, conductor._names = "run", {stage: f"{stage:02d} chat @400" for stage in range(stages)}
    conductor._stripes = {f"sim_{w}": Stripe(f"sim_{w}", w, done=True) for w in range(workers)}
    pipe.send(runner.server.port)
    cpu_s, began = -time.process_time(), time.monotonic()
    # the plan's own greenlet is not there; its regular work is
    while not pipe.poll():
        gevent.sleep(0.2)
        conductor._look_for_lost(set())
    collector.flush()
    cpu_s += time.process_time()
    rows = sum(r.rows for r in collector.stages.values())
    ledger_us = collector.transport["cpu_us"]
    pipe.send({"cpu_s": cpu_s, "wall_s": time.monotonic() - began, "rows": rows, "ledger_us": ledger_us})
    folder.cleanup()
