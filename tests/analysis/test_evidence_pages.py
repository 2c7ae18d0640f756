"""The pages of docs/evidence: sections replaced on their own, every judged figure with its word, both ways."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from benchmarks import evidence_performance as performance
from benchmarks.evidence_page import at_least, at_most, replace_section, rewrite, share, standard_error

ROOT = Path(__file__).parents[2]
PAGES = sorted(p for p in (ROOT / "docs" / "evidence").glob("*.md") if p.name != "outside-engine.md")


def test_a_section_is_replaced_and_the_others_stay() -> None:
    page = "# Page\n\n## 1 One\n\na\n\n### Deeper\n\nb\n\n## 12 Twelve\n\nc\n"
    assert replace_section(page, "## 1", ["## 1 One again", "", "x"]) == (
        "# Page\n\n## 1 One again\n\nx\n\n## 12 Twelve\n\nc\n"
    )
    assert replace_section(page, "## 12", ["## 12 Twelve", "", "y"]).endswith("## 12 Twelve\n\ny\n")
    assert replace_section(page, "## 2", ["## 2 Two"]).endswith("\n\nc\n\n## 2 Two\n")  # new: at the end


def test_a_page_keeps_what_was_not_run(tmp_path: Path) -> None:
    page = tmp_path / "deep" / "page.md"
    rewrite(page, ["# Old head", ""], {"## A": ["## A", "", "1"], "## B": ["## B", "", "2"]})
    rewrite(page, ["# Head", ""], {"## B": ["## B", "", "3"]})
    assert page.read_text() == "# Head\n\n## A\n\n1\n\n## B\n\n3\n"


def test_the_word_depends_on_the_figure() -> None:
    assert at_most(0.0099, 0.01) == "0.99% (at most 1.00%: met)"
    assert at_most(0.0128, 0.01) == "1.28% (at most 1.00%: **missed**)"
    assert at_least(0.9, 0.9) == "0.90 (at least 0.90: met)" and at_least(0.88, 0.9).endswith("**missed**)")
    assert "missed" in at_most(math.nan, 1.0) and "missed" in at_least(math.nan, 0.0)
    assert share(-0.00001) == "+0.00 %" and share(-0.0128) == "-1.28 %"
    # 1 of 1 seen in 100: (100.5/101) -> sqrt(.99505 * .00495/100) = .0070
    assert standard_error(1.0, 100) == pytest.approx(0.0070, abs=1e-4)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_no_page_prints_a_miss_as_met(page: Path) -> None:
    """Figures with their limit in brackets are compared again, by another path than the one that printed them."""
    text = page.read_text(encoding="utf-8")
    judged = re.findall(
        r"([\d.,]+)\s?(%|pp)? \((at most|at least) ([\d.,]+)\s?(?:%|pp)?: (met|\*\*missed\*\*)\)", text
    )
    for value, _, way, limit, word in judged:
        v, x = float(value.replace(",", "")), float(limit.replace(",", ""))
        if v == x:  # rounded to its limit: either word may be true of the figure behind it
            continue
        assert (word == "met") == ((v < x) == (way == "at most")), (value, way, limit, word)
    assert re.search(r"20\d\d-\d\d-\d\d", text), "a page says when it was written"


def test_performance_rows_are_judged_both_ways() -> None:
    found = {"wall_s": 5.9, "peak_rss_mb": 801}
    lines = performance.section("analysis", found, (0.1, 1.5), 20.0)
    rows = [line for line in lines if line.startswith("| ") and "verdict" not in line]
    assert lines[0] == "## analysis" and "load average 0.1 before, 1.5 after" in lines[2]
    assert rows == [
        "| 1,000,000 rows analysed, wall s | 5.9 | at most 6 | met |",
        "| memory, MB | 801 | at most 800 | **missed** |",
    ]
    least = performance.Asked("rate", "rate", 10.0, least=True)
    assert least.row({"rate": 10.0})[-1] == "met" and least.row({"rate": 9.99})[-1] == "**missed**"
    for nothing in ({}, {"rate": None}, {"rate": math.nan}, {"rate": True}):
        assert least.row(nothing) == ["rate", "not measured", "at least 10", "**missed**"]


def test_what_the_benchmarks_print_is_read() -> None:
    assert performance.last_object('noise\n{"a": 1}\n{"b": 2}\n') == {"b": 2}
    with pytest.raises(ValueError, match="no line of JSON"):
        performance.last_object("nothing\n")
    table = "command,runs,cpu_ms,wall_ms\nbench --help,7,120,150\nbench run --help,7,410,390\n"
    assert performance.startup_table(table) == {"cpu_ms": 410.0, "wall_ms": 390.0}
    with pytest.raises(ValueError, match="no table"):
        performance.startup_table("command,runs,cpu_ms,wall_ms\n")


def test_one_benchmark_is_run_and_its_section_alone_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small analysis in place of the million rows; the command is a process of its own, as for the page."""
    small = performance.Benchmark("analysis", ("--rows", "2000", "--repeat", "1"),
                                  performance.BENCHMARKS["analysis"].asked, performance.last_object)  # fmt: skip
    broken = performance.Benchmark("analysis", ("--rows", "many"), (), performance.last_object)
    monkeypatch.setitem(performance.BENCHMARKS, "analysis", small)
    monkeypatch.setitem(performance.BENCHMARKS, "startup", broken)
    page = tmp_path / "performance.md"
    rewrite(page, ["# Old"], {"## startup": ["## startup", "", "kept"], "## client": ["## client", "", "kept too"]})
    assert performance.main(["startup", "analysis", "--out", str(page)]) == 1  # the first one failed
    text = page.read_text()
    assert "## startup\n\nkept\n" in text and "kept too" in text and text.startswith("# Evidence: performance")
    printed = json.loads(text.split("All it printed: `")[1].split("`")[0])
    assert printed["rows"] == 2000 and f"| {printed['wall_s']:.4g} | at most 6 |" in text
    assert str(Path.home()) not in text and str(tmp_path) not in text


def test_every_benchmark_of_the_page_exists_and_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    for bench in performance.BENCHMARKS.values():
        source = (ROOT / "benchmarks" / f"{bench.module}.py").read_text(encoding="utf-8")
        for asked in bench.asked:
            made = asked.key.removeprefix("prompt_") if bench.module == "client" else asked.key
            assert made in source or made.removeprefix("ratio_") in source, (bench.module, asked.key)
    assert performance.main(["--list"]) == 0 and "python -m benchmarks.startup" in capsys.readouterr().out
    for wrong in ([], ["analysys"]):
        with pytest.raises(SystemExit) as ended:
            performance.main(wrong)
        assert ended.value.code == 2
