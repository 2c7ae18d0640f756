"""summary.json, summary.md, junit.xml, write_all and `bench report`."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from junitparser import Error, Failure, JUnitXml, Skipped

import reports
from analysis.analyse import write_analysis
from bench.__main__ import main
from bench.commands.report import command, default_language
from bench.records.analysis import Gate, to_json
from reports.junit import junit
from reports.summary import markdown, summary
from reports.write import STEP_SUMMARY_LIMIT, write_all
from tests.analysis.synthetic import Faults, StageSpec, write_run
from tests.reports import examples
from tests.reports.conftest import text_of

SCHEMA = json.loads((Path(reports.__file__).parent / "summary.schema.json").read_text(encoding="utf-8"))
SMALL = ["nothing", "one_stage"]


@pytest.mark.parametrize("name", sorted(examples.ALL))
def test_summary_follows_its_schema(name):
    document = json.loads(json.dumps(summary(examples.ALL[name]()), allow_nan=False))
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)


def test_schema_is_not_empty_talk():
    document = summary(examples.sweep())
    document["verdict"]["status"] = "MAYBE"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)


def test_summary_values():
    document = summary(examples.sweep())
    assert document["capacity"]["knee_qps"] == 20.9
    assert document["stages"][7]["ttft"]["p95_s"] == "inf"
    assert document["stages"][0]["ttft"]["p99_s"] is None and "p99" in document["stages"][0]["ttft"]["withheld"]
    assert set(summary(examples.invalid())["capacity"].values()) == {None, "none"}


@pytest.mark.parametrize("name", sorted(examples.ALL))
@pytest.mark.parametrize("lang", ["en", "zh-CN"])
def test_markdown_starts_with_the_verdict_and_holds_one_short_table(name, lang):
    text = markdown(examples.ALL[name](), lang=lang)
    assert text.startswith("### ") and examples.ALL[name]().verdict.status in text.splitlines()[0]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) <= 14  # heading, rule, 12 rows
    assert len(text.encode()) < 20_000


def test_markdown_of_many_gates_shows_misses_first():
    analysis = examples.failed()
    analysis.gates = [
        Gate(f"G{i}", f"metric_{i}", "value", "<=", 1.0, 0.5, "1", "run", "pass", "fail") for i in range(20)
    ]
    analysis.gates.append(Gate("BAD", "bad_metric", "value", "<=", 1.0, 2.0, "1", "run", "fail", "fail"))
    rows = [line for line in markdown(analysis).splitlines() if line.startswith("|")]
    assert len(rows) == 14 and "bad" in rows[2]
    assert "9 more gates" in markdown(analysis)


def test_markdown_cannot_be_broken_by_text_from_outside():
    analysis = examples.failed()
    analysis.verdict.sentence = "a | b\n# c <script>alert(1)</script> `d` [e](f)"
    head = markdown(analysis).splitlines()[0]
    assert "<script" not in head and " | " not in head and "[e](f)" not in head


def test_junit_statuses():
    # gates("pass"): 3 pass, 1 not measured; the fail and invalid examples turn the first three
    for name, failures, errors, skipped in (("sweep", 0, 0, 1), ("failed", 3, 0, 1), ("invalid", 0, 3, 1)):
        suite = next(iter(JUnitXml.fromstring(junit(examples.ALL[name]()).encode())))
        assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (4, failures, errors, skipped)
    cases = list(next(iter(JUnitXml.fromstring(junit(examples.failed()).encode()))))
    assert isinstance(cases[0].result[0], Failure) and isinstance(cases[3].result[0], Skipped)
    assert "measured 99.78" in cases[0].result[0].message and "limit ≥ 99.00" in cases[0].result[0].message
    assert cases[0].time == 60.0  # the stage at the target: its window
    invalid = list(next(iter(JUnitXml.fromstring(junit(examples.invalid()).encode()))))
    assert isinstance(invalid[0].result[0], Error)


def test_junit_warning_gate_never_fails_the_suite():
    analysis = examples.sweep()
    analysis.gates = [Gate("W", "ttft_s", "p95", "<=", 0.1, math.inf, "s", "max", "fail", "warn")]
    suite = next(iter(JUnitXml.fromstring(junit(analysis).encode())))
    assert suite.failures == 0
    assert "did not finish" in next(iter(suite)).system_out


def test_junit_without_gates_carries_the_verdict():
    suite = next(iter(JUnitXml.fromstring(junit(examples.nothing()).encode())))
    assert (suite.tests, suite.errors) == (1, 1)


def test_junit_text_that_xml_forbids():
    analysis = examples.failed()
    analysis.gates[0].text = "bell \x07 and \x00 null <b>"
    JUnitXml.fromstring(junit(analysis).encode())


def test_write_all_and_step_summary(tmp_path):
    step = tmp_path / "step.md"
    step.write_text("before\n", encoding="utf-8")
    written = write_all(tmp_path, examples.one_stage(), env={"GITHUB_STEP_SUMMARY": str(step)})
    assert [p.name for p in written] == ["summary.json", "summary.md", "junit.xml", "report.html"]
    assert step.read_text(encoding="utf-8").startswith("before\n### ")
    assert not list(tmp_path.glob(".*")), "a temporary file was left"
    step.write_bytes(b"x" * STEP_SUMMARY_LIMIT)
    write_all(tmp_path, examples.nothing(), env={"GITHUB_STEP_SUMMARY": str(step)})
    assert step.stat().st_size == STEP_SUMMARY_LIMIT  # no room: left as it is


def test_write_all_writes_the_others_when_one_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr("reports.write.render", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_all(tmp_path, examples.nothing(), env={})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["junit.xml", "summary.json", "summary.md"]


def run(*args: str):
    return CliRunner().invoke(command, [str(a) for a in args])


def test_report_command_writes_the_outputs(tmp_path):
    (tmp_path / "analysis.json").write_text(to_json(examples.nothing()), encoding="utf-8")
    result = run(tmp_path, "--json", "--lang", "zh-CN")
    assert result.exit_code == 4  # of a run without a success nothing follows
    assert [Path(p).name for p in json.loads(result.stdout)["files"]] == [
        "summary.json",
        "summary.zh-CN.md",
        "junit.xml",
        "report.zh-CN.html",
    ]
    assert '<html lang="zh-CN">' in (tmp_path / "report.zh-CN.html").read_text(encoding="utf-8")


def test_report_command_to_one_file(tmp_path):
    (tmp_path / "analysis.json").write_text(to_json(examples.nothing()), encoding="utf-8")
    out = tmp_path / "sub" / "page.html"
    assert run(tmp_path, "-o", out, "-q", "--static").exit_code == 4
    assert out.exists() and not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "content",
    [None, "", "{", '{"schema_version": 99}', "[]", '{"schema_version": 1}', '{"schema_version": 1, "stages": 3}'],
)
def test_report_command_on_a_missing_old_or_broken_analysis(tmp_path, content):
    if content is not None:
        (tmp_path / "analysis.json").write_text(content, encoding="utf-8")
    result = run(tmp_path)
    assert result.exit_code == 2
    assert ("holds neither requests.csv nor analysis.json" if content is None else "bench analyse") in result.output
    assert "Traceback" not in result.output


def test_a_folder_with_locusts_csv_alone_says_what_gives_a_page(measured, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    table = shutil.copy(measured / "locust_stats.csv", alone / "plain_stats.csv")
    for given in (alone, table):
        result = run(given)
        said = " ".join(result.output.split())
        assert result.exit_code == 2 and "no page can be drawn from Locust's CSV alone" in said
        assert f"`bench analyse {given}` prints these with their bounds" in said and "`bench run` writes it" in said
        assert CliRunner().invoke(main, ["analyse", str(given)]).exit_code == 4  # it does
    assert sorted(p.name for p in alone.iterdir()) == ["plain_stats.csv"]
    shutil.copy(measured / "analysis.json", alone)  # then there is something to draw
    assert run(alone, "-q", "--static").exit_code == 0


def test_the_code_says_whether_the_measurement_can_be_trusted(measured):
    """0 for a FAIL: the page is right, and `bench analyse` says that the SLO is missed. 4 for a ledger that lost rows."""
    assert run(measured, "-q", "--static").exit_code == 0
    assert CliRunner().invoke(main, ["analyse", str(measured), "--no-models"]).exit_code == 1
    lines = (measured / "requests.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    (measured / "requests.csv").write_text("".join(lines[:-20]), encoding="utf-8")
    for option in ("--json", "-q"):
        result = run(measured, option)
        assert result.exit_code == 4 and "bench report: INVALID: " in result.stderr
        assert (json.loads(result.stdout)["exit_code"] == 4) if option == "--json" else result.stdout == ""
    assert 'class="verdict invalid"' in (measured / "report.html").read_text(encoding="utf-8")
    assert run(measured, "-q", "-o", measured / "page.html").exit_code == 4
    assert run(measured / "analysis.json", "-q", "-o", measured / "page.html").exit_code == 4  # drawn as it is, too


def edited(path, **changes):
    """The analysis.json of a run, changed by hand."""
    held = json.loads(path.read_text(encoding="utf-8"))
    for key, value in changes.items():
        held[key] = {**held[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(held), encoding="utf-8")


@pytest.fixture
def measured(tmp_path):
    """A run that misses its SLO, with its analysis.json."""
    write_run(tmp_path, [StageSpec(qps=8, duration_s=20, warmup_s=2)], seed=1, target_qps=8, faults=Faults(rejected=0.3))
    found = write_analysis(tmp_path, models=False)
    assert found.verdict.status == "FAIL"
    return tmp_path


def test_an_edited_analysis_is_not_drawn_where_the_rows_are(measured):
    path = measured / "analysis.json"
    before = path.read_text(encoding="utf-8")
    edited(path, verdict={"status": "PASS", "sentence": "All is well.", "code": "", "exit_code": 0}, gates=[])
    result = run(measured)
    assert result.exit_code == 0 and "is replaced" in result.output
    page = (measured / "report.html").read_text(encoding="utf-8")
    assert "All is well." not in page and 'class="verdict fail"' in page
    assert path.read_text(encoding="utf-8") == before
    assert run(measured, "-q").output == ""  # the same rows give the same analysis


def test_another_slo_of_analysis_json_is_asked_again_and_said(measured):
    write_analysis(measured, models=False, slo_ttft_ms=30_000)
    result = run(measured)
    assert "asked as in analysis.json, not as in the run: slo_ttft_ms 30000" in result.output
    page = text_of((measured / "report.html").read_text(encoding="utf-8"))
    assert "Judged by another SLO than the run's own: TTFT 30.0 s (run: " in page
    assert json.loads((measured / "analysis.json").read_text(encoding="utf-8"))["slo"]["ttft_deadline_s"] == 30


def test_results_without_rows_are_marked_unchecked(measured):
    alone = measured / "alone"
    alone.mkdir()
    shutil.copy(measured / "analysis.json", alone)
    for given in (alone, measured / "analysis.json"):
        result = run(given, "-o", measured / "page.html")
        assert result.exit_code == 0 and "UNCHECKED" in result.output
        text = text_of((measured / "page.html").read_text(encoding="utf-8"))
        assert text.startswith("FAIL (UNCHECKED)") and "nothing was checked against the rows" in text


def test_rows_that_cannot_be_read_end_the_report(measured):
    (measured / "requests.csv").write_bytes(b"not a ledger")
    result = run(measured)
    assert result.exit_code == 2 and "draw it unchecked" in result.output and not (measured / "report.html").exists()


def test_report_command_into_a_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "analysis.json").write_text(to_json(examples.nothing()), encoding="utf-8")
    (tmp_path / "file").write_text("", encoding="utf-8")
    result = run(tmp_path, "-o", tmp_path / "file" / "page.html")
    assert result.exit_code == 2 and "-o FILE" in result.output


def test_language_from_the_locale():
    assert default_language({"LANG": "zh_CN.UTF-8"}) == "zh-CN"
    assert default_language({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}) == "en"
    assert default_language({}) == "en"


def test_markdown_says_in_its_first_line_what_the_verdict_cannot():
    analysis = examples.interrupted()
    analysis.run["simulated"] = True
    assert markdown(analysis).splitlines()[0].startswith("### ✓ PASS (INTERRUPTED, SIMULATED): ")
    assert "### ! INVALID" in markdown(examples.invalid()).splitlines()[0]
    last = analysis.stages[-1]
    last.marks, last.planned = ["not_run"], 0
    line = next(row for row in markdown(analysis).splitlines() if row.startswith("03 "))
    assert line.endswith("not run") and "%" not in line


def test_chinese_stands_beside_the_english_files(tmp_path):
    (tmp_path / "analysis.json").write_text(to_json(examples.one_stage()), encoding="utf-8")
    assert run(str(tmp_path), "--lang", "en", "-q").exit_code == 0
    english = (tmp_path / "report.html").read_bytes(), (tmp_path / "summary.md").read_bytes()
    assert run(str(tmp_path), "--lang", "zh-CN", "-q").exit_code == 0
    assert ((tmp_path / "report.html").read_bytes(), (tmp_path / "summary.md").read_bytes()) == english
    assert '<html lang="zh-CN">' in (tmp_path / "report.zh-CN.html").read_text(encoding="utf-8")
    assert (tmp_path / "summary.zh-CN.md").exists()


def test_a_gate_judged_without_its_percentile_says_withheld_and_not_unmeasured():
    analysis = examples.sweep()
    judged, silent = analysis.gates[0], analysis.gates[1]
    judged.measured, judged.status = None, "pass"
    silent.measured, silent.status = None, "not_measured"
    rows = [row for row in markdown(analysis).splitlines() if row.startswith("| ")]
    assert sum("withheld" in row and "✓" in row for row in rows) == 1
    unmeasured = sum(g.status == "not_measured" for g in analysis.gates)
    assert sum("| not measured |" in row for row in rows) == unmeasured >= 1
