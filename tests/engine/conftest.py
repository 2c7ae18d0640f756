"""Helpers of the HTTP engine's tests: an engine process per config, and a raw-socket client with its own decoder.

The client shares no code with the engine or with bench.client: what the engine sends is read by a third party.
"""
from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

MODEL = "test-model"


@dataclass
class Answer:
    """One HTTP answer; `arrivals` are (monotonic seconds, event text) of a stream."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    arrivals: list[tuple[float, str]] = field(default_factory=list)
    complete: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON events, [DONE] left out."""
        return [json.loads(text) for _, text in self.arrivals if text != "[DONE]"]

    @property
    def done(self) -> bool:
        return bool(self.arrivals) and self.arrivals[-1][1] == "[DONE]"

    def texts(self) -> list[tuple[float, str]]:
        """(arrival time, text) of the events with output."""
        found = []
        for at_s, text in self.arrivals:
            choices = [] if text == "[DONE]" else json.loads(text).get("choices", [])
            for choice in choices:
                piece = choice.get("text") or choice.get("delta", {}).get("content")
                if piece:
                    found.append((at_s, piece))
        return found


class Wire:
    """A client connection that reads answers byte by byte as RFC 9112 says."""

    def __init__(self, base_url: str, timeout_s: float = 20.0) -> None:
        host, _, port = base_url.removeprefix("http://").partition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        self._data = b""
        self._at_s = 0.0

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> None:
        payload = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: engine", f"Content-Length: {len(payload)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self.socket.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + payload)

    def _more(self) -> bool:
        piece = self.socket.recv(65536)
        self._at_s = time.monotonic()
        self._data += piece
        return bool(piece)

    def _line(self) -> bytes:
        while b"\r\n" not in self._data:
            if not self._more():
                raise EOFError
        line, self._data = self._data.split(b"\r\n", 1)
        return line

    def _take(self, size: int) -> bytes:
        while len(self._data) < size:
            if not self._more():
                raise EOFError
        part, self._data = self._data[:size], self._data[size:]
        return part

    def read(self) -> Answer:
        """The next answer; `complete` is False when the connection ended inside it."""
        answer = Answer()
        try:
            answer.status = int(self._line().split()[1])
            while line := self._line():
                name, _, value = line.decode().partition(":")
                answer.headers[name.lower()] = value.strip()
            if answer.headers.get("transfer-encoding") == "chunked":
                self._read_chunks(answer)
            else:
                answer.body = self._take(int(answer.headers.get("content-length", "0")))
            answer.complete = True
        except (EOFError, ConnectionResetError):
            pass
        return answer

    def _read_chunks(self, answer: Answer) -> None:
        pending = b""
        while size := int(self._line(), 16):
            data = self._take(size)
            assert self._take(2) == b"\r\n"
            answer.body += data
            pending += data
            while b"\n\n" in pending:
                event, pending = pending.split(b"\n\n", 1)
                answer.arrivals.append((self._at_s, event.decode().removeprefix("data: ")))
        assert self._line() == b""

    def close(self) -> None:
        self.socket.close()


class Client:
    """Requests to one engine, each on a connection of its own."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def wire(self) -> Wire:
        return Wire(self.base_url)

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        wire = self.wire()
        try:
            wire.send(method, path, body, headers)
            return wire.read()
        finally:
            wire.close()

    def chat(self, words: int = 5, max_tokens: int | None = 5, *, headers: dict[str, str] | None = None,
             **more: Any) -> Answer:
        return self.call("POST", "/v1/chat/completions", self.chat_body(words, max_tokens, **more), headers)

    @staticmethod
    def chat_body(words: int = 5, max_tokens: int | None = 5, **more: Any) -> dict[str, Any]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": " ".join(["word"] * words)}],
                "stream": True, "ignore_eos": True, **more}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        return body

    def truth(self, *, clear: bool = False) -> dict[str, dict[str, Any]]:
        """The engine's records by request id."""
        answer = self.call("GET", "/debug/requests" + ("?clear=1" if clear else ""))
        rows = [json.loads(line) for line in answer.body.splitlines()]
        return {row["request_id"]: row for row in rows}

    def state(self) -> dict[str, Any]:
        return self.call("GET", "/debug/state").json

    def replica(self) -> dict[str, Any]:
        return self.state()["replicas"][0]

    def faults(self, *rules: dict[str, Any]) -> Answer:
        return self.call("POST", "/debug/faults", {"faults": list(rules)})

    def wait_for(self, check: Callable[[dict[str, Any]], bool], limit_s: float = 5.0) -> dict[str, Any]:
        """The first state of replica 0 for which `check` holds."""
        until_s = time.monotonic() + limit_s
        while not check(state := self.replica()):
            assert time.monotonic() < until_s, f"not reached within {limit_s} s: {state}"
            time.sleep(0.01)
        return state


def engine_config(**sections: Any) -> dict[str, Any]:
    """A config whose steps take about 1.5 ms: one eighth of an h100-8b."""
    config: dict[str, Any] = {
        "model": MODEL, "base_url": "http://127.0.0.1:1/v1",
        "scheduler": {"policy": "fcfs", "max_num_seqs": 64, "batch_size_cap": 64},
        "admission": {"reject_on_budget_exceed": False},
        "loadgen": {"output_len_mu": 3.0, "output_len_sigma": 0.4, "input_len_range": [10, 100],
                    "max_output_tokens": 200},
        "engine": {"embedded": True, "time_scale": 0.125, "noise_cv": 0.0, "max_model_len": 2048},
    }
    for name, changes in sections.items():
        config[name] = {**config[name], **changes} if isinstance(changes, dict) and name in config else changes
    return config


@pytest.fixture(scope="session")
def client_class() -> type[Client]:
    """The raw-socket client."""
    return Client


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Client]]:
    """serve(**sections) starts an engine with these config sections and returns its client; all end with the module."""
    from bench.commands.engine_process import start_engine

    running = []

    def start(*, api_key: str | None = None, port: int = 0, **sections: Any) -> Client:
        folder: Path = tmp_path_factory.mktemp("engine")
        path = folder / "config.json"
        path.write_text(json.dumps(engine_config(**sections)))
        key_file = None
        if api_key is not None:
            key_file = folder / "key"
            key_file.write_text(api_key + "\n")
        process = start_engine(path, api_key_file=key_file, log_path=folder / "log.txt", port=port)
        running.append((process, folder / "log.txt"))
        client = Client(process.base_url)
        client.process = process  # type: ignore[attr-defined]
        client.config_path = path  # type: ignore[attr-defined]
        return client

    yield start
    logs = []
    for process, log in running:
        process.stop()
        logs.append(log.read_text())
    assert not any("Traceback" in text for text in logs), "\n".join(logs)
