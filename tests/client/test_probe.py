"""`bench probe`, end to end over real sockets: every wire case in every segmentation, the row, the timeline, the key."""
from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.commands.probe import command
from bench.records.request import FIELD_NAMES
from tests.client import fake_server as fake

CASES = Path(__file__).resolve().parents[1] / "data" / "wire-cases"
NAMES = sorted(path.stem for path in CASES.glob("*.http"))
CHECKED_FLAGS = {"tokens_estimated", "no_done", "burst"}
KEY = "sk-test-0815-abcdefgh"


def _load(name: str, path: Path) -> Any:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


serve = _load("wire_case_server", CASES / "serve.py")


@pytest.fixture(autouse=True)
def _no_dotenv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield


def probe(base_url: str, *arguments: str, **env: str | None) -> tuple[int, dict[str, Any], str]:
    """(exit code, document, whole output) of one call of the command."""
    clean = {name: None for name in ("BENCH_API_KEY", "BENCH_BASE_URL", "BENCH_MODEL", "TAOTOKEN_API_KEY",
                                     "TAOTOKEN_BASE_URL", "TAOTOKEN_MODEL_ID")}  # fmt: skip
    result = CliRunner().invoke(command, ["--base-url", base_url, "--model", "demo-7b", *arguments], env={**clean, **env})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    document = json.loads(result.stdout) if result.stdout.startswith("{") else {}
    return result.exit_code, document, result.output


def check_case(name: str, split: str, *, scale: float = 1.0, read: str = "prompt") -> dict[str, Any]:
    """Run one case and compare all but its times; return the document. Lazily read there are no texts."""
    expect = json.loads((CASES / f"{name}.json").read_text("utf-8"))["expect"]
    port, stop = serve.start(split=split, scale=scale)
    try:
        code, document, _ = probe(f"http://127.0.0.1:{port}/case/{name}", "--json", "--read", read, BENCH_API_KEY=KEY)
    finally:
        stop()
    row, answer = document["row"], document["answer"]
    assert code == (0 if expect["outcome"] == "ok" else 3)
    assert (row["status"] == "ok") == (expect["outcome"] == "ok")
    for field, key in (("error_kind", "error_kind"), ("http_status", "http_status"), ("output_tokens", "output_tokens"),
                       ("output_tokens_source", "output_tokens_source"), ("finish_reason", "finish")):  # fmt: skip
        assert row[field] == expect[key], field
    if read == "lazy":
        expect |= {"text": "", "reasoning_text": "", "tool_calls": []}
    for key in ("text", "reasoning_text", "ttft_counts_at_chunk", "ttfo_counts_at_chunk", "content_chunks"):
        assert answer[key] == expect[key], key
    assert answer["tool_calls"] == expect.get("tool_calls", [])
    assert row["retry_after_s"] == expect.get("retry_after_s")
    assert expect.get("error_text_contains", "") in row["detail"]
    assert list(row) == list(FIELD_NAMES)
    return document


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", ["whole", "byte", "random:1", "event"])
def test_every_case_in_every_segmentation(name: str, split: str) -> None:
    document = check_case(name, split, scale=0.0)
    events = document["events"]
    assert events[-1]["what"] == "end"
    times = [event["at_s"] for event in events if "at_s" in event]
    assert times == sorted(times)
    if document["row"]["ttft_s"] is not None:
        first = next(event for event in events if event["what"] in ("content", "reasoning", "tool_call"))
        assert first["event"] == document["answer"]["ttft_counts_at_chunk"]
        assert first["at_s"] == pytest.approx(document["row"]["ttft_s"], abs=2e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", ["whole", "random:1", "event"])
def test_every_case_read_lazily(name: str, split: str) -> None:
    document = check_case(name, split, scale=0.0, read="lazy")
    assert [event["what"] for event in document["events"]][-1] == "end"


@pytest.mark.parametrize("name", NAMES)
def test_times_of_every_case_as_it_is_meant_to_be_replayed(name: str) -> None:
    case = json.loads((CASES / f"{name}.json").read_text("utf-8"))
    split = case["replay"].get("split", "whole")
    document = check_case(name, split)
    row, expect = document["row"], case["expect"]
    assert set(row["flags"].split(";")) & CHECKED_FLAGS == set(expect.get("flags", []))
    for key, (low_ms, high_ms) in expect.get("timing_ms", {}).items():
        value_ms = row[f"{key}_s"] * 1000.0
        # low is a hard bound (1 ms for timers that fire early); high is kept with half a second for a busy machine
        assert low_ms - 1.0 <= value_ms <= high_ms + 500.0, key


def test_burst_is_seen_in_small_pieces_too() -> None:
    """A proxy that held everything back may still write it in many segments."""
    port, stop = serve.start(split="event")
    try:
        _, document, _ = probe(f"http://127.0.0.1:{port}/case/buffered_by_proxy", "--json")
    finally:
        stop()
    assert "burst" in document["row"]["flags"]


def test_what_the_service_sees() -> None:
    import urllib.request

    port, stop = serve.start()
    try:
        for name in ("plain_role_usage_done", "rate_limited", "redirect_307", "truncated_mid_stream"):
            probe(f"http://127.0.0.1:{port}/case/{name}/", "--max-tokens", "7", BENCH_API_KEY=KEY)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        seen = json.load(opener.open(f"http://127.0.0.1:{port}/__requests", timeout=5))
    finally:
        stop()
    assert [request["case"] for request in seen] == ["plain_role_usage_done", "rate_limited", "redirect_307",
                                                     "truncated_mid_stream"]  # each once: nothing is sent again
    for request in seen:
        fields = {name.lower(): value for name, value in request["headers"]}
        assert request["target"] == f"/case/{request['case']}/v1/chat/completions"
        assert fields["authorization"] == f"Bearer {KEY}"
        assert fields["x-request-id"].startswith("probe-")
        body = json.loads(request["body"])
        assert (body["max_tokens"], body["stream"], body["stream_options"]) == (7, True, {"include_usage": True})


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_output_is_json_without_the_key(arguments: tuple[str, ...]) -> None:
    leak = json.dumps({"error": {"message": f"wrong key {KEY}, Bearer {KEY}"}}).encode()

    def script(peer: Any) -> None:
        peer.send(b"HTTP/1.1 401 X\r\nContent-Length: %d\r\n\r\n%s" % (len(leak), leak))

    with fake.FakeServer(script) as server:
        code, document, output = probe(server.url, *arguments, BENCH_API_KEY=KEY)
    assert (code, document["row"]["code"], document["help"]) == (3, "CH-401", "docs/troubleshooting.md#401-unauthorized")
    assert KEY not in output and "abcdefgh" not in output
    assert (output.count("\n") == 1) == bool(arguments)


def test_no_connection_is_a_row_too() -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code, document, _ = probe(f"http://127.0.0.1:{port}", "--json")
    row = document["row"]
    assert (code, row["status"], row["code"], row["error_kind"]) == (3, "error", "CH-REFUSED", "connection")
    assert row["sent_s"] is None and row["ttft_s"] is None and row["residence_s"] is None


@pytest.mark.parametrize(
    ("url", "env"),
    [("http://h/v1?utm_source=x", {}), ("nonsense", {}), ("http://127.0.0.1:1", {"BENCH_API_KEY": "sk-abc def"})],
)
def test_a_broken_three_piece_set_is_refused_before_any_request(url: str, env: dict[str, str]) -> None:
    code, document, output = probe(url, "--json", **env)
    assert (code, document) == (3, {})
    assert output.strip() and "sk-abc" not in output


def test_a_missing_model_and_a_wrong_config(tmp_path: Path) -> None:
    code, _, output = probe("http://127.0.0.1:1", "--model", "your-model-id")
    assert code == 2 and "placeholder" in output  # nobody filled it in: nothing to ask yet
    config = tmp_path / "broken.json"
    config.write_text('{"no_such_section": 1}', encoding="utf-8")
    assert probe("http://127.0.0.1:1", "--config", str(config))[0] == 2


def test_text_completions_by_config(tmp_path: Path) -> None:
    event = b'data: {"id":"c","choices":[{"index":0,"text":" word","finish_reason":null}]}\n\n'
    finish = b'data: {"id":"c","choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
    config = tmp_path / "completions.json"
    config.write_text(json.dumps({"target": {"endpoint": "completions", "extra_body": {"temperature": 0.5},
                                             "extra_headers": {"X-Team": "a"}}}), encoding="utf-8")  # fmt: skip

    def script(peer: Any) -> None:
        peer.send(fake.HEAD + fake.chunk(event) * 3 + fake.chunk(finish) + fake.chunk(fake.usage(3)) + fake.LAST)

    with fake.FakeServer(script) as server:
        code, document, _ = probe(server.url, "--config", str(config), "--prompt", "hello")
        head, body = server.requests[0]
    assert code == 0 and document["answer"]["text"] == " word word word"
    assert head.startswith(b"POST /v1/completions ") and b"X-Team: a" in head
    assert json.loads(body)["prompt"] == "hello" and json.loads(body)["temperature"] == 0.5


@pytest.mark.parametrize("read", ["prompt", "lazy"])
@pytest.mark.parametrize("thought", [False, True])
def test_hidden_reasoning_is_no_part_of_tpot(read: str, thought: bool) -> None:
    """Six events of one token each; the usage says 46, 40 of them reasoning. In the other case it was streamed."""
    first = fake.EVENT.replace(b'"content"', b'"reasoning_content"') if thought else fake.EVENT
    counts = b'"usage":{"prompt_tokens":5,"completion_tokens":46,"completion_tokens_details":{"reasoning_tokens":40}}'

    def script(peer: Any) -> None:
        peer.send(fake.HEAD)
        for event in (first, *[fake.EVENT] * 5):
            peer.send(fake.chunk(event))
            time.sleep(0.01)
        end = fake.chunk(fake.FINISH) + fake.chunk(b'data: {"choices":[],%s}\n\n' % counts) + fake.chunk(fake.DONE)
        peer.send(end + fake.LAST)

    with fake.FakeServer(script) as server:
        code, document, _ = probe(server.url, "--json", "--read", read)
    row = document["row"]
    assert (code, row["output_tokens"], row["reasoning_tokens"], row["chunks"]) == (0, 46, 40, 6)
    assert ("hidden_reasoning" in row["flags"]) == (not thought)
    took_s = row["last_token_s"] - row["first_token_s"]
    assert took_s >= 0.04 and row["tpot_s"] == pytest.approx(took_s / (45 if thought else 5), abs=2e-9)
