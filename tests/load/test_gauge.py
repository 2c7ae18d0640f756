"""The gauge of streams in flight: counted when all is known about its moment, and none of its samples is lost."""

from __future__ import annotations

from typing import Any


def test_every_sample_is_the_count_of_its_moment_up_to_the_end(run_locust: Any) -> None:
    """Against the rows, which the gauge never sees. Two stages, so samples of both wait when the stage changes."""
    ran = run_locust("--qps-stages", "30,15")
    rows = [(float(r["sent_s"]), float(r["done_s"])) for r in ran.rows()]
    samples = ran.rows("inflight.csv")
    wrong = sum(
        int(r["in_flight"]) != sum(sent <= float(r["t_s"]) < done for sent, done in rows) for r in samples
    )  # fmt: skip
    # A stream is in flight from the start of its write on, `sent_s` is a little later; a busy machine stretches that.
    assert wrong <= 0.1 * len(samples)
    times = [float(r["t_s"]) for r in samples]
    assert times == sorted(times)
    assert times[-1] >= max(done for _, done in rows) - 0.1  # the last ones were sent before the worker said goodbye
    late = max(float(r["loop_lag_s"]) for r in samples)
    # a lost message would leave a hole of half a second
    assert max(b - a for a, b in zip(times, times[1:], strict=False)) < 0.45 + 2 * late
    for stage in ("0", "1"):
        mine = [float(r["t_s"]) for r in samples if r["stage"] == stage]
        ends = [float(r["done_s"]) for r in ran.rows() if r["stage"] == stage]
        assert mine and mine[-1] >= max(ends) - 0.1
