"""The catalogues: same keys, same placeholders, every key of the code."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

import reports
from bench.records.sentences import ENGLISH, plural
from reports.compare_words import CATALOGUES
from reports.tables import FORMULAS, GLOSSARY
from reports.words import LANGUAGES, LISTED, Words, catalogue, sentences

ROOT = Path(reports.__file__).parent
# Families that are looked up by a computed name.
FAMILIES = (
    "at_",
    "axis_input_",
    "axis_output_",
    "chart_input_",
    "chart_output_",
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
    "outcome_",
    "par_",
    "problem_",
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
OTHER_PAGES = ("compare", "overlay", "baseline")


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


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_the_sentences_of_the_analysis_have_the_same_codes_and_parameters():
    chinese = sentences("zh-CN")
    assert set(chinese) == set(ENGLISH)
    assert [code for code in ENGLISH if fields(ENGLISH[code]) != fields(chinese[code])] == []
    words = re.compile(r"[a-z]{3,} [a-z]{2,} [a-z]{2,}")
    assert [c for c, text in chinese.items() if words.search(re.sub(r"`.*?`|{.*?}", "", text))] == []


COUNTED = "stages|rows|requests|runs|rates|arrivals|numbers|cells|gates|predictions|workers|answers|values"
NEVER_ONE = {  # a count that these sentences are not said for when it is one, or a share
    "INV-WORKER.lost_arrivals", "INV-CHANNEL", "INV-CHANNEL.silent", "withheld.dependent", "DIA-CLAUSE.failures",
    "next.arrivals", "cap_ecdf",
}  # fmt: skip


def test_a_counted_noun_has_the_form_of_its_number():
    texts = {**ENGLISH, **catalogue("en"), **CATALOGUES["en"]}
    bare = re.compile(r"\{\w+\} (?:[a-z]+ )?(?:" + COUNTED + r")\b(?!/)")
    assert [key for key, text in texts.items() if bare.search(text)] == sorted(NEVER_ONE, key=list(texts).index)
    t = Words("en")
    assert t("meta_arrivals", n="1", stages=1) == "1 arrival in the window of 1 stage"
    assert t("meta_arrivals", n="1,724", stages=7) == "1,724 arrivals in the windows of 7 stages"
    assert (plural(1.0, "row|rows"), plural(0, "row|rows"), plural({"items": [5]}, "row|rows")) == ("row", "rows", "row")


def test_sentences_are_said_in_both_languages():
    params = {"value": 0.98, "low": 0.97, "high": 0.99, "target": 0.99}
    english = "attainment 0.9800 has the interval 0.9700 to 0.9900, which holds the target 0.99: not decided"
    assert Words("en").said("WARN-UNDECIDED", params, "own") == english
    assert Words("zh-CN").said("WARN-UNDECIDED", params, "own").startswith("达标率 0.9800 的区间为 0.9700 至 0.9900")


def test_a_sentence_without_a_known_code_stays_as_it_is():
    for code, params in (("", {}), ("NEW-CODE", {}), ("WARN-UNDECIDED", {}), ("WARN-UNDECIDED", {"value": ["x"]})):
        assert Words("zh-CN").said(code, params, "as written") == "as written"


def test_long_lists_inside_a_sentence_are_cut():
    shares = [{"code": "clause.share", "params": {"share": i / 100}} for i in range(60)]
    text = Words("en").said("DIA-CLAUSE.ttft", {"stages": {"join": "comma", "items": ["x"] * 60}, "shares":
                            {"join": "comma", "items": shares}}, "")  # fmt: skip
    assert "0.00%, 1.00%, 2.00%, 3.00%, … (+56) of all arrivals" in text and "4.00%" not in text
    assert text.count("x, ") == LISTED


def test_problems_and_metrics_have_names_in_chinese():
    t = Words("zh-CN")
    text = t.said("INV-ROWS", {"problem_id": "LED-008", "message": "2 rows are doubled", "examples": {"code": "",
                  "params": {}}}, "")  # fmt: skip
    assert text == "LED-008：重复的行"
    assert t.said("gate.label", {"metric": "attainment"}, "") == t("metric_attainment")


# Every metric that stands at the head of a column or of a tile -> its entry in the glossary.
TERM_OF = {
    "col_arrived": "arrival", "col_attainment": "attainment", "col_bias": "little", "col_bias_limit": "little",
    "col_blind": "little", "col_cpu": "loop_lag", "col_dispersion": "dispersion", "col_drain": "drain",
    "col_edge_end": "little", "col_edge_start": "little", "col_edges": "little", "col_failed": "failed",
    "col_gap": "little", "col_gap_instants": "little", "col_gap_cv": "cv", "col_growth": "growth", "col_ks": "ks",
    "col_kv_max": "kv", "col_kv_mean": "kv", "col_lag_p50": "lag", "col_lag_p99": "lag", "col_loop_lag": "loop_lag",
    "col_margin": "margin", "col_missed": "attainment", "col_offered": "offered", "col_offered_short": "offered",
    "col_p95_interval": "batch_means", "col_planned": "arrival", "col_queue": "kv", "col_rate_error": "rate_error",
    "col_sent": "arrival", "col_service_m2": "service", "col_service_mean": "service", "col_service_scv": "service",
    "col_spread": "spread", "col_steady": "stationarity", "col_steady_exists": "lambda_max", "col_tokens": "tokens",
    "col_verdict": "attainment", "col_window_end": "window", "col_window_start": "window",
    "rate_completed": "completed", "rate_goodput": "goodput", "rate_offered": "offered",
    "model_naive_mgk": "mgk", "model_naive_pk": "pk", "model_predicted": "replay",
    "model_predicted_birth_death": "birth_death", "par_lambda_max_qps": "lambda_max",
    "tile_attainment": "attainment", "tile_goodput": "goodput", "tile_goodput_undecided": "goodput",
    "tile_knee": "knee", "tile_little": "little", "tile_repeats": "spread", "tile_requests": "arrival",
    "tile_safe": "watermark", "tile_sender": "lag",
}  # fmt: skip
# Heads that name no metric.
PLAIN_HEADS = {
    "col_at", "col_check", "col_clause", "col_code", "col_count", "col_file", "col_first", "col_key", "col_kind",
    "col_last", "col_layer", "col_limit", "col_measured", "col_note", "col_origin", "col_parameter", "col_repeat",
    "col_sample", "col_scrapes", "col_share", "col_source", "col_stage", "col_stages", "col_statistic", "col_status",
    "col_values",
}  # fmt: skip


def test_every_metric_of_a_head_or_a_tile_is_in_the_glossary_with_a_formula():
    view = (ROOT / "view.py").read_text(encoding="utf-8")
    labels = set(re.findall(r"""_(?:tile|no_figure)\((?:ctx, )?\s*t\(['"](tile_\w+)['"]""", view))
    heads = {k for k in catalogue("en") if k.startswith(("col_", "rate_"))} - {"rate_waste"}
    assert len(labels) >= 7
    assert sorted((labels | heads) - TERM_OF.keys() - PLAIN_HEADS) == []
    assert sorted(set(TERM_OF.values()) - set(GLOSSARY)) == []
    assert sorted(TERM_OF.keys() - set(catalogue("en"))) == []
    assert {k.removeprefix("gloss_") for k in catalogue("en") if k.startswith("gloss_")} == set(GLOSSARY)
    prose = {"arrival", "window", "replay", "calibration", "status", "validity", "ks"}  # no quotient to write down
    assert sorted(set(GLOSSARY) - FORMULAS.keys() - prose) == []
