"""A run against a baseline: intervals against published numbers and plain resampling, false alarms, refusals, exit codes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import again
from analysis import compare_runs as cr
from analysis.analyse import analyse_run, write_analysis
from analysis.intervals import wilson
from bench.commands.compare import command, lines
from bench.records.analysis import Analysis, Capacity, Verdict
from reports.compare import Texts, render
from reports.compare_words import CATALOGUES
from tests.analysis.synthetic import Faults, Service, StageSpec, default_config, write_run


def found(verdict: str = "PASS", **capacity: Any) -> Analysis:
    cap = {"knee_qps": None, "knee_low_qps": None, "knee_high_qps": None, "knee_kind": "none"} | capacity
    none = {"knee_method": "", "last_met_qps": None, "watermark_low_qps": None, "watermark_high_qps": None}
    return Analysis(1, {"run_id": "r"}, {}, 20.0, Verdict(verdict, 0, ""), [], [], Capacity(**cap, **none))


def rate(qps: float, latencies: list[np.ndarray], *, limit_s: float = 0.4, hashes: str = "") -> cr.Rate:
    """A rate whose TTFT, TPOT and E2E are one sample; hits are those under the limit."""
    repeats = [cr.Repeat(x <= limit_s, {"ttft_s": x, "tpot_s": x / 10, "e2e_s": x * 5}) for x in latencies]
    return cr.Rate(qps, repeats, [hashes] * len(repeats), ["name"] * len(repeats))


def outcomes(base: list[cr.Rate], new: list[cr.Rate], tolerance: float = 0.1, **sides: Analysis) -> cr.Comparison:
    one = cr.Side(Path("base"), sides.get("first", found()), base, [])
    two = cr.Side(Path("new"), sides.get("second", found()), new, [])
    return cr.compare_sides(one, two, tolerance=tolerance, differences=[])


def outcome(comparison: cr.Comparison, metric: str, statistic: str = "p95") -> str:
    return next(c.outcome for c in comparison.changes if (c.metric, c.statistic) == (metric, statistic))


@pytest.mark.parametrize(
    ("new", "base", "low", "high"),
    [  # Newcombe 1998, table II, method 10
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((10, 10), (0, 10), 0.6075, 1.0000),
        ((5, 56), (0, 29), -0.0381, 0.1926),
    ],
)
def test_the_difference_of_two_shares_is_newcombes(
    new: tuple[int, int], base: tuple[int, int], low: float, high: float
) -> None:
    two, one = ((k / n, *wilson(k, n)) for k, n in (new, base))
    d, a, b = cr.share_difference(one, two)
    assert d == pytest.approx(new[0] / new[1] - base[0] / base[1])
    assert (a, b) == (pytest.approx(low, abs=2e-4), pytest.approx(high, abs=2e-4))


@settings(max_examples=200, print_blob=True, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(5, 12), st.sampled_from([0.5, 0.95]))
def test_a_bootstrap_draw_is_the_percentile_of_what_was_drawn(seed: int, batches: int, share: float) -> None:
    """Second path: put the drawn batches together and sort."""
    rng = np.random.default_rng(seed)
    values = rng.choice([0.1, 0.2, 0.35, 0.5, math.inf], size=batches * 7)
    batch = np.repeat(np.arange(batches), 7)
    weights = rng.multinomial(batches, np.full(batches, 1 / batches), 3)
    drawn = cr._quantiles(values, batch, weights, [share])[share]
    for weight, got in zip(weights, drawn, strict=True):
        whole = np.concatenate([np.tile(values[batch == i], w) for i, w in enumerate(weight) if w])
        assert got == float(np.quantile(whole, share, method="inverted_cdf"))


def test_two_runs_of_one_thing_rarely_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 comparisons of 3 rates, tolerance 0: the whole of the protection is in the intervals.

    At the stated 5 % of comparisons, 60 give 3 alarms; 8 or more have a probability of 0.7 %.
    """
    monkeypatch.setattr(cr, "DRAWS", 300)
    rng = np.random.default_rng(5)
    alarms = 0
    for _ in range(60):
        sides = [[rate(q, [rng.lognormal(-2, 0.6, 400)]) for q in (5.0, 10.0, 20.0)] for _ in range(2)]
        alarms += outcomes(*sides, tolerance=0.0).outcome != cr.SAME
    assert alarms < 8


@pytest.mark.parametrize(("factor", "word"), [(1.5, "worse"), (1 / 1.5, "better"), (1.06, "no clear change")])
def test_a_change_is_found_in_its_direction(factor: float, word: str) -> None:
    rng = np.random.default_rng(7)
    base, new = (rng.lognormal(-2, 0.3, 2000) for _ in range(2))
    comparison = outcomes([rate(20.0, [base])], [rate(20.0, [new * factor])])
    assert {outcome(comparison, m, s) for m in ("ttft", "tpot", "e2e") for s in ("p50", "p95")} == {word}
    assert comparison.outcome == word and comparison.exit_code == (5 if word == "worse" else 0)
    for change in comparison.changes:
        if change.metric == "ttft":
            assert change.low < change.effect < change.high  # type: ignore[operator]


def test_the_same_schedule_is_compared_in_pairs() -> None:
    """Long and short requests come at the same times in both runs: their spread is no noise."""
    rng = np.random.default_rng(3)
    work = np.repeat(rng.lognormal(-2, 1.0, 40), 25)  # each batch has a level of its own
    sides = [work * rng.lognormal(0, 0.05, 1000) * f for f in (1.0, 1.2)]
    widths, words = {}, {}
    for hashes in ("", "same"):
        comparison = outcomes([rate(20.0, [sides[0]], hashes=hashes)], [rate(20.0, [sides[1]], hashes=hashes)])
        c = next(c for c in comparison.changes if (c.metric, c.statistic) == ("ttft", "p50"))
        widths[hashes], words[hashes] = c.high - c.low, c.outcome  # type: ignore[operator]
    assert widths["same"] < widths[""] / 3 and words == {"": "no clear change", "same": "worse"}


def test_a_change_below_the_spread_of_the_repeats_is_none() -> None:
    rng = np.random.default_rng(9)
    sample = [rng.lognormal(-2, 0.2, 1000) for _ in range(4)]
    steady = outcomes([rate(20.0, [sample[0], sample[1]])], [rate(20.0, [sample[2] * 1.3, sample[3] * 1.3])])
    noisy = outcomes([rate(20.0, [sample[0], sample[1] * 1.6])], [rate(20.0, [sample[2] * 1.7, sample[3] * 1.7])])
    assert outcome(steady, "ttft", "p50") == "worse" and outcome(noisy, "ttft", "p50") == "no clear change"
    floor = next(c.noise_floor for c in noisy.changes if (c.metric, c.statistic) == ("ttft", "p50"))
    assert floor == pytest.approx(0.6, abs=0.05) and not steady.notes


def test_what_never_finished_counts() -> None:
    rng = np.random.default_rng(2)
    good, bad = rng.lognormal(-2, 0.2, 1000), rng.lognormal(-2, 0.2, 1000)
    bad[rng.random(1000) < 0.2] = np.inf
    worse = outcomes([rate(20.0, [good])], [rate(20.0, [bad])])
    assert outcome(worse, "ttft") == "worse" and outcome(worse, "attainment", "value") == "worse"
    assert outcome(worse, "ttft", "p50") == "no clear change"
    assert outcome(outcomes([rate(20.0, [bad])], [rate(20.0, [good])]), "ttft") == "better"
    both = outcomes([rate(20.0, [bad])], [rate(20.0, [bad.copy()])])
    assert outcome(both, "ttft") == "no clear change"
    text = json.dumps(worse.to_dict(), allow_nan=False)  # endless is a word in JSON
    assert '"inf"' in text


def test_few_arrivals_and_overload_are_said_and_not_compared() -> None:
    rng = np.random.default_rng(2)
    few = outcomes([rate(5.0, [rng.lognormal(-2, 0.2, 60)])], [rate(5.0, [rng.lognormal(0, 0.2, 60)])])
    assert outcome(few, "ttft") == "not compared" and outcome(few, "attainment", "value") == "worse"
    sides = [[rate(40.0, [rng.lognormal(k, 0.2, 600)])] for k in (0, 1)]
    for side in sides:
        side[0].unstable = True
    beyond = outcomes(*sides)
    assert [c.outcome for c in beyond.changes] == ["not compared"] and "beyond capacity" in beyond.changes[0].note
    with pytest.raises(cr.CompareError, match="no rate was validly measured in both"):
        outcomes(sides[0], [rate(10.0, [rng.lognormal(0, 0.2, 100)])])


@pytest.mark.parametrize(
    ("base", "new", "word"),
    [
        ((20, 19, 21, "crossing"), (15, 14, 16, "crossing"), "worse"),
        ((20, 19, 21, "crossing"), (19.5, 18.5, 20.5, "crossing"), "no clear change"),
        ((20, 19, 21, "crossing"), (None, 40, None, "at_least"), "better"),
        ((None, 40, None, "at_least"), (None, 40, None, "at_least"), "no clear change"),
        ((20, 19, 21, "crossing"), (None, None, 5, "below"), "worse"),
    ],
)
def test_the_knees_are_compared_by_their_intervals(base: tuple[Any, ...], new: tuple[Any, ...], word: str) -> None:
    names = ("knee_qps", "knee_low_qps", "knee_high_qps", "knee_kind")
    one, two = (found(**dict(zip(names, side, strict=True))) for side in (base, new))
    x = np.full(1000, 0.1)
    comparison = outcomes([rate(5.0, [x])], [rate(5.0, [x])], first=one, second=two)
    assert outcome(comparison, "knee", "value") == word


# -- folders and the command -----------------------------------------------------------------------

SPECS = [StageSpec(qps=8, duration_s=40, warmup_s=4), StageSpec(qps=16, duration_s=40, warmup_s=4)]
SLOW = Service(beta=0.06e-3)  # half as much again per running request


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    write_run(home / "base", SPECS, seed=1, target_qps=8)
    write_run(home / "again", SPECS, seed=1, target_qps=8, faults=Faults(send_lag_s=0.0004))
    write_run(home / "slow", SPECS, SLOW, seed=1, target_qps=8)
    write_run(home / "other", SPECS, seed=2, target_qps=8, schedule_hash="1" * 64)
    write_run(home / "bad", SPECS, seed=1, target_qps=8, faults=Faults(drop_rows=40))
    strict = default_config(8)
    strict["slo"]["ttft_deadline_ms"] = 300
    write_run(home / "strict", SPECS, seed=1, config=strict)
    for folder in home.iterdir():
        write_analysis(folder, models=False)
    return home


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(command, [str(a) for a in arguments])


def test_a_regression_is_exit_5_and_written_down(runs: Path) -> None:
    done = call(runs / "base", runs / "slow")
    assert done.exit_code == 5, done.output
    assert done.output.startswith("Worse over 2 rates: ") and "at 16 requests/s" in done.output
    data = json.loads((runs / "slow" / "compare.json").read_text(encoding="utf-8"))
    assert data["outcome"] == "worse" and data["exit_code"] == 5
    # the step time that depends on the batch is 1.5 times as long: so are most of the answers
    tpot = next(c for c in data["changes"] if (c["metric"], c["statistic"], c["offered_qps"]) == ("tpot", "p50", 16.0))
    assert tpot["outcome"] == "worse" and 0.2 < tpot["effect"] < 1.5
    page = (runs / "slow" / "compare.html").read_text(encoding="utf-8")
    assert "WORSE" in page and "<script" not in page and "script-src" not in page and page.count("<svg") >= 2


def test_no_change_is_exit_0_and_json_is_one_line(runs: Path) -> None:
    done = call(runs / "base", runs / "again", "--json")
    assert done.exit_code == 0 and json.loads(done.output)["outcome"] == "no clear change"
    assert call(runs / "slow", runs / "base", "--quiet").output == ""  # better is no regression
    assert call(runs / "slow", runs / "base").exit_code == 0


@pytest.mark.parametrize(
    ("new", "code", "words"),
    [
        ("other", 2, ["did not run the same test", "schedule", "--force"]),
        ("strict", 2, ["ttft_deadline_s: 0.8 against 0.3"]),
        ("bad", 4, ["is INVALID"]),
        ("nowhere", 2, ["no such folder"]),
    ],
)
def test_what_cannot_be_compared_is_refused(runs: Path, new: str, code: int, words: list[str]) -> None:
    done = call(runs / "base", runs / new)
    assert done.exit_code == code, done.output
    assert all(word in done.output for word in words), done.output
    assert not (runs / new / "compare.json").exists()


def test_a_field_that_an_old_folder_lacks_is_not_recorded_or_the_only_thing_its_version_did(runs: Path) -> None:
    """`load_differences` alone: the same analysis with fields taken out of its run."""
    found = analyse_run(runs / "base", models=False)

    def without(target: dict[str, str], config: dict[str, object], version: str | None) -> Analysis:
        return replace(found, run=found.run | {"target": target, "config": config, "tool_version": version})

    config = dict(found.run["config"])
    messages = without({"endpoint": "messages"}, config, "0.2.0")
    bare = {k: v for k, v in config.items() if k != "target"}
    for old, words in (
        (without({}, bare, "0.0.9"), "not recorded (version 0.0.9)"),
        (without({}, bare, None), "not recorded (version unknown)"),
        (without({}, bare | {"target": {}}, "0.0.9"), "chat"),  # no such key: chat completions only
        (without({}, bare | {"target": {"endpoint": "completions"}}, "0.0.9"), "completions"),
    ):
        assert cr.load_differences(messages, old) == [f"endpoint: messages against {words}"]
        assert cr.load_differences(old, messages) == [f"endpoint: {words} against messages"]
    hashless = replace(messages, run=messages.run | {"schedule_hash": ""})  # a run that was simulated again
    assert cr.load_differences(messages, hashless) == [
        f"schedule: {messages.run['schedule_hash'][:12]} against not recorded (version 0.2.0)"
    ]
    same = without({"endpoint": "chat"}, config, "0.2.0")
    assert cr.load_differences(same, without({}, bare | {"target": {}}, "0.0.9")) == []


def test_force_compares_and_says_what_differs(runs: Path) -> None:
    done = call(runs / "base", runs / "other", "--force", "--tolerance", "0.5")
    assert done.exit_code in (0, 5) and "different: schedule" in done.output and "forced" in done.output
    (runs / "other" / "compare.json").unlink()


def test_a_run_with_more_rates_is_the_same_test_at_the_common_ones(tmp_path: Path, runs: Path) -> None:
    specs = [*SPECS, StageSpec(qps=20, duration_s=20, warmup_s=4)]
    write_run(tmp_path / "more", specs, seed=1, target_qps=8, schedule_hash="2" * 64)
    done = call(runs / "base", tmp_path / "more", "--json")
    assert done.exit_code == 0, done.output
    assert {c["offered_qps"] for c in json.loads(done.output)["changes"] if c["offered_qps"]} == {8.0, 16.0}


def test_the_page_speaks_both_languages_and_escapes(runs: Path) -> None:
    keys = {lang: {k: {name for _, name, _, _ in Formatter().parse(v) if name} for k, v in texts.items()}
            for lang, texts in CATALOGUES.items()}  # fmt: skip
    assert keys["en"] == keys["zh-CN"]
    data = cr.compare_runs(runs / "base", runs / "slow").to_dict()
    data["new"]["model"] = "<script>alert(1)</script>"
    page = render(data, lang="zh-CN")
    assert "变差" in page and "&lt;script&gt;alert(1)" in page and "<script" not in page


def test_command_and_page_count_alike_and_say_why_a_rate_is_not_compared() -> None:
    rng = np.random.default_rng(4)
    some, few = rng.lognormal(-2, 0.2, 600), rng.lognormal(-2, 0.2, 60)
    beyond = [rate(q, [some]) for q in (5.0, 10.0)]
    for one in beyond:
        one.unstable = True
    base, new = [rate(1.0, [few]), rate(2.0, [some]), rate(3.0, [some]), *beyond], [
        rate(1.0, [few]), rate(2.0, [some]), *beyond, rate(12.0, [some])]  # fmt: skip
    made = outcomes(base, new)
    # rate 1: attainment, and six percentiles of too few arrivals; rate 2: all seven; rates 5 and 10: one line each
    assert made.counts == {"rates": 2, "rates_not_compared": 2, "numbers": 8, "worse": 0, "better": 0,
                           "no_clear_change": 8, "not_compared": 8}  # fmt: skip
    assert made.sentence == "No clear change in 8 numbers over 2 rates (2 more not compared)."
    said = "\n".join(lines(made))
    few_words = "too few arrivals for 5 batches of 25"
    names = "TTFT p50, TTFT p95, E2E p50, E2E p95, TPOT p50, TPOT p95"
    assert f"not compared: {names} at 1 requests/s: {few_words}" in said
    assert "not compared: 5, 10 requests/s: beyond capacity in both runs" in said
    assert made.left_out == ["base: 3 requests/s; the new run has no stage there",
                             "new: 12 requests/s; the base run has no stage there"]  # fmt: skip
    for data in (made.to_dict(), json.loads(json.dumps(made.to_dict()))):
        english, chinese = (re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", render(data, lang=x))) for x in ("en", "zh-CN"))
        assert made.sentence in english and f"{names} at 1 requests/s: {few_words}" in english
        assert "5, 10 requests/s: beyond capacity in both runs" in english
        assert "比较了 2 档速率，另有 2 档未比较：8 项" in chinese and "5, 10 QPS：两次运行都超出容量" in chinese
        assert "基线：3 QPS；新运行没有这一档" in chinese and "新运行：12 QPS；基线没有这一档" in chinese


def test_an_edited_analysis_is_not_compared(runs: Path, tmp_path: Path) -> None:
    base, bad = tmp_path / "base", tmp_path / "bad"
    for folder, faults in ((base, None), (bad, Faults(unsent=0.5))):
        write_run(folder, SPECS, seed=1, target_qps=8, faults=faults)
        write_analysis(folder, models=False)
    path = bad / "analysis.json"
    held = json.loads(path.read_text(encoding="utf-8"))
    assert held["verdict"]["status"] == "INVALID"
    held["verdict"]["status"] = "PASS"
    for stage in held["stages"]:
        stage["verdict"] = "MET"
    path.write_text(json.dumps(held), encoding="utf-8")
    done = call(base, bad)
    assert done.exit_code == 4 and "is INVALID" in done.output


def test_one_rate_is_a_rate_and_not_rates() -> None:
    some = np.random.default_rng(4).lognormal(-2, 0.2, 600)
    made = outcomes([rate(2.0, [some])], [rate(2.0, [some])])
    assert made.sentence == "No clear change in 7 numbers over 1 rate."
    assert made.sentence in render(made.to_dict())


def test_every_remark_of_the_analysis_has_a_chinese_text() -> None:
    rng = np.random.default_rng(4)
    some, few, bad = rng.lognormal(-2, 0.2, 600), rng.lognormal(-2, 0.2, 60), np.full(600, np.inf)
    beyond = [rate(q, [some]) for q in (5.0, 10.0)]
    for one in beyond:
        one.unstable = True
    knee = found(knee_qps=20, knee_low_qps=19, knee_high_qps=21, knee_kind="crossing")
    comparison = outcomes(
        [rate(1.0, [few]), rate(2.0, [bad]), *beyond], [rate(1.0, [few]), rate(2.0, [bad]), rate(5.0, [some]), beyond[1]],
        first=knee, second=knee,
    )  # fmt: skip
    remarks = {c.note for c in comparison.changes if c.note} | set(comparison.notes)
    assert len(remarks) >= 6
    texts = Texts("zh-CN")
    assert [r for r in remarks if not re.search(r"[一-鿿]", texts.note(r))] == []
    assert Texts("en").note("any") == "any"


def test_an_analysis_that_was_just_made_is_not_made_again(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same comparison either way; and what an old analysis.json asks is known before the only analysis."""
    made: list[Path] = []
    real = again.analyse_run

    def counted(run_dir: Path, **options: Any) -> Analysis:
        made.append(run_dir)
        return real(run_dir, **options)

    monkeypatch.setattr(again, "analyse_run", counted)
    base, new = runs / "base", runs / "slow"
    alone = cr.compare_runs(base, new).to_dict()
    assert made == [base, new]
    made.clear()
    assert cr.compare_runs(base, new, analysed=real(new)).to_dict() == alone
    assert made == [base]
    made.clear()
    write_analysis(runs / "again", models=False, slo_ttft_ms=30_000)
    found, asked = again.analyse_again(runs / "again")
    write_analysis(runs / "again", models=False)
    assert (made, asked, found.slo["ttft_deadline_s"]) == ([runs / "again"], {"slo_ttft_ms": 30_000}, 30)
