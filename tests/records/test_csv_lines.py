"""The fast lines are the very bytes of the slow ones."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.records.csv_lines import csv_lines
from bench.records.ledger import cell
from bench.records.packing import batch_of, join, pack, unpack
from bench.records.request import FIELD_NAMES, RequestRow


def slow(rows: list[RequestRow]) -> bytes:
    """What `csv.writer` makes of the rows, one cell after the other."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([[cell(getattr(row, name)) for name in FIELD_NAMES] for row in rows])
    return out.getvalue().encode()


# Whole nanoseconds, so that nothing is left to round: k / 1e9 is the double nearest to its nine decimals.
nanos = st.one_of(
    st.none(), st.integers(-(10**12), 10**15).map(lambda k: k / 1e9), st.integers(0, 10**9).map(lambda k: k / 1e9),
    st.integers(-5, 5).map(float), st.sampled_from([0.1, 0.000000001, 9999.0, 10000.0, 10000.5, 99999999.999999999, math.inf]),
)  # fmt: skip
count = st.one_of(st.none(), st.integers(-3, 3), st.integers(0, 2**40), st.sampled_from([9999, 10000, 10001, 99999999, 10**8, 2**70]))
text = st.one_of(st.none(), st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12))


@st.composite
def rows(draw: st.DrawFn) -> RequestRow:
    return RequestRow(
        stage=draw(st.integers(0, 99)), arrival=draw(st.integers(0, 2**31)), worker=0, repeat=0,
        offered_qps=draw(st.sampled_from([5.0, 0.5, 12345.678])), phase=draw(st.sampled_from(["warmup", "window"])),
        tenant=draw(st.sampled_from(["", "a,b", 'say "x"', "two\nlines", "\r"])), request_class="", request_id=draw(text) or "",
        status=draw(st.sampled_from(["ok", "error"])), code=draw(text), http_status=draw(count), retry_after_s=draw(nanos),
        intended_s=draw(st.integers(0, 10**9)) / 1e6, sent_s=draw(nanos), ttft_s=draw(nanos), input_tokens=draw(count),
        detail=draw(text) or "",
    )  # fmt: skip


@settings(max_examples=200, deadline=None, print_blob=True)
@given(st.lists(rows(), min_size=1, max_size=5))
def test_the_bytes_are_those_of_the_csv_module(batch: list[RequestRow]) -> None:
    assert csv_lines(batch_of(batch)) == slow(batch)


def made(i: int, **more: Any) -> RequestRow:
    """An answered arrival with times in whole nanoseconds."""
    at = i * 2_500_123 / 1e9
    times: dict[str, Any] = {
        "intended_s": at, "sent_s": at + 0.000123457, "headers_s": at + 0.02, "first_token_s": at + 0.1,
        "first_content_s": at + 0.1, "last_token_s": at + 1.1, "done_s": at + 1.1005,
    }  # fmt: skip
    return RequestRow(0, i, 0, 0, 400.0, "window", "", "", f"run-0-{i}", "ok", output_tokens=101, chunks=101, **times, **more)


@pytest.mark.parametrize("n", [1, 2, 2047, 2048, 2049, 5000])
def test_any_number_of_rows_and_any_split_into_batches_gives_the_same_lines(n: int) -> None:
    all_rows = [made(i) for i in range(n)]
    parts = [unpack(pack(all_rows[i : i + 700])) for i in range(0, n, 700)]
    lines = csv_lines(join(parts)).decode().splitlines()
    assert len(lines) == n
    for i in (0, n // 2, n - 1):
        found = dict(zip(FIELD_NAMES, next(csv.reader([lines[i]])), strict=True))
        assert (found["arrival"], found["request_id"]) == (str(i), f"run-0-{i}")
        assert float(found["sent_s"]) == round(i * 2_500_123 / 1e9 + 0.000123457, 9)


def test_latencies_are_the_differences_of_their_times() -> None:
    row = made(3, ttft_s=0.1, e2e_s=1.1, tpot_s=0.01, send_lag_s=0.000123457, residence_s=1.1005 - 0.000123457, ttfo_s=0.1)
    found = dict(zip(FIELD_NAMES, next(csv.reader([csv_lines(unpack(pack([row]))).decode()])), strict=True))
    assert (found["ttft_s"], found["tpot_s"], found["e2e_s"], found["send_lag_s"], found["residence_s"]) == (
        "0.1", "0.01", "1.1", "0.000123457", "1.100376543",
    )  # fmt: skip
