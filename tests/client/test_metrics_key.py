"""A metrics page that wants the key gets it when it is the service's own, after it has refused, and never otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bench.client.endpoint import page_headers
from bench.client.metrics_page import fetch, fields

KEY = "sk-test-metrics-0815"
PAGE = "llamacpp:requests_processing 3\nllamacpp:requests_deferred 2\n"
CHAT = "/chat/completions"


@pytest.mark.parametrize(
    ("page", "base", "sent"),
    [
        ("http://127.0.0.1:8000/metrics", "http://127.0.0.1:8000/v1", True),
        ("http://LLM.example/metrics", "http://llm.example:80/v1", True),
        ("https://llm.example/metrics", "https://llm.example:443", True),
        ("http://[::1]:8000/metrics", "http://[::1]:8000/v1", True),
        ("http://127.0.0.1:8001/metrics", "http://127.0.0.1:8000/v1", False),  # another port: another program
        ("http://llm.example/metrics", "https://llm.example/v1", False),  # in the clear
        ("http://llm.example.evil/metrics", "http://llm.example/v1", False),
        ("http://llm.example@evil/metrics", "http://llm.example/v1", False),
        ("http://127.0.0.1:99999/metrics", "http://127.0.0.1:8000/v1", False),
        ("", "http://127.0.0.1:8000/v1", False),
        ("http://127.0.0.1:8000/metrics", "", False),
    ],
)
def test_the_key_is_for_the_same_scheme_host_and_port(page: str, base: str, sent: bool) -> None:
    assert page_headers(page, base, KEY, CHAT) == ({"Authorization": f"Bearer {KEY}"} if sent else {})
    assert page_headers(page, base, None, CHAT) == {}


def test_the_key_goes_as_in_a_request() -> None:
    page, base = "http://h:1/metrics", "http://h:1/v1"
    assert page_headers(page, base, KEY, "/messages") == {"x-api-key": KEY}
    assert page_headers(page, base, KEY, CHAT, "x-api-key") == {"x-api-key": KEY}


@pytest.fixture
def locked() -> Iterator[tuple[str, list[str | None]]]:
    """A page that wants the key, as llama.cpp's with --api-key; and the keys that it was shown."""
    shown: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown.append(self.headers["Authorization"])
            if shown[-1] == f"Bearer {KEY}":
                self.send_response(200)
                self.send_header("Content-Length", str(len(PAGE)))
                self.end_headers()
                self.wfile.write(PAGE.encode())
            else:
                self.send_error(401)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", shown
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_a_locked_page_is_read_with_the_key_after_it_refused(locked: tuple[str, list[str | None]]) -> None:
    url, shown = locked
    page = f"{url}/metrics"
    found = fields(fetch(page, key_headers=page_headers(page, f"{url}/v1", KEY, CHAT)))
    assert (found["running"], found["waiting"]) == (3.0, 2.0)
    assert shown == [None, f"Bearer {KEY}"]
    with pytest.raises(OSError, match="401"):
        fetch(page)
    with pytest.raises(OSError, match="401") as error:
        fetch(page, key_headers={"Authorization": "Bearer another-key"})
    assert "another-key" not in str(error.value)
