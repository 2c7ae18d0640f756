"""Own prompts: which line goes to which arrival, by hand; the hash; repeats; text read back; every kind of bad file."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bench.client.request import line_body
from bench.config.schema import Config
from bench.workload import prompt_file
from bench.workload.expect import expect_stages, repeat_sentence
from bench.workload.labels import fault_code
from bench.workload.plan import Plan, PlanError, build_plan
from bench.workload.prompt_file import PromptFile, PromptText, read_prompts
from bench.workload.prompt_rows import PromptError, echoes, estimate_tokens
from bench.workload.schedule import build_schedule, plan_hash

ROWS = [
    {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "tides?"}], "max_tokens": 7},
    {"prompt": "Sag ‘grüß Gott’.", "input_tokens": 9, "tenant": "a", "request_class": "x", "id": 5},
    {"prompt": "three", "output_tokens": 11, "tenant": "b", "extra_body": {"temperature": 0, "tools": [{"n": 1}]}},
    {"prompt": "three", "id": "again"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "一二"}, {"type": "text", "text": "三"}]}]},
]


def write(path: Path, rows=ROWS, **more) -> Path:
    path.write_text("".join(json.dumps(row, **more) + "\n" for row in rows), encoding="utf-8")
    return path


def config(path: Path, *, target=None, engine=None, tenants=(), **loadgen) -> Config:
    # 12 arrivals a stage, at 0.5, 1.5, ... tenths of a second
    load = {"prompts_file": str(path), "arrival_process": "constant", "target_qps": 10.0, "duration_sec": 1.2,
            "output_len_dist": "fixed", "output_len_fixed": 100, **loadgen}  # fmt: skip
    return Config.model_validate(
        {"loadgen": load, "target": target or {}, "engine": engine or {}, "tenants": list(tenants),
         "sweep": {"qps": [10.0], "warmup_sec": 0.0}}
    )  # fmt: skip


def stage(plan: Plan):
    return build_schedule(plan, plan.stages[0])


def test_lengths_and_labels_of_the_lines(tmp_path):
    plan = build_plan(config(write(tmp_path / "p.jsonl"), prompts_order="file"))
    found = stage(plan)
    assert len(found) == 12
    # Lines 1 to 5, again, then 1 and 2. Bytes / 4, up: "Be short.\ntides?" 16 -> 4; given 9; "three" 5 -> 2, twice;
    # two texts joined, 6 + 1 + 3 = 10 -> 3.
    assert found.place.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert found.input_tokens.tolist() == [4, 9, 2, 2, 3] * 2 + [4, 9]
    assert found.max_tokens.tolist() == [7, 100, 11, 100, 100] * 2 + [7, 100]
    # Nobody is declared: the names of the lines, in order of first appearance, "" where a line names nobody.
    names = [plan.tenants[i].name for i in found.tenant.tolist()]
    assert names == ["", "a", "b", "", ""] * 2 + ["", "a"]
    assert [plan.classes[i].name for i in found.request_class.tolist()][:5] == ["", "x", "", "", ""]
    assert plan.lines.estimated.tolist() == [1, 0, 1, 1, 1] and plan.lines.different == 4


def test_the_longest_output_is_still_that_of_the_config(tmp_path):
    plan = build_plan(config(write(tmp_path / "p.jsonl"), prompts_order="file", max_output_tokens=8, output_len_fixed=8))
    assert stage(plan).max_tokens[:5].tolist() == [7, 8, 8, 8, 8]


def test_declared_tenants_are_the_only_ones(tmp_path):
    path = write(tmp_path / "p.jsonl")
    declared = [{"name": "b", "share": 0.5}, {"name": "a", "share": 0.5}]
    plan = build_plan(config(path, tenants=declared, prompts_order="file"))
    assert [plan.tenants[i].name for i in stage(plan).tenant[:5].tolist()] == ["", "a", "b", "", ""]
    with pytest.raises(PlanError, match=r"p\.jsonl:2: tenant is 'a', the config's tenants are b"):
        build_plan(config(path, tenants=[{"name": "b", "share": 1.0}]))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers_sends_the_same_line_for_the_same_arrival(tmp_path, workers):
    text = build_plan(config(write(tmp_path / "p.jsonl"))).to_json()
    whole = stage(Plan.from_json(text)).place
    sent = {}
    for worker in range(workers):  # each computes it for itself, from the plan that travels
        own = stage(Plan.from_json(text))
        sent |= {i: int(own.place[i]) for i in own.stripe(worker, workers).tolist()}
    assert [sent[i] for i in range(12)] == whole.tolist()
    # Without replacement: each line once, then the same order again, so that two of a line are 5 arrivals apart.
    assert sorted(whole[:5].tolist()) == [0, 1, 2, 3, 4] and whole[5:10].tolist() == whole[:5].tolist()
    assert Counter(whole.tolist()) == {line: 3 if line in whole[:2] else 2 for line in range(5)}


def test_the_draw_is_a_permutation_by_the_seed_of_the_stage(tmp_path):
    rows = [{"prompt": f"number {i}"} for i in range(40)]
    path = write(tmp_path / "p.jsonl", rows)
    orders = {}
    for seed in (1, 2):
        plan = build_plan(config(path, seed=seed, duration_sec=4.0))
        orders[seed] = stage(plan).place.tolist()
        # second path: numpy's own permutation of the stream that is documented (purpose 7 of the stage's seed)
        draw = np.random.Generator(np.random.Philox(np.random.SeedSequence(plan.stages[0].seed, spawn_key=(7,))))
        assert orders[seed] == draw.permutation(40).tolist()
        assert sorted(orders[seed]) == list(range(40))
    assert orders[1] != orders[2]
    # a longer stage goes on where the shorter one ends
    assert stage(build_plan(config(path, seed=1, duration_sec=2.0))).place.tolist() == orders[1][:20]


def test_lines_do_not_move_the_other_draws(tmp_path):
    path = write(tmp_path / "p.jsonl")
    a, b = (stage(build_plan(c)) for c in (config(path), config(path).model_copy(update={"loadgen": Config.model_validate(
        {"loadgen": {**config(path).loadgen.model_dump(), "prompts_file": None}}).loadgen})))  # fmt: skip
    assert a.intended_s.tolist() == b.intended_s.tolist() and a.prompt_seed.tolist() == b.prompt_seed.tolist()
    assert b.place is None and a.hash != b.hash


def test_the_hash_changes_with_one_byte_and_not_with_gzip_or_the_folder(tmp_path):
    path = write(tmp_path / "p.jsonl")
    first = build_plan(config(path))
    assert first.lines.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    packed = tmp_path / "elsewhere"  # no .gz in the name: the content says it
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert plan_hash(build_plan(config(packed))) == plan_hash(first)
    # one letter of a prompt: no length, label or order changes
    path.write_bytes(path.read_bytes().replace(b"tides?", b"rides?"))
    other = build_plan(config(path))
    assert stage(other).input_tokens.tolist() == stage(first).input_tokens.tolist()
    assert plan_hash(other) != plan_hash(first)
    assert plan_hash(build_plan(config(path, prompts_order="file"))) != plan_hash(other)


def test_repeats_are_counted_over_the_run(tmp_path):
    # 4 different prompts, the last line equals the one before. Three stages of 12, 12 and 3 arrivals: the first sends 4
    # new ones, so 8 repeat; everything after that repeats.
    data = config(write(tmp_path / "p.jsonl"), prompts_order="file").model_dump()
    data["sweep"] |= {"qps": [10.0, 10.0, 2.5]}
    plan = build_plan(Config.model_validate(data))
    stages = expect_stages(plan)
    assert [s.arrivals for s in stages] == [12, 12, 3] and [s.repeated_prompts for s in stages] == [8, 12, 3]
    assert repeat_sentence(plan, stages).startswith(
        "prompts repeat: 27 arrivals, 5 lines (4 different): 23 arrivals (85%) send a prompt that went before"
    )
    few = build_plan(config(write(tmp_path / "q.jsonl", [{"prompt": f"q {i}"} for i in range(12)])))
    assert expect_stages(few)[0].repeated_prompts == 0 and repeat_sentence(few, expect_stages(few)) == ""
    made = build_plan(Config())
    assert repeat_sentence(made, expect_stages(made)) == ""


@pytest.mark.parametrize("form", ["plain", "gzip", "bom", "crlf", "blank lines", "no last break", "spaced", "escaped"])
def test_the_text_comes_back_byte_for_byte(tmp_path, form):
    """Second path: Python's own reader of each line finds the same values."""
    path = write(tmp_path / "p.jsonl", ensure_ascii=form == "escaped")
    raw = path.read_bytes()
    if form == "spaced":
        raw = "".join(json.dumps(r, ensure_ascii=False, indent=1).replace("\n", "\t") + " \n" for r in ROWS).encode()
    change = {
        "gzip": gzip.compress, "bom": lambda b: b"\xef\xbb\xbf" + b, "crlf": lambda b: b.replace(b"\n", b"\r\n"),
        "blank lines": lambda b: b"\n \n" + b.replace(b"\n", b"\n\n"), "no last break": lambda b: b[:-1],
    }  # fmt: skip
    path.write_bytes(change.get(form, bytes)(raw))
    found = read_prompts(path)
    text = PromptText(PromptFile.from_dict(json.loads(json.dumps(found.to_dict()))))
    unpacked = raw if form == "gzip" else path.read_bytes()
    for place, row in enumerate(ROWS):
        value = text.value(place)
        assert json.loads(value) == row.get("messages", row.get("prompt"))
        assert unpacked.count(value) >= 1  # a piece of the file as it stands there
        assert text.extra(place) == row.get("extra_body", {})
    assert text.text(0) == "Be short.\ntides?" and text.text(4) == "一二\n三"
    numbers = {"blank lines": [3, 5, 7, 9, 11]}.get(form, [1, 2, 3, 4, 5])
    assert found.line.tolist() == numbers
    text.close()


def test_a_file_that_is_not_the_plans_is_refused_with_both_hashes(tmp_path):
    path = write(tmp_path / "p.jsonl")
    plan = read_prompts(path)
    text = PromptText(plan)
    assert text.is_current(plan)
    write(path, ROWS[1:])
    assert not text.is_current(plan)
    text.close()
    now = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(PromptError, match=rf"p\.jsonl: has SHA-256 {now} \(unpacked\), the plan's prompts have {plan.sha256}"):
        PromptText(plan)
    with pytest.raises(PromptError, match=rf"none\.jsonl: cannot be read \(No such file.*SHA-256 {plan.sha256}"):
        PromptText(plan, str(tmp_path / "none.jsonl"))


def test_a_plan_with_lines_says_so_to_older_versions(tmp_path):
    plan = build_plan(config(write(tmp_path / "p.jsonl")))
    assert json.loads(plan.to_json())["format"] == 2 and json.loads(build_plan(Config()).to_json())["format"] == 1
    assert Plan.from_json(plan.to_json()) == plan
    assert "tides" not in plan.to_json()  # the user's text does not travel


@pytest.mark.parametrize(
    ("detail", "shown"),
    [
        ("Input should be a valid string, input: 'What about my medical record'", True),
        ("... about   my\nmedical ...", True),  # a message becomes one line
        ("maximum context length is 4096 tokens", False),
        ("", False),
        ("\"content\": \"What about", True),
    ],
)
def test_a_message_that_shows_the_prompt_is_known(detail, shown):
    assert echoes(detail, b'[{"role": "user", "content": "What about\\nmy medical record?"}]') == shown


def test_short_prompts_and_escapes_are_known_too():
    assert echoes("no such thing: ping", b'"ping"') and not echoes("no such thing", b'"ping"')
    escaped = json.dumps("Grüße von der Küste").encode()
    assert echoes("got 'Grüße von der Küste'", escaped) and echoes(r"got Gr\u00fc\u00dfe von der", escaped)


def test_estimates():
    # 4 letters a token; a Chinese character is 3 bytes, so 0.75 tokens
    assert [estimate_tokens(n) for n in (0, 1, 4, 5, len("你好世界".encode()))] == [1, 1, 1, 2, 3]


GOOD = b'{"prompt": "secret words"}\n'
USER = '{"role": "user", "content": "x"}'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "secret" "x"}', r":2: is not JSON \(a comma or the end of the object is expected, column 21\)"),
        (b'{"prompt": "secret', r":2: is not JSON \(Unterminated string"),
        (b'{"prompt": "secret",}', r":2: is not JSON \(a key in double quotes"),
        (b'{"prompt": "secret"} {}', r":2: is not JSON \(more than one value"),
        (b"secret words", r":2: is not JSON \("),
        (b'["secret"]', r":2: is not a JSON object"),
        (b'"secret"', r":2: is not a JSON object"),
        (b'{"prompt": "secret", "max_tokens": NaN}', r":2: holds NaN, which is no JSON"),
        (b'{"prompt": ' + b"[" * 100_000 + b"}", r":2: is n"),
        (b"{}", r":2: has neither prompt nor messages"),
        (b'{"prompt": null}', r":2: has neither prompt nor messages"),
        (b'{"prompt": "secret", "messages": [%s]}' % USER.encode(), r":2: has prompt and messages"),
        (b'{"prompt": "secret", "prompt": "x"}', r':2: has the key "prompt" twice'),
        (b'{"prompt": ["secret"]}', r":2: prompt is a list; a text stands there"),
        (b'{"prompt": " "}', r":2: has no text in its prompt"),
        (b'{"messages": "secret"}', r":2: messages is a text; a list"),
        (b'{"messages": []}', r":2: messages is an empty list"),
        (b'{"messages": ["secret"]}', r":2: messages\[0\] is a text"),
        (b'{"messages": [{"content": "secret"}]}', r":2: messages\[0\] has no role"),
        (b'{"messages": [{"role": "user"}]}', r":2: messages\[0\]\.content is missing"),
        (b'{"messages": [{"role": "user", "content": ["secret"]}]}', r":2: messages\[0\]\.content\[0\] has no type"),
        (b'{"prompt": "secret", "max_tokens": 0}', r":2: max_tokens is 0; it lies between 1 and 10000000"),
        (b'{"prompt": "secret", "max_tokens": 1000000000000}', r":2: max_tokens is 1000000000000; it lies"),
        (b'{"prompt": "secret", "max_tokens": "12"}', r":2: max_tokens is a text; a whole number"),
        (b'{"prompt": "secret", "max_tokens": 1.5}', r":2: max_tokens is 1\.5"),
        (b'{"prompt": "secret", "input_tokens": true}', r":2: input_tokens is true"),
        (b'{"prompt": "secret", "max_tokens": 1, "output_tokens": 1}', r":2: has max_tokens and output_tokens"),
        (b'{"prompt": "secret", "max_token": 1}', r':2: has the key "max_token" \(max_tokens\?\); allowed are prompt, '),
        (b'{"prompt": "secret", "temperature": 1}', r':2: has the key "temperature".*extra_body'),
        (b'{"prompt": "secret", "extra_body": {"stream": false}}', r":2: extra_body sets stream, which the plan sets"),
        (b'{"prompt": "secret", "extra_body": []}', r":2: extra_body is an empty list"),
        (b'{"prompt": "secret", "tenant": "a\\nb"}', r":2: tenant is no printable name"),
        (b'{"prompt": "secret", "id": ""}', r":2: id is no printable text"),
        (b'{"prompt": "secret", "id": {}}', r":2: id is an object"),
        (b'{"prompt": "secret \xff"}', r":2: holds bytes that are no UTF-8 \(byte 20\)"),
        (b'{"prompt": "secret \\ud800"}', r":2: holds half of a surrogate pair"),
        (b'{"prompt": "s", "id": 1}\n{"prompt": "t", "id": "1"}', r":3: has the id of line 2"),
        (b'{"prompt": "' + b"s" * (17 << 20) + b'"}', r":2: is longer than 16 MB"),
    ],
    ids=lambda v: v[:40].decode("latin-1") if isinstance(v, bytes) else "",
)
def test_a_bad_line_is_named_and_never_shown(tmp_path, line, words):
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    with pytest.raises(PlanError, match=words) as caught:
        build_plan(config(path))
    assert "secret" not in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert str(caught.value).startswith(f"{path}:")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no prompts"),
        (b"\n \r\n", "holds no prompts"),
        (b"\xff\xfe{\x00", "is UTF-16; save it as UTF-8"),
        (b'[{"conversations": []}]', ":1: begins a JSON list; one object a line is needed"),
        (b"\x1f\x8bsecret", "cannot be unpacked"),
        (gzip.compress(GOOD * 50, mtime=0)[:-9], "cannot be unpacked"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, words):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=words):
        build_plan(config(path))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(PlanError, match=r"none: cannot be read \(No such file or directory\); loadgen\.prompts_file names"):
        build_plan(config(tmp_path / "none"))
    with pytest.raises(PlanError, match="is not a regular file"):
        build_plan(config(tmp_path))


def test_all_problems_of_the_first_lines_come_at_once(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": 1}\n' + GOOD + b"{}\n" + b'{"prompt": "x", "id": []}\n')
    with pytest.raises(PlanError) as caught:
        build_plan(config(path))
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == ["1", "3", "4"]
    path.write_bytes(b"{}\n" * 500)
    with pytest.raises(PlanError) as caught:
        build_plan(config(path))
    lines = str(caught.value).splitlines()
    assert len(lines) == 11 and lines[9].startswith(f"{path}:10: ") and "there may be more" in lines[10]


def test_limits_on_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_file, "MAX_ROWS", 3)
    with pytest.raises(PlanError, match=r":4: is one more than 3 requests"):
        build_plan(config(write(tmp_path / "p.jsonl")))
    monkeypatch.setattr(prompt_file, "MAX_ROWS", 10)
    monkeypatch.setattr(prompt_file, "MAX_BYTES", 100)
    with pytest.raises(PlanError, match="more than 0 GB; take a sample"):
        build_plan(config(write(tmp_path / "q.jsonl")))


def one(tmp_path, messages, endpoint, **engine):
    path = write(tmp_path / "p.jsonl", [{"messages": messages}])
    return build_plan(config(path, target={"endpoint": endpoint}, engine=engine))


SYSTEM, ASK, TOOL = ({"role": role, "content": "x"} for role in ("system", "user", "tool"))


@pytest.mark.parametrize(
    ("endpoint", "messages", "words"),
    [
        ("completions", [ASK], r":1: has messages, and target\.endpoint is completions.*set target\.endpoint to chat, or"),
        ("messages", [SYSTEM], r":1: has system messages only"),
        ("messages", [ASK, SYSTEM, ASK], r':1: messages\[1\] has role "system" after others'),
        ("messages", [ASK, TOOL], r':1: messages\[1\] has role "tool" which it does not know'),
        ("messages", [SYSTEM, SYSTEM, ASK], None),
        ("chat", [ASK, SYSTEM, TOOL], None),
        ("chat", [{"role": "assistant", "tool_calls": [{"id": "1"}]}, ASK], None),
        ("responses", [SYSTEM, ASK], None),
    ],
)
def test_what_an_endpoint_has_no_place_for(tmp_path, endpoint, messages, words):
    if words is None:
        assert len(one(tmp_path, messages, endpoint).lines) == 1
        return
    with pytest.raises(PlanError, match=words):
        one(tmp_path, messages, endpoint)


def test_the_embedded_engine_takes_text_only(tmp_path):
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    assert one(tmp_path, image, "chat").lines.input_tokens.tolist() == [1]
    with pytest.raises(PlanError, match=":1: has a content that is not text; the embedded engine takes text only"):
        one(tmp_path, image, "chat", embedded=True)


BIG = b"9" * 400


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (b'{"seed": 18446744073709551615, "low": -9223372036854775808, "s": "\\ud83d\\ude00"}', None),
        (b'{"seed": 18446744073709551616}', r"extra_body\.seed is a whole number of more than 64 bits"),
        (b'{"a": [1, {"b": %s}]}' % BIG, r"extra_body\.a\[1\]\.b is a whole number of more than 64 bits"),
        (b'{"low": -9223372036854775809}', r"extra_body\.low is a whole number of more than 64 bits"),
        (b'{"t": 1e999}', r"extra_body\.t is no finite number"),
        (b'{"t": [NaN]}', r"holds NaN"),
        (b'{"u": ["\\ud800"]}', r"extra_body\.u\[0\] holds half a character"),
        (b'{"u": {"\\udc00": 1}}', r"extra_body\.u has a key with half a character"),
        (b'{"d": ' + b"[" * 300 + b"]" * 300 + b"}", r"extra_body is nested more than 200 deep"),
    ],
)
def test_what_a_body_cannot_hold_is_refused_with_its_place(tmp_path, extra, words):
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD + b'{"prompt": "x", "extra_body": %s}\n' % extra)
    if words is None:  # second path: the client's own writer and another reader agree on it
        text = PromptText(read_prompts(path))
        assert json.loads(line_body("m", b'"x"', 1, messages=False, extra_body=text.extra(1)))["seed"] == (1 << 64) - 1
        text.close()
        return
    with pytest.raises(PromptError, match=r"p\.jsonl:2: " + words):
        read_prompts(path)


def test_messages_that_are_written_anew_are_looked_at_too(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "n": %s}]}\n' % BIG)
    with pytest.raises(PromptError, match=r":1: messages\[1\]\.n is a whole number of more than 64 bits"):
        read_prompts(path, endpoint="messages")
    assert len(read_prompts(path, endpoint="chat")) == 1  # sent byte for byte


def test_blank_lines_are_bounded(tmp_path, monkeypatch):
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD + b" \t\r\n" * 50 + b"\n" * 50 + GOOD))
    monkeypatch.setattr(prompt_file, "MAX_BLANK", 100)
    assert read_prompts(path).line.tolist() == [1, 102]
    path.write_bytes(gzip.compress(GOOD + b"\n" * 30_000_000))
    with pytest.raises(PromptError, match=r"p\.jsonl\.gz:102: more than 100 blank lines; take them out"):
        read_prompts(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    plan = read_prompts(write(tmp_path / "p.jsonl"))
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(PromptError, match=r": is not a regular file; name a JSONL file"):
            read_prompts(path)
        with pytest.raises(PromptError, match=r": is not a regular file; name a JSONL file"):
            PromptText(plan, str(path))


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_moved_to_the_path_is_not_seen_and_writing_into_it_is(tmp_path, packed):
    path = write(tmp_path / "p.jsonl")
    raw = path.read_bytes()
    if packed:
        path.write_bytes(gzip.compress(raw))
    plan = read_prompts(path)
    text = PromptText(plan)
    other = tmp_path / "other.jsonl"
    other.write_bytes(raw.replace(b"three", b"THREE"))
    os.replace(path, tmp_path / "old.jsonl")
    os.replace(other, path)
    assert text.text(2) == "three" and text.is_current(plan) and not text.changed
    with open(tmp_path / "old.jsonl", "r+b") as handle:
        handle.write(raw.replace(b"three", b"THREE"))
    os.utime(tmp_path / "old.jsonl", ns=(1, 1))  # whatever the clock's grain is
    assert text.changed == (not packed) and text.is_current(plan) == packed  # what was unpacked is our own copy
    text.close()


KEY = "sk-test-0123456789abcdef"


@pytest.mark.parametrize("label", [{"tenant": KEY}, {"request_class": f"a {KEY}"}, {"id": KEY}, {KEY: 1}])
@pytest.mark.parametrize("variable", ["BENCH_API_KEY", "TAOTOKEN_API_KEY_FILE", "api_key_file"])
def test_an_api_key_is_no_label(tmp_path, monkeypatch, label, variable):
    (tmp_path / "key").write_text(KEY)
    if variable != "api_key_file":
        monkeypatch.setenv(variable, KEY if variable == "BENCH_API_KEY" else str(tmp_path / "key"))
    target = {"api_key_file": str(tmp_path / "key")} if variable == "api_key_file" else {}
    path = write(tmp_path / "p.jsonl", [{"prompt": "x"}, {"prompt": "y", **label}])
    with pytest.raises(PlanError, match=r"p\.jsonl:2: .* the API key of the environment") as caught:
        build_plan(config(path, target=target))
    assert KEY[:10] not in str(caught.value) and fault_code(str(caught.value)) == "CFG-010"
    if KEY not in label and "id" not in label:
        rows = [{"timestamp": 1000 * i, "input_length": 9, "output_length": 9, **more} for i, more in enumerate(({}, label))]
        trace = {"arrival_process": "trace", "trace_file": str(write(tmp_path / "t.jsonl", rows)), "prompts_file": None}
        with pytest.raises(PlanError, match=r"t\.jsonl:2: .* the API key of the environment") as caught:
            build_plan(config(path, target=target, **trace))
        assert KEY[:10] not in str(caught.value)
