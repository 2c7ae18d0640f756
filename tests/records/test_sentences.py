"""Sentences from codes: nesting, lists, absent and infinite parameters, other catalogues."""
from __future__ import annotations

import string

import pytest

from bench.records.sentences import ENGLISH, joined, plain, render, said

OWN = {"join.and": " und ", "join.comma": ", ", "outer": "<{inner}>", "inner": "{share:.1%} bei {rate:g}", "bare": "{x}"}


@pytest.mark.parametrize(
    ("code", "params", "text"),
    [
        ("", {}, ""),
        ("inner", {"share": 0.125, "rate": 20.0}, "12.5% bei 20"),
        ("outer", {"inner": said("inner", share=0.5, rate=1.5)}, "<50.0% bei 1.5>"),
        ("outer", {"inner": said("")}, "<>"),
        ("outer", {"inner": joined("and", [said("inner", share=1.0, rate=2), "x"])}, "<100.0% bei 2 und x>"),
        ("inner", {"share": None, "rate": "inf"}, "- bei inf"),  # absent, and the infinity that JSON holds
        ("inner", {"share": float("inf"), "rate": 1}, "inf% bei 1"),
    ],
)
def test_a_sentence_is_made_from_its_code(code: str, params: dict, text: str) -> None:
    assert render(code, params, OWN) == text


def test_lists_are_formatted_item_by_item() -> None:
    assert render("bare", {"x": joined("comma", [1, 2.5])}, OWN) == "1, 2.5"
    assert render("target.ran", {"rates": joined("comma", [5.0, 10.0])}) == "; measured rates: 5, 10"


def test_parameters_are_plain_and_hold_no_nan() -> None:
    import numpy as np

    assert plain(np.float64(0.5)) == 0.5 and type(plain(np.int64(3))) is int
    assert plain(float("nan")) is None and plain("x") == "x"


def test_an_unknown_code_is_a_bug() -> None:
    with pytest.raises(KeyError):
        render("no-such-code", {})


@pytest.mark.parametrize("code", sorted(ENGLISH))
def test_every_text_names_its_parameters(code: str) -> None:
    """Only plain names in the fields: a translator can put them in any order."""
    for _, name, _, conversion in string.Formatter().parse(ENGLISH[code]):
        assert name is None or (name.isidentifier() and conversion is None), ENGLISH[code]
