"""`bench explain` for a run of a service outside: what its ledger tells, counted by hand from five rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.commands.explain import command as explain
from bench.records.ledger import write_requests
from bench.records.request import RequestRow
from bench.records.server import SERVER_COLUMNS

CONFIG = {
    "engine": {"embedded": False},
    "slo": {"ttft_deadline_ms": 800, "tpot_deadline_ms": 50},
    "classes": [{"name": "bulk", "share": 1.0, "ttft_deadline_ms": 2000}],
}


def arrival(number: int, intended_s: float, lag_s: float, ttft_s: float, tokens: int, tpot_s: float | None, **more: Any) -> RequestRow:
    first_s = intended_s + ttft_s
    last_s = first_s + (tpot_s or 0.0) * (tokens - 1)
    return replace(RequestRow(
        stage=0, arrival=number, worker=0, repeat=0, offered_qps=2, phase="window", tenant="", request_class="",
        request_id=f"r-{number}", status="ok", intended_s=intended_s, sent_s=intended_s + lag_s, headers_s=first_s - 0.01,
        first_token_s=first_s, first_content_s=first_s, last_token_s=last_s, done_s=last_s, send_lag_s=lag_s,
        ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=last_s - intended_s, residence_s=last_s - intended_s - lag_s, input_tokens=100,
        max_tokens=tokens, output_tokens=tokens, chunks=tokens if tpot_s else 1, finish_reason="length", connection="reused",
    ), **more)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("service") / "run"
    folder.mkdir()
    write_requests(folder / "requests.csv", [
        arrival(0, 10.0, 0.001, 0.3, 101, 0.04),  # 10.001 to 14.3
        arrival(1, 11.0, 0.002, 0.9, 101, 0.04),  # TTFT 100 ms too long; 0 is in flight
        arrival(2, 11.5, 0.001, 0.2, 101, 0.06),  # TPOT 10 ms too long; 0 and 1 are in flight
        arrival(3, 20.0, 0.001, 0.5, 300, None),  # all in one event
        arrival(4, 20.1, 0.001, 0.5, 1, None),  # one token
        arrival(5, 30.0, 0.001, 1.5, 101, 0.04, request_class="bulk"),  # its class may take 2 s
        replace(arrival(6, 40.0, 0.001, 0.5, 1, None), status="rejected", code="CH-429", first_token_s=None, ttft_s=None,
                first_content_s=None, last_token_s=None, e2e_s=None, done_s=40.02, output_tokens=None, retry_after_s=3.0),
        replace(arrival(7, 41.0, 0.0, 0.5, 1, None), status="unsent", code="CL-CAP", detail="20000 streams are open",
                **dict.fromkeys(("sent_s", "headers_s", "first_token_s", "first_content_s", "last_token_s", "done_s",
                                 "send_lag_s", "ttft_s", "e2e_s", "residence_s", "output_tokens"))),
    ])  # fmt: skip
    (folder / "run.json").write_text(json.dumps({"run_id": "run", "config": CONFIG}), encoding="utf-8")
    cells = {"t_s": 12.0, "stage": 0, "system": "vllm", "running": 2, "waiting": 7, "kv_usage": 0.93}
    lines = [",".join(SERVER_COLUMNS), ",".join(str(cells.get(name, "")) for name in SERVER_COLUMNS)]
    (folder / "server_metrics.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def told(run: Path, name: str) -> tuple[str, dict[str, Any]]:
    said = CliRunner().invoke(explain, [str(run), name])
    assert said.exit_code == 0, said.output
    return said.output, json.loads(CliRunner().invoke(explain, [str(run), name, "--json"]).output)


@pytest.mark.parametrize(
    ("name", "slo", "words"),
    [
        ("r-0", "met", ["TTFT met: 300.0 ms <= 800 ms, 500.0 ms to spare, 62.5% of the limit"]),
        ("0-1", "missed", ["TTFT missed: 900.0 ms > 800 ms, 100.0 ms too long, 12.5% of the limit", "TPOT met: 40.0 ms <= 50 ms"]),
        ("0:2", "missed", ["TTFT met: 200.0 ms", "TPOT missed: 60.0 ms > 50 ms, 10.0 ms too long, 20.0% of the limit"]),
        ("0-3", "missed", ["TPOT missed: it was not measured (limit 50 ms)"]),
        ("0-4", "met", ["TPOT met: the answer is too short to have one"]),
        ("0-5", "met", ["TTFT met: 1500.0 ms <= 2000 ms"]),
        ("0-6", "missed", ["TTFT missed: the arrival ended as rejected", "outcome: rejected CH-429", "Retry-After 3 s"]),
        ("0-7", "missed", ["never sent", "20000 streams are open", "TTFT missed: the arrival ended as unsent"]),
    ],
)
def test_each_clause_is_said_with_its_distance(run: Path, name: str, slo: str, words: list[str]) -> None:
    text, found = told(run, name)
    assert f"SLO {slo}: " in text and all(word in text for word in words), text
    assert all(clause["met"] for clause in found["clauses"]) == (slo == "met")
    assert "simulate" not in text and "known of the embedded engine alone" in text


def test_the_times_of_a_request_are_those_of_its_row(run: Path) -> None:
    text, found = told(run, "0-2")
    lines = [line.split() for line in text.splitlines() if " ms  " in line]
    assert [" ".join(line[2:4]) for line in lines] == [
        "due planned", "sent 1.0", "headers the", "first token", "last token", "end [client]"]
    assert [float(line[0]) for line in lines] == [0.0, 1.0, 190.0, 200.0, 6200.0, 6200.0]
    assert "199.0 ms after it was sent: the service's share of the TTFT" in text and "reused connection" in text
    assert found["around"]["in_flight"] == 2
    assert "in flight when it was sent: 2 other requests of this run" in text
    assert "the service's own page 0.5 s after it was sent: 2 running, 7 waiting, 93% of the KV memory in use" in text
    # TTFT of the eight: 200 300 500 500 900 1500 ms and two that never came; the fourth is the middle
    assert "TTFT of the 8 arrivals of its stage (window) is 500.0 ms in the middle; 0 of 8 were faster" in text
    assert told(run, "0-1")[1]["around"]["peers_faster"] == 4 and "service" not in told(run, "0-5")[1]["around"]


def test_a_ledger_that_is_broken_elsewhere_still_tells_the_row(run: Path, tmp_path: Path) -> None:
    (tmp_path / "requests.csv").write_text("stage,arrival,request_id,intended_s,status\n0,1,r-1,11.0,unsent\n")
    text = CliRunner().invoke(explain, [str(tmp_path), "0-1"]).output
    assert "never sent" in text and "outcome: unsent" in text
    (tmp_path / "requests.csv").write_text("stage,arrival,request_id,status\n0,1,r-1,ok\n")
    said = CliRunner().invoke(explain, [str(tmp_path), "0-1"])
    assert said.exit_code == 2 and "has no intended_s" in said.output
