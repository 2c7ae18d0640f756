"""Base URLs as people paste them, and keys that no header can carry."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.client.endpoint import check_key, parse_base_url
from bench.client.errors import ChannelError

CHAT = "/chat/completions"

GOOD = {
    # base URL: URL of the requests
    "http://127.0.0.1:8000": "http://127.0.0.1:8000/v1/chat/completions",
    "http://127.0.0.1:8000/": "http://127.0.0.1:8000/v1/chat/completions",
    "http://127.0.0.1:8000/v1": "http://127.0.0.1:8000/v1/chat/completions",
    "http://127.0.0.1:8000/v1/": "http://127.0.0.1:8000/v1/chat/completions",
    "http://127.0.0.1:8000/v1//": "http://127.0.0.1:8000/v1/chat/completions",
    "https://gateway.example/api": "https://gateway.example/api/v1/chat/completions",
    "https://gateway.example/api/": "https://gateway.example/api/v1/chat/completions",
    "https://gateway.example/api/v3": "https://gateway.example/api/v3/chat/completions",
    "https://gateway.example/v1beta/openai/": "https://gateway.example/v1beta/openai/chat/completions",
    "https://gateway.example/v1/chat/completions": "https://gateway.example/v1/chat/completions",
    "https://gateway.example/chat/completions/": "https://gateway.example/v1/chat/completions",
    "HTTP://Gateway.Example:80/v1": "http://gateway.example/v1/chat/completions",
    "https://gateway.example:443": "https://gateway.example/v1/chat/completions",
    "https://gateway.example:8443": "https://gateway.example:8443/v1/chat/completions",
    "http://[::1]:8000/v1": "http://[::1]:8000/v1/chat/completions",
    "http://127.0.0.1:1/case/NAME": "http://127.0.0.1:1/case/NAME/v1/chat/completions",
    "http://b\u00fccher.example": "http://xn--bcher-kva.example/v1/chat/completions",
    "http://my_host-1:8000": "http://my_host-1:8000/v1/chat/completions",
    "http://h/vllm": "http://h/vllm/v1/chat/completions",
}


@pytest.mark.parametrize("text", GOOD)
def test_requests_go_to(text: str) -> None:
    endpoint = parse_base_url(text)
    assert endpoint.url(CHAT) == GOOD[text]
    assert endpoint.target(CHAT) == "/" + GOOD[text].split("/", 3)[3]
    assert endpoint.url("models") == GOOD[text].removesuffix(CHAT) + "/models"
    # the normalised form means the same
    assert parse_base_url(endpoint.url()).url(CHAT) == GOOD[text]


BAD = {
    # base URL: a part of the reason
    "": "is empty",
    "   ": "is empty",
    " http://h": "spaces or a newline around",
    "http://h\n": "spaces or a newline around",
    '"http://h"': "quotes around",
    "http://a b/": "a space",
    "http://<host>/": "a placeholder",
    "127.0.0.1:8000": "no scheme",
    "localhost:8000/v1": "no scheme",
    "ftp://h": "scheme 'ftp'",
    "ws://h": "scheme 'ws'",
    "http://": "no host",
    "http:///v1": "no host",
    "http://user:pw@h": "user or password",
    "https://h/api?utm_source=x&utm_medium=y": "tracking parameters",
    "https://h/v1?key=abc": "a query string",
    "https://h/v1?": "a query string",
    "https://h/v1#top": "a fragment",
    "http://h:0": "port 0",
    "http://h:99999": "cannot be read",
    "http://h:port": "cannot be read",
    "http://[::1": "cannot be read",
    "http://-h/": "cannot be looked up",
    "http://h..x/": "cannot be looked up",
    "http://h/a\\b": "a space, a control character",
    "http://h/\u00fc": "characters in its path",
}


@pytest.mark.parametrize("text", BAD)
def test_refused_with_the_reason_and_a_fix(text: str) -> None:
    with pytest.raises(ChannelError) as caught:
        parse_base_url(text)
    assert caught.value.code == "CH-URL"
    assert BAD[text] in caught.value.message
    assert caught.value.fix
    assert "pw" not in str(caught.value) and "abc" not in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=40), st.text("htps:/[]@?#.%19v a-", max_size=40).map(lambda tail: "http://" + tail)))
def test_any_text_is_an_endpoint_or_a_channel_error(text: str) -> None:
    try:
        endpoint = parse_base_url(text)
    except ChannelError:
        return
    assert endpoint.target(CHAT).isascii() and " " not in endpoint.target(CHAT)
    assert 0 < endpoint.port < 65536 and endpoint.host


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (" sk-1", "a space"),
        ("sk-1\n", "a newline"),
        ("sk-1\r", "a carriage return"),
        ("sk\t1", "a tab"),
        ('"sk-1"', "a quote"),
        ("'sk-1'", "a quote"),
        ("Bearer sk-1", "the word Bearer"),
        ("sk-\u00fc", "outside printable ASCII"),
        ("sk-\u200b1", "outside printable ASCII"),
        ("${BENCH_API_KEY}", "a placeholder"),
        ("<your-key>", "a placeholder"),
    ],
)
def test_keys_that_cannot_work(key: str, found: str) -> None:
    with pytest.raises(ChannelError) as caught:
        check_key(key, needed=False)
    assert caught.value.code == "CH-KEY-FORM"
    assert found in caught.value.message and f"{len(key)} characters" in caught.value.message
    assert "sk-1" not in str(caught.value) and "your-key" not in str(caught.value)


def test_absent_keys() -> None:
    check_key(None, needed=False)
    check_key("sk-good_1.2", needed=True)
    for key, found in ((None, "no API key is set"), ("", "the API key is empty")):
        with pytest.raises(ChannelError, match=found) as caught:
            check_key(key, needed=True)
        assert caught.value.code == "CH-KEY-MISSING" and "export" in caught.value.fix
