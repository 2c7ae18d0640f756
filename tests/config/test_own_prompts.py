"""`loadgen.prompts_file` in the config and in `bench validate`: what it says before a run, useless keys, exit codes."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.commands.mcp_limits import JobRefused
from bench.commands.mcp_limits import load as load_for_assistant
from bench.commands.run import command as run_command
from bench.commands.simulate import command as simulate_command
from bench.commands.validate import command
from benchmarks import prompts_sample

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def config(**loadgen: Any) -> None:
    data = {"model": "m", "base_url": "http://127.0.0.1:9",
            "loadgen": {"prompts_file": "p.jsonl", "arrival_process": "constant", "target_qps": 4, **loadgen},
            "sweep": {"qps": [4], "stage_duration_sec": 5, "warmup_sec": 1}}  # fmt: skip
    Path("c.json").write_text(json.dumps(data), encoding="utf-8")


def lines(count: int) -> None:
    Path("p.jsonl").write_text("".join(f'{{"prompt": "number {i}"}}\n' for i in range(count)), encoding="utf-8")


def validate(*arguments: str) -> Result:
    return CliRunner().invoke(command, ["c.json", *arguments])


def test_repeats_are_said_before_the_run() -> None:
    config()
    lines(8)
    found = json.loads(validate("--json").output)  # 20 arrivals, 8 lines
    (repeat,) = [p for p in found["problems"] if p["id"] == "CFG-048"]
    assert found["ok"] and repeat["severity"] == "warning"
    assert repeat["found"].startswith("prompts repeat: 20 arrivals, 8 lines: 12 arrivals (60%) send a prompt that went")
    assert found["prompts"] == {
        "path": "p.jsonl", "sha256": hashlib.sha256(Path("p.jsonl").read_bytes()).hexdigest(), "order": "shuffled",
        "lines": 8, "different": 8, "estimated_input": 8, "own_max_tokens": 0, "repeated_arrivals": 12,
    }  # fmt: skip
    text = validate().output
    assert "prompts: p.jsonl, 8 lines, shuffled, SHA-256" in text and "estimated for 8 lines as UTF-8 bytes / 4" in text


def test_enough_lines_say_nothing() -> None:
    config()
    lines(20)
    found = json.loads(validate("--json").output)
    assert found["prompts"]["repeated_arrivals"] == 0 and "CFG-048" not in {p["id"] for p in found["problems"]}
    config(prompts_file=None)
    assert "prompts" not in json.loads(validate("--json").output)


@pytest.mark.parametrize(
    ("loadgen", "key"),
    [
        ({"input_len_range": [5, 9]}, "input_len_range"),
        ({"unique_prompts": False}, "unique_prompts"),
        ({"prompts_file": None, "prompts_order": "file"}, "prompts_order"),
        ({"prompts_order": "file"}, None),
    ],
)
def test_keys_without_effect_are_named(loadgen: dict[str, Any], key: str | None) -> None:
    config(**loadgen)
    lines(20)
    found = json.loads(validate("--json").output)
    said = [p["where"].partition(": ")[2] for p in found["problems"] if p["id"] == "CFG-032"]
    assert found["ok"] and said == ([f"loadgen.{key}"] if key else [])


def test_limits_that_the_config_cuts_are_said_before_the_run() -> None:
    """Lines 2 and 4 of four ask for more than 64 tokens; line 3 asks for exactly that, line 1 for nothing."""
    config(max_output_tokens=64, output_len_dist="fixed", output_len_fixed=10)
    rows = [{"prompt": "a"}, {"prompt": "b", "max_tokens": 300}, {"prompt": "c", "max_tokens": 64},
            {"prompt": "d", "output_tokens": 65}]  # fmt: skip
    Path("p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    result = validate("--json")
    found = json.loads(result.output)
    (cut,) = [p for p in found["problems"] if p["id"] == "CFG-049"]
    assert result.exit_code == 0 and cut["severity"] == "warning" and "raise loadgen.max_output_tokens to 300" in cut["fix"]
    assert cut["found"] == (
        "2 of 4 lines of p.jsonl (first line 2) ask for more output than loadgen.max_output_tokens (64), up to 300 "
        "tokens; they are sent with 64"
    )
    # 20 arrivals of a round of four: each line five times, 10 + 64 + 64 + 64
    assert found["total"]["output_tokens"] == 5 * (10 + 3 * 64)
    assert f"warning CFG-049 loadgen.prompts_file: {cut['found']}" in validate().output
    run = CliRunner().invoke(simulate_command, ["--config", "c.json", "--run-dir", "s"])
    assert f"CFG-049 {cut['found']}" in run.output
    config(max_output_tokens=300)
    assert "CFG-049" not in validate().output


def test_other_files_that_are_cut_are_said_too() -> None:
    config(prompts_file=None, output_len_dist="empirical", output_len_file="l.txt", max_output_tokens=64)
    Path("l.txt").write_text("10\n64\n65\n65\n900\n", encoding="utf-8")
    assert "3 of 5 lengths of l.txt ask for more output than loadgen.max_output_tokens (64), up to 900" in validate().output
    trace = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2023-11-16 18:15:4{i}.0,5,{tokens}\n" for i, tokens in enumerate((10, 500, 70, 64))
    )
    Path("t.csv").write_text(trace, encoding="utf-8")
    config(prompts_file=None, trace_file="t.csv", arrival_process="poisson", max_output_tokens=64)
    assert "CFG-049" not in validate().output  # not read
    text = validate("--shape", "replay").output
    assert "2 of 4 rows of t.csv ask for more output than loadgen.max_output_tokens (64), up to 500" in text


def test_bad_lines_are_all_named_and_nothing_starts() -> None:
    config()
    Path("p.jsonl").write_text('{"prompt": "a"}\n{"promt": "secret"}\n{"prompt": "b", "max_tokens": 0}\n')
    found = validate("--json")
    problems = [p for p in json.loads(found.output)["problems"] if p["severity"] == "error"]
    assert found.exit_code == 2 and [p["id"] for p in problems] == ["CFG-040", "CFG-040"]
    assert 'p.jsonl:2: has the key "promt" (prompt?)' in problems[0]["found"]
    assert "p.jsonl:3: max_tokens is 0" in problems[1]["found"]
    run = CliRunner().invoke(run_command, ["-c", "c.json", "--run-dir", "r"])
    assert run.exit_code == 2 and "secret" not in run.output and not Path("r").exists()
    assert "CFG-040 p.jsonl:2: " in run.output and "CFG-040 p.jsonl:3: " in run.output


@pytest.mark.parametrize("value", [99999999999999999999, 10**400, -(10**20)])
def test_a_number_that_no_body_holds_is_named_in_config_and_file(value: int) -> None:
    config()
    lines(20)
    data = json.loads(Path("c.json").read_text())
    data["target"] = {"extra_body": {"a": [{"seed": value}]}}
    Path("c.json").write_text(json.dumps(data))
    (wrong,) = [p for p in json.loads(validate("--json").output)["problems"] if p["severity"] == "error"]
    assert wrong["id"] == "CFG-005" and "target.extra_body.a[0].seed" in wrong["where"] and "64 bits" in wrong["found"]
    config()
    Path("p.jsonl").write_text(json.dumps({"prompt": "a", "extra_body": {"seed": value}}) + "\n")
    (wrong,) = [p for p in json.loads(validate("--json").output)["problems"] if p["severity"] == "error"]
    assert wrong["id"] == "CFG-040" and "p.jsonl:1: extra_body.seed is a whole number of more" in wrong["found"]


def test_the_api_key_as_a_label_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    config()
    monkeypatch.setenv("BENCH_API_KEY", "sk-test-0123456789abcdef")
    Path("p.jsonl").write_text('{"prompt": "a", "tenant": "sk-test-0123456789abcdef"}\n')
    found = validate("--json")
    assert [p["id"] for p in json.loads(found.output)["problems"] if p["severity"] == "error"] == ["CFG-010"]
    run = CliRunner().invoke(run_command, ["-c", "c.json", "--run-dir", "r"])
    assert run.exit_code == 2 and "CFG-010 p.jsonl:1: " in run.output and "0123456789" not in found.output + run.output


def test_an_assistant_names_no_file_outside_the_folder(tmp_path: Path) -> None:
    class Settings:
        home, config = tmp_path, tmp_path / "none.json"

    config(prompts_file="../other.jsonl")
    with pytest.raises(JobRefused, match=r"loadgen\.prompts_file is '\.\./other\.jsonl': only files below"):
        load_for_assistant(tmp_path / "c.json", {}, Settings)


def test_the_sample_is_what_its_generator_writes_and_its_config_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ROOT / "configs" / "prompts-sample.jsonl").read_text(encoding="utf-8") == prompts_sample.text()
    monkeypatch.chdir(ROOT)
    found = json.loads(CliRunner().invoke(command, ["configs/own_prompts.json", "--json"]).output)
    assert found["ok"] and found["prompts"]["lines"] == found["prompts"]["different"] == 50


def test_the_script_for_sharegpt_makes_lines_that_are_taken() -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    script = re.search(r"<!-- begin sharegpt -->\n```python\n(.*?)```", page, re.DOTALL)
    assert script is not None and len(script[1].strip().splitlines()) <= 12
    Path("sharegpt.py").write_text(script[1], encoding="utf-8")
    dialogs = [
        [("human", "one"), ("gpt", "12345678"), ("human", "two"), ("gpt", "你好你好"), ("human", "three")],
        [("gpt", "nobody asked")],
        [("system", "be kind"), ("human", "four"), ("bing", "left out"), ("gpt", "x")],
        [("human", "five"), ("gpt", " ")],
    ]
    text = [{"id": f"d{i}", "conversations": [{"from": f, "value": v} for f, v in d]} for i, d in enumerate(dialogs)]
    Path("share.json").write_text(json.dumps(text), encoding="utf-8")
    done = subprocess.run([sys.executable, "sharegpt.py", "share.json"], capture_output=True, check=True, timeout=60)
    # 12 bytes / 4 = 3 tokens of the last answer; 1 byte is at least one token; dialogs without question and answer go
    said = [[("user", "one"), ("assistant", "12345678"), ("user", "two")], [("system", "be kind"), ("user", "four")]]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"id": number, "messages": [{"role": r, "content": c} for r, c in turns], "max_tokens": limit}
        for number, turns, limit in (("0", said[0], 3), ("2", said[1], 1))
    ]
    config()
    Path("p.jsonl").write_bytes(done.stdout)
    assert json.loads(validate("--json").output)["prompts"]["lines"] == 2
