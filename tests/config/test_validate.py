"""`bench validate`: what it prints, its exit codes, and that it starts without Locust."""



from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.commands.validate import SHAPES, command
from bench.config import ConfigError, load_config
from bench.config.limits import Expectation, cost, limit_problems
from bench.config.schema import Config, Limits
from bench.workload.plan import SHAPES as KNOWN_SHAPES

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("BENCH_BASE_URL", "BENCH_MODEL", "BENCH_API_KEY", "BENCH_API_KEY_FILE", "TAOTOKEN_BASE_URL", "TAOTOKEN_MODEL_ID",
         "TAOTOKEN_API_KEY", "TAOTOKEN_API_KEY_FILE")  # fmt: skip


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)  # no .env of the developer


SERVICE = ("--base-url", "http://localhost:8000/v1", "--model", "m")


def validate(*arguments: str):
    return CliRunner().invoke(command, [str(a) for a in arguments])


@pytest.mark.parametrize("name", ["scheduler_bench", "demo", "smoke", "reference_4x"])
def test_tracked_configs_may_start(name):
    result = validate(ROOT / "configs" / f"{name}.json", "--json", *SERVICE)
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    assert data["ok"] and all(problem["severity"] == "warning" for problem in data["problems"])
    assert data["total"]["requests"] == sum(stage["arrivals"] for stage in data["stages"])
    # no count is farther from its mean than 4 standard deviations
    for stage in data["stages"]:
        assert abs(stage["arrivals"] - stage["expected_arrivals"]) <= 4 * stage["expected_arrivals"] ** 0.5


def test_the_demo_is_short_and_can_decide_its_target():
    data = json.loads(validate(ROOT / "configs" / "demo.json", "--json").output)
    assert data["total"]["arrivals_s"] <= 130  # with some 3 s of drain a stage: under 150 s
    (target,) = [stage for stage in data["stages"] if stage["at_target"]]
    assert target["offered_qps"] == 15 and target["misses_allowed"] >= 1
    # every stage has the 72 arrivals that a P95 needs
    assert min(stage["window_arrivals"] for stage in data["stages"]) >= 72
    # the knee, near 20 to 22, lies between stages on both sides
    rates = [stage["offered_qps"] for stage in data["stages"]]
    assert min(rates) < 15 and {18, 20, 22} <= set(rates) and max(rates) >= 25


def test_text_shows_problems_values_with_origin_and_stages():
    result = validate(ROOT / "configs" / "scheduler_bench.json", *SERVICE)
    assert result.exit_code == 0
    for words in (
        "CFG-026",
        "slo.p95_target_ms = 2000.0  (file ",
        "03 chat @20",
        "the run may start",
        "defaults (--all shows them)",
    ):
        assert words in result.output
    assert "loadgen.seed" not in result.output and "CFG-012" not in result.output
    assert "loadgen.seed = 11  (default)" in validate(ROOT / "configs" / "scheduler_bench.json", "--all").output


@pytest.mark.parametrize(
    ("base_url", "model", "unfilled"),
    [
        ("", "", ["model", "base_url"]),
        ("http://localhost:8000", "m", []),
        ("http://127.0.0.1:8000/v1", "<model>", ["model"]),
        ("http://<host>:8000", "m", ["base_url"]),
        ("https://example.com/v1", "m", ["base_url"]),
        ("https://api.example.com/v1", "m", ["base_url"]),
        ("https://myexample.com/v1", "m", []),
        ("https://gateway.example:8443", "m", ["base_url"]),
        ("https://your-service.example/v1", "your-model", ["model", "base_url"]),
        ("${BENCH_BASE_URL}", "{{ model }}", ["model", "base_url"]),
        (" ", " ", ["model", "base_url"]),
    ],
)
def test_an_address_or_model_that_nobody_filled_in_is_no_start(tmp_path, base_url, model, unfilled):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"model": model, "base_url": base_url}, indent=1), encoding="utf-8")
    result = validate(path)
    data = json.loads(validate(path, "--json").output)
    named = [p for p in data["problems"] if p["id"] == "CFG-012"]
    assert [p["where"].split()[-1] for p in named] == unfilled
    assert result.exit_code == (2 if unfilled else 0) and data["ok"] is (not unfilled)
    assert all(p["severity"] == "error" and p["line"] in (2, 3) and "BENCH_" in p["fix"] for p in named)
    assert ("the run may start" in result.output) is (not unfilled)
    if unfilled:
        assert f"{unfilled[0]} is " in result.output
        assert validate(path, *SERVICE).exit_code == 0  # as bench run with these options
    path.write_text(json.dumps({"base_url": base_url, "engine": {"embedded": True}}), encoding="utf-8")
    assert "CFG-012" not in validate(path).output


def test_what_init_writes_may_not_start_before_it_is_filled_in(tmp_path, monkeypatch):
    from bench.commands.init import command as init

    assert CliRunner().invoke(init, [str(tmp_path)]).exit_code == 0
    result = validate(tmp_path / "bench.json")
    assert result.exit_code == 2
    assert result.output.rstrip().endswith("the run may not start: model and base_url are not filled in")
    monkeypatch.setenv("BENCH_BASE_URL", "https://your-service.example/v1")  # .env.example, copied and left as it is
    result = validate(tmp_path / "bench.json")
    assert result.exit_code == 2 and 'environment BENCH_BASE_URL: base_url is "https://your-service.example/v1"' in result.output


def test_a_placeholder_address_is_shown_without_what_may_be_secret(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"model": "m", "base_url": "https://me:pass-w0rd@example.com/v1?key=abc#d"}))
    result = validate(path)
    assert result.exit_code == 2 and "pass-w0rd" not in result.output and "abc" not in result.output


def test_a_bad_config_exits_2_with_all_problems(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('{"modle": 1,\n"slo": {"attainment_target": 2}}', encoding="utf-8")
    result = validate(path)
    assert result.exit_code == 2
    assert "CFG-004" in result.output and "CFG-006" in result.output and "Traceback" not in result.output
    data = json.loads(validate(path, "--json").output)
    assert not data["ok"] and [p["line"] for p in data["problems"]][:2] == [1, 2]


def test_a_missing_file_and_a_damaged_trace_exit_2(tmp_path):
    result = validate(tmp_path / "none.json")
    assert result.exit_code == 2 and "CFG-001" in result.output
    (tmp_path / "t.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1,-5,3\n", encoding="utf-8"
    )
    (tmp_path / "c.json").write_text(
        json.dumps({"model": "m", "base_url": "http://h", "loadgen": {"trace_file": "t.csv"}}), encoding="utf-8"
    )
    result = validate(tmp_path / "c.json", "--shape", "replay")
    assert result.exit_code == 2
    assert "CFG-040" in result.output and "t.csv:2: ContextTokens is -5" in result.output
    assert validate(tmp_path / "c.json").exit_code == 0  # a sweep does not read it


def test_a_shape_that_cannot_be_built_exits_2(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({"model": "m", "base_url": "http://h"}), encoding="utf-8")
    result = validate(tmp_path / "c.json", "--shape", "replay")
    assert result.exit_code == 2 and "CFG-045" in result.output and "loadgen.trace_file" in result.output


def test_limits_refuse_before_the_start(tmp_path):
    limits = {"max_requests": 10, "max_tokens": 1000, "max_cost": 0.01, "price_per_million_input_tokens": 1,
              "price_per_million_output_tokens": 2, "max_duration_sec": 30}  # fmt: skip
    config = {
        "model": "m",
        "base_url": "http://h",
        "loadgen": {"target_qps": 5, "duration_sec": 20},
        "sweep": {"qps": [5]},
        "limits": limits,
    }
    (tmp_path / "c.json").write_text(json.dumps(config), encoding="utf-8")
    result = validate(tmp_path / "c.json")
    assert result.exit_code == 2
    for name in ("max_requests", "max_tokens", "max_cost", "max_duration_sec"):
        assert f"CFG-041 limits.{name}" in result.output
    assert "the run may not start" in result.output


def test_money():
    limits = Limits(price_per_million_input_tokens=0.5, price_per_million_output_tokens=2.0)
    assert cost(limits, 3_000_000, 1_000_000) == pytest.approx(3.5)  # 3 x 0.5 + 1 x 2
    assert cost(Limits(), 1, 1) is None
    assert cost(Limits(price_per_million_output_tokens=2.0), 10**6, 10**6) == 2.0


def test_limits_at_their_edge():
    expected = Expectation(requests=10, input_tokens=60, output_tokens=40, arrivals_s=5, longest_s=10)
    config = Config.model_validate({"limits": {"max_requests": 10, "max_tokens": 100, "max_duration_sec": 10}})
    assert limit_problems(config, expected) == []
    config = Config.model_validate({"limits": {"max_requests": 9, "max_tokens": 99, "max_duration_sec": 9.9}})
    assert [p.where for p in limit_problems(config, expected)] == [
        "limits.max_requests",
        "limits.max_tokens",
        "limits.max_duration_sec",
    ]


def test_a_stage_too_short_for_the_target_is_noted(tmp_path):
    config = {
        "model": "m",
        "base_url": "http://h",
        "loadgen": {"target_qps": 5, "duration_sec": 20},
        "sweep": {"qps": [5]},
    }
    (tmp_path / "c.json").write_text(json.dumps(config), encoding="utf-8")
    output = validate(tmp_path / "c.json").output
    assert "CFG-042" in output and "381 or more" in output
    assert "CFG-043" in output and "p99 368" in output


def test_a_damaged_key_is_reported_by_length_only(tmp_path, monkeypatch):
    (tmp_path / "c.json").write_text(json.dumps({"model": "m", "base_url": "http://h"}), encoding="utf-8")
    monkeypatch.setenv("BENCH_API_KEY", "abcd-secret-wxyz ")
    result = validate(tmp_path / "c.json")
    assert result.exit_code == 2 and "CFG-013" in result.output and "17 characters" in result.output
    assert "secret" not in result.output


def test_no_key_is_ever_printed(tmp_path, monkeypatch):
    monkeypatch.setenv("TAOTOKEN_API_KEY", "abcd-secret-wxyz")
    (tmp_path / "c.json").write_text(
        json.dumps({"model": "abcd-secret-wxyz", "base_url": "http://h"}), encoding="utf-8"
    )
    for options in ([], ["--json"], ["--all"]):
        assert "secret-w" not in validate(tmp_path / "c.json", *options).output


def test_options_of_the_run_can_be_looked_at():
    path = ROOT / "configs" / "demo.json"
    result = validate(path, "--qps", "3,7.5", "--stage-duration", "20", "--repeats", "2", "--seed", "5", "--json")
    data = json.loads(result.output)
    assert [(s["offered_qps"], s["repeat"]) for s in data["stages"]] == [(3, 0), (7.5, 0), (3, 1), (7.5, 1)]
    assert data["seed"] == 5 and {s["duration_s"] for s in data["stages"]} == {20}
    for bad in (("--qps", "a"), ("--qps", "-1"), ("--stage-duration", "0.5"), ("--stage-duration", "nan")):
        assert validate(path, *bad).exit_code == 2


def test_zero_means_as_the_config_says_as_in_bench_run():
    path = ROOT / "configs" / "demo.json"
    plain = json.loads(validate(path, "--json").output)
    zero = json.loads(validate(path, "--seed", "0", "--repeats", "0", "--stage-duration", "0", "--json").output)
    assert zero["schedule_hash"] == plain["schedule_hash"] and zero["stages"] == plain["stages"]


def test_shapes_are_those_of_the_plan():
    assert SHAPES == KNOWN_SHAPES
    assert all((ROOT / "shapes" / f"{name}.py").is_file() for name in SHAPES)  # Locust is given this file


def test_it_starts_without_locust_gevent_and_pandas():
    code = (
        "import sys; from bench.commands.validate import command; from click.testing import CliRunner;"
        f"r = CliRunner().invoke(command, [{str(ROOT / 'configs' / 'demo.json')!r}]);"
        "print(r.exit_code, [m for m in ('locust', 'gevent', 'pandas', 'scipy', 'jinja2') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    ).stdout
    assert out.strip() == "0 []"


def test_resolved_config_of_the_smoke_file_is_the_reference_smoke():
    resolved = load_config(ROOT / "configs" / "smoke.json", env={})
    assert (resolved.config.loadgen.target_qps, resolved.config.loadgen.duration_sec) == (2, 30)
    with pytest.raises(ConfigError):
        load_config(ROOT / "configs" / "smoke.json", env={}, overrides={"sweep.qps": "2"})
