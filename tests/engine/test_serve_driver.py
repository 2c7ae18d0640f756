"""The real-time driver under a clock that the test moves: absolute schedule, order of events, lateness."""
from __future__ import annotations

import asyncio
import time

import pytest

from engine.http_driver import LogHistogram, RealTimeDriver
from engine.http_loop import new_event_loop
from engine.request import Request
from engine.scheduler import Core
from engine.settings import EngineConfig


class Clock:
    """Time that stands still until the test moves it; timers fire when it reaches them, plus a lateness."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[tuple[float, int, object, tuple]] = []
        self.late_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def call_at(self, at_s, action, *arguments) -> None:
        self.timers.append((at_s, len(self.timers), action, arguments))

    def run_until(self, end_s: float) -> None:
        while self.timers and min(self.timers)[0] <= end_s:
            timer = min(self.timers)
            self.timers.remove(timer)
            self.now_s = max(self.now_s, timer[0] + self.late_s)
            timer[2](*timer[3])
        self.now_s = max(self.now_s, end_s)


def make(cpu_clock=lambda: 0.0, **settings):
    """A driver over the real core, without noise and without decision time unless asked."""
    clock, log = Clock(), []
    core = Core(EngineConfig(noise_cv=0.0, **settings))
    driver = RealTimeDriver(core, lambda d, plan, result, end_s: log.append((end_s, clock.now_s, list(result.tokens))),
                            clock=clock, cpu_clock=cpu_clock, call_at=clock.call_at)
    return clock, driver, log


def request(name: str, at_s: float, output: int, prompt: int = 16) -> Request:
    return Request(name, at_s, prompt, output, output)


def virtual_ends(settings: dict, arrivals: list[tuple[str, float, int]]) -> list[float]:
    """Step ends by an independent loop over the core: plan, add the duration, commit."""
    core = Core(EngineConfig(noise_cv=0.0, **settings))
    waiting, now_s, ends = list(arrivals), 0.0, []
    while waiting or core.by_id:
        if not core.by_id:
            now_s = max(now_s, waiting[0][1])
        while waiting and waiting[0][1] <= now_s:
            name, at_s, output = waiting.pop(0)
            core.submit(request(name, at_s, output), at_s)
        plan = core.plan(now_s)
        end_s = now_s + core.duration(plan)
        while waiting and waiting[0][1] < end_s:
            name, at_s, output = waiting.pop(0)
            core.submit(request(name, at_s, output), at_s)
        core.commit(plan, end_s)
        ends.append(end_s)
        now_s = end_s
    return ends


@pytest.mark.parametrize("late_s", [0.0, 0.0004, 0.004, 0.05])
def test_boundaries_are_those_of_the_virtual_clock_however_late_the_timer_fires(late_s):
    """0.05 s is about seven steps: boundaries are caught up, none is skipped, and none moves."""
    clock, driver, log = make()
    clock.late_s = late_s
    arrivals = []
    for name, at_s, output in [("a", 100.0, 40), ("b", 100.013, 25), ("c", 100.4, 10), ("d", 101.5, 5)]:
        # A process that was away reads the arrival when it is back, and stamps it then.
        clock.run_until(at_s)
        arrivals.append((name, clock.now_s, output))
        driver.submit(request(name, clock.now_s, output), clock.now_s)
    clock.run_until(103.0)
    assert [end for end, _, _ in log] == pytest.approx(virtual_ends({}, arrivals), abs=1e-9)
    assert sum(len(tokens) for _, _, tokens in log) == 40 + 25 + 10 + 5
    assert not driver.busy and len(clock.timers) == 0
    stats = driver.lateness.stats()
    assert stats["steps"] == len(log)
    assert stats["lateness_max_s"] >= late_s * 0.999


def test_an_arrival_brings_overdue_boundaries_to_pass_first():
    clock, driver, log = make(max_num_seqs=1)
    driver.submit(request("a", 100.0, 1), 100.0)  # one step of about 7 ms
    clock.now_s = 100.5  # the process was away; the timer has not fired yet
    driver.submit(request("b", 100.5, 1), 100.5)
    assert len(log) == 1 and log[0][0] < 100.02
    clock.run_until(101.0)
    assert log[1][0] == pytest.approx(100.5 + (log[0][0] - 100.0), abs=1e-9)


def test_lateness_beyond_the_bound_makes_the_run_invalid():
    for late_s, valid in ((0.001, True), (0.02, False)):
        clock, driver, _ = make()
        clock.late_s = late_s
        driver.submit(request("a", 100.0, 50), 100.0)
        clock.run_until(102.0)
        stats = driver.lateness.stats()
        assert stats["valid"] is valid
        assert (stats["late_step_ratio"] > 0.9) is not valid
        driver.lateness.reset()
        assert driver.lateness.stats()["valid"] and driver.lateness.stats()["steps"] == 0


def test_decision_time_is_added_to_every_step_and_reported():
    """The CPU clock advances 2 ms per reading pair: a step has one plan and, but for the first, one commit."""
    ticks = iter(range(10**6))
    clock, driver, log = make(cpu_clock=lambda: next(ticks) * 0.002)
    _, plain, plain_log = make()
    driver.submit(request("a", 100.0, 5), 100.0)
    plain_clock = plain._clock
    plain.submit(request("a", 100.0, 5), 100.0)
    clock.run_until(101.0)
    plain_clock.run_until(101.0)
    extra = [a[0] - b[0] for a, b in zip(log, plain_log, strict=True)]
    # plan 2 ms in the first step, then commit + plan = 4 ms more in each
    assert extra == pytest.approx([0.002, 0.006, 0.010, 0.014, 0.018], abs=1e-9)
    assert driver.decision_total_s == pytest.approx(0.018)


def test_abort_takes_effect_by_the_next_boundary():
    clock, driver, log = make()
    driver.submit(request("a", 100.0, 500, prompt=160), 100.0)
    clock.run_until(100.1)
    assert driver.core.snapshot().kv_blocks_used >= 10
    driver.abort("a", 100.1)
    clock.run_until(100.12)
    assert driver.core.snapshot().kv_blocks_used == 0 and not driver.busy
    steps = len(log)
    clock.run_until(101.0)
    assert len(log) == steps and not clock.timers


def test_requests_given_up_by_the_policy_are_reported():
    clock = Clock()
    dropped = []
    from engine.settings import ClassSpec

    core = Core(EngineConfig(noise_cv=0.0, policy="slack_aware", hopeless="shed", max_num_seqs=1,
                             default_class=ClassSpec(0.05, 0.1)))
    driver = RealTimeDriver(core, lambda *a: None, lambda r, now_s: dropped.append(r.request_id), clock=clock,
                            cpu_clock=lambda: 0.0, call_at=clock.call_at)
    driver.submit(request("long", 100.0, 200), 100.0)
    driver.submit(request("late", 100.0, 5), 100.0)  # its 50 ms pass long before the slot is free
    clock.run_until(103.0)
    assert dropped == ["late"] and not driver.busy
    assert core.snapshot().counters.finished == 1


def test_a_step_that_raises_is_reported_and_not_swallowed():
    clock, driver, _ = make()
    calls = []
    driver.on_crash = lambda: calls.append(True)
    driver.submit(request("a", 100.0, 50), 100.0)
    clock.run_until(100.05)

    def broken(plan, now_s):
        raise ZeroDivisionError

    driver.core.commit = broken
    with pytest.raises(ZeroDivisionError):
        clock.run_until(101.0)
    assert calls == [True]


def test_log_histogram_against_sorting():
    """Bins are 2 % wide, so a percentile is at most 2 % above the nearest rank."""
    import random

    generator = random.Random(7)
    values = [generator.lognormvariate(-7, 1.5) for _ in range(5000)]
    histogram = LogHistogram()
    for value in values:
        histogram.add(value)
    ordered = sorted(values)
    for share, rank in ((0.5, 2500), (0.99, 4950), (1.0, 5000)):
        exact = ordered[rank - 1]
        assert exact <= histogram.percentile(share) * (1 + 1e-9) and histogram.percentile(share) <= exact * 1.0201
    assert LogHistogram().percentile(0.5) is None


def test_the_loops_timers_are_finer_than_a_millisecond():
    """asyncio alone rounds 0.3 ms up to 1 ms every time, so even its best wait is longer than 0.9 ms."""
    async def waits() -> list[float]:
        found = []
        for _ in range(40):
            start_s = time.monotonic()
            await asyncio.sleep(0.0003)
            found.append(time.monotonic() - start_s)
        return found

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        found = sorted(runner.run(waits()))
    assert found[0] >= 0.0002 and found[5] < 0.0009
