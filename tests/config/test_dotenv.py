"""`.env` lines, read as a shell would read plain assignments."""



from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.config import ConfigError
from bench.config.dotenv import parse_dotenv, read_environment


@pytest.mark.parametrize(("line", "value"), [
    ("A=x", "x"), ("export A=x", "x"), ("  A = x  ", "x"), ("A=", ""), ("A=x # note", "x"), ("A=x#y", "x#y"), ("A= # note", ""),
    ("A='a # b'", "a # b"), ('A="a # b"', "a # b"), ('A="a\\nb"', "a\nb"), ("A='a\\nb'", "a\\nb"), ('A="say \\"hi\\""', 'say "hi"'),
    ("A=$HOME", "$HOME"), ("A=a=b", "a=b"), ("A='x' # note", "x"), ('A="x"  ', "x"), ("A=x y", "x y"), ("A=x\r", "x"),
])  # fmt: skip
def test_lines(line, value):
    assert parse_dotenv(line, Path(".env")) == ({"A": value}, [])


@pytest.mark.parametrize("line", ["A", "A='x", 'A="x', "1A=x", "A B=x", "=x", "A='x'y", 'A="x" y'])
def test_damaged_lines_are_named_and_not_shown(line):
    values, (problem,) = parse_dotenv(f"# first\nOK=1\n{line}\n", Path(".env"))
    assert values == {"OK": "1"}
    assert (problem.id, problem.line) == ("CFG-015", 3)
    assert len(line) < 3 or line not in problem.text()


def test_blank_lines_comments_and_a_byte_order_mark():
    assert parse_dotenv("\ufeffA=1\n\n  # c\nA=2\r\n", Path(".env")) == ({"A": "2"}, [])


@settings(max_examples=300)
@given(
    st.text(
        alphabet=st.characters(
            blacklist_characters="'\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029", blacklist_categories=("Cs",)
        ),
        max_size=40,
    )
)
def test_single_quotes_keep_any_text(value):
    assert parse_dotenv(f"A='{value}'", Path(".env")) == ({"A": value}, [])


@settings(max_examples=300)
@given(st.text(max_size=80))
def test_any_text_is_read_or_reported(text):
    values, problems = parse_dotenv(text, Path(".env"))
    assert all(name.isidentifier() for name in values)
    assert all(problem.id == "CFG-015" for problem in problems)


def test_reading(tmp_path):
    assert dict(read_environment(tmp_path, {"A": "1"})) == {"A": "1"}
    (tmp_path / ".env").write_text("A=2\nB=3\n", encoding="utf-8")
    env = read_environment(tmp_path, {"A": "1"})
    assert dict(env) == {"A": "1", "B": "3"}
    assert (env.origin("A"), env.origin("B")) == ("environment A", ".env B")
    assert dict(read_environment(tmp_path, {"A": ""}))["A"] == "2"  # empty is not set
    (tmp_path / ".env").write_bytes(b"A=\xff\n")
    with pytest.raises(ConfigError, match="CFG-015"):
        read_environment(tmp_path, {})
