"""The decisions of the HTTP engine: paged, bounded, and the same as in virtual time; explain tells both."""
from __future__ import annotations

import csv
import json
import time

import pytest
from click.testing import CliRunner

from bench.commands.explain import command as explain
from bench.config.schema import Config
from engine.decision_log import DecisionLog
from engine.request import Request
from engine.settings import EngineConfig
from engine.virtual import drive

SECTIONS = {"scheduler": {"policy": "fcfs", "max_num_seqs": 4, "batch_size_cap": 4},
            "slo": {"ttft_deadline_ms": 60_000, "tpot_deadline_ms": 1000},
            "admission": {"reject_on_budget_exceed": True, "kv_reserve_ratio": 1.0, "max_num_queued_reqs": 3},
            "engine": {"embedded": True, "time_scale": 10.0, "noise_cv": 0.0, "max_model_len": 2048}}
# Steps of 80 ms: all come during the first one, so that no arrival lies near a step's end. 4 slots, 3 places to wait:
# the first runs, three wait for the next step, and the others are refused.
LOAD = [(100 + 10 * i, 2 + i % 3) for i in range(9)]


def decisions(client, query=""):
    answer = client.call("GET", "/debug/decisions" + query)
    return answer, [json.loads(line) for line in answer.body.splitlines()]


def by_request(entries):
    found: dict[str, list] = {}
    for entry in entries:
        found.setdefault(entry["request_id"], []).append(entry)
    return found


def folder_of(path, entries, name, intended_s, sent_s, truth=None):
    """As much of a run folder as explain reads."""
    path.mkdir()
    (path / "decisions.ndjson").write_text("".join(json.dumps(e) + "\n" for e in entries))
    with (path / "requests.csv").open("w", newline="") as handle:
        out = csv.DictWriter(handle, ["stage", "arrival", "request_id", "intended_s", "sent_s", "status", "input_tokens",
                                      "max_tokens"])
        out.writeheader()
        out.writerow({"stage": 0, "arrival": 2, "request_id": name, "intended_s": intended_s, "sent_s": sent_s,
                      "status": "ok", "input_tokens": 120, "max_tokens": 36})
    if truth is not None:
        (path / "engine_requests.ndjson").write_text(json.dumps(truth) + "\n")
    return path


def test_both_clocks_tell_the_same_story(serve, tmp_path):
    client = serve(**SECTIONS)
    wires = []
    for i, (prompt, output) in enumerate(LOAD):
        wire = client.wire()
        wire.send("POST", "/v1/chat/completions", client.chat_body(prompt, output), {"x-request-id": f"d{i}"})
        wires.append(wire)
        time.sleep(0.001)  # so that they are read in this order
    answers = [wire.read() for wire in wires]
    truth = client.truth()
    origin = truth["d0"]["received_s"]
    at = [truth[f"d{i}"]["received_s"] - origin for i in range(len(LOAD))]
    order = sorted(range(len(LOAD)), key=at.__getitem__)
    _, real = decisions(client)
    virtual: list[dict] = []
    config = EngineConfig.from_config(Config.model_validate(json.loads(client.config_path.read_text())))
    drive(config, sorted(at), lambda k: Request(f"d{order[k]}", at[order[k]], *LOAD[order[k]], LOAD[order[k]][1], index=k),
          seed=config.seed, journal=virtual.append)
    one, two = by_request(real), by_request(virtual)
    assert one.keys() == two.keys() == {f"d{i}" for i in range(len(LOAD))}
    refused = [i for i, answer in enumerate(answers) if answer.status == 503]
    assert refused
    for name in one:
        assert [(e["event"], e["rule"], e["replica"]) for e in one[name]] == [
            (e["event"], e["rule"], e["replica"]) for e in two[name]]
        for a, b in zip(one[name], two[name], strict=True):
            assert a.keys() == b.keys() and a["numbers"].keys() == b["numbers"].keys()
            for key in ("prompt_tokens", "promise_blocks", "committed_blocks", "running", "waiting", "limit", "output_tokens"):
                assert a["numbers"].get(key) == b["numbers"].get(key), (name, a["event"], key)
    # the numbers of a refusal are those of its answer
    last = f"d{refused[-1]}"
    assert one[last][0]["text"] in answers[refused[-1]].json["error"]["message"]

    # the run's clock: d2 was due at 100.0 s of the run and sent 5 ms later
    told = folder_of(tmp_path / "real", real, "d2", 100.0, 100.005, truth["d2"])
    said = CliRunner().invoke(explain, [str(told), "0:2"])
    lines = [line.split() for line in said.output.splitlines() if " ms  " in line]
    assert said.exit_code == 0 and [line[2] for line in lines] == ["sent", "accepted", "scheduled", "first_token", "finished"]
    assert [float(line[0]) for line in lines[:2]] == [5.0, 5.0] and "scheduler CPU" in said.output
    waited = (one["d2"][1]["at_s"] - one["d2"][0]["at_s"]) * 1e3
    assert float(lines[2][0]) == pytest.approx(5.0 + waited, abs=0.06)
    simulated = [{**e, "stage": 0, "at_s": e["at_s"] + 100.0 - at[2]} for e in virtual]
    told = folder_of(tmp_path / "virtual", simulated, "d2", 100.0, 100.0)
    lines = [line.split() for line in CliRunner().invoke(explain, [str(told), "d2"]).output.splitlines() if " ms  " in line]
    assert [line[2] for line in lines] == ["accepted", "scheduled", "first_token", "finished"] and lines[0][0] == "0.0"


def test_pages_by_cursor(serve):
    client = serve(engine={"embedded": True, "time_scale": 0.125})
    for i in range(3):
        assert client.chat(5, 2, headers={"x-request-id": f"c{i}"}).done
    answer, entries = decisions(client)
    # accepted, scheduled, first token, finished of each
    assert len(entries) == 12 and answer.headers["x-next-cursor"] == "12" and answer.headers["x-lost"] == "0"
    seen, after = [], 0
    while True:
        answer, page = decisions(client, f"?after={after}&limit=5")
        if not page:
            break
        assert len(page) <= 5
        seen += page
        after = int(answer.headers["x-next-cursor"])
    assert seen == entries and after == 12
    assert client.chat(5, 2, headers={"x-request-id": "c3"}).done
    _, later = decisions(client, f"?after={after}")
    assert {e["request_id"] for e in later} == {"c3"} and len(later) == 4
    assert {e["request_id"] for e in decisions(client, "?request_id=c1")[1]} == {"c1"}
    for query in ("?after=-1", "?limit=many", "?after=1e3"):
        assert client.call("GET", "/debug/decisions" + query).status == 400
    state = client.state()
    assert state["decisions_kept"] == state["decisions_total"] == 16


def test_memory_is_bounded_and_says_what_is_gone():
    log = DecisionLog(limit_bytes=1000)
    for i in range(100):
        log.add({"n": i, "limit": float("inf")})  # 23 or 24 bytes each
    lines, after, lost = log.page(90)
    assert [json.loads(line)["n"] for line in lines] == list(range(90, 100)) and (after, lost) == (100, 0)
    lines, after, lost = log.page(0, limit=3)
    assert lost == 100 - len(log) > 50 and json.loads(lines[0]) == {"n": lost, "limit": None} and after == lost + 3
    assert sum(map(len, log.page()[0])) <= 1000
    assert log.page(10**9) == ([], 100, 0)
