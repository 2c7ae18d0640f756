"""Faults that the engine plays on purpose, as a client sees them."""
from __future__ import annotations

import json
import time

import pytest

from engine.faults import Faults


@pytest.fixture(scope="module")
def engine(serve):
    return serve()


@pytest.fixture(autouse=True)
def no_faults_left(engine):
    yield
    engine.call("DELETE", "/debug/faults")


def test_status_with_retry_after_and_count(engine):
    assert engine.faults({"kind": "status", "status": 429, "retry_after_s": 7, "count": 2}).status == 200
    answers = [engine.chat() for _ in range(3)]
    assert [a.status for a in answers] == [429, 429, 200]
    assert answers[0].headers["retry-after"] == "7" and answers[0].json["error"]["message"]
    assert engine.call("GET", "/debug/faults").json["faults"][0]["fired"] == 2


def test_html_page(engine):
    engine.faults({"kind": "status", "status": 502, "html": True})
    answer = engine.chat()
    assert answer.status == 502 and answer.headers["content-type"] == "text/html" and b"<html>" in answer.body


def test_disconnect_before_any_byte(engine):
    engine.faults({"kind": "disconnect"})
    assert engine.chat().status == 0


def test_cut_ends_inside_the_stream_and_frees_the_engine(engine):
    engine.faults({"kind": "cut", "after_tokens": 3})
    answer = engine.chat(5, 200, headers={"x-request-id": "cut"})
    assert answer.status == 200 and not answer.complete and not answer.done
    assert len(answer.texts()) in (2, 3)  # the third event is torn
    engine.wait_for(lambda s: s["running"] == 0 and s["kv_blocks_used"] == 0)
    record = engine.truth()["cut"]
    assert record["outcome"] == "fault" and record["fault"] == "cut" and record["output_tokens"] == 3


def test_cut_by_reset(engine):
    engine.faults({"kind": "cut", "after_tokens": 2, "reset": True})
    assert not engine.chat(5, 200).complete


def test_malformed_event_then_the_stream_goes_on(engine):
    engine.faults({"kind": "malformed", "after_tokens": 3})
    answer = engine.chat(5, 6)
    assert answer.complete and answer.done
    broken = []
    for _, text in answer.arrivals[:-1]:
        try:
            json.loads(text)
        except ValueError:
            broken.append(text)
    assert len(broken) == 1 and len(answer.arrivals) == 1 + 6 + 1 + 1  # role, tokens, broken, [DONE]


def test_error_event_inside_a_200_answer(engine):
    engine.faults({"kind": "error_event", "after_tokens": 2})
    answer = engine.chat(5, 50)
    assert answer.status == 200 and answer.complete and not answer.done
    assert "error" in answer.events[-1] and len(answer.texts()) == 2
    engine.wait_for(lambda s: s["running"] == 0)


def test_no_done(engine):
    engine.faults({"kind": "no_done"})
    answer = engine.chat(5, 3)
    assert answer.complete and not answer.done and answer.events[-1]["choices"][0]["finish_reason"] == "length"


def test_slow_first_byte_delays_even_the_header(engine):
    engine.faults({"kind": "slow_first_byte", "delay_s": 0.15})
    for stream in (True, False):
        start_s = time.monotonic()
        answer = engine.chat(5, 3, stream=stream, headers={"x-request-id": f"slow-{stream}"})
        assert answer.complete and time.monotonic() - start_s >= 0.15
    record = engine.truth()["slow-True"]
    assert record["first_token_s"] - record["received_s"] >= 0.15  # the stamp is that of the write
    assert record["outcome"] == "ok" and record["fault"] == "slow_first_byte"


def test_stall_in_the_middle(engine):
    engine.faults({"kind": "stall", "after_tokens": 3, "duration_s": 0.15})
    answer = engine.chat(5, 10)
    assert answer.complete and answer.done and len(answer.texts()) == 10
    times = [at for at, _ in answer.texts()]
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert max(gaps) >= 0.1
    assert sum(gap >= 0.1 for gap in gaps) == 1


def test_endless_stall_ends_with_the_client(engine):
    engine.faults({"kind": "stall", "after_tokens": 2})
    wire = engine.wire()
    wire.send("POST", "/v1/chat/completions", engine.chat_body(5, 5), {"x-request-id": "stuck"})
    engine.wait_for(lambda s: s["running"] == 0)
    assert "stuck" not in engine.truth()
    wire.close()
    until_s = time.monotonic() + 5
    while "stuck" not in (truth := engine.truth()) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert truth["stuck"]["outcome"] == "aborted"


def test_metrics_still_balance_after_faults(engine):
    counters = engine.replica()["counters"]
    assert counters["submitted"] == counters["finished"] + counters["aborted"] + counters["rejected"]
    assert engine.state()["open_requests"] == 0


@pytest.mark.parametrize("rule", [
    {"kind": "explode"}, {}, {"kind": "status", "probability": 2}, {"kind": "status", "status": 200},
    {"kind": "cut", "after_tokens": -1}, {"kind": "cut", "colour": "red"}, {"kind": "stall", "duration_s": "long"},
    {"kind": "status", "count": True}, 7,
])
def test_bad_rules_are_400_and_change_nothing(engine, rule):
    engine.faults({"kind": "no_done"})
    assert engine.call("POST", "/debug/faults", {"faults": [rule]}).status == 400
    assert [f["kind"] for f in engine.call("GET", "/debug/faults").json["faults"]] == ["no_done"]


def test_probability_is_seeded():
    """2,000 draws at 0.3: the share is within 4 standard errors, sqrt(0.3 x 0.7 / 2000) = 0.0102 each."""
    def draws(seed: int) -> list[bool]:
        faults = Faults()
        faults.replace({"kind": "status", "probability": 0.3, "seed": seed})
        return [faults.draw(streamed=True) is not None for _ in range(2000)]

    assert draws(1) == draws(1) != draws(2)
    assert abs(sum(draws(1)) / 2000 - 0.3) < 0.041


def test_stream_faults_do_not_fire_for_whole_answers():
    faults = Faults()
    faults.replace([{"kind": "cut", "count": 1}, {"kind": "status"}])
    assert faults.draw(streamed=False).kind == "status"
    assert faults.draw(streamed=True).kind == "cut"
    assert faults.draw(streamed=True).kind == "status"  # the count is used up
