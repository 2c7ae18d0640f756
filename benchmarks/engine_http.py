"""What the engine's HTTP front carries, and whether its clock agrees with virtual time.

    python -m benchmarks.engine_http            # about a minute on two cores

Last line: one JSON object
  chunks_per_s           token chunks per second at the highest level whose step lateness p99 is under 5 ms
  lateness_p99_ms        step lateness p99 there
  ratio_to_bare_writer   chunks per CPU second, engine / bare asyncio writer, at the first level, same client
  twin_ttft_p95_diff     |real - virtual| / virtual, TTFT p95, same arrivals at 70 % of the demo's knee
  twin_attainment_diff   |real - virtual| of the joint attainment there
and behind them the figures they come from. TTFT and TPOT of the real run are the engine's own records.
"""
from __future__ import annotations

import json
import math
import select
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.commands.engine_process import EngineProcess, start_engine
from bench.config import load_config
from bench.workload.plan import build_plan
from bench.workload.prompts import PromptMaker
from bench.workload.schedule import Schedule, build_schedule
from benchmarks.drain import END, drain
from engine.request import Request
from engine.settings import EngineConfig
from engine.simulate import simulate_stages
from engine.virtual import OK, drive

DEMO = Path(__file__).parent.parent / "configs" / "demo.json"
STREAMS = 192
LEVELS = (1.0, 0.5, 0.25)  # time_scale: each level asks for twice the chunks of the one before
LATE_LIMIT_S = 0.005
TRIES = 3


def post(model: str, prompt: str, max_tokens: int, request_id: str = "") -> bytes:
    """The bytes of one pinned, streamed chat request."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens,
                       "ignore_eos": True, "stream": True}).encode()
    return (f"POST /v1/chat/completions HTTP/1.1\r\nHost: engine\r\nx-request-id: {request_id}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n").encode() + body


def fetch(engine: EngineProcess, path: str) -> bytes:
    """The body of a GET."""
    with urllib.request.urlopen(engine.base_url + path, timeout=30) as answer:
        return answer.read()


def address(engine: EngineProcess) -> tuple[str, int]:
    """Host and port."""
    host, _, port = engine.base_url.removeprefix("http://").rpartition(":")
    return host, int(port)


def write_config(folder: Path, name: str, **sections: dict[str, Any]) -> Path:
    """The demo's config with some keys changed."""
    config = json.loads(DEMO.read_text())
    for section, keys in sections.items():
        config[section] = {**config.get(section, {}), **keys}
    config.pop("$schema", None)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return path


def throughput(folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Levels of load, until one is late in each of TRIES tries (a shared machine may be busy with other things)."""
    levels = []
    for scale in LEVELS:
        path = write_config(folder, f"load-{scale}", engine={"time_scale": scale},
                            scheduler={"max_num_seqs": STREAMS, "batch_size_cap": STREAMS})
        for tried in range(TRIES):
            level = {"time_scale": scale, "tries": tried + 1, **load(path, seconds)}
            if level["lateness_p99_ms"] <= LATE_LIMIT_S * 1e3:
                break
        levels.append(level)
        if level["lateness_p99_ms"] > LATE_LIMIT_S * 1e3:
            break
    return levels


def load(path: Path, seconds: float) -> dict[str, Any]:
    """One engine with STREAMS streams open all the time."""
    with start_engine(path) as engine:
        host, port = address(engine)
        request = post("embedded", "a b c d e f g h", 400)
        drain(host, port, request, STREAMS, 0.7)  # warm-up
        before = json.loads(fetch(engine, "/debug/state?reset=1"))
        got = drain(host, port, request, STREAMS, seconds)
        after = json.loads(fetch(engine, "/debug/state"))
    cpu_s = after["cpu_s"] - before["cpu_s"]
    return {
        "chunks_per_s": got.chunks / got.seconds, "engine_core_share": cpu_s / got.seconds,
        "chunks_per_cpu_s": got.chunks / cpu_s, "client_core_share": got.cpu_s / got.seconds,
        "lateness_p50_ms": after["lateness_p50_s"] * 1e3, "lateness_p99_ms": after["lateness_p99_s"] * 1e3,
        "step_mean_ms": after["step_mean_s"] * 1e3, "decision_mean_ms": after["decision_mean_s"] * 1e3}


def bare_writer(period_s: float, seconds: float) -> float:
    """Frames per CPU second of the bare writer at the same period, streams and frame size."""
    frame_bytes = 205  # of one token chunk of the model "embedded"
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.bare_writer", repr(period_s), str(frame_bytes)],
                               stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[1])
        drain("127.0.0.1", port, b"go", STREAMS, seconds, b"x")
        process.terminate()
        figures = json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
    return figures["frames"] / figures["cpu_s"]


def replay(engine: EngineProcess, model: str, schedule: Schedule, until_s: float) -> float:
    """Send a schedule open loop and read everything away; returns the largest lag of our own sends, in seconds."""
    prompts = PromptMaker()
    requests = [post(model, prompts.text(seed, tokens), limit, f"twin-{i}") for i, (seed, tokens, limit) in enumerate(
        zip(schedule.prompt_seed.tolist(), schedule.input_tokens.tolist(), schedule.max_tokens.tolist(), strict=True))]
    due, host_port = schedule.intended_s.tolist(), address(engine)
    poller, open_sockets, worst_s, sent = select.epoll(), {}, 0.0, 0
    start_s = time.monotonic() + 0.1
    while (sent < len(due) or open_sockets) and time.monotonic() - start_s < until_s:
        now_s = time.monotonic() - start_s
        while sent < len(due) and due[sent] <= now_s:
            connection = socket.create_connection(host_port)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(requests[sent])
            worst_s = max(worst_s, time.monotonic() - start_s - due[sent])
            open_sockets[connection.fileno()] = connection
            poller.register(connection, select.EPOLLIN)
            sent += 1
        wait_s = due[sent] - (time.monotonic() - start_s) if sent < len(due) else 0.1
        if wait_s > 0.002:
            events = poller.poll(wait_s - 0.001)
        else:  # epoll counts whole milliseconds; the last two are waited for exactly
            time.sleep(max(0.0, wait_s))
            events = poller.poll(0)
        for descriptor, _ in events:
            data = open_sockets[descriptor].recv(262_144)
            if not data or data.endswith(END):
                poller.unregister(descriptor)
                open_sockets.pop(descriptor).close()
    poller.close()
    return worst_s


def percentile(values: np.ndarray, share: float) -> float:
    """Nearest rank."""
    return float(np.sort(values)[math.ceil(share * len(values)) - 1])


def figures(ttft_s: np.ndarray, tpot_s: np.ndarray, slo: Any) -> dict[str, float]:
    """Percentiles and joint attainment of arrivals that were all served (NaN TPOT: one token)."""
    good = (ttft_s <= slo.ttft_deadline_ms / 1e3) & ~(tpot_s > slo.tpot_deadline_ms / 1e3)
    spread = tpot_s[~np.isnan(tpot_s)]
    return {"ttft_p50_ms": percentile(ttft_s, 0.5) * 1e3, "ttft_p95_ms": percentile(ttft_s, 0.95) * 1e3,
            "tpot_p50_ms": percentile(spread, 0.5) * 1e3, "tpot_p95_ms": percentile(spread, 0.95) * 1e3,
            "attainment": float(good.mean())}


def knee_qps(config: Any) -> float:
    """The last rate of the demo's sweep that holds the attainment target in virtual time (60 s a stage)."""
    knee = config.sweep.qps[0]
    plan = build_plan(config, "sweep", duration_s=60.0)
    for result in simulate_stages(plan, config):
        rows = [row for row in result.rows() if row.phase == "window"]
        met = [row.status == "ok" and row.ttft_s <= config.slo.ttft_deadline_ms / 1e3
               and (row.tpot_s or 0.0) <= config.slo.tpot_deadline_ms / 1e3 for row in rows]
        if sum(met) < config.slo.attainment_target * len(met):
            break
        knee = result.stage.offered_qps
    return knee


def twin(seconds: float) -> dict[str, Any]:
    """The same arrivals in real and in virtual time."""
    config = load_config(DEMO, env={}).config
    settings = EngineConfig.from_config(config)
    rate = 0.7 * knee_qps(config)
    plan = build_plan(config, "single", qps=[rate], duration_s=seconds)
    schedule = build_schedule(plan, plan.stages[0])
    arrivals, inputs, limits = (schedule.intended_s.tolist(), schedule.input_tokens.tolist(),
                                schedule.max_tokens.tolist())
    out = drive(settings, arrivals, lambda i: Request(str(i), arrivals[i], inputs[i], limits[i], limits[i], index=i),
                seed=settings.seed)
    if any(kind != OK for kind in out.kind):
        raise RuntimeError("the virtual run refused or timed out a request at 70 % of its own knee")
    tokens = np.array(limits, dtype=float)
    gaps = np.where(tokens > 1, tokens - 1, np.nan)
    first, last = np.array(out.first_s), np.array(out.last_s)
    virtual = figures(first - np.array(arrivals), (last - first) / gaps, config.slo)
    with start_engine(DEMO) as engine:
        lag_s = replay(engine, config.model or "embedded", schedule, seconds + 60)
        records = {row["request_id"]: row for row in map(json.loads, fetch(engine, "/debug/requests").splitlines())}
        state = json.loads(fetch(engine, "/debug/state"))
    rows = [records[f"twin-{i}"] for i in range(len(arrivals))]
    wrong = [row for row, limit in zip(rows, limits, strict=True)
             if row["outcome"] != "ok" or row["output_tokens"] != limit]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(rows)} answers are not whole, the first: {wrong[0]}")
    first = np.array([row["first_token_s"] for row in rows])
    last = np.array([row["last_token_s"] for row in rows])
    real = figures(first - np.array([row["received_s"] for row in rows]), (last - first) / gaps, config.slo)
    return {"qps": rate, "requests": len(rows), "real": real, "virtual": virtual, "send_lag_max_ms": lag_s * 1e3,
            "lateness_p99_ms": state["lateness_p99_s"] * 1e3, "valid": state["valid"]}


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--seconds", default=5.0, show_default=True, help="Length of each throughput level.")
@click.option("--twin-seconds", default=30.0, show_default=True, help="Length of the comparison with virtual time.")
def main(seconds: float, twin_seconds: float) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        levels = throughput(Path(folder), seconds)
    passed = [level for level in levels if level["lateness_p99_ms"] <= LATE_LIMIT_S * 1e3] or levels[:1]
    bare = bare_writer(levels[0]["step_mean_ms"] / 1e3, seconds)
    for tried in range(TRIES):  # an engine that was late says so, and is no twin
        pair = {"tries": tried + 1, **twin(twin_seconds)}
        if pair["valid"]:
            break
    real, virtual = pair["real"], pair["virtual"]
    print(json.dumps({
        "chunks_per_s": round(passed[-1]["chunks_per_s"]), "lateness_p99_ms": round(passed[-1]["lateness_p99_ms"], 3),
        "ratio_to_bare_writer": round(levels[0]["chunks_per_cpu_s"] / bare, 3),
        "twin_ttft_p95_diff": round(abs(real["ttft_p95_ms"] / virtual["ttft_p95_ms"] - 1), 4),
        "twin_attainment_diff": round(abs(real["attainment"] - virtual["attainment"]), 4),
        "levels": levels, "bare_chunks_per_cpu_s": round(bare), "twin": pair}))


if __name__ == "__main__":
    main()
