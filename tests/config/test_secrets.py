"""The API key is found where it may be, refused where it may not, and never shown."""



from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.config import ConfigError, api_key, api_key_from_environment, load_config
from bench.config.dotenv import Environment
from bench.config.schema import Config
from bench.config.secrets import damage, is_secret_name

KEY = "tk-Zq8vN4xW1yB7cD3e"
OK = {"model": "m", "base_url": "http://127.0.0.1:8000"}


def pieces(key: str, length: int = 4) -> set[str]:
    """All parts of `length` characters; none may be shown."""
    return {key[i : i + length] for i in range(len(key) - length + 1)}


def refused(tmp_path, data, env=None) -> list:
    path = tmp_path / "c.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path, env=env or {})
    return caught.value.problems


@pytest.mark.parametrize("place", [
    {"api_key": KEY}, {"API-Key": KEY}, {"target": {"api_key": KEY}}, {"loadgen": {"apikey": KEY}},
    {"target": {"extra_headers": {"Authorization": f"Bearer {KEY}"}}}, {"target": {"extra_headers": {"authorization": KEY}}},
    {"target": {"extra_headers": {"x-api-key": KEY}}}, {"target": {"extra_headers": {"Proxy-Authorization": KEY}}},
    {"target": {"extra_headers": {"X-Anything": f"Bearer {KEY}"}}}, {"target": {"extra_headers": {"Cookie": KEY}}},
    {"target": {"extra_body": {"deep": [{"api_key": KEY}]}}}, {"BENCH_API_KEY": KEY}, {"nested": {"openai_api_key": KEY}},
    {"base_url": f"http://user:{KEY}@host"}, {"target": {"proxy": f"http://{KEY}@host:1"}}, {"api_key": [KEY]}, {"api_key": {"a": KEY}},
    {"api_key": 12345678901234},
])  # fmt: skip
def test_a_key_in_the_config_is_refused_without_showing_it(tmp_path, place):
    problems = refused(tmp_path, {**OK, **place})
    assert "CFG-010" in [p.id for p in problems]
    shown = "\n".join(p.text() + json.dumps(p.to_dict()) for p in problems)
    assert not any(piece in shown for piece in pieces(KEY, 5))
    assert "12345678901234" not in shown


@pytest.mark.parametrize("place", [
    {"model": KEY}, {"model": f"x{KEY}y"}, {"target": {"extra_headers": {"X-Route": KEY}}}, {KEY: 1}, {"loadgen": {KEY: {"a": 1}}},
    {"target": {"extra_body": {"note": ["a", KEY]}}}, {"base_url": f"http://h/{KEY}"}, {"loadgen": {"trace_file": KEY}},
])  # fmt: skip
def test_a_copy_of_the_key_of_the_environment_is_found_anywhere(tmp_path, place):
    problems = refused(tmp_path, {**OK, **place}, env={"TAOTOKEN_API_KEY": KEY})
    assert "CFG-010" in [p.id for p in problems]
    shown = "\n".join(p.text() for p in problems)
    assert KEY not in shown


def test_a_key_of_another_form_in_a_wrong_place_is_not_shown(tmp_path):
    problems = refused(tmp_path, {**OK, "loadgen": {"target_qps": KEY}, "scheduler": {"policy": KEY}})
    assert not any(piece in p.text() for p in problems for piece in pieces(KEY, 5))


def test_harmless_names_are_no_secrets(tmp_path):
    for name in ("max_tokens", "tokens_per_word", "api_key_file", "stop_token_ids", "keyboard", "x-request-class"):
        assert not is_secret_name(name)
    path = tmp_path / "c.json"
    path.write_text(
        json.dumps({**OK, "target": {"api_key_file": "k.txt", "extra_body": {"stop_token_ids": [1]}}}), encoding="utf-8"
    )
    load_config(path, env={})


# -- where the key comes from -------------------------------------------------------------


def test_order_of_the_places(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(f"key-of-file-{name}\n", encoding="utf-8")
    config = Config.model_validate({"target": {"api_key_file": str(tmp_path / "c")}})
    env = {
        "BENCH_API_KEY": "one",
        "BENCH_API_KEY_FILE": str(tmp_path / "a"),
        "TAOTOKEN_API_KEY": "two",
        "TAOTOKEN_API_KEY_FILE": str(tmp_path / "b"),
    }
    expected = ["one", "key-of-file-a", "two", "key-of-file-b", "key-of-file-c"]
    for value in expected:
        assert api_key(config, env) == value
        if env:
            env.pop(next(iter(env)))
    assert api_key(Config(), {}) is None
    assert api_key(Config(), {"BENCH_API_KEY": ""}) is None


def test_the_environment_goes_before_dotenv():
    env = Environment({"TAOTOKEN_API_KEY": "real"}, {"BENCH_API_KEY": "dot"}, None)
    assert api_key_from_environment(env) == "real"
    assert api_key_from_environment(Environment({}, {"BENCH_API_KEY": "dot"}, None)) == "dot"
    assert "dot" not in repr(env) and "real" not in repr(env)


def test_the_embedded_engine_gets_no_key():
    assert api_key(Config.model_validate({"engine": {"embedded": True}}), {"BENCH_API_KEY": KEY}) is None


@pytest.mark.parametrize(("url", "gets"), [
    ("http://127.0.0.1:8000/v1", False), ("http://localhost:8000", False), ("http://[::1]:8000/v1", False),
    ("http://127.8.0.1", False), ("", False), ("https://api.example.com/v1", True), ("http://engine:8000/v1", True),
    ("http://10.0.0.7:8000/v1", True), ("http://localhost.example.com", True), ("http://127.0.0.1.example.com", True),
])
def test_a_service_in_place_of_the_embedded_engine_gets_the_key(url: str, gets: bool):
    """As `bench check --base-url` does: an address that was named is asked with the key that there is."""
    config = Config.model_validate({"base_url": url, "engine": {"embedded": True}})
    assert api_key(config, {"BENCH_API_KEY": KEY}) == (KEY if gets else None)
    assert api_key(config, {}) is None


@pytest.mark.parametrize(("text", "kind"), [
    (f" {KEY}", "1 blank character at the start"), (f"{KEY}  ", "2 blank characters at the end"), (f"{KEY}\n", "a line break"),
    (f'"{KEY}"', "a quote"), (f"'{KEY}'", "a quote"), (f"Bearer {KEY}", "the word Bearer"), (f"{KEY[:5]} {KEY[5:]}", "a blank inside"),
    (f"{KEY}\u200b", "outside ASCII"), (f"{KEY[:4]}\x01{KEY[4:]}", "a control character"), (f"\u201c{KEY}\u201d", "a quote"), ("   ", "nothing but blanks"),
])  # fmt: skip
def test_damaged_keys_are_told_by_length_and_kind(text, kind):
    with pytest.raises(ConfigError) as caught:
        api_key(Config(), {"BENCH_API_KEY": text})
    (problem,) = caught.value.problems
    assert problem.id == "CFG-013"
    assert kind in problem.text() and f"a key of {len(text)} characters" in problem.text()
    assert not any(piece in problem.text() for piece in pieces(KEY))


@settings(max_examples=300)
@given(st.text(min_size=1, max_size=60))
def test_a_key_is_taken_as_it_stands_or_refused_without_a_part_of_it(text):
    try:
        assert api_key(Config(), {"BENCH_API_KEY": text}) == text
        assert text.isascii() and text.strip() == text and text.isprintable()
    except ConfigError as error:
        assert damage(text)
        # Words of the message itself may stand in the text by chance: compare with the message for another text of that length.
        other = ConfigError(error.problems)
        assert len(text) < 12 or text.strip() not in str(other)


def test_key_files(tmp_path):
    path = tmp_path / "key"
    config = Config.model_validate({"target": {"api_key_file": str(path)}})
    for raw, value in ((KEY, KEY), (f"{KEY}\n", KEY), (f"{KEY}\r\n", KEY), (f"\ufeff{KEY}\n", KEY)):
        path.write_bytes(raw.encode())
        assert api_key(config, {}) == value
    for raw, problem, words in (
        (b"", "CFG-014", "empty"), (b"\n", "CFG-014", "empty"), (b"\xff\xfe\x00", "CFG-014", "not text"), (b"x" * 20_000, "CFG-014", "larger"),
        (f"{KEY}\n\n".encode(), "CFG-013", "line break"), (f"BENCH_API_KEY={KEY} ".encode(), "CFG-013", "blank"),
    ):  # fmt: skip
        path.write_bytes(raw)
        with pytest.raises(ConfigError) as caught:
            api_key(config, {})
        assert [p.id for p in caught.value.problems] == [problem]
        assert words in str(caught.value)
        assert not any(piece in str(caught.value) for piece in pieces(KEY))
    path.unlink()
    with pytest.raises(
        ConfigError, match=r"CFG-014 target\.api_key_file names a file which cannot be read \(No such file"
    ):
        api_key(config, {})


@pytest.mark.parametrize("place", ["BENCH_API_KEY_FILE", "TAOTOKEN_API_KEY_FILE", "target.api_key_file"])
def test_a_key_in_the_place_of_its_file_is_not_shown(tmp_path, place):
    path = tmp_path / "c.json"
    path.write_text(
        json.dumps({**OK, **({"target": {"api_key_file": "Zq8vN4xW1yB7"}} if "." in place else {})}), encoding="utf-8"
    )
    resolved = load_config(path, env={})
    with pytest.raises(ConfigError) as caught:
        api_key(resolved.config, {} if "." in place else {place: "Zq8vN4xW1yB7"})
    assert "12 characters" in str(caught.value)
    assert not any(piece in str(caught.value) + json.dumps(resolved.masked()) for piece in pieces("Zq8vN4xW1yB7"))
