"""The alarm clock of the pacing loop: never early, woken at once, and closed after use."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from bench.commands.job_options import PROJECT

# In a process of its own: importing gevent's loop here would change the tests around it.
SCRIPT = """
    import time, gevent
    from locustfiles.pacing import Waiter
    alarm = Waiter(precise={precise})
    assert alarm.precise is {precise}
    for wait in (0.0, 0.004, 0.0204, 0.05):
        due = time.monotonic() + wait
        alarm.until(due)
        assert time.monotonic() >= due, "early"
        assert time.monotonic() - due < 1.0
    due = time.monotonic() + 0.02
    alarm.until(due, spin_s=0.005)                 # the last part awake
    assert time.monotonic() >= due, "early"
    alarm.until(time.monotonic() - 5, spin_s=9.0)  # long past: at once
    alarm.until(time.monotonic() - 5)
    gevent.spawn_later(0.05, alarm.wake)
    begun = time.monotonic()
    alarm.until(begun + 30)
    assert time.monotonic() - begun < 5, "not woken"
    alarm.until(time.monotonic() + 30)             # once woken, it never waits again
    alarm.until(time.monotonic() + 30, spin_s=30.0)
    assert time.monotonic() - begun < 5
    alarm.wake(); alarm.close(); alarm.close()
    print("fine")
"""


BREAKS = """
    import time
    from locustfiles.pacing import HELD_S, Breaks
    rests = []
    begun = time.monotonic()
    breaks = Breaks(lambda: rests.append(time.monotonic()))
    while time.monotonic() < begun + 20 * HELD_S:
        breaks()
    # A rest comes when the work has held on for HELD_S since the last one: never sooner, so at most 20 of them.
    assert 1 <= len(rests) <= 20, rests
    assert all(b - a >= HELD_S for a, b in zip([begun, *rests], rests)), rests
    print("fine")
"""


def test_long_work_has_breaks() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(BREAKS)], capture_output=True, text=True, timeout=60,
                          cwd=PROJECT, env={**os.environ, "PYTHONPATH": str(PROJECT)}, check=False)  # fmt: skip
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.parametrize("precise", [True, False])
def test_waits_and_wakes(precise: bool) -> None:
    if precise and not sys.platform.startswith("linux"):
        pytest.skip("timerfd is Linux only")
    code = textwrap.dedent(SCRIPT).format(precise=precise)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=PROJECT,
                          env={**os.environ, "PYTHONPATH": str(PROJECT)}, check=False)  # fmt: skip
    assert done.stdout.strip() == "fine", done.stderr
