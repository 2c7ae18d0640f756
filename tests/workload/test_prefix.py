"""Prompts of a trace begin alike where its block ids do: by hand, by the text itself, in the plan and in both clocks."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.config.schema import Config
from bench.workload.plan import Plan, PlanError, build_plan
from bench.workload.prefix import SharedStarts, make_prefixes, mix
from bench.workload.prompts import PromptMaker
from bench.workload.schedule import build_schedule
from bench.workload.trace import TraceError, read_trace
from engine.blocks import BlockPool, block_names
from engine.http_api import parse_call
from engine.http_fleet import prompt_hashes
from engine.request import Request, mix64
from engine.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]
TURNS = ROOT / "configs" / "study" / "chat_turns.jsonl"
# Public files (docs/study.md names them); a clone has none of them.
PUBLIC = [path for folder in (Path(os.environ.get("BENCH_TRACES", ROOT.parent / "shared" / "traces")),)
          for path in sorted(folder.glob("mooncake_*.jsonl.gz"))]  # fmt: skip
MAKER = PromptMaker()

#            tokens, ids; and what a cache without end, blocks of 16, finds when they come one after another
BY_HAND = [
    (1100, [1, 2, 3], 0),
    (1024, [1, 2], 1008),  # all 64 blocks are there, but the last token is always computed: (1024 - 1) // 16 = 63
    (1030, [1, 2, 4], 1024),  # 2 x 512, then another block
    (1100, [1, 2, 3], 1088),  # the same prompt: (1100 - 1) // 16 = 68
    (600, [1, 9], 512),
    (600, [9, 1], 0),  # the same ids in another order begin otherwise
    (700, None, 0),
]


def row(i: int, tokens: int, ids: list[int] | None, **more: object) -> str:
    return json.dumps({"timestamp": 3000 * i, "input_length": tokens, "output_length": 3, "hash_ids": ids, **more}) + "\n"


def write(folder: Path, *rows: str) -> Path:
    path = folder / "t.jsonl"
    path.write_text("".join(rows))
    return path


def hand_trace(folder: Path) -> Path:
    return write(folder, *(row(i, tokens, ids) for i, (tokens, ids, _) in enumerate(BY_HAND)))


def config(path: Path, **load: object) -> Config:
    engine = {"prefix_caching": True, "num_blocks": 10**6, "noise_cv": 0.0, "max_model_len": 200_000}
    return Config.model_validate({"loadgen": {"trace_file": str(path), **load}, "engine": engine})


def texts(plan: Plan, maker: PromptMaker = MAKER) -> list[str]:
    """The prompts that a worker sends."""
    s = build_schedule(plan, plan.stages[0])
    blocks = [s.shared.names(i).tolist() if s.shared else () for i in range(len(s))]
    size = s.shared.block_tokens if s.shared else 0
    return [maker.text(int(s.prompt_seed[i]), int(s.input_tokens[i]), blocks[i], size) for i in range(len(s))]


def common(a: str, b: str) -> int:
    """Words that two texts have in common at their start."""
    n = 0
    for x, y in zip(a.split(), b.split(), strict=False):
        if x != y:
            break
        n += 1
    return n


# -- what is shared ----------------------------------------------------------------------------


def test_virtual_time_finds_what_the_hand_counts(tmp_path):
    c = config(hand_trace(tmp_path))
    rows = simulate(build_plan(c, "replay"), c)
    assert [r.cached_tokens or 0 for r in rows] == [hits for _, _, hits in BY_HAND]
    off = config(hand_trace(tmp_path), trace_prefixes=False)
    assert all(r.cached_tokens is None for r in simulate(build_plan(off, "replay"), off))


def test_the_text_is_shared_as_far_as_the_ids_and_no_further(tmp_path):
    plan = build_plan(config(hand_trace(tmp_path)), "replay")
    found = texts(plan)
    assert [len(text.split()) for text in found] == [tokens for tokens, _, _ in BY_HAND]
    # within a few words by chance: unlike blocks part within their first 8 words
    assert common(found[0], found[1]) == 1024 and common(found[0], found[3]) == 1100 and found[0] == found[3]
    assert 1024 <= common(found[0], found[2]) < 1024 + 8 and 512 <= common(found[0], found[4]) < 512 + 8
    assert common(found[0], found[5]) < 8 and common(found[4], found[5]) < 8 and common(found[0], found[6]) < 8


def test_a_token_that_is_no_word_keeps_the_shares(tmp_path):
    plan = build_plan(config(hand_trace(tmp_path)), "replay")
    found = texts(plan, PromptMaker(1.25))
    assert [len(text.split()) for text in found] == [round(tokens / 1.25) for tokens, _, _ in BY_HAND]
    assert 0 <= common(found[0], found[2]) - round(1024 / 1.25) < 8


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([8, 16, 48, 100, 512]))
def test_block_names_are_equal_where_the_engine_hashes_of_the_text_are(data, size):
    """Virtual time's names against the HTTP engine's hashes of the words: the same blocks are equal in both."""
    rows = data.draw(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=3), st.integers(1, 512)), min_size=2, max_size=6))
    counts, ids = np.array([len(r) for r, _ in rows]), np.array([i for r, _ in rows for i in r], dtype=np.int64)
    shared = SharedStarts(make_prefixes(512, counts, ids), data.draw(st.integers(0, 2**53 - 1)))
    names, hashes = [], []
    for i, (blocks, last) in enumerate(rows):
        tokens = 512 * max(len(blocks) - 1, 0) + last + data.draw(st.sampled_from([0, 0, 700]))
        text = MAKER.text(1000 + i, tokens, shared.names(i).tolist(), 512)
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        names.append(block_names(shared, i, tokens, size, 1000 + i))
        hashes.append(prompt_hashes(parse_call(json.dumps(body).encode(), chat=True), size))
    assert [len(n) for n in names] == [len(h) for h in hashes]
    pairs = {(n, h) for a, b in zip(names, hashes, strict=True) for n, h in zip(a, b, strict=True)}
    assert len({n for n, _ in pairs}) == len({h for _, h in pairs}) == len(pairs)


def test_mix_is_the_engines_mix64():
    values = [0, 1, 2**63, 2**64 - 1, 12345678901234567890]
    assert mix(np.array(values, dtype=np.uint64)).tolist() == [mix64(v) for v in values]


# -- counts over whole files ----------------------------------------------------------------------


def rows_of(path: Path) -> list[dict]:
    raw = path.read_bytes()
    text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    return [json.loads(line) for line in text.decode().splitlines()]


def expected_hits(rows: list[dict]) -> tuple[float, list[int]]:
    """(share of ids seen before, tokens that a cache without end finds per row), from the file alone."""
    seen: set[int] = set()
    hits, total, tokens = 0, 0, []
    for r in rows:
        ids = r["hash_ids"]
        leading = next((k for k, one in enumerate(ids) if one not in seen), len(ids))
        tokens.append(min(leading * 512, (r["input_length"] - 1) // 16 * 16))
        hits += sum(one in seen for one in ids)
        total += len(ids)
        seen |= set(ids)
    return hits / total, tokens


@pytest.mark.parametrize("path", [TURNS, *PUBLIC], ids=lambda p: p.name)
def test_the_hit_ratio_of_a_file_with_a_cache_without_end(path):
    rows = rows_of(path)
    ratio, tokens = expected_hits(rows)
    trace = read_trace(path)
    assert trace.prefixes is not None and trace.prefixes.block_tokens == 512
    assert trace.prefixes.hit_ratio() == pytest.approx(ratio, abs=1e-12)
    published = {"mooncake_fast25_conversation.jsonl.gz": 0.366, "mooncake_fast25_synthetic.jsonl.gz": 0.640}
    assert ratio == pytest.approx(published.get(path.name, ratio), abs=5e-4)
    # the engine's pool, one request after another (the first 400: blocks of 16 are many)
    shared, pool = SharedStarts(trace.prefixes, 7), BlockPool(10**8, 16, True)
    for i, r in enumerate(rows[:400]):
        n = r["input_length"]
        request = Request(str(i), 0.0, n, 1, 1, prefix_hashes=block_names(shared, i, n, 16, i))
        found = pool.match(request, (n - 1) // 16)
        assert found * 16 == tokens[i], (i, r)
        pool.share(request, found)
        pool.take(request, -(-n // 16) - found)
        request.computed = n
        pool.index(request)
        pool.release(request)
    assert 0.3 < ratio < 0.8


def test_the_prefix_router_finds_more_and_keeps_the_load_even():
    """All talks share one of two starts: the router must follow talks, not herd everybody behind a common start."""
    from engine.settings import EngineConfig
    from engine.simulate import simulate_stage

    got = {}
    for router in ("round_robin", "prefix"):
        engine = {"prefix_caching": True, "num_blocks": 30_000, "max_model_len": 30_000, "replicas": 4, "router": router}
        load = {"trace_file": str(TURNS), "trace_rate_scale": 20.0}
        c = Config.model_validate({"loadgen": load, "engine": engine})
        plan = build_plan(c, "replay")
        out = simulate_stage(plan, plan.stages[0], c, EngineConfig.from_config(c)).outcomes
        share = np.bincount(np.array(out.replica), minlength=4) / len(out.replica)
        got[router] = (sum(out.cached_tokens), share.max())
    assert got["prefix"][0] > 1.3 * got["round_robin"][0]
    assert got["prefix"][1] < 0.45


# -- plan, hash, window ------------------------------------------------------------------------------


def test_the_plan_carries_them_and_the_hash_covers_them(tmp_path):
    plan = build_plan(config(hand_trace(tmp_path)), "replay")
    again = Plan.from_json(plan.to_json())
    schedule = build_schedule(plan, plan.stages[0])
    assert build_schedule(again, again.stages[0]).hash == schedule.hash
    assert texts(again) == texts(plan)

    def hash_with(ids: list[int]) -> str:
        path = write(tmp_path, *(row(i, tokens, ids if i == 2 else old) for i, (tokens, old, _) in enumerate(BY_HAND)))
        other = build_plan(config(path), "replay")
        return build_schedule(other, other.stages[0]).hash

    assert hash_with([1, 2, 4]) == schedule.hash
    assert hash_with([1, 2, 77]) == schedule.hash  # another number, the same structure
    assert len({schedule.hash, hash_with([1, 2, 3]), hash_with([5, 6, 7]), hash_with([1, 5, 4])}) == 4
    off = build_plan(config(hand_trace(tmp_path), trace_prefixes=False), "replay")
    assert off.trace.prefixes is None and build_schedule(off, off.stages[0]).hash != schedule.hash


def test_a_plan_of_the_example_stays_small():
    plan = build_plan(config(TURNS), "replay")
    without = build_plan(config(TURNS, trace_prefixes=False), "replay")
    blocks = len(plan.trace.prefixes.ids)
    # numbered by first appearance, differences packed: under three bytes a block
    assert len(plan.to_json()) - len(without.to_json()) < 3 * blocks and blocks > 600


def test_stages_and_turns_share_nothing_with_each_other(tmp_path):
    c = config(hand_trace(tmp_path), arrival_process="trace")
    plan = build_plan(c, "sweep", qps=[0.3, 0.6], duration_s=60)
    turn = [hits for _, _, hits in BY_HAND]
    rows = simulate(plan, c)
    for stage in plan.stages:
        got = [r.cached_tokens or 0 for r in rows if r.stage == stage.index]
        assert len(got) > 2 * len(turn) and got == (turn * 9)[: len(got)]
    heads = {text.split()[0:8][0] + text.split()[7] for stage in plan.stages for text in texts(replace(plan, stages=(stage,)))}
    assert len(heads) > 8  # the same row reads otherwise in another stage and turn


def test_a_cut_prompt_keeps_the_blocks_that_are_left(tmp_path):
    trace = read_trace(hand_trace(tmp_path), max_input_tokens=700, start_s=3.0)
    assert trace.input_tokens.tolist() == [700, 700, 700, 600, 600, 700]
    assert np.diff(trace.prefixes.starts).tolist() == [2, 2, 2, 2, 2, 0]
    # 1 2 | 1 2 | 1 2 | 1 9 | 9 1, by first appearance
    assert trace.prefixes.ids.tolist() == [0, 1, 0, 1, 0, 1, 0, 2, 2, 0]
    assert read_trace(hand_trace(tmp_path), start_s=17.5).prefixes is None  # only the row without ids is left


def test_the_block_size_follows_from_the_rows(tmp_path):
    path = write(tmp_path, row(0, 16, [1]), row(1, 40, [1, 2, 3]), row(2, 33, [1, 2, 4]))
    trace = read_trace(path)
    assert trace.prefixes.block_tokens == 16 and trace.prefixes.ids.tolist() == [0, 0, 1, 2, 0, 1, 3]


@pytest.mark.parametrize(("rows", "words"), [
    ([row(0, 1100, [1, 2, 3, 4])], ":1: hash_ids has 4 ids, input_length 1100 has 3 blocks of 512 tokens"),
    ([row(0, 1100, [1, 2, 3]), row(1, 64, [1, 2, 3, 4])], ":2: hash_ids has 4 ids, input_length 64 has 1 blocks of 512"),
    ([row(0, 5, "x")], ":1: hash_ids is 'x'; a list of block ids"), ([row(0, 5, [None])], "holds 'None'"),
    ([row(0, 5, [True])], "holds 'True'"), ([row(0, 5, [-1])], "holds '-1'"), ([row(0, 5, [2**63])], "from 0 to 2^63 - 1"),
    ([row(0, 5, [1.5])], "holds '1.5'"), ([row(0, 5, ["a"])], "holds 'a'"),
])  # fmt: skip
def test_damaged_ids_are_named_with_their_line(tmp_path, rows, words):
    path = write(tmp_path, *rows)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert words in str(caught.value) and str(path) in str(caught.value)
    assert len(read_trace(path, prefixes=False)) == len(rows)  # the way out that the message names
    with pytest.raises(PlanError):
        build_plan(config(path), "replay")
