"""Public trace formats: read whole, cut, spread, scaled; damaged rows are named with file and line.

`tests/data/traces` holds two small files of these formats, made by the functions below (UPDATE_GOLDEN=1).
"""



from __future__ import annotations

import contextlib
import gzip
import json
import os
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.config.schema import Config
from bench.workload.plan import Plan, PlanError, build_plan
from bench.workload.schedule import build_schedule
from bench.workload.trace import Trace, TraceError, digest, read_trace, spread

DATA = Path(__file__).resolve().parents[1] / "data" / "traces"


def azure_text(rows: int = 120, seed: int = 7) -> str:
    """An Azure-like CSV: 7 decimals, CRLF, no newline at the end, about 4 arrivals a second."""
    rng = np.random.Generator(np.random.Philox(seed))
    ticks = np.cumsum(rng.exponential(0.25, rows) * 1e7).astype(int)  # 100 ns
    start = datetime(2026, 1, 1, 23, 59, 50)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for tick in ticks.tolist():
        moment = start + timedelta(seconds=tick // 10**7)
        lines.append(
            f"{moment:%Y-%m-%d %H:%M:%S}.{tick % 10**7:07d},{int(rng.integers(10, 3000))},{int(rng.integers(1, 400))}"
        )
    return "\r\n".join(lines)


def mooncake_text(rows: int = 90, seed: int = 8, talks: int = 12, groups: int = 10, own: tuple[int, int] = (100, 4000)) -> str:
    """A Mooncake-like JSONL: stamps in 3 s groups; talks that grow turn by turn after one of two common starts.

    A turn repeats the whole blocks of the turn before; the block that was cut there is a new one.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    stamps = np.sort(rng.integers(0, groups, rows)) * 3000
    common, fresh = ([0, 1], [2, 3, 4]), 5
    heads: list[list[int]] = [list(common[int(rng.integers(0, 2))]) for _ in range(talks)]
    tokens = [512 * len(head) for head in heads]
    lines = []
    for t in stamps.tolist():
        talk = int(rng.integers(0, talks))
        tokens[talk] += int(rng.integers(*own))
        if tokens[talk] > 20_000:
            heads[talk], tokens[talk] = list(common[talk % 2]), 512 * len(common[talk % 2]) + 100
        whole, blocks = tokens[talk] // 512, -(-tokens[talk] // 512)
        new = blocks - len(heads[talk])
        ids = heads[talk] + list(range(fresh, fresh + new))
        fresh += new
        lines.append(json.dumps({"timestamp": t, "input_length": tokens[talk], "output_length": int(rng.integers(1, 700)),
                                 "hash_ids": ids}))  # fmt: skip
        heads[talk] = ids[:whole]
    return "\n".join(lines) + "\n"


def chat_turns_text() -> str:
    """The example in configs/study: 200 turns of 20 talks in five minutes."""
    return mooncake_text(200, 11, talks=20, groups=100, own=(50, 900))


STUDY = Path(__file__).resolve().parents[2] / "configs" / "study"


@pytest.mark.parametrize(
    ("path", "make"),
    [
        (DATA / "azure_small.csv", azure_text),
        (DATA / "mooncake_small.jsonl.gz", mooncake_text),
        (STUDY / "chat_turns.jsonl", chat_turns_text),
    ],
)
def test_the_tracked_files_come_from_the_generators(path, make):
    name = path.name
    if os.environ.get("UPDATE_GOLDEN"):
        raw = make().encode()
        path.write_bytes(gzip.compress(raw, mtime=0) if name.endswith(".gz") else raw)
        pytest.fail(f"{name} rewritten")
    raw = path.read_bytes()
    assert (gzip.decompress(raw) if name.endswith(".gz") else raw).decode() == make()


def write(folder: Path, text: str | bytes, name: str = "t") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_azure_rows(tmp_path):
    text = (
        HEAD
        + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n2023-11-17 00:00:00.0000019,7,1\n"
    )
    for variant in (text, text.replace("\n", "\r\n"), text.rstrip("\n"), "\ufeff" + text):
        trace = read_trace(write(tmp_path, variant))
        # 50.995169 - 46.680590 = 4.314579 s; midnight: 20 653.319411 s after the first (.0000019 -> 1 us)
        assert trace.time_us.tolist() == [0, 4_314_579, 20_653_319_411]
        assert trace.input_tokens.tolist() == [374, 396, 7] and trace.output_tokens.tolist() == [44, 109, 1]


def test_azure_columns_may_be_in_any_order_and_have_neighbours(tmp_path):
    trace = read_trace(
        write(
            tmp_path,
            "id,GeneratedTokens,TIMESTAMP,ContextTokens\n1,4,2024-05-10 00:00:00.009930+00:00,300\n2,5,2024-05-10 00:00:01,301\n",
        )
    )
    assert trace.time_us.tolist() == [0, 990_070]
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([300, 301], [4, 5])


def test_mooncake_rows_plain_and_gzip(tmp_path):
    text = '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n\n{"timestamp": 1500, "input_length": 10, "output_length": 0}\n'
    for raw in (text.encode(), gzip.compress(text.encode(), mtime=0), text.replace("\n", "\r\n").encode()):
        trace = read_trace(write(tmp_path, raw))
        assert trace.time_us.tolist() == [0, 1_500_000]
        assert trace.output_tokens.tolist() == [500, 1] and trace.lifted == 1


@pytest.mark.parametrize(("text", "words"), [
    (HEAD + "2023-11-16 18:15:46.1,5,3\n2023-11-16 18:15:46.0,5,3\n", ":3: 0.1 s before the row above; sort"),
    (HEAD + "2023-11-16 18:15:46.1,-5,3\n", ":2: ContextTokens is -5; it cannot be negative"),
    (HEAD + "2023-11-16 18:15:46.1,5,\n", ":2: GeneratedTokens is missing"),
    (HEAD + "2023-11-16 18:15:46.1,5,3.5\n", ":2: GeneratedTokens is '3.5'"),
    (HEAD + "2023-11-16 18:15:46.1,99999999999,3\n", "at most 10000000 tokens"),
    (HEAD + "2023-11-16 18:15:46.1,9999999999999999999999,3\n", "ContextTokens is '9999"),
    (HEAD + "2023-11-16 18:15:46.1,5\n", ":2: 2 cells, the header has 3"),
    (HEAD + "2023-13-16 18:15:46.1,5,3\n", ":2: TIMESTAMP is"), (HEAD + "16.11.2023,5,3\n", ":2: TIMESTAMP is"),
    (HEAD + "2023-11-16 18:15:46.xx,5,3\n", "looks like 2023"), (HEAD + "2023-11-16 18:15:46.1,5,3\n3000-11-16 18:15:46.1,5,3\n", "more than a year"),
    (HEAD, "holds a header and no rows"), ("", "is empty"), ("\n\n", "is empty"), ("a,b\n1,2\n", "columns TIMESTAMP, ContextTokens, GeneratedTokens are missing"),
    ('{"timestamp": 5}\n', ":1: input_length, output_length is missing"), ('{"timestamp": 5,\n', ":1: not JSON"),
    ('{"timestamp": -1, "input_length": 1, "output_length": 1}', "cannot be negative"),
    ('{"timestamp": "x", "input_length": 1, "output_length": 1}', "milliseconds from the start"),
    ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "milliseconds from the start"),
    ('{"timestamp": 1e300, "input_length": 1, "output_length": 1}', "milliseconds from the start"),
    ('{"timestamp": 1, "input_length": true, "output_length": 1}', "input_length is 'True'"),
    ('{"timestamp": 1, "input_length": 1.5, "output_length": 1}', "input_length is '1.5'"),
    ('{"timestamp": 1, "input_length": null, "output_length": 1}', "input_length is missing"),
    ('{"timestamp": 1, "input_length": 1, "output_length": 1}\n[1]\n', ":2: not a JSON object"),
    (b"\x1f\x8b\x08broken", "cannot be read"), ("x" * 1_000_005, "line longer than"),
    (HEAD.encode() + b"2023-11-16 18:15:46.1,5,3\n" * 900 + b"\xff\xfe\n", ":902: holds bytes that are no UTF-8"), ((HEAD + "1").encode("utf-16"), ":1: holds bytes"),
    ('{"timestamp": 1, "input_length": 1, "output_length": ' + "9" * 5000 + "}", ":1: not JSON"), ("[" * 100_000, "are missing"),
    ('{"timestamp": 1, "input_length": 1, "output_length": ' + "[" * 100_000, ":1: not JSON"),
    ("TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1,5,6,3\n", ":1: column ContextTokens stands there twice"),
    (HEAD + "2023-11-16 18:15:46.1,NaN,3\n", ":2: ContextTokens is 'NaN'"), (HEAD + "2023-11-16 18:15:46.1,1e3,3\n", ":2: ContextTokens is '1e3'"),
    (HEAD + "2023-11-16 18:15:46.1,\u0665,3\n", ":2: ContextTokens is"), (HEAD + "\u0662\u0660\u0662\u0663-11-16 18:15:46.1,5,3\n", ":2: TIMESTAMP is"),
    (HEAD + "\x1b[31mred,5,3\n", ":2: TIMESTAMP is '\\x1b[31mred'"), (HEAD.replace(",", ";"), "columns TIMESTAMP, ContextTokens, GeneratedTokens are missing"),
    (gzip.compress(b"a" * 5000, mtime=0)[:20], "cannot be read"),
])  # fmt: skip
def test_damaged_files_are_named_with_their_line(tmp_path, text, words):
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert words in str(caught.value) and str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_zones_and_quotes(tmp_path):
    """A clock that is put back an hour is no step back when the zone is written; a table program quotes every cell."""
    text = HEAD + "2024-10-27 02:59:59.5+02:00,7,1\n2024-10-27 02:00:00+01:00,7,1\n2024-10-27T01:00:02Z,7,1\n2024-10-26 20:00:03-05:00,7,1\n"
    assert read_trace(write(tmp_path, text)).time_us.tolist() == [0, 500_000, 2_500_000, 3_500_000]
    quoted = "\n".join(",".join(f'"{cell}"' for cell in line.split(",")) for line in text.splitlines())
    assert digest(read_trace(write(tmp_path, quoted))) == digest(read_trace(write(tmp_path, text)))


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it: opening it would wait for ever
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(TraceError, match="is not a regular file"):
            read_trace(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_trace_or_an_error(tmp_path_factory, raw):
    for prefix in (b"", HEAD.encode(), b'{"timestamp": 1, "input_length": 1, "output_length": 1}\n'):
        path = tmp_path_factory.getbasetemp() / "any"
        path.write_bytes(prefix + raw)
        with contextlib.suppress(TraceError):
            assert len(read_trace(path)) > 0


# -- spreading, window, caps -----------------------------------------------------------------


def test_ties_are_spread_over_the_gap_that_follows():
    #    0 0 0 | 3 s | 3 s 3 s | 6 s       k rows over the gap to the next stamp
    times = np.array([0, 0, 0, 3_000_000, 3_000_000, 6_000_000])
    assert spread(times, 3_000_000).tolist() == [0, 1_000_000, 2_000_000, 3_000_000, 4_500_000, 6_000_000]
    assert spread(np.array([5, 5]), 10).tolist() == [5, 10]


@settings(max_examples=300)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=60).map(sorted), st.integers(1, 10**6))
def test_spreading_keeps_order_first_rows_and_groups(stamps, last_gap):
    times = np.array(stamps) * 1_000_000
    out = spread(times, last_gap)
    assert (np.diff(out) >= 0).all()
    assert (out >= times).all()
    for group in np.unique(times):
        rows = out[times == group]
        later = times[times > group]
        assert rows[0] == group
        assert rows[-1] < (later[0] if len(later) else group + max(last_gap, 1))


def test_spreading_of_the_mooncake_file():
    tied, even = (
        read_trace(DATA / "mooncake_small.jsonl.gz", spread_ties=False),
        read_trace(DATA / "mooncake_small.jsonl.gz"),
    )
    assert len(np.unique(tied.time_us)) == 10 and len(np.unique(even.time_us)) == 90
    assert tied.input_tokens.tolist() == even.input_tokens.tolist()
    assert tied.span_us == even.span_us == 30_000_000  # last group at 27 s, 3 s apart


def test_window_and_caps(tmp_path):
    text = HEAD + "".join(f"2026-01-01 00:00:{s:02d}.5,{100 * s + 1},{s + 1}\n" for s in range(10))
    trace = read_trace(write(tmp_path, text), start_s=2, end_s=5, max_input_tokens=350, max_output_tokens=4)
    assert trace.time_us.tolist() == [0, 1_000_000, 2_000_000]  # rows 2, 3, 4; times from the window's start
    assert trace.input_tokens.tolist() == [201, 301, 350] and trace.output_tokens.tolist() == [3, 4, 4]
    assert trace.span_us == 3_000_000 and trace.rate_qps == 1.0
    assert read_trace(write(tmp_path, text)).span_us == 10_000_000  # to the last row and one typical gap on
    with pytest.raises(TraceError, match="no rows between trace_start_sec 50 and the end; the trace runs to 10 s"):
        read_trace(write(tmp_path, text), start_s=50)


def test_json_round_trip():
    trace = read_trace(DATA / "azure_small.csv")
    again = Trace.from_dict(json.loads(json.dumps(trace.to_dict())))
    assert digest(again) == digest(trace) and (again.span_us, again.name, again.lifted) == (
        trace.span_us,
        trace.name,
        trace.lifted,
    )


# -- replay -----------------------------------------------------------------------------------


def config(name: str, **load) -> Config:
    return Config.model_validate({"loadgen": {"trace_file": str(DATA / name), **load}})


def test_replay_keeps_times_and_lengths():
    trace = read_trace(DATA / "azure_small.csv")
    plan = build_plan(config("azure_small.csv"), "replay")
    schedule = build_schedule(plan, plan.stages[0])
    assert schedule.intended_s == pytest.approx(trace.time_us / 1e6, abs=2e-6)
    assert schedule.input_tokens.tolist() == trace.input_tokens.tolist()
    assert schedule.max_tokens.tolist() == trace.output_tokens.tolist()
    assert plan.stages[0].duration_s == pytest.approx(trace.span_us / 1e6)
    assert plan.stages[0].expected_arrivals == pytest.approx(120)


def test_replay_at_twice_the_rate_takes_half_the_time():
    plan = build_plan(config("azure_small.csv", trace_rate_scale=2.0), "replay")
    schedule = build_schedule(plan, plan.stages[0])
    trace = read_trace(DATA / "azure_small.csv")
    assert schedule.intended_s == pytest.approx(trace.time_us / 2e6, abs=2e-6)
    short = build_plan(config("azure_small.csv"), "replay", duration_s=10)
    assert len(build_schedule(short, short.stages[0])) == int((trace.time_us < 10_000_000).sum())


def test_a_sweep_over_a_trace_brings_it_to_each_rate():
    plan = build_plan(config("azure_small.csv", arrival_process="trace"), "sweep", qps=[10.0, 20.0], duration_s=30)
    trace = read_trace(DATA / "azure_small.csv")
    for stage in plan.stages:
        schedule = build_schedule(plan, stage)
        # 120 rows are one turn: 300 and 600 arrivals are 2.5 and 5 turns
        assert abs(len(schedule) - stage.offered_qps * 30) <= 0.1 * stage.offered_qps * 30
        n = len(schedule)
        assert schedule.input_tokens.tolist() == np.tile(trace.input_tokens, 6)[:n].tolist()


def test_a_damaged_trace_is_a_plan_error(tmp_path):
    path = write(tmp_path, HEAD)
    with pytest.raises(PlanError, match="holds a header and no rows"):
        build_plan(Config.model_validate({"loadgen": {"trace_file": str(path)}}), "replay")


def test_the_plan_carries_the_trace(tmp_path):
    path = write(tmp_path, azure_text())
    plan = build_plan(Config.model_validate({"loadgen": {"trace_file": str(path)}}), "replay")
    expected = build_schedule(plan, plan.stages[0]).hash
    text = plan.to_json()
    path.unlink()  # a worker elsewhere has no such file
    again = Plan.from_json(text)
    assert build_schedule(again, again.stages[0]).hash == expected
