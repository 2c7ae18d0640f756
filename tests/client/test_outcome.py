"""The taxonomy: status, fields and body to code; an answer to its ledger row; nothing secret in a detail."""
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.client.outcome import CODES, FAIL_KINDS, Outcome, classify, error_parts, fault, is_burst, retry_after
from bench.client.redact import redact
from bench.records.request import FIELD_NAMES, FLAGS, STATUSES

ROOT = Path(__file__).resolve().parents[2]


def openai(message: str, code: Any = None, kind: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


REFUSALS = {
    # name: (HTTP status, fields, body, code)
    "401": (401, {"www-authenticate": "Bearer"}, openai("Incorrect API key provided", "invalid_api_key"), "CH-401"),
    "401 empty": (401, {}, b"", "CH-401"),
    "401 realm": (401, {"www-authenticate": 'Bearer realm="api"'}, b"", "CH-401"),
    "401 oauth challenge": (401, {"www-authenticate": 'Bearer realm="x", error="invalid_token", scope="read"'}, b"", "CH-OAUTH"),
    "401 resource metadata": (401, {"www-authenticate": 'Bearer resource_metadata="https://a/b"'}, b"", "CH-OAUTH"),
    "401 oauth body": (401, {}, openai("OAuth token has expired"), "CH-OAUTH"),
    "403 scope": (403, {}, openai("insufficient_scope: missing scopes model.request"), "CH-OAUTH"),
    "403": (403, {}, openai("You do not have access"), "CH-403"),
    "403 for a model": (403, {}, openai("Project has no access to model x: model not found"), "CH-MODEL"),
    "400 wrong key": (400, {}, openai("API key not valid. Please pass a valid API key."), "CH-KEY"),
    "400 wrong key by code": (400, {}, openai("no", "invalid_api_key"), "CH-KEY"),
    "400 missing key": (400, {}, b'{"message":"missing API key in request"}', "CH-KEY"),
    "400 key, Chinese": (400, {}, '{"error":{"message":"无效的令牌"}}'.encode(), "CH-KEY"),
    "400 unknown model": (400, {}, openai("Unknown model: llama-9"), "CH-MODEL"),
    "400 model by code": (400, {}, openai("sorry", "model_not_found"), "CH-MODEL"),
    "404 model": (404, {}, openai("The model `x` does not exist.", 404, "NotFoundError"), "CH-MODEL"),
    "404 path": (404, {}, b'{"detail":"Not Found"}', "CH-404"),
    "404 html": (404, {}, b"<html><h1>404 Not Found</h1></html>", "CH-404"),
    "422 model list": (422, {}, b'{"detail":[{"loc":["body","model"],"msg":"model not supported"}]}', "CH-MODEL"),
    "400 context": (400, {}, openai("This model's maximum context length is 4096 tokens. However, you requested 9000", 400),
                    "SC-CONTEXT"),
    "400 max_tokens": (400, {}, openai("max_tokens is too large: 99999"), "SC-CONTEXT"),
    "400 parameter": (400, {}, openai("Unrecognized request argument supplied: ignore_eos"), "SC-PARAM"),
    "422 pydantic": (422, {}, b'{"detail":[{"type":"extra_forbidden","loc":["body","ignore_eos"],"msg":"Extra inputs are '
                     b'not permitted"}]}', "SC-PARAM"),
    "400 parameter of a model": (400, {}, openai("model x: the parameter ignore_eos is not supported"), "SC-PARAM"),
    "404 ollama": (404, {}, b'{"error":"model \'x\' not found, try pulling it first"}', "CH-MODEL"),
    "400 other": (400, {}, openai("messages must not be empty"), "SC-400"),
    "402": (402, {}, b"", "CH-402"),
    "407": (407, {}, b"", "CH-407"),
    "413": (413, {}, b"too large", "SC-400"),
    "429": (429, {"retry-after": "2"}, openai("limit of 20 requests per minute"), "SV-429"),
    "429 quota": (429, {}, openai("You exceeded your current quota", "insufficient_quota"), "SV-QUOTA"),
    "500": (500, {}, b"oops", "SV-500"),
    "502": (502, {}, b"<html>Bad gateway</html>", "CH-502"),
    "503 html": (503, {}, b"<html><body>No server is available.</body></html>", "SV-503"),
    "503 names the model": (503, {}, openai("no available channel for model x"), "SV-503"),
    "504": (504, {}, b"", "CH-504"),
    "529": (529, {}, b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}', "SV-529"),
    "599": (599, {}, b"", "SV-500"),
    "301": (301, {"location": "https://a.b/c"}, b"", "CH-REDIRECT"),
    "308 without a place": (308, {}, b"", "CH-REDIRECT"),
}  # fmt: skip

# The kinds of the wire cases, by status: docs/metrics.md.
KIND_OF_STATUS = {401: "auth", 403: "auth", 429: "rate_limited", 503: "overloaded", 529: "overloaded", 500: "server_error",
                  502: "server_error", 504: "server_error", 599: "server_error", 301: "redirect", 308: "redirect"}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    status, fields, body, code = REFUSALS[name]
    found = classify(status, fields, body)
    assert found.code == code
    if status in KIND_OF_STATUS and code != "CH-MODEL":
        assert found.error_kind == KIND_OF_STATUS[status]
    assert found.status == ("rejected" if status in (429, 503, 529) else "error")


def test_redirect_says_where_without_the_query() -> None:
    assert classify(307, {"location": "http://a.b/c?token=secret#x"}, b"").detail == "to http://a.b/c"


@pytest.mark.parametrize(
    ("fields", "wait_s"),
    [
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": " 1.5 "}, 1.5),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"x-ratelimit-reset-requests": "1m30s"}, 90.0),
        ({"x-ratelimit-reset-tokens": "120ms"}, 0.12),
        ({"x-gateway-retry-after": "7"}, 7.0),
        ({"x-retry-in-ms": "70"}, 0.07),
        ({"ratelimit-reset": "30"}, 30.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:05 GMT", "date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 5.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:05 GMT"}, None),  # no Date: our own clock is not trusted for it
        ({"x-ratelimit-reset": "1792567690", "date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 10.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "9" * 60}, None),
        ({"content-type": "x"}, None),
    ],
)
def test_retry_after(fields: dict[str, str], wait_s: float | None) -> None:
    assert retry_after(fields) == (None if wait_s is None else pytest.approx(wait_s))


def test_codes_are_stable_in_form_and_documented() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    anchors = {re.sub(r"[^\w\- ]", "", line[3:].strip().lower()).replace(" ", "-") for line in page.splitlines()
               if line.startswith("## ")}  # fmt: skip
    for name, code in CODES.items():
        assert re.fullmatch(r"(CH|SC|SV|CL)-[A-Z0-9-]{2,14}", name)
        assert code.layer == {"CH": "channel", "SC": "script", "SV": "scheduler", "CL": "client"}[name[:2]]
        assert code.status in STATUSES and code.status != "ok"
        assert (code.status == "rejected") == (code.error_kind in ("rate_limited", "overloaded"))
        assert (code.status == "timeout") == (code.error_kind == "timeout")
        assert (code.status == "truncated") == (code.error_kind == "truncated")
        assert code.anchor in anchors, f"docs/troubleshooting.md has no section for {name}: {code.anchor}"
        assert f"`{name}`" in page
    assert set(FAIL_KINDS.values()) <= set(CODES)


def test_every_metric_of_the_ledger_is_defined_once() -> None:
    page = (ROOT / "docs/metrics.md").read_text("utf-8")
    for name in ("ttft_s", "ttfo_s", "tpot_s", "e2e_s", "residence_s", "itl_mean_s", "itl_p99_s", "itl_max_s",
                 "itl_under_1ms_ratio", "send_lag_s", "output_tokens", "reader_lag_s", *FLAGS):  # fmt: skip
        assert f"`{name}`" in page, name


def test_unknown_code_is_a_bug_and_raises() -> None:
    with pytest.raises(KeyError):
        fault("CH-NO-SUCH")


def row(outcome: Outcome, **more: Any) -> Any:
    known = dict(stage=1, arrival=7, worker=1, repeat=0, offered_qps=15.0, phase="window", tenant="", request_class="",
                 request_id="r7", intended_s=10.0, input_tokens=100, max_tokens=5, to_run_s=lambda at: at - 1000.0)  # fmt: skip
    return outcome.to_row(**{**known, **more})


def test_row_of_a_success_by_hand() -> None:
    outcome = Outcome(http_status=200, send_at=1010.25, headers_at=1010.5, first_token_at=1011.0, first_content_at=1011.5,
                      last_token_at=1013.0, done_at=1013.5, output_tokens=5, output_tokens_source="usage", chunks=5,
                      flags={"short", "cached"})  # fmt: skip
    got = row(outcome)
    assert (got.sent_s, got.headers_s, got.first_token_s, got.last_token_s, got.done_s) == (10.25, 10.5, 11.0, 13.0, 13.5)
    assert got.send_lag_s == 0.25  # 10.25 - 10
    assert (got.ttft_s, got.ttfo_s) == (1.0, 1.5)  # from the intended time, 10
    assert got.tpot_s == 0.5  # (13 - 11) / (5 - 1)
    assert got.e2e_s == 3.0  # 13 - 10
    assert got.residence_s == 3.25  # 13.5 - 10.25
    assert got.flags == "cached;short"
    assert got.status == "ok" and got.code is None


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        ({"output_tokens": 1}, ["tpot_s"]),  # one token has no time between tokens
        ({"chunks": 1}, ["tpot_s"]),  # all tokens in one event neither
        ({"first_content_at": None}, ["ttfo_s"]),
        ({"status": "truncated", "code": "SC-TRUNCATED"}, ["e2e_s"]),
        ({"first_token_at": None, "last_token_at": None, "output_tokens": None}, ["ttft_s", "tpot_s", "e2e_s"]),
    ],
)
def test_absent_is_none(changes: dict[str, Any], absent: list[str]) -> None:
    full = dict(send_at=1010.0, first_token_at=1011.0, first_content_at=1011.0, last_token_at=1013.0, done_at=1013.0,
                output_tokens=5, chunks=5)  # fmt: skip
    got = row(Outcome(**{**full, **changes}))
    latencies = ["ttft_s", "ttfo_s", "tpot_s", "e2e_s", "residence_s", "send_lag_s"]
    assert [name for name in latencies if getattr(got, name) is None] == absent


@pytest.mark.parametrize("code", [code for code in CODES if CODES[code].status == "unsent"])
def test_unsent_arrivals_have_a_row_without_times(code: str) -> None:
    got = row(Outcome.from_fault(code, at=1020.0, detail="x\ny"))
    assert (got.status, got.code, got.detail, got.intended_s) == ("unsent", code, "x y", 10.0)
    assert [name for name in FIELD_NAMES if name.endswith("_s") and getattr(got, name) is not None] == ["intended_s"]


def test_burst_is_decided_when_the_send_time_is_known() -> None:
    outcome = Outcome(send_at=1010.0, headers_at=1010.99, first_token_at=1011.0, last_token_at=1011.01, done_at=1011.02,
                      chunks=6, output_tokens=6, itl_under_1ms_ratio=0.0, first_read_chunks=1)  # fmt: skip
    # all output in the last 2 % of the wait, headers included; gaps of 2 ms
    assert is_burst(outcome)
    assert row(outcome).flags == "burst"
    outcome.headers_at = 1010.1
    assert not is_burst(outcome)


# --- redaction ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Incorrect API key provided: sk-abc***wxyz.", "Incorrect API key provided: [hidden]"),
        ("header was Bearer abcdef123456", "header was Bearer [hidden]"),
        ("Authorization: Basic dXNlcjpwYXNz0=", "Authorization: Basic [hidden]"),
        ('{"api_key": "abcdefgh"}', '{"api_key": "[hidden]"}'),
        ("https://user:pw@host/x", "https://[hidden]@host/x"),
        ("jwt eyJhbGciOi.eyJzdWIi.sig", "jwt [hidden]"),
        ("a\x1b[31mred\x1b[0m\r\nb\x00c", "a [31mred [0m b c"),
        ("the token limit is 4096", "the token limit is 4096"),
        ("a key-value store: key_error", "a key-value store: key_error"),
        ("key-1234abcd refused", "[hidden] refused"),
        ("Bearer token missing", "Bearer token missing"),
        ("max_tokens must be at most 100", "max_tokens must be at most 100"),
        ("safe \u202egnirts", "safe gnirts"),
    ],
)
def test_redaction(text: str, expected: str) -> None:
    assert redact(text) == expected
    assert redact(text.encode()) == expected


@settings(max_examples=300, deadline=None)
@given(
    key=st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJ0123456789_-.", min_size=8, max_size=60),
    before=st.text(max_size=20),
    after=st.text(max_size=300),
    cut=st.integers(0, 60),
)
def test_no_key_and_no_part_of_it_comes_out(key: str, before: str, after: str, cut: int) -> None:
    shown = redact(f"{before} {key} {after} key={key[: cut % len(key)]} {key[cut % len(key) :]}***", secrets=[key])
    assert len(shown) <= 200
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in shown)
    assert key not in shown
    for start in range(len(key) - 7):
        part = key[start : start + 8]
        assert part not in shown or part in before or part in after


@settings(max_examples=200, deadline=None)
@given(status=st.integers(300, 599), body=st.one_of(st.binary(max_size=200), st.text(max_size=100).map(openai)),
       fields=st.dictionaries(st.sampled_from(["retry-after", "location", "www-authenticate", "date"]), st.text(max_size=30)))
def test_no_refusal_raises(status: int, body: bytes, fields: dict[str, str]) -> None:
    found = classify(status, fields, body)
    assert found.code in CODES
    assert len(found.detail) <= 200


def test_classing_a_hostile_body_is_quick() -> None:
    import time

    started = time.process_time()
    for body in (b"<" * 65_536, b"model " * 10_000, openai("a " * 30_000), b'{"error":' * 9_000, b"sk-" * 20_000):
        classify(400, {}, body)
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (openai("m"), "m"),
        (b'{"error":"m"}', "m"),
        (b'{"message":"m"}', "m"),
        (b'{"detail":"m"}', "m"),
        (b'{"detail":[{"msg":"m"},{"msg":"n"}]}', "m; n"),
        (b'{"errors":[{"message":"m"}]}', "m"),
        (b'{"error":{"error":{"message":"m"}}}', "m"),
        (b"<p>m</p>", " m "),
        (b"plain m", "plain m"),
        (b"", ""),
        (b"{}", ""),
    ],
)
def test_message_of_an_error_body(body: bytes, message: str) -> None:
    assert error_parts(body)[0] == message


_SECRET = "sk-Ab3dE-9xYz_7Qw+Lm/k2"
# The same 23 characters as another program writes them (openssl, xxd, rev): never made by the code under test.
_FORMS = {
    "base64": "c2stQWIzZEUtOXhZel83UXcrTG0vazI=",
    "base64 of x and it": "eHNrLUFiM2RFLTl4WXpfN1F3K0xtL2sy",
    "base64 of xy and it": "eHlzay1BYjNkRS05eFl6XzdRdytMbS9rMg==",
    "hex": "736b2d41623364452d3978597a5f3751772b4c6d2f6b32",
    "HEX": "736B2D41623364452D3978597A5F3751772B4C6D2F6B32",
    "quoted": "sk-Ab3dE-9xYz_7Qw%2BLm%2Fk2",
    "all quoted": "%73%6B%2D%41%62%33%64%45%2D%39%78%59%7A%5F%37%51%77%2B%4C%6D%2F%6B%32",
    "reversed": "2k/mL+wQ7_zYx9-Ed3bA-ks",
}


@pytest.mark.parametrize("form", _FORMS)
def test_other_forms_of_the_key_do_not_come_out(form: str) -> None:
    text = _FORMS[form]
    assert redact(f"key ({text}) refused", [_SECRET]) == "key ([hidden]) refused"
    # Six characters from the middle of it, where no bit of a neighbour is in the first or last.
    part = text[6:12]
    assert redact(f"key ({part}) refused", [_SECRET]) == "key ([hidden]) refused"
    assert redact(f"key (~{part}~) refused", ["another-secret-0815"]) == f"key (~{part}~) refused"


def test_hiding_leaves_ordinary_texts_alone() -> None:
    text = "model qwen-2.5-72b-instruct: 8192 tokens at 2024-01-01T12:33:41Z, id chatcmpl-9f8e7d6c5b4a, 100%25 of a/b"
    assert redact(text, [_SECRET]) == text


def test_hiding_a_key_in_much_text_is_cheap() -> None:
    import time

    text = "QWxhZGRpbjpvcGVuIHNlc2FtZQ" * 800  # 20,800 characters in one run that is no form of the key
    redact(text, [_SECRET])
    start_s = time.process_time()
    for _ in range(5):
        redact(text, [_SECRET])
    assert (time.process_time() - start_s) / 5 < 0.1  # about 10 ms
