"""Cost of the answer reader alone, without sockets: CPU time for each token event of about 200 bytes.

Usage: `python -m benchmarks.parser [--events N]`; a table on standard error, one line of JSON on standard output.
Input: generated answers (200 tokens a stream, one event a chunk, usage and [DONE] at the end).
Does not: measure reads, gevent or Locust (benchmarks/client.py does).
"""
from __future__ import annotations

import argparse
import json
import sys
import time

import h11
import orjson

from bench.client.answer import AnswerReader
from bench.client.http1 import ResponseParser

TOKENS = 200


def answer_pieces(tokens: int = TOKENS) -> tuple[list[bytes], bytes]:
    """Return the token events of one answer as segments (head and role event in the first), and its end."""

    def chunk(text: str) -> bytes:
        data = f"data: {text}\n\n".encode()
        return b"%x\r\n%s\r\n" % (len(data), data)

    def event(delta: dict[str, str], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        body = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1_700_000_000,
                "model": "demo-7b", "choices": [choice]}
        return chunk(orjson.dumps(body).decode())

    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = [head + event({"role": "assistant", "content": ""})]
    pieces += [event({"content": f" token{i % 97}"}) for i in range(tokens)]
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": tokens + 9}}
    end = event({}, "length") + chunk(orjson.dumps(usage).decode()) + chunk("[DONE]") + b"0\r\n\r\n"
    return pieces, end


def prompt_cost_s(answers: int) -> float:
    """CPU seconds per token event when every event is its own read."""
    pieces, end = answer_pieces()
    started = time.process_time()
    for _ in range(answers):
        reader = AnswerReader()
        at = 0.0
        for piece in pieces:
            at += 0.01
            reader.feed(piece, at)
        reader.feed(end, at)
        assert reader.outcome().output_tokens == TOKENS
    return (time.process_time() - started) / (answers * TOKENS)


def lazy_cost_s(answers: int, heap_events: int, *, whole_answer: bool) -> float:
    """CPU seconds per token event when events come in heaps; `whole_answer` includes head, first output and end."""
    pieces, end = answer_pieces()
    heaps = [b"".join(pieces[i : i + heap_events]) for i in range(2, TOKENS + 1, heap_events)]
    started = time.process_time()
    events = 0
    reader = AnswerReader()
    reader.feed(pieces[0] + pieces[1], 0.0)
    for number in range(answers):
        if whole_answer and number:
            reader = AnswerReader()
            reader.feed(pieces[0] + pieces[1], 0.0)
        at = 0.0
        for heap in heaps:
            at += 0.1
            reader.feed_lazy(heap, at)
        events += TOKENS - 1
        if whole_answer:
            reader.feed_lazy(end, at)
            assert reader.outcome().chunks == TOKENS
    if not whole_answer:
        assert reader.outcome().chunks == events + 1
    return (time.process_time() - started) / events


def framing_cost_s(answers: int) -> float:
    """CPU seconds per token event for the framing alone."""
    pieces, end = answer_pieces()
    started = time.process_time()
    for _ in range(answers):
        parser = ResponseParser()
        for piece in pieces:
            parser.receive(piece)
        parser.receive(end)
        assert parser.complete
    return (time.process_time() - started) / (answers * TOKENS)


def h11_cost_s(answers: int) -> float:
    """The same by h11, for comparison (docs/decisions/0003)."""
    pieces, end = answer_pieces()
    started = time.process_time()
    for _ in range(answers):
        conn = h11.Connection(h11.CLIENT)
        conn.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
        conn.send(h11.EndOfMessage())
        for piece in [*pieces, end]:
            conn.receive_data(piece)
            while (event := conn.next_event()) is not h11.NEED_DATA and not isinstance(event, h11.EndOfMessage):
                pass
    return (time.process_time() - started) / (answers * TOKENS)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=200_000, help="token events per measurement")
    options = parser.parse_args()
    answers = max(options.events // TOKENS, 1)
    costs = {
        "framing": min(framing_cost_s(answers) for _ in range(3)),
        "framing_h11": h11_cost_s(max(answers // 10, 1)),
        "prompt": min(prompt_cost_s(answers) for _ in range(3)),
        "lazy_heap_50": min(lazy_cost_s(answers, 50, whole_answer=False) for _ in range(3)),
        "lazy_answer_10": min(lazy_cost_s(answers, 10, whole_answer=True) for _ in range(3)),
        "lazy_answer_50": min(lazy_cost_s(answers, 50, whole_answer=True) for _ in range(3)),
    }
    pieces, _ = answer_pieces()
    result = {f"{name}_us_per_event": round(cost * 1e6, 3) for name, cost in costs.items()}
    result |= {f"{name}_events_per_cpu_s": round(1 / cost) for name, cost in costs.items()}
    result["event_bytes"] = len(pieces[1])
    for name, value in result.items():
        print(f"{name:40} {value}", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
