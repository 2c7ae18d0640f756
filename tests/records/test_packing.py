"""Batches come back as they went, and cost few bytes."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.records.packing import join, pack, unpack
from bench.records.request import COLUMNS, FIELD_NAMES, FLAGS, RequestRow

number = st.one_of(st.none(), st.floats(allow_nan=False), st.just(math.inf), st.just(-0.0))
count = st.one_of(st.none(), st.integers(0, 2**40))
word = st.one_of(st.none(), st.text(max_size=9))


@st.composite
def rows(draw: st.DrawFn) -> RequestRow:
    """Any row: every optional field absent, zero, tiny, huge or infinite."""
    return RequestRow(
        stage=draw(st.integers(0, 99)), arrival=draw(st.integers(0, 2**31)), worker=draw(st.integers(0, 999)),
        repeat=draw(st.integers(0, 9)), offered_qps=draw(st.floats(0, 1e6)), phase=draw(st.sampled_from(["warmup", "window"])),
        tenant=draw(st.text(max_size=8)), request_class="", request_id=draw(st.text(max_size=30)),
        status="ok", code=draw(word), http_status=draw(count), sent_s=draw(number), ttft_s=draw(number),
        tpot_s=draw(number), output_tokens=draw(count), retry_after_s=draw(number), flags=draw(st.text(max_size=9)),
        detail=draw(st.text(max_size=200)),
    )  # fmt: skip


@settings(max_examples=200, deadline=None, print_blob=True)
@given(st.lists(rows(), max_size=9))
def test_a_batch_comes_back_as_it_went(batch: list[RequestRow]) -> None:
    assert_same(unpack(pack(batch)).rows(), batch)
    assert_same(join([unpack(pack(batch[:7])), unpack(pack(batch[7:]))]).rows(), batch)


def test_pauses_between_columns_change_nothing() -> None:
    batch = [RequestRow(0, i, 0, 0, 5.0, "window", "", "", f"r-{i}", "ok", intended_s=float(i)) for i in range(50)]
    pauses: list[int] = []
    assert pack(batch, lambda: pauses.append(len(pauses))) == pack(batch)
    assert len(pauses) > 1.5 * len(FIELD_NAMES)  # once for a column made, once for a column packed


def assert_same(found: list[RequestRow], rows: list[RequestRow]) -> None:
    assert len(found) == len(rows)
    for row, other in zip(rows, found, strict=True):
        for name in FIELD_NAMES:
            value, back = getattr(row, name), getattr(other, name)
            # the ledger keeps nine decimals; two of them are rounded where a latency is a difference
            assert back == value or (isinstance(value, float) and abs(back - value) <= 1.6e-9), name


def test_a_nan_is_refused_where_it_is_made() -> None:
    row = RequestRow(0, 7, 0, 0, 5.0, "window", "", "", "r", "ok", ttft_s=math.nan)
    with pytest.raises(ValueError, match="arrival 7: ttft_s is NaN"):
        pack([row])


@pytest.mark.parametrize("data", [b"", b"not a batch", pack([])[:-3]])
def test_bytes_that_are_no_batch_are_said_so(data: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        unpack(data)


def test_a_usual_batch_is_small() -> None:
    rng = random.Random(5)
    batch = [
        RequestRow(
            3, i, i % 2, 0, 20.0, "window", "", "", f"20261129T120000Z-abcdef-3-{i}", "ok", http_status=200,
            finish_reason="length", intended_s=i / 20 + rng.random(), sent_s=i / 20 + rng.random(),
            first_token_s=i / 20 + rng.random(), last_token_s=i / 20 + rng.random(), done_s=i / 20 + rng.random(),
            ttft_s=rng.random(), tpot_s=rng.random() / 50, e2e_s=rng.random(), residence_s=rng.random(),
            input_tokens=rng.randint(100, 2000), max_tokens=rng.randint(10, 500), output_tokens=rng.randint(10, 500),
        )
        for i in range(500)
    ]  # fmt: skip
    # nine random numbers of nine decimals cannot be packed below their 9 x 3.8 bytes; the rest is nearly free
    assert len(pack(batch)) / 500 < 60


def test_every_column_has_a_unit_and_a_meaning() -> None:
    assert tuple(COLUMNS) == FIELD_NAMES
    assert all(meaning for _, meaning in COLUMNS.values())
    assert list(FLAGS) == sorted(FLAGS)
