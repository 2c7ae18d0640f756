"""Printed numbers: one rounding, and a word for every kind of absence."""

from __future__ import annotations

import math

import pytest

from bench.records.analysis import Percentiles
from reports.figures import Figures, finite, number
from reports.words import Words

F = Figures(Words("en"))


def said(text: str) -> str:
    return text.replace("\u202f", " ")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.412, "412 ms"),
        (0.0412, "41.2 ms"),
        (0.00084, "0.84 ms"),
        (9.1264, "9,126 ms"),
        (12.34, "12.3 s"),
        (0.0, "0 ms"),
        (61.0, "61.0 s"),
        (None, "not measured"),
        (math.nan, "not measured"),
        (math.inf, "did not finish"),
        ("inf", "did not finish"),
    ],
)
def test_duration(value, text):
    assert said(F.duration(value)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.99, "99.00 %"),
        (1.0, "100.00 %"),
        (0.999999, "99.99 %"),
        (0.0, "0.00 %"),
        (None, "not measured"),
    ],
)
def test_share_says_all_only_when_it_is_all(value, text):
    assert said(F.share(value)) == text


def test_rates_and_counts():
    assert F.rate(22.46) == "22.5"
    assert F.asked(22.5) == "22.5" and F.asked(15.0) == "15"
    assert F.count(10800) == "10,800"
    assert said(F.signed_share(-0.0312)) == "−3.1 %"
    assert F.rate(None) == "not measured"  # never 0


def test_percentile_words():
    p = Percentiles(n=300, p50=0.1, p95=math.inf, p99=0.2, withheld={"p99": "needs 1,000 samples, n = 300"})
    assert said(F.percentile(p, "p50")) == "100 ms"
    assert F.percentile(p, "p95") == "did not finish"
    assert F.percentile(p, "p99") == "withheld"
    assert F.percentile(Percentiles(n=0), "p50") == "not measured"
    assert F.percentile(None, "p50") == "not measured"


def test_number_readers():
    assert number("inf") == math.inf and finite("inf") is None
    assert number(True) is None and number("x") is None and number([]) is None
