"""`bench run` against services of OpenAI `responses` and Anthropic `messages`: times and counts by the services' record.

The service stamps the monotonic clock, which all processes of a machine share, before and after it writes the event of
the first and of the last token. A ledger time plus the run's start must lie between the two, with one start for all rows.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from tests.client import dialect_streams as made
from tests.client import fake_server as fake

KEY = "sk-test-0815-abcdefgh"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Service:
    """Answers one dialect with a random number of text events; remembers when it wrote the first and the last."""

    def __init__(self, endpoint: str, auth: str = "auto") -> None:
        self.endpoint = endpoint
        self.bearer = endpoint != "messages" or auth == "bearer"
        self.answers = {"messages": made.messages_answer, "responses": made.responses_answer}[endpoint]
        self.record: dict[str, dict[str, Any]] = {}
        self.unkeyed = 0

    def __call__(self, peer: Any) -> None:
        fields = dict(line.split(b": ", 1) for line in peer.head.lower().split(b"\r\n")[1:])
        keyed = fields.get(b"authorization", b"")[7:] if self.bearer else fields.get(b"x-api-key")
        self.unkeyed += keyed != KEY.encode()
        if peer.head.startswith(b"GET"):
            self._plain(peer, {"data": [{"id": "demo-7b"}]})
        elif not json.loads(peer.body)["stream"]:
            self._plain(peer, made.body_of(self.endpoint, "Hi", 8))
        else:
            self._stream(peer, fields.get(b"x-request-id", b"").decode())

    def _plain(self, peer: Any, value: dict[str, Any]) -> None:
        raw = json.dumps(value).encode()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(raw), raw))

    def _stream(self, peer: Any, request_id: str) -> None:
        draw = random.Random(request_id)
        n = draw.randint(2, 30)
        events = self.answers(n)
        tokens = [i for i, e in enumerate(events) if b'_delta","text":"' in e or e.startswith(b"event: response.output_text.delta")]
        spans: dict[str, tuple[float, float]] = {}
        peer.send(HEAD)
        # What ends a stream follows its last token in one write: small segments without end would wait in the service's
        # own TCP for acknowledgements, which a reader that leaves the socket alone gives late.
        parts = [*events[: tokens[-1]], b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in events[tokens[-1] :]) + b"0\r\n\r\n"]
        for i, part in enumerate(parts):
            time.sleep(draw.choice((0.003, 0.005, 0.008)))
            begun = time.monotonic()
            peer.send(part if i == tokens[-1] else b"%x\r\n%s\r\n" % (len(part), part))
            if i == tokens[0]:
                spans["first"] = (begun, time.monotonic())
            if i == tokens[-1]:
                spans["last"] = (begun, time.monotonic())
        self.record[request_id] = {"events": n, "tokens": n * 3 // 2, **spans}


def slack_s(rows: list[dict[str, str]], record: dict[str, Any], column: str, which: str) -> float:
    """By how much one start of the run must miss some row's span, in seconds; 0 or less when it fits all."""
    starts = [(span[0] - float(r[column]), span[1] - float(r[column]))
              for r in rows for span in [record[r["request_id"]][which]]]  # fmt: skip
    return max(low for low, _ in starts) - min(high for _, high in starts)


@pytest.mark.parametrize(
    ("endpoint", "auth"), [("messages", "auto"), ("messages", "bearer"), ("responses", "auto")]
)
def test_times_and_counts_are_those_of_the_service(run_bench: Any, endpoint: str, auth: str) -> None:
    service = Service(endpoint, auth)
    with fake.FakeServer(service) as server:
        config = {
            "model": "demo-7b",
            "base_url": server.url,
            "slo": {"ttft_deadline_ms": 800, "tpot_deadline_ms": 100, "p95_target_ms": 4000},
            "loadgen": {"target_qps": 25, "duration_sec": 2, "input_len_range": [5, 20], "output_len_mu": 3.0},
            "sweep": {"qps": [25], "warmup_sec": 0.2, "drain_limit_sec": 10},
            "target": {"endpoint": endpoint, "auth": auth, "pin_length": False},
            "client": {"read": "auto", "prompt_sample_ratio": 0.5, "drain_interval_ms": 50},
        }
        ran = run_bench(config=config, environment={"BENCH_API_KEY": KEY})
    rows = ran.rows()
    assert rows and {row["status"] for row in rows} == {"ok"}, ran.err[-2000:]
    assert ran.run()["problems"] == [] and ran.run()["target"]["endpoint"] == endpoint
    assert service.unkeyed == 0
    for row in rows:
        truth = service.record[row["request_id"]]
        assert (int(row["chunks"]), int(row["output_tokens"])) == (truth["events"], truth["tokens"])
        assert row["output_tokens_source"] == "usage"
    assert KEY not in ran.out + ran.err
    assert all(KEY.encode() not in path.read_bytes() for path in ran.run_dir.rglob("*") if path.is_file())
    # A first read that held several events gives a bound, not a time: it is flagged.
    exact = [row for row in rows if row["clock"] == "kernel" and "first_read_bound" not in row["flags"]]
    if exact:
        assert {row["read_mode"] for row in exact} == {"prompt", "lazy"}
        # Kernel stamps are taken while the service writes; 1 ms for the two clocks that are tied together.
        assert slack_s(exact, service.record, "first_token_s", "first") < 0.001
        assert slack_s(exact, service.record, "last_token_s", "last") < 0.001
    assert len(exact) > len(rows) / 2 or {row["clock"] for row in rows} != {"kernel"}
