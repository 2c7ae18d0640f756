"""Answers that a hostile or broken server sends: one row each, the right code, the same however it is read.

Besides `test_transport_faults.py` (bombs, torrents, ends of connections) and the parsers' own tables.
"""
from __future__ import annotations

import dataclasses
import json
import re
import resource
import time
from pathlib import Path
from typing import Any

import gevent
import pytest
from click.testing import CliRunner

from bench.client.answer import AnswerReader
from bench.client.outcome import CODES, Outcome
from bench.commands.check import command as check_command
from bench.commands.probe import command as probe_command
from bench.records.request import FLAGS
from tests.client import fake_server as fake
from tests.client import test_transport as base

EVENT, HEAD, FINISH, DONE, LAST = fake.EVENT, fake.HEAD, fake.FINISH, fake.DONE, fake.LAST
chunk, usage, whole = fake.chunk, fake.usage, fake.whole
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
BODY = EVENT * 5 + FINISH + DONE
# What steers a terminal: escape sequences, their eight-bit forms (as UTF-8 and as bytes), the direction of text.
STEER = b"\x1b]0;owned\x07\x1b[2J\xc2\x9b31m\x9b\xe2\x80\xae\x7f"
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


def choice(index: int, text: str = "a", finish: str | None = None) -> bytes:
    delta = {"content": text} if text else {}
    return b"data: " + json.dumps({"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}).encode() + b"\n\n"


def said(counts: str) -> bytes:
    """Five tokens, then this usage."""
    return HEAD + chunk(EVENT) * 5 + chunk(FINISH) + chunk(b'data: {"choices":[],"usage":{%s}}\n\n' % counts.encode()) + chunk(DONE) + LAST


def lengths(value: str) -> str:
    return f'"completion_tokens":{value},"prompt_tokens":{value},"completion_tokens_details":{{"reasoning_tokens":{value}}}'


LIMITED = b"HTTP/1.1 429 X\r\nContent-Length: 0\r\nRetry-After: "
# name: (bytes of the answer, code, output events, output tokens)
ANSWERS: dict[str, tuple[bytes, str | None, int, int | None]] = {
    # framing: what came before the fault counts
    "negative chunk size": (HEAD + chunk(EVENT) * 2 + b"-5\r\nhello\r\n", "SC-HTTP", 2, 2),
    "chunk size overflow": (HEAD + chunk(EVENT) * 2 + b"ffffffffffffffff\r\nhello\r\n", "SC-HTTP", 2, 2),
    "chunk size just below": (HEAD + chunk(EVENT) * 2 + b"fffffffffffffff\r\nhello\r\n", "SC-TRUNCATED", 2, 2),
    "chunk extension bomb": (HEAD + chunk(EVENT) * 2 + b"5;" + b"a" * 50_000 + b"\r\nhello\r\n", "SC-HTTP", 2, 2),
    "an extension on every byte": (
        HEAD + b"".join(b"1;n=%d\r\n%c\r\n" % (i, byte) for i, byte in enumerate(BODY)) + LAST, None, 5, 5),
    "trailers bomb": (HEAD + chunk(EVENT) * 2 + b"0\r\n" + b"X-A: %s\r\n" % (b"y" * 900) * 50, "SC-HEADERS", 2, 2),
    "trailers bomb after the end": (HEAD + chunk(BODY) + b"0\r\n" + b"X-A: %s\r\n" % (b"y" * 900) * 50, None, 5, 5),
    "length and chunks": (
        PLAIN + b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(BODY) + LAST, None, 5, 5),
    "two lengths": (PLAIN + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", "SC-HTTP", 0, None),
    "a length too short": (PLAIN + b"Content-Length: %d\r\n\r\n" % len(EVENT) + BODY, "SC-TRUNCATED", 1, 1),
    "http/1.0": (PLAIN.replace(b"1.1", b"1.0") + b"\r\n" + BODY, None, 5, 5),
    "a second answer behind the first": (whole(5) + whole(7), None, 5, 5),
    "1xx storm": (b"HTTP/1.1 100 Continue\r\n\r\n" * 500 + whole(5), "SC-HTTP", 0, None),
    # fields
    "redirect with a body": (
        b"HTTP/1.1 302 Found\r\nLocation: http://a.b/" + STEER + b"?key=1\r\nContent-Length: 90000\r\n\r\n" + STEER * 3000,
        "CH-REDIRECT", 0, None),
    "401 with 50 kB of challenge": (
        b"HTTP/1.1 401 X\r\nWWW-Authenticate: Basic realm=\"" + b"\x1b[31m\x9b" * 8000 + b"\"\r\nContent-Length: 0\r\n\r\n",
        "CH-401", 0, None),
    "401 with 100 kB of challenge": (
        b"HTTP/1.1 401 X\r\nWWW-Authenticate: " + STEER * 5000 + b"\r\nContent-Length: 0\r\n\r\n", "SC-HEADERS", 0, None),
    "401 that steers": (b"HTTP/1.1 401 X\r\nConnection: close\r\n\r\n" + STEER * 20, "CH-401", 0, None),
    "a wait that is none": (LIMITED + b"-5\r\n\r\n", "SV-429", 0, None),
    "a wait of ages": (LIMITED + b"9" * 40 + b"\r\n\r\n", "SV-429", 0, None),
    # event stream
    "retry and id floods": (
        HEAD + (chunk(b"retry: 99999999999\nid: %s\n" % (b"x" * 3000)) * 300 + chunk(b"\n")) + chunk(BODY) + LAST, None, 5, 5),
    "100,000 empty events": (HEAD + chunk(EVENT) + chunk(b"data:\n\n" * 100_000) + chunk(BODY) + LAST, None, 6, 6),
    "carriage returns alone, each byte a chunk": (
        HEAD + b"".join(chunk(b"%c" % byte) for byte in BODY.replace(b"\n", b"\r")) + LAST, None, 5, 5),
    # The second mark is text before the field's name: that line says nothing, its event is lost.
    "two byte order marks": (HEAD + chunk(b"\xef\xbb\xbf\xef\xbb\xbf" + BODY) + LAST, None, 4, 4),
    # JSON
    "usage: negative": (said(lengths("-5")), None, 5, 5),
    "usage: 1e30": (said(lengths("1e30")), None, 5, 5),
    "usage: text": (said(lengths('"12"')), None, 5, 5),
    "usage: a list": (said(lengths("[9]")), None, 5, 5),
    "usage: NaN": (said(lengths("NaN")), "SC-JSON", 5, 5),
    "usage: details only": (said('"completion_tokens":7,"completion_tokens_details":{"reasoning_tokens":-7}'), None, 5, 7),
    "choices out of order": (
        HEAD + b"".join(chunk(choice(i)) for i in (2, 0, 1, 2, 1, 0))
        + b"".join(chunk(choice(i, "", "stop")) for i in (2, 0, 1)) + LAST, None, 6, 6),
    "one choice ends early": (
        HEAD + chunk(choice(0)) + chunk(choice(1)) + chunk(choice(0, "", "stop")) + chunk(choice(1)) * 3
        + chunk(choice(1, "", "stop")) + LAST, None, 5, 5),
    "one choice never ends": (
        HEAD + chunk(choice(0)) + chunk(choice(1)) + chunk(choice(0, "", "stop")) + chunk(choice(1)) * 3 + LAST,
        "SC-TRUNCATED", 5, 5),
    "absurd places of choices": (
        HEAD + b"".join(chunk(choice(i)) for i in (10**30, -1, 0, 1 << 60)) + chunk(DONE) + LAST, None, 4, 4),
    "100,000 brackets": (
        HEAD + chunk(EVENT) * 2 + chunk(b"data: " + b"[" * 100_000 + b"]" * 100_000 + b"\n\n") + LAST, "SC-JSON", 2, 2),
    "100,000 brackets as a refusal": (
        b"HTTP/1.1 400 X\r\nContent-Length: 200000\r\n\r\n" + b"[" * 100_000 + b"]" * 100_000, "SC-400", 0, None),
    # The last of equal names stands, as in every common reader.
    "names twice": (
        HEAD + chunk(b'data: {"choices":[],"choices":[{"index":0,"delta":{"content":"","content":"a"}}]}\n\n') * 3
        + chunk(b'data: {"choices":[],"usage":{"completion_tokens":9,"completion_tokens":4}}\n\n') + chunk(DONE) + LAST,
        None, 3, 4),
    "halves of a surrogate pair": (
        HEAD + b"".join(chunk(EVENT.replace(b" word", text)) for text in (b"a", b"\\ud83d", b"\\ude00", b"b", b"c"))
        + chunk(FINISH) + chunk(DONE) + LAST, None, 5, 5),
    "texts that steer": (
        HEAD + b"".join(chunk(EVENT.replace(b" word", text)) for text in (b"a", b"\\u001b[2J", b"\\u009b31m", b"\xc2\x9b\x7f", b"b"))
        + chunk(FINISH.replace(b"length", b"\\u001b[2J\\u009b31m\xc2\x9b")) + chunk(DONE) + LAST, None, 5, 5),
    "error that steers": (
        HEAD + chunk(EVENT) + chunk(b"event: error\ndata: " + STEER + b" boom\n\n") + LAST, "SV-STREAM", 1, 1),
}  # fmt: skip
CLOSES = ("chunk size just below", "http/1.0", "401 that steers", "trailers bomb", "redirect with a body")


def script_of(name: str) -> Any:
    def script(peer: Any) -> None:
        peer.send(ANSWERS[name][0])
        if name in CLOSES:
            peer.sock.shutdown(1)

    return script


def texts_of(row: Any) -> dict[str, str]:
    return {field.name: value for field in dataclasses.fields(row) if isinstance(value := getattr(row, field.name), str)}


def row_of(outcome: Outcome) -> Any:
    return outcome.to_row(stage=0, arrival=0, worker=0, repeat=0, offered_qps=1.0, phase="window", tenant="", request_class="",
                          request_id="r", intended_s=0.0, input_tokens=5, max_tokens=5, to_run_s=float)  # fmt: skip


@pytest.mark.parametrize("read", ["prompt", "lazy"])
@pytest.mark.parametrize("name", ANSWERS)
def test_one_row_with_the_right_code(name: str, read: str) -> None:
    _, code, chunks, tokens = ANSWERS[name]
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with fake.FakeServer(script_of(name)) as server, base.transport(server.url, read=read) as made:
        (outcome,) = base.ask(made)
        assert len(server.requests) == 1
    assert (outcome.code, outcome.chunks, outcome.output_tokens) == (code, chunks, tokens), outcome.detail
    assert outcome.status == ("ok" if code is None else CODES[code].status)
    assert outcome.flags <= set(FLAGS) and outcome.retry_after_s is None
    for column, text in texts_of(row_of(outcome)).items():
        assert CONTROL.search(text) is None and len(text) <= 200, column
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 60_000


def test_the_answer_does_not_depend_on_its_cuts() -> None:
    """Whole, byte by byte, in 97 bytes; what the first read has shown is drained lazily or read promptly."""
    for name, (raw, code, chunks, tokens) in ANSWERS.items():
        for size in (len(raw), 97, 1) if len(raw) < 6000 else (len(raw), 4001):
            for lazy in (False, True):
                reader = AnswerReader()
                for number, start in enumerate(range(0, len(raw), size)):
                    feed = reader.feed_lazy if lazy and reader.first_output else reader.feed
                    if feed(raw[start : start + size], 1.0 + number):
                        break
                reader.eof(9e9)
                outcome = reader.outcome()
                assert (outcome.code, outcome.chunks, outcome.output_tokens) == (code, chunks, tokens), (name, size, lazy)


@pytest.mark.parametrize("read", ["prompt", "lazy"])
@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_a_second_answer_is_nobodys(read: str, pause_s: float) -> None:
    """It lies in the connection when the next request is due, and must not be taken for its answer."""

    def script(peer: Any) -> None:
        peer.send(whole(5))
        if peer.connection == 1:
            time.sleep(pause_s)
            peer.send(whole(77))

    with fake.FakeServer(script) as server, base.transport(server.url, read=read) as made:
        first = base.ask(made)
        gevent.sleep(0.06)
        outcomes = first + base.ask(made)
        assert [(o.status, o.output_tokens, o.connection) for o in outcomes] == [("ok", 5, "new")] * 2
        assert server.connections == len(server.requests) == 2


# --- what is printed ---


@pytest.mark.parametrize("arguments", [(), ("--json",), ("--json", "--read", "lazy")])
@pytest.mark.parametrize("name", ["texts that steer", "error that steers", "401 that steers", "redirect with a body",
                                  "halves of a surrogate pair"])  # fmt: skip
def test_the_probe_prints_no_control_character(
    name: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with fake.FakeServer(script_of(name)) as server:
        result = CliRunner().invoke(probe_command, ["--base-url", server.url, "--model", "m", *arguments])
    assert CONTROL.search(result.output.replace("\n", "")) is None
    document = json.loads(result.stdout)
    assert result.exit_code == (0 if document["row"]["status"] == "ok" else 3)
    if name == "texts that steer" and "lazy" not in arguments:
        assert document["answer"]["text"] == "a\x1b[2J\x9b31m\x9b\x7fb"  # as JSON reads it, nothing is lost
    if name == "halves of a surrogate pair" and "lazy" not in arguments:
        assert document["answer"]["text"] == "a\ufffd\ufffdbc"


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_the_preflight_prints_no_control_character(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def script(peer: Any) -> None:
        if peer.head.startswith(b"GET"):
            body = json.dumps({"data": [{"id": f"\x1b[2J\x9b m{i} \u202e"} for i in range(9)]}).encode()
        elif b'"stream":false' in peer.body:
            body = b'{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}],"usage":{"completion_tokens":8}}'
        else:
            timings = b'data: {"choices":[],"timings":{"\\u009b2J\\u202e":1.5},"usage":{"completion_tokens":8}}\n\n'
            peer.send(HEAD + chunk(EVENT) * 8 + chunk(FINISH) + chunk(timings) + chunk(DONE) + LAST)
            return
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    with fake.FakeServer(script) as server:
        result = CliRunner().invoke(check_command, ["--base-url", server.url, "--model", "m", *arguments])
    assert result.exit_code == 0
    assert CONTROL.search(result.output.replace("\n", "")) is None
    if arguments:
        assert json.loads(result.stdout)["server_timings"] == {"\x9b2J\u202e": 1.5}
