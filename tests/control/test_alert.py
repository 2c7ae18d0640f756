"""Windows and alerts over made-up pages: every expected number by hand; pages that vanish, reset and lie."""
from __future__ import annotations

import math

import pytest

from control.alert import Look, Slo, Watch, lengths, quantile_bucket, share_within

SLO = Slo(ttft_s=0.8, tpot_s=0.1, p95_s=4.0, attainment=0.99)
EDGES = (0.5, 1.0, math.inf)


def look(at, running=4.0, waiting=0.0, done=0.0, good=None, **more):
    """A page after `done` finished requests, of which `good` had TTFT <= 0.5 s and the rest over 1 s."""
    good = done if good is None else good
    ttft = tuple(zip(EDGES, (good, good, done), strict=True))
    return Look(at, running, waiting, finished=done, prompt_tokens=100 * done, output_tokens=10 * done,
                service_sum_s=2.0 * done, service_count=done, ttft=ttft, **more)


def test_rates_and_percentiles_of_a_steady_service():
    watch = Watch(SLO)
    for t in range(11):
        view = watch.look(look(float(t), done=5.0 * t), float(t))
    assert view.completed_qps == pytest.approx(5.0) and view.arrival_qps == pytest.approx(5.0)
    assert view.output_tps == pytest.approx(50.0) and view.service_mean_s == pytest.approx(2.0)
    assert view.ttft_p95_s == (0.0, 0.5) and view.attainment_ttft == (1.0, 1.0) and not view.alerts


def test_arrivals_are_what_ended_and_what_is_inside_more():
    watch = Watch(SLO)
    watch.look(look(0.0, running=2, waiting=1, done=10.0), 0.0)
    view = watch.look(look(2.0, running=4, waiting=5, done=16.0), 2.0)
    assert view.arrival_qps == pytest.approx((6 + 6) / 2) and len(watch.arrivals) == 12
    times = [t for t, _, _ in watch.arrivals]
    assert times == sorted(times) and times[0] > 0 and times[-1] < 2.0
    assert {i for _, i, _ in watch.arrivals} == {100} and {o for _, _, o in watch.arrivals} == {10}


@pytest.mark.parametrize(("waiting", "level"), [(5.0, None), (6.0, "near"), (8.0, "over")])
def test_the_queue_alert_is_waiting_x_service_over_slots(waiting, level):
    # 2 s service, 4 run, target 4 s: 5 wait = 2.5 s (62 %), 6 = 3.0 s (75 %), 8 = 4.0 s (100 %)
    watch = Watch(SLO)
    watch.look(look(0.0, done=0.0), 0.0)
    view = watch.look(look(1.0, waiting=waiting, done=4.0), 1.0)
    found = [a for a in view.alerts if a.kind == "queue"]
    assert [a.level for a in found] == ([level] if level else [])
    if level:
        assert found[0].value == pytest.approx(waiting * 2.0 / 4.0) and "P95 target 4 s" in found[0].text


def test_burn_needs_both_windows():
    """30 % misses burn 30 times the budget of 1 %; windows of 300 s and 30 s alert at 20."""
    watch = Watch(SLO)
    good = done = 0.0
    seen = {}
    for t in range(0, 400, 5):
        done += 50
        good += 50 if t < 100 or t >= 300 else 35
        view = watch.look(look(float(t), done=done, good=good), float(t))
        seen[t] = [a for a in view.alerts if a.kind == "burn" and "alert minutes" in a.text]
    assert not seen[95]
    # long window: burn reaches 20 when misses are 20 % of all since the start: 0.3 x / (100 + x) = 0.2 -> x = 200
    assert not seen[260] and seen[295]
    assert not seen[335]  # over in the short window, whatever the long one still says


def test_refused_requests_are_misses():
    watch = Watch(SLO)
    for t in range(0, 100, 5):
        view = watch.look(look(float(t), done=30.0 * t, refused=20.0 * t), float(t))
    assert view.attainment_ttft == (pytest.approx(0.6), pytest.approx(0.6))
    assert any(a.kind == "burn" for a in view.alerts)


def test_a_page_that_vanishes_and_comes_back():
    watch = Watch(SLO)
    watch.look(look(0.0, done=0.0), 0.0)
    alerts = [watch.look(None, float(t)).alerts for t in range(1, 5)]
    assert [len(a) for a in alerts] == [0, 0, 1, 1] and "3 times" in alerts[2][0].text
    view = watch.look(look(5.0, done=50.0), 5.0)
    assert view.readable and view.marks == ["back after 4 misses"] and view.completed_qps == pytest.approx(10.0)


def test_counters_that_were_reset_count_from_zero():
    watch = Watch(SLO)
    watch.look(look(0.0, done=1000.0), 0.0)
    watch.look(look(1.0, done=1010.0), 1.0)
    view = watch.look(look(2.0, running=3.0, done=6.0), 2.0)
    assert "reset" in view.marks and view.completed_qps == pytest.approx((10 + 6) / 2)
    assert len(watch.arrivals) == 10 + 6 + 3  # all that the new process holds arrived since


LIES = [
    (dict(running=-1.0), "running is -1"), (dict(running=float("nan")), "running is nan"),
    (dict(kv_usage=3.0), "kv_usage is 3"), (dict(waiting=float("inf")), "waiting is inf"),
]


@pytest.mark.parametrize(("change", "said"), LIES)
def test_impossible_values_change_nothing(change, said):
    watch = Watch(SLO)
    watch.look(look(0.0, done=0.0), 0.0)
    watch.look(look(1.0, done=5.0), 1.0)
    view = watch.look(look(2.0, done=500.0, **change), 2.0)
    assert any(said in a.text and a.kind == "page" for a in view.alerts)
    assert watch.look(look(3.0, done=15.0), 3.0).completed_qps == pytest.approx(5.0)


def test_impossible_speeds_and_falling_buckets():
    watch = Watch(SLO)
    watch.look(look(0.0, done=0.0), 0.0)
    fast = Look(1.0, 4.0, 0.0, finished=1.0, output_tokens=1e12)
    assert any("tokens in a second" in a.text for a in watch.look(fast, 1.0).alerts)
    falling = Look(2.0, 4.0, 0.0, finished=1.0, ttft=((0.5, 5.0), (1.0, 3.0), (math.inf, 5.0)))
    assert any("buckets of ttft fall" in a.text for a in watch.look(falling, 2.0).alerts)
    assert any("time went back" in a.text for a in watch.look(look(-1.0, done=1.0), 2.5).alerts)


def test_a_page_that_stands_still_while_requests_run():
    watch = Watch(SLO)
    views = [watch.look(look(float(t), done=10.0), float(t)) for t in range(20)]
    assert not views[14].alerts and "no counter moved for 15 s" in views[15].alerts[0].text
    idle = Watch(SLO)
    assert not any(idle.look(look(float(t), running=0.0, done=10.0), float(t)).alerts for t in range(40))


def test_a_histogram_knows_its_edges_only():
    buckets = ((0.5, 90.0), (1.0, 96.0), (math.inf, 100.0))
    assert share_within(buckets, 0.8) == (0.9, 0.96) and share_within(buckets, 1.0) == (0.96, 0.96)
    assert quantile_bucket(buckets, 0.9) == (0.0, 0.5) and quantile_bucket(buckets, 0.95) == (0.5, 1.0)
    assert quantile_bucket(buckets, 0.99) == (1.0, math.inf) and quantile_bucket((), 0.5) is None


def test_lengths_follow_the_histogram_and_the_mean():
    found = lengths(((10.0, 5.0), (100.0, 10.0), (math.inf, 10.0)), 1000, 40.0)
    assert sum(found) / 1000 == pytest.approx(40.0, rel=0.02) and min(found) >= 1
    # half of the requests lie in the first bucket: their median stays below the others' least
    assert sorted(found)[499] < sorted(found)[501] and sorted(found)[999] > 60
    assert lengths((), 3, 7.2) == [7, 7, 7] and lengths((), 1, 0.0) == [1]
