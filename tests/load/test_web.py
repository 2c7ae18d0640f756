"""The web page without a plan: the offered rate is a field of the start form, runs follow each other, Stop drains."""

from __future__ import annotations

import csv
import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.commands.locust_process import free_port

from .conftest import clean_environment, end, start_locust

KEY = "sk-test-4711-never-to-be-seen"


class Page:
    """Locust's web page, as a browser would use it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url

    def get(self, path: str, form: dict[str, str] | None = None) -> str:
        data = urllib.parse.urlencode(form).encode() if form is not None else None
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data=data), timeout=30) as answer:
            return answer.read().decode()

    def swarm(self, **fields: str) -> dict[str, Any]:
        """The answer to a start, accepted or not."""
        return json.loads(self.get("/swarm", {"user_count": "1", "spawn_rate": "1", "host": "", **fields}))

    def start(self, **fields: str) -> None:
        limit = time.monotonic() + 10  # Locust itself takes a moment to end the run before
        while json.loads(self.get("/stats/requests"))["state"] not in ("ready", "stopped") and time.monotonic() < limit:
            time.sleep(0.05)
        answer = self.swarm(**fields)
        assert answer["success"], answer

    def runs(self) -> list[Path]:
        return sorted((self.folder / "runs").glob("*/run.json"))

    def wait_for_run(self, number: int, *, finished: bool, limit_s: float = 30) -> dict[str, Any]:
        end_at = time.monotonic() + limit_s
        while time.monotonic() < end_at:
            runs = self.runs()
            if len(runs) >= number:
                info = json.loads(runs[number - 1].read_text(encoding="utf-8"))
                if bool(info["finished_utc"]) == finished:
                    return info | {"dir": runs[number - 1].parent}
            time.sleep(0.1)
        raise AssertionError(f"run {number} did not come to {finished=} in {limit_s} s")


@contextmanager
def serve_page(folder: Path, url: str, config_file: Path, base_path: str = "") -> Iterator[Page]:
    """Locust's web page with our locustfile and no shape, in a folder of its own."""
    port = free_port()
    below = ("--web-base-path", base_path) if base_path else ()
    process = start_locust(
        folder / "log.txt", clean_environment(BENCH_TARGET_URL=url, BENCH_API_KEY=KEY), "--web-host", "127.0.0.1",
        "--web-port", str(port), *below, "--bench-config", str(config_file), shape=None,
    )  # fmt: skip
    there = Page(folder, f"http://127.0.0.1:{port}{base_path}")
    try:
        limit = time.monotonic() + 30
        while time.monotonic() < limit:
            try:
                there.get("/")
                break
            except OSError:
                time.sleep(0.1)
        yield there
    finally:
        end(process)


@pytest.fixture
def page(engine: Any, config_file: Path, tmp_path: Path) -> Iterator[Page]:
    with serve_page(tmp_path, engine.base_url, config_file) as there:
        yield there


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "requests.csv").open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def test_runs_from_the_start_form(page: Page) -> None:
    form = page.get("/")
    assert "offered_qps" in form and "stage_duration" in form
    assert KEY not in form and "bench_config" not in form

    page.start(offered_qps="25", stage_duration="2")
    first = page.wait_for_run(1, finished=True)
    ledger = rows(first["dir"])
    assert {row["status"] for row in ledger} == {"ok"} and {float(row["offered_qps"]) for row in ledger} == {25.0}
    assert 25 <= len(ledger) <= 80  # 50 expected, five standard deviations

    page.start(offered_qps="40", stage_duration="20")  # a second run from the same page
    second = page.wait_for_run(2, finished=False)
    limit = time.monotonic() + 20
    while len(rows(second["dir"])) < 20 and time.monotonic() < limit:
        time.sleep(0.1)
    page.get("/stop", {})
    stopped = page.wait_for_run(2, finished=True)
    ledger = rows(stopped["dir"])
    planned = int(next(csv.DictReader((stopped["dir"] / "stages.csv").open(encoding="utf-8")))["planned"])
    assert stopped["interrupted"] and len(ledger) == planned
    kinds = {row["status"] for row in ledger}
    assert kinds == {"ok", "unsent"} and {row["code"] for row in ledger if row["status"] == "unsent"} == {"CL-STOP"}

    for path in page.folder.rglob("*"):  # the key is in no file of either run and not in the log
        assert path.is_dir() or KEY.encode() not in path.read_bytes(), path


BAD_STARTS = [
    ({"qps_stages": "ten"}, "--qps-stages is 'ten'"),
    ({"qps_stages": "5,nan"}, "--qps-stages is '5,nan'"),
    ({"qps_stages": "5,1e300"}, "--qps-stages is '5,1e300'"),
    ({"offered_qps": "nan"}, "--offered-qps is nan; 0 (as the config says), or 0.0001 to 100000"),
    ({"offered_qps": "-5"}, "--offered-qps is -5"),
    ({"offered_qps": "1e300"}, "--offered-qps is 1e+300"),
    ({"offered_qps": "inf"}, "--offered-qps is inf"),
    ({"offered_qps": "ten"}, "offered_qps is 'ten'; a number is needed"),
    ({"stage_duration": "-1"}, "--stage-duration is -1"),
    ({"stage_duration": ""}, "stage_duration is ''; a number is needed"),
    ({"stage_repeats": "2.5"}, "stage_repeats is '2.5'; a whole number is needed"),
    ({"plan_seed": "-1"}, "--plan-seed is -1"),
    ({"slo_ttft_ms": "nan"}, "--slo-ttft-ms is nan"),
    # 100,000/s for 700 s: more than a stage may have
    ({"offered_qps": "100000", "stage_duration": "700"}, "arrivals"),
    ({"host": "ftp://x"}, "base_url"),
    ({"run_dir": "elsewhere"}, "run_dir cannot be set in the web page"),
    ({"bench_config": "other.json"}, "bench_config cannot be set in the web page"),
]


def arguments(page: Page) -> dict[str, Any]:
    """What Locust's page draws its form from."""
    return json.loads(re.findall(r"window\.templateArgs = (\{.*\})$", page.get("/"), re.MULTILINE)[0])


def test_a_bad_start_is_refused_with_the_reason_and_a_better_one_runs(page: Page) -> None:
    before = arguments(page)
    for fields, words in BAD_STARTS:
        answer = page.swarm(**fields)
        assert answer["success"] is False and words in answer["message"], (fields, answer)
    assert page.runs() == []
    assert "--qps-stages is 'ten'" in (page.folder / "log.txt").read_text()
    assert json.loads(page.get("/stats/requests"))["state"] == "ready"
    page.swarm(qps_stages="5,ten", stage_duration="1", host="http://127.0.0.1:1", user_count="3", elsewhere="x")
    kept = arguments(page)  # the form is drawn anew with what was typed, and with nothing else changed
    typed = {"qps_stages": "5,ten", "stage_duration": "1"}
    options = {key: option["default_value"] for key, option in kept["extra_options"].items()}
    assert options == {key: option["default_value"] for key, option in before["extra_options"].items()} | typed
    assert (kept["host"], kept["num_users"]) == ("http://127.0.0.1:1", "3") and "elsewhere" not in json.dumps(kept)
    page.start(qps_stages="", offered_qps="30", stage_duration="1")
    assert page.wait_for_run(1, finished=True)["problems"] == []
    assert arguments(page)["extra_options"] == before["extra_options"]  # an accepted start forgets the refused one


def test_the_start_form_says_what_users_are_for(page: Page) -> None:
    (note,) = re.findall(r'note\.textContent = "([^"]*)";', page.get("/"))
    assert note.startswith("Open loop: users do not set the rate.")


def test_a_second_start_while_a_run_goes_is_refused_and_changes_nothing(page: Page) -> None:
    assert page.swarm(offered_qps="30", stage_duration="3")["success"]
    at_once = page.swarm(offered_qps="70", stage_duration="9")  # before the first has become a run
    assert at_once["success"] is False and "in progress" in at_once["message"]
    page.wait_for_run(1, finished=False)
    later = page.swarm(offered_qps="80", stage_duration="9")
    assert later["success"] is False and "a run is in progress" in later["message"]
    done = page.wait_for_run(1, finished=True)
    assert {float(row["offered_qps"]) for row in rows(done["dir"])} == {30.0}
    assert len(page.runs()) == 1 and done["problems"] == []
