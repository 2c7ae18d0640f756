"""The page as text: what must stand on it, what must never, and its size."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from html.parser import HTMLParser

import pytest

from bench.records.analysis import Reason, from_json, to_json
from reports import compare
from reports.html import policy, render, safe_json
from tests.reports import examples
from tests.reports.conftest import text_of

VOID = {"meta", "link", "input", "br", "img", "hr"}


class Nesting(HTMLParser):
    """Fails on a tag that is closed out of order, on inline handlers, styles and addresses."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.problems: list[str] = []
        self.headings: list[int] = []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "style" or name.startswith("on"):
                self.problems.append(f"{tag} has {name}")
            if name in ("src", "href", "xlink:href", "action") and value and not value.startswith(("#", "data:,")):
                self.problems.append(f"{tag} {name}={value}")
            if name == "id":
                self.ids.append(value)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> out of order")


def parsed(html: str) -> Nesting:
    parser = Nesting()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser


@pytest.mark.parametrize(
    ("name", "lang"),
    [(n, "en") for n in sorted(examples.ALL)] + [("sweep", "zh-CN"), ("nothing", "zh-CN"), ("empty", "zh-CN")],
)
def test_every_kind_of_run_gives_a_whole_page(pages, name, lang):
    html = pages(name, lang)
    parser = parsed(html)
    assert parser.problems == []
    assert len(parser.ids) == len(set(parser.ids)), "an id stands twice"
    assert parser.headings[0] == 1 and parser.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(parser.headings, parser.headings[1:], strict=False)), (
        "a heading level is skipped"
    )
    text = text_of(html)
    assert "None" not in text and "nan" not in text.lower().split() and "Undefined" not in text
    assert f'<html lang="{lang}">' in html


def test_order_of_the_wireframe(pages):
    html = pages("sweep")
    order = re.findall(r'<section id="(\w+)"', html)
    assert order == [
        "verdict",
        "capacity",
        "little",
        "server",
        "model",
        "stages",
        "errors",
        "requests",
        "client",
        "reproduce",
        "method",
    ]
    assert re.findall(r'<a href="#(\w+)"', html.split("<main>")[0]) == order


def test_verdict_comes_first_in_word_symbol_and_sentence(pages):
    for name, word, symbol in (("sweep", "PASS", "✓"), ("failed", "FAIL", "✕"), ("invalid", "INVALID", "!")):
        text = text_of(pages(name).split("<main>")[1])
        assert text.startswith(f"{symbol} {word} ")
        assert examples.ALL[name]().verdict.sentence in text[:300]


def test_safe_rate_stands_in_the_first_tiles(pages):
    text = text_of(pages("sweep").split("<main>")[1])[:500]
    assert "Safe rate (watermark) 13.7 – 15.7 requests/s" in text and "Knee 20.9 requests/s" in text


def test_invalid_prints_no_capacity_figure(pages):
    html = re.sub(r"<svg.*?</svg>", "", pages("invalid"), flags=re.S)
    text = text_of(html)
    for figure in ("20.9", "13.7", "15.7", "20.4", "23.9"):  # knee, watermark, predicted knee, hard limit
        assert f" {figure} " not in text, figure
    assert text.count("not given") == 4
    assert "crosses" not in text and "at or above 99" not in text and "falls below" not in text


def test_absent_numbers_are_said_in_words(pages):
    text = text_of(pages("simulated"))
    assert "SIMULATED" in text and "simulated: nothing was sent" in text
    nothing = text_of(pages("nothing"))
    assert "INTERRUPTED" in nothing and "No stage was measured." in nothing
    empty = text_of(pages("empty"))
    assert "did not finish" in empty and "No request finished." in empty
    assert "says nothing about its capacity" in empty


def test_withheld_percentiles_say_why_with_n(pages):
    html = pages("sweep")
    assert 'title="needs 1,000 samples, this stage has n = 300"' in html
    assert "p99 withheld for too few independent arrivals in " in text_of(html)


def test_an_interval_that_is_not_there_says_why():
    analysis = examples.sweep()
    few, dependent, endless, withheld = (s.latency["ttft_s"] for s in analysis.stages[:4])
    few.p95_low = few.effective_n = few.interval_reliable = None
    few.n = 57
    dependent.p95_low, dependent.n, dependent.effective_n, dependent.interval_reliable = None, 207, 20.5, False
    endless.p95_low, endless.p95 = None, math.inf
    withheld.p95_low, withheld.withheld = None, {"p95": "57 values; 72 are needed"}
    html = render(analysis, live=False)
    table = text_of(html.partition('id="fig-latency"')[2].partition("</figure>")[0])
    for words in ("none, n too small: 57 arrivals", "none, not reliable: 207 arrivals, worth 20 independent ones",
                  "none, p95 did not finish", "none, p95 is withheld: 57 values; 72 are needed"):  # fmt: skip
        assert words in table
    for stage in analysis.stages:
        stage.latency["ttft_s"].p95_low = None
    assert "No p95 has a reliable interval" in text_of(render(analysis, live=False))


def test_both_warm_ups_are_named_with_which_was_applied():
    analysis = examples.sweep()
    first = analysis.stages[0]
    first.start_s, first.window_start_s, first.warmup_suggested_s = 100.0, 102.0, 9.8
    text = text_of(render(analysis, live=False))
    assert "Warm-up cut, as configured (applied) 2,000 ms" in text
    assert "Warm-up by the data, MSER-5 or 10 × W (not applied) 9,800 ms" in text


def test_no_axis_prints_an_exponent(pages):
    """Rates from 5 to 10 and misses to 10,000: what d3 rounds to one digit unless it is told not to."""
    made = [pages("sweep"), render(examples.sweep((5, 10)), live=False), compare.render(examples.comparison())]
    letters = [text for html in made for text in re.findall(r"<text[^>]*>([^<]*)</text>", html)]
    assert "10,000" in letters and "10" in letters
    assert [text for text in letters if re.fullmatch(r"\S*\de[+-]?\d+", text)] == []


def test_backticks_are_code_and_not_letters():
    analysis = examples.sweep()
    said = "run `bench check` & look at <b>"
    analysis.warnings = [Reason("WARN-X", "warn", said, next_step=said)]
    html = render(analysis, live=False)
    assert html.count("run <code>bench check</code> &amp; look at &lt;b&gt;") == 2 and "`" not in text_of(html)


@pytest.mark.parametrize(
    ("at", "english", "chinese"), [("all", "every stage", "每个阶段"), ("12.5", "12.5 requests/s", "12.5 QPS")]
)
def test_where_a_gate_is_judged_is_said_in_both_languages(at, english, chinese):
    analysis = examples.sweep()
    analysis.gates[0].at = at
    for lang, words in (("en", english), ("zh-CN", chinese)):
        assert f'">{words}</td>' in render(analysis, lang=lang, live=False)


def test_the_lower_bound_stands_beside_the_rate_that_held():
    analysis = examples.one_stage()
    c = analysis.capacity
    c.knee_kind, c.knee_qps, c.last_met_qps, c.knee_low_qps = "at_least", 2.0, 2.0, 1.63
    c.watermark_low_qps, c.watermark_high_qps = 0.7 * 1.63, 0.8 * 1.63
    text = text_of(render(analysis, live=False))
    assert "≥ 1.6 requests/s" in text and "still held (2); these arrivals prove 1.6, the lower bound (95 %)" in text
    assert "≥ 2.0" not in text  # more than was shown
    assert "70 to 80 % of 1.6, the lower bound of the rate that holds" in text


def test_the_bar_at_the_top_says_whether_to_trust_it_and_what_rate_is_safe(pages):
    def bar(html):
        return text_of(html.partition('<div class="verdict ')[2].partition('<ul class="tiles">')[0])

    c = examples.sweep().capacity
    assert "Safe rate in production: " in bar(pages("sweep")) and c.watermark_low_qps
    assert "May you trust it? Yes" in bar(pages("sweep")) and "May you trust it? Yes" in bar(pages("failed"))
    assert "May you trust it? No." in bar(pages("invalid")) and "Safe rate" not in bar(pages("invalid"))
    thin = examples.one_stage()
    thin.verdict.status, thin.target_qps, thin.stages[0].verdict = "PASS", thin.stages[0].offered_qps, "UNDECIDED"
    assert "too few to prove the share" in bar(render(thin, live=False))


def test_stage_table_says_what_its_rates_count_and_slow_requests_stand_without_their_id(pages):
    html = pages("sweep")
    stages = text_of(html.partition('<section id="stages"')[2].partition("</section>")[0])
    assert "goodput the arrivals planned in it" in stages
    assert "The 12 slowest requests" in text_of(html) and "r-7-40" not in html


def test_hostile_text_is_only_text(pages):
    for lang in ("en", "zh-CN"):
        html = pages("sweep", lang)
        assert "<script>alert" not in html and "<img src=x" not in html
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
        assert len(re.findall(r"<script\b", html)) == 3
        assert len(re.findall(r"</script>", html)) == 3


def test_hostile_names_everywhere():
    analysis = examples.one_stage()
    bad = examples.HOSTILE
    analysis.run["config"]["model"] = analysis.run["run_id"] = bad
    analysis.run["command"] = ["bench", bad]
    analysis.run["versions"] = {bad: bad}
    analysis.verdict.sentence = analysis.capacity.sentence = bad
    analysis.stages[0].name = bad
    analysis.stages[0].attainment_joint.method = bad
    analysis.stages[0].latency["ttft_s"].withheld = {"p99": bad}
    analysis.stages[0].flags = {bad: 0.5}
    analysis.gates[0].text = analysis.gates[0].metric = bad
    analysis.model = {
        "sentence": bad,
        "notes": [bad],
        "predictions": [{"metric": "e2e_mean_s", "offered_qps": 2.0, "measured": 1.0, "predicted": 1.1, "status": bad}],
    }
    html = render(analysis)
    assert "<script>alert" not in html and "<img src=x" not in html
    assert parsed(html).problems == []


def test_policy_hashes_are_those_of_the_page(pages):
    html = pages("sweep")
    content = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html).group(1).replace("&#39;", "'")
    assert "unsafe" not in content and content.startswith("default-src 'none'")

    def digest(text):
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    style = re.search(r"<style>(.*?)</style>", html, re.S).group(1)
    scripts = [
        gzip.decompress(base64.b64decode(re.search(r'id="bundle">(.*?)</script>', html, re.S).group(1))).decode(),
        re.findall(r"<script>(.*?)</script>", html, re.S)[-1],
    ]
    for text in [style, *scripts]:
        assert digest(text) in content
    assert policy(["a"], "b").count("sha256-") == 2


def test_no_address_outside(pages):
    html = re.sub(r'<script type="text/plain" id="bundle">.*?</script>', "", pages("sweep"), flags=re.S)
    found = set(re.findall(r"https?://[^\s\"'<>&\\]+", html)) - {"http://www.w3.org/2000/svg"}
    assert found == {"http://127.0.0.1:8000/v1"}  # the service of the run, as text in the config


def test_size_budgets(pages):
    html = pages("sweep").encode()
    assert len(html) <= 1_300_000
    assert len(gzip.compress(html, 9)) <= 450_000
    assert len(pages("many").encode()) <= 3_000_000  # 120 stages
    assert len(pages("sweep", live=False).encode()) <= 500_000


def test_static_page_has_no_library_but_all_charts(pages):
    html = pages("sweep", live=False)
    assert "vegaEmbed =" not in html and 'id="bundle"' not in html
    # every numbered chart, two distributions and the in-flight curve for each of the eight stages
    small = len(re.findall(r'class="small">', html))
    assert small == 9  # latency x 3, attainment x 2, rates, token speed, Little, in-flight: once more for phones
    assert len(re.findall(r'<svg role="img"', html)) == len(re.findall(r"data-chart=", html)) + 24 + small


def test_every_figure_has_caption_and_table(pages):
    html = pages("sweep")
    figures = re.findall(r"<figure.*?</figure>", html, re.S)
    assert len(figures) >= 9
    for figure in figures:
        assert figure.count("<figcaption>") == figure.count('<details class="numbers">') >= 1
        assert figure.count('aria-label="') >= 2
    numbers = [int(n) for n in re.findall(r"Figure (\d+)<", html)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_secrets_are_masked_again():
    analysis = examples.nothing()
    analysis.run["config"]["target"] = {
        "api_key": "sk-live-1234567890",
        "extra_headers": {"Authorization": "Bearer abcdef"},
    }
    analysis.run["config"]["loadgen"]["max_output_tokens"] = 64
    html = render(analysis)
    assert "sk-live" not in html and "abcdef" not in html and "***" in html
    assert "max_output_tokens&#34;: 64" in html


def test_page_from_stored_json_is_the_same(pages):
    assert render(from_json(to_json(examples.sweep()))) == pages("sweep")


def test_chart_json_cannot_end_its_element():
    text = safe_json({"a": "</script><!--\u2028&"})
    assert "<" not in text and ">" not in text and "&" not in text and "\u2028" not in text
    assert json.loads(text) == {"a": "</script><!--\u2028&"}


def test_unknown_words_of_a_newer_analysis_are_shown_as_they_are():
    analysis = examples.one_stage()
    analysis.stages[0].binding_clause = "new_clause"
    analysis.stages[0].stationarity = "NEW_STATE"
    analysis.errors[0].layer = "new_layer"
    analysis.gates[0].status = "new_status"
    assert "NEW_STATE" in text_of(render(analysis))


def test_title_and_banner_hold_the_marks():
    analysis = examples.interrupted()
    analysis.run["simulated"] = True
    html = render(analysis, live=False)
    assert "<title>PASS (INTERRUPTED, SIMULATED) · " in html
    banner = text_of(html.split("<main>")[1])[:120]
    assert banner.startswith("✓ PASS INTERRUPTED SIMULATED ")
    assert re.search("<title>INVALID", render(examples.invalid(), live=False))


def test_invalid_and_left_out_stages_give_no_attainment_tile():
    from reports.charts import Context
    from reports.figures import Figures
    from reports.view import tiles
    from reports.words import Words

    def tile(analysis):
        return tiles(Context(analysis, Words("en"), Figures(Words("en"))))[2]

    assert tile(examples.sweep())["value"].startswith("9")
    assert tile(examples.invalid())["value"] == "not given"
    left_out = examples.sweep()
    for s in left_out.stages:
        if s.offered_qps == left_out.target_qps:
            s.verdict = "INVALID"
    assert tile(left_out)["value"] == "not given" and "left out" in tile(left_out)["detail"]


def test_a_rate_that_the_table_calls_undecided_is_not_said_to_have_held():
    from reports.charts import Context
    from reports.figures import Figures
    from reports.view import tiles
    from reports.words import Words

    analysis = examples.sweep()
    analysis.capacity.knee_kind, analysis.capacity.knee_qps = "at_least", analysis.capacity.last_met_qps

    def words():
        knee, goodput = (tiles(Context(analysis, Words("en"), Figures(Words("en"))))[i] for i in (1, 3))
        return knee["detail"], goodput["label"]

    mine = [s for s in analysis.stages if s.offered_qps == analysis.capacity.last_met_qps]
    for s in mine:
        s.verdict = "MET"
    assert all("held" in text and "decided" not in text for text in words())
    for s in mine:
        s.verdict = "UNDECIDED"
    assert all("decided" in text and "held" not in text for text in words())


def test_a_stage_that_never_ran_has_no_numbers():
    analysis = examples.interrupted()
    analysis.run["interrupted"] = True
    last = analysis.stages[-1]
    last.marks, last.planned, last.verdict, last.stimulus.ok = ["not_run"], 0, "EMPTY", False
    html = render(analysis, live=False)
    text = text_of(html)
    assert "1 stage not run" in text and "in the windows of 3 stages" in text
    row = text_of(re.search(r'<tbody id="stage-3">.*?</tr>', html, re.S).group())
    assert "not run" in row and "%" not in row and " ms" not in row
    assert "OK in" not in text  # the three that ran are all OK


def test_the_p95_crossing_and_all_parameters_are_shown():
    analysis = examples.sweep()
    c = analysis.capacity
    c.p95_crossing_qps, c.p95_crossing_low_qps, c.p95_crossing_high_qps = 33.1, 31.0, 36.0
    c.p95_crossing_kind = "crossing"
    analysis.model["fit"]["prefill_s"] = 0.0012
    text = text_of(render(analysis, live=False))
    assert "The E2E p95 crosses its target of 60.0 s at 33.1 requests/s [31.0, 36.0]." in text
    assert "Step time, δ 1.2 ms" in text


def test_the_methods_of_the_intervals_are_one_short_phrase():
    analysis = examples.sweep()
    for i, s in enumerate(analysis.stages[:4]):
        s.attainment_joint.method = f"Wilson on {i + 1} effective arrivals"
    text = text_of(render(analysis, live=False))
    assert "Bands: 95 % intervals (Wilson). They are wider where misses come in bursts." in text
    assert "Wilson on" not in text


def test_a_sample_of_requests_and_the_services_own_numbers(pages):
    html = pages("sweep")
    text = text_of(html)
    # 8 stages x 20 arrivals, of which two were rejected, and at 30, 35, 40/s three late (i = 0, 5, 10, 15; 9, 19 rejected)
    assert "160 of 480 arrivals are drawn, among them all 28 that missed or failed." in text
    assert "1.00 ms apart" in text and "network and client add little" in text
    assert "At most 10 requests waited inside the service" in text and "3 preemptions, the first at" in text
    bare = examples.sweep()
    bare.server, bare.points = {}, {}
    without = render(bare, live=False)
    assert "The service was not scraped" in text_of(without)
    assert "fig-server" not in without and "fig-input-ttft" not in without


def test_every_point_of_the_sample_is_drawn():
    analysis = examples.sweep()
    html = render(analysis, live=False)
    drawn = re.search(r'data-chart="input-ttft".*?</svg>', html, re.S).group()
    dots = sum(path.count("h0") for path in re.findall(r' d="([^"]*)"[^>]*stroke-linecap="round"', drawn))
    assert dots == analysis.points["outcome"].count("met")
    others = [path.count("M") for path in re.findall(r' d="(M[^"]*z)"', drawn)]
    assert sorted(n for n in others if n > 3) == sorted(
        analysis.points["outcome"].count(o) for o in ("missed", "rejected")
    )


@pytest.mark.parametrize("lang", ["en", "zh-CN"])
def test_a_baseline_has_its_section_and_a_line_under_the_verdict(lang):
    html = render(examples.sweep(), lang=lang, live=False, comparison=examples.comparison())
    assert parsed(html).problems == []
    sections = re.findall(r'<section id="(\w+)"', html)
    assert sections[sections.index("client") + 1] == "compare"
    text = text_of(html)
    if lang == "en":
        assert "✕ WORSE Worse over 2 rates: 1 of 3 numbers, first attainment at 10 requests/s: 100.00 % to 90.00 %." in text
        assert "Clearly changed: 1 of 4 numbers" in text and "knee, requests/s 20.9" in text
    for figure in ("compare-attainment", "compare-ttft", "fig-difference"):
        assert figure in html
    assert "did not finish [" in text or "未完成" in text  # the baseline's endless p95 in the table


def test_a_refused_comparison_says_why():
    refused = {"refused": {"code": "differs", "details": ["model: a against <b>"], "text": "", "base": "runs/base"}}
    html = render(examples.sweep(), live=False, comparison=refused)
    assert "NOT COMPARED" in text_of(html) and "<code>model: a against &lt;b&gt;</code>" in html
    assert "The runs did not run the same test" in text_of(html)
    assert parsed(html).problems == []


ENGLISH = re.compile(r"[A-Za-z][a-z']+(?:[ ,]+[a-z][a-z']*){2,}")


def readable(html: str) -> str:
    """What a reader is told: not code, not samples of the server, not attributes of machines."""
    html = re.sub(r"<(script|style|pre|code)\b.*?</\1>", " ", html, flags=re.S)
    html = re.sub(r"<dl class=\"facts machine\">.*?</dl>", " ", html, flags=re.S)
    said = re.findall(r'(?:title|aria-label)="([^"]*)"', html)
    return " | ".join([re.sub(r"<[^>]+>", " | ", html), *said])


def test_the_check_for_english_finds_english(pages):
    assert ENGLISH.search(readable(pages("sweep")))
    assert ENGLISH.search(readable("<p>中文 the sender was late</p>"))
    assert not ENGLISH.search(readable("<p>Little 定律，TTFT p95 与 Kolmogorov-Smirnov</p>"))


def test_identical_reasons_stand_once_with_their_number():
    analysis = examples.sweep()
    one = analysis.warnings[0] if analysis.warnings else Reason("WARN-X", "warn", "the same thing")
    analysis.warnings = [one, one, one]
    text = text_of(render(analysis, live=False))
    assert text.count(one.text) == 1 and "×3" in text


def test_what_the_headline_says_is_not_said_again():
    analysis = examples.invalid()
    reason = analysis.verdict.reasons[0]
    analysis.verdict.sentence = f"The measurement is not to be trusted: {reason.text}."
    text = text_of(render(analysis, live=False))
    assert text.count(reason.text) == 1 and reason.next_step in text


def test_capacity_is_rounded_as_in_the_sentence():
    analysis = examples.sweep()
    c = analysis.capacity
    c.knee_qps, c.knee_low_qps, c.knee_high_qps = 19.98, 17.27, 22.01
    c.watermark_low_qps, c.watermark_high_qps = 12.09, 13.99
    text = text_of(render(analysis, live=False))
    assert "12.0 – 13.9 requests/s" in text and "Knee 19.9 requests/s 95 % [17.2, 22.1]" in text
