"""The user's own prompts on the wire: what the service got is what stands in the file, whichever worker sent it."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from tests.client import fake_server as fake

from .conftest import clean_environment, config_with, end, own_port, start_locust

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": f"Grüße {i} ☃"}], "max_tokens": 3}
    for i in range(12)
] + [
    {"messages": [{"role": "user", "content": [{"type": "text", "text": f"part {i}"}]}], "tenant": "acme"}
    for i in range(6)
] + [{"prompt": f"alone {i}", "max_tokens": 4, "extra_body": {"seed": i}, "tenant": "zeta"} for i in range(6)]  # fmt: skip
WORDS = ("Grüße", "☃", "alone 0", "alone 1", "Be short")  # never in a ledger, a log or a report


def write(path: Path) -> list[str]:
    """The file's lines; each second one as Python escapes it, with blanks of its own."""
    lines = [json.dumps(row, ensure_ascii=i % 2 == 0, separators=(", ", ":  ")) for i, row in enumerate(ROWS)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return lines


def service(peer: Any) -> None:
    if peer.head.startswith(b"GET"):
        raw = b'{"data": [{"id": "demo-7b"}]}'
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(raw), raw))
    elif not json.loads(peer.body)["stream"]:
        choice = {"index": 0, "message": {"role": "assistant", "content": "a b"}, "finish_reason": "length"}
        raw = json.dumps({"id": "c", "choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 8}}).encode()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(raw), raw))
    else:
        peer.send(fake.whole(json.loads(peer.body)["max_tokens"]))


def test_two_workers_send_the_lines_of_the_plan_byte_for_byte(run_bench: Any, tmp_path: Path) -> None:
    lines = write(tmp_path / "p.jsonl")
    with fake.FakeServer(service) as server:
        config = {
            "model": "demo-7b", "base_url": server.url,
            "loadgen": {"prompts_file": "p.jsonl", "target_qps": 20, "output_len_dist": "fixed", "output_len_fixed": 5},
            "sweep": {"qps": [20], "stage_duration_sec": 2, "warmup_sec": 0.2, "drain_limit_sec": 10, "processes": 2},
        }  # fmt: skip
        ran = run_bench(config=config)
        sent = {}
        for head, body in server.requests:
            fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:])
            sent[fields.get(b"x-request-id", b"").decode()] = body
    rows = ran.rows()
    assert len(rows) > 24 and {row["status"] for row in rows} == {"ok"}, ran.err[-2000:]
    assert {row["worker"] for row in rows} == {"0", "1"} and ran.run()["problems"] == []
    # without replacement: the first 24 arrivals are the 24 lines, the others begin again in the same order
    order = [int(row["prompt_line"]) for row in sorted(rows, key=lambda r: int(r["arrival"]))]
    assert sorted(order[:24]) == list(range(1, 25)) and order[24:] == order[: len(order) - 24]
    for row in rows:
        number = int(row["prompt_line"])
        asked, body = ROWS[number - 1], sent[row["request_id"]]
        key = "messages" if "messages" in asked else "prompt"
        # second path: cut the value out of the line by its own text
        start = lines[number - 1].index('[{"role"' if key == "messages" else '"alone')
        value = lines[number - 1][start : lines[number - 1].index("]," if key == "messages" else '", ', start) + 1]
        expected = value if key == "messages" else '[{"role":"user","content":' + value + "}]"
        assert f'"messages":{expected},"max_tokens":'.encode() in body
        limit = asked.get("max_tokens", 5)
        assert json.loads(body)["max_tokens"] == limit == int(row["max_tokens"]) == int(row["output_tokens"])
        assert json.loads(body).get("seed") == asked.get("extra_body", {}).get("seed")
        assert row["tenant"] == asked.get("tenant", "")
    assert f"{len(rows)} arrivals, 24 lines" in ran.out + ran.err
    found = json.loads((ran.run_dir / "analysis.json").read_text(encoding="utf-8"))
    assert "WARN-PROMPTS" in {r["reason_id"] for r in found["verdict"]["reasons"]}
    for path in ran.run_dir.rglob("*"):
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not [word for word in WORDS if word in text], path


def test_a_worker_whose_file_differs_sends_nothing_and_says_why(engine: Any, tmp_path: Path) -> None:
    """Two workers, one with another file: its arrivals are not sent with other prompts, and the run is INVALID."""
    write(tmp_path / "p.jsonl")
    theirs = tmp_path / "theirs.jsonl"
    theirs.write_bytes((tmp_path / "p.jsonl").read_bytes().replace(b"alone 1", b"alone 9"))
    config = config_with(loadgen={"prompts_file": str(tmp_path / "p.jsonl"), "input_len_range": [100, 2000]},
                         sweep={"qps": [20], "stage_duration_sec": 2})  # fmt: skip
    (tmp_path / "c.json").write_text(json.dumps(config), encoding="utf-8")
    ports, url = own_port(), engine.base_url
    workers = [
        start_locust(tmp_path / f"worker-{i}.txt", clean_environment(BENCH_TARGET_URL=url, **more), "--worker", *ports)
        for i, more in enumerate(({}, {"BENCH_PROMPTS_FILE": str(theirs)}))
    ]
    master = start_locust(
        tmp_path / "master.txt", clean_environment(BENCH_TARGET_URL=url), "--headless", "--master", "--expect-workers", "2",
        "--bench-config", str(tmp_path / "c.json"), "--run-dir", str(tmp_path / "run"), *ports,
    )  # fmt: skip
    try:
        master.wait(60)
    finally:
        for process in (master, *workers):
            end(process)
    run = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    (problem,) = [text for text in run["problems"] if "SHA-256" in text]
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (theirs, tmp_path / "p.jsonl")]
    assert f"{theirs}: has SHA-256 {hashes[0]} (unpacked), the plan's prompts have {hashes[1]}" in problem
    assert "worker " in problem and "stage 0 stripe " in problem
    with (tmp_path / "run" / "stages.csv").open(encoding="utf-8", newline="") as handle:
        (stage,) = csv.DictReader(handle)
    assert "not_prepared" in stage["marks"].split(";")  # INV-PLAN.not_prepared
    with (tmp_path / "run" / "requests.csv").open(encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    refused = problem.split("stripe ")[1].split(":")[0]
    assert len(rows) == int(stage["planned"]) > 20
    assert not [row for row in rows if row["worker"] == refused and row["status"] == "ok"]
    assert {row["status"] for row in rows if row["worker"] != refused} == {"ok"}


class Meddler:
    """A service that does something to the file of prompts when it has got so many of them."""

    def __init__(self, after: int, meddle: Any) -> None:
        self.left, self.meddle = after, meddle

    def __call__(self, peer: Any) -> None:
        asked = json.loads(peer.body) if peer.body else {}
        if asked.get("stream") and self.left:
            self.left -= 1
            if not self.left:
                self.meddle()
        service(peer)


def meddled(run_bench: Any, tmp_path: Path, meddle: Any) -> tuple[Any, list[list[dict[str, Any]]]]:
    """A run of two stages whose file is meddled with in the first one; the reasons of each stage."""
    write(tmp_path / "p.jsonl")
    config: dict[str, Any] = {
        "model": "demo-7b",
        "loadgen": {"prompts_file": "p.jsonl", "target_qps": 20, "output_len_dist": "fixed", "output_len_fixed": 5},
        "sweep": {"qps": [20, 21], "stage_duration_sec": 3, "warmup_sec": 0.2, "drain_limit_sec": 10},
    }
    with fake.FakeServer(Meddler(25, meddle)) as server:
        ran = run_bench(config={**config, "base_url": server.url})
    found = json.loads((ran.run_dir / "analysis.json").read_text(encoding="utf-8"))
    assert len(found["stages"]) == 2, ran.err[-2000:]
    return ran, [[r for r in s["reasons"] if r["severity"] == "invalid"] for s in found["stages"]]


def test_a_file_that_is_written_into_makes_its_stage_invalid(run_bench: Any, tmp_path: Path) -> None:
    def swap() -> None:
        raw = (tmp_path / "p.jsonl").read_bytes()
        with (tmp_path / "p.jsonl").open("r+b") as handle:
            handle.write(raw.replace(b"alone", b"other"))

    ran, (first, second) = meddled(run_bench, tmp_path, swap)
    assert first[0]["code"] == "INV-PROMPTS.prompts_changed" and "(p.jsonl) was written to" in first[0]["text"]
    assert second[0]["code"] == "INV-PROMPTS.prompts_differ" and "(p.jsonl) is not the one" in second[0]["text"]
    assert not {r["reason_id"] for r in second} & {"INV-RATE", "INV-PLAN"}
    assert "INVALID" in ran.out and "use more workers" not in ran.out
    problems = ran.run()["problems"]
    assert [text for text in problems if "stage 0 stripe 0: worker " in text and "p.jsonl: was written to" in text]
    assert [text for text in problems if "stage 1 stripe 0: " in text and "has SHA-256" in text]


def test_a_file_that_is_cut_is_named_and_no_miss_of_the_service(run_bench: Any, tmp_path: Path) -> None:
    ran, (first, second) = meddled(run_bench, tmp_path, lambda: os.truncate(tmp_path / "p.jsonl", 10))
    codes = {row["code"]: row["status"] for row in ran.rows() if row["stage"] == "0" and row["code"]}
    assert codes == {"CL-BUG": "unsent"}
    assert [r["code"] for r in first][0] == "INV-PROMPTS.prompts_changed" and "INV-FAULT" not in {r["code"] for r in first}
    assert second[0]["code"] == "INV-PROMPTS.prompts_differ"
    assert "FAIL" not in ran.out and "INVALID" in ran.out


def test_another_file_moved_to_the_path_changes_nothing(run_bench: Any, tmp_path: Path) -> None:
    def move() -> None:
        (tmp_path / "new.jsonl").write_text("{}", encoding="utf-8")
        os.replace(tmp_path / "new.jsonl", tmp_path / "p.jsonl")

    ran, stages = meddled(run_bench, tmp_path, move)
    assert not [r for reasons in stages for r in reasons if r["reason_id"].startswith(("INV-PROMPTS", "INV-FAULT"))]
    assert {row["status"] for row in ran.rows()} == {"ok"} and {row["stage"] for row in ran.rows()} == {"0", "1"}


def test_a_closed_loop_has_rows_for_what_it_could_not_send(run_bench: Any, tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl")
    config: dict[str, Any] = {"model": "demo-7b", "loadgen": {"prompts_file": "p.jsonl", "duration_sec": 3}}
    with fake.FakeServer(Meddler(10, lambda: os.truncate(tmp_path / "p.jsonl", 10))) as server:
        ran = run_bench("--users", "2", config={**config, "base_url": server.url})
    codes = {row["status"] for row in ran.rows() if row["code"] == "CL-BUG"}
    assert codes == {"unsent"}, ran.err[-2000:]
    found = json.loads((ran.run_dir / "analysis.json").read_text(encoding="utf-8"))
    assert found["verdict"]["status"] == "INVALID"
    assert "INV-PROMPTS.prompts_changed" in {r["code"] for r in found["stages"][0]["reasons"]}


def test_a_refusal_that_shows_the_prompt_is_withheld(run_bench: Any, tmp_path: Path) -> None:
    """As a validator that answers with the input it did not like; the status and the code stay."""
    write(tmp_path / "p.jsonl")

    def picky(peer: Any) -> None:
        asked = json.loads(peer.body) if peer.body else {}
        if not asked.get("stream") or "seed" not in asked and "Grüße" not in str(asked.get("messages")):
            return service(peer)
        shown = asked["messages"][-1]["content"] if "seed" in asked else "the weather is not good"
        raw = json.dumps({"error": {"message": f"not valid: {shown}", "type": "invalid_request_error"}}).encode()
        peer.send(b"HTTP/1.1 400 Bad\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(raw), raw))

    with fake.FakeServer(picky) as server:
        load = {"prompts_file": "p.jsonl", "target_qps": 20, "output_len_dist": "fixed", "output_len_fixed": 5}
        sweep = {"qps": [20], "stage_duration_sec": 2, "warmup_sec": 0.2, "drain_limit_sec": 10}
        ran = run_bench(config={"model": "demo-7b", "base_url": server.url, "loadgen": load, "sweep": sweep})
    said = {(row["detail"], row["http_status"]) for row in ran.rows() if row["status"] == "error"}
    withheld = "withheld: the service's message holds a part of the prompt"
    assert (withheld, "400") in said, ran.err[-2000:]
    assert {detail for detail, _ in said} - {withheld} and "the weather" in "".join(detail for detail, _ in said)
    for path in ran.run_dir.rglob("*"):
        if path.is_file():
            assert "alone " not in path.read_text(encoding="utf-8", errors="replace"), path


def test_a_closed_loop_takes_the_lines_too(run_bench: Any, tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl")
    config = config_with(loadgen={"prompts_file": "p.jsonl", "duration_sec": 2, "input_len_range": [100, 2000]})
    ran = run_bench("--users", "4", config=config)
    rows = ran.rows()
    assert len(rows) > 10 and {row["status"] for row in rows} == {"ok"}, ran.err[-2000:]
    assert {int(row["prompt_line"]) for row in rows} <= set(range(1, 25))
    # the engine counts what it was told
    assert all(row["prompt_tokens"] == row["input_tokens"] for row in rows)
