"""Clocks of other machines: the offset is found within its bound, applied, and a wide bound is INVALID."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.analyse import CLOCK_LIMIT, _clock_bound
from analysis.verdict import Facts, run_reasons
from locustfiles.clock import DRIFT, ClockOffset

from .conftest import clean_environment


@pytest.mark.parametrize("offset_s", [0.0, 3600.0, -1e6, 0.004])
@pytest.mark.parametrize("seed", range(10))
def test_the_offset_lies_within_its_bound_on_a_lopsided_network(offset_s: float, seed: int) -> None:
    """master = worker + offset; each way takes between 0.1 and 30 ms, one way up to 300 times the other."""
    rng, clock, at = random.Random(seed), ClockOffset(), 50.0
    for _ in range(8):
        there, back = rng.uniform(1e-4, 0.03), rng.uniform(1e-4, 0.03)
        clock.add_trip(at, at + there + offset_s, at + there + back)
        at += 0.05
    assert abs(clock.offset_s - offset_s) <= clock.bound_s + 1e-9
    assert clock.bound_s <= 0.03 and clock.trips == 8
    assert clock.bound_after(300) == clock.bound_s + 300 * DRIFT


def test_one_machine_needs_no_trips() -> None:
    clock = ClockOffset()
    clock.share()
    clock.add_trip(1.0, 500.0, 1.5)
    assert (clock.offset_s, clock.bound_after(1e6)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("workers", "bound_s", "invalid"),
    [
        ([{"bound_s": 0.0, "shared": True}, {"bound_s": 0.079, "shared": False}], 0.079, False),
        ([{"bound_s": 0.0, "shared": True}, {"bound_s": 0.081, "shared": False}], 0.081, True),  # a tenth of 0.8 s is 0.08
        ([{"bound_s": None, "shared": False}], float("inf"), True),  # no trip came back
        ([], None, False),
    ],
)
def test_a_bound_above_a_tenth_of_the_deadline_is_invalid(
    workers: list[dict[str, object]], bound_s: float | None, invalid: bool
) -> None:
    found = _clock_bound({"worker_info": workers})
    assert found == bound_s
    reasons = run_reasons(Facts([], [], [], {}, [], 20.0, False, clock_bound_s=found, clock_limit_s=CLOCK_LIMIT * 0.8))
    assert [r.reason_id for r in reasons] == (["INV-OFFSET"] if invalid else [])


# Generator and Conductor with a worker clock 1,000 s ahead; in a process of its own, since Locust patches it.
TWO_CLOCKS = """
import json, time
from types import SimpleNamespace
import locust
from locust.env import Environment
import locustfiles.generator as g
from locustfiles import messages
from locustfiles.conductor import Conductor

AHEAD = 1000.0
g.now_s = lambda: time.monotonic() + AHEAD
g.clock_id = lambda: "another machine"
g.WorkerRunner = SimpleNamespace  # the fake below stands for one
sides = {}

def send(kind, data=None, client_id=None):
    sides["sent"].append(kind)
    handler = sides["conductor"].listeners().get(kind) or sides["generator"].listeners()[kind]
    handler(environment=None, msg=SimpleNamespace(data=json.loads(json.dumps(data)), node_id="w"))

environment = SimpleNamespace(runner=SimpleNamespace(send_message=send), parsed_options=None)
sides["sent"] = []
sides["generator"] = generator = g.Generator(environment)
sides["conductor"] = Conductor(environment, dict)
generator._tie_clock("the master's machine")
job = SimpleNamespace(offset_s=generator.clock.offset_s, t0_s=time.monotonic())
print(json.dumps({
    "offset_s": generator.clock.offset_s, "bound_s": generator.clock.bound_s, "trips": generator.clock.trips,
    "run_time_s": generator.to_run_s(job, g.now_s()), "sent": sides["sent"],
}))
"""


def test_a_worker_with_another_clock_writes_the_masters_time(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_CLOCKS], env=clean_environment(), capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["trips"] == 8 and said["sent"].count("bench_ping") == said["sent"].count("bench_pong") == 8
    assert abs(said["offset_s"] + 1000.0) <= said["bound_s"] + 1e-6 and said["bound_s"] < 0.1
    assert abs(said["run_time_s"]) < 0.2  # the worker's own clock says 1,000 s
