"""Parts of the HTTP front without a process: given-up requests, the docs' tables, metric arithmetic, chunk sizes."""
from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from engine.faults import KINDS
from engine.http_api import WORD_BYTES, WORDS, Frames, parse_call
from engine.http_app import REFUSALS, App
from engine.http_fleet import Fleet
from engine.http_loop import new_event_loop
from engine.http_server import Server
from engine.http_truth import FIELDS, TruthLog
from engine.metrics import Histogram, one_two_five
from engine.settings import ClassSpec, EngineConfig

DOC = (Path(__file__).parents[2] / "docs" / "engine-http.md").read_text()


def body(**more) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "a b c"}], "ignore_eos": True,
                       **more}).encode()


def test_a_request_given_up_while_it_waits_gets_503_or_an_error_event():
    """Policy slack_aware that sheds: one slot is taken for about 0.15 s, the deadline is 30 ms."""
    settings = EngineConfig(policy="slack_aware", hopeless="shed", max_num_seqs=1, time_scale=0.1,
                            default_class=ClassSpec(0.03, 0.1))

    async def ask(port: int, payload: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
                     % len(payload) + payload)
        data = await reader.read()
        writer.close()
        return data

    async def run() -> tuple[list[bytes], App]:
        app = App(Fleet(settings, output_mu=3.0, output_sigma=0.5), model="m")
        server = Server(app)
        port = await server.start("127.0.0.1", 0)
        first = asyncio.create_task(ask(port, body(max_tokens=200)))
        await asyncio.sleep(0.01)
        answers = await asyncio.gather(first, ask(port, body(max_tokens=5)), ask(port, body(max_tokens=5, stream=True)))
        server.stop()
        return answers, app

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        (served, whole, streamed), app = runner.run(run())
    assert served.startswith(b"HTTP/1.1 200")
    assert whole.startswith(b"HTTP/1.1 503") and b"hopeless" in whole
    assert streamed.startswith(b"HTTP/1.1 200") and b'"error"' in streamed and streamed.endswith(b"0\r\n\r\n")
    rows = [dict(zip(FIELDS, row, strict=True)) for row in app.truth.take(clear=False)]
    assert sorted(row["outcome"] for row in rows) == ["ok", "rejected", "rejected"]
    assert {row["http_status"] for row in rows if row["reason"] == "hopeless"} == {503, 200}
    assert app.fleet.metrics[0].rejections["hopeless"] == 2


def test_one_token_frames_have_the_size_they_announce():
    """The hot path writes a constant chunk size; every word must fill it exactly."""
    assert len(WORDS) == 64 == len(set(WORDS)) and {len(word) for word in WORDS} == {WORD_BYTES}
    for chat, payload in ((True, body()), (False, json.dumps({"model": "m", "prompt": "x"}).encode())):
        frames = Frames(parse_call(payload, chat=chat), "id-1", 123, b'"m"')
        for word in WORDS:
            size, _, rest = (frames.prefix + word + frames.suffix).partition(b"\r\n")
            assert len(rest) == int(size, 16) + 2 and rest.endswith(b"\n\n\r\n")
            event = json.loads(rest[:-4].removeprefix(b"data: "))
            choice = event["choices"][0]
            assert (choice["delta"]["content"] if chat else choice["text"]) == word.decode()


def test_buckets():
    assert one_two_five(2048) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.1):  # upper edges belong to the bucket: 2 + 2 + 1
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1] and histogram.sum == pytest.approx(7.1)


def test_the_ring_of_records_is_bounded():
    log = TruthLog(limit=3)
    for i in range(5):
        log.add({**dict.fromkeys(FIELDS), "request_id": f"r{i}"})
    assert log.total == 5 and [row[0] for row in log.take(clear=True)] == ["r2", "r3", "r4"]
    assert len(log) == 0
    with pytest.raises(ValueError, match="keys"):
        log.add({"request_id": "x"})


def test_docs_list_every_field_fault_refusal_and_route():
    rows = set(re.findall(r"^\| `([a-z_]+)` \|", DOC, re.MULTILINE))
    assert set(FIELDS) <= rows and set(KINDS) <= rows
    assert all(f"`{reason}`" in DOC for reason in REFUSALS)
    from control.admission import REASONS

    assert set(REASONS) - {"hopeless"} == set(REFUSALS)

    async def routes() -> list[str]:
        return list(App(Fleet(EngineConfig(), output_mu=3.0, output_sigma=0.5), model="m")._routes)

    assert all(f" {route}`" in DOC for route in asyncio.run(routes()))


def test_docs_show_the_options_that_exist():
    from engine.serve import build_parser

    shown = set(re.findall(r"--[a-z-]+", DOC.split("## Starting it")[1].split("## Routes")[0]))
    exist = {name for action in build_parser()._actions for name in action.option_strings} - {"-h", "--help"}
    assert shown == exist
