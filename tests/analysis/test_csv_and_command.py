"""Locust's CSV against the ledger and alone; the command `bench analyse`; diagnosis by constructed cases."""
from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from analysis import locust_csv
from analysis.analyse import analyse_run
from analysis.csv_check import csv_only_report
from bench.__main__ import main

sys.path.insert(0, str(Path(__file__).parent))
from synthetic import Faults, Service, StageSpec, write_run

analyse = partial(analyse_run, models=False)
QUICK = Service(mu=4.4)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with refusals, errors, unsent arrivals and one-token answers."""
    faults = Faults(rejected=0.02, error=0.02, unsent=0.01, one_token=0.05)
    specs = [StageSpec(10, 20, 4), StageSpec(20, 20, 4)]
    return write_run(tmp_path_factory.mktemp("mixed") / "run", specs, QUICK, faults=faults, seed=4)


@pytest.fixture
def copy(mixed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mixed, tmp_path / "run"))


def edit(folder: Path, kind: str, column: str, value: str) -> None:
    """Change one cell of the first row of `kind`."""
    path = folder / "locust_stats.csv"
    header, *rows = path.read_text().splitlines()
    k = header.split(",").index(column)
    for i, row in enumerate(rows):
        cells = row.split(",")
        if cells[0] == kind:
            cells[k] = value
            rows[i] = ",".join(cells)
            break
    path.write_text("\n".join([header, *rows]) + "\n")


def test_agreement_over_all_statuses(mixed: Path) -> None:
    found = analyse(mixed)
    assert found.csv_check["ok"] is True, found.csv_check
    assert found.csv_check["rows_compared"] == 6  # two stages, three kinds


@pytest.mark.parametrize(
    ("kind", "column", "value", "words"),
    [
        ("chat", "Request Count", "999", "counts 999 requests"),
        ("chat", "Failure Count", "0", "counts 0 failures"),
        ("TTFT", "Request Count", "1", "counts 1 requests"),
        ("TPOT", "Average Response Time", "12.5", "average is 12.5"),
        ("chat", "95%", "9", "95% is 9 ms"),
    ],
)
def test_each_disagreement_is_named_and_invalid(copy: Path, kind: str, column: str, value: str, words: str) -> None:
    edit(copy, kind, column, value)
    found = analyse(copy)
    assert words in " ".join(found.csv_check["mismatches"])
    assert found.verdict.exit_code == 4 and "INV-CSV" in {r.reason_id for r in found.verdict.reasons}


def test_average_within_a_thousandth_passes(copy: Path) -> None:
    row = locust_csv.read_stats(copy / "locust_stats.csv").rows[0]
    edit(copy, "chat", "Average Response Time", str(row.average_ms * 1.0009))
    assert analyse(copy).csv_check["ok"] is True
    edit(copy, "chat", "Average Response Time", str(row.average_ms * 1.0011))
    assert analyse(copy).csv_check["ok"] is False


def test_missing_and_foreign_rows(copy: Path) -> None:
    path = copy / "locust_stats.csv"
    content = path.read_text().splitlines()
    path.write_text("\n".join(content[:-1]) + "\n" + content[1].replace("00 chat @10", "07 chat @99") + "\n")
    text = " ".join(analyse(copy).csv_check["mismatches"])
    assert "no TPOT row" in text and "07 chat @99" in text


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "Type,Name,Request Count,Failure Count\nchat,00 chat @10,x,1\n"])
def test_a_damaged_csv_is_invalid_not_a_traceback(copy: Path, content: str) -> None:
    (copy / "locust_stats.csv").write_text(content)
    found = analyse(copy)
    assert found.csv_check["ok"] is False and found.verdict.status == "INVALID"


def test_no_csv_is_no_fault(copy: Path) -> None:
    (copy / "locust_stats.csv").unlink()
    found = analyse(copy)
    assert found.csv_check["ok"] is None and "INV-CSV" not in {r.reason_id for r in found.verdict.reasons}


@pytest.mark.parametrize(
    ("value", "fine", "half"),
    [
        (50, False, 1.0),
        (105, False, 6.0),
        (1200, False, 51.0),
        (30_000, False, 501.0),
        (7.44, True, 0.005),
        (1230, True, 5.0),
    ],
)
def test_bucket_widths(value: float, fine: bool, half: float) -> None:
    assert locust_csv.bucket_half_ms(value, fine) == pytest.approx(half)


RANKS = [(100, 0.95, 95), (100, 0.99, 99), (1, 0.5, 0), (10, 1.0, 9), (20, 0.5, 10), (333, 0.95, 316)]


def test_locusts_own_rank() -> None:
    """Against the walk of Locust itself, in a process of its own: importing locust patches the standard library."""
    code = (
        "from locust.stats import calculate_response_time_percentile as c\n"
        f"print([c({{i: 1 for i in range(n)}}, n, p) for n, p, _ in {RANKS!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [rank for *_, rank in RANKS]
    assert [locust_csv.locust_rank(n, share) for n, share, _ in RANKS] == [rank for *_, rank in RANKS]


def test_csv_alone_gives_bounds_and_no_more(mixed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    shutil.copy(mixed / "locust_stats.csv", folder / "bench_stats.csv")
    report = csv_only_report(folder)
    exact = analyse(mixed)
    rows = {(r["type"], r["stage"]): r for r in report["rows"]}
    assert len(rows) == 6 and "knee" in report["loss"]
    ledger_rows = sum(r["requests"] for (kind, _), r in rows.items() if kind == "chat")
    assert ledger_rows == exact.ledger["rows"]
    for key, row in rows.items():
        assert row["p95_low_s"] < row["p95_high_s"], key
    assert not any("attainment" in key for row in report["rows"] for key in row)


def test_the_loss_of_a_csv_alone_is_that_of_its_own_rounding(mixed: Path, tmp_path: Path) -> None:
    """Our locustfiles keep three digits, Locust alone keeps two: its 446 ms is a 450, as in the folder made here."""
    coarse, fine = tmp_path / "coarse_stats.csv", tmp_path / "fine_stats.csv"
    shutil.copy(mixed / "locust_stats.csv", coarse)
    frame = pd.read_csv(coarse, keep_default_na=False, dtype=str)
    for column in [name for name in frame.columns if name.endswith("%")]:
        frame[column] = [f"{float(f'{float(x) * 1.017:.3g}'):g}" if x not in ("", "N/A") else x for x in frame[column]]
    frame.to_csv(fine, index=False)
    ours, plain = csv_only_report(fine), csv_only_report(coarse)
    assert "three significant digits (up to 0.5 %)" in ours["loss"] and "two" not in ours["loss"]
    assert "two significant digits (up to 5 %)" in plain["loss"] and "three" not in plain["loss"]
    for report, share in ((ours, 0.005), (plain, 0.06)):  # the note and the printed bounds say the same
        wide = [r["p95_high_s"] / r["p95_low_s"] - 1 for r in report["rows"] if r.get("p95_low_s", 0) > 0.1]
        assert wide and max(wide) <= 2.1 * share


# ---------------------------------------------------------------- the command


def test_command_prints_the_verdict_and_exits_with_it(copy: Path) -> None:
    done = CliRunner().invoke(main, ["analyse", str(copy), "--no-models", "--target-qps", "10"])
    found = json.loads((copy / "analysis.json").read_text())
    assert done.exit_code == found["verdict"]["exit_code"] == 4  # one percent unsent
    assert done.output.startswith("INVALID") and "INV-CAP" in done.output and "00 chat @10" in done.output


def test_command_json(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [StageSpec(20, 20, 4)], QUICK)
    done = CliRunner().invoke(main, ["analyse", str(folder), "--no-models", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["verdict"]["status"] == "PASS"
    strict = CliRunner().invoke(main, ["analyse", str(folder), "--no-models", "--slo-ttft-ms", "1"])
    assert strict.exit_code == 1 and "SLO-MISS" in strict.output


@pytest.mark.parametrize("arguments", [["no/such/folder"], ["EMPTY"], []])
def test_command_usage_errors(tmp_path: Path, arguments: list[str]) -> None:
    done = CliRunner().invoke(main, ["analyse", *(str(tmp_path) if a == "EMPTY" else a for a in arguments)])
    assert done.exit_code == 2 and "Traceback" not in done.output


def test_command_on_an_unwritable_folder(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_text", refuse)
    done = CliRunner().invoke(main, ["analyse", str(copy), "--no-models"])
    assert done.exit_code == 2 and "Permission denied" in done.output


def test_command_on_a_csv_alone(mixed: Path, tmp_path: Path) -> None:
    shutil.copy(mixed / "locust_stats.csv", tmp_path / "x_stats.csv")
    done = CliRunner().invoke(main, ["analyse", str(tmp_path)])
    assert done.exit_code == 4 and "no verdict" in done.output and "00 chat @10" in done.output
    alone = CliRunner().invoke(main, ["analyse", str(tmp_path / "x_stats.csv"), "--json"])
    assert json.loads(alone.stdout)["rows"]


def test_the_benchmark_prints_its_figures() -> None:
    command = [sys.executable, "-m", "benchmarks.analysis", "--rows", "20000", "--repeat", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2], check=True
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["rows"] == 20000 and figures["wall_s"] > 0 and 20 < figures["peak_rss_mb"] < 800


# ---------------------------------------------------------------- diagnosis


def named(found) -> set[str]:
    return {r.reason_id for r in found.diagnosis}


def test_a_healthy_run_has_no_diagnosis(tmp_path: Path) -> None:
    assert named(analyse(write_run(tmp_path / "r", [StageSpec(20, 20, 4)], QUICK))) == set()


def test_rejections_and_clause_are_explained(tmp_path: Path) -> None:
    found = analyse(write_run(tmp_path / "r", [StageSpec(20, 30, 4)], QUICK, faults=Faults(rejected=0.1)))
    assert {"DIA-REJECTS", "DIA-CLAUSE"} <= named(found)
    text = next(r.text for r in found.diagnosis if r.reason_id == "DIA-CLAUSE")
    assert "stay in the denominator" in text and found.stages[0].binding_clause == "failures"


def test_targets_that_contradict_each_other(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [StageSpec(20, 20, 4)], QUICK)
    assert "DIA-TARGETS" in named(analyse(folder, slo_p95_ms=20))


def test_client_bound(tmp_path: Path) -> None:
    found = analyse(write_run(tmp_path / "r", [StageSpec(20, 20, 4)], QUICK, faults=Faults(send_lag_s=0.03)))
    assert "DIA-CLIENT" in named(found)


def _rewrite(folder: Path, first_s: object, last_s: object) -> None:
    """Give every row the first and last token times that the functions of the table return."""
    frame = pd.read_csv(folder / "requests.csv", keep_default_na=False, dtype=str)
    intended = frame["intended_s"].astype(float)
    first, last = first_s(frame), last_s(frame)
    done = last + 1e-4
    sent = frame["sent_s"].astype(float)
    steps = frame["output_tokens"].astype(int) - 1
    new = {"first_token_s": first, "last_token_s": last, "done_s": done, "ttft_s": first - intended, "e2e_s": last - intended,
           "tpot_s": (last - first) / steps, "residence_s": done - sent}  # fmt: skip
    for name, values in new.items():
        frame[name] = values.map("{:.9f}".format)
    frame.to_csv(folder / "requests.csv", index=False)
    (folder / "locust_stats.csv").unlink()
    (folder / "inflight.csv").unlink()


def test_prefill_bound(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [StageSpec(20, 20, 4)], QUICK)

    def first(frame: pd.DataFrame) -> pd.Series:  # 100 us per prompt token
        return frame["sent_s"].astype(float) + 1e-4 * frame["prompt_tokens"].astype(float)

    _rewrite(folder, first, lambda frame: first(frame) + 0.05)
    found = analyse(folder)
    text = next(r.text for r in found.diagnosis if r.reason_id == "DIA-PREFILL")
    assert "100.0 µs per prompt token" in text or "99." in text or "100." in text


def test_buffering_proxy_and_connection_churn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [StageSpec(20, 20, 4)], QUICK, faults=Faults(flags={"burst": 1.0}))
    last = pd.read_csv(folder / "requests.csv")["last_token_s"]
    _rewrite(folder, lambda _: last - 1e-5, lambda _: last)
    frame = pd.read_csv(folder / "requests.csv", keep_default_na=False, dtype=str)
    frame["connection"] = "new"
    frame["connect_s"] = "0.004"
    frame.to_csv(folder / "requests.csv", index=False)
    found = analyse(folder)
    assert {"DIA-BUFFER", "DIA-CHURN"} <= named(found)
    assert "INV-BURST" in {r.reason_id for r in found.stages[0].reasons}


def _server(folder: Path, kv: float, running_share: float = 1.0) -> None:
    gauge = np.genfromtxt(folder / "inflight.csv", delimiter=",", names=True)
    rows = [
        f"{t},{n * running_share},{3 if kv > 0.9 else 0},{kv}"
        for t, n in zip(gauge["t_s"], gauge["in_flight"], strict=True)
    ]
    (folder / "server_metrics.csv").write_text("t_s,running,waiting,kv_usage\n" + "\n".join(rows) + "\n")


def test_kv_bound_and_time_outside_the_engine(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [StageSpec(20, 20, 4)], QUICK)
    _server(folder, kv=0.99)
    assert "DIA-KV" in named(analyse(folder))
    _server(folder, kv=0.2, running_share=0.5)
    found = analyse(folder)
    assert "DIA-KV" not in named(found) and "DIA-OUTSIDE" in named(found)
    assert found.stages[0].little.in_flight_mean_server == pytest.approx(
        0.5 * found.stages[0].little.in_flight_mean_gauge, rel=0.05
    )
