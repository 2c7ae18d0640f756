"""The user's own prompts in both clocks: lengths as told, equal leading text is a shared prefix, lost and stated else."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.commands.analyse import command as analyse
from bench.commands.compare import command as compare
from bench.commands.simulate import command
from engine.http_api import ApiError, parse_call
from engine.http_fleet import prompt_hashes
from engine.lengths import text_blocks

SYSTEM = "Answer as the harbour office does, short and with the pier first. " * 8  # 528 bytes: 33 blocks of 16 bytes
ROWS = [
    {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{i} when does it leave?"}],
     "max_tokens": 4, "input_tokens": 160 + i}
    for i in range(6)
] + [{"prompt": f"alone {i} " * 60, "max_tokens": 4} for i in range(2)]  # fmt: skip


def body(row: dict[str, Any], told: int | None) -> bytes:
    messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    extra = {} if told is None else {"input_tokens": told}
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 4, **extra}).encode()


def test_the_engine_counts_what_it_is_told() -> None:
    call = parse_call(body(ROWS[0], 160), chat=True)
    assert (call.prompt_tokens, call.told) == (160, True)
    words = parse_call(body(ROWS[0], None), chat=True)
    assert (words.prompt_tokens, words.told) == (len(SYSTEM.split()) + 5, False)
    for wrong in (0, -1, "9", True, 1.5):
        with pytest.raises(ApiError, match="input_tokens"):
            parse_call(json.dumps({**json.loads(body(ROWS[0], 1)), "input_tokens": wrong}).encode(), chat=True)


def test_blocks_are_equal_as_far_as_the_text_is() -> None:
    """By hand: blocks of 16 tokens are 64 bytes; the system prompt of 528 bytes and a newline fill 8 of them."""
    a, b = (prompt_hashes(parse_call(body(row, 160), chat=True), 16) for row in ROWS[:2])
    # 528 + 1 + 23 bytes = 552: 8 whole pieces of 64 bytes, all within the system prompt
    assert len(a) == len(b) == 8 and a == b
    # The same with blocks of 4 tokens, 16 bytes: 33 pieces of system prompt, one more begins with the newline.
    a, b = (prompt_hashes(parse_call(body(row, 160), chat=True), 4) for row in ROWS[:2])
    assert len(a) == len(b) == 34 and [x == y for x, y in zip(a, b, strict=True)] == [True] * 33 + [False]
    assert len(text_blocks("x" * 1000, 40, 16)) == 2  # no more blocks than the told length has
    assert text_blocks("x" * 64 + "y" * 64, 99, 16)[1] != text_blocks("z" * 64 + "y" * 64, 99, 16)[1]  # chained


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    config = {
        "loadgen": {"prompts_file": str(tmp_path / "p.jsonl"), "prompts_order": "file", "arrival_process": "constant",
                    "target_qps": 2, "duration_sec": 4},
        "sweep": {"qps": [2], "warmup_sec": 0}, "scheduler": {"policy": "sjf"},
        "engine": {"embedded": True, "prefix_caching": True, "noise_cv": 0.0},
    }  # fmt: skip
    (tmp_path / "c.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def simulate(folder: Path, name: str, *arguments: str) -> tuple[str, list[dict[str, str]]]:
    done = CliRunner().invoke(
        command, ["-c", str(folder / "c.json"), "--run-dir", str(folder / name), "--no-report", *arguments]
    )
    assert done.exit_code == 0, done.output
    with (folder / name / "requests.csv").open(encoding="utf-8", newline="") as handle:
        return done.output, list(csv.DictReader(handle))


def test_virtual_time_shares_the_system_prompt(folder: Path) -> None:
    _, rows = simulate(folder, "a")
    assert [r["prompt_line"] for r in rows] == [str(i + 1) for i in range(8)]
    assert [r["input_tokens"] for r in rows[:6]] == [str(160 + i) for i in range(6)]
    # "alone 0 " is 8 bytes, 60 times: 480 / 4 = 120
    assert [r["input_tokens"] for r in rows[6:]] == ["120", "120"]
    # One at a time, half a second apart: all but the first of the six find 8 blocks of 16 tokens.
    assert [r["cached_tokens"] for r in rows] == ["", *["128"] * 5, "", ""]
    assert {r["output_tokens"] for r in rows} == {"4"}


def test_real_time_finds_what_virtual_time_finds(folder: Path, serve: Any) -> None:
    """Second path: the HTTP engine counts for itself, from the texts."""
    _, rows = simulate(folder, "a")
    client = serve(engine={"embedded": True, "prefix_caching": True, "noise_cv": 0, "time_scale": 0.01})
    for row, planned in zip(ROWS, rows, strict=True):
        wire = client.wire()
        sent = {**json.loads(body(row, int(planned["input_tokens"]))), "ignore_eos": True, "model": "test-model"}
        wire.send("POST", "/v1/chat/completions", sent)
        usage = wire.read().json["usage"]
        wire.close()
        assert usage["prompt_tokens"] == int(planned["input_tokens"])
        assert (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) == int(planned["cached_tokens"] or 0)


def test_an_old_run_is_simulated_with_its_prompts_or_the_loss_is_said(folder: Path) -> None:
    _, rows = simulate(folder, "old")
    said, again = simulate(folder, "new", "--run", str(folder / "old"))
    assert [r["cached_tokens"] for r in again] == [r["cached_tokens"] for r in rows]
    assert [r["prompt_line"] for r in again] == [r["prompt_line"] for r in rows]
    assert f"prompts begin alike as in that run, by the text of {folder / 'p.jsonl'}" in said and "loss" not in said
    changed = (folder / "p.jsonl").read_bytes().replace(b"7 when", b"8 when").replace(b"short", b"terse")
    (folder / "p.jsonl").write_bytes(changed)
    said, again = simulate(folder, "other", "--run", str(folder / "old"))
    assert "their schedule hash differs" in said and Counter(r["cached_tokens"] for r in again) == {"": 8}


def test_compare_refuses_runs_with_other_prompts(folder: Path) -> None:
    simulate(folder, "old")
    (folder / "p.jsonl").write_bytes((folder / "p.jsonl").read_bytes().replace(b"7 when", b"8 when").replace(b"2 when", b"9 when"))
    simulate(folder, "new")
    for name in ("old", "new"):
        analysed = CliRunner().invoke(analyse, [str(folder / name)])
        assert analysed.exit_code in (0, 1, 4), analysed.output
    done = CliRunner().invoke(compare, [str(folder / "old"), str(folder / "new")])
    assert done.exit_code == 2 and "did not run the same test: schedule: " in done.output


def test_lengths_that_nobody_pinned_follow_from_the_text(folder: Path) -> None:
    """The same text draws the same length, whatever its line; another text another."""
    rows = [{"prompt": f"{word} " * 50, "max_tokens": 4096} for word in ("one", "two", "one", "three")]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = json.loads((folder / "c.json").read_text())
    config["target"] = {"ignore_eos": False}
    config["loadgen"]["duration_sec"] = 2
    (folder / "c.json").write_text(json.dumps(config))
    _, found = simulate(folder, "a")
    lengths = [int(r["output_tokens"]) for r in found]
    assert lengths[0] == lengths[2] and len(set(lengths)) == 3
