"""A config file, the environment and the command line become one config, or all problems at once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.config import ConfigError, load_config
from bench.config.dotenv import Environment
from bench.config.errors import PROBLEMS, Problem
from bench.config.explain import known_keys, nearest

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = {  # the reference config, by hand
    "scheduler": {"policy": "slack_aware", "max_num_batched_tokens": 4096, "max_num_seqs": 32, "batch_size_cap": 16,
                  "preemption_mode": "recompute", "swap_space_gb": 8, "enable_chunked_prefill": True},
    "slo": {"ttft_deadline_ms": 800, "tpot_deadline_ms": 100, "p95_target_ms": 2000, "attainment_target": 0.99},
    "admission": {"kv_reserve_ratio": 0.85, "oversubscribe_factor": 1.3, "reject_on_budget_exceed": True},
    "loadgen": {"arrival_process": "poisson", "target_qps": 20, "duration_sec": 300, "input_len_range": [100, 2000],
                "output_len_dist": "lognormal", "output_len_mu": 6.0, "output_len_sigma": 0.6},
}  # fmt: skip
OK = {"model": "m", "base_url": "http://127.0.0.1:8000"}


def write(folder: Path, text: str | dict, name: str = "c.json") -> Path:
    path = folder / name
    path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    return path


def problems_of(folder: Path, data: str | dict, name: str = "c.json", **more) -> list[Problem]:
    """All problems of a config, warnings too."""
    try:
        return load_config(write(folder, data, name), env=more.pop("env", {}), **more).warnings
    except ConfigError as error:
        return error.problems


def ids(problems: list[Problem]) -> list[str]:
    return [problem.id for problem in problems]


def test_the_tracked_reference_has_exactly_the_reference_values():
    data = json.loads((ROOT / "configs" / "scheduler_bench.json").read_text(encoding="utf-8"))
    assert {key: data[key] for key in REFERENCE} == REFERENCE
    resolved = load_config(ROOT / "configs" / "scheduler_bench.json", env={})
    for section, keys in REFERENCE.items():
        for key, value in keys.items():
            assert getattr(getattr(resolved.config, section), key) == value
    # Placeholders and the contradicting P95 are warnings, not refusals. The cap is above the naive rule alone.
    assert sorted(ids(resolved.warnings)) == ["CFG-012", "CFG-012", "CFG-026"]
    assert [p.id for p in resolved.placeholders()] == ["CFG-012", "CFG-012"]


def test_defaults_equal_the_reference():
    config = load_config(None, env={}).config.model_dump()
    for section, keys in REFERENCE.items():
        assert {key: config[section][key] for key in keys} == keys


def test_yaml_and_json_give_the_same_config(tmp_path):
    yaml_text = "model: m\nbase_url: http://h:1  # comment\nsweep:\n  qps: [5, 20]\nloadgen: {target_qps: 20}\n"
    one = load_config(write(tmp_path, yaml_text, "c.yaml"), env={})
    two = load_config(
        write(
            tmp_path, {"model": "m", "base_url": "http://h:1", "sweep": {"qps": [5, 20]}, "loadgen": {"target_qps": 20}}
        ),
        env={},
    )
    assert one.config == two.config


def test_all_problems_come_at_once_sorted_by_line(tmp_path):
    text = """{
 "modle": "x",
 "scheduler": {"batch_size_cap": 48, "max_num_seqs": "32"},
 "slo": {"attainment_target": NaN},
 "loadgen": {"input_len_range": [5], "seed": 1.5, "arrival_process": "poison"},
 "gates": [{"metric": "ttft", "operator": "=<", "value": 3}]
}"""
    found = problems_of(tmp_path, text)
    assert [(p.id, p.line) for p in found if p.severity == "error"] == [
        ("CFG-004", 2), ("CFG-005", 3), ("CFG-008", 4), ("CFG-005", 5), ("CFG-006", 5), ("CFG-007", 5), ("CFG-007", 6),
    ]  # fmt: skip
    # max_num_seqs is wrong, so the cap is not compared with its default.
    assert "CFG-020" not in ids(found)


@pytest.mark.parametrize(("data", "problem", "words"), [
    ({"modle": "x"}, "CFG-004", "did you mean model?"),
    ({"scheduler": {"max_num_seq": 3}}, "CFG-004", "did you mean scheduler.max_num_seqs?"),
    ({"target_qps": 3}, "CFG-004", "did you mean loadgen.target_qps?"),
    ({"slo": {"p99_target": 3}}, "CFG-004", "did you mean slo.p95_target_ms?"),
    ({"loadgen": {"Target-QPS": 3}}, "CFG-004", "did you mean loadgen.target_qps?"),
    ({"zzz": 1}, "CFG-004", "known here: model, base_url"),
    ({"loadgen": {"target_qps": "20"}}, "CFG-005", "remove the quotes"),
    ({"loadgen": {"duration_sec": "300s"}}, "CFG-005", "without a unit"),
    ({"loadgen": {"seed": 1.0}}, "CFG-005", "write 1"),
    ({"loadgen": {"seed": True}}, "CFG-005", "a whole number"),
    ({"loadgen": {"target_qps": True}}, "CFG-005", "a number"),
    ({"loadgen": {"duration_sec": None}}, "CFG-005", "remove the key"),
    ({"scheduler": []}, "CFG-005", "a mapping of keys"),
    ({"scheduler": {"enable_chunked_prefill": 1}}, "CFG-005", "true or false"),
    ({"sweep": {"qps": []}}, "CFG-006", "at least 1"),
    ({"sweep": {"qps": [0]}}, "CFG-006", "at least 0.0001"),
    ({"slo": {"attainment_target": 1}}, "CFG-006", "below 1"),
    ({"scheduler": {"policy": "slackaware"}}, "CFG-007", "did you mean slack_aware?"),
    ({"gates": [{"metric": "ttft", "operator": "<="}]}, "CFG-009", "gates[0].value is missing"),
    ({"classes": [{"name": "a"}]}, "CFG-009", "classes[0].share is missing"),
])  # fmt: skip
def test_single_values(tmp_path, data, problem, words):
    found = [p for p in problems_of(tmp_path, {**OK, **data}) if p.severity == "error"]
    assert ids(found) == [problem]
    assert words in found[0].text()
    assert found[0].text().startswith(f"{problem} {tmp_path}/c.json:1: ")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_json_numbers_that_are_not_finite(tmp_path, number):
    found = problems_of(tmp_path, f'{{"slo": {{"ttft_deadline_ms": {number}}}}}')
    assert "CFG-008" in ids(found)


@pytest.mark.parametrize(("text", "line", "column", "hint"), [
    ('{"model": "x",\n "slo": {"a": 1,}\n}', 2, 17, "remove the comma"),  # 1 + len(' "slo": {"a": 1,')
    ("{'model': 1}", 1, 2, "double quotes"),
    ('{"model": "a"\n "slo": {}}', 2, 2, "comma"),
    ('{"model": "a" // name\n}', 1, 15, "no comments"),
    ('{"model": "a', 1, 11, ""),
    ("{", 1, 2, ""),
])  # fmt: skip
def test_bad_json_names_line_and_column(tmp_path, text, line, column, hint):
    (problem,) = problems_of(tmp_path, text)
    assert problem.id == "CFG-002"
    # Python 3.13 points at the comma itself, one column earlier.
    assert problem.line == line and problem.column in (column, column - 1)
    assert hint in problem.text()
    assert f"c.json:{line}:" in problem.text()


@pytest.mark.parametrize(
    "text",
    [
        "model: [1\n",
        "a: b: c\n",
        "- 1\n- 2\n",
        "just text",
        "",
        "  \n",
        "a: &x [1]\nb: *x\n",
        "!!python/object:os.system {}",
        "a: !!binary xx",
        "? [1]\n: 2",
    ],
)
def test_bad_yaml(tmp_path, text):
    found = problems_of(tmp_path, text, "c.yaml")
    assert found[0].severity == "error"
    assert found[0].id in ("CFG-002", "CFG-004")


def test_doubled_keys(tmp_path):
    found = problems_of(
        tmp_path, '{"model": "a", "base_url": "http://h", "slo": {"p95_target_ms": 1, "p95_target_ms": 2}}'
    )
    assert [p.where.partition(": ")[2] for p in found if p.id == "CFG-003"] == ["slo.p95_target_ms"]
    (problem,) = (p for p in problems_of(tmp_path, "model: a\nmodel: b\n", "c.yaml") if p.id == "CFG-003")
    assert problem.line == 2


def test_unreadable_files(tmp_path):
    for path, words in ((tmp_path / "none.json", "No such file"), (tmp_path, "is a folder")):
        with pytest.raises(ConfigError) as caught:
            load_config(path, env={})
        assert ids(caught.value.problems) == ["CFG-001"]
        assert words in str(caught.value)
    (tmp_path / "b.json").write_bytes(b'{"model": "\xff\xfe"}')
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(tmp_path / "b.json", env={})


def test_a_byte_order_mark_is_no_problem(tmp_path):
    (tmp_path / "b.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(OK).encode())
    assert load_config(tmp_path / "b.json", env={}).config.model == "m"


def test_deeply_nested_text_is_refused_without_a_traceback(tmp_path):
    assert problems_of(tmp_path, "[" * 100_000)[0].id == "CFG-002"
    assert problems_of(tmp_path, '{"a":' * 5_000 + "1" + "}" * 5_000)[0].id in ("CFG-002", "CFG-004")


# -- origin and order -----------------------------------------------------------------


def test_origin_of_each_value(tmp_path):
    path = write(tmp_path, {**OK, "loadgen": {"target_qps": 5}})
    env = {
        "BENCH_BASE_URL": "http://env:1",
        "TAOTOKEN_BASE_URL": "http://other:1",
        "TAOTOKEN_MODEL_ID": "tao",
        "BENCH_MODEL": "",
    }
    resolved = load_config(path, env=env, overrides={"sweep.qps": [5.0]})
    assert resolved.config.base_url == "http://env:1"
    assert resolved.config.model == "tao"  # an empty variable is not set
    assert resolved.origin["base_url"] == "environment BENCH_BASE_URL"
    assert resolved.origin["model"] == "environment TAOTOKEN_MODEL_ID"
    assert resolved.origin["loadgen.target_qps"] == f"file {path}"
    assert resolved.origin["sweep.qps"] == "command line"
    assert resolved.origin["loadgen.seed"] == "default"
    assert load_config(path, env=env, overrides={"base_url": "http://cli:1"}).config.base_url == "http://cli:1"


def test_every_leaf_has_an_origin(tmp_path):
    resolved = load_config(write(tmp_path, {**OK, "target": {"extra_body": {"a": {"b": 1}}}}), env={})
    leaves = set()
    for name, value in resolved.config.model_dump().items():
        leaves |= {f"{name}.{key}" for key in value} if isinstance(value, dict) else {name}
    assert set(resolved.origin) == leaves


def test_the_environment_goes_before_dotenv_whatever_the_name(tmp_path):
    path = write(tmp_path, OK)
    env = Environment(
        {"TAOTOKEN_MODEL_ID": "from-env"},
        {"BENCH_MODEL": "from-file", "BENCH_BASE_URL": "http://dot:1"},
        tmp_path / ".env",
    )
    resolved = load_config(path, env=env)
    assert (resolved.config.model, resolved.config.base_url) == ("from-env", "http://dot:1")
    assert resolved.origin["base_url"] == ".env BENCH_BASE_URL"


def test_dotenv_of_the_working_folder(tmp_path, monkeypatch):
    path = write(tmp_path, OK)
    (tmp_path / ".env").write_text("export BENCH_MODEL='from dotenv'\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("BENCH_MODEL", "TAOTOKEN_MODEL_ID", "BENCH_BASE_URL", "TAOTOKEN_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    import os

    assert load_config(path).config.model == "from dotenv"
    assert load_config(path, env=os.environ).config.model == "from dotenv"
    monkeypatch.setenv("BENCH_MODEL", "real")
    assert load_config(path).config.model == "real"
    (tmp_path / ".env").write_text("this is no line\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert [p.id for p in caught.value.problems if p.severity == "error"] == ["CFG-015"]
    assert "this is no line" not in str(caught.value)


def test_problems_of_other_origins_name_them(tmp_path):
    path = write(tmp_path, OK)
    found = problems_of(tmp_path, OK, env={"BENCH_BASE_URL": "ftp://h"})
    assert found[0].text().startswith("CFG-011 environment BENCH_BASE_URL: base_url has the scheme")
    with pytest.raises(ConfigError, match="command line: loadgen.target_qps is -1"):
        load_config(path, env={}, overrides={"loadgen.target_qps": -1})


def test_the_embedded_engine_ignores_address_and_model_of_the_environment(tmp_path):
    resolved = load_config(
        write(tmp_path, {"model": "embedded", "engine": {"embedded": True}}),
        env={"BENCH_BASE_URL": "https://real.example", "BENCH_MODEL": "big"},
    )
    assert (resolved.config.base_url, resolved.config.model) == ("", "embedded")
    assert "CFG-016" in ids(resolved.warnings)


@pytest.mark.parametrize(("url", "words"), [
    ("https://h/api?utm_source=x&utm_medium=csdn", "tracking parameters"), ("https://h/api?x=1", "query string"),
    ("h:8000", "scheme"), ("localhost/v1", "no scheme"), ("http://", "no host"), ("ftp://h", "scheme"),
    ("http://h:99999", "no address"), ("http://h:0", "port 0"), ("http://h/#a", "fragment"), ("http://h /x", "blanks"),
    ("http://h\n", "blanks"), ("http://h/v1/chat/completions", "endpoint"), ("http://[::1", "no address"),
])  # fmt: skip
def test_addresses_that_are_refused(tmp_path, url, words):
    found = [p for p in problems_of(tmp_path, {"model": "m", "base_url": url}) if p.severity == "error"]
    assert ids(found) == ["CFG-011"]
    assert words in found[0].found


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "https://taotoken.net/api", "http://h/v1/", "http://[::1]:8000/v1", "HTTPS://H"]
)
def test_addresses_that_are_taken(tmp_path, url):
    assert "CFG-011" not in ids(problems_of(tmp_path, {"model": "m", "base_url": url}))


def test_masked_hides_header_values_and_is_json(tmp_path):
    resolved = load_config(write(tmp_path, {**OK, "target": {"extra_headers": {"x-route": "blue"}}}), env={})
    text = json.dumps(resolved.masked(), allow_nan=False)
    assert "blue" not in text and "x-route" in text


def test_the_schema_key_for_editors_is_allowed(tmp_path):
    assert ids(problems_of(tmp_path, {"$schema": "./schema.json", **OK})) == ["CFG-026"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"slo": {"ttft_deadline_ms": 1%s}}' % ("0" * 400), "c.json"),
        ('{"loadgen": {"seed": 1%s}}' % ("0" * 5000), "c.json"),
        ('{"loadgen": {"seed": 18446744073709551616}}', "c.json"),
        ('{"model": "\\ud800", "\\u001b[31m": 1}', "c.json"),
        ('{"target": {"extra_body": {"a": "\\ud800"}, "api_key_file": "a\\u0000b"}}', "c.json"),
        ("1: 2\ntrue: x\nnull: {}\n", "c.yaml"),
        ("loadgen: {1: 2}\nsweep: !!set {a}\nmodel: 2024-01-01\n", "c.yaml"),
        ("gates: [[1]]\nclasses: {a: 1}\ntenants: [null]\n", "c.yaml"),
    ],
)
def test_odd_but_parsable_files_end_in_problems_that_can_be_printed(tmp_path, text, name):
    for problem in problems_of(tmp_path, text, name):
        assert problem.text().isprintable() and problem.text().encode("utf-8")
    from click.testing import CliRunner

    from bench.commands.validate import command

    for options in ([], ["--json"]):
        result = CliRunner().invoke(command, [str(tmp_path / name), *options])
        assert isinstance(result.exception, (SystemExit, type(None))), result.exception


# -- properties -----------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
some_key = st.sampled_from([key for key in known_keys() if "." in key])


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(some_key, json_values, max_size=4), st.dictionaries(st.text(max_size=10), json_values, max_size=2)
)
def test_any_json_is_a_config_or_a_list_of_known_problems(tmp_path_factory, keys, extra):
    """No traceback, whatever stands in the file."""
    data: dict = dict(extra)
    for key, value in keys.items():
        section, _, name = key.partition(".")
        if not isinstance(data.get(section), dict):
            data[section] = {}
        data[section][name] = value
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    try:
        resolved = load_config(path, env={})
    except ConfigError as error:
        assert error.problems and any(p.severity == "error" for p in error.problems)
        for problem in error.problems:
            assert problem.id in PROBLEMS and problem.text()
            assert not math.isnan(len(problem.text()))
    else:
        json.dumps(resolved.masked(), allow_nan=False)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_refused_in_order(tmp_path_factory, raw):
    for name in ("any.json", "any.yaml"):
        path = tmp_path_factory.getbasetemp() / name
        path.write_bytes(raw)
        try:
            load_config(path, env={})
        except ConfigError as error:
            assert error.problems


@pytest.mark.parametrize(
    "key", [k for k in known_keys() if "." in k and k.rpartition(".")[2] not in ("name", "share", "at", "read")]
)
def test_one_wrong_letter_is_recognised(key):
    section, _, name = key.partition(".")
    broken = name[:-2] + name[-1]  # the last letter but one is lost
    if any(broken == k.rpartition(".")[2] for k in known_keys()):
        return
    assert nearest((section, broken)) == key


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"\\ud800": 1}', [("CFG-004", "\ud800")]),
        ('{"slo": {"a\\udfff": 1}}', [("CFG-004", "slo.a\udfff")]),
        ('{"target": {"extra_body": {"x": {"\\udc00": 1}}}}', [("CFG-004", "target.extra_body.x.\udc00")]),
        ('{"gates": [{"\\ud800": 1}]}', [("CFG-004", "gates[0].\ud800"), ("CFG-009", "gates[0].metric")]),
        ('{"target": {"extra_body": {"x": ["\\ud800"]}}}', [("CFG-005", "target.extra_body.x[0]")]),
        # a pair is one whole character
        ('{"\\ud83d\\ude00": 1}', [("CFG-004", "\U0001f600")]),
    ],
)
def test_half_characters_are_ordinary_problems(tmp_path, text, found):
    problems = problems_of(tmp_path, text)
    places = [(problem.id, problem.where.partition(": ")[2]) for problem in problems]
    assert [place for place in places if place in found] == found
    assert {problem.id for problem in problems if problem.severity == "error"} == {name for name, _ in found}
    for problem in problems:
        problem.text().encode()  # printable, whatever the name was


def test_a_damaged_utf_16_file_is_called_that(tmp_path):
    path = tmp_path / "c.json"
    whole = json.dumps(OK).encode("utf-16")
    path.write_bytes(whole)
    assert load_config(path, env={}).config.model == "m"
    path.write_bytes(whole[:-1])  # half a unit is missing at the end
    with pytest.raises(ConfigError, match=rf"begins as UTF-16 text .* damaged at byte {len(whole) - 2}"):
        load_config(path, env={})
    path.write_bytes(b'{"model": "\xff"}')
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config(path, env={})
