"""The HTTP engine against virtual time: same arrivals, same lengths, same order, times within a bound."""
from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from bench.config.schema import Config
from engine.request import Request
from engine.settings import EngineConfig
from engine.virtual import OK, drive

# Small on purpose: 8 slots and 60 arrivals in 1 s make a queue, so that order matters.
SECTIONS = {"scheduler": {"policy": "fcfs", "max_num_seqs": 8, "batch_size_cap": 8},
            "engine": {"embedded": True, "time_scale": 0.25, "noise_cv": 0.0, "max_model_len": 2048}}


# Promises of twice the memory are taken, so that memory runs out later, among running requests.
LOOSE = {"reject_on_budget_exceed": False, "kv_reserve_ratio": 1.0, "oversubscribe_factor": 2.0}


def arrivals(seed: int, n: int, seconds: float):
    """Poisson times and lengths."""
    rng = np.random.Generator(np.random.PCG64(seed))
    times = np.sort(rng.uniform(0, seconds, n))
    return times.tolist(), rng.integers(20, 600, n).tolist(), rng.integers(20, 160, n).tolist()


def send_all(client, times, prompts, outputs) -> None:
    """Send each arrival when it is due; every stream is read by a thread of its own."""
    readers = []
    start_s = time.monotonic()
    for i, (at_s, prompt, output) in enumerate(zip(times, prompts, outputs, strict=True)):
        time.sleep(max(0.0, start_s + at_s - time.monotonic()))
        wire = client.wire()
        wire.send("POST", "/v1/chat/completions", client.chat_body(prompt, output), {"x-request-id": f"t{i:03d}"})
        reader = threading.Thread(target=lambda w=wire: (w.read(), w.close()))
        reader.start()
        readers.append(reader)
    for reader in readers:
        reader.join(20)


def test_real_time_follows_virtual_time(serve):
    times, prompts, outputs = arrivals(11, 60, 1.0)
    client = serve(**SECTIONS)
    send_all(client, times, prompts, outputs)
    truth = client.truth()
    rows = [truth[f"t{i:03d}"] for i in range(60)]
    assert [row["output_tokens"] for row in rows] == outputs and {row["outcome"] for row in rows} == {"ok"}
    assert [row["prompt_tokens"] for row in rows] == prompts
    # Virtual time gets the arrivals as the engine read them: what is compared is the engine, not the sender.
    origin_s = rows[0]["received_s"]
    received = [row["received_s"] - origin_s for row in rows]
    config = EngineConfig.from_config(Config.model_validate({
        **SECTIONS, "model": "m", "admission": {"reject_on_budget_exceed": False}}))
    # A real step includes the scheduler's own CPU time, .1 to .5 ms as the machine is; time_scale does not act on it.
    decision_s = client.state()["decision_mean_s"]
    assert 0 < decision_s < 0.005
    config = config.with_(overhead_s=config.profile.overhead_s + decision_s / config.time_scale)
    out = drive(config, received, lambda i: Request(str(i), received[i], prompts[i], outputs[i], outputs[i], index=i),
                seed=config.seed)
    assert set(out.kind) == {OK}
    scheduled = [row["scheduled_s"] - origin_s for row in rows]
    assert sorted(scheduled) == scheduled  # first come, first served
    real = np.array([row["first_token_s"] - row["received_s"] for row in rows])
    virtual = np.array(out.first_s) - np.array(received)
    # Queues grow to tens of steps of 2-4 ms; the bound is that of the issue (5 ms) plus what a shared machine adds.
    assert np.median(virtual) > 0.01
    assert np.median(np.abs(real - virtual)) < 0.015, (np.median(np.abs(real - virtual)), decision_s)
    assert abs(np.percentile(real, 50) - np.percentile(virtual, 50)) < 0.02


@pytest.mark.parametrize("unique", [True, False])
def test_lengths_that_nobody_pins_are_the_same_in_both_clocks(serve, unique):
    """The engine draws by the prompt's text; virtual time draws by the text that would be sent."""
    from bench.workload.plan import build_plan
    from bench.workload.prompts import PromptMaker
    from bench.workload.schedule import build_schedule
    from engine.arms import traffic_of
    from engine.simulate import simulate

    sections = {"scheduler": {"policy": "sjf", "max_num_seqs": 2, "batch_size_cap": 2},
                "loadgen": {"unique_prompts": unique}, "target": {"ignore_eos": False},
                "engine": {"embedded": True, "time_scale": 0.125, "noise_cv": 0.0, "max_model_len": 2048, "seed": 9}}
    client = serve(**sections)
    config = Config.model_validate(json.loads(client.config_path.read_text()))
    plan = build_plan(config, "single", qps=[40.0], duration_s=1.0, seed=3)
    schedule = build_schedule(plan, plan.stages[0])
    maker = PromptMaker(plan.prompts.tokens_per_word, plan.prompts.unique)
    wires = []
    for i in range(len(schedule)):
        wire = client.wire()
        text = maker.text(int(schedule.prompt_seed[i]), int(schedule.input_tokens[i]))
        body = client.chat_body(1, int(schedule.max_tokens[i]), ignore_eos=False)
        wire.send("POST", "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]},
                  {"x-request-id": f"u{i}"})
        wires.append(wire)
    assert all(wire.read().done for wire in wires)
    truth = client.truth()
    real = [truth[f"u{i}"]["output_tokens"] for i in range(len(schedule))]
    assert real == [row.output_tokens for row in simulate(plan, config)]
    assert real == traffic_of(plan, schedule, config, (), 1, 1000).output_tokens.tolist()
    assert len(set(real)) > 5 and real != schedule.max_tokens.tolist()


def test_replicas_share_by_the_router_of_virtual_time(serve):
    client = serve(engine={"embedded": True, "time_scale": 0.125, "replicas": 3, "router": "round_robin"})
    for i in range(7):
        assert client.chat(5, 3, headers={"x-request-id": f"r{i}"}).done
    truth = client.truth()
    assert [truth[f"r{i}"]["replica"] for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    page = client.call("GET", "/metrics").body.decode()
    for replica, prompts in ((0, 15), (1, 10), (2, 10)):
        assert f'vllm:prompt_tokens_total{{model_name="test-model",engine="{replica}"}} {prompts}.0' in page
    assert len(client.state()["replicas"]) == 3


def test_least_loaded_router_avoids_the_busy_replica(serve):
    client = serve(engine={"embedded": True, "time_scale": 0.125, "replicas": 2, "router": "least_loaded"})
    wire = client.wire()
    wire.send("POST", "/v1/chat/completions", client.chat_body(5, 2000), {"x-request-id": "busy"})
    client.wait_for(lambda s: s["running"] == 1)
    for i in range(3):
        client.chat(5, 2, headers={"x-request-id": f"l{i}"})
    wire.close()
    truth = client.truth()
    assert {truth[f"l{i}"]["replica"] for i in range(3)} == {1}


def test_preempted_requests_resume_and_send_no_token_twice(serve):
    """40 usable blocks hold two of three requests to their end: one is preempted and computed again."""
    client = serve(engine={"embedded": True, "time_scale": 0.125, "num_blocks": 41, "max_model_len": 512},
                   admission=LOOSE)
    wires = [client.wire() for _ in range(3)]
    for i, wire in enumerate(wires):
        wire.send("POST", "/v1/chat/completions", client.chat_body(100, 150), {"x-request-id": f"p{i}"})
    answers = [wire.read() for wire in wires]
    assert all(a.done and len(a.texts()) == 150 for a in answers)
    truth = client.truth()
    assert sum(truth[f"p{i}"]["preemptions"] for i in range(3)) >= 1
    total = sum(row["preemptions"] for row in truth.values())
    page = client.call("GET", "/metrics").body.decode()
    assert f'vllm:num_preemptions_total{{model_name="test-model",engine="0"}} {total}.0' in page


def test_swapped_requests_come_back(serve):
    """Swapping needs the driver to wake when a copy is over and nothing else runs."""
    client = serve(scheduler={"policy": "fcfs", "max_num_seqs": 8, "batch_size_cap": 8, "preemption_mode": "swap",
                              "swap_space_gb": 4},
                   engine={"embedded": True, "time_scale": 0.125, "num_blocks": 41, "max_model_len": 512},
                   admission=LOOSE)
    wires = [client.wire() for _ in range(3)]
    for i, wire in enumerate(wires):
        wire.send("POST", "/v1/chat/completions", client.chat_body(100, 150), {"x-request-id": f"s{i}"})
    assert all(len(wire.read().texts()) == 150 for wire in wires)
    assert client.replica()["counters"]["swaps"] >= 1 and client.replica()["kv_blocks_used"] == 0


@pytest.mark.slow
def test_the_benchmark_prints_its_figures():
    done = subprocess.run([sys.executable, "-m", "benchmarks.engine_http", "--seconds", "1", "--twin-seconds", "5"],
                          capture_output=True, text=True, timeout=120)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert list(figures)[:5] == ["chunks_per_s", "lateness_p99_ms", "ratio_to_bare_writer", "twin_ttft_p95_diff",
                                 "twin_attainment_diff"]
    assert figures["chunks_per_s"] > 10_000 and 0.2 < figures["ratio_to_bare_writer"] < 1.2
    assert figures["twin_ttft_p95_diff"] < 0.5 and figures["twin_attainment_diff"] <= 0.05
