"""Pages of six serving systems, as they look in production: what is read, what follows, what a lie or a fault does.

`tests/data/metrics` holds one page of each, written after its documentation: labels, several engines, `_created`
samples, metrics that nobody asked for.
"""
from __future__ import annotations

import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench.client.metrics_page import LIMIT_BYTES, fetch, fields
from control import alert
from control.alert import Look, Slo, Watch

DATA = Path(__file__).resolve().parents[1] / "data" / "metrics"
SLO = Slo(ttft_s=0.8, tpot_s=0.1, p95_s=4.0, attainment=0.99)
INF = math.inf

# By hand from the files: sums over engines and reasons, means of shares.
READ = {
    "vllm": dict(running=12.0, waiting=3.0, kv_usage=0.4, finished=100.0, refused=8.0, failed=0.0, preemptions=4.0,
                 prompt_tokens=100_000.0, output_tokens=20_000.0, service_sum_s=260.0, service_count=100.0,
                 ttft=((0.25, 50.0), (0.5, 78.0), (0.75, 90.0), (1.0, 98.0), (2.5, 100.0), (INF, 100.0)),
                 tpot=((0.01, 0.0), (0.025, 95.0), (0.05, 100.0), (0.1, 100.0), (INF, 100.0)),
                 input_lengths=((500.0, 20.0), (1000.0, 40.0), (2000.0, 60.0), (INF, 60.0))),
    "sglang": dict(running=9.0, waiting=4.0, kv_usage=0.28, finished=80.0, failed=3.0, preemptions=2.0,
                   prompt_tokens=80_000.0, output_tokens=24_000.0,
                   ttft=((0.1, 10.0), (0.2, 40.0), (0.4, 60.0), (0.6, 70.0), (0.8, 76.0), (1.0, 78.0), (2.0, 80.0),
                         (4.0, 80.0), (INF, 80.0))),
    "tgi": dict(running=6.0, waiting=3.0, kv_usage=None, finished=40.0, failed=6.0, prompt_tokens=36_000.0,
                output_tokens=5_000.0, ttft=(), service_sum_s=70.0, service_count=40.0,
                tpot=((0.01, 0.0), (0.02, 30.0), (0.05, 40.0), (INF, 40.0))),
    "trtllm": dict(running=8.0, waiting=2.0, kv_usage=0.62, finished=50.0, prompt_tokens=None, output_tokens=None,
                   ttft=((0.25, 20.0), (0.5, 40.0), (0.75, 45.0), (1.0, 48.0), (INF, 50.0)),
                   tpot=((0.01, 0.0), (0.025, 48.0), (0.05, 50.0), (INF, 50.0))),
    "llamacpp": dict(running=2.0, waiting=1.0, kv_usage=None, finished=None, prompt_tokens=9_000.0,
                     output_tokens=3_000.0, ttft=(), tpot=()),
    "triton": dict(running=6.0, waiting=3.0, kv_usage=0.25, finished=None, prompt_tokens=None, output_tokens=None),
}  # fmt: skip


def page(system: str) -> str:
    return (DATA / f"{system}.txt").read_text()


@pytest.mark.parametrize("system", READ)
@pytest.mark.parametrize("change", [str, lambda t: t.replace("\n", "\r\n"), lambda t: t.replace("# ", "#  ")])
def test_what_is_read(system, change):
    found = fields(change(page(system)))
    assert {key: found[key] for key in READ[system]} == READ[system]


def later(text: str, seconds: float) -> str:
    """The page after `seconds`: every counter and bucket at 1 + seconds/10 of what it was, gauges as they are."""
    def grow(line: re.Match) -> str:
        name = line[1]
        moves = name.endswith(("_total", "_bucket", "_sum", "_count")) or name.startswith(("tgi_request_success", "tgi_request_failure"))
        return f"{name}{line[2] or ''} {float(line[3]) * (1 + seconds / 10)}" if moves else line[0]

    return re.sub(r"^([a-z_:]+)(\{.*\})? (\S+)$", grow, text, flags=re.MULTILINE | re.IGNORECASE)


# After ten seconds everything on the page happened once more: rates are a tenth of the counters.
SEEN = {
    # 800 ms lies in the bucket .75-1: between 90 and 98 of 100 first tokens were in time; 8 refused ones were not
    "vllm": dict(completed_qps=10.0, arrival_qps=10.8, output_tps=2000.0, service_mean_s=2.6, ttft_p95_s=(0.75, 1.0),
                 tpot_p95_s=(0.01, 0.025), attainment_ttft=(90 / 108, 98 / 108), expected_wait_s=3 * 2.6 / 12),
    # 0.8 s is an edge; 3 aborted are misses; no service time is told: 9 running / 8 per second (Little)
    "sglang": dict(completed_qps=8.0, arrival_qps=8.3, output_tps=2400.0, ttft_p95_s=(0.6, 0.8), tpot_p95_s=None,
                   attainment_ttft=(76 / 83, 76 / 83), service_mean_s=9 / 8, expected_wait_s=4 * 9 / 8 / 9),
    # no first tokens are told, so no attainment either, although 6 requests failed
    "tgi": dict(completed_qps=4.0, arrival_qps=4.6, output_tps=500.0, ttft_p95_s=None, tpot_p95_s=(0.02, 0.05),
                attainment_ttft=None, service_mean_s=1.75, expected_wait_s=3 * 1.75 / 6),
    "trtllm": dict(completed_qps=5.0, arrival_qps=5.0, output_tps=None, ttft_p95_s=(0.75, 1.0),
                   tpot_p95_s=(0.01, 0.025), attainment_ttft=(45 / 50, 48 / 50), service_mean_s=8 / 5),
    # neither answers nor first tokens are counted: no rate, no wait, no attainment; not 0
    "llamacpp": dict(completed_qps=None, arrival_qps=None, output_tps=300.0, ttft_p95_s=None, attainment_ttft=None,
                     service_mean_s=None, expected_wait_s=None),
    "triton": dict(completed_qps=None, arrival_qps=None, output_tps=None, attainment_ttft=None, expected_wait_s=None),
}  # fmt: skip


def see(watch: Watch, text: str, at_s: float):
    return watch.look(Look(at_s, **fields(text)), at_s)


@pytest.mark.parametrize("system", SEEN)
def test_what_follows_from_two_looks(system):
    watch = Watch(SLO)
    see(watch, page(system), 100.0)
    view = see(watch, later(page(system), 10), 110.0)
    for name, value in SEEN[system].items():
        assert getattr(view, name) == (value if value is None else pytest.approx(value)), name
    assert not view.marks and [a.kind for a in view.alerts if a.kind == "page"] == []
    if SEEN[system]["completed_qps"] is None:
        assert watch.arrivals == []  # nothing is invented for a trace
    else:
        assert len(watch.arrivals) == int(10 * SEEN[system]["arrival_qps"] + 1e-6)


@pytest.mark.parametrize("system", [s for s, seen in SEEN.items() if seen["completed_qps"]])
def test_a_restart_counts_from_zero(system):
    """Between two looks it restarted and served a tenth of what the page had: that, and nothing negative."""
    watch = Watch(SLO)
    see(watch, later(page(system), 100), 100.0)
    view = see(watch, later(page(system), -9), 110.0)
    assert view.marks == ["reset"] and view.completed_qps == pytest.approx(SEEN[system]["completed_qps"] / 10)
    assert not [a for a in view.alerts if a.kind == "page"]
    again = see(watch, later(page(system), 1), 120.0)
    assert not again.marks and again.completed_qps > view.completed_qps


def test_two_services_behind_one_address_are_no_restarts():
    """A balancer asks them in turn: the counters jump to and fro, which would look like ever new load."""
    watch = Watch(SLO)
    views = [see(watch, later(page("vllm"), 100 if i % 2 else 1), 100.0 + i) for i in range(12)]
    seen = [a.text for v in views for a in v.alerts if a.kind == "page"]
    assert any("several processes answered behind one address" in text for text in seen)
    assert [i for i, v in enumerate(views) if "implausible" in v.marks] == [6, 8, 10]  # from the third fall on
    # and a restart an hour later is a restart again
    quiet = see(watch, later(page("vllm"), 1), 9000.0)
    assert "implausible" not in quiet.marks


@pytest.mark.parametrize(("lie", "said"), [
    (dict(finished=1e15), "requests in"), (dict(waiting=1e12), "requests are inside"), (dict(output_tokens=1e18), "tokens in a second"),
    (dict(running=-1.0), "running is -1"), (dict(kv_usage=3.0), "more than all"), (dict(refused=1e9), "requests in"),
    (dict(service_sum_s=-5.0), "service_sum_s is -5"), (dict(ttft=((0.5, 9.0), (INF, 3.0))), "buckets of ttft fall"),
])  # fmt: skip
def test_a_lie_changes_nothing_and_is_said(lie, said):
    watch = Watch(SLO)
    base = Look(0.0, **fields(page("vllm")))
    watch.look(base, 0.0)
    view = watch.look(replace(base, at_s=1.0, **lie), 1.0)
    assert "implausible" in view.marks and any(said in a.text for a in view.alerts)
    assert watch.arrivals == []
    good = watch.look(replace(base, at_s=2.0, finished=110.0), 2.0)
    assert good.completed_qps == pytest.approx(5.0) and not good.marks


def test_ever_so_many_looks_keep_memory_and_windows(monkeypatch):
    """Ten looks a second for longer than the longest window: bounded steps, and the windows still say what happened."""
    monkeypatch.setattr(alert, "MAX_ARRIVALS", 500)
    monkeypatch.setattr(alert, "COARSE_BIN_S", 60.0)
    watch = Watch(SLO, scale=0.005)  # windows of 0.15 s to 108 s; the last 60 s look by look, before that 0.3 s a step
    for i in range(1500):
        done = i / 2  # 5 a second, one in fifty late
        good = done - done // 50
        now = Look(i / 10, 3.0, 0.0, finished=done, prompt_tokens=100 * done, output_tokens=10 * done,
                   ttft=((0.5, good), (1.0, good), (INF, done)))  # fmt: skip
        view = watch.look(now, i / 10)
    assert len(watch._steps) <= 602 and len(watch._older) <= 48 / 0.3 + 2
    for length in (30.0, 60.0, 72.0, 108.0):
        steps = watch._window(view.at_s, length)
        span, ended = sum(s.span_s for s in steps), sum(s.finished for s in steps)
        assert span == pytest.approx(length, abs=0.5) and ended / span == pytest.approx(5.0, rel=0.01)
        low, high = alert._attainment(steps, 0.8)
        assert low == high == pytest.approx(0.98, abs=0.01)
    assert len(watch.arrivals) == 500 and watch.left_out == 749 - 500


# -- the wire --------------------------------------------------------------------------------------


@contextmanager
def wire(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does with each connection what `answer` says."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                try:
                    connection.recv(4096)
                    answer(connection)
                except OSError:
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
    finally:
        listener.close()


OK = b"HTTP/1.1 200 OK\r\n"


def drip(connection: socket.socket) -> None:
    connection.sendall(OK + b"\r\n")
    for _ in range(200):  # never as long without a byte as the time out
        connection.sendall(b"#\n")
        time.sleep(0.02)


def endless(connection: socket.socket) -> None:
    connection.sendall(OK + b"\r\n")
    for _ in range(2 * LIMIT_BYTES // 65_536):
        connection.sendall(b"vllm:num_requests_running 1\n" * 2340)


@pytest.mark.parametrize(("answer", "said"), [
    (lambda c: c.sendall(b"no http at all\r\n\r\n"), "no HTTP answer"),
    (lambda c: c.sendall(OK + b"Content-Length: 500\r\n\r\nvllm:num_requests_running 1"), "early"),
    (lambda c: c.sendall(OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nvllm:"), "no HTTP answer"),
    (lambda c: c.sendall(OK + b"X: " + b"a" * 70_000 + b"\r\n\r\n"), "no HTTP answer"),
    (lambda c: c.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"), "302"),
    (lambda c: None, ""), (drip, "not whole"), (endless, "longer than"),
])  # fmt: skip
def test_whatever_answers_is_an_error_of_the_channel(answer, said):
    with wire(answer) as url:
        started = time.monotonic()
        with pytest.raises(OSError) as caught:
            fetch(url, 0.3)
    assert said in str(caught.value) and time.monotonic() - started < 20


def test_json_is_no_page_and_says_where_it_may_be():
    with pytest.raises(ValueError, match="/prometheus/metrics"):
        fields('[{"gpuMemUsage": 1}]')
