"""Streams of OpenAI `responses` and Anthropic `messages`, event by event, as their references show them.

Each function gives the list of events (bytes, with `event:` lines), for tests that cut, frame and replay them.
"""
from __future__ import annotations

import json
from typing import Any


def event(obj: dict[str, Any]) -> bytes:
    """One event: its type is in the `event:` line and in the JSON."""
    return b"event: %s\ndata: %s\n\n" % (obj["type"].encode(), json.dumps(obj, separators=(",", ":")).encode())


def messages_start(model: str = "demo-7b", **usage: int) -> bytes:
    message = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": model, "stop_reason": None,
               "stop_sequence": None, "usage": {"input_tokens": 25, "output_tokens": 1, **usage}}  # fmt: skip
    return event({"type": "message_start", "message": message})


PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def messages_block(index: int, block: dict[str, Any], *deltas: dict[str, Any]) -> list[bytes]:
    return [
        event({"type": "content_block_start", "index": index, "content_block": block}),
        *(event({"type": "content_block_delta", "index": index, "delta": delta}) for delta in deltas),
        event({"type": "content_block_stop", "index": index}),
    ]


def messages_text(index: int, *texts: str) -> list[bytes]:
    return messages_block(index, {"type": "text", "text": ""}, *({"type": "text_delta", "text": t} for t in texts))


def messages_thinking(index: int, *texts: str) -> list[bytes]:
    deltas = [{"type": "thinking_delta", "thinking": t} for t in texts]
    return messages_block(index, {"type": "thinking", "thinking": "", "signature": ""}, *deltas,
                          {"type": "signature_delta", "signature": "c2ln"})  # fmt: skip


def messages_tool(index: int, name: str, *parts: str) -> list[bytes]:
    return messages_block(index, {"type": "tool_use", "id": "toolu_1", "name": name, "input": {}},
                          {"type": "input_json_delta", "partial_json": ""},
                          *({"type": "input_json_delta", "partial_json": p} for p in parts))  # fmt: skip


def messages_end(output_tokens: int, reason: str = "end_turn") -> list[bytes]:
    delta = {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None},
             "usage": {"output_tokens": output_tokens}}  # fmt: skip
    return [event(delta), event({"type": "message_stop"})]


def messages_answer(tokens: int) -> list[bytes]:
    """A whole good answer of so many text deltas, which reports three tokens for each two of them."""
    texts = [f" w{i}" for i in range(tokens)]
    return [messages_start(), PING, *messages_text(0, *texts), *messages_end(tokens * 3 // 2, "max_tokens")]


class Responses:
    """Events of one `responses` stream, numbered as they are made."""

    def __init__(self, model: str = "demo-7b") -> None:
        self.model, self.number = model, 0

    def event(self, kind: str, **more: Any) -> bytes:
        obj = {"type": kind, "sequence_number": self.number, **more}
        self.number += 1
        return event(obj)

    def response(self, status: str, **more: Any) -> dict[str, Any]:
        return {"id": "resp_1", "object": "response", "status": status, "model": self.model, "error": None,
                "incomplete_details": None, "output": [], "usage": None, **more}  # fmt: skip

    def start(self) -> list[bytes]:
        return [self.event("response.created", response=self.response("in_progress")),
                self.event("response.in_progress", response=self.response("in_progress"))]  # fmt: skip

    def reasoning(self, index: int, *texts: str) -> list[bytes]:
        item = {"id": "rs_1", "type": "reasoning", "summary": []}
        part = {"item_id": "rs_1", "output_index": index, "summary_index": 0}
        return [
            self.event("response.output_item.added", output_index=index, item=item),
            *(self.event("response.reasoning_summary_text.delta", **part, delta=t) for t in texts),
            self.event("response.reasoning_summary_text.done", **part, text="".join(texts)),
            self.event("response.output_item.done", output_index=index, item=item),
        ]

    def text(self, index: int, *texts: str) -> list[bytes]:
        item = {"id": "msg_1", "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        part = {"item_id": "msg_1", "output_index": index, "content_index": 0}
        empty = {"type": "output_text", "text": "", "annotations": []}
        return [
            self.event("response.output_item.added", output_index=index, item=item),
            self.event("response.content_part.added", **part, part=empty),
            *(self.event("response.output_text.delta", **part, delta=t, logprobs=[]) for t in texts),
            self.event("response.output_text.done", **part, text="".join(texts)),
            self.event("response.content_part.done", **part, part={**empty, "text": "".join(texts)}),
            self.event("response.output_item.done", output_index=index,
                       item={**item, "content": [{**empty, "text": "".join(texts)}]}),
        ]  # fmt: skip

    def tool(self, index: int, name: str, *parts: str) -> list[bytes]:
        item = {"id": "fc_1", "type": "function_call", "call_id": "call_1", "name": name, "arguments": ""}
        where = {"item_id": "fc_1", "output_index": index}
        return [
            self.event("response.output_item.added", output_index=index, item=item),
            *(self.event("response.function_call_arguments.delta", **where, delta=p) for p in parts),
            self.event("response.function_call_arguments.done", **where, arguments="".join(parts)),
        ]

    def usage(self, output_tokens: int, cached: int = 0) -> dict[str, Any]:
        return {"input_tokens": 25, "input_tokens_details": {"cached_tokens": cached}, "output_tokens": output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 25 + output_tokens}  # fmt: skip

    def end(self, output_tokens: int, status: str = "completed", **more: Any) -> bytes:
        response = self.response(status, usage=self.usage(output_tokens), **more)
        return self.event(f"response.{status}", response=response)


def responses_answer(tokens: int) -> list[bytes]:
    """A whole good answer of so many text deltas, which reports three tokens for each two of them."""
    made = Responses()
    texts = [f" w{i}" for i in range(tokens)]
    cut = {"incomplete_details": {"reason": "max_output_tokens"}}
    return [*made.start(), *made.text(0, *texts), made.end(tokens * 3 // 2, "incomplete", **cut)]


def body_of(kind: str, text: str, tokens: int) -> dict[str, Any]:
    """The answer that is not streamed."""
    if kind == "messages":
        return {"id": "msg_1", "type": "message", "role": "assistant", "model": "demo-7b",
                "content": [{"type": "text", "text": text}], "stop_reason": "end_turn", "stop_sequence": None,
                "usage": {"input_tokens": 25, "output_tokens": tokens}}  # fmt: skip
    made = Responses()
    item = {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": text, "annotations": []}]}  # fmt: skip
    return made.response("completed", output=[item], usage=made.usage(tokens))
