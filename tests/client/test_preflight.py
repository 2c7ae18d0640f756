"""The preflight against services that misbehave in one way each: the fault, its layer, the next thing to try."""
from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.__main__ import main
from bench.client.outcome import CODES
from bench.client.preflight import FIXES, NAMES, PreflightReport, run_preflight
from bench.commands.check import command
from bench.config import load_config
from tests.client import fake_server as fake
from tests.client import test_transport_tls as tls_tests

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-test-0815-abcdefgh"

tls = tls_tests.tls
FakeServer = fake.FakeServer

MODELS = ["demo-7b", "demo-70b", "org/Other-8B"]


def plain(status: str, body: bytes | dict[str, Any] | list[Any], *fields: str) -> bytes:
    """One whole answer with a length."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(raw)}", *fields]
    return ("\r\n".join(head) + "\r\n\r\n").encode() + raw


def models(*names: str) -> bytes:
    return plain("200 OK", {"object": "list", "data": [{"id": name} for name in names or MODELS]})


COMPLETION = plain("200 OK", {"choices": [{"message": {"content": "a b"}, "finish_reason": "length"}],
                              "usage": {"prompt_tokens": 5, "completion_tokens": 8}})  # fmt: skip


def good_stream(tokens: int = 8, pause_s: float = 0.002) -> Callable[[Any], None]:
    def send(peer: Any) -> None:
        peer.send(fake.HEAD)
        for _ in range(tokens):
            time.sleep(pause_s)
            peer.send(fake.chunk(fake.EVENT))
        peer.send(fake.chunk(fake.FINISH) + fake.chunk(fake.usage(tokens)) + fake.chunk(fake.DONE) + fake.LAST)

    return send


Part = bytes | Callable[[Any], None]


def service(listed: Part | None = None, request: Part | None = None, stream: Part | None = None) -> Callable[[Any], None]:
    """A script with one answer for each of the three kinds of requests."""

    def script(peer: Any) -> None:
        if b"/models" in peer.head.split(b"\r\n")[0]:
            part = models() if listed is None else listed
        elif b'"stream":true' in peer.body:
            part = good_stream() if stream is None else stream
        else:
            part = COMPLETION if request is None else request
        if callable(part):
            part(peer)
        else:
            peer.send(part)

    return script


def check(base_url: str, *, key: str | None = KEY, model: str = "demo-7b", env: dict[str, str] | None = None,
          overrides: dict[str, Any] | None = None, **target: Any) -> PreflightReport:  # fmt: skip
    values = {"base_url": base_url, "model": model, "target.connect_timeout_sec": 2.0,
              "target.first_token_timeout_sec": 3.0, "target.idle_timeout_sec": 3.0, "target.total_timeout_sec": 5.0,
              **{f"target.{name}": value for name, value in target.items()}, **(overrides or {})}  # fmt: skip
    return run_preflight(load_config(None, env={}, overrides=values), key, env=env or {})


def by_name(report: PreflightReport) -> dict[str, Any]:
    return {item.name: item for item in report.checks}


def test_a_good_service_is_ready() -> None:
    with FakeServer(service()) as server:
        report = check(server.url)
        requests = list(server.requests)
    assert report.ok, report.sentence
    assert {item.status for item in report.checks} == {"ok"}
    assert [item.name for item in report.checks] == list(NAMES)
    assert report.sentence.startswith(f"READY: {server.url} answers as demo-7b, idle TTFT ")
    assert len(report.ttft_idle_s) == 5 and all(0.001 < s < 2.0 for s in report.ttft_idle_s)
    assert report.tpot_idle_median_s is not None and report.tpot_idle_median_s > 0.001
    assert report.models == MODELS
    json.dumps(report.to_dict())
    # one list, one request, one stream, five idle ones; each with the key; all prompts different from the first word on
    assert len(requests) == 8
    assert all(f"Authorization: Bearer {KEY}".encode() in head for head, _ in requests)
    prompts = [json.loads(body)["messages"][0]["content"] for _, body in requests[1:]]
    assert len({prompt.split()[0] + prompt.split()[1] for prompt in prompts}) == 7
    assert KEY not in json.dumps(report.to_dict())


REFUSALS: dict[str, tuple[Part | None, Part | None, Part | None, str, str]] = {
    # name: (models, request, stream, check that fails, code)
    "wrong key": (plain("401 X", {"error": {"message": "Incorrect API key"}}),
                  plain("401 X", {"error": {"message": "Incorrect API key"}}), None, "request", "CH-401"),
    "wrong key as 400": (None, plain("400 X", {"error": {"message": "Invalid API key"}}), None, "request", "CH-KEY"),
    "oauth": (None, plain("401 X", b"", 'WWW-Authenticate: Bearer error="invalid_token", scope="x"'), None, "request",
              "CH-OAUTH"),
    "forbidden": (None, plain("403 X", {"error": {"message": "no access"}}), None, "request", "CH-403"),
    "wrong path": (plain("404 X", b"nope"), plain("404 X", {"detail": "Not Found"}), None, "request", "CH-404"),
    "unknown model": (None, plain("404 X", {"error": {"message": "The model `demo-7` does not exist"}}), None, "request",
                      "CH-MODEL"),
    "redirect": (plain("308 X", b"", "Location: https://other/v1/models"), None, None, "models", "CH-REDIRECT"),
    "redirect of the request": (None, plain("307 X", b"", "Location: /login?next=x"), None, "request", "CH-REDIRECT"),
    "html page": (None, plain("200 OK", b"<html>Please log in</html>", "Content-Type: text/html"), None, "request", "SC-SSE"),
    "error with status 200": (None, plain("200 OK", {"error": {"message": "no channel for this model"}}), None, "request",
                              "SC-ERROR-BODY"),
    "no choices": (None, plain("200 OK", {"result": "hello"}), None, "request", "SC-CHOICES"),
    "not JSON": (None, plain("200 OK", b'{"choices": ['), None, "request", "SC-JSON"),
    "context": (None, plain("400 X", {"error": {"message": "maximum context length is 8 tokens"}}), None, "request",
                "SC-CONTEXT"),
    "unknown field": (None, plain("400 X", {"error": {"message": "Unrecognized request argument supplied: ignore_eos"}}),
                      None, "request", "SC-PARAM"),
    "rate limited": (None, plain("429 X", {"error": {"message": "slow down"}}, "Retry-After: 7"), None, "request", "SV-429"),
    "quota": (None, plain("429 X", {"error": {"code": "insufficient_quota", "message": "x"}}), None, "request", "SV-QUOTA"),
    "busy": (None, plain("503 X", b"<html>No server is available</html>"), None, "request", "SV-503"),
    "broken": (None, plain("500 X", b"oops"), None, "request", "SV-500"),
    "gateway": (None, plain("502 X", b"oops"), None, "request", "CH-502"),
    "not HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", None, None, "models", "SC-HTTP"),
    "stream not offered": (None, None, plain("400 X", {"error": {"message": "stream must be false"}}), "stream", "SC-400"),
    "stream cut": (None, None, fake.HEAD + fake.chunk(fake.EVENT) + fake.LAST, "stream", "SC-TRUNCATED"),
    "stream empty": (None, None, fake.HEAD + fake.chunk(fake.DONE) + fake.LAST, "stream", "SC-EMPTY"),
    "error in the stream": (None, None, fake.HEAD + fake.chunk(b'data: {"error":{"message":"device lost"}}\n\n')
                            + fake.LAST, "stream", "SV-STREAM"),
    "bad JSON in the stream": (None, None, fake.HEAD + fake.chunk(b"data: {oops\n\n") + fake.LAST, "stream", "SC-JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_each_fault_has_its_code_fix_and_section(name: str) -> None:
    listed, request, stream, where, code = REFUSALS[name]
    with FakeServer(service(listed, request, stream)) as server:
        report = check(server.url, model="demo-7" if name == "unknown model" else "demo-7b")
    failed = report.failed
    assert failed is not None and not report.ok
    assert (failed.name, failed.code) == (where, code)
    assert failed.fix and failed.link == f"docs/troubleshooting.md#{CODES[code].anchor}"
    assert report.sentence.startswith(f"NOT READY [{code}], {CODES[code].layer} layer, at the {where}: ")
    assert failed.link in report.next_step
    after = [item.status for item in report.checks[report.checks.index(failed) + 1 :] if item.name != "clock"]
    assert set(after) <= {"skipped"} and len(report.checks) >= len(NAMES)
    assert KEY not in json.dumps(report.to_dict())


def test_an_unknown_model_is_answered_with_the_nearest_names() -> None:
    refusal = plain("404 X", {"error": {"message": "The model `demo7b` does not exist"}})
    with FakeServer(service(None, refusal)) as server:
        report = check(server.url, model="demo7b")
    assert by_name(report)["models"].status == "note"
    assert report.nearest_models[0] == "demo-7b"
    assert "set model to one of: demo-7b" in report.next_step
    with FakeServer(service(None, refusal)) as server:
        assert check(server.url, model="Other-8b").nearest_models[0] == "org/Other-8B"


def test_a_service_that_answers_for_any_model_is_noted() -> None:
    with FakeServer(service()) as server:
        report = check(server.url, model="nonsense")
    assert report.ok
    assert by_name(report)["models"].status == "note" and "not among the 3 models" in by_name(report)["models"].found
    assert report.next_step.startswith("set model to ")


@pytest.mark.parametrize("body", [b"[]", b"{}", b"not json", b'{"data": {"a": 1}}', b'{"data": [1, null]}'])
def test_any_list_of_models_is_survived(body: bytes) -> None:
    with FakeServer(service(plain("200 OK", body))) as server:
        assert check(server.url).ok


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_refused_dns_and_silent_ports() -> None:
    report = check(f"http://127.0.0.1:{closed_port()}")
    assert (report.failed.name, report.failed.code) == ("connection", "CH-REFUSED")
    report = check("http://no-such-host.invalid/v1")
    assert (report.failed.name, report.failed.code) == ("connection", "CH-DNS")


def test_timeouts_resets_and_closed_connections() -> None:
    def silent(peer: Any) -> None:
        peer.wait_closed(5.0)

    def stall(peer: Any) -> None:
        peer.send(fake.HEAD + fake.chunk(fake.EVENT))
        peer.wait_closed(5.0)

    def reset(peer: Any) -> None:
        peer.reset()

    def close(peer: Any) -> None:
        peer.sock.shutdown(socket.SHUT_RDWR)

    def cut(peer: Any) -> None:
        peer.send(fake.HEAD + fake.chunk(fake.EVENT))
        time.sleep(0.05)
        peer.reset()

    quick = {"first_token_timeout_sec": 0.3, "idle_timeout_sec": 0.3}
    for script, code in ((service(None, silent), "CH-TO-FIRST"), (service(None, None, stall), "CH-TO-IDLE"),
                         (service(None, reset), "CH-RESET"), (service(None, close), "CH-CLOSED"),
                         (service(None, None, cut), "CH-CUT")):  # fmt: skip
        with FakeServer(script) as server:
            report = check(server.url, overrides={"slo.ttft_deadline_ms": 100.0}, **quick)
        assert report.failed is not None and report.failed.code == code


def test_an_answer_before_the_request_is_read_counts() -> None:
    with FakeServer(service(None, plain("413 X", {"error": {"message": "body too large"}}, "Connection: close"))) as server:
        report = check(server.url)
    assert (report.failed.code, "too large" in report.failed.found) == ("SC-400", True)


@pytest.mark.parametrize(
    ("url", "found"),
    [("http://h/api?utm_source=x", "tracking parameters"), ("h:8000", "no scheme"), ("http://a b", "a space")],
)
def test_the_base_url_is_checked_first(url: str, found: str) -> None:
    resolved = load_config(None, env={}, overrides={"base_url": "http://127.0.0.1:1", "model": "m"})
    config = resolved.config.model_copy(update={"base_url": url})
    report = run_preflight(type(resolved)(config, {}), None, env={})
    assert (report.failed.name, report.failed.code) == ("base URL", "CH-URL")
    assert found in report.failed.found


def test_values_of_the_example_config_are_named() -> None:
    report = run_preflight(load_config(ROOT / "configs/scheduler_bench.json", env={}), None, env={})
    assert (report.failed.name, report.failed.code) == ("base URL", "CH-URL")
    assert "placeholder" in report.failed.found and "BENCH_BASE_URL" in report.next_step
    report = check("http://127.0.0.1:1", model="your-model-id")
    assert (report.failed.name, report.failed.code) == ("model", "CH-MODEL")


@pytest.mark.parametrize("key", ["sk-1 2", "sk-1\n", '"sk-12"', "Bearer sk-12"])
def test_a_key_that_no_header_can_carry_is_refused_before_any_request(key: str) -> None:
    with FakeServer(service()) as server:
        report = check(server.url, key=key)
        assert server.requests == []
    assert (report.failed.name, report.failed.code) == ("API key", "CH-KEY-FORM")
    assert "sk-1" not in json.dumps(report.to_dict())


def test_no_key_is_said_and_is_the_reason_when_the_service_wants_one() -> None:
    with FakeServer(service()) as server:
        report = check(server.url, key=None)
    assert report.ok and by_name(report)["API key"].found.startswith("none is set")
    assert by_name(check("http://no-such-host.invalid", key=None))["API key"].status == "note"
    with FakeServer(service(None, plain("401 X", b""))) as server:
        report = check(server.url, key=None)
    assert "no key is set" in report.next_step and "#401-unauthorized" in report.next_step


# --- proxies ---

PROXY_ENV = {"HTTP_PROXY": "http://user:secret-word@127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


def test_a_proxy_of_the_environment_is_reported_and_not_used() -> None:
    with FakeServer(service()) as server:
        report = check(server.url, env=PROXY_ENV)
    assert report.ok
    assert by_name(report)["proxy"].status == "note"
    assert "HTTP_PROXY, HTTPS_PROXY is set and not used" in by_name(report)["proxy"].found
    assert "secret-word" not in json.dumps(report.to_dict())


def test_local_proxy_failed() -> None:
    with FakeServer(service()) as server:
        report = check(server.url, proxy=f"http://127.0.0.1:{closed_port()}")
        assert server.requests == []
    assert (report.failed.code, report.failed.link) == ("CH-PROXY", "docs/troubleshooting.md#local-proxy-failed")


def test_a_proxy_gets_the_whole_url() -> None:
    with FakeServer(service()) as proxy:
        report = check("http://service.invalid:8000/v1", proxy=f"http://127.0.0.1:{proxy.port}")
        lines = {head.split(b"\r\n")[0] for head, _ in proxy.requests}
    assert report.ok, report.sentence
    assert b"POST http://service.invalid:8000/v1/chat/completions HTTP/1.1" in lines


def test_a_proxy_that_wants_a_login_or_refuses_the_tunnel() -> None:
    for status, code in (("407 Login", "CH-407"), ("502 No", "CH-PROXY")):
        with FakeServer(lambda peer, status=status: peer.send(plain(status, b""))) as proxy:
            report = check("https://service.invalid/v1", proxy=f"http://127.0.0.1:{proxy.port}")
        assert report.failed.code == code


# --- TLS ---


def test_tls_is_verified_with_the_given_authority(tls: dict[str, Any]) -> None:
    with FakeServer(service(), context=tls["context"]) as server:
        report = check(server.url, ca_file=str(tls["ca"]))
        assert report.ok, report.sentence
        assert report.tls_s is not None
        assert check(server.url).failed.code == "CH-TLS-CERT"
        assert check(server.url, ca_file=str(tls["other"])).failed.code == "CH-TLS-CERT"
        assert check(server.url, tls_verify=False).ok


def test_scheme_and_port_that_do_not_fit(tls: dict[str, Any]) -> None:
    with FakeServer(service(), context=tls["context"]) as server:
        report = check(server.url.replace("https", "http"))
    assert report.failed is not None and report.failed.code in ("CH-TLS", "CH-CLOSED", "CH-RESET")
    assert "https://" in report.next_step or "https://" in report.failed.found
    listener = socket.create_server(("127.0.0.1", 0))

    def answer_in_clear() -> None:
        conn, _ = listener.accept()
        conn.recv(4096)
        conn.sendall(plain("400 Bad Request", b"this is HTTP"))
        conn.close()

    threading.Thread(target=answer_in_clear, daemon=True).start()
    report = check(f"https://127.0.0.1:{listener.getsockname()[1]}/v1")
    listener.close()
    assert report.failed is not None and report.failed.code == "CH-TLS"
    assert "http://" in report.next_step
    with FakeServer(service()) as server:  # waits for the end of a header block that never comes
        report = check(server.url.replace("http", "https"), connect_timeout_sec=0.3)
    assert report.failed is not None and report.failed.code == "CH-TO-CONNECT"
    assert "http://" in report.failed.found


# --- what is not an error, but worth a word ---


def test_notes_on_the_stream() -> None:
    def buffered(peer: Any) -> None:
        peer.send(fake.whole(8))

    def no_usage(peer: Any) -> None:
        peer.send(fake.HEAD)
        for _ in range(3):
            time.sleep(0.003)
            peer.send(fake.chunk(fake.EVENT))
        peer.send(fake.chunk(fake.FINISH.replace(b"length", b"stop")) + fake.chunk(fake.DONE) + fake.LAST)

    for stream, words in ((buffered, ["one piece"]), (no_usage, ["no usage", "does not keep to the asked length"])):
        with FakeServer(service(None, None, stream)) as server:
            report = check(server.url)
        assert report.ok, report.sentence
        for word in words:
            assert word in by_name(report)["stream"].found


def test_a_deadline_below_the_idle_ttft_is_said() -> None:
    def slow(peer: Any) -> None:
        time.sleep(0.06)
        good_stream()(peer)

    with FakeServer(service(None, None, slow)) as server:
        resolved = load_config(None, env={}, overrides={"base_url": server.url, "model": "demo-7b", "slo.ttft_deadline_ms": 20.0})
        report = run_preflight(resolved, None, env={})
    assert report.ok
    assert "above slo.ttft_deadline_ms" in by_name(report)["idle latency"].found


def test_a_service_with_a_wrong_clock_is_noted() -> None:
    dated = models().replace(b"\r\n", b"\r\nDate: Wed, 21 Oct 2015 07:28:00 GMT\r\n", 1)
    with FakeServer(service(dated)) as server:
        report = check(server.url)
    assert report.ok and report.clock_offset_s is not None and report.clock_offset_s < -1e6
    assert by_name(report)["clock"].status == "note"


def test_every_fix_is_for_a_code_and_every_link_for_a_section() -> None:
    assert set(FIXES) <= set(CODES)
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    sections = {re.sub(r"[^\w\- ]", "", line[3:].strip().lower()).replace(" ", "-")
                for line in page.splitlines() if line.startswith("## ")}  # fmt: skip
    source = "".join((ROOT / name).read_text("utf-8") for name in ("bench/client/preflight.py", "bench/commands/check.py"))
    for anchor in re.findall(r"troubleshooting\.md#([a-z0-9-]+)|DOCS_PAGE\}#([a-z0-9-]+)\"", source):
        assert (anchor[0] or anchor[1]) in sections


# --- the command ---


def invoke(*arguments: str, **env: str | None) -> Any:
    clean = {name: None for name in ("BENCH_API_KEY", "BENCH_BASE_URL", "BENCH_MODEL", "TAOTOKEN_API_KEY",
                                     "TAOTOKEN_BASE_URL", "TAOTOKEN_MODEL_ID", "HTTP_PROXY", "HTTPS_PROXY")}  # fmt: skip
    return CliRunner().invoke(command, list(arguments), env={**clean, **env})


def test_command_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with FakeServer(service()) as server:
        result = invoke("--base-url", server.url, "--model", "demo-7b", BENCH_API_KEY=KEY)
        assert result.exit_code == 0, result.output
        assert "READY: " in result.output and result.output.rstrip().endswith(
            "next: bench run --shape smoke (2 requests/s for 30 s), then bench run")  # fmt: skip
        assert KEY not in result.output
        result = invoke("--base-url", server.url, "--model", "demo-7b", "--json", BENCH_API_KEY=KEY)
        assert result.exit_code == 0 and json.loads(result.output)["ok"] is True
        (tmp_path / "c.json").write_text("{}", encoding="utf-8")
        result = invoke("--config", "c.json", "--base-url", server.url, "--model", "demo-7b", BENCH_API_KEY=KEY)
        assert result.output.rstrip().endswith(
            "next: bench run --config c.json --shape smoke (2 requests/s for 30 s), then bench run --config c.json")  # fmt: skip


def test_command_not_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"http://127.0.0.1:{closed_port()}"
    result = invoke("--base-url", url, "--model", "m")
    assert result.exit_code == 3
    assert "NOT READY [CH-REFUSED], channel layer" in result.output
    assert "docs/troubleshooting.md#connection-refused" in result.output
    result = invoke("--base-url", url, "--model", "m", "--json")
    assert result.exit_code == 3 and json.loads(result.output)["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        (["--base-url", "http://127.0.0.1:1/v1?utm_source=x", "--model", "m"], {}, "base_url"),
        (["--base-url", "http://127.0.0.1:1", "--model", "m"], {"BENCH_API_KEY": "sk-abc def"}, "BENCH_API_KEY"),
        (["--base-url", "http://127.0.0.1:1", "--model", "m"], {"BENCH_API_KEY": '"sk-abc"'}, "BENCH_API_KEY"),
    ],
)
def test_command_refuses_a_broken_three_piece_set(
    arguments: list[str], env: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments, **env)
    assert result.exit_code == 3, result.output
    assert words in result.output and "sk-abc" not in result.output
    document = json.loads(invoke(*arguments, "--json", **env).output)
    assert document["ok"] is False and document["next_step"]


@pytest.mark.parametrize(
    ("arguments", "unfilled"),
    [
        (["--base-url", "http://127.0.0.1:1", "--model", "your-model-id"], "model"),
        (["--base-url", "https://your-gateway.example/api", "--model", "m"], "base_url"),
        (["--base-url", "http://127.0.0.1:1"], "model"),
        ([], "base_url"),
    ],
)
def test_what_nobody_filled_in_is_a_usage_error_for_check_run_and_validate(
    arguments: list[str], unfilled: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The three agree, and nothing is sent or left: no run folder."""
    monkeypatch.chdir(tmp_path)
    Path("c.json").write_text('{"model": "", "base_url": ""}', encoding="utf-8")
    clean = {"BENCH_API_KEY": None, "BENCH_BASE_URL": None, "BENCH_MODEL": None, "BENCH_RUNS": None}
    for line in (["check", "--config", "c.json"], ["run", "--config", "c.json"], ["validate", "c.json"],
                 ["probe", "--config", "c.json"], ["run", "--config", "c.json", "--no-preflight"]):  # fmt: skip
        result = CliRunner().invoke(main, [*line, *arguments], env=clean)
        assert result.exit_code == 2 and unfilled in result.output and "CFG-012" in result.output, (line, result.output)
    found = json.loads(CliRunner().invoke(main, ["check", "--json", *arguments], env=clean).stdout)
    assert found["ok"] is False and "docs/troubleshooting.md#three-piece-set" in found["next_step"] and found["problems"]
    said = CliRunner().invoke(main, ["run", "--config", "c.json", "--json", *arguments], env=clean)
    assert json.loads(said.stdout)["exit_code"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


def test_command_broken_config_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "broken.json"
    path.write_text('{"no_such_section": 1}', encoding="utf-8")
    assert invoke("--config", str(path)).exit_code == 2


# --- what a real llama.cpp server showed ---


def test_a_service_that_loads_its_model_is_not_called_full() -> None:
    loading = plain("503 Service Unavailable", {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})
    with FakeServer(service(loading, loading)) as server:
        report = check(server.url)
    assert report.failed.code == "SV-503" and "up and not ready: Loading model" in report.failed.found
    assert "--wait" in report.next_step and "refuses a single request" not in report.next_step
    full = plain("503 Service Unavailable", {"error": {"message": "the queue is full"}})
    with FakeServer(service(full, full)) as server:
        report = check(server.url)
    assert "refuses a single request" in report.next_step and "queue is full" in report.failed.found


def named_stream(model: str, **usage: Any) -> Callable[[Any], None]:
    """Eight tokens of a stream that names its model in each event, with a usage of its own."""

    def event(**more: Any) -> bytes:
        return fake.chunk(b"data: " + json.dumps({"model": model, **more}).encode() + b"\n\n")

    def send(peer: Any) -> None:
        peer.send(fake.HEAD)
        for _ in range(8):
            time.sleep(0.002)
            peer.send(event(choices=[{"index": 0, "delta": {"content": " a"}, "finish_reason": None}]))
        end = event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
        peer.send(end + event(choices=[], usage={"completion_tokens": 8, **usage}) + fake.chunk(fake.DONE) + fake.LAST)

    return send


def test_the_verdict_names_the_model_that_answered() -> None:
    """llama.cpp answers for any name, with its own in the stream."""
    with FakeServer(service(models("tiny"), None, named_stream("tiny"))) as server:
        asked, right = check(server.url, model="gpt-4"), check(server.url, model="tiny")
    assert asked.ok and f"READY: {server.url} answers as tiny, not as gpt-4, idle TTFT " in asked.sentence
    assert "another model, tiny:" in by_name(asked)["stream"].found and asked.next_step == "set model to tiny"
    assert right.ok and f"READY: {server.url} answers as tiny, idle TTFT " in right.sentence


@pytest.mark.parametrize(("cached", "said"), [(0, False), (9, False), (30, False), (31, True), (60, True)])
def test_the_start_of_a_chat_template_is_no_warm_cache(cached: int, said: bool) -> None:
    usage = {"prompt_tokens": 60, "prompt_tokens_details": {"cached_tokens": cached}}
    with FakeServer(service(None, None, named_stream("demo-7b", **usage))) as server:
        found = by_name(check(server.url))["stream"]
    assert (found.status == "note") is said and (f"{cached} of 60 tokens of a new prompt from its cache" in found.found) is said
