"""The catalogues: same keys, same placeholders, every key of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import reports
from reports.words import LANGUAGES, Words, catalogue

ROOT = Path(reports.__file__).parent
# Families that are looked up by a computed name.
FAMILIES = (
    "at_",
    "check_",
    "clause_",
    "gate_",
    "gloss_",
    "key_",
    "kind_",
    "layer_",
    "loop_",
    "metric_",
    "model_status_",
    "model_",
    "par_",
    "sec_",
    "sender_",
    "sentence_",
    "severity_",
    "shape_",
    "stage_",
    "stagemark_",
    "status_",
    "steady_",
    "term_",
    "theme_",
    "verdict_",
)


# Pages with texts of their own, which are not in the report's catalogue.
OTHER_PAGES = ("compare", "overlay")


def placeholders(text: str) -> list[str]:
    return sorted(re.findall(r"{(\w+)}", text))


def used_keys() -> set[str]:
    found: set[str] = set()
    for path in [*ROOT.glob("*.py"), *ROOT.glob("templates/*.j2")]:
        if path.name.startswith(OTHER_PAGES):
            continue
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r"""\b(?:t|words)\(\s*['"]([A-Za-z0-9_]+)['"]\s*[,)]""", text))
        found |= set(re.findall(r"""['"]((?:cap|note)_[a-z_]+)['"]""", text))
    return found


def test_catalogues_have_equal_keys_and_placeholders():
    base = catalogue("en")
    for lang in LANGUAGES[1:]:
        other = catalogue(lang)
        assert set(other) == set(base)
        assert [
            k for k in base if placeholders(base[k]) != placeholders(other[k]) and not k.startswith("meta_loop")
        ] == []
        assert [k for k in base if not other[k].strip()] == []


def test_every_key_in_code_exists():
    assert sorted(used_keys() - set(catalogue("en"))) == []


def test_no_key_is_dead():
    dead = {k for k in catalogue("en") if k not in used_keys() and not k.startswith(FAMILIES)}
    source = "".join(p.read_text(encoding="utf-8") for p in ROOT.glob("*.py"))
    assert sorted(k for k in dead if f'"{k}"' not in source and f"'{k}'" not in source) == []


def test_texts_hold_no_markup():
    for lang in LANGUAGES:
        assert [k for k, v in catalogue(lang).items() if "<" in v or "&lt;" in v] == []


def test_unknown_language_is_refused_by_name():
    with pytest.raises(ValueError, match="'fr'.*en, zh-CN"):
        Words("fr")


def test_unknown_key_is_a_bug():
    with pytest.raises(KeyError):
        Words("en")("no_such_key")
    assert Words("en").known("no_such_key", "as it is") == "as it is"
