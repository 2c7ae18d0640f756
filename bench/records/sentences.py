"""The English sentences of the analysis, by code, and how a sentence is made from its code and parameters.

Input: a code such as `INV-LAG` and its parameters. Output: one plain text.
Does not: measure, judge, or know other languages. A report in another language brings its own catalogue with the
same codes and calls `render` with it: every sentence of `analysis.json` stands beside its `code` and `params`.

1. A text is a Python format string; its parameters are raw numbers (shares 0..1, milliseconds where the name ends
   in `_ms`), plain names and rates, or sentences again: `{"code": ..., "params": ...}`.
2. Several sentences or names in one place are `{"join": "and" | "comma" | "semicolon", "items": [...]}`; the words
   between them are the catalogue's too.
3. The code of a reason begins with its `reason_id`; what follows a dot tells variants apart. `next.*` are next steps.
4. An absent parameter prints as `-`, an infinite one as `inf`; neither raises.
5. `{n:stage|stages}` is the form of the noun that goes with the number `n`; the number itself stands beside it.
"""
from __future__ import annotations

import math
import string
from collections.abc import Mapping
from typing import Any

from bench.records.sentences_en import ENGLISH

__all__ = ["ENGLISH", "joined", "plural", "render", "said", "text_of", "worded"]


class _Formatter(string.Formatter):
    """`str.format` whose parameters may be sentences, lists, absent, or the "inf" that JSON holds."""

    def __init__(self, catalogue: Mapping[str, str]) -> None:
        self.catalogue = catalogue

    def format_field(self, value: Any, format_spec: str) -> str:
        if "|" in format_spec:
            return plural(value, format_spec)
        if value is None:
            return "-"
        if isinstance(value, Mapping) and "items" in value:
            between = self.catalogue[f"join.{value['join']}"]
            return between.join(self.format_field(item, format_spec) for item in value["items"])
        if isinstance(value, Mapping):
            return text_of(value, self.catalogue)
        if isinstance(value, str) and format_spec:
            return value
        return format(value, format_spec)


def plural(value: Any, forms: str) -> str:
    """The form of a noun that goes with `value`, a number, its printed text or a list. `forms`: `stage|stages`."""
    one, _, many = forms.partition("|")
    if isinstance(value, Mapping) and "items" in value:
        value = len(value["items"])
    return one if str(value) in ("1", "1.0") else many


def worded(text: str, values: Mapping[str, Any]) -> str:
    """A format string with its values, by the rules of the catalogues of sentences."""
    return _Formatter(ENGLISH).vformat(text, (), values)


def render(code: str, params: Mapping[str, Any], catalogue: Mapping[str, str] = ENGLISH) -> str:
    """The text of a sentence in the language of `catalogue`; "" for no code. KeyError: a code that it lacks."""
    return _Formatter(catalogue).vformat(catalogue[code], (), params) if code else ""


def text_of(sentence: Mapping[str, Any], catalogue: Mapping[str, str] = ENGLISH) -> str:
    """The text of a sentence as `said` makes it."""
    return render(sentence["code"], sentence.get("params", {}), catalogue)


def said(code: str, **params: Any) -> dict[str, Any]:
    """A sentence as a parameter of another one."""
    return {"code": code, "params": {name: plain(value) for name, value in params.items()}}


def joined(how: str, items: list[Any]) -> dict[str, Any]:
    """Several sentences or names in one place. `how`: and, comma or semicolon."""
    return {"join": how, "items": items}


def plain(value: Any) -> Any:
    """A parameter as JSON can hold it: numpy numbers become Python's, NaN becomes absent."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and math.isnan(value) else value
