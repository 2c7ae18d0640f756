"""The engine's HTTP surface, read by a client that shares no code with it."""
from __future__ import annotations

import json
import time

import pytest

MODEL = "test-model"


@pytest.fixture(scope="module")
def engine(serve):
    return serve()


def test_small_routes(engine):
    assert engine.call("GET", "/health").status == 200
    models = engine.call("GET", "/v1/models").json
    assert [entry["id"] for entry in models["data"]] == [MODEL]
    assert models["data"][0]["max_model_len"] == 2048
    assert engine.call("GET", "/version").json["version"]


def test_chat_stream_has_the_order_of_vllm(engine):
    answer = engine.chat(7, 5, stream_options={"include_usage": True}, headers={"x-request-id": "order-1"})
    assert answer.status == 200 and answer.complete and answer.done
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"] == "order-1"
    role, *content, usage = answer.events
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["finish_reason"] for c in content] == [None, None, None, None, "length"]
    assert all(c["choices"][0]["delta"]["content"] for c in content)
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    assert {e["id"] for e in answer.events} == {"chatcmpl-order-1"}
    assert {e["model"] for e in answer.events} == {MODEL}
    # The role comes with the first token, as in vLLM, not when the request is accepted.
    assert answer.arrivals[0][0] == answer.arrivals[1][0]


def test_no_usage_unless_asked(engine):
    assert all("usage" not in event for event in engine.chat().events)


def test_one_token_answer(engine):
    answer = engine.chat(3, 1)
    assert [e["choices"][0]["finish_reason"] for e in answer.events] == [None, "length"]


def test_chat_not_streamed(engine):
    body = engine.chat(7, 6, stream=False).json
    choice = body["choices"][0]
    assert body["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    assert len(choice["message"]["content"].split()) == 6
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}


def test_text_completions(engine):
    request = {"model": MODEL, "prompt": "one two three", "max_tokens": 4, "ignore_eos": True}
    whole = engine.call("POST", "/v1/completions", request).json
    assert whole["object"] == "text_completion" and whole["usage"]["prompt_tokens"] == 3
    streamed = engine.call("POST", "/v1/completions", {**request, "stream": True})
    assert "".join(e["choices"][0]["text"] for e in streamed.events) == whole["choices"][0]["text"]
    assert streamed.done and len(streamed.events) == 4  # no role chunk in text completions
    # without max_tokens the completions endpoint makes 16 tokens at most
    assert engine.call("POST", "/v1/completions", {"model": MODEL, "prompt": "a", "ignore_eos": True}
                       ).json["usage"]["completion_tokens"] == 16
    ids = {"model": MODEL, "prompt": [5, 6, 7, 8], "max_tokens": 1}
    assert engine.call("POST", "/v1/completions", ids).json["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize(("messages", "tokens"), [
    ([{"role": "user", "content": "a b c"}], 3),
    ([{"role": "system", "content": "be brief"}, {"role": "user", "content": "a  b\n\tc "}], 5),  # 2 + 3
    ([{"role": "user", "content": [{"type": "text", "text": "a b"}, {"type": "text", "text": "c"}]}], 3),
    ([{"role": "user", "content": "日本 語"}], 2),
])
def test_prompt_tokens_are_whitespace_words(engine, messages, tokens):
    answer = engine.call("POST", "/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 1})
    assert answer.json["usage"]["prompt_tokens"] == tokens


def test_synthesised_prompts_have_the_planned_length(engine):
    prompts = pytest.importorskip("bench.workload.prompts")
    maker = prompts.PromptMaker()
    for seed, planned in ((1, 1), (2, 17), (3, 1500)):
        body = engine.chat_body(1, 1, stream=False)
        body["messages"][0]["content"] = maker.text(seed, planned)
        assert engine.call("POST", "/v1/chat/completions", body).json["usage"]["prompt_tokens"] == planned


def test_output_length_without_pinning(engine):
    def length(text: str, **more):
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 500, **more}
        answer = engine.call("POST", "/v1/chat/completions", body).json
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    first = length("the same prompt")
    assert length("the same prompt") == first and first[1] == "stop"
    assert len({length(f"prompt {i}")[0] for i in range(8)}) > 3  # lognormal(3.0, 0.4): mean about 22 tokens
    assert length("the same prompt", max_tokens=2) == (2, "length")
    assert length("the same prompt", min_tokens=200)[0] == 200
    assert length("the same prompt", ignore_eos=True, max_tokens=33) == (33, "length")


def test_stream_interval_groups_tokens(serve):
    client = serve(engine={"embedded": True, "time_scale": 0.125, "stream_interval": 4, "noise_cv": 0})
    answer = client.chat(3, 11, headers={"x-request-id": "grouped"})
    # vLLM sends the first token at once, then every fourth, then the rest: 1 + 4 + 4 + 2 = 11
    assert [len(text.split()) for _, text in answer.texts()] == [1, 4, 4, 2]
    assert client.truth()["grouped"]["output_tokens"] == 11
    assert client.truth()["grouped"]["chunks"] == 4


def test_prefix_cache_is_reported_in_usage(serve):
    client = serve(engine={"embedded": True, "time_scale": 0.125, "prefix_caching": True})
    first = client.chat(100, 2, stream=False).json["usage"]
    second = client.chat(100, 2, stream=False).json["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 96  # 6 full blocks of 16; the last 4 are computed
    page = client.call("GET", "/metrics").body.decode()
    assert 'vllm:prefix_cache_hits_total{model_name="test-model",engine="0"} 96.0' in page


@pytest.mark.parametrize(("change", "param"), [
    ({"n": 2}, "n"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": "many"}, "max_tokens"),
    ({"messages": []}, "messages"), ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "  "}]}, "messages"), ({"model": 3}, "model"),
    ({"stream": "yes"}, "stream"), ({"min_tokens": 9}, "min_tokens"), ({"logprobs": True}, "logprobs"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
])
def test_bad_bodies_are_400_with_the_parameter(engine, change, param):
    answer = engine.call("POST", "/v1/chat/completions", {**engine.chat_body(), **change})
    assert answer.status == 400, answer.body
    assert answer.json["error"]["param"] == param and answer.json["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("method", "path", "body", "status"), [
    ("POST", "/v1/chat/completions", b"{not json", 400),
    ("POST", "/v1/chat/completions", b"[1]", 400),
    ("GET", "/v1/chat/completions", None, 405),
    ("GET", "/v1/nothing", None, 404),
    ("POST", "/v1/chat/completions", {"model": "other", "messages": [{"role": "user", "content": "x"}]}, 404),
])
def test_refusals(engine, method, path, body, status):
    answer = engine.call(method, path, body)
    assert answer.status == status and answer.json["error"]["message"]


def test_too_long_is_400_and_says_the_limit(engine):
    answer = engine.chat(2000, 100, headers={"x-request-id": "long"})
    assert answer.status == 400 and "2048" in answer.json["error"]["message"]
    assert engine.truth()["long"]["reason"] == "too_long"
    # without max_tokens the answer may fill the model's length
    filled = engine.chat(2040, None, stream=False)
    assert filled.json["usage"] == {"prompt_tokens": 2040, "completion_tokens": 8, "total_tokens": 2048}
    assert engine.chat(2048, None).status == 400


def test_key_check(serve):
    client = serve(api_key="sk-secret-1")
    cases = {None: 401, "Bearer sk-secret-1": 200, "Bearer sk-secret-2": 401, "Bearer ": 401, "Basic sk-secret-1": 401,
             "Bearer sk-secret-1x": 401, "bearer sk-secret-1": 200}
    for header, status in cases.items():
        headers = {} if header is None else {"Authorization": header}
        answer = client.call("GET", "/v1/models", headers=headers)
        assert answer.status == status, header
        if status == 401:
            assert answer.json["error"]["code"] == "invalid_api_key"
            assert b"sk-secret" not in answer.body
    assert client.chat().status == 401
    assert client.call("GET", "/health").status == 200  # vLLM guards /v1 only
    assert client.call("GET", "/metrics").status == 200


def test_truth_agrees_with_what_was_received(engine):
    answer = engine.chat(50, 20, headers={"x-request-id": "truth-1"}, stream_options={"include_usage": True})
    record = engine.truth()["truth-1"]
    texts = answer.texts()
    assert record["prompt_tokens"] == 50 and record["output_tokens"] == len(texts) == record["chunks"] == 20
    assert record["outcome"] == "ok" and record["reason"] == "length" and record["preemptions"] == 0
    order = [record[name] for name in ("received_s", "queued_s", "scheduled_s", "first_token_s", "last_token_s",
                                       "done_s")]
    assert order == sorted(order)
    # The stamp is just before the write: it cannot be after the read, and on loopback it is not long before it.
    assert 0 <= texts[0][0] - record["first_token_s"] < 0.5
    assert 0 <= texts[-1][0] - record["last_token_s"] < 0.5
    assert 0 < record["decision_s"] < record["done_s"] - record["received_s"]


def test_clear_forgets_records(engine):
    engine.chat(headers={"x-request-id": "once"})
    assert "once" in engine.truth(clear=True)
    assert engine.truth() == {}


def test_an_id_sent_twice_is_served_twice(engine):
    wires = [engine.wire() for _ in range(2)]
    for wire in wires:
        wire.send("POST", "/v1/chat/completions", engine.chat_body(5, 30), {"x-request-id": "twin"})
    answers = [wire.read() for wire in wires]
    assert all(answer.complete and len(answer.texts()) == 30 for answer in answers)


def test_disconnect_frees_blocks_and_is_recorded(engine):
    engine.truth(clear=True)
    wire = engine.wire()
    wire.send("POST", "/v1/chat/completions", engine.chat_body(500, 1500), {"x-request-id": "gone"})
    before = engine.replica()["counters"]["generated_tokens"]
    state = engine.wait_for(lambda s: s["running"] == 1 and s["counters"]["generated_tokens"] > before + 5)
    assert state["kv_blocks_used"] >= 32  # ceil(500 / 16)
    wire.close()
    engine.wait_for(lambda s: s["running"] == 0 and s["kv_blocks_used"] == 0, limit_s=2.0)
    record = engine.truth()["gone"]
    assert record["outcome"] == "aborted" and 0 < record["output_tokens"] < 1500


def test_disconnect_while_waiting(serve):
    client = serve(scheduler={"max_num_seqs": 1, "batch_size_cap": 1})
    wires = [client.wire() for _ in range(3)]
    for index, wire in enumerate(wires):
        wire.send("POST", "/v1/chat/completions", client.chat_body(10, 300), {"x-request-id": f"w{index}"})
        client.wait_for(lambda s, n=index: s["running"] + s["waiting"] == n + 1)
    wires[1].close()
    client.wait_for(lambda s: s["waiting"] == 1)
    assert wires[2].read().complete and wires[0].read().complete
    truth = client.truth()
    assert [truth[f"w{i}"]["outcome"] for i in range(3)] == ["ok", "aborted", "ok"]
    assert truth["w1"]["scheduled_s"] is None and truth["w2"]["scheduled_s"] >= truth["w0"]["last_token_s"] - 0.05


def test_memory_budget_refuses_with_503_and_its_reason(serve):
    client = serve(
        engine={"embedded": True, "time_scale": 1.0, "num_blocks": 60, "max_model_len": 512, "noise_cv": 0},
        admission={"reject_on_budget_exceed": True, "kv_reserve_ratio": 0.9, "oversubscribe_factor": 1.0})
    # 59 usable blocks: 53 may be promised (59 x 0.9); a request of 100 + 300 tokens promises ceil(400/16) = 25.
    wires = [client.wire() for _ in range(3)]
    for index, wire in enumerate(wires):
        wire.send("POST", "/v1/chat/completions", client.chat_body(100, 300), {"x-request-id": f"m{index}"})
        if index < 2:
            client.wait_for(lambda s, n=index: s["running"] + s["waiting"] == n + 1)
    refused = wires[2].read()
    assert refused.status == 503 and refused.json["error"]["code"] == "kv_budget"
    assert int(refused.headers["retry-after"]) >= 1
    for wire in wires:
        wire.close()
    client.wait_for(lambda s: s["running"] == 0)
    record = client.truth()["m2"]
    assert record["outcome"] == "rejected" and record["http_status"] == 503 and record["queued_s"] is None
    page = client.call("GET", "/metrics").body.decode()
    assert 'vllm:admission_rejections_total{model_name="test-model",engine="0",reason="kv_budget"} 1.0' in page
    never = client.call("POST", "/v1/chat/completions", client.chat_body(400, 112))
    assert never.status == 200  # 512 tokens are 32 blocks: fits an idle engine


def test_tenant_quota_refuses_with_429_and_retry_after(serve):
    client = serve(tenants=[{"name": "small", "share": 0.5, "quota_qps": 0.5}, {"name": "big", "share": 0.5}])
    answers = [client.chat(2, 2, headers={"x-tenant": "small"}) for _ in range(3)]
    # a bucket of one request that refills in two seconds
    assert [a.status for a in answers] == [200, 429, 429]
    assert answers[1].json["error"]["code"] == "tenant_quota"
    assert answers[1].headers["retry-after"] == "2"
    assert all(client.chat(2, 2, tenant="big").status == 200 for _ in range(3))


def test_metrics_page_equals_the_records(serve):
    client = serve()
    for index in range(6):
        client.chat(10 + index, 3 + index, stream=index % 2 == 0)
    wire = client.wire()
    wire.send("POST", "/v1/chat/completions", client.chat_body(20, 1000))
    client.wait_for(lambda s: s["counters"]["generated_tokens"] > 43)  # the six answers: 3 + 4 + ... + 8 = 33
    wire.close()
    client.wait_for(lambda s: s["running"] == 0)
    from prometheus_client.parser import text_string_to_metric_families

    page = client.call("GET", "/metrics").body.decode()
    values = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            values[sample.name, tuple(sorted(labels.items()))] = sample.value
    records = client.truth().values()
    core = client.replica()["counters"]
    outputs = sum(r["output_tokens"] for r in records)
    assert values["vllm:generation_tokens_total", ()] == outputs == core["generated_tokens"]
    prompts = sum(r["prompt_tokens"] for r in records if r["first_token_s"])
    assert values["vllm:prompt_tokens_total", ()] == prompts == core["prompt_tokens"]
    assert values["vllm:request_success_total", (("finished_reason", "length"),)] == 6
    assert values["vllm:request_success_total", (("finished_reason", "abort"),)] == 1
    firsts = [r["first_token_s"] - r["received_s"] for r in records]
    assert values["vllm:time_to_first_token_seconds_count", ()] == len(firsts)
    assert values["vllm:time_to_first_token_seconds_sum", ()] == pytest.approx(sum(firsts))
    # an answer of n tokens has n - 1 gaps
    assert values["vllm:inter_token_latency_seconds_count", ()] == outputs - len(firsts)
    assert values["vllm:e2e_request_latency_seconds_bucket", (("le", "+Inf"),)] == 7
    assert values["vllm:num_requests_running", ()] == 0
    edges = [k[1][0][1] for k in values if k[0] == "vllm:time_to_first_token_seconds_bucket"]
    assert edges[:5] == ["0.001", "0.005", "0.01", "0.02", "0.04"] and len(edges) == 23


def test_state_reports_lateness_and_reset(engine):
    engine.chat(5, 50)
    state = engine.state()
    assert state["steps"] >= 50 and state["lateness_p50_s"] <= state["lateness_p99_s"] <= state["lateness_max_s"]
    assert state["time_scale"] == 0.125 and isinstance(state["valid"], bool)
    assert state["valid"] == (state["lateness_p99_s"] <= max(0.005, 0.1 * state["step_mean_s"]))
    engine.call("GET", "/debug/state?reset=1")
    assert engine.state()["steps"] == 0


def test_three_hundred_clients_at_once(serve):
    client = serve()
    wires = [client.wire() for _ in range(320)]
    for index, wire in enumerate(wires):
        wire.send("POST", "/v1/chat/completions", client.chat_body(8, 12), {"x-request-id": f"c{index}"})
    answers = [wire.read() for wire in wires]
    for wire in wires:
        wire.close()
    assert all(a.complete and a.done and len(a.texts()) == 12 for a in answers)
    truth = client.truth()
    assert len(truth) == 320 and {r["outcome"] for r in truth.values()} == {"ok"}
    assert sum(r["output_tokens"] for r in truth.values()) == 320 * 12
    counters = client.replica()["counters"]
    assert counters["submitted"] == counters["finished"] == 320


def test_churn_of_clients_that_leave_at_any_moment_loses_nothing(serve):
    """250 requests, half of them cut at random moments (also before the header block): all accounts balance."""
    import random

    generator = random.Random(20)
    client = serve(scheduler={"max_num_seqs": 16, "batch_size_cap": 16},
                   engine={"embedded": True, "time_scale": 0.05, "num_blocks": 200, "max_model_len": 1024})
    open_wires, kept = [], []
    for i in range(250):
        wire = client.wire()
        body = client.chat_body(generator.randint(1, 300), generator.randint(1, 120), stream=generator.random() < 0.8)
        wire.send("POST", "/v1/chat/completions", body, {"x-request-id": f"x{i}"})
        if generator.random() < 0.5:
            open_wires.append(wire)
        else:
            kept.append((i, wire, body["max_tokens"]))
        while open_wires and generator.random() < 0.55:
            open_wires.pop(generator.randrange(len(open_wires))).close()
    for wire in open_wires:
        wire.close()
    answers = [(i, wire.read(), limit) for i, wire, limit in kept]
    assert all(answer.status == 200 and answer.complete for _, answer, _ in answers)
    client.wait_for(lambda s: s["running"] + s["waiting"] + s["swapped"] == 0)
    state = client.state()
    counters = state["replicas"][0]["counters"]
    truth = client.truth()
    outcomes = [row["outcome"] for row in truth.values()]
    assert all((truth[f"x{i}"]["outcome"], truth[f"x{i}"]["output_tokens"]) == ("ok", limit) for i, _, limit in answers)
    # A connection that closed before its request was read never became a request.
    assert counters["submitted"] == len(truth) == outcomes.count("ok") + outcomes.count("aborted")
    assert counters["finished"] == outcomes.count("ok") and counters["aborted"] == outcomes.count("aborted") > 0
    assert state["open_requests"] == 0 and state["replicas"][0]["kv_blocks_used"] == 0
    assert state["replicas"][0]["committed_blocks"] == 0 and state["replicas"][0]["backlog_tokens"] == 0


def test_a_long_listing_does_not_hold_up_steps(engine):
    """Records are written in pieces: a stream that runs meanwhile gets its tokens between them."""
    for wire in (wires := [engine.wire() for _ in range(40)]):
        for _ in range(5):
            wire.send("POST", "/v1/chat/completions", engine.chat_body(3, 1, stream=False))
        assert all(wire.read().status == 200 for _ in range(5))
    listing = engine.call("GET", "/debug/requests")
    assert len(listing.body.splitlines()) >= 200
    assert listing.headers["content-type"] == "application/x-ndjson"
    assert all(json.loads(line)["done_s"] <= time.monotonic() for line in listing.body.splitlines())
    assert len(wires) == 40
