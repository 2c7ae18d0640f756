"""`--quiet` leaves the result and nothing else, `--json` one object; the exit code is the same with each."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench.__main__ import main
from bench.records.ledger import read_run
from bench.records.shard import ShardWriter
from tests.client.test_preflight import closed_port

CONFIG = str(Path(__file__).resolve().parents[2] / "configs" / "demo.json")
CLEAN = {"BENCH_API_KEY": None, "BENCH_BASE_URL": None, "BENCH_MODEL": None, "BENCH_QPS_STAGES": None}


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments], env=CLEAN)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Simulated runs at two batch caps."""
    home = tmp_path_factory.mktemp("runs")
    made = {}
    for cap in (4, 24):
        made[f"cap{cap}"] = folder = home / f"cap{cap}"
        done = bench("simulate", "-c", CONFIG, "--qps", "4,15", "--stage-duration", "30", "--run-dir", folder, "-q",
                     "--no-report", "--set", f"scheduler.batch_size_cap={cap}", "--set", "slo.attainment_target=0.5")  # fmt: skip
        assert done.exit_code == 0 and done.output == ""
        bench("analyse", folder, "--no-models", "-q")
    return made


def three(*arguments: object) -> tuple[list[str], list[str], dict]:
    """(lines, lines with --quiet, object of --json), after their exit codes were found equal."""
    full, quiet, data = (bench(*arguments, *more) for more in ((), ("--quiet",), ("--json",)))
    assert full.exit_code == quiet.exit_code == data.exit_code, (full.output, quiet.output, data.output)
    found = json.loads(data.stdout)
    both = bench(*arguments, "--json", "-q")
    assert json.loads(both.stdout).keys() == found.keys()  # a script reads its object
    return full.stdout.splitlines(), quiet.stdout.splitlines(), found


def test_analyse(runs: dict[str, Path]) -> None:
    full, quiet, found = three("analyse", runs["cap24"], "--no-models")
    assert quiet == full[:1] and found["verdict"]["status"] in quiet[0] and len(full) > 5


def test_plan(runs: dict[str, Path]) -> None:
    full, quiet, found = three("plan", runs["cap24"])
    assert quiet == full[:1] and f"{found['watermark_qps']:.4g} requests/s" in quiet[0] and len(full) > 5


def test_batch_curve(runs: dict[str, Path]) -> None:
    full, quiet, found = three("batch-curve", runs["cap4"], runs["cap24"])
    assert quiet == full[-1:] == [found["sentence"]]


def test_calibrate(runs: dict[str, Path], tmp_path: Path) -> None:
    full, quiet, found = three("calibrate", runs["cap24"], "--force", "--no-compare", "-o", tmp_path / "p.json")
    assert quiet == full[-1:] == [f"written: {tmp_path / 'p.json'}"] and found["profile"] == str(tmp_path / "p.json")


@pytest.mark.parametrize("service", [(), ("--base-url", "http://127.0.0.1:9", "--model", "m")], ids=["as it is", "given"])
def test_validate(service: tuple[str, ...]) -> None:
    config = Path(CONFIG).with_name("scheduler_bench.json")
    full, quiet, found = three("validate", config, *service)
    assert quiet[:-2] == [line for line in full if line.startswith(("error", "warning"))] and quiet[-1] == full[-1]
    assert len(quiet) == len(found["problems"]) + 2 and found["ok"] == ("may start" in quiet[-1])


def test_check_and_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gone = ("--base-url", f"http://127.0.0.1:{closed_port()}", "--model", "m")
    full, quiet, found = three("check", *gone)
    assert quiet == full[-2:] == [found["sentence"], f"next: {found['next_step']}"]
    refused, short, found = three("check", "--base-url", "nonsense", "--model", "m")
    assert short == refused[-2:] == [found["sentence"], f"next: {found['next_step']}"] and len(refused) > 3
    full, quiet, found = three("probe", *gone)
    assert quiet == [f"error {found['row']['code']}"] and found["row"]["code"] == "CH-REFUSED" and len(full) > 20


def test_recover(runs: dict[str, Path], tmp_path: Path) -> None:
    """The plan is in the head of the shard; nobody kept a row, so all that began is lost."""
    from bench.config import load_config
    from bench.workload.plan import build_plan

    plan = build_plan(load_config(Path(CONFIG)).config, "single", qps=[5.0], duration_s=10.0)
    said = {**dataclasses.asdict(read_run(runs["cap4"] / "run.json")), "run_id": "r", "part": {}}
    shard = ShardWriter(tmp_path / "s" / "w.shard", {"run": said, "plan": plan.to_json()})
    shard.stage({"stage": 0, "start_s": 1.0, "stripe": 0, "stripes": 1})
    shard.close()
    full, quiet, found = (
        bench("recover", tmp_path / "s", "-o", tmp_path / name, *more)
        for name, more in (("a", ()), ("b", ("-q",)), ("c", ("--json",)))
    )
    assert full.exit_code == quiet.exit_code == found.exit_code == 0, full.output
    data = json.loads(found.stdout)
    ((stage, lost),) = data["lost"].items()
    assert data["run_dir"] == str(tmp_path / "c") and 20 < lost < 100
    assert quiet.stdout.splitlines() == [f"stage {stage}: {lost} lost (CL-LOST)", f"written: {tmp_path / 'b'}"]
    assert f"stage {stage}: 0 rows, {lost} lost (CL-LOST)" in full.stdout
