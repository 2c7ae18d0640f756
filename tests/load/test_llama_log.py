"""The comparison with llama.cpp's log: what is read from its lines, and which row belongs to which task."""

from __future__ import annotations

import pytest

from benchmarks.llama_cpp import compare, read_log


def lines(task: int, at_s: float, prompt_ms: float, prompt: int, decode_ms: float, output: int) -> list[str]:
    """What llama-server writes of one task that is launched at `at_s`; minutes.seconds.millis.micros."""

    def stamp(t: float) -> str:
        micros = round(t * 1e6)
        whole, part = divmod(micros, 1_000_000)
        return f"{whole // 60}.{whole % 60:02d}.{part // 1000:03d}.{part % 1000:03d}"

    end = at_s + (prompt_ms + decode_ms) / 1e3
    head = f"id  {task % 8} | task {task} |"
    return [
        f"{stamp(at_s)} I slot launch_slot_: {head} processing task, is_child = 0",
        f"{stamp(end)} I slot print_timing: {head} prompt eval time = {prompt_ms:10.2f} ms / {prompt:5d} tokens (x)",
        f"{stamp(end)} I slot print_timing: {head}        eval time = {decode_ms:10.2f} ms / {output:5d} tokens (x)",
        f"{stamp(end)} I slot print_timing: {head}       total time = {decode_ms:10.2f} ms / {output:5d} tokens",
        f"{stamp(end)} I slot      release: {head} stop processing: n_tokens = 61, truncated = 0",
    ]


def row(sent_s: float, wait_s: float, prompt_ms: float, prompt: int, decode_ms: float, output: int) -> dict[str, str]:
    """Its row: 3 prompt tokens came from a cache, the network takes 1 ms each way."""
    first = sent_s + wait_s + prompt_ms / 1e3 + 0.001
    last = first + decode_ms / 1e3
    return {"status": "ok", "stage": "0", "sent_s": str(sent_s), "first_token_s": str(first), "last_token_s": str(last),
            "done_s": str(last), "prompt_tokens": str(prompt + 3), "cached_tokens": "3", "output_tokens": str(output)}  # fmt: skip


def test_answers_are_paired_and_their_waits_found() -> None:
    """Two checks before the run; then ten answers, of which two were queued in the other order than sent."""
    text = [f"{0}.00.000.804 I srv  llama_server: initializing ..."]
    text += lines(1, 59.0, 40, 54, 16, 8) + lines(9, 59.5, 25, 45, 15, 8)
    rows = []
    for k in range(10):
        prompt, output = 20 + 7 * k, 5 + k
        text += lines(20 + {3: 4, 4: 3}.get(k, k), 100.010 + k, 30.0, prompt, 4.0 * output, output)
        rows.append(row(k, 0.010, 30.0, prompt, 4.0 * output, output))
    rows.append({**rows[0], "status": "error"})
    tasks = read_log(text)
    assert len(tasks) == 12 and (tasks[0].launch_s, tasks[0].prompt_s, tasks[0].output_tokens) == (59.0, 0.04, 8)
    found = compare(rows, tasks)
    assert (found["answers"], found["paired"]) == (10, 10)
    assert found["decode_ours_less_server_ms"]["p100"] == 0.0 == found["decode_ours_less_server_ms"]["p0"]
    # The clocks are tied where the answers end: of the 1 ms of network, none is left there and 10 ms of wait become 11.
    assert found["wait_ms"]["p50"] == 11.0 and found["ttft_less_wait_and_prompt_ms"]["p50"] == 0.0
    # 4 ms a token, 9.5 tokens and 8.5 gaps in the mean
    stage = found["stages"][0]
    assert [stage["tpot_ours_ms"], stage["tpot_server_ms"]] == [pytest.approx(4 * 9.5 / 8.5)] * 2


def test_a_log_of_something_else_pairs_nothing() -> None:
    assert read_log(["", "GET /v1/models 200", "0.00.079.883 I cmn  init: llama threadpool init, n_threads = 1"]) == []
    assert compare([row(0.0, 0.01, 30.0, 20, 20.0, 5)], []) == {"answers": 1, "paired": 0}
